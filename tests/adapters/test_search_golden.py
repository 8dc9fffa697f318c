"""mctx's golden trees, grown by `search` with a module as parameters and a record as embedding.

mctx made them with another way of splitting keys, which can only be chosen for a whole process.
So this file, run as a program, prints the trees that differ; the test runs it.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from vernal.adapters.search import search
from vernal.adapters.search.untyped import mctx

FOLDER = Path(mctx.__file__).parent / "_src" / "tests" / "test_data"
NAMES = [
    "muzero_tree",
    "muzero_qtransform_tree",
    "gumbel_muzero_tree",
    "gumbel_muzero_reward_tree",
]
TREES = 3
# Half of the time here is compilation.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=[])
@dataclasses.dataclass
class State:
    """All that a state is, here: a key, from which its numbers are drawn."""

    key: Array


class Model(eqx.Module):
    """mctx's model of these trees, with an array and functions among its leaves."""

    num_actions: int
    pay: Array
    discount: float
    draw: Callable[..., Array] = jax.random.uniform

    def predict(self, state):
        policy_key, value_key, reward_key = jax.random.split(state.key, 3)
        value, reward = (self.draw(key, minval=-1.0, maxval=1.0) for key in (value_key, reward_key))
        return jax.random.normal(policy_key, (self.num_actions,)), value, reward


def step(model, key, action, state):
    """Where one action leads; written for one state."""
    state = State(jax.random.split(state.key, model.num_actions)[action])
    logits, value, reward = model.predict(state)
    return mctx.RecurrentFnOutput(
        reward=model.pay * reward,
        discount=jnp.float32(model.discount),
        prior_logits=logits,
        value=value,
    ), state


def grow(golden):
    """The tree that the file describes, as row 0 of a batch."""
    num_actions, num_simulations = len(golden["tree"]["child_stats"]), golden["tree"]["visit"] - 1
    knobs = dict(golden["algorithm_config"])
    transform = getattr(mctx, knobs.pop("qtransform"))
    knobs["qtransform"] = functools.partial(transform, **knobs.pop("qtransform_kwargs", {}))
    pay = 1.0 - golden["env_config"]["zero_reward"]
    model = Model(num_actions, jnp.array(pay), golden["env_config"]["discount"])
    keys = [jax.random.fold_in(jax.random.PRNGKey(0), i) for i in range(TREES)]
    states = State(jnp.stack([jax.random.PRNGKey(0), *keys[1:]]))
    logits, value, _ = jax.vmap(model.predict)(states)
    # The other rows have other masks and so other depths, which must not be seen in row 0.
    first = jnp.arange(num_actions)[None]
    legal = first < jnp.array([num_actions, 1, 2])[:, None]
    root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=states)
    output = search(
        model,
        jax.random.PRNGKey(1),
        root,
        step,
        num_simulations,
        legal,
        policy=golden["algorithm"],
        batched=False,
        **knobs,
    )
    return jax.tree.map(lambda x: np.asarray(x)[0], output.search_tree)


def nested(tree):
    """The tree as the file has it: each node inside its parent."""
    priors = np.asarray(jax.nn.softmax(tree.children_prior_logits))

    def node(index, edge):
        return {
            **edge,
            "visit": tree.node_visits[index],
            "value_view": tree.node_values[index],
            "raw_value_view": tree.raw_values[index],
            "evaluation_index": index,
            "child_stats": [child(index, action) for action in range(priors.shape[1])],
        }

    def child(index, action):
        edge = {"prior": priors[index, action], "action": action}
        arrival = tree.children_index[index, action]
        if arrival < 0:
            return {**edge, "child_stats": []}
        return node(arrival, {**edge, "reward": tree.children_rewards[index, action]})

    return node(0, {"prior": 1.0})


def differs(given: Any, wanted: Any) -> bool:
    """As mctx's own test compares: the same nodes in the same order, numbers within 0.001."""
    given_leaves, given_structure = jax.tree.flatten(given)
    wanted_leaves, wanted_structure = jax.tree.flatten(wanted)
    return given_structure != wanted_structure or not np.allclose(
        np.array(given_leaves, float), np.array(wanted_leaves, float), rtol=1e-6, atol=1e-3
    )


def compare(name):
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    return differs(nested(grow(golden)), golden["tree"])


@pytest.fixture(scope="module")
def different():
    """Names of the trees that differ."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_THREEFRY_PARTITIONABLE": "false",
        "XLA_FLAGS": QUICK,
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_golden_tree_of_mctx_is_grown_again(different, name):
    assert different[name] is False


if __name__ == "__main__":
    json.dump({name: compare(name) for name in NAMES}, sys.stdout)
