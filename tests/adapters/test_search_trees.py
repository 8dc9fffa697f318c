"""Trees of `search`: mctx's own, under every transformation; and what it refuses.

The model is a table of states, so its numbers are the same in whatever order they are computed,
and trees are compared bit by bit. Run as a program, this file prints what holds on four devices.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from vernal.adapters.modules import pack, unpack
from vernal.adapters.search import (
    legal_actions,
    qtransform_completed_by_mix_value,
    search,
    search_values,
)
from vernal.adapters.search.selection import draw_by_visits
from vernal.adapters.search.untyped import mctx
from vernal.core import mask_logits

from .environments_for_tests import under_checks_of_jax

STATES, ACTIONS, OUTCOMES, TREES, SIMULATIONS = 32, 4, 3, 8, 16
KEY = jax.random.key(5)
POLICIES = ["gumbel_muzero", "muzero", "stochastic_muzero"]
# Compiled with little effort: most of the time here is compilation.
jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


class Table(eqx.Module):
    """A model by state, or by state and action; a function among its leaves, as in a network."""

    arrivals: Array
    rewards: Array
    discounts: Array
    logits: Array
    values: Array
    chances: Array
    noise: Array
    activation: Callable[[Array], Array] = jax.nn.relu


def make_table(seed=0):
    rng = np.random.default_rng(seed)
    edges = (STATES, ACTIONS)
    return Table(
        arrivals=jnp.asarray(rng.integers(0, STATES, edges), jnp.int32),
        rewards=jnp.asarray(rng.normal(size=edges), jnp.float32),
        discounts=jnp.asarray(rng.choice([0.0, 0.9, 1.0], edges, p=[0.1, 0.6, 0.3]), jnp.float32),
        logits=jnp.asarray(rng.normal(size=edges), jnp.float32),
        values=jnp.asarray(rng.normal(size=STATES), jnp.float32),
        chances=jnp.asarray(rng.normal(size=(STATES, OUTCOMES)), jnp.float32),
        noise=jnp.array(0),
    )


TABLE = make_table()
NOISY = eqx.tree_at(lambda table: table.noise, TABLE, jnp.array(2))
LEGAL = jnp.asarray(np.random.default_rng(1).random((TREES, ACTIONS)) < 0.6).at[:, 2].set(True)
ALL_LEGAL = jnp.ones((TREES, ACTIONS), bool)


def step(table, key, actions, states):
    jump = jax.random.randint(key, states.shape, 0, table.noise + 1)
    arrivals = (table.arrivals[states, actions] + jump) % STATES
    return mctx.RecurrentFnOutput(
        reward=table.activation(table.rewards)[states, actions],
        discount=table.discounts[states, actions],
        prior_logits=table.logits[arrivals],
        value=table.values[arrivals],
    ), arrivals


def decide(table, key, actions, states):
    # What does not exist leads to state -1, and so can be seen.
    afterstates = jnp.where(actions < ACTIONS, table.arrivals[states, actions], -1)
    return mctx.DecisionRecurrentFnOutput(
        chance_logits=table.chances[afterstates], afterstate_value=table.values[afterstates]
    ), {"afterstate": afterstates}


def take_chance(table, key, outcomes, nodes):
    afterstates = nodes["afterstate"]
    jump = jax.random.randint(key, outcomes.shape, 0, table.noise + 1)
    arrivals = (afterstates * OUTCOMES + outcomes + 1 + jump) % STATES
    arrivals = jnp.where(outcomes >= 0, arrivals, -1)
    return mctx.ChanceRecurrentFnOutput(
        action_logits=table.logits[arrivals],
        value=table.values[arrivals],
        reward=table.rewards[arrivals, 0],
        discount=table.discounts[arrivals, 1],
    ), arrivals


MODELS: dict[str, Any] = {
    "gumbel_muzero": step,
    "muzero": step,
    "stochastic_muzero": (decide, take_chance),
}
TRANSFORMS: dict[str, Any] = {
    "gumbel_muzero": qtransform_completed_by_mix_value,
    "muzero": mctx.qtransform_by_parent_and_siblings,
    "stochastic_muzero": mctx.qtransform_by_parent_and_siblings,
}
GUMBEL: dict[str, Any] = {"gumbel_scale": 1.0}
PUCT: dict[str, Any] = {
    "dirichlet_fraction": 0.25,
    "dirichlet_alpha": 0.3,
    "pb_c_init": 1.25,
    "pb_c_base": 19652.0,
    "temperature": 1.0,
}
DEFAULTS: dict[str, Any] = {"gumbel_muzero": GUMBEL, "muzero": PUCT, "stochastic_muzero": PUCT}
OTHERS: dict[str, Any] = {
    "gumbel_muzero": {"gumbel_scale": 0.3},
    "muzero": PUCT | {"dirichlet_fraction": 0.5, "pb_c_init": 3.0, "pb_c_base": 9.0},
    "stochastic_muzero": PUCT | {"dirichlet_alpha": 2.0, "pb_c_init": 3.0, "temperature": 0.2},
}
NO_NOISE: dict[str, Any] = {"gumbel_scale": 0.0}


def root_of(table, states, legal=None):
    logits = table.logits[states]
    logits = logits if legal is None else mask_logits(logits, legal)
    return mctx.RootFnOutput(prior_logits=logits, value=table.values[states], embedding=states)


ROOT = root_of(TABLE, jnp.arange(TREES))


def run(
    table=TABLE,
    root=ROOT,
    legal=ALL_LEGAL,
    key=KEY,
    knobs=NO_NOISE,
    policy="gumbel_muzero",
    max_depth=None,
    slice_size=None,
):
    """Our search, compiled once for each policy: all arguments but the last three are traced."""
    return compiled_search(pack(table), root, legal, key, knobs, policy, max_depth, slice_size)


@functools.partial(jit, static_argnums=(5, 6, 7))
def compiled_search(table, root, legal, key, knobs, policy, max_depth, slice_size):
    return search(
        table,
        key,
        root,
        MODELS[policy],
        SIMULATIONS,
        legal,
        policy=policy,
        max_depth=max_depth,
        slice_size=slice_size,
        **knobs,
    )


@functools.partial(jit, static_argnums=(5, 6))
def run_mctx(table, root, legal, key, knobs, policy, max_depth):
    """mctx by hand."""
    functions = MODELS[policy] if isinstance(MODELS[policy], tuple) else (MODELS[policy],)
    return getattr(mctx, f"{policy}_policy")(
        unpack(table),
        key,
        root,
        *functions,
        SIMULATIONS,
        invalid_actions=~legal,
        max_depth=max_depth,
        qtransform=TRANSFORMS[policy],
        **knobs,
    )


def run_default(policy, table=TABLE, root=ROOT, legal=ALL_LEGAL):
    """With the policy's default knobs."""
    return run(table, root, legal, knobs=DEFAULTS[policy], policy=policy)


