"""AlphaZero with Gumbel search, on any environment that can be simulated.

Silver et al. 2017, https://arxiv.org/abs/1712.01815: a network proposes, a search in the
environment's own simulator improves on it, and the network learns what the search found. The
search is that of Danihelka et al. 2022, https://openreview.net/forum?id=bERaNdoegnO, which
improves on the policy with as few simulations as there are actions, and fewer.
"""

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
    ModelTransition,
    Moments,
    PolicyValueLossParts,
    Replay,
    add_to_replay,
    discounted_returns,
    init_moments,
    init_replay,
    lambda_returns,
    make_recurrent_fn,
    make_root,
    mask_logits,
    policy_value_loss,
    replay_indices,
    update_moments,
)

from ..actions import ActionCodec, make_action_codec, one_choice
from ..environment_model import EnvironmentModel, SimulatorState, make_environment_model
from ..environments import Environment, EnvState, Transition, VectorEnvironment
from ..mesh import ONE_DEVICE, Devices, lay_out
from ..scan import run_if
from ..search import legal_actions, qtransform_completed_by_mix_value, search, search_values
from .agent import Agent, EpisodeSums, sum_episodes
from .learner import (
    RETURNS_DECAY,
    KeepsStatistics,
    Strata,
    call_network,
    check_settings,
    fit,
    in_deviations,
    in_reward_units,
    init_params,
    make_act,
    make_envs,
    make_strata,
    settings_or_default,
    static_part,
)


@dataclasses.dataclass(frozen=True)
class AlphaZeroConfig:
    """Settings of AlphaZero; checked when made."""

    envs: int = 64
    """Environments side by side."""
    rollout_steps: int = 32
    """Steps that each environment takes in an iteration."""
    simulations: int = 16
    """States that the search evaluates before each step."""
    max_considered_actions: int = 16
    """Actions that the search tries at the root, drawn by the policy."""
    epochs: int = 4
    """Gradient steps of an iteration, in passes over as many samples as it collects."""
    minibatch_size: int = 256
    """Samples in a gradient step; divides envs times rollout_steps."""
    replay_iterations: int = 16
    """Iterations whose samples are kept and drawn from; 1 for the newest alone."""
    learning_rate: float = 1e-3
    """Adam's step size, in units of the parameters."""
    adam_epsilon: float = 1e-7
    """Adam's term against division by zero."""
    max_grad_norm: float = 0.5
    """Global norm at which a gradient is clipped; inf for no clipping."""
    gamma: float = 0.99
    """Discount of one step, in [0, 1]."""
    td_lambda: float = 0.95
    """Horizon blend of the value targets, in [0, 1]: 0 is what the search says of the next
    state, 1 is what came to pass."""
    value_weight: float = 1.0
    """Weight of half the squared error of the values."""
    exploration: float = 0.1
    """Share of the uniform policy that is mixed into the network's before a search, in [0, 1]:
    a policy that is sure too early finds nothing new. Evaluation uses none."""
    value_resolution: float = 0.5
    """Differences between actions that are smaller than this, in deviations of the returns, are
    not magnified: the search rescales the values of a state's actions to [0, 1], and where they
    hardly differ noise would look like knowledge."""
    normalise_values: bool = True
    """Whether values are measured by the running mean and deviation of discounted returns, as
    far as a rollout sees them: rewards may then be of any size."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything compiles."""
        counts = ("envs", "rollout_steps", "simulations", "max_considered_actions", "epochs")
        check_settings(
            self,
            counts=(*counts, "minibatch_size", "replay_iterations"),
            fractions=("gamma", "td_lambda", "exploration"),
            positive=("learning_rate", "adam_epsilon", "value_resolution"),
            not_negative=("value_weight",),
            limits=("max_grad_norm",),
        )


class AlphaZeroHyperparameters(NamedTuple):
    """The settings that are numbers inside the compiled program: they may be traced and swept."""

    learning_rate: ScalarLike
    adam_epsilon: ScalarLike
    max_grad_norm: ScalarLike
    gamma: ScalarLike
    td_lambda: ScalarLike
    value_weight: ScalarLike
    exploration: ScalarLike


