"""What agents share of a network: how it is called, made, checked, and trained in any precision."""

import functools
import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vernal.adapters.actions import make_action_codec
from vernal.adapters.agents.alphazero import AlphaZeroConfig, make_alphazero
from vernal.adapters.agents.learner import (
    call_network,
    evaluate_policy,
    make_optimiser,
    static_part,
)
from vernal.adapters.agents.ppo import PPOConfig, PPOHyperparameters, make_ppo
from vernal.adapters.networks import make_spec_network
from vernal.adapters.runs.checkpoints import flatten

from .environments_for_tests import (
    CountingEnvironment,
    Observation,
    WithEmptyLeaf,
    quick_jit,
)

KEY = jax.random.key(0)
COUNTING = CountingEnvironment()
CODEC = make_action_codec(COUNTING)
SETTINGS = PPOConfig(envs=2, rollout_steps=4, minibatch_size=4, epochs=1, learning_rate=0.1)
SEARCHING = AlphaZeroConfig(
    envs=2, rollout_steps=4, minibatch_size=4, epochs=1, simulations=2, replay_iterations=1
)
NARROW = [jnp.bfloat16, jnp.float16]
narrow = pytest.mark.parametrize("dtype", NARROW)


class Linear(eqx.Module):
    """Works in the precision of its weights, and keeps the mean of the steps that it saw."""

    weight: Any
    seen: Any
    dtype: Any = eqx.field(static=True)

    def __init__(self, dtype, key):
        self.weight = jax.random.normal(key, (4, 2)).astype(dtype)
        self.seen = jnp.zeros((), dtype)
        self.dtype = dtype

    def __call__(self, observation):
        x = jnp.stack([observation.steps, jnp.ones_like(observation.steps)]).astype(self.dtype)
        *outputs, value = self.weight @ x
        return jnp.stack(outputs), value

    def with_statistics_of(self, observations):
        seen = jnp.mean(observations.steps.astype(float)).astype(self.dtype)
        return eqx.tree_at(lambda network: network.seen, self, seen)


@functools.cache
def after_an_iteration(dtype):
    """State of PPO before and after an iteration, and the metrics."""
    agent = make_ppo(COUNTING, functools.partial(Linear, dtype), SETTINGS)
    first = quick_jit(agent.init)(KEY, agent.hyperparameters)
    return first, *quick_jit(agent.step)(first)


@narrow
def test_weights_of_half_precision_learn_and_stay_so(dtype):
    first, state, _ = after_an_iteration(dtype)
    assert state.params.weight.dtype == state.params.seen.dtype == dtype
    assert (state.params.weight != first.params.weight).any()
    assert jnp.isfinite(state.params.weight).all()
    assert state.params.seen > 0


@narrow
def test_losses_and_adams_sums_are_float32_whatever_the_weights_are(dtype):
    _, state, metrics = after_an_iteration(dtype)
    for leaf in jax.tree.leaves((state.optimiser, state.returns, metrics.loss, metrics.first_loss)):
        assert leaf.dtype in (jnp.float32, jnp.int32)
        assert jnp.isfinite(leaf).all()


@narrow
def test_an_iteration_begins_with_the_same_loss_in_any_precision(dtype):
    exact, rough = (after_an_iteration(d)[2].first_loss for d in (jnp.float32, dtype))
    assert abs(rough.kl) < 1e-6
    np.testing.assert_allclose(rough.entropy, exact.entropy, atol=0.05)


@narrow
def test_what_a_network_of_half_precision_says_is_made_float32_at_once(dtype):
    network, seen = Linear(dtype, KEY), Observation(jnp.array(3), 0, jnp.ones(3, bool))
    outputs, value = network(seen)
    policy, _ = evaluate_policy(network, CODEC, seen)
    assert [x.dtype for x in call_network(network, seen)] == [jnp.float32] * 2
    np.testing.assert_array_equal(call_network(network, seen)[0], outputs.astype(jnp.float32))
    np.testing.assert_array_equal(call_network(network, seen)[1], value.astype(jnp.float32))
    assert policy.entropy().dtype == jnp.float32


NUMBERS = PPOHyperparameters(1e-2, 1e-7, 0.5, *[0.0] * 5)


