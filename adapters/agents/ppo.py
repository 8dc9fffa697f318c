"""Proximal policy optimisation: Schulman et al. 2017, https://arxiv.org/abs/1707.06347."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, ScalarLike, Shaped

from vernal.core import (
    Batch,
    Moments,
    PPOLossParts,
    discounted_returns,
    gae,
    init_moments,
    make_batch,
    normalise,
    ppo_loss,
    update_moments,
)

from ..actions import ActionCodec, make_action_codec
from ..environments import Environment, EnvState, Transition, VectorEnvironment
from ..mesh import ONE_DEVICE, Devices, lay_out
from ..scan import run_if
from .agent import Agent, EpisodeSums, sum_episodes
from .learner import (
    RETURNS_DECAY,
    KeepsStatistics,
    check_settings,
    evaluate_policy,
    fit,
    in_deviations,
    in_reward_units,
    init_params,
    make_act,
    make_envs,
    make_strata,
    settings_or_default,
    shuffled_indices,
    static_part,
)


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO; checked when made."""

    envs: int = 64
    """Environments side by side."""
    rollout_steps: int = 128
    """Steps that each environment takes in an iteration."""
    epochs: int = 4
    """Passes over the data of an iteration."""
    minibatch_size: int = 512
    """Samples in a gradient step; divides envs times rollout_steps."""
    learning_rate: float = 3e-4
    """Adam's step size, in units of the parameters."""
    adam_epsilon: float = 1e-7
    """Adam's term against division by zero."""
    max_grad_norm: float = 0.5
    """Global norm at which a gradient is clipped; inf for no clipping."""
    gamma: float = 0.99
    """Discount of one step, in [0, 1]."""
    gae_lambda: float = 0.95
    """Horizon blend of the advantages, in [0, 1]."""
    clip_epsilon: float = 0.2
    """How far a probability ratio may leave 1 before its gradient stops."""
    entropy_weight: float = 0.01
    """Weight of the entropy bonus, in units of the advantage per nat."""
    value_weight: float = 1.0
    """Weight of half the squared error of the values."""
    normalise_values: bool = True
    """Whether values and advantages are measured by the running mean and deviation of discounted
    returns, as far as a rollout sees them: rewards may then be of any size."""
    normalise_advantages: bool = False
    """Whether the advantages of a minibatch are scaled to mean 0 and deviation 1. Helps where
    returns are large; where a task is nearly solved it turns noise into signal."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything compiles."""
        check_settings(
            self,
            counts=("envs", "rollout_steps", "epochs", "minibatch_size"),
            fractions=("gamma", "gae_lambda"),
            positive=("learning_rate", "adam_epsilon", "clip_epsilon"),
            not_negative=("entropy_weight", "value_weight"),
            limits=("max_grad_norm",),
        )


class PPOHyperparameters(NamedTuple):
    """The settings that are numbers inside the compiled program: they may be traced and swept."""

    learning_rate: ScalarLike
    adam_epsilon: ScalarLike
    max_grad_norm: ScalarLike
    gamma: ScalarLike
    gae_lambda: ScalarLike
    clip_epsilon: ScalarLike
    entropy_weight: ScalarLike
    value_weight: ScalarLike


class PPOState(NamedTuple):
    """Everything that PPO carries from one iteration to the next; arrays only."""

    params: PyTree
    optimiser: optax.OptState
    returns: Moments
    envs: EnvState
    key: PRNGKeyArray
    iteration: Int[Array, ""]
    hyperparameters: PPOHyperparameters


class PPOMetrics(NamedTuple):
    """What a person reads of one iteration.

    Attributes:
        episodes: those that ended during the rollout.
        loss: parts of the loss, means over all minibatches of all epochs.
        first_loss: parts of the very first minibatch: no update has happened, so its KL is 0
            and its ratios are 1.
        gradient_norm: mean global norm of the gradients, before they are clipped.
    """

    episodes: EpisodeSums
    loss: PPOLossParts
    first_loss: PPOLossParts
    gradient_norm: Float[Array, ""]


class Sample(NamedTuple):
    """One step of a rollout, as the learner needs it."""

    observations: PyTree[Shaped[Array, "B ..."]]
    actions: Shaped[Array, "B ..."]
    log_probs: Float[Array, " B"]
    values: Float[Array, " B"]
    last_values: Float[Array, " B"]