def assert_same(given, wanted):
    jax.tree.map(np.testing.assert_array_equal, given, wanted)


def assert_near(given, wanted):
    """As `assert_same`, for programs compiled otherwise: numbers may differ in their last bits."""

    def check(given, wanted):
        tolerance = 1e-5 if jnp.issubdtype(wanted.dtype, jnp.floating) else 0
        np.testing.assert_allclose(given, wanted, rtol=tolerance, atol=tolerance)

    jax.tree.map(check, given, wanted)


def row(output, index):
    return jax.tree.map(lambda x: x[index], output)


def without_unused_halves(output):
    """A node is of a state or of an afterstate; the other half of its embedding is never read."""
    nodes = output.search_tree.embeddings
    decides = nodes.is_decision_node
    state = jnp.where(decides, nodes.state_embedding, 0)
    afterstate = jnp.where(decides, 0, nodes.afterstate_embedding["afterstate"])
    tree = output.search_tree.replace(embeddings=(decides, state, afterstate))
    return output.replace(search_tree=tree)


# The trees are mctx's.


@pytest.mark.parametrize(
    ("policy", "max_depth"),
    [*((policy, None) for policy in POLICIES), ("gumbel_muzero", 3)],
)
@pytest.mark.parametrize(
    ("legal", "knobs"),
    [(ALL_LEGAL, DEFAULTS), (LEGAL, DEFAULTS), (ALL_LEGAL, OTHERS)],
    ids=["all-legal", "root-masks", "other-knobs"],
)
def test_trees_are_those_of_mctx(policy, max_depth, legal, knobs):
    root = root_of(TABLE, ROOT.embedding, legal)
    given = run(NOISY, root, legal, KEY, knobs[policy], policy, max_depth)
    wanted = run_mctx(pack(NOISY), root, legal, KEY, knobs[policy], policy, max_depth)
    if policy == "stochastic_muzero":
        given, wanted = map(without_unused_halves, (given, wanted))
    assert_same(given, wanted)


@pytest.mark.parametrize("policy", ["gumbel_muzero", "stochastic_muzero"])
def test_sliced_search_grows_the_same_trees_but_keeps_no_states(policy):
    whole = run_default(policy)
    sliced = run(knobs=DEFAULTS[policy], policy=policy, slice_size=2)
    assert sliced.search_tree.embeddings is None
    assert_same(sliced, whole.replace(search_tree=whole.search_tree.replace(embeddings=None)))


# The same under every transformation.


def search_one(table, key, root, **knobs):
    return search(table, key, root, step, SIMULATIONS, batched=False, **knobs)


def test_single_root_gives_the_row_of_a_batch():
    given = jit(functools.partial(search_one, **NO_NOISE))(pack(TABLE), KEY, row(ROOT, 3))
    assert_near(given, row(run(), 3))


def test_nested_vmap_over_single_roots_gives_the_rows_of_a_batch():
    def search_row(root):
        return search_one(TABLE, KEY, root, **NO_NOISE)

    squares = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), ROOT)
    given = jit(jax.vmap(jax.vmap(search_row)))(squares)
    assert_near(jax.tree.map(lambda x: x.reshape(TREES, *x.shape[2:]), given), run())