class AlphaZeroState(NamedTuple):
    """Everything that AlphaZero carries from one iteration to the next; arrays only."""

    params: PyTree
    optimiser: optax.OptState
    returns: Moments
    replay: Replay
    envs: EnvState
    key: PRNGKeyArray
    iteration: Int[Array, ""]
    hyperparameters: AlphaZeroHyperparameters


class AlphaZeroMetrics(NamedTuple):
    """What a person reads of one iteration.

    Attributes:
        episodes: those that ended during the rollout.
        loss: parts of the loss, means over all minibatches of all epochs.
        gradient_norm: mean global norm of the gradients, before they are clipped.
    """

    episodes: EpisodeSums
    loss: PolicyValueLossParts
    gradient_norm: Float[Array, ""]


class Sample(NamedTuple):
    """One step of a rollout, as the learner needs it."""

    observations: PyTree[Shaped[Array, "B ..."]]
    target_probs: Float[Array, "B A"]
    values: Float[Array, " B"]
    last_values: Float[Array, " B"]


class Batch(NamedTuple):
    """What is learned from; of a rollout it is `[T, B, ...]`."""

    observations: PyTree[Shaped[Array, "..."]]
    target_probs: Float[Array, " *batch A"]
    value_targets: Float[Array, " *batch"]


class ScaledNetwork(NamedTuple):
    """What says how good a state is: a network, and the units of its values.

    Attributes:
        network: its values are deviations from the mean return, if `returns` are given.
        returns: running moments of discounted returns.
    """

    network: Any
    returns: Moments | None

    def scale(self) -> Float[Array, ""]:
        """One deviation of the returns, in units of the rewards; 1 until they differ."""
        return jnp.ones(()) if self.returns is None else self.returns.deviation()

    def evaluate(self, observation: Any) -> tuple[Array, Array]:
        """The network's outputs, and its value in units of the rewards."""
        outputs, value = call_network(self.network, observation)
        return outputs, in_reward_units(value, self.returns)


def make_model(environment: Environment) -> EnvironmentModel:
    """The environment's simulator, with rewards and values in deviations of the returns."""

    def evaluate(scaled: ScaledNetwork, observation: Any) -> tuple[Array, Array]:
        outputs, value = scaled.evaluate(observation)
        return outputs, value / scaled.scale()

    model = make_environment_model(environment, evaluate)

    def transition(scaled: ScaledNetwork, *where_from: Any) -> ModelTransition:
        arrived = model.transition(scaled, *where_from)
        return arrived._replace(reward=arrived.reward / scaled.scale())

    return model._replace(transition=transition)


