"""Vectorised environments: equal to a plain loop, whatever the queues and the neighbours."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji import specs
from jumanji.environments import Connector, Maze
from jumanji.environments.routing.connector.generator import UniformRandomGenerator
from jumanji.environments.routing.maze.generator import RandomGenerator
from jumanji.types import restart

from vernal.adapters.actions import make_action_codec
from vernal.adapters.environments import VectorEnvironment, check_environment, read_specs

from .environments_for_tests import (
    CountingEnvironment,
    SpecsOnly,
    assert_trees_close,
    assert_trees_equal,
    play_by_hand,
)

KEY = jax.random.key(7)
STEPS, COPIES = 40, 4
ACTIONS = jax.random.randint(jax.random.key(1), (STEPS, COPIES), 0, 3)
COUNTING = CountingEnvironment()
ENVIRONMENTS = {
    "counting": COUNTING,
    "maze": Maze(RandomGenerator(5, 5), time_limit=9),
}


def roll(envs, actions, key=KEY, first_index=0):
    """First state, all later states, and all transitions."""

    def step(state, action):
        state, transition = envs.step(state, action)
        return state, (state, transition)

    first = envs.init(key, first_index)
    _, (states, transitions) = jax.lax.scan(step, first, actions)
    return first, states, transitions


@functools.cache
def roller(name, queue_length=4):
    envs = VectorEnvironment(ENVIRONMENTS[name], COPIES, queue_length=queue_length)
    return jax.jit(functools.partial(roll, envs))


@functools.cache
def rolled(name, queue_length=4):
    return roller(name, queue_length)(ACTIONS)


@functools.cache
def by_hand(name, copy):
    return play_by_hand(ENVIRONMENTS[name], KEY, copy, np.asarray(ACTIONS[:, copy]))


each_environment = pytest.mark.parametrize("name", ENVIRONMENTS)
each_copy = pytest.mark.parametrize("copy", [0, COPIES - 1])


@each_environment
@each_copy
def test_transitions_equal_a_plain_loop(name, copy):
    _, _, transitions = rolled(name)
    expected, _, _ = by_hand(name, copy)
    for field, rows in expected.items():
        assert_trees_close(jax.tree.map(lambda x: x[:, copy], getattr(transitions, field)), rows)


@each_environment
@each_copy
def test_what_the_agent_sees_next_equals_a_plain_loop(name, copy):
    _, states, _ = rolled(name)
    _, expected, _ = by_hand(name, copy)
    assert_trees_close(jax.tree.map(lambda x: x[:, copy], states.observations), expected)


@each_environment
def test_the_loops_above_meet_several_ends_of_every_copy(name):
    _, _, transitions = rolled(name)
    assert transitions.resets.sum(axis=0).min() >= 3


@each_environment
@each_copy
def test_first_observations_are_those_of_episode_0(name, copy):
    first, _, _ = rolled(name)
    _, _, expected = by_hand(name, copy)
    assert_trees_close(jax.tree.map(lambda x: x[copy], first.observations), expected)


@pytest.mark.parametrize("queue_length", [1, 2, 5])
def test_queue_length_changes_no_trajectory(queue_length):
    _, states, transitions = rolled("counting", queue_length)
    _, reference_states, reference = rolled("counting")
    assert_trees_equal(transitions, reference)
    assert_trees_equal(states._replace(queue=None), reference_states._replace(queue=None))


def test_number_of_neighbours_changes_no_trajectory():
    envs = VectorEnvironment(COUNTING, 1)
    _, _, transitions = jax.jit(functools.partial(roll, envs))(ACTIONS[:, :1])
    assert_trees_equal(transitions, jax.tree.map(lambda x: x[:, :1], rolled("counting")[2]))


def test_first_index_continues_the_count_of_copies():
    envs = VectorEnvironment(COUNTING, COPIES - 1)
    _, _, transitions = jax.jit(functools.partial(roll, envs, first_index=1))(ACTIONS[:, 1:])
    assert_trees_equal(transitions, jax.tree.map(lambda x: x[:, 1:], rolled("counting")[2]))


def test_another_key_gives_other_episodes():
    firsts = [roller("counting")(ACTIONS, jax.random.key(seed))[0] for seed in (0, 1)]
    instances = np.concatenate([first.observations.instance for first in firsts])
    assert len(np.unique(instances)) == 2 * COPIES


@pytest.mark.parametrize("queue_length", [1, 2, 5])
def test_every_episode_is_a_new_one(queue_length):
    first, states, transitions = rolled("counting", queue_length)
    begun = states.observations.instance[np.asarray(transitions.resets)]
    instances = np.concatenate([first.observations.instance, begun])
    assert len(np.unique(instances)) == len(instances) == COPIES + transitions.resets.sum()


@pytest.mark.parametrize("queue_length", [1, 2, 5])
def test_episodes_taken_are_those_begun(queue_length):
    _, states, transitions = rolled("counting", queue_length)
    np.testing.assert_array_equal(states.queue.taken, 1 + np.cumsum(transitions.resets, axis=0))


@pytest.mark.parametrize("queue_length", [1, 2, 5])
def test_episodes_generated_and_not_taken_fit_the_queue(queue_length):
    _, states, _ = rolled("counting", queue_length)
    waiting = states.queue.generated - states.queue.taken
    assert waiting.min() >= 0
    assert waiting.max() <= queue_length


@pytest.mark.parametrize("queue_length", [1, 2, 5])
def test_waiting_episodes_are_the_next_ones_in_order(queue_length):
    _, states, _ = rolled("counting", queue_length)
    queue = jax.tree.map(lambda x: x[-1], states.queue)
    reset = jax.jit(COUNTING.reset)
    for copy in range(COPIES):
        for episode in range(int(queue.taken[copy]), int(queue.generated[copy])):
            _, timestep = reset(jax.random.fold_in(jax.random.fold_in(KEY, copy), episode))
            slot = copy * queue_length + episode % queue_length
            assert queue.observations.instance[slot] == timestep.observation.instance


def test_no_batch_is_generated_while_no_queue_is_dry():
    _, states, transitions = rolled("counting")
    generated = np.concatenate([[[4] * COPIES], states.queue.generated])
    taken = np.concatenate([[[1] * COPIES], states.queue.taken])
    was_dry = (np.asarray(transitions.resets) & (taken == generated)[:-1]).any(axis=1)
    np.testing.assert_array_equal((np.diff(generated, axis=0) > 0).any(axis=1), was_dry)
    assert 0 < was_dry.sum() < STEPS / 2


def record_resets(steps, **settings):
    """The instances that the environment was asked for, one by one, in `steps` steps."""
    instances = []
    environment = CountingEnvironment(**settings, on_reset=lambda n: instances.append(int(n)))
    envs = VectorEnvironment(environment, COPIES, queue_length=4)
    jax.block_until_ready(jax.jit(functools.partial(roll, envs))(ACTIONS[:steps]))
    jax.effects_barrier()
    return instances


def test_no_reset_happens_beyond_the_first_queues_before_they_are_empty():
    assert len(record_resets(steps=29, min_length=30, max_length=40)) == COPIES * 4


def test_each_reset_of_a_later_batch_is_of_a_new_episode():
    # Every copy ends at steps 3, 6, ... 18, six times: seven episodes each, none in vain.
    instances = record_resets(steps=20, min_length=3, max_length=3)
    assert len(instances) == len(set(instances)) == COPIES * 7


def test_one_step_that_several_batches_must_serve_serves_them_all():
    # All queues run dry at once, and every copy must be served at that very step.
    envs = VectorEnvironment(CountingEnvironment(min_length=1, max_length=1), 3, queue_length=1)
    first, states, transitions = jax.jit(functools.partial(roll, envs))(jnp.zeros((4, 3), int))
    assert transitions.resets.all()
    instances = np.concatenate([first.observations.instance[None], states.observations.instance])
    assert len(np.unique(instances)) == 15


def test_next_observation_of_an_end_is_the_true_last_one():
    _, _, transitions = rolled("counting")
    ended = np.asarray(transitions.resets)
    np.testing.assert_array_equal(
        transitions.next_observations.steps[ended], transitions.episode_lengths[ended]
    )


def test_observation_after_an_end_is_the_new_episodes_first():
    _, states, transitions = rolled("counting")
    ended = np.asarray(transitions.resets)
    assert not states.observations.steps[ended].any()
    last = transitions.next_observations.instance
    assert (states.observations.instance[ended] != last[ended]).all()
    np.testing.assert_array_equal(states.observations.instance[~ended], last[~ended])


def test_running_sums_start_anew_after_an_end():
    _, states, transitions = rolled("counting")
    ended = np.asarray(transitions.resets)
    for field in ("episode_returns", "episode_lengths"):
        assert not getattr(states, field)[ended].any()
        np.testing.assert_array_equal(
            getattr(states, field)[~ended], getattr(transitions, field)[~ended]
        )


def test_termination_and_truncation_are_told_apart():
    first, states, transitions = rolled("counting")
    is_terminal = np.concatenate([first.states.is_terminal[None], states.states.is_terminal])[:-1]
    ended = np.asarray(transitions.resets)
    np.testing.assert_array_equal(transitions.terminated, ended & is_terminal)
    np.testing.assert_array_equal(transitions.truncated, ended & ~is_terminal)


def test_discount_is_0_at_terminal_states_alone():
    _, _, transitions = rolled("counting")
    np.testing.assert_array_equal(transitions.discounts, 1.0 - transitions.terminated)
    assert transitions.terminated.any()
    assert transitions.truncated.any()


def test_a_time_limit_of_jumanjis_maze_is_a_termination():
    _, _, transitions = rolled("maze")
    assert transitions.resets.any()
    assert not transitions.truncated.any()


CONNECTOR = Connector(UniformRandomGenerator(grid_size=4, num_agents=2), time_limit=4)


@functools.cache
def rolled_connector():
    """Agents of the first four copies walk at random, those of the last four stand still."""
    codec = make_action_codec(CONNECTOR)
    envs = VectorEnvironment(CONNECTOR, 8)

    def step(state, key):
        legal = jax.vmap(codec.legal)(state.observations)
        actions = codec.distribution(jnp.zeros((8, *codec.output_shape)), legal).sample(key)
        actions = actions.at[4:].set(0)
        raw = jax.vmap(CONNECTOR.step)(state.states, actions)[1]
        state, transition = envs.step(state, actions)
        return state, (transition, raw)

    keys = jax.random.split(jax.random.key(0), 16)
    return jax.jit(lambda: jax.lax.scan(step, envs.init(KEY), keys)[1])()


def test_rewards_of_agents_are_added_up():
    transitions, raw = rolled_connector()
    np.testing.assert_allclose(transitions.rewards, raw.reward.sum(axis=-1), rtol=1e-6)
    assert raw.reward.shape == (16, 8, 2)


def test_a_team_goes_on_while_one_agent_does():
    transitions, raw = rolled_connector()
    np.testing.assert_array_equal(transitions.discounts, raw.discount.max(axis=-1))
    one_is_done = (raw.discount.min(axis=-1) == 0) & (raw.discount.max(axis=-1) == 1)
    assert (one_is_done & raw.mid()).any()


def test_connectors_time_limit_truncates():
    transitions, _ = rolled_connector()
    lengths, discounts = transitions.episode_lengths[:, 4:], transitions.discounts[:, 4:]
    assert lengths.max() == 4
    assert (discounts == 1).all()
    np.testing.assert_array_equal(transitions.truncated[:, 4:], lengths == 4)
    assert not transitions.terminated[:, 4:].any()


def test_a_team_is_terminated_when_every_agent_is_done():
    transitions, raw = rolled_connector()
    is_over = raw.last() & (raw.discount == 0).all(axis=-1)
    np.testing.assert_array_equal(transitions.terminated, is_over)
    assert is_over.any()


def test_extras_are_the_environments_own():
    transitions, raw = rolled_connector()
    assert_trees_equal(transitions.extras, raw.extras)


def test_steps_one_at_a_time_equal_a_scan():
    envs = VectorEnvironment(COUNTING, COPIES, queue_length=4)
    state, step = jax.jit(envs.init)(KEY), jax.jit(envs.step)
    _, states, transitions = rolled("counting")
    for t in range(STEPS):
        state, transition = step(state, ACTIONS[t])
        assert_trees_equal(transition, jax.tree.map(lambda x: x[t], transitions))  # noqa: B023
    assert_trees_equal(state, jax.tree.map(lambda x: x[-1], states))


def test_vmap_over_seeds_equals_one_by_one():
    run, keys = roller("counting", 2), jax.random.split(KEY, 3)
    first, states, transitions = jax.jit(jax.vmap(lambda key: run(ACTIONS, key)))(keys)
    for n, key in enumerate(keys):
        alone = run(ACTIONS, key)
        together = jax.tree.map(lambda x: x[n], (first, states, transitions))  # noqa: B023
        for a, b in zip(together, alone, strict=True):
            queue = {"queue": None} if hasattr(a, "queue") else {}
            assert_trees_equal(a._replace(**queue), b._replace(**queue))


def test_an_old_uint32_key_gives_the_same_episodes():
    old = roller("counting")(ACTIONS, jax.random.key_data(KEY))
    assert_trees_equal(old[2], rolled("counting")[2])


@pytest.mark.parametrize("counts", [{"num_envs": 0}, {"num_envs": 2, "queue_length": 0}])
def test_counts_below_1_are_refused_with_what_was_given(counts):
    with pytest.raises(ValueError, match="at least one copy and a queue of at least one") as error:
        VectorEnvironment(COUNTING, **counts)
    for name, value in counts.items():
        assert f"{name}={value}" in str(error.value)


class Altered(CountingEnvironment):
    """Its step returns another state and timestep than it should."""

    def __init__(self, alter):
        super().__init__()
        self.alter = alter

    def step(self, state, action):
        return self.alter(*super().step(state, action))


def alter_state(**parts):
    """An alteration of some parts of the state."""

    def alter(state, timestep):
        changed = {part: change(getattr(state, part)) for part, change in parts.items()}
        return state._replace(**changed), timestep

    return alter


@pytest.mark.parametrize(
    ("alter", "change"),
    [
        (alter_state(steps=lambda x: x.astype(float)), "state.steps from int32[] to float32[]"),
        (alter_state(length=lambda x: x[None]), "state.length from int32[] to int32[1]"),
        (alter_state(key=lambda _: None), "state.key from key<fry>[] to nothing"),
        (alter_state(key=lambda x: (x, x)), "state.key from key<fry>[] to nothing"),
        (
            lambda state, timestep: (
                state,
                timestep.replace(observation=timestep.observation._asdict() | {"more": 0}),
            ),
            "observation.more from nothing to int32[]",
        ),
        (
            lambda state, timestep: (state._asdict(), timestep),
            "the classes in its state or observation",
        ),
    ],
    ids=["dtype", "shape", "leaf lost", "leaf parted", "leaf added", "class"],
)
def test_an_environment_whose_step_alters_its_trees_is_refused(alter, change):
    environment = Altered(alter)
    with pytest.raises(ValueError, match="Altered cannot take one step after another") as error:
        check_environment(environment)
    assert str(error.value).endswith(f": a step changes {change}.")
    with pytest.raises(ValueError, match="Altered cannot"):
        VectorEnvironment(environment, 2)


def test_a_fault_in_an_environments_own_step_is_shown_as_it_is():
    def alter(state, timestep):
        raise TypeError("as it is")

    with pytest.raises(TypeError, match="as it is"):
        check_environment(Altered(alter))


def test_a_weak_type_is_no_change():
    environment = Altered(alter_state(steps=lambda _: 1))
    envs = VectorEnvironment(environment, COPIES)
    jax.eval_shape(functools.partial(roll, envs), ACTIONS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Incomparable:
    """As the agents of Jumanji's Connector."""

    state: Any

    def __eq__(self, other):
        raise AssertionError("compared")

    __hash__ = object.__hash__