def test_vmap_over_roots_keys_and_knobs_gives_the_trees_of_mctx():
    @functools.partial(jit, static_argnames="engine")
    def run_rows(table, keys, roots, weights, *, engine):
        def search_row(key, root, weight):
            knobs = {"policy": "muzero", "pb_c_init": weight, "engine": engine}
            return search_one(table, key, root, **knobs)

        return jax.vmap(search_row)(keys, roots, weights)

    arguments = pack(NOISY), jax.random.split(KEY, TREES), ROOT, jnp.linspace(0.5, 4, TREES)
    assert_same(run_rows(*arguments, engine="vernal"), run_rows(*arguments, engine="mctx"))


def test_module_may_change_in_the_carry_of_a_scan():
    def advance(table, states, output):
        table = eqx.tree_at(lambda table: table.values, table, -table.values)
        return table, table.arrivals[states, output.action]

    def body(carry, key):
        table, states = carry
        output = search(table, key, root_of(unpack(table), states), step, SIMULATIONS, **NO_NOISE)
        table, states = advance(unpack(table), states, output)
        return (pack(table), states), output

    keys = jax.random.split(KEY, 3)
    _, given = jit(lambda table: jax.lax.scan(body, (table, ROOT.embedding), keys))(pack(TABLE))
    table, states, outputs = TABLE, ROOT.embedding, []
    for key in keys:
        outputs.append(run(table, root_of(table, states), key=key))
        table, states = advance(table, states, outputs[-1])
    assert_near(given, jax.tree.map(lambda *rows: jnp.stack(rows), *outputs))


def test_filter_jit_takes_the_module_as_it_is():
    given = eqx.filter_eval_shape(eqx.filter_jit(search), TABLE, KEY, ROOT, step, SIMULATIONS)
    assert given.action.shape == (TREES,)


def test_old_style_key_gives_the_same():
    assert_near(run(key=jax.random.PRNGKey(5)), run())


@pytest.fixture(scope="module")
def eager():
    """Two eager searches: the first one's output, and how often each called the model."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return step(*arguments)

    output = search(TABLE, KEY, ROOT, counted, SIMULATIONS)
    first = len(calls)
    states = ROOT.embedding + 1
    search(make_table(1), jax.random.key(6), root_of(TABLE, states), counted, SIMULATIONS)
    return output, first, len(calls) - first


def test_eager_search_gives_the_same(eager):
    assert_near(eager[0], run_default("gumbel_muzero"))


def test_eager_search_is_traced_once_for_other_numbers_too(eager):
    assert (eager[1] > 0, eager[2]) == (True, 0)


def test_policy_may_be_given_as_the_function_of_mctx():
    output = jax.eval_shape(
        lambda: search(TABLE, KEY, ROOT, step, 2, policy=mctx.muzero_policy, temperature=0.0)
    )
    assert output.search_tree.extra_data is None  # Gumbel's would be its noise.


def test_policy_that_is_not_known_here_gets_its_own_loop(monkeypatch):
    def policy(params, rng_key, root, recurrent_fn, num_simulations, *, fresh, **given):
        assert "loop_fn" not in given
        return mctx.PolicyOutput(
            action=jnp.argmax(root.prior_logits, -1), action_weights=fresh, search_tree=None
        )

    monkeypatch.setattr(mctx, "new_policy", policy, raising=False)
    output = search(TABLE, KEY, ROOT, step, 2, policy="new", fresh=ROOT.prior_logits)
    assert_same(output.action, jnp.argmax(ROOT.prior_logits, -1))


# Embeddings.


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["number", "key"], meta_fields=["size"]
)
class Record:
    """What a user's own class may look like."""

    def __init__(self, number, key, size):
        self.number, self.key, self.size = number, key, size


class Board(eqx.Module):
    """A state with a function, a Python number and nothing among its leaves."""

    record: Record
    rule: Callable[..., Any]
    komi: float
    nothing: None = None


def test_embedding_may_be_a_module_with_functions_keys_and_numbers():
    def step_board(table, key, action, board):
        output, number = board.rule(table, key, action, board.record.number)
        record = Record(number, jax.random.split(board.record.key)[0], board.record.size)
        return output.replace(value=output.value + board.komi), Board(record, step, 0.0)

    def root_board(states):
        record = Record(states, jax.random.split(KEY, TREES), "19x19")
        return ROOT.replace(embedding=Board(record, step, 0.0))

    @jit
    def run_boards(table, states):
        root = root_board(states)
        return search(table, KEY, root, step_board, SIMULATIONS, batched=False, **NO_NOISE)

    given = run_boards(pack(TABLE), ROOT.embedding)
    boards = given.search_tree.embeddings
    assert (boards.rule, boards.komi, boards.record.size) == (None, None, "19x19")
    tree = given.search_tree.replace(embeddings=boards.record.number)
    assert_near(given.replace(search_tree=tree), run())


# What a search must never do.


@pytest.mark.parametrize("policy", POLICIES)
def test_root_visits_add_up_to_the_simulations(policy):
    visits = run_default(policy).search_tree.summary().visit_counts
    assert visits.sum(-1).tolist() == [SIMULATIONS] * TREES


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_do_not_influence_one_another(policy):
    changed = root_of(TABLE, jnp.array([0, *range(20, 20 + TREES - 1)]))
    legal = LEGAL.at[0].set(True)
    given, wanted = run_default(policy, root=changed, legal=legal), run_default(policy)
    assert not np.array_equal(given.action_weights[1:], wanted.action_weights[1:])
    assert_same(row(given, 0), row(wanted, 0))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("masked", [-jnp.inf, -1e9, np.finfo(np.float32).min])
