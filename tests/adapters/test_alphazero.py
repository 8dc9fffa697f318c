"""AlphaZero: what it collects, what it learns, what it refuses."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.adapters.actions import make_action_codec
from vernal.adapters.agents.alphazero import (
    AlphaZeroConfig,
    AlphaZeroHyperparameters,
    ScaledNetwork,
    collect,
    make_alphazero,
    make_model,
    minibatch_loss,
    mix_with_uniform,
)
from vernal.adapters.environments import VectorEnvironment
from vernal.adapters.evaluation import play
from vernal.adapters.networks import make_spec_network
from vernal.core import mask_logits

from .environments_for_tests import CountingEnvironment, fast_jit, make_once, quick_jit

KEY = jax.random.key(0)
SMALL = AlphaZeroConfig(
    envs=3, rollout_steps=4, simulations=4, minibatch_size=6, epochs=2, replay_iterations=3
)


class KnownNetwork(eqx.Module):
    """Uniform policy; the value is a known function of what the counting environment shows."""

    def __call__(self, observation):
        return jnp.zeros(3), 0.5 * observation.steps + observation.instance % 7


@functools.cache
def small_agent():
    environment = CountingEnvironment()
    return make_alphazero(environment, make_spec_network(environment), SMALL)


@functools.cache
def small_states(iterations) -> Any:
    """The agent's state after so many iterations, and the metrics of the last."""
    agent = small_agent()
    if iterations == 0:
        return jax.jit(agent.init)(KEY, agent.hyperparameters), None
    return compiled_step()(small_states(iterations - 1)[0])


@functools.cache
def compiled_step():
    return quick_jit(small_agent().step)


def walk_with(network):
    environment = CountingEnvironment()
    envs, model = VectorEnvironment(environment, 2), make_model(environment)
    scaled = ScaledNetwork(network, None)
    config = dataclasses.replace(SMALL, rollout_steps=9, minibatch_size=27)

    def walk(td_lambda):
        numbers = AlphaZeroHyperparameters(1e-3, 1e-5, 1.0, 0.9, td_lambda, 1.0, 0.1)
        return collect(scaled, envs, model, envs.init(KEY), KEY, numbers, config)

    return walk


@functools.cache
def compiled_walk():
    return quick_jit(walk_with(KnownNetwork()))


def test_targets_of_lambda_one_are_the_discounted_rewards_that_came():
    # Nothing but rewards counts until the last step, which bootstraps from the network.
    _, batch, _, paid = compiled_walk()(1.0)
    observations, targets = batch.observations, np.asarray(batch.value_targets).reshape(9, 2)
    steps = np.asarray(observations.steps).reshape(9, 2)
    instances = np.asarray(observations.instance).reshape(9, 2)
    stays = instances[:-1] == instances[1:]
    assert stays.any()
    rewards = targets[:-1] - 0.9 * targets[1:]
    # Within an episode a target is one reward, of 0, 1 or 2, above the next one discounted.
    np.testing.assert_allclose(rewards[stays], np.round(rewards[stays]), atol=1e-5)
    assert set(np.round(rewards[stays])) <= {0, 1, 2}
    assert (steps[1:][stays] == steps[:-1][stays] + 1).all()
    assert paid.shape == (18,)


def test_illegal_actions_have_no_share_of_the_targets():
    _, batch, *_ = compiled_walk()(0.5)
    illegal = ~np.asarray(batch.observations.action_mask)
    assert illegal.any()
    assert (np.asarray(batch.target_probs)[illegal] == 0).all()
    np.testing.assert_allclose(np.asarray(batch.target_probs).sum(axis=-1), 1, rtol=1e-5)


def test_one_iteration_changes_parameters_and_counts():
    before, _ = small_states(0)
    after, metrics = small_states(1)
    assert int(after.iteration) == 1
    assert int(after.replay.filled) == 4
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before.params, after.params)
    assert any(jax.tree.leaves(changed))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(metrics))
    assert float(metrics.loss.kl) >= 0
    assert 0 <= float(metrics.loss.entropy) <= np.log(3) + 1e-6


def test_replay_holds_the_newest_iterations():
    # A store for each of three copies, of three iterations of four steps each.
    after, _ = small_states(4)
    assert int(after.replay.filled) == 12
    assert int(after.replay.place) == 4
    assert after.replay.samples.value_targets.shape == (3, 12)


def test_an_iteration_keeps_the_states_shapes():
    before, after = small_states(0)[0], small_states(1)[0]
    assert jax.tree.structure(after) == jax.tree.structure(before)
    given = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)]
    assert given == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(before)]