def make_ppo(
    environment: Environment,
    make_network: Callable[[PRNGKeyArray], eqx.Module],
    config: PPOConfig | None = None,
    *,
    mesh: Mesh | None = None,
) -> Agent:
    """Build PPO for an environment and a network.

    One `step` takes `rollout_steps` steps in every environment, estimates advantages, and passes
    `epochs` times over the data in shuffled minibatches.

    Args:
        environment: a Jumanji environment, or anything with its `reset`, `step` and specs,
            without automatic reset.
        make_network: from a key to a module that maps one observation to
            `(policy outputs, value)`; the outputs have the codec's `output_shape`, the value
            has shape `()`. One that `KeepsStatistics` is given each iteration's observations.
        config: settings; the defaults if not given.
        mesh: devices to spread the environments over; what is learned is the same on any number
            of them, within rounding.

    Returns:
        The agent.

    Raises:
        TypeError: the network returns outputs or a value of a wrong shape.
        ValueError: the environment's action spec cannot be served; or the devices divide
            `envs` or `minibatch_size` unevenly.

    Example:
        >>> import jax
        >>> from vernal.adapters.networks import make_spec_network
        >>> from vernal.adapters.registry import make_environment
        >>> environment = make_environment("maze-easy")
        >>> config = PPOConfig(envs=2, rollout_steps=8, minibatch_size=8, epochs=1)
        >>> agent = make_ppo(environment, make_spec_network(environment), config)
        >>> state = agent.init(jax.random.key(0), agent.hyperparameters)
        >>> state, metrics = jax.jit(agent.step)(state)
        >>> bool(abs(metrics.first_loss.kl) < 1e-6)
        True
    """
    config = settings_or_default(PPOConfig, config)
    devices = Devices(mesh)
    codec = make_action_codec(environment)
    envs = make_envs(environment, config, devices)
    static = static_part(make_network, environment, codec)

    def init(key: PRNGKeyArray, hyperparameters: PPOHyperparameters) -> PPOState:
        network_key, envs_key, key = jax.random.split(key, 3)
        params, optimiser = init_params(make_network, network_key, hyperparameters)
        return PPOState(
            params=params,
            optimiser=optimiser,
            returns=init_moments(),
            envs=envs.init(envs_key, devices.index() * envs.num_envs),
            key=key,
            iteration=jnp.zeros((), jnp.int32),
            hyperparameters=jax.tree.map(jnp.float32, hyperparameters),
        )

    def step(state: PPOState) -> tuple[PPOState, PPOMetrics]:
        network = eqx.combine(state.params, static)
        key, rollout_key, update_key = jax.random.split(state.key, 3)
        returns = state.returns if config.normalise_values else None
        env_state, batch, episodes, paid = collect(
            network,
            envs,
            codec,
            state.envs,
            rollout_key,
            state.hyperparameters,
            config.rollout_steps,
            returns,
        )
        if returns is not None:
            returns = update_moments(returns, devices.gather(paid), decay=RETURNS_DECAY)
            batch = standardise(batch, returns)
        loss = functools.partial(
            minibatch_loss,
            codec=codec,
            hyperparameters=state.hyperparameters,
            normalise_advantages=config.normalise_advantages,
            devices=devices,
        )
        indices = shuffled_indices(
            update_key,
            make_strata(config, devices),
            rollout_steps=config.rollout_steps,
            epochs=config.epochs,
        )
        network, optimiser, (losses, norms) = fit(
            network, state.optimiser, batch, indices, loss, state.hyperparameters, devices
        )
        if isinstance(network, KeepsStatistics):
            network = network.with_statistics_of(devices.gather(batch.observations))
        metrics = PPOMetrics(
            episodes=devices.sum(episodes),
            loss=jax.tree.map(jnp.mean, losses),
            first_loss=jax.tree.map(lambda x: x[0], losses),
            gradient_norm=jnp.mean(norms),
        )
        state = PPOState(
            params=eqx.filter(network, eqx.is_array),
            optimiser=optimiser,
            returns=state.returns if returns is None else returns,
            envs=env_state,
            key=key,
            iteration=state.iteration + 1,
            hyperparameters=state.hyperparameters,
        )
        return state, metrics

    specs = lay_out(PPOState, envs=EnvState.split_along(devices.axis))
    return Agent(
        init=devices.spread(init, in_specs=PartitionSpec(), out_specs=specs),
        step=devices.spread(step, in_specs=(specs,), out_specs=(specs, PartitionSpec())),
        specs=specs,
        act=make_act(codec, static),
        hyperparameters=PPOHyperparameters(
            **{name: getattr(config, name) for name in PPOHyperparameters._fields}
        ),
        steps_per_iteration=config.envs * config.rollout_steps,
        network=lambda state: eqx.combine(state.params, static),
    )