def test_search_visits_no_illegal_action_at_any_node(policy, masked):
    legal = jnp.asarray(np.random.default_rng(2).random((STATES, ACTIONS)) < 0.5).at[:, 1].set(True)
    # Illegal actions would pay best.
    table = eqx.tree_at(
        lambda table: (table.logits, table.rewards),
        TABLE,
        (jnp.where(legal, TABLE.logits, masked), jnp.where(legal, TABLE.rewards, 100)),
    )
    root = root_of(table, ROOT.embedding)
    tree = run_default(policy, table, root, legal[ROOT.embedding]).search_tree
    nodes = tree.embeddings
    decides, states = tree.node_visits > 0, nodes
    if policy == "stochastic_muzero":
        decides, states = nodes.is_decision_node, nodes.state_embedding
    edges = (tree.children_visits > 0) & decides[..., None]
    assert edges[:, 1:].any()
    assert not (edges & ~legal[states]).any()


@pytest.mark.parametrize("policy", POLICIES)
def test_root_with_nothing_legal_is_searched_as_if_all_were(policy):
    legal = ALL_LEGAL.at[2].set(False)
    assert_same(run_default(policy, legal=legal).action, run_default(policy).action)


def test_root_whose_logits_are_all_minus_infinity_is_searched_as_uniform():
    endless, uniform = (
        run(root=ROOT.replace(prior_logits=ROOT.prior_logits.at[2].set(logit)))
        for logit in (-jnp.inf, 0.0)
    )
    assert_same(endless.action_weights, uniform.action_weights)


@pytest.mark.parametrize("policy", ["gumbel_muzero", "muzero"])
def test_nan_behind_an_end_does_not_reach_the_root(policy):
    behind = jnp.arange(STATES) >= 24
    table = eqx.tree_at(
        lambda table: (table.discounts, table.rewards, table.values, table.logits),
        TABLE,
        (
            jnp.where(behind[TABLE.arrivals], 0, TABLE.discounts),
            jnp.where(behind[:, None], jnp.nan, TABLE.rewards),
            jnp.where(behind, jnp.nan, TABLE.values),
            jnp.where(behind[:, None], jnp.nan, TABLE.logits),
        ),
    )
    clean = jax.tree.map(lambda x: jnp.nan_to_num(x) if eqx.is_array(x) else x, table)
    given, wanted = run_default(policy, table), run_default(policy, clean)
    assert (given.search_tree.embeddings >= 24).any()
    assert_same(given.search_tree.summary(), wanted.search_tree.summary())
    assert_same(given.action_weights, wanted.action_weights)


def test_nan_behind_an_end_does_not_reach_the_root_of_a_stochastic_model():
    behind = jnp.arange(STATES) >= 24
    table = eqx.tree_at(
        lambda table: (table.arrivals, table.discounts, table.values, table.logits),
        TABLE,
        (
            TABLE.arrivals % 24,  # States before chance go on.
            jnp.where(behind[:, None], 0, TABLE.discounts),
            jnp.where(behind, jnp.nan, TABLE.values),
            jnp.where(behind[:, None], jnp.nan, TABLE.logits),
        ),
    )
    clean = jax.tree.map(lambda x: jnp.nan_to_num(x) if eqx.is_array(x) else x, table)
    given, wanted = (run_default("stochastic_muzero", x) for x in (table, clean))
    ended = given.search_tree.embeddings.state_embedding >= 24
    assert (ended & given.search_tree.embeddings.is_decision_node).any()
    assert_same(given.search_tree.summary(), wanted.search_tree.summary())


def test_stochastic_model_is_asked_only_for_actions_and_outcomes_that_exist():
    nodes = run_default("stochastic_muzero").search_tree.embeddings
    assert (nodes.state_embedding >= 0).all()
    assert (nodes.afterstate_embedding["afterstate"] >= 0).all()


