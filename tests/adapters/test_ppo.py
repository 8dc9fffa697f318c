"""PPO: what it collects, what it minimises, and that it learns."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jumanji.wrappers import AutoResetWrapper

from vernal.adapters.actions import make_action_codec
from vernal.adapters.agents.agent import sum_episodes
from vernal.adapters.agents.learner import fit, make_optimiser, make_strata, shuffled_indices
from vernal.adapters.agents.ppo import (
    PPOConfig,
    PPOHyperparameters,
    collect,
    make_ppo,
    minibatch_loss,
    standardise,
)
from vernal.adapters.environments import Transition, VectorEnvironment
from vernal.adapters.mesh import ONE_DEVICE
from vernal.adapters.networks import make_default_network, make_spec_network
from vernal.core import Moments

from .environments_for_tests import OFFLINE, CountingEnvironment, make_once

SMALL = PPOConfig(envs=3, rollout_steps=8, minibatch_size=12, epochs=2)


class KnownNetwork(eqx.Module):
    """Uniform policy; the value is a known function of what the counting environment shows."""

    bias: jax.Array

    def __call__(self, observation):
        value = 0.5 * observation.steps + observation.instance % 7 + self.bias
        return jnp.zeros(3), value


def known_value(observation):
    return 0.5 * np.asarray(observation.steps) + np.asarray(observation.instance) % 7


@functools.cache
def small_agent():
    environment = make_once("maze-medium")
    return make_ppo(environment, make_spec_network(environment), SMALL)


@functools.cache
def small_step():
    return jax.jit(small_agent().step)


@functools.cache
def small_init():
    return jax.jit(small_agent().init)


def small_state(seed=0):
    return small_init()(jax.random.key(seed), small_agent().hyperparameters)


def assert_equal(tree, other, rtol=0.0, atol=0.0):
    for pair in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(pair[0].dtype, jax.dtypes.prng_key):
            pair = tuple(map(jax.random.key_data, pair))  # noqa: PLW2901
        np.testing.assert_allclose(*pair, rtol=rtol, atol=atol)


@pytest.mark.parametrize("terminal_share", [0.0, 0.5, 1.0])
def test_advantages_tell_termination_from_truncation(terminal_share):
    environment = CountingEnvironment(max_length=4, terminal_share=terminal_share)
    steps, copies, gamma, lambda_ = 11, 3, 0.9, 0.8
    envs = VectorEnvironment(environment, copies)
    state = jax.jit(envs.init)(jax.random.key(1))
    numbers = PPOHyperparameters(1e-3, 1e-5, 1.0, gamma, lambda_, 0.2, 0.0, 1.0)
    network, codec = KnownNetwork(jnp.zeros(())), make_action_codec(environment)
    walk = jax.jit(
        lambda state: collect(network, envs, codec, state, jax.random.key(2), numbers, steps, None)
    )
    _, batch, sums, _ = walk(state)

    # The same walk, one step at a time, with V of every state arrived in.
    actions = batch.actions.reshape(steps, copies)
    deltas, cuts = np.zeros((steps, copies)), np.zeros((steps, copies))
    ended, step = 0, jax.jit(envs.step)
    for t in range(steps):
        value = known_value(state.observations)
        state, transition = step(state, actions[t])
        bootstrap = np.where(transition.terminated, 0, known_value(transition.next_observations))
        deltas[t] = transition.rewards + gamma * bootstrap - value
        cuts[t] = transition.resets
        ended += int(transition.resets.sum())
    for t in range(steps):
        expected, weight = np.zeros(copies), np.ones(copies)
        for k in range(t, steps):
            expected += weight * deltas[k]
            weight = weight * gamma * lambda_ * (1 - cuts[k])
        np.testing.assert_allclose(
            batch.advantages.reshape(steps, copies)[t], expected, rtol=1e-4, atol=1e-4
        )
    assert ended > 0
    assert int(sums.ended) == ended


class Scaled:
    """The counting environment, paid in another currency."""

    def __init__(self, scale):
        self.inner, self.scale = CountingEnvironment(), scale
        self.observation_spec, self.action_spec = (
            self.inner.observation_spec,
            self.inner.action_spec,
        )

    def reset(self, key):
        return self.inner.reset(key)

    def step(self, state, action):
        state, timestep = self.inner.step(state, action)
        return state, dataclasses.replace(timestep, reward=timestep.reward * self.scale)


def train_in(environment, config, iterations):
    """Last state, and metrics of all iterations."""
    agent = make_ppo(environment, make_spec_network(environment), config)

    def train():
        state = agent.init(jax.random.key(0), agent.hyperparameters)
        return jax.lax.scan(lambda state, _: agent.step(state), state, length=iterations)

    return jax.jit(train)()


@functools.cache
def train_scaled(scale, normalise_values=True):
    return train_in(Scaled(scale), dataclasses.replace(SMALL, normalise_values=normalise_values), 3)


class Late:
    """Pays nothing for the first two episodes' worth of steps, then `scale` for each."""

    def __init__(self, scale):
        self.inner, self.scale = CountingEnvironment(min_length=40, max_length=40), scale
        self.observation_spec, self.action_spec = (
            self.inner.observation_spec,
            self.inner.action_spec,
        )

    def reset(self, key):
        return self.inner.reset(key)

    def step(self, state, action):
        state, timestep = self.inner.step(state, action)
        return state, dataclasses.replace(
            timestep, reward=jnp.where(state.steps > 16, self.scale, 0.0)
        )