def make_alphazero(
    environment: Environment,
    make_network: Callable[[PRNGKeyArray], eqx.Module],
    config: AlphaZeroConfig | None = None,
    *,
    mesh: Mesh | None = None,
) -> Agent:
    """Build AlphaZero for an environment and a network.

    One `step` takes `rollout_steps` steps in every environment, each after a search of
    `simulations` states, and passes `epochs` times over the data in shuffled minibatches.

    The search walks in copies of the environment whose randomness is its own, so it plans for
    what may happen, not for what will; see `make_environment_model`.

    Args:
        environment: a Jumanji environment, or anything with its `reset`, `step` and specs,
            without automatic reset.
        make_network: as for `make_ppo`.
        config: settings; the defaults if not given.
        mesh: as for `make_ppo`; searches and past samples are spread too.

    Returns:
        The agent. Its `act` is the network alone; its `plan` searches.

    Raises:
        TypeError: the network returns outputs or a value of a wrong shape.
        ValueError: actions are continuous, or too many for a tree; or the devices divide `envs`
            or `minibatch_size` unevenly.

    Example:
        >>> import jax
        >>> from vernal.adapters.networks import make_spec_network
        >>> from vernal.adapters.registry import make_environment
        >>> environment = make_environment("maze-easy")
        >>> config = AlphaZeroConfig(
        ...     envs=2, rollout_steps=4, simulations=4, minibatch_size=8, epochs=1
        ... )
        >>> agent = make_alphazero(environment, make_spec_network(environment), config)
        >>> state = agent.init(jax.random.key(0), agent.hyperparameters)
        >>> state, metrics = jax.jit(agent.step)(state)
        >>> bool(metrics.loss.kl >= 0)
        True
    """
    config = settings_or_default(AlphaZeroConfig, config)
    devices = Devices(mesh)
    codec = make_action_codec(environment)
    envs = make_envs(environment, config, devices)
    static = static_part(make_network, environment, codec)

    model = make_model(environment)
    samples_per_iteration = config.envs * config.rollout_steps

    def init(key: PRNGKeyArray, hyperparameters: AlphaZeroHyperparameters) -> AlphaZeroState:
        network_key, envs_key, key = jax.random.split(key, 3)
        params, optimiser = init_params(make_network, network_key, hyperparameters)
        env_state = envs.init(envs_key, devices.index() * envs.num_envs)
        strata = make_strata(config, devices)
        sample = Batch(
            observations=jax.tree.map(lambda x: x[0], env_state.observations),
            target_probs=jnp.zeros(model.num_actions),
            value_targets=jnp.zeros(()),
        )
        return AlphaZeroState(
            params=params,
            optimiser=optimiser,
            returns=init_moments(),
            replay=init_stores(sample, strata, config),
            envs=env_state,
            key=key,
            iteration=jnp.zeros((), jnp.int32),
            hyperparameters=jax.tree.map(jnp.float32, hyperparameters),
        )

    def scaled_network(state: AlphaZeroState) -> ScaledNetwork:
        returns = state.returns if config.normalise_values else None
        return ScaledNetwork(eqx.combine(state.params, static), returns)

    def step(state: AlphaZeroState) -> tuple[AlphaZeroState, AlphaZeroMetrics]:
        key, rollout_key, fit_key = jax.random.split(state.key, 3)
        scaled = scaled_network(state)
        env_state, rollout, episodes, paid = collect(
            scaled, envs, model, state.envs, rollout_key, state.hyperparameters, config
        )
        returns = state.returns
        if config.normalise_values:
            returns = update_moments(returns, devices.gather(paid), decay=RETURNS_DECAY)
        strata = make_strata(config, devices)
        replay = add_to_stores(state.replay, strata.regroup(rollout))
        samples = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), replay.samples)
        if config.normalise_values:
            targets = in_deviations(samples.value_targets, returns)
            samples = samples._replace(value_targets=targets)
        loss = functools.partial(
            minibatch_loss, codec=codec, hyperparameters=state.hyperparameters, devices=devices
        )
        network, optimiser, (losses, norms) = fit(
            scaled.network,
            state.optimiser,
            samples,
            draw_indices(replay, fit_key, strata, config),
            loss,
            state.hyperparameters,
            devices,
        )
        if isinstance(network, KeepsStatistics):
            observations = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), rollout.observations)
            network = network.with_statistics_of(devices.gather(observations))
        metrics = AlphaZeroMetrics(
            episodes=devices.sum(episodes),
            loss=jax.tree.map(jnp.mean, losses),
            gradient_norm=jnp.mean(norms),
        )
        state = AlphaZeroState(
            params=eqx.filter(network, eqx.is_array),
            optimiser=optimiser,
            returns=returns,
            replay=replay,
            envs=env_state,
            key=key,
            iteration=state.iteration + 1,
            hyperparameters=state.hyperparameters,
        )
        return state, metrics

    @functools.partial(jax.jit, static_argnames="simulations")
    def plan(
        state: AlphaZeroState,
        key: PRNGKeyArray,
        environment_state: Any,
        observation: Any,
        *,
        simulations: int,
    ) -> Any:
        seen = SimulatorState(environment_state, observation)
        output = search_state(
            scaled_network(state),
            seen,
            key,
            model=model,
            gamma=state.hyperparameters.gamma,
            config=config,
            simulations=simulations,
            gumbel_scale=0.0,  # The best action found, not a draw.
        )
        return model.to_environment(output.action)

    specs = lay_out(
        AlphaZeroState,
        envs=EnvState.split_along(devices.axis),
        replay=lay_out(Replay, samples=PartitionSpec(devices.axis)),
    )
    return Agent(
        init=devices.spread(init, in_specs=PartitionSpec(), out_specs=specs),
        step=devices.spread(step, in_specs=(specs,), out_specs=(specs, PartitionSpec())),
        act=make_act(codec, static),
        hyperparameters=AlphaZeroHyperparameters(
            **{name: getattr(config, name) for name in AlphaZeroHyperparameters._fields}
        ),
        steps_per_iteration=samples_per_iteration,
        network=lambda state: eqx.combine(state.params, static),
        plan=plan,
        specs=specs,
    )