def test_result_has_no_gradient():
    @jit
    def gradient(table, root):
        def total(numbers):
            table, root = numbers
            output = search(table, KEY, root, step, SIMULATIONS)
            return output.action_weights.sum() + output.search_tree.node_values.sum()

        return eqx.filter_grad(total)((unpack(table), root))

    gradients = [np.asarray(x) for x in jax.tree.leaves(gradient(pack(TABLE), ROOT))]
    assert len(gradients) == 7
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("policy", POLICIES)
def test_network_in_half_precision_grows_a_float32_tree(policy):
    half = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, (TABLE, ROOT)
    )
    output = jax.eval_shape(
        lambda table, root: search(
            unpack(table), KEY, root, MODELS[policy], SIMULATIONS, policy=policy
        ),
        pack(half[0]),
        half[1],
    )
    floats = [x.dtype for x in jax.tree.leaves(output) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert set(floats) == {jnp.dtype(jnp.float32)}


# Actions are drawn by visits.

TEMPERATURES = [0.0, 1e-30, 0.5, 1.0, 10.0, 1e30, np.inf]
draw = jit(draw_by_visits)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_actions_are_drawn_in_proportion_to_a_power_of_their_visits(temperature):
    visits = np.array([0.0, 1, 2, 12, 1, 0, 0, 0])
    powers = visits.astype(bool) * visits ** (1 / max(temperature, 1e-2))
    wanted = np.asarray(powers / powers.sum())
    shares = jnp.broadcast_to(jnp.float32(visits / visits.sum()), (20_000, len(visits)))
    actions = np.asarray(draw(KEY, shares, temperature))
    given = np.bincount(actions, minlength=len(visits)) / len(actions)
    assert (given[visits == 0] == 0).all()
    np.testing.assert_allclose(given, wanted, atol=0.015)  # four standard errors


@pytest.mark.parametrize("policy", ["muzero", "stochastic_muzero"])
def test_no_temperature_makes_an_action_without_visits_likely(policy):
    # All of its noise may go to actions that are illegal.
    knobs = PUCT | {"temperature": 1e9, "dirichlet_fraction": 1.0}
    legal = jnp.zeros((TREES, ACTIONS), bool).at[:, 2].set(True)
    root = root_of(TABLE, ROOT.embedding, legal)
    for seed in range(4):
        output = run(TABLE, root, legal, jax.random.key(seed), knobs, policy)
        assert (output.action == 2).all()
        assert_same(output.action_weights, legal.astype(float))


# Numbers of whatever kind.

WHOLE: dict[str, Any] = {
    "dirichlet_fraction": 0,
    "dirichlet_alpha": 1,
    "pb_c_init": 2,
    "pb_c_base": 128,
    "temperature": 1,
}
KINDS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "np.int32": np.int32,
    "np.uint8": np.uint8,
    "np.float64": np.float64,
    "array of NumPy": np.array,
    "int32": jnp.int32,
    "bfloat16": jnp.bfloat16,
}


@functools.cache
def with_knobs(policy, kind):
    """Eagerly, so that what is the same program is compiled once."""
    whole = {"gumbel_scale": 1, "max_num_considered_actions": 3}
    knobs = {n: KINDS[kind](x) for n, x in (WHOLE if policy == "muzero" else whole).items()}
    if policy != "muzero":
        knobs["max_num_considered_actions"] = np.int64(3) if kind == "np.int32" else 3
    return search(TABLE, KEY, ROOT, step, 3, policy=policy, **knobs)