def test_rewards_that_come_late_train_the_same_network_whatever_their_size():
    small, large = (train_in(Late(scale), SMALL, 4) for scale in (2.0**-20, 1.0))
    assert float(large[0].returns.mean) > 0.1
    assert_equal(small[0].params, large[0].params)


def test_standardised_values_are_deviations_from_the_mean_return():
    environment, key = CountingEnvironment(), jax.random.key(0)
    envs, codec = VectorEnvironment(environment, 2), make_action_codec(environment)
    numbers = PPOHyperparameters(1e-3, 1e-5, 1.0, 0.9, 0.8, 0.2, 0.0, 1.0)
    network, moments = KnownNetwork(jnp.zeros(())), Moments(*map(jnp.array, (5.0, 4.0, 1.0)))
    walk = jax.jit(lambda m: collect(network, envs, codec, envs.init(key), key, numbers, 5, m))
    (_, plain, *_), (_, scaled, *_) = walk(None), walk(moments)
    np.testing.assert_allclose(scaled.values, 5 + 2 * plain.values, rtol=1e-6)
    back = standardise(scaled, Moments(*map(jnp.array, (1.0, 9.0, 1.0))))
    np.testing.assert_allclose(back.values, (scaled.values - 1) / 3, rtol=1e-6)
    np.testing.assert_allclose(back.value_targets, (scaled.value_targets - 1) / 3, rtol=1e-6)
    np.testing.assert_allclose(back.advantages, scaled.advantages / 3, rtol=1e-6)


def test_a_network_whose_statistics_are_something_else_is_refused():
    class WrongNetwork(eqx.Module):
        def __call__(self, observation):
            return jnp.zeros(4), jnp.zeros(())

        def with_statistics_of(self, observations):
            return jnp.zeros(3)

    with pytest.raises(TypeError, match=r"should give the same network .* but it gives Shape"):
        make_ppo(make_once("Maze-v0"), lambda key: WrongNetwork(), SMALL)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
def test_rewards_of_any_size_train_the_same_network(scale):
    assert_equal(train_scaled(scale)[0].params, train_scaled(1.0)[0].params)


def test_without_normalised_values_the_size_of_rewards_matters():
    one, other = (train_scaled(scale, normalise_values=False)[1] for scale in (1.0, 2.0**10))
    assert float(other.loss.value[0]) > 1e3 * float(one.loss.value[0])


def test_moments_are_those_of_the_discounted_returns_of_the_rewards():
    environment, numbers = CountingEnvironment(), small_agent().hyperparameters
    agent = make_ppo(environment, make_spec_network(environment), SMALL)
    state = jax.jit(agent.init)(jax.random.key(0), numbers)
    after, _ = jax.jit(agent.step)(state)
    codec, envs = make_action_codec(environment), VectorEnvironment(environment, SMALL.envs)
    _, key, _ = jax.random.split(state.key, 3)
    walk = jax.jit(
        lambda: collect(agent.network(state), envs, codec, state.envs, key, numbers, 8, None)
    )
    rewards = np.asarray(walk()[1].actions, float).reshape(8, SMALL.envs)
    state = state.envs
    returns, resets = np.zeros((9, SMALL.envs)), []
    for actions in rewards.astype(int):
        state, transition = jax.jit(envs.step)(state, actions)
        resets.append(np.asarray(transition.resets))
    for t in reversed(range(8)):
        returns[t] = rewards[t] + 0.99 * np.where(resets[t], 0, returns[t + 1])
    np.testing.assert_allclose(after.returns.mean, returns[:8].mean(), rtol=1e-5)
    np.testing.assert_allclose(after.returns.deviation(), returns[:8].std(), rtol=1e-5)