# Axes of several stores side by side, for `vmap`.
_STORES = lay_out(Replay, samples=0, place=None, filled=None)


def init_stores(sample: Any, strata: Strata, config: AlphaZeroConfig) -> Replay:
    """Empty stores of past samples, one for each stratum, that are filled in step.

    The samples are `[S, C, ...]`; one place and one count hold for all of them.
    """
    capacity = config.replay_iterations * config.rollout_steps * strata.envs
    store = init_replay(sample, capacity=capacity)
    several = jax.tree.map(
        lambda x: jnp.zeros((len(strata.here), *x.shape), x.dtype), store.samples
    )
    return store._replace(samples=several)


def add_to_stores(stores: Replay, rollout: Batch) -> Replay:
    """Add a rollout `[S, samples, ...]`, to each store its own."""
    return jax.vmap(add_to_replay, in_axes=(_STORES, 0), out_axes=_STORES)(stores, rollout)


def draw_indices(
    stores: Replay, key: PRNGKeyArray, strata: Strata, config: AlphaZeroConfig
) -> Int[Array, "minibatches n"]:
    """Which samples to learn from, equally many of each store; for `fit`, the stores joined."""
    minibatches = config.epochs * config.envs * config.rollout_steps // config.minibatch_size
    draw = functools.partial(replay_indices, minibatches=minibatches, minibatch_size=strata.share)
    places = jax.vmap(draw, in_axes=(_STORES, 0))(stores, strata.keys(key))
    return strata.in_stores(places, jax.tree.leaves(stores.samples)[0].shape[1])


def search_state(
    scaled: ScaledNetwork,
    state: SimulatorState,
    key: PRNGKeyArray,
    *,
    model: EnvironmentModel,
    gamma: ScalarLike,
    config: AlphaZeroConfig,
    simulations: int,
    exploration: ScalarLike = 0.0,
    gumbel_scale: float = 1.0,
) -> Any:
    """Search from a state, in the model's units; the key is consumed."""
    roots = make_root(model.predict, scaled, jax.tree.map(lambda x: x[None], state))
    root = jax.tree.map(lambda x: x[0], roots)
    qtransform = functools.partial(
        qtransform_completed_by_mix_value, epsilon=config.value_resolution
    )
    return search(
        scaled,
        key,  # Every copy has its own, on whatever device.
        root._replace(prior_logits=mix_with_uniform(root.prior_logits, exploration)),
        make_recurrent_fn(model.predict, model.transition, gamma=gamma),
        simulations,
        max_num_considered_actions=config.max_considered_actions,
        qtransform=qtransform,
        same_on_devices=True,
        gumbel_scale=gumbel_scale,
    )


