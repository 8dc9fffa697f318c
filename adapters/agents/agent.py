"""What every agent is: pure functions over one tree of arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..environments import Transition


class Agent(NamedTuple):
    """An agent as pure functions; `jit`, `vmap` and `scan` apply to each.

    Attributes:
        init: `(key, hyperparameters) -> state`. The state is a `NamedTuple` of arrays only, with
            the fields `params`, `key`, `iteration` and `hyperparameters` (every number that may
            be swept), and whatever else the next iteration needs.
        step: `state -> (state, metrics)`: one iteration, collect and learn.
        act: `(state, key, observation) -> action`: one environment's action for one
            observation, sampled; its most probable one where `key` is `None`.
        hyperparameters: the default second argument of `init`.
        steps_per_iteration: environment steps that one `step` takes.
        network: `state -> module`, the policy being trained.
        plan: `(state, key, environment_state, observation, simulations=...) -> action`: as `act`,
            but the best action that a search finds; `None` for an agent that cannot search.
        specs: how the state lies on the agent's mesh, a `PartitionSpec` or a tree of them.
    """

    init: Callable[[PRNGKeyArray, Any], Any]
    step: Callable[[Any], tuple[Any, Any]]
    act: Callable[[Any, PRNGKeyArray | None, Any], Any]
    hyperparameters: Any
    steps_per_iteration: int
    network: Callable[[Any], Any]
    plan: Callable[..., Any] | None = None
    specs: Any = PartitionSpec()


class EpisodeSums(NamedTuple):
    """Sums over the episodes that ended; means are left to the reader, who sees how many.

    Attributes:
        ended: number of episodes that ended.
        returns: sum of their returns, in units of the rewards.
        lengths: sum of their lengths, in steps; a float, for it may be more than an int32 holds.
    """

    ended: Int[Array, ""]
    returns: Float[Array, ""]
    lengths: Float[Array, ""]


# Lengths are added up in two parts, the rest of a division by this and the quotient.
_PART = 2**12


def sum_episodes(transitions: Transition) -> EpisodeSums:
    """Add up the episodes that ended within a rollout.

    Args:
        transitions: of any leading axes.

    Returns:
        Sums over all of them.

    Example:
        >>> import jax.numpy as jnp
        >>> ended, values = jnp.array([True, False]), jnp.array([2.0, 9.0])
        >>> never, lengths = jnp.array([False, False]), jnp.array([3, 4])
        >>> sums = sum_episodes(
        ...     Transition(values, values, ended, never, None, values, lengths, {})
        ... )
        >>> sums.ended.item(), sums.returns.item(), sums.lengths.item()
        (1, 2.0, 3.0)
    """
    ended = transitions.resets
    quotients, rests = jnp.divmod(jnp.where(ended, transitions.episode_lengths, 0), _PART)
    return EpisodeSums(
        ended=jnp.sum(ended),
        returns=jnp.sum(jnp.where(ended, transitions.episode_returns, 0)),
        lengths=jnp.sum(quotients).astype(float) * _PART + jnp.sum(rests).astype(float),
    )