def test_a_network_that_observes_keeps_statistics_of_what_it_saw():
    environment = CountingEnvironment()
    agent = make_ppo(environment, make_spec_network(environment), SMALL)
    state = jax.jit(agent.init)(jax.random.key(0), agent.hyperparameters)
    after, _ = jax.jit(agent.step)(state)
    moments = agent.network(after).statistics["instance"]
    assert moments.weight == 1
    assert 15 < moments.mean < 22  # the logarithm of numbers up to 2**31
    assert agent.network(state).statistics["instance"].weight == 0


def test_value_targets_are_advantages_plus_values():
    environment = CountingEnvironment()
    envs = VectorEnvironment(environment, 2)
    numbers = PPOHyperparameters(1e-3, 1e-5, 1.0, 0.9, 0.8, 0.2, 0.0, 1.0)
    codec, key = make_action_codec(environment), jax.random.key(0)
    network = KnownNetwork(jnp.zeros(()))
    walk = jax.jit(lambda: collect(network, envs, codec, envs.init(key), key, numbers, 5, None))
    _, batch, *_ = walk()
    np.testing.assert_allclose(batch.value_targets, batch.advantages + batch.values)


@pytest.mark.parametrize("name", ["Maze-v0", "Minesweeper-v0", "RubiksCube-partly-scrambled-v0"])
def test_first_minibatch_sees_the_policy_that_collected(name):
    environment = make_once(name)
    config = PPOConfig(envs=2, rollout_steps=16, minibatch_size=16, epochs=1)
    agent = make_ppo(environment, make_spec_network(environment), config)
    _, metrics = jax.jit(lambda: agent.step(agent.init(jax.random.key(0), agent.hyperparameters)))()
    assert abs(float(metrics.first_loss.kl)) < 1e-6
    assert float(metrics.first_loss.clip_fraction) == 0
    assert float(metrics.loss.entropy) > 0


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
@pytest.mark.parametrize("name", OFFLINE)
def test_an_iteration_keeps_the_states_shapes_on_every_environment(name):
    with jax.numpy_rank_promotion("allow"):  # inside some of Jumanji's environments
        agent = make_ppo(make_once(name), make_default_network(make_once(name)), SMALL)
        state = jax.eval_shape(agent.init, jax.random.key(0), agent.hyperparameters)
        after, _ = jax.eval_shape(agent.step, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    given, wanted = ([(x.shape, x.dtype) for x in jax.tree.leaves(t)] for t in (after, state))
    assert given == wanted


def test_value_head_with_an_axis_of_one_is_refused_by_its_shape():
    class WrongNetwork(eqx.Module):
        def __call__(self, observation):
            return jnp.zeros(4), jnp.zeros(1)

    with pytest.raises(TypeError, match=r"the network's value have shape \(1,\).* needs \(\)"):
        make_ppo(make_once("Maze-v0"), lambda key: WrongNetwork(), SMALL)


def test_policy_head_of_a_wrong_size_is_refused_by_its_shape():
    class WrongNetwork(eqx.Module):
        def __call__(self, observation):
            return jnp.zeros(5), jnp.zeros(())

    with pytest.raises(TypeError, match=r"policy outputs have shape \(5,\).* needs \(4,\)"):
        make_ppo(make_once("Maze-v0"), lambda key: WrongNetwork(), SMALL)


def test_no_shuffled_copy_of_the_data_is_ever_built():
    environment = make_once("maze-medium")
    config = PPOConfig(envs=3, rollout_steps=8, minibatch_size=6, epochs=50)
    envs, codec = VectorEnvironment(environment, 3), make_action_codec(environment)
    agent = make_ppo(environment, make_spec_network(environment), config)
    state = jax.jit(agent.init)(jax.random.key(0), agent.hyperparameters)
    network, numbers = agent.network(state), state.hyperparameters
    walk = jax.jit(
        lambda: collect(network, envs, codec, state.envs, jax.random.key(1), numbers, 8, None)
    )
    _, batch, *_ = walk()

    def learn(batch):
        strata = make_strata(config, ONE_DEVICE)
        indices = shuffled_indices(jax.random.key(2), strata, rollout_steps=8, epochs=50)
        loss = functools.partial(
            minibatch_loss, codec=codec, hyperparameters=numbers, normalise_advantages=False
        )
        return fit(network, state.optimiser, batch, indices, loss, numbers)

    jaxpr = jax.make_jaxpr(lambda batch: eqx.filter(learn(batch), eqx.is_array))(batch)
    walls = sum(x.size for x in jax.tree.leaves(batch.observations) if x.ndim == 3)
    sizes = [getattr(v.aval, "size", 0) for e in jaxpr.eqns for v in e.outvars]
    assert max(sizes) < walls * config.epochs / 2


def test_same_seed_gives_the_same_bits():
    assert_equal(small_step()(small_state(3)), small_step()(small_state(3)))


def test_another_seed_gives_another_network():
    first, second = (small_state(seed).params.hidden[0].weight for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_steps_scan_as_they_loop():
    agent = small_agent()
    scanned, _ = jax.jit(lambda state: jax.lax.scan(lambda s, _: agent.step(s), state, None, 2))(
        small_state()
    )
    looped = small_step()(small_step()(small_state())[0])[0]
    assert_equal(scanned, looped, rtol=1e-3, atol=1e-5)


def test_state_holds_arrays_only():
    assert all(eqx.is_array(leaf) for leaf in jax.tree.leaves(small_state()))


def test_step_keeps_structure_shapes_and_dtypes():
    state = small_state()
    after, _ = jax.eval_shape(small_agent().step, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    given = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)]
    assert given == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def test_no_ended_episode_is_counted_as_none():
    environment = CountingEnvironment(min_length=50, max_length=60)
    agent = make_ppo(environment, make_spec_network(environment), SMALL)
    _, metrics = jax.jit(lambda: agent.step(agent.init(jax.random.key(0), agent.hyperparameters)))()
    assert int(metrics.episodes.ended) == 0
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(metrics))


