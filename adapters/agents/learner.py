"""What agents share when they learn: the network's side of the bargain, and the gradient steps."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, ScalarLike, Shaped

from vernal.core import Moments, minibatch_indices, take
from vernal.core._arrays import widen

from ..actions import ActionCodec
from ..checks import require_alike
from ..environments import Environment, VectorEnvironment
from ..mesh import ONE_DEVICE, Devices, keys_by_index
from ..scan import scan, value_and_grad

_Network = TypeVar("_Network")
_Tree = TypeVar("_Tree")
_Settings = TypeVar("_Settings")

# Memory of 20 iterations: returns grow as the policy learns.
RETURNS_DECAY = 0.95


def check_settings(
    config: Any,
    *,
    counts: Sequence[str],
    fractions: Sequence[str],
    positive: Sequence[str],
    not_negative: Sequence[str],
    limits: Sequence[str],
) -> None:
    """Refuse an agent's settings that cannot work, before anything compiles.

    Numbers of NumPy and JAX become Python's own, so that a configuration can be written down.

    Args:
        config: has all that is named, and `envs`, `rollout_steps` and `minibatch_size`.
        counts: settings that are 1 at least.
        fractions: settings from 0 to 1.
        positive: settings above 0, and finite.
        not_negative: settings of 0 or more, and finite.
        limits: settings above 0; infinity is no limit.

    Raises:
        ValueError: one is of another kind than declared, or out of its range, or the minibatches
            do not fit the samples.
    """
    make_plain(config)
    inf = float("inf")
    rules: list[tuple[Sequence[str], Callable[[Any], bool], str]] = [
        (counts, lambda x: x >= 1, "at least 1"),
        (fractions, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
        (positive, lambda x: 0 < x < inf, "a number above 0"),
        (not_negative, lambda x: 0 <= x < inf, "0 or more"),
        (limits, lambda x: x > 0, "a number above 0, or inf for no limit"),
    ]
    for names, is_right, wanted in rules:
        for name in names:
            if not is_right(getattr(config, name)):
                raise ValueError(f"{name} is {getattr(config, name)}; give {wanted}.")
    samples = config.envs * config.rollout_steps
    if samples % config.minibatch_size:
        raise ValueError(
            f"minibatch_size is {config.minibatch_size}, which does not divide the {samples} "
            f"samples of {config.envs} environments times {config.rollout_steps} steps; choose a "
            "divisor."
        )


def settings_or_default(kind: type[_Settings], config: _Settings | None) -> _Settings:
    """An agent's settings, or its default ones where none are given.

    Raises:
        TypeError: they are of another class: a dictionary, or another agent's.
    """
    if config is None:
        return kind()
    if not isinstance(config, kind):
        raise TypeError(
            f"config is of type {type(config).__name__}; give a {kind.__name__}, as in "
            f"{kind.__name__}(gamma=0.99)."
        )
    return config


def make_plain(config: Any) -> None:
    """Make each setting of a frozen dataclass a plain Python value of the kind it is declared as.

    Args:
        config: its `int`, `float` and `bool` fields are read, and may be of NumPy or JAX.

    Raises:
        ValueError: a setting is of another kind, or not known yet inside a trace.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Settings:
        ...     gamma: float
        >>> settings = Settings(np.float32(0.5))
        >>> make_plain(settings)
        >>> settings
        Settings(gamma=0.5)
    """
    for field in dataclasses.fields(config):
        kinds, wanted = _KINDS.get(field.type, (None, ""))
        value = getattr(config, field.name)
        is_array = isinstance(value, np.generic | np.ndarray | jax.Array)
        if is_array and value.ndim == 0 and not isinstance(value, Tracer):
            value = value.item()
        if kinds is not None and type(value) not in kinds:
            raise ValueError(f"{field.name} is {value!r:.60}; give {wanted}.")
        object.__setattr__(config, field.name, value)


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
}


@runtime_checkable
class KeepsStatistics(Protocol):
    """A network that keeps running statistics of what it sees; they are not trained."""

    def with_statistics_of(self, observations: PyTree[Array]) -> Any:
        """The same network, a batch of observations `[N, ...]` taken in."""
        ...


@runtime_checkable
class OptimiserSettings(Protocol):
    """The numbers of the optimiser, as an agent's hyperparameters hold them."""

    @property
    def learning_rate(self) -> ScalarLike:
        """Adam's step size, in units of the parameters."""
        ...

    @property
    def adam_epsilon(self) -> ScalarLike:
        """Adam's term against division by zero."""
        ...

    @property
    def max_grad_norm(self) -> ScalarLike:
        """Global norm at which a gradient is clipped."""
        ...