def mix_with_uniform(prior_logits: Float[Array, "*B A"], share: ScalarLike) -> Float[Array, "*B A"]:
    """Logits of a policy with a share of the uniform one over its legal actions.

    What noise from a Dirichlet distribution is to AlphaZero, without the noise: Gumbel search
    draws its actions itself. The target that comes of it keeps the share, where values do not
    speak against it, so that a policy cannot become sure for want of knowledge.
    """
    legal = legal_actions(prior_logits)
    log_uniform = -jnp.log(jnp.sum(legal, axis=-1, keepdims=True, dtype=prior_logits.dtype))
    # In logarithms: a legal action stays possible however improbable it is.
    own = jnp.log1p(-jnp.asarray(share)) + jax.nn.log_softmax(prior_logits)
    return mask_logits(jnp.logaddexp(own, jnp.log(jnp.asarray(share)) + log_uniform), legal)


def collect(
    scaled: ScaledNetwork,
    envs: VectorEnvironment,
    model: EnvironmentModel,
    env_state: EnvState,
    key: PRNGKeyArray,
    hyperparameters: AlphaZeroHyperparameters,
    config: AlphaZeroConfig,
) -> tuple[EnvState, Batch, EpisodeSums, Float[Array, " N"]]:
    """Walk `rollout_steps` steps, searching before each, and say what should be learned from it.

    The values are in units of the rewards; beside the rollout, each step's discounted return, of
    the rewards alone.
    """

    def values_of(observations: Any) -> Float[Array, " B"]:
        return jax.vmap(scaled.evaluate)(observations)[1]

    def walk(env_state: EnvState, key: PRNGKeyArray) -> tuple[EnvState, tuple[Sample, Transition]]:
        observations = env_state.observations
        search_one = functools.partial(
            search_state,
            scaled,
            model=model,
            gamma=hyperparameters.gamma,
            config=config,
            simulations=config.simulations,
            exploration=hyperparameters.exploration,
        )
        output = jax.vmap(search_one)(
            SimulatorState(env_state.states, observations), env_state.keys(key)
        )
        actions = jax.vmap(model.to_environment)(output.action)
        env_state, transitions = envs.step(env_state, actions)
        # A truncated episode goes on in truth: it is worth what its own last state is.
        values = search_values(output).improved * scaled.scale()
        last_values = run_if(
            jnp.any(transitions.truncated),
            lambda: values_of(transitions.next_observations),
            jnp.zeros_like(values),
        )
        # What is not returned is not stored.
        transitions = transitions._replace(next_observations=None, extras=None)
        return env_state, (
            Sample(observations, output.action_weights, values, last_values),
            transitions,
        )

    keys = jax.random.split(key, config.rollout_steps)
    env_state, (samples, transitions) = jax.lax.scan(walk, env_state, keys)
    final_values = values_of(env_state.observations)
    following = jnp.concatenate([samples.values[1:], final_values[None]])
    next_values = jnp.where(transitions.truncated, samples.last_values, following)
    discounts = jnp.asarray(hyperparameters.gamma) * transitions.discounts
    ends = transitions.resets
    targets = lambda_returns(
        transitions.rewards, discounts, next_values, ends, lambda_=hyperparameters.td_lambda
    )
    rollout = Batch(samples.observations, samples.target_probs, targets)
    # Without the network's own values: a scale that came from them would feed on itself.
    paid = discounted_returns(transitions.rewards, discounts, jnp.zeros_like(targets), ends)
    return env_state, rollout, sum_episodes(transitions), paid.ravel()


def minibatch_loss(
    network: Any,
    batch: Batch,
    *,
    codec: ActionCodec,
    hyperparameters: AlphaZeroHyperparameters,
    devices: Devices = ONE_DEVICE,
) -> tuple[Float[Array, ""], PolicyValueLossParts]:
    """Loss of the network on a minibatch, and its parts."""

    def predict(observation: Any) -> tuple[Array, Array]:
        outputs, value = call_network(network, observation)
        return one_choice(codec, outputs, codec.legal(observation))[0], value

    logits, values = jax.vmap(predict)(batch.observations)
    logits, target_probs, values, value_targets = devices.gather_for_loss(
        (logits, batch.target_probs, values, batch.value_targets)
    )
    return policy_value_loss(
        logits,
        target_probs,
        values,
        value_targets,
        value_weight=hyperparameters.value_weight,
    )