def test_greedy_action_is_the_most_probable_legal_one():
    agent, state = small_agent(), small_state()
    _, timestep = make_once("maze-medium").reset(jax.random.key(0))
    network, observation = agent.network(state), timestep.observation
    logits = np.where(observation.action_mask, network(observation)[0], -np.inf)
    assert int(agent.act(state, None, observation)) == int(logits.argmax())


def test_sampled_actions_are_legal():
    agent, state = small_agent(), small_state()
    _, timestep = make_once("maze-medium").reset(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 500)
    actions = jax.vmap(lambda key: agent.act(state, key, timestep.observation))(keys)
    assert bool(timestep.observation.action_mask[actions].all())


def test_network_may_hold_integers_that_are_not_trained():
    class Shifted(eqx.Module):
        inner: eqx.Module
        shift: jax.Array

        def __call__(self, observation):
            outputs, value = self.inner(observation)  # pyright: ignore[reportCallIssue]
            return outputs + self.shift, value

    make = make_spec_network(make_once("maze-medium"))
    agent = make_ppo(make_once("maze-medium"), lambda key: Shifted(make(key), jnp.array(3)), SMALL)
    state = jax.jit(agent.init)(jax.random.key(0), agent.hyperparameters)
    after, _ = jax.jit(agent.step)(state)
    assert int(agent.network(after).shift) == 3


def test_network_may_hold_pythons_numbers_and_flags():
    class Scaled(eqx.Module):
        inner: eqx.Module
        dropout: eqx.nn.Dropout
        temperature: float

        def __call__(self, observation):
            outputs, value = self.inner(observation)  # pyright: ignore[reportCallIssue]
            return self.dropout(outputs) / self.temperature, value

    make = make_spec_network(make_once("maze-medium"))
    agent = make_ppo(
        make_once("maze-medium"),
        lambda key: Scaled(make(key), eqx.nn.Dropout(inference=True), 2.0),
        SMALL,
    )
    _, metrics = jax.jit(lambda: agent.step(agent.init(jax.random.key(0), agent.hyperparameters)))()
    assert abs(float(metrics.first_loss.kl)) < 1e-6


def test_network_that_returns_one_array_is_refused():
    class WrongNetwork(eqx.Module):
        def __call__(self, observation):
            return jnp.zeros(4)

    with pytest.raises(TypeError, match=r"\(policy outputs, value\), but it gives float32\[4\]"):
        make_ppo(make_once("Maze-v0"), lambda key: WrongNetwork(), SMALL)


def test_environment_that_resets_itself_is_refused():
    environment = AutoResetWrapper(make_once("maze-easy"))
    with pytest.raises(TypeError, match="resets itself"):
        make_ppo(environment, make_spec_network(environment), SMALL)


def test_ppo_learns_the_easy_maze():
    environment = make_once("maze-easy")
    agent = make_ppo(environment, make_spec_network(environment))
    step = jax.jit(agent.step, donate_argnums=0)
    state = jax.jit(agent.init)(jax.random.key(0), agent.hyperparameters)
    for _ in range(5):
        state, _ = step(state)
    _, metrics = step(state)
    assert float(metrics.episodes.returns) / int(metrics.episodes.ended) >= 0.95