def test_size_of_the_rewards_changes_nothing():
    class Scaled(CountingEnvironment):
        scale = 1.0

        def step(self, state, action):
            state, timestep = super().step(state, action)
            return state, timestep.replace(reward=self.scale * timestep.reward)  # pyright: ignore

    class Large(Scaled):
        scale = 2.0**20

    def train(environment):
        agent = make_alphazero(environment, make_spec_network(environment), SMALL)
        init, step = quick_jit(agent.init), quick_jit(agent.step)
        # The first iteration does not know the size yet.
        return step(step(init(KEY, agent.hyperparameters))[0])[0].params

    for a, b in zip(*(jax.tree.leaves(train(e)) for e in (Scaled(), Large())), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_network_in_half_precision_is_searched_and_judged_in_float32(dtype):
    class HalfNetwork(KnownNetwork):
        def __call__(self, observation):
            return jax.tree.map(lambda x: x.astype(dtype), super().__call__(observation))

    numbers, codec = small_agent().hyperparameters, make_action_codec(CountingEnvironment())

    def walk(network, collect_with):
        _, batch, _, paid = collect_with(0.5)
        sample = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), batch)
        loss, parts = minibatch_loss(network, sample, codec=codec, hyperparameters=numbers)
        return batch, paid, loss, parts

    given, wanted = (
        jax.eval_shape(functools.partial(walk, network, walk_with(network)))
        for network in (HalfNetwork(), KnownNetwork())
    )
    assert jax.tree.leaves(given) == jax.tree.leaves(wanted)


def test_uniform_share_is_mixed_over_the_legal_actions():
    legal = jnp.array([[True, True, False], [True, True, True]])
    logits = mask_logits(jnp.array([[3.0, -3.0, 0.0], [0.0, 0.0, 0.0]]), legal)
    mixed = jax.nn.softmax(mix_with_uniform(logits, 0.4))
    wanted = 0.6 * np.asarray(jax.nn.softmax(logits)) + 0.4 * np.array(
        [[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]]
    )
    np.testing.assert_allclose(mixed, wanted, rtol=1e-5)
    assert mixed[0, 2] == 0


def test_a_legal_action_stays_improbable_however_improbable_it_is():
    mixed = mix_with_uniform(jnp.array([[0.0, -90.0, -200.0]]), 0.0)
    np.testing.assert_allclose(mixed, [[0.0, -90.0, -200.0]])
    explored = jax.nn.softmax(mix_with_uniform(jnp.array([[0.0, -90.0, -200.0]]), 0.3))
    np.testing.assert_allclose(explored, [[0.8, 0.1, 0.1]], rtol=1e-5)


def test_plan_finds_what_pays_most_where_the_network_knows_nothing():
    environment = CountingEnvironment(min_length=4)
    agent, (state, _) = small_agent(), small_states(0)
    first, timestep = environment.reset(jax.random.key(1))
    plan = quick_jit(functools.partial(agent.plan, simulations=16))  # pyright: ignore
    assert int(plan(state, KEY, first, timestep.observation)) == 2
    second, timestep = environment.step(first, jnp.array(2))
    assert int(plan(state, KEY, second, timestep.observation)) == 1  # 2 is illegal there


def test_actions_of_the_network_alone_are_legal_ones():
    agent, (state, _) = small_agent(), small_states(1)
    environment = CountingEnvironment(min_length=3)
    first, _ = environment.reset(KEY)
    _, timestep = environment.step(first, jnp.array(0))  # Action 2 is illegal now.
    keys = jax.random.split(jax.random.key(1), 200)
    actions = jax.vmap(lambda key: agent.act(state, key, timestep.observation))(keys)
    assert bool(timestep.observation.action_mask[actions].all())
    assert bool(timestep.observation.action_mask[agent.act(state, None, timestep.observation)])


def test_alphazero_learns_the_easy_maze():
    environment = make_once("maze-easy")
    agent = make_alphazero(environment, make_spec_network(environment))
    step = fast_jit(agent.step)
    state = jax.jit(agent.init)(KEY, agent.hyperparameters)
    for _ in range(10):
        state, _ = step(state)
    outcome = jax.jit(
        lambda: play(environment, lambda _, seen: agent.act(state, None, seen), KEY, 4)
    )()
    assert outcome.returns.tolist() == [1.0] * 4
    assert outcome.lengths.tolist() == [18] * 4  # as short as can be


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"simulations": 0}, "simulations is 0; give at least 1"),
        ({"replay_iterations": 0}, "replay_iterations is 0; give at least 1"),
        ({"max_considered_actions": 0}, "max_considered_actions is 0; give at least 1"),
        ({"td_lambda": 1.5}, "td_lambda is 1.5; give a number from 0 to 1"),
        ({"exploration": -0.1}, "exploration is -0.1; give a number from 0 to 1"),
        ({"value_resolution": 0.0}, "value_resolution is 0.0; give a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; give a number above 0"),
        ({"minibatch_size": 100}, "does not divide the 2048 samples"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        AlphaZeroConfig(**settings)


def test_environment_whose_actions_fit_no_tree_is_refused():
    environment = make_once("Connector-v3")
    with pytest.raises(ValueError, match="choices make 9,765,625"):
        make_alphazero(environment, make_spec_network(environment), SMALL)


def test_network_with_a_value_of_another_shape_is_refused():
    class WrongNetwork(eqx.Module):
        def __call__(self, observation):
            return jnp.zeros(4), jnp.zeros(1)

    with pytest.raises(TypeError, match=r"value have shape \(1,\)"):
        make_alphazero(make_once("Maze-v0"), lambda key: WrongNetwork(), SMALL)
