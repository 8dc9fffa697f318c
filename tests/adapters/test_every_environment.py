"""One contract for all of Jumanji's environments: copies equal plain loops over the raw one."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
import pytest

from vernal.adapters.environments import EnvState, Transition, VectorEnvironment, check_environment
from vernal.adapters.evaluation import make_random_policy
from vernal.adapters.registry import make_environment

from .environments_for_tests import (
    OFFLINE,
    SMALL,
    assert_trees_close,
    make_once,
    make_small,
    play_by_hand,
    quick_jit,
)

KEY = jax.random.key(7)
STEPS, COPIES = 24, 2
WITHOUT_MASK = {"RubiksCube-v0", "SearchAndRescue-v0", "Sokoban-v0"}

pytestmark = pytest.mark.filterwarnings(
    "ignore:scatter inputs have incompatible types:FutureWarning"
)


class Walk(NamedTuple):
    """All that was met on `STEPS` steps; leading axes `[STEPS, COPIES]`, but for `first`."""

    first: EnvState
    actions: Any
    states: EnvState
    transitions: Transition


@pytest.fixture(autouse=True)
def _ranks_may_differ():
    with jax.numpy_rank_promotion("allow"):  # inside some of Jumanji's environments
        yield


@functools.cache
def walk(name):
    environment = make_small(name)
    envs = VectorEnvironment(environment, COPIES, queue_length=1)
    act = jax.vmap(make_random_policy(environment))

    def step(state, key):
        actions = act(jax.random.split(key, COPIES), state.observations)
        state, transition = envs.step(state, actions)
        return state, (actions, state, transition)

    def walk():
        first = envs.init(KEY)
        return Walk(first, *jax.lax.scan(step, first, jax.random.split(KEY, STEPS))[1])

    return quick_jit(walk)()


@functools.cache
def by_hand(name):
    """What the same actions bring in a plain loop, copies stacked as in a walk."""
    actions = np.asarray(walk(name).actions)
    loops = [play_by_hand(make_small(name), KEY, n, actions[:, n]) for n in range(COPIES)]
    rows, seen, first = zip(*loops, strict=True)
    return stack(rows, axis=1), stack(seen, axis=1), stack(first, axis=0)


def stack(trees, axis):
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis), *trees)


@pytest.fixture(scope="module", params=SMALL)
def name(request):
    """One after the other, so that each is compiled by one test process only."""
    return request.param


def test_every_class_of_environment_takes_part():
    registered = jumanji.registered_environments()
    assert {n.partition("-")[0] for n in SMALL} == {n.partition("-")[0] for n in registered}


def test_every_copy_meets_ends(name):
    assert walk(name).transitions.resets.sum(axis=0).min() >= 1


def test_transitions_equal_a_plain_loop(name):
    expected, _, _ = by_hand(name)
    transitions = walk(name).transitions
    assert_trees_close({field: getattr(transitions, field) for field in expected}, expected)


def test_what_is_seen_next_equals_a_plain_loop(name):
    assert_trees_close(walk(name).states.observations, by_hand(name)[1])


def test_what_is_seen_first_equals_a_plain_loop(name):
    assert_trees_close(walk(name).first.observations, by_hand(name)[2])


def test_a_step_keeps_every_structure_shape_and_dtype(name):
    envs = VectorEnvironment(make_small(name), COPIES, queue_length=1)
    before = jax.eval_shape(envs.init, KEY)
    after, _ = jax.eval_shape(envs.step, before, walk(name).actions[0])
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def test_what_is_seen_has_the_dtypes_of_the_raw_environment(name):
    ours, raw = walk(name).states.observations, by_hand(name)[1]
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(raw), strict=True):
        assert a.dtype == b.dtype


def test_what_a_step_brings_is_one_number_for_each_copy(name):
    transitions = walk(name).transitions
    for field, dtype in {
        "rewards": "float32",
        "discounts": "float32",
        "terminated": "bool",
        "truncated": "bool",
        "episode_returns": "float32",
        "episode_lengths": "int32",
    }.items():
        array = getattr(transitions, field)
        assert (array.shape, array.dtype, array.weak_type) == ((STEPS, COPIES), dtype, False)


def test_actions_are_within_the_spec(name):
    spec = make_small(name).action_spec
    for action in np.asarray(walk(name).actions).reshape(-1, *spec.shape):
        spec.validate(action)


def test_actions_are_legal_wherever_one_is(name):
    walked, spec = walk(name), make_small(name).action_spec
    if name in WITHOUT_MASK:
        assert not hasattr(walked.first.observations, "action_mask")
        return
    first, later = walked.first.observations.action_mask, walked.states.observations.action_mask
    masks = np.concatenate([first[None], later[:-1]]).reshape(-1, *first.shape[1:])
    actions = np.asarray(walked.actions).reshape(len(masks), -1)
    choices = tuple(np.ravel(getattr(spec, "num_values", ())))
    for mask, action in zip(masks, actions, strict=True):
        if mask.shape == choices:
            assert mask[tuple(action)] or not mask.any()
        else:
            for row, component in zip(mask, action, strict=True):
                assert row[component] or not row.any()


@pytest.mark.parametrize("full_size", OFFLINE)
def test_environments_of_full_size_pass_the_check(full_size):
    check_environment(make_once(full_size))


def refusal(environment):
    """What is said against it, if anything is."""
    try:
        check_environment(environment)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("full_size", OFFLINE)
def test_in_64_bit_mode_each_works_or_is_refused_in_a_sentence(full_size):
    with jax.enable_x64(True):
        environment = make_environment(full_size)
        if sentence := refusal(environment):
            assert sentence.startswith(f"{type(environment).__name__} cannot take one step")
            assert sentence.endswith("64-bit mode (jax_enable_x64) is on, switch it off.")
            return
        envs = VectorEnvironment(environment, COPIES, queue_length=1)
        actions = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (STEPS, COPIES, *x.shape)),
            environment.action_spec.generate_value(),
        )
        state = jax.eval_shape(envs.init, KEY)
        after, _ = jax.eval_shape(functools.partial(jax.lax.scan, envs.step), state, actions)
        assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_in_64_bit_mode_some_work_and_some_are_refused():
    with jax.enable_x64(True):
        assert refusal(make_environment("TSP-v1")) is None
        assert "step changes" in (refusal(make_environment("JobShop-v0")) or "")
        assert "lax.select" in (refusal(make_environment("Maze-v0")) or "")