def test_float32_is_trained_by_plain_adam_bit_for_bit():
    plain = optax.chain(
        optax.clip_by_global_norm(jnp.asarray(0.5)),
        optax.adam(jnp.asarray(1e-2), eps=jnp.asarray(1e-7)),
    )
    gradients = {"w": jax.random.normal(KEY, (3, 2)), "b": 1e-3 * jax.random.normal(KEY, (2,))}

    def two_steps(optimiser):
        """Both changes that the same gradients make, and the state after them."""
        first, state = optimiser.update(gradients, optimiser.init(gradients))
        return first, *optimiser.update(gradients, state)

    ours, theirs = two_steps(make_optimiser(NUMBERS)), two_steps(plain)
    # By the same paths, too: checkpoints name the arrays by them.
    jax.tree.map(np.testing.assert_array_equal, *map(flatten, (ours, theirs)))


@narrow
def test_many_small_steps_of_half_precision_are_those_of_float32_rounded(dtype):
    optimiser = make_optimiser(NUMBERS._replace(learning_rate=1e-4))
    first = {"w": jnp.array([2.0, -0.3, 1e-3, 0.0], dtype)}

    def descend(params):
        def step(carry, _):
            params, state = carry
            gradients = jax.tree.map(lambda x: (x - 3).astype(dtype).astype(x.dtype), params)
            change, state = optimiser.update(gradients, state)
            return (eqx.apply_updates(params, change), state), None

        (params, _), _ = jax.lax.scan(step, (params, optimiser.init(params)), length=300)
        return params["w"]

    rough = jax.jit(descend)(first)
    exact = jax.jit(descend)(jax.tree.map(lambda x: x.astype(jnp.float32), first))
    assert rough.dtype == dtype
    assert (jnp.abs(exact - first["w"].astype(jnp.float32)) > 0.02).all()
    spacing = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(rough.astype(jnp.float32), exact, rtol=spacing, atol=1e-3)


class Forgetful(Linear):
    def with_statistics_of(self, observations):
        return eqx.tree_at(lambda network: network.seen, self, jnp.mean(observations.steps * 1.0))


class Growing(Linear):
    def with_statistics_of(self, observations):
        return eqx.tree_at(lambda network: network.seen, self, observations.steps * 1.0)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Forgetful, r"\.seen should be bfloat16\[\], not float32\[\]"),
        (Growing, r"\.seen should be bfloat16\[\], not float32\[2\]"),
    ],
)
def test_statistics_of_another_shape_or_dtype_are_refused(kind, sentence):
    with pytest.raises(ValueError, match=f"after with_statistics_of differs from .*: {sentence}"):
        static_part(functools.partial(kind, jnp.bfloat16), COUNTING, CODEC)


# Without the check that the annotation says the same.
make_static = inspect.unwrap(static_part)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (Linear(jnp.float32, KEY), "is of type Linear; `lambda key: network` begins with one"),
        ("spec", r"a function from a key to a network, but it is of type str\."),
        (None, r"is of type NoneType\."),
        (lambda key: None, r"make_network should give a network, but it gives None\."),
        (lambda key: (jnp.zeros(3), jnp.zeros(())), "gives .*float32.3.*, .*float32"),
        (lambda key: {"w": "text"}, "gives .*'w': 'str'"),
    ],
)
def test_what_makes_no_network_is_refused_in_a_sentence(given, sentence):
    with pytest.raises(TypeError, match=sentence):
        make_static(given, COUNTING, CODEC)


@pytest.mark.parametrize(
    "given",
    [
        lambda key: Linear(jnp.float32, key),
        functools.partial(Linear, jnp.float32),
        eqx.Partial(lambda weight, key: Linear(jnp.float32, key), jnp.ones(3)),
        functools.partial(lambda network, key: network, Linear(jnp.float32, KEY)),
    ],
    ids=["function", "class", "module", "begun"],
)
def test_what_makes_a_network_is_taken(given):
    static_part(given, COUNTING, CODEC)


@pytest.mark.parametrize("given", ["Snake-v1", CountingEnvironment, object()])
def test_what_is_no_environment_is_refused_by_the_first_who_reads_it(given):
    with pytest.raises(ValueError, match="the environment "):
        inspect.unwrap(make_action_codec)(given)


@pytest.mark.parametrize("make", [make_ppo, make_alphazero])
def test_agents_learn_beside_leaves_without_elements(make):
    environment = WithEmptyLeaf()
    config = SETTINGS if make is make_ppo else SEARCHING
    agent = make(environment, make_spec_network(environment), config)
    state = jax.eval_shape(agent.init, KEY, agent.hyperparameters)
    after, _ = jax.eval_shape(agent.step, state)
    assert after.envs.observations.instance.shape == (2, 0, 3)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