def make_envs(environment: Environment, config: Any, devices: Devices) -> VectorEnvironment:
    """One device's share of an agent's environments.

    Raises:
        ValueError: the devices divide `envs` or `minibatch_size` unevenly.
    """
    devices.share(envs=config.envs)
    devices.share(minibatch_size=config.minibatch_size)
    return VectorEnvironment(environment, config.envs).part(devices.count)


def static_part(
    make_network: Callable[[PRNGKeyArray], eqx.Module], environment: Environment, codec: ActionCodec
) -> Any:
    """A network's structure and functions, to be closed over; its arrays live in the state.

    Raises:
        TypeError: this makes no network, or the agent cannot use it, see `check_network`.
        ValueError: its statistics change shape or dtype.
    """
    if _is_network(make_network) or not callable(make_network):
        advice = "; `lambda key: network` begins with one that there is" * callable(make_network)
        raise TypeError(
            "make_network should be a function from a key to a network, but it is of type "
            f"{type(make_network).__name__}{advice}."
        )
    shapes = eqx.filter_eval_shape(make_network, jax.random.key(0))
    check_network(shapes, environment, codec)
    return eqx.filter(shapes, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))


def init_params(
    make_network: Callable[[PRNGKeyArray], eqx.Module],
    key: PRNGKeyArray,
    settings: OptimiserSettings,
) -> tuple[PyTree, optax.OptState]:
    """A new network's arrays, and the optimiser's state for those that are trained."""
    params = eqx.filter(make_network(key), eqx.is_array)
    return params, make_optimiser(settings).init(eqx.filter(params, eqx.is_inexact_array))


def make_act(codec: ActionCodec, static: Any) -> Callable[[Any, PRNGKeyArray | None, Any], Any]:
    """An agent's `act`: the network alone, sampled, or its mode where the key is `None`."""

    def act(state: Any, key: PRNGKeyArray | None, observation: Any) -> Any:
        policy, _ = evaluate_policy(eqx.combine(state.params, static), codec, observation)
        return codec.to_environment(policy.mode() if key is None else policy.sample(key))

    return act


def evaluate_policy(network: Any, codec: ActionCodec, observation: Any) -> tuple[Any, Array]:
    """Masked policy and value in one state."""
    outputs, value = call_network(network, observation)
    return codec.distribution(outputs, codec.legal(observation)), value


def call_network(network: Any, observation: Any) -> tuple[Float[Array, "..."], Float[Array, ""]]:
    """What a network says of one observation: policy outputs and value, of float32 at least.

    Its weights may be of half precision; what is made of its outputs is not.
    """
    outputs, value = network(observation)
    return widen(outputs), widen(value)


def in_reward_units(values: Float[Array, "..."], returns: Moments | None) -> Float[Array, "..."]:
    """A network's values, which are deviations from the mean return, in units of the rewards.

    Args:
        values: as the network says; of any shape.
        returns: running moments of discounted returns; `None` if the values are no deviations.

    Returns:
        The same shape. Until returns differ nothing is known of their size, and all are the mean.
    """
    if returns is None:
        return values
    return returns.mean + jnp.where(returns.varies(), returns.deviation(), 0) * values