@pytest.mark.parametrize("policy", ["gumbel_muzero", "muzero"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_knob_may_be_a_number_of_any_kind(policy, kind):
    assert_same(with_knobs(policy, kind), with_knobs(policy, "np.float64"))


def test_a_knob_may_be_a_traced_integer():
    numbers = jax.tree.map(jnp.int32, WHOLE)
    output = jax.eval_shape(
        lambda numbers: search(TABLE, KEY, ROOT, step, 3, policy="muzero", **numbers), numbers
    )
    assert output.action.shape == (TREES,)


# The checks that JAX has.


class Chancy(eqx.Module):
    """A state that holds its own random key."""

    number: Array
    key: Array


def chancy(function):
    """The model, of one state, over such states."""

    def stepped(table, key, action, state):
        key, _ = jax.random.split(key)
        output, number = function(table, key, action, state.number)
        return output, Chancy(number, jax.random.split(state.key)[0])

    return stepped


@under_checks_of_jax
@pytest.mark.parametrize("policy", ["gumbel_muzero", "stochastic_muzero"])
def test_checks_of_jax_find_nothing(policy, check):
    def search_all(key, table):
        keys, search_key = jax.random.split(key, TREES), jax.random.fold_in(key, 0)
        root = ROOT.replace(embedding=Chancy(ROOT.embedding, keys))
        functions = MODELS[policy] if isinstance(MODELS[policy], tuple) else (MODELS[policy],)
        # Known to the function alone.
        known = [
            chancy(lambda _, *rest, f=function: f(unpack(table), *rest)) for function in functions
        ]
        model = known if len(known) > 1 else known[0]
        knobs: Any = {"policy": policy, "batched": False}
        whole = search(None, search_key, root, model, 2, **knobs)
        sliced = search(None, jax.random.clone(search_key), root, model, 2, slice_size=2, **knobs)
        single = jax.vmap(lambda root, key: search(None, key, root, model, 2, **knobs))(
            root, jax.random.split(jax.random.fold_in(key, 1), TREES)
        )
        return whole, sliced, single, search_values(whole)

    with check():
        whole, *_ = jax.eval_shape(jax.jit(search_all), KEY, pack(TABLE))
    keys = whole.search_tree.embeddings
    keys = keys.state_embedding.key if policy == "stochastic_muzero" else keys.key
    assert keys.dtype == KEY.dtype


# What is refused, by a sentence.


def changed(**fields):
    """The model with other fields of its step; `arrivals` are the states."""

    def changed_step(*arguments):
        output, arrivals = step(*arguments)
        fields_now = {name: change(output[name]) for name, change in fields.items()}
        return output.replace(**fields_now), arrivals

    return changed_step


def chance_with_float_states(*arguments):
    output, arrivals = take_chance(*arguments)
    return output, arrivals * 1.0


def decide_with_one_axis_more(*arguments):
    output, afterstates = decide(*arguments)
    return output.replace(chance_logits=output.chance_logits[..., None]), afterstates


STOCHASTIC: dict[str, Any] = {"policy": "stochastic_muzero"}
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"policy": "alphazero"},
        ValueError,
        r"there is no policy 'alphazero' in mctx; choose of .*stochastic_muzero",
    ),
    ({"num_simulations": 0}, ValueError, "num_simulations should be 1 at least, but is 0"),
    ({"num_simulations": True}, TypeError, "num_simulations should be a Python int, .* bool True"),
    ({"max_depth": True}, TypeError, "max_depth should be a Python int, .* but is the bool True"),
    ({"slice_size": True}, TypeError, "slice_size should be a Python int, .* but is the bool True"),
    (
        {"max_num_considered_actions": 2.0},
        TypeError,
        "max_num_considered_actions should be a Python int, .* but is the float 2.0",
    ),
    (
        {"max_num_considered_actions": 0},
        ValueError,
        "max_num_considered_actions should be 1 at least, but is 0",
    ),
    ({"gumbel_scale": True}, TypeError, "gumbel_scale should be a number, but is the bool True"),
    ({"gumbel_scale": 1j}, TypeError, "gumbel_scale should be a number, but is the complex 1j"),
    (
        {"gumbel_scale": jnp.ones(TREES)},
        TypeError,
        r"gumbel_scale should be a number, but is float32\[8\]",
    ),
    *(
        ({"policy": policy, name: value}, ValueError, f"{name} should be {wanted}, but is {value}")
        for policy, name, value, wanted in [
            ("gumbel_muzero", "gumbel_scale", -1, "0 or more"),
            ("gumbel_muzero", "gumbel_scale", np.nan, "0 or more"),
            ("muzero", "temperature", -0.5, "0 or more"),
            ("muzero", "temperature", jnp.float32(np.nan), "0 or more"),
            ("muzero", "dirichlet_fraction", 1.5, "from 0 to 1"),
            ("muzero", "dirichlet_alpha", 0, "above 0"),
            ("muzero", "pb_c_init", np.inf, "0 or more"),
            ("muzero", "pb_c_base", np.int32(0), "above 0"),
        ]
    ),
    ({"max_depth": -1}, ValueError, "max_depth should be 1 at least, but is -1"),
    ({"slice_size": 0}, ValueError, "slice_size should be 1 at least, but is 0"),
    ({"slice_size": 3}, ValueError, "slice_size is 3, which does not divide 8 roots"),
    (
        {"slice_size": 2, "engine": "mctx"},
        ValueError,
        "slice_size is for vernal's own loop, with gumbel_muzero, muzero, stochastic_muzero",
    ),
    ({"gumbel_scale": "a"}, TypeError, "gumbel_scale should be a number, but is the str 'a'"),
    ({"qtransform": None}, TypeError, "qtransform should be a function, but is a NoneType"),
    (
        {
            "root": ROOT.replace(prior_logits=jnp.full((8, 4), -jnp.inf).at[:, 0].set(0.0)),
            "legal": jnp.ones((8, 4), bool).at[:, 0].set(False),
        },
        ValueError,
        "legal leaves only actions that the logits of the root mask; true should mean legal",
    ),
    (
        {"root": jax.tree.map(lambda x: x[0], ROOT), "slice_size": 2},
        ValueError,
        "slice_size is for a batch of roots; leave it away for one",
    ),
    (
        {"recurrent_fn": None},
        TypeError,
        "gumbel_muzero wants a function, recurrent_fn, but recurrent_fn is a NoneType",
    ),
    (
        {"max_num_considered_actions": jnp.array(3)},
        TypeError,
        r"max_num_considered_actions should be a Python int, .* but is int32\[\]",
    ),
    (
        {"invalid_actions": ~LEGAL},
        TypeError,
        "in place of invalid_actions give legal, true where it is legal",
    ),
    (
        {"temperature": 1.0},
        TypeError,
        "the policy gumbel_muzero has no knob 'temperature'; it has qtransform, .*gumbel_scale",
    ),
    (
        {"root": (1, 2)},
        TypeError,
        "root should have prior_logits, value and embedding, but a tuple .* has no prior_logits",
    ),
    (
        {"root": ROOT.replace(prior_logits=LEGAL)},
        TypeError,
        r"root\.prior_logits should be Float\[Array, 'B A'\], but is bool\[8,4\]",
    ),
    (
        {"root": ROOT.replace(value=jnp.zeros((TREES, 1)))},
        TypeError,
        r"root\.value should be Float\[Array, 'B'\], but is float32\[8,1\]",
    ),
    (
        {"legal": LEGAL[0]},
        TypeError,
        r"legal should be Bool\[Array, 'B A'\], but is bool\[4\]",
    ),
    (
        {"root": ROOT.replace(embedding={"board": jnp.zeros(3)})},
        TypeError,
        r"root\.embedding\['board'\] should have 8 rows, as many as root.value, but is float32",
    ),
    (
        {"root": ROOT.replace(embedding=[object()])},
        TypeError,
        r"root\.embedding\[0\] is a object, whose arrays JAX cannot see; make its class an eqx",
    ),
    (
        STOCHASTIC,
        TypeError,
        "wants 2 functions, decision_recurrent_fn, chance_recurrent_fn, but recurrent_fn is the f",
    ),
    (
        {"recurrent_fn": lambda *arguments: step(*arguments)[0]},
        TypeError,
        "recurrent_fn should return a step and an embedding, but returns a RecurrentFnOutput of 4",
    ),
    (
        {"recurrent_fn": lambda *arguments: ((1.0, 2.0), arguments[3])},
        TypeError,
        "should return a step with reward, .*, value, but a tuple of 2 leaves has no reward",
    ),
    (
        {"recurrent_fn": changed(reward=lambda x: x[:, None])},
        TypeError,
        r"recurrent_fn: its reward should be Float\[Array, 'B'\], but is float32\[8,1\].*"
        "called for a batch of states; if it is written for one, say batched=False",
    ),
    (
        {"recurrent_fn": changed(prior_logits=lambda x: x[:, :2])},
        TypeError,
        r"its prior_logits should be .*, but is float32\[8,2\], .*root.prior_logits is float32\[8,",
    ),
    (
        {"recurrent_fn": changed(discount=lambda x: x > 0)},
        TypeError,
        r"its discount should be Float\[Array, 'B'\], but is bool\[8\]",
    ),
    (
        {"recurrent_fn": changed(value=lambda x: (x,))},
        TypeError,
        r"its value should be Float\[Array, 'B'\], but is a tuple of 1 leaves",
    ),
    (
        {"recurrent_fn": lambda *arguments: (step(*arguments)[0], arguments[3] * 1.0)},
        TypeError,
        r"recurrent_fn: the embedding's leaf at its root is float32\[8\], but .* left is int32\[8",
    ),
    (
        {**STOCHASTIC, "recurrent_fn": (decide_with_one_axis_more, take_chance)},
        TypeError,
        r"decision_recurrent_fn: its chance_logits should be .* is float32\[8,3,1\]",
    ),
    (
        {**STOCHASTIC, "recurrent_fn": (decide, chance_with_float_states)},
        TypeError,
        r"chance_recurrent_fn: the embedding's leaf at its root is float32\[8\]",
    ),
]


