"""Evaluation: every episode once, and the numbers drawn from them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji import specs
from jumanji.environments import Maze
from scipy import stats

from vernal.adapters.evaluation import (
    Episodes,
    confidence_interval,
    instance_keys,
    make_random_policy,
    play,
    summarise,
)
from vernal.adapters.mazes import FixedWallsGenerator, make_medium_maze, shortest_path_length

from .environments_for_tests import (
    CountingEnvironment,
    NeverStepAgain,
    Observation,
    SpecsOnly,
    make_once,
    with_mask,
)

KEY = jax.random.key(5)
COUNTING = CountingEnvironment(max_length=9)
EPISODES = 12


def alternate(key, observation):
    """A deterministic policy that depends on what it sees."""
    del key
    return (observation.steps + observation.instance) % 3


def play_by_hand(environment, act, keys):
    reset, step, act = jax.jit(environment.reset), jax.jit(environment.step), jax.jit(act)
    returns, lengths = [], []
    for key in keys:
        state, timestep = reset(key)
        total, length = 0.0, 0
        while not timestep.last():
            state, timestep = step(state, act(key, timestep.observation))
            total, length = total + float(timestep.reward.sum()), length + 1
        returns.append(total)
        lengths.append(length)
    return returns, lengths


@functools.cache
def played(episodes=EPISODES):
    return jax.jit(lambda key: play(COUNTING, alternate, key, episodes))(KEY)


def test_each_episode_counts_once_as_in_a_plain_loop():
    returns, lengths = play_by_hand(COUNTING, alternate, instance_keys(KEY, EPISODES))
    np.testing.assert_array_equal(played().returns, returns)
    np.testing.assert_array_equal(played().lengths, lengths)
    assert len(set(lengths)) > 3


def test_episodes_of_a_maze_equal_a_plain_loop():
    maze = make_medium_maze()

    def act(key, observation):
        del key
        return (observation.step_count * 7 + observation.agent_position.row) % 4

    outcome = jax.jit(lambda: play(maze, act, KEY, episodes=3))()
    returns, lengths = play_by_hand(maze, act, instance_keys(KEY, 3))
    np.testing.assert_array_equal(outcome.returns, returns)
    np.testing.assert_array_equal(outcome.lengths, lengths)


def test_an_instance_depends_on_its_number_not_on_how_many_there_are():
    np.testing.assert_array_equal(played(3).lengths, played().lengths[:3])
    np.testing.assert_array_equal(played(3).returns, played().returns[:3])


def test_instance_keys_are_all_different():
    keys = jax.random.key_data(instance_keys(KEY, 50))
    assert len(np.unique(keys, axis=0)) == 50


def test_play_without_jit_is_the_same():
    outcome = play(COUNTING, alternate, KEY, EPISODES)
    np.testing.assert_array_equal(outcome.returns, played().returns)


def test_play_under_vmap_over_keys_equals_key_by_key():
    keys = jax.random.split(KEY, 2)
    run = jax.jit(lambda key: play(COUNTING, alternate, key, 4))
    together = jax.vmap(run)(keys)
    for n in range(2):
        np.testing.assert_array_equal(together.lengths[n], run(keys[n]).lengths)
        np.testing.assert_array_equal(together.returns[n], run(keys[n]).returns)


def test_an_old_uint32_key_gives_the_same_episodes():
    outcome = play(COUNTING, alternate, jax.random.key_data(KEY), EPISODES)
    np.testing.assert_array_equal(outcome.lengths, played().lengths)


class TeamOfTwo(CountingEnvironment):
    """The second agent earns twice what the first one does."""

    def step(self, state, action):
        state, timestep = super().step(state, action)
        reward = timestep.reward * jnp.array([1, 2])
        return state, timestep.replace(reward=reward)  # pyright: ignore[reportAttributeAccessIssue]


def test_rewards_of_agents_are_added_up():
    team = TeamOfTwo(max_length=9)
    outcome = jax.jit(lambda: play(team, alternate, KEY, EPISODES))()
    np.testing.assert_array_equal(outcome.returns, 3 * played().returns)


DRAWS = 3000


def draw(environment, mask):
    policy, observation = make_random_policy(environment), Observation(0, 0, jnp.asarray(mask))
    keys = jax.random.split(KEY, DRAWS)
    return np.asarray(jax.jit(jax.vmap(lambda key: policy(key, observation)))(keys))


def assert_uniform(actions, legal):
    """Only legal actions, each about as often: chi-square, once in a thousand times wrong."""
    values, counts = np.unique(actions, return_counts=True, axis=0)
    assert values.tolist() == legal
    assert stats.chisquare(counts).pvalue > 1e-3


def test_random_policy_is_uniform_over_the_legal_actions():
    actions = draw(make_once("Snake-v1"), [True, False, True, True])
    assert_uniform(actions, [0, 2, 3])


def test_random_policy_is_uniform_over_joint_actions():
    environment = SpecsOnly(lambda: specs.MultiDiscreteArray(jnp.array([2, 3])), with_mask((2, 3)))
    actions = draw(environment, [[True, False, True], [False, True, False]])
    assert_uniform(actions, [[0, 0], [0, 2], [1, 1]])


def test_random_policy_is_uniform_over_every_heads_legal_actions():
    environment = SpecsOnly(
        lambda: specs.MultiDiscreteArray(jnp.array([2, 3, 1])), with_mask((3, 3))
    )
    mask = [[True, True, False], [True, False, True], [True, True, True]]
    assert_uniform(draw(environment, mask), [[a, b, 0] for a in (0, 1) for b in (0, 2)])


def test_random_policy_is_uniform_between_finite_bounds():
    environment = SpecsOnly(lambda: specs.BoundedArray((1,), float, -2.0, 6.0))
    actions = draw(environment, [True])
    assert stats.kstest(actions.ravel(), stats.uniform(-2, 8).cdf).pvalue > 1e-3


def test_half_width_is_196_standard_errors():
    samples = np.random.default_rng(0).normal(3, 2, 57)
    interval = confidence_interval(samples)
    low, high = stats.norm.interval(0.95, loc=samples.mean(), scale=stats.sem(samples))
    assert interval.mean == pytest.approx(samples.mean())
    assert interval.half_width == pytest.approx((high - low) / 2, rel=1e-4)


def test_interval_of_yes_and_no_is_that_of_1_and_0():
    assert confidence_interval([True, False, True]) == confidence_interval([1.0, 0.0, 1.0])


def test_one_sample_says_nothing_of_the_width():
    assert confidence_interval([4.0]) == (4.0, float("inf"))


def test_interval_reads_as_mean_and_half_width():
    assert str(confidence_interval([1.0, 1.0])) == "1.000 ± 0.000"


def test_summary_of_any_environment_is_return_and_length():
    outcome = Episodes(jnp.array([1.0, 3.0]), jnp.array([5, 5]))
    assert summarise(COUNTING, KEY, outcome) == {
        "return": "2.000 ± 1.960",
        "length": "5.000 ± 0.000",
    }


def make_corridor():
    walls = np.ones((3, 6), bool)
    walls[0] = False
    return Maze(FixedWallsGenerator(walls, [(0, 0)], [(0, 5)]))


def test_summary_of_a_maze_compares_solved_episodes_with_the_shortest_way():
    outcome = Episodes(jnp.array([1.0, 0.0, 1.0]), jnp.array([5, 18, 10]))
    summary = summarise(make_corridor(), KEY, outcome)
    assert summary["solved"] == str(confidence_interval([1, 0, 1]))
    assert summary["shortest path"] == "5.0"
    assert summary["steps / shortest"] == "1.500"


def test_summary_of_a_maze_uses_the_instances_that_were_played():
    maze = make_medium_maze()
    states, _ = jax.vmap(maze.reset)(instance_keys(KEY, 3))
    outcome = Episodes(jnp.ones(3), jnp.full(3, 20))
    cells = np.stack([*states.agent_position, *states.target_position], axis=1).tolist()
    walls = np.asarray(states.walls)[0]
    shortest = [shortest_path_length(walls, cell[:2], cell[2:]) for cell in cells]
    summary = summarise(maze, KEY, outcome)
    assert summary["shortest path"] == f"{np.mean(shortest):.1f}"
    assert summary["steps / shortest"] == f"{60 / np.sum(shortest):.3f}"


def test_summary_of_a_maze_that_was_never_solved_has_no_ratio():
    outcome = Episodes(jnp.zeros(3), jnp.full(3, 18))
    summary = summarise(make_corridor(), KEY, outcome)
    assert summary["steps / shortest"] == "none solved"
    assert summary["solved"] == "0.000 ± 0.000"


def test_a_finished_episode_is_never_stepped():
    environment = NeverStepAgain(max_length=9)
    outcome = jax.jit(lambda: play(environment, alternate, KEY, EPISODES))()
    np.testing.assert_array_equal(outcome.lengths, played().lengths)
    np.testing.assert_array_equal(outcome.returns, played().returns)


def test_episodes_that_take_too_long_are_cut_and_marked_so():
    outcome = jax.jit(lambda: play(COUNTING, alternate, KEY, EPISODES, max_steps=5))()
    whole = np.asarray(played().lengths)
    np.testing.assert_array_equal(outcome.lengths, np.minimum(whole, 5))
    np.testing.assert_array_equal(outcome.cut, whole > 5)
    assert 0 < outcome.cut.sum() < EPISODES
    assert not played().cut.any()


def test_summary_tells_how_many_episodes_were_cut():
    cut = jnp.array([True, False])
    summary = summarise(COUNTING, KEY, Episodes(jnp.zeros(2), jnp.array([9, 3]), cut))
    assert summary["cut"] == "1 of 2"


@pytest.mark.parametrize("count", [{"episodes": 0}, {"max_steps": 0}])
def test_no_episodes_and_no_steps_are_refused(count):
    ((name, _),) = count.items()
    with pytest.raises(ValueError, match=rf"^{name} is 0; give at least 1\.$"):
        play(COUNTING, alternate, KEY, **{"episodes": 2, **count})
