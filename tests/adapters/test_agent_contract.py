"""What holds for every agent: pure functions of arrays, for many seeds and on many devices.

The tests' process has four devices, see `conftest.py`.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from vernal.adapters.agents.alphazero import AlphaZeroConfig, make_alphazero
from vernal.adapters.agents.ppo import PPOConfig, make_ppo
from vernal.adapters.evaluation import play
from vernal.adapters.mesh import Devices, make_mesh
from vernal.adapters.networks import make_spec_network
from vernal.adapters.runs.checkpoints import Checkpoints, array_shapes, as_state, flatten
from vernal.adapters.runs.config import RunConfig
from vernal.adapters.runs.program import make_program

from .environments_for_tests import (
    assert_trees_equal,
    make_once,
    quick_jit,
    under_checks_of_jax,
)

ITERATIONS = 3
# One iteration more and chance may differ: rounding moves a probability across a random number.
RELATIVE, ABSOLUTE = 2e-4, 2e-5
SETTINGS = {
    "ppo": PPOConfig(
        envs=8, rollout_steps=16, minibatch_size=16, epochs=2, normalise_advantages=True
    ),
    "alphazero": AlphaZeroConfig(
        envs=8, rollout_steps=8, minibatch_size=8, epochs=1, simulations=4, replay_iterations=2
    ),
}
MAKE = {"ppo": make_ppo, "alphazero": make_alphazero}
pytestmark = pytest.mark.parametrize("name", SETTINGS)


@functools.cache
def agent_on(name, devices):
    # Its observation has a leaf of which the network keeps statistics; episodes end within 16 steps
    # only by chance, so that ends differ between copies.
    environment = make_once("maze-easy")
    mesh = None if devices is None else make_mesh(devices)
    agent = MAKE[name](environment, make_spec_network(environment), SETTINGS[name], mesh=mesh)
    return agent, quick_jit(agent.init), quick_jit(agent.step)


def walked(name, devices, *, iterations=ITERATIONS, seed=0, **numbers):
    """States and metrics of a few iterations."""
    agent, init, step = agent_on(name, devices)
    state = init(jax.random.key(seed), agent.hyperparameters._replace(**numbers))
    states, reports = [state], []
    for _ in range(iterations):
        state, metrics = step(state)
        states.append(state)
        reports.append(metrics)
    return states, jax.tree.map(lambda *x: np.stack(x), *reports)


@functools.cache
def reference(name):
    return walked(name, None)


def assert_close(tree, other):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=RELATIVE, atol=ABSOLUTE)


@pytest.mark.parametrize("devices", [2, 4])
def test_any_number_of_devices_learns_the_same(name, devices):
    states, metrics = walked(name, devices)
    expected_states, expected = reference(name)
    assert_trees_equal(metrics.episodes, expected.episodes)
    assert_close(metrics, expected)
    assert_close(states[-1].params, expected_states[-1].params)
    assert_trees_equal(states[-1].envs.states, expected_states[-1].envs.states)


def test_chance_is_that_of_the_copy_wherever_it_lives(name):
    # A policy that does not change is the same to the last bit but one, so many iterations agree.
    frozen = {"iterations": 12, "learning_rate": 1e-30}
    (_, alone), (_, spread) = walked(name, None, **frozen), walked(name, 4, **frozen)
    assert alone.episodes.ended.sum() > 0
    assert_trees_equal(spread.episodes, alone.episodes)


def test_each_device_has_its_share_of_the_copies(name):
    (state, *_), _ = walked(name, 4)
    for leaf in jax.tree.leaves(state.envs._replace(key=None)):
        assert len(leaf.sharding.device_set) == 4
        assert leaf.addressable_shards[0].data.shape[0] == leaf.shape[0] // 4
    for leaf in jax.tree.leaves(state.params):
        assert leaf.is_fully_replicated
    np.testing.assert_array_equal(state.envs.indices, np.arange(SETTINGS[name].envs))


def test_mesh_of_explicit_axes_works_too(name):
    environment = make_once("maze-easy")
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2]
    )
    agent = MAKE[name](environment, make_spec_network(environment), SETTINGS[name], mesh=mesh)
    shapes = jax.eval_shape(agent.init, jax.random.key(0), agent.hyperparameters)
    after, _ = jax.eval_shape(agent.step, shapes)
    assert jax.tree.structure(after) == jax.tree.structure(shapes)


def test_state_of_four_devices_goes_on_on_one(name, tmp_path):
    states, metrics = walked(name, 4)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, flatten(states[1]), 0.0)
    checkpoints.wait()
    agent, _, step = agent_on(name, None)
    like = jax.eval_shape(agent.init, jax.random.key(0), agent.hyperparameters)
    state = checkpoints.restore(like)
    checkpoints.close()
    assert_trees_equal(
        jax.tree.map(np.asarray, flatten(state)), jax.tree.map(np.asarray, flatten(states[1]))
    )
    _, second = step(state)
    assert_close(second, jax.tree.map(lambda x: x[1], metrics))


def test_step_is_a_function_of_the_state_alone(name):
    _, _, step = agent_on(name, None)
    states, _ = reference(name)
    again, _ = step(as_state(jax.tree.map(np.asarray, flatten(states[1])), states[1]))
    assert_trees_equal(again, states[2])


def test_state_holds_arrays_of_unchanging_shapes(name):
    states, _ = reference(name)
    assert array_shapes(states[0]) == array_shapes(states[-1])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(states[-1]))
    assert [int(state.iteration) for state in states] == list(range(ITERATIONS + 1))


def test_hyperparameters_of_the_state_decide(name):
    (_, *still), _ = walked(name, None, iterations=1, learning_rate=1e-30)
    first = reference(name)[0][0]
    kernel = lambda state: np.asarray(state.params.value.weight)  # noqa: E731
    np.testing.assert_array_equal(kernel(still[0]), kernel(first))
    assert (kernel(reference(name)[0][1]) != kernel(first)).any()


def test_seeds_in_one_program_are_the_runs_one_by_one(name):
    config = RunConfig(name, "maze-easy", "spec", 0, 1, SETTINGS[name], seeds=3, at_once=3)
    program = make_program(config)
    state, reports = program.init(), []
    for _ in range(ITERATIONS):
        state, metrics, healthy = program.step(state)
        assert all(leaf.shape == (3,) and leaf.all() for leaf in jax.tree.leaves(healthy))
        reports.append(metrics)
    together = jax.tree.map(lambda *x: np.stack(x, axis=1), *reports)
    for member, seed in ((0, 0), (2, 2)):
        _, alone = walked(name, None, seed=seed)
        assert_close(jax.tree.map(lambda x, n=member: x[n], together), alone)


def test_agents_are_spread_over_devices_whole(name):
    config = RunConfig(
        name,
        "maze-easy",
        "spec",
        0,
        1,
        SETTINGS[name],
        seeds=1,
        devices=2,
        vary={"learning_rate": [1e-30, 1e-3]},
    )
    program = make_program(config)
    state, metrics, _ = program.step(program.init())
    assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(state.params))
    _, alone = walked(name, None, iterations=1, learning_rate=1e-3)
    assert_close(jax.tree.map(lambda x: x[1:], metrics), alone)
    moved = np.asarray(state.params.value.weight) != np.asarray(program.init().params.value.weight)
    assert [bool(x.any()) for x in moved] == [False, True]


@under_checks_of_jax
def test_checks_of_jax_find_nothing(name, check):
    environment = make_once("maze-easy")
    with check():
        agent = MAKE[name](environment, make_spec_network(environment), SETTINGS[name])

        def walk(key):
            init_key, key = jax.random.split(key)
            state, _ = agent.step(agent.init(init_key, agent.hyperparameters))
            return play(environment, lambda key, seen: agent.act(state, key, seen), key, 2)

        jax.eval_shape(jax.jit(walk), jax.random.key(0))


def test_settings_of_another_class_are_refused(name):
    # Without the tests' own check of every argument, as users have it.
    make = inspect.unwrap(MAKE[name])
    environment = make_once("maze-easy")
    for config in ({"gamma": 0.9}, next(c for n, c in SETTINGS.items() if n != name)):
        sentence = f"config is of type {type(config).__name__}; give a .*Config, as in"
        with pytest.raises(TypeError, match=sentence):
            make(environment, make_spec_network(environment), config)


def test_what_devices_cannot_divide_is_refused(name):
    environment = make_once("maze-easy")
    with pytest.raises(ValueError, match=r"envs is 8, which cannot be spread evenly over 3"):
        MAKE[name](environment, make_spec_network(environment), SETTINGS[name], mesh=make_mesh(3))
    with pytest.raises(ValueError, match=r"number of agents is 4, which cannot be spread .* 3"):
        make_program(RunConfig(name, "maze-easy", "spec", 0, 1, SETTINGS[name], seeds=4, devices=3))
    with pytest.raises(ValueError, match=r"a mesh of one axis, but this one has \('a', 'b'\)"):
        Devices(jax.make_mesh((2, 2), ("a", "b")))
    with pytest.raises(ValueError, match=r"5 devices are asked for, and there are 4: a CPU"):
        make_mesh(5)


def test_policy_acts_alone_and_for_many(name):
    agent, _, _ = agent_on(name, None)
    state = reference(name)[0][-1]
    observation = jax.tree.map(lambda x: x[0], state.envs.observations)
    greedy = agent.act(state, None, observation)
    assert greedy.shape == ()
    many = jax.vmap(lambda seen: agent.act(state, None, seen))(state.envs.observations)
    assert jnp.array_equal(many[0], greedy)