def collect(
    network: Any,
    envs: VectorEnvironment,
    codec: ActionCodec,
    env_state: EnvState,
    key: PRNGKeyArray,
    hyperparameters: PPOHyperparameters,
    num_steps: int,
    returns: Moments | None,
) -> tuple[EnvState, Batch, EpisodeSums, Float[Array, " N"]]:
    """Walk `num_steps` steps under the policy and estimate the advantages.

    With `returns` the network's values are deviations from their mean. The batch is in units of
    the rewards; beside it, each step's discounted return, of the rewards alone.
    """
    evaluate = jax.vmap(functools.partial(evaluate_policy, network, codec))

    def walk(env_state: EnvState, key: PRNGKeyArray) -> tuple[EnvState, tuple[Sample, Transition]]:
        observations = env_state.observations
        policies, values = evaluate(observations)
        actions = jax.vmap(lambda policy, key: policy.sample(key))(policies, env_state.keys(key))
        log_probs = policies.log_prob(actions)
        env_state, transitions = envs.step(env_state, jax.vmap(codec.to_environment)(actions))
        # A truncated episode goes on in truth: it is worth what its own last state is.
        last_values = run_if(
            jnp.any(transitions.truncated),
            lambda: evaluate(transitions.next_observations)[1],
            jnp.zeros_like(values),
        )
        # What is not returned is not stored.
        transitions = transitions._replace(next_observations=None, extras=None)
        return env_state, (
            Sample(observations, actions, log_probs, values, last_values),
            transitions,
        )

    keys = jax.random.split(key, num_steps)
    env_state, (samples, transitions) = jax.lax.scan(walk, env_state, keys)
    _, final_values = evaluate(env_state.observations)
    following = jnp.concatenate([samples.values[1:], final_values[None]])
    next_values = jnp.where(transitions.truncated, samples.last_values, following)
    values, next_values = (in_reward_units(v, returns) for v in (samples.values, next_values))
    discounts = jnp.asarray(hyperparameters.gamma) * transitions.discounts
    ends = transitions.resets
    advantages = gae(
        transitions.rewards,
        discounts,
        values,
        next_values,
        ends,
        lambda_=hyperparameters.gae_lambda,
    )
    batch = make_batch(
        samples.observations,
        samples.actions,
        samples.log_probs,
        values,
        advantages,
        advantages + values,
    )
    # Without the network's own values: a scale that came from them would feed on itself.
    paid = discounted_returns(transitions.rewards, discounts, jnp.zeros_like(values), ends)
    return env_state, batch, sum_episodes(transitions), paid.ravel()


def standardise(batch: Batch, returns: Moments) -> Batch:
    """The same batch in deviations from the mean return, of order 1 whatever the rewards are.

    Section 2 of van Hasselt et al. 2016, https://arxiv.org/abs/1602.07714.
    """
    return batch._replace(
        values=in_deviations(batch.values, returns),
        value_targets=in_deviations(batch.value_targets, returns),
        advantages=batch.advantages / returns.deviation(),
    )


def minibatch_loss(
    network: Any,
    batch: Batch,
    codec: ActionCodec,
    hyperparameters: PPOHyperparameters,
    normalise_advantages: bool,
    devices: Devices = ONE_DEVICE,
) -> tuple[Float[Array, ""], PPOLossParts]:
    """Loss of the network on a minibatch, and its parts."""
    policies, values = jax.vmap(functools.partial(evaluate_policy, network, codec))(
        batch.observations
    )
    log_probs, entropies = policies.log_prob(batch.actions), policies.entropy()
    batch = batch._replace(observations=None, actions=None)
    log_probs, entropies, values, batch = devices.gather_for_loss(
        (log_probs, entropies, values, batch)
    )
    advantages = normalise(batch.advantages) if normalise_advantages else batch.advantages
    return ppo_loss(
        log_probs,
        batch.log_probs,
        advantages,
        entropies,
        values,
        batch.value_targets,
        clip_epsilon=hyperparameters.clip_epsilon,
        value_weight=hyperparameters.value_weight,
        entropy_weight=hyperparameters.entropy_weight,
    )