SOUND: dict[str, Any] = {
    "params": TABLE,
    "key": KEY,
    "root": ROOT,
    "recurrent_fn": step,
    "num_simulations": 2,
}


@pytest.mark.parametrize(("changes", "error", "sentence"), REFUSALS)
def test_what_would_go_wrong_is_refused_by_a_sentence(changes, error, sentence):
    with pytest.raises(error, match=r"search\(\): .*" + sentence):
        search(**(SOUND | changes))


# Many devices, and what the import hook of the tests says before `search` does.

ROWS = PartitionSpec("device")


def on_four_devices():
    """Yield what holds of sharded searches; this process must see four devices."""
    auto = jax.make_mesh((4,), ("device",), axis_types=(AxisType.Auto,))
    explicit = jax.make_mesh((4,), ("device",))
    quiet = {policy: knobs | {"dirichlet_fraction": 0.0} for policy, knobs in DEFAULTS.items()}
    quiet["gumbel_muzero"] = NO_NOISE
    wanted = {policy: run(knobs=quiet[policy], policy=policy) for policy in POLICIES[:2]}
    alike = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), ROOT)

    def is_right(output, policy="gumbel_muzero"):
        # muzero's action is drawn, from other keys on other devices.
        pairs = zip(
            *(jax.tree.leaves(x.search_tree) for x in (output, wanted[policy])), strict=True
        )
        return all(np.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in pairs)

    def has_own_noise(output):
        noise = output.search_tree.children_prior_logits[:, 0]
        if output.search_tree.extra_data is not None:
            noise = output.search_tree.extra_data.root_gumbel
        return len(np.unique(noise, axis=0)) == TREES

    def search_rows(policy):
        def run_rows(table, root, knobs):
            functions = MODELS[policy]
            return search(table, KEY, root, functions, SIMULATIONS, policy=policy, **knobs)

        return run_rows

    def over_devices(policy, **options):
        specs = (PartitionSpec(), ROWS, PartitionSpec())
        rows = search_rows(policy)
        return jax.jit(jax.shard_map(rows, mesh=auto, in_specs=specs, out_specs=ROWS, **options))

    def root_on(mesh):
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, ROWS)), ROOT)

    for policy in POLICIES[:2]:
        mapped = over_devices(policy)
        yield f"shard_map of {policy}", is_right(mapped(pack(TABLE), ROOT, quiet[policy]), policy)
        output = mapped(pack(TABLE), alike, DEFAULTS[policy])
        yield f"noise of {policy} on each device", has_own_noise(output)
    # JAX checks what varies over devices while it traces.
    shapes = jax.eval_shape(over_devices("stochastic_muzero"), pack(TABLE), ROOT, PUCT)
    yield "shard_map of stochastic_muzero", shapes.action.shape == (TREES,)
    output = over_devices("gumbel_muzero", check_vma=False)(pack(TABLE), ROOT, NO_NOISE)
    yield "shard_map without checks", is_right(output)

    parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), ROOT)
    output = jax.pmap(search_rows("gumbel_muzero"), in_axes=(None, 0, None))(
        pack(TABLE), parts, NO_NOISE
    )
    yield "pmap", is_right(jax.tree.map(lambda x: x.reshape(TREES, *x.shape[2:]), output))

    with jax.set_mesh(explicit):
        output = jax.jit(search_rows("muzero"))(pack(TABLE), root_on(explicit), quiet["muzero"])
    yield "jit over a mesh of explicit axes", is_right(output, "muzero")
    for name, mesh in {"explicit": explicit, "auto": auto}.items():
        output: Any = search(TABLE, KEY, root_on(mesh), step, SIMULATIONS, **NO_NOISE)
        yield f"eager over a mesh of {name} axes", is_right(output)
        yield f"result over {name} axes is sharded", output.action.sharding.spec == ROWS


