"""Proximal policy optimisation: Schulman et al. 2017, https://arxiv.org/abs/1707.06347."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, ScalarLike, Shaped
from jumanji.wrappers import AutoResetWrapper, VmapAutoResetWrapper

from vernal.core import (
    Batch,
    Moments,
    PPOLossParts,
    discounted_returns,
    gae,
    init_moments,
    make_batch,
    minibatch_indices,
    normalise,
    ppo_loss,
    take,
    update_moments,
)

from ..actions import ActionCodec, make_action_codec
from ..environments import Environment, EnvState, Transition, VectorEnvironment
from ..scan import run_if, scan, value_and_grad
from .agent import Agent, EpisodeSums, sum_episodes

# Memory of 20 iterations: returns grow as the policy learns.
_RETURNS_DECAY = 0.95


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
    """Global norm at which a gradient is clipped."""
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
        for name in ("envs", "rollout_steps", "epochs", "minibatch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1.")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number from 0 to 1.")
        for name in ("learning_rate", "adam_epsilon", "max_grad_norm", "clip_epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0.")
        for name in ("entropy_weight", "value_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more.")
        samples = self.envs * self.rollout_steps
        if samples % self.minibatch_size:
            raise ValueError(
                f"minibatch_size is {self.minibatch_size}, which does not divide the {samples} "
                f"samples of {self.envs} environments times {self.rollout_steps} steps; choose a "
                "divisor."
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


@runtime_checkable
class KeepsStatistics(Protocol):
    """A network that keeps running statistics of what it sees; they are not trained."""

    def with_statistics_of(self, observations: PyTree[Array]) -> Any:
        """The same network, a batch of observations `[N, ...]` taken in."""
        ...


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

    Returns:
        The agent.

    Raises:
        TypeError: the network returns outputs or a value of a wrong shape.
        ValueError: the environment's action spec cannot be served.

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
    config = PPOConfig() if config is None else config
    codec = make_action_codec(environment)
    envs = VectorEnvironment(environment, config.envs)
    # Structure and functions of the network, closed over; its arrays live in the state.
    shapes = eqx.filter_eval_shape(make_network, jax.random.key(0))
    static = eqx.filter(shapes, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))
    check_network(shapes, environment, codec)

    def init(key: PRNGKeyArray, hyperparameters: PPOHyperparameters) -> PPOState:
        network_key, envs_key, key = jax.random.split(key, 3)
        params = eqx.filter(make_network(network_key), eqx.is_array)
        return PPOState(
            params=params,
            optimiser=make_optimiser(hyperparameters).init(
                eqx.filter(params, eqx.is_inexact_array)
            ),
            returns=init_moments(),
            envs=envs.init(envs_key),
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
            returns = update_moments(returns, paid, decay=_RETURNS_DECAY)
            batch = standardise(batch, returns)
        network, optimiser, (losses, norms) = update(
            network, state.optimiser, batch, codec, update_key, state.hyperparameters, config
        )
        if isinstance(network, KeepsStatistics):
            network = network.with_statistics_of(batch.observations)
        metrics = PPOMetrics(
            episodes=episodes,
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

    def act(state: PPOState, key: PRNGKeyArray | None, observation: Any) -> Any:
        policy, _ = evaluate_policy(eqx.combine(state.params, static), codec, observation)
        return codec.to_environment(policy.mode() if key is None else policy.sample(key))

    return Agent(
        init=init,
        step=step,
        act=act,
        hyperparameters=PPOHyperparameters(
            **{name: getattr(config, name) for name in PPOHyperparameters._fields}
        ),
        steps_per_iteration=config.envs * config.rollout_steps,
        network=lambda state: eqx.combine(state.params, static),
    )


def evaluate_policy(network: Any, codec: ActionCodec, observation: Any) -> tuple[Any, Array]:
    """Masked policy and value in one state: the one place where a network is called."""
    outputs, value = network(observation)
    return codec.distribution(outputs, codec.legal(observation)), value


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
        actions = policies.sample(key)
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
    values = samples.values
    if returns is not None:
        # Until returns differ, nothing is known of their size, and all values are the mean.
        scale = jnp.where(returns.varies(), returns.deviation(), 0)
        values, next_values = (returns.mean + scale * v for v in (values, next_values))
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
    scale = returns.deviation()
    return batch._replace(
        values=(batch.values - returns.mean) / scale,
        value_targets=(batch.value_targets - returns.mean) / scale,
        advantages=batch.advantages / scale,
    )


def update(
    network: Any,
    optimiser: optax.OptState,
    batch: Batch,
    codec: ActionCodec,
    key: PRNGKeyArray,
    hyperparameters: PPOHyperparameters,
    config: PPOConfig,
) -> tuple[Any, optax.OptState, tuple[PPOLossParts, Float[Array, " minibatches"]]]:
    """Pass `epochs` times over the batch; a minibatch is gathered when it is used."""
    shuffle = functools.partial(
        minibatch_indices,
        size=config.envs * config.rollout_steps,
        minibatch_size=config.minibatch_size,
    )
    indices = jax.vmap(shuffle)(jax.random.split(key, config.epochs))
    adam = make_optimiser(hyperparameters)

    def learn(carry: Any, indices: Int[Array, " n"]) -> Any:
        network, optimiser = carry
        minibatch = take(batch, indices)
        (_, parts), gradient = value_and_grad(minibatch_loss)(
            network, minibatch, codec, hyperparameters, config.normalise_advantages
        )
        change, optimiser = adam.update(gradient, optimiser)
        return (eqx.apply_updates(network, change), optimiser), (parts, optax.tree.norm(gradient))

    (network, optimiser), reports = scan(
        learn, (network, optimiser), indices.reshape(-1, config.minibatch_size)
    )
    return network, optimiser, reports


def minibatch_loss(
    network: Any,
    batch: Batch,
    codec: ActionCodec,
    hyperparameters: PPOHyperparameters,
    normalise_advantages: bool,
) -> tuple[Float[Array, ""], PPOLossParts]:
    """Loss of the network on a minibatch, and its parts."""
    policies, values = jax.vmap(functools.partial(evaluate_policy, network, codec))(
        batch.observations
    )
    advantages = normalise(batch.advantages) if normalise_advantages else batch.advantages
    return ppo_loss(
        policies.log_prob(batch.actions),
        batch.log_probs,
        advantages,
        policies.entropy(),
        values,
        batch.value_targets,
        clip_epsilon=hyperparameters.clip_epsilon,
        value_weight=hyperparameters.value_weight,
        entropy_weight=hyperparameters.entropy_weight,
    )


def make_optimiser(hyperparameters: PPOHyperparameters) -> optax.GradientTransformation:
    """Adam on clipped gradients; its numbers may be traced."""
    return optax.chain(
        optax.clip_by_global_norm(jnp.asarray(hyperparameters.max_grad_norm)),
        optax.adam(
            jnp.asarray(hyperparameters.learning_rate),
            eps=jnp.asarray(hyperparameters.adam_epsilon),
        ),
    )


def check_network(network: Any, environment: Environment, codec: ActionCodec) -> None:
    """Refuse a network whose outputs the agent cannot use, before anything compiles."""
    if isinstance(environment, (AutoResetWrapper, VmapAutoResetWrapper)):
        raise TypeError(
            "the environment resets itself, which hides the true last observations; give the one "
            "inside the wrapper."
        )
    _, timestep = jax.eval_shape(environment.reset, jax.random.key(0))
    if isinstance(network, KeepsStatistics):
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), timestep.observation
        )
        after = eqx.filter_eval_shape(lambda n, o: n.with_statistics_of(o), network, batch)
        if jax.tree.structure(after) != jax.tree.structure(network):
            raise TypeError(
                "the network's with_statistics_of should give the same network with other "
                f"statistics, but it gives {type(after).__name__}."
            )
    result = eqx.filter_eval_shape(lambda n, o: n(o), network, timestep.observation)
    if not (isinstance(result, tuple) and len(result) == 2 and all(map(_is_float, result))):
        raise TypeError(
            "the network should map one observation to two float arrays, (policy outputs, value), "
            f"but it gives {jax.tree.map(lambda x: f'{x.dtype}{list(x.shape)}', result)}."
        )
    outputs, value = result
    for name, given, wanted in (
        ("policy outputs", outputs.shape, codec.output_shape),
        ("value", value.shape, ()),
    ):
        if given != wanted:
            raise TypeError(
                f"the network's {name} have shape {given} for one observation, but this "
                f"environment's agent needs {wanted}."
            )


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