@dataclasses.dataclass(frozen=True)
class Settings(PPOConfig):
    """As users have it: in tests all of the package's own classes check what they are made of."""


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"envs": 0}, "envs is 0; give at least 1"),
        ({"epochs": -1}, "epochs is -1; give at least 1"),
        ({"gamma": -0.1}, "gamma is -0.1; give a number from 0 to 1"),
        ({"gae_lambda": 1.5}, "gae_lambda is 1.5; give a number from 0 to 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; give a number above 0"),
        ({"gamma": float("nan")}, "gamma is nan; give a number from 0 to 1"),
        ({"clip_epsilon": float("nan")}, "clip_epsilon is nan; give a number above 0"),
        ({"entropy_weight": -1.0}, "entropy_weight is -1.0; give 0 or more"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; give a number above 0, or inf"),
        ({"max_grad_norm": True}, "max_grad_norm is True; give a number"),
        ({"learning_rate": float("inf")}, "learning_rate is inf; give a number above 0"),
        ({"learning_rate": "3e-4"}, "learning_rate is '3e-4'; give a number"),
        ({"gamma": 1j}, "gamma is 1j; give a number"),
        ({"gamma": None}, "gamma is None; give a number"),
        ({"gamma": jnp.ones(1)}, "gamma is Array.*; give a number"),
        ({"epochs": 2.0}, "epochs is 2.0; give a whole number"),
        ({"epochs": np.float32(2)}, "epochs is 2.0; give a whole number"),
        ({"envs": True}, "envs is True; give a whole number"),
        ({"normalise_values": "false"}, "normalise_values is 'false'; give True or False"),
        ({"normalise_values": 0}, "normalise_values is 0; give True or False"),
        ({"minibatch_size": 1000}, "1000, which does not divide the 8192 samples of 64 env"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        Settings(**settings)


def test_numbers_of_numpy_and_jax_are_settings_like_any_other():
    numbers: dict[str, Any] = {
        "envs": np.int64(32),
        "gamma": np.float32(0.5),
        "learning_rate": jnp.array(0.25),
        "clip_epsilon": jnp.bfloat16(0.5),
        "max_grad_norm": float("inf"),
        "normalise_values": np.False_,
    }
    given = Settings(**numbers)
    wanted = Settings(
        envs=32,
        gamma=0.5,
        learning_rate=0.25,
        clip_epsilon=0.5,
        max_grad_norm=float("inf"),
        normalise_values=False,
    )
    assert given == wanted
    assert repr(given) == repr(wanted)


def test_a_setting_that_is_traced_is_refused():
    with pytest.raises(ValueError, match=r"gamma is .*; give a number"):
        jax.jit(lambda gamma: Settings(gamma=gamma).envs)(0.9)


def test_an_infinite_norm_does_not_clip():
    def norm_after(limit):
        settings = PPOHyperparameters(1e-3, 1e-8, limit, *[0.0] * 5)
        clip = make_optimiser(settings)
        gradient = {"x": jnp.array([3e4, 4e4])}
        # Adam divides a first gradient by its own size, so it is the state that shows it.
        _, state = clip.update(gradient, clip.init(gradient))
        (adam,) = (s for s in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(s))
        return optax.tree.norm(adam.mu) / 0.1

    np.testing.assert_allclose(norm_after(jnp.inf), 5e4, rtol=1e-5)
    np.testing.assert_allclose(norm_after(2.0), 2.0, rtol=1e-5)


def _is_adam(state):
    return isinstance(state, optax.ScaleByAdamState)


def test_lengths_of_many_long_episodes_are_added_up_without_overflow():
    lengths = np.random.default_rng(0).integers(30_000, 50_000, (4, 16_384)).astype(np.int32)
    ended = np.random.default_rng(1).random(lengths.shape) < 0.99
    none, ended = jnp.zeros(lengths.shape), jnp.asarray(ended)
    transitions = Transition(
        none, none, ended, none > 0, None, none, jnp.asarray(lengths), extras={}
    )
    sums = jax.jit(sum_episodes)(transitions)
    exact = int(np.sum(lengths, where=np.asarray(ended), dtype=np.int64))
    assert exact > 2**31
    np.testing.assert_allclose(float(sums.lengths), exact, rtol=1e-7)
    assert int(sums.ended) == ended.sum()


def test_every_setting_is_either_static_or_in_the_state():
    names = {field.name for field in dataclasses.fields(PPOConfig)}
    static = {
        "envs",
        "rollout_steps",
        "epochs",
        "minibatch_size",
        "normalise_advantages",
        "normalise_values",
    }
    assert names == static | set(PPOHyperparameters._fields)