# Where logits, values, states and the rest are: nowhere, whole on each device, or cut into rows.
# Every pair of places once.
PLACES = {"-": None, "whole": PartitionSpec(), "rows": ROWS}
PLACED = ["- - - -", "- whole whole whole", "- rows rows rows"]
PLACED += ["whole - whole rows", "whole whole rows -", "whole rows - whole"]
PLACED += ["rows - rows whole", "rows whole - rows", "rows rows whole -"]
EXPLICIT = jax.make_mesh((4,), ("device",))


def placed(tree, place):
    spec = PLACES[place]
    return tree if spec is None else jax.device_put(tree, NamedSharding(EXPLICIT, spec))


@pytest.mark.parametrize("places", PLACED)
def test_numbers_may_be_anywhere_on_a_mesh_of_explicit_axes(places):
    logits, value, states, others = places.split()
    root = ROOT.replace(
        prior_logits=placed(ROOT.prior_logits, logits),
        value=placed(ROOT.value, value),
        embedding=placed(ROOT.embedding, states),
    )
    whole = "whole" if others == "rows" else others
    table = jax.tree.map(lambda x: placed(x, others if x.ndim else whole), pack(TABLE))
    legal, key = placed(ALL_LEGAL, others), placed(KEY, whole)

    def search_all(table, root, legal, key):
        return search(table, key, root, step, 2, legal, **NO_NOISE)

    output = jax.eval_shape(jax.jit(search_all), table, root, legal, key)
    spec = output.action.sharding and output.action.sharding.spec
    assert spec == ROWS if "rows" in places else spec in (None, PartitionSpec(None))


def test_search_over_a_mesh_of_explicit_axes_is_that_of_one_device():
    root = ROOT.replace(embedding=placed(ROOT.embedding, "rows"))
    assert_near(run(root=root), run())


def test_arrays_of_such_a_mesh_that_are_closed_over_are_refused():
    table = jax.tree.map(lambda x: placed(x, "whole"), pack(TABLE))
    root = ROOT.replace(embedding=placed(ROOT.embedding, "rows"))
    with pytest.raises(ValueError, match=r"hand it those that it closes over as params\."):
        search(None, KEY, root, lambda _, *rest: step(unpack(table), *rest), 2)


UNHOOKED: dict[str, tuple[dict[str, Any], str]] = {
    "count": (
        {"num_simulations": 2.0},
        "search(): num_simulations should be a Python int, for the tree's size is fixed when the "
        "search is compiled, but is the float 2.0.",
    ),
    "traced count": (
        {"max_depth": jnp.array(2)},
        "search(): max_depth should be a Python int, for the tree's size is fixed when the "
        "search is compiled, but is int32[].",
    ),
    "engine": ({"engine": "fast"}, "search(): engine should be vernal or mctx, but is 'fast'."),
    "legal": (
        {"root": row(ROOT, 0), "legal": LEGAL[0] * 1.0},
        "search(): legal should be Bool[Array, 'A'], but is float32[4], where root.prior_logits "
        "is float32[4], root.value is float32[].",
    ),
}


def sentences():
    for name, (changes, _) in UNHOOKED.items():
        try:
            search(**(SOUND | changes))
        except (TypeError, ValueError) as error:
            yield name, str(error)


@pytest.fixture(scope="module")
def said():
    """What this file prints as a program of its own."""
    flags = (
        "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true"
    )
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.test_search_trees"],
        cwd=pathlib.Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sharded_searches_are_those_of_one_device(said):
    assert len(said["holds"]) == 12
    assert [claim for claim, holds in said["holds"].items() if not holds] == []


@pytest.mark.parametrize("name", UNHOOKED)
def test_refusal_without_the_hook_is_a_sentence(said, name):
    assert said["sentences"].get(name) == UNHOOKED[name][1]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_mask_in_any_precision_is_a_mask(dtype):
    legal = jnp.ones((8, 4), bool).at[:, 1].set(False)
    logits = mask_logits(jnp.zeros((8, 4), dtype), legal)
    assert legal_actions(logits)[0].tolist() == [True, False, True, True]
    output: Any = search(TABLE, KEY, ROOT.replace(prior_logits=logits), step, 8)
    assert (output.search_tree.children_visits[:, 0, 1] == 0).all()


if __name__ == "__main__":
    json.dump({"holds": dict(on_four_devices()), "sentences": dict(sentences())}, sys.stdout)