def in_deviations(values: Float[Array, "..."], returns: Moments) -> Float[Array, "..."]:
    """Values in units of the rewards as deviations from the mean return: what a network learns."""
    return (values - returns.mean) / returns.deviation()


class Strata(NamedTuple):
    """Groups of environments, from each of which every minibatch takes equally many samples.

    A device that holds whole strata then makes its part of each minibatch of what it has, and the
    minibatches are the same however many devices there are. Each sample is as likely as without
    strata.

    Attributes:
        here: indices of this device's strata among all, `S` of them.
        envs: environments in a stratum.
        share: samples of a stratum in a minibatch.
    """

    here: Int[Array, " S"]
    envs: int
    share: int

    def in_batch(self, places: Int[Array, "S minibatches share"]) -> Int[Array, "minibatches n"]:
        """Where samples lie in a flattened batch `[T * B]`, given where within their strata."""
        time, env = jnp.divmod(places, self.envs)
        first = jnp.arange(len(self.here))[:, None, None] * self.envs
        return _join(time * len(self.here) * self.envs + first + env)

    def in_stores(
        self, places: Int[Array, "S minibatches share"], capacity: int
    ) -> Int[Array, "minibatches n"]:
        """Where samples lie in stores `[S * capacity]`, one after the other."""
        return _join(jnp.arange(len(self.here))[:, None, None] * capacity + places)

    def regroup(self, rollout: _Tree) -> _Tree:
        """`[T, B, ...]` as `[S, samples, ...]`."""

        def regroup(x: Array) -> Array:
            grouped = x.reshape(len(x), len(self.here), self.envs, *x.shape[2:])
            return jax.lax.collapse(jnp.moveaxis(grouped, 1, 0), 1, 3)

        return jax.tree.map(regroup, rollout)

    def keys(self, key: PRNGKeyArray) -> Shaped[Array, " S"]:
        """A key for each stratum, which depends on its index among all."""
        return keys_by_index(key, self.here)


def make_strata(config: Any, devices: Devices) -> Strata:
    """As many strata as divide both environments and minibatch; called on each device.

    Args:
        config: has `envs` and `minibatch_size`.
        devices: hold equally many strata each.

    Returns:
        This device's.
    """
    number = math.gcd(config.envs, config.minibatch_size)
    held = number // devices.count
    return Strata(
        here=devices.index() * held + jnp.arange(held),
        envs=config.envs // number,
        share=config.minibatch_size // number,
    )


def _join(indices: Int[Array, "S minibatches share"]) -> Int[Array, "minibatches n"]:
    return jax.lax.collapse(jnp.moveaxis(indices, 0, 1), 1, 3)


def shuffled_indices(
    key: PRNGKeyArray, strata: Strata, *, rollout_steps: int, epochs: int
) -> Int[Array, "minibatches n"]:
    """Every sample once in each of several passes, each in an order of its own; for `fit`."""
    shuffle = functools.partial(
        minibatch_indices, size=rollout_steps * strata.envs, minibatch_size=strata.share
    )

    def shuffle_stratum(key: PRNGKeyArray) -> Int[Array, "minibatches share"]:
        passes = jax.vmap(shuffle)(jax.random.split(key, epochs))
        return jax.lax.collapse(passes, 0, 2)

    return strata.in_batch(jax.vmap(shuffle_stratum)(strata.keys(key)))