class WithIncomparableState(SpecsOnly):
    def reset(self, key):
        state, timestep = COUNTING.reset(key)
        return Incomparable(state), timestep

    def step(self, state, action):
        state, timestep = COUNTING.step(state.state, action)
        return Incomparable(state), timestep


def test_states_are_compared_leaf_by_leaf():
    environment = WithIncomparableState(
        lambda: specs.DiscreteArray(3), lambda: COUNTING.observation_spec
    )
    check_environment(environment)


class Large(CountingEnvironment):
    """An episode's first state and observation take 16 KiB."""

    @functools.cached_property
    def observation_spec(self):
        return super().observation_spec.replace(instance=specs.Array((2048,), np.int32))

    def reset(self, key):
        state, _ = super().reset(key)
        state = state._replace(instance=jnp.full(2048, state.instance))
        return state, restart(self._observe(state))


def bytes_waiting(envs):
    queue = jax.eval_shape(envs.init, KEY).queue
    leaves = jax.tree.leaves((queue.states, queue.observations))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize("num_envs", [1, 64, 1000, 2048, 10**6])
def test_as_many_episodes_wait_as_fit_into_64_mib(num_envs):
    envs = VectorEnvironment(Large(), num_envs)
    longer = VectorEnvironment(Large(), num_envs, queue_length=envs.queue_length + 1)
    assert bytes_waiting(envs) <= 64 * 2**20 or envs.queue_length == 1
    assert bytes_waiting(longer) > 64 * 2**20 or envs.queue_length == 16


def test_specs_first_read_under_a_trace_stay_concrete():
    environment = SpecsOnly(lambda: specs.DiscreteArray(3))
    # Before Python 3.12 the check that the argument is an environment would read its specs.
    unchecked = inspect.unwrap(read_specs)
    jax.eval_shape(lambda x: x + unchecked(environment)[1].maximum, 1)
    assert int(read_specs(environment)[1].maximum) == 2