def fit(
    network: _Network,
    optimiser: optax.OptState,
    samples: PyTree[Array],
    indices: Int[Array, "minibatches n"],
    loss: Callable[[_Network, Any], tuple[Float[Array, ""], Any]],
    settings: OptimiserSettings,
    devices: Devices = ONE_DEVICE,
) -> tuple[_Network, optax.OptState, tuple[Any, Float[Array, " minibatches"]]]:
    """One gradient step after the other, each on a minibatch that is gathered when it is used.

    Args:
        network: what to train.
        optimiser: state of `make_optimiser`'s.
        samples: any tree of arrays `[N, ...]`; each device has its own.
        indices: which of them go into which minibatch.
        loss: `(network, minibatch) -> (loss, parts)`, of the whole minibatch: the loss gathers
            what each device says of its part, by `Devices.gather_for_loss`. A term that is not
            made of gathered numbers would count once for each device.
        settings: numbers of the optimiser.
        devices: whose gradients are added up.

    Returns:
        Network and optimiser after all steps, and of each minibatch the loss's parts and the
        global norm of the gradient before it was clipped.
    """
    adam = make_optimiser(settings)

    def learn(carry: Any, indices: Int[Array, " n"]) -> Any:
        network, optimiser = carry
        (_, parts), gradient = value_and_grad(loss)(network, take(samples, indices))
        gradient = devices.sum(gradient)
        norm = optax.tree.norm(jax.tree.map(widen, gradient))
        change, optimiser = adam.update(gradient, optimiser)
        return (eqx.apply_updates(network, change), optimiser), (parts, norm)

    (network, optimiser), reports = scan(learn, (network, optimiser), indices)
    return network, optimiser, reports


def make_optimiser(settings: OptimiserSettings) -> optax.GradientTransformation:
    """Adam on clipped gradients; its numbers may be traced.

    Its sums are of float32 at least. Weights of half precision would swallow small steps, so their
    exact values are part of its state, and a step leads from one rounded value to the next.
    """
    adam = optax.chain(
        optax.clip_by_global_norm(jnp.asarray(settings.max_grad_norm)),
        optax.adam(
            jnp.asarray(settings.learning_rate),
            eps=jnp.asarray(settings.adam_epsilon),
        ),
    )
    # Beside a weight that is exact itself stands nothing.
    beside = functools.partial(jax.tree.map, is_leaf=lambda x: x is None)

    def init(params: Any) -> Any:
        wide: Any = jax.tree.map(widen, params)
        exact = jax.tree.map(lambda p, w: None if p.dtype == w.dtype else w, params, wide)
        state: Any = adam.init(wide)
        return (*state, exact)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        *state, exact = state
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats.
            changes, state = adam.update(jax.tree.map(widen, updates), tuple(state))
        after = beside(lambda e, c: e if e is None else e + c, exact, changes)

        def step(e: Any, a: Any, change: Any, update: Any) -> Any:
            return change if e is None else a.astype(update.dtype) - e.astype(update.dtype)

        return beside(step, exact, after, changes, updates), (*state, after)

    return optax.GradientTransformation(init, update)


def check_network(network: Any, environment: Environment, codec: ActionCodec) -> None:
    """Refuse a network whose outputs the agent cannot use, before anything compiles."""
    if not callable(network):
        raise TypeError(f"make_network should give a network, but it gives {_described(network)}.")
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
        before, after = (eqx.filter(n, lambda x: hasattr(x, "dtype")) for n in (network, after))
        require_alike("the network after with_statistics_of", after, "the one before", before)
    result = eqx.filter_eval_shape(lambda n, o: n(o), network, timestep.observation)
    if not (isinstance(result, tuple) and len(result) == 2 and all(map(_is_float, result))):
        raise TypeError(
            "the network should map one observation to two float arrays, (policy outputs, value), "
            f"but it gives {_described(result)}."
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


def _is_network(x: Any) -> bool:
    """Whether it has arrays of its own; a function with some of its arguments may have them too."""
    is_function = isinstance(x, jax.tree_util.Partial | eqx.Partial)
    has_arrays = any(map(eqx.is_array, jax.tree.leaves(x)))
    return isinstance(x, eqx.Module) and has_arrays and not is_function


def _described(result: Any) -> str:
    """As `(float32[4], float32[])`; of what is no array its type."""

    def describe(x: Any) -> Any:
        return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__

    return str(jax.tree.map(describe, result))


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
