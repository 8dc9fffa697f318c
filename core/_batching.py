"""From a rollout to the minibatches of an update."""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Shaped

from ._checks import checked

_Tree = TypeVar("_Tree")


class Batch(NamedTuple):
    """Samples of an update, `N` of them, in no order that matters.

    Attributes:
        observations: what the policy saw, any tree of arrays.
        actions: what it did, any tree of arrays.
        log_probs: log-probability of the action when it was taken, in nats.
        values: V of the state when it was visited.
        advantages: how much better the action was than expected.
        value_targets: what the critic should say.
    """

    observations: PyTree[Shaped[Array, "N ..."]]
    actions: PyTree[Shaped[Array, "N ..."]]
    log_probs: Float[Array, " N"]
    values: Float[Array, " N"]
    advantages: Float[Array, " N"]
    value_targets: Float[Array, " N"]


@checked
def make_batch(
    observations: PyTree[Shaped[Array, "T B ..."]],
    actions: PyTree[Shaped[Array, "T B ..."]],
    log_probs: Float[Array, "T B"],
    values: Float[Array, "T B"],
    advantages: Float[Array, "T B"],
    value_targets: Float[Array, "T B"],
) -> Batch:
    """Samples of a rollout: time and environments become one axis of `N = T * B`.

    Step `t` of environment `b` becomes sample `t * B + b`: nothing is lost, copied or
    shuffled. Shuffle with `minibatch_indices`.

    Args:
        observations: time-major rollout of what the policy saw; leaves of any dtype.
        actions: what it did; leaves of any dtype.
        log_probs: log-probability of each action when it was taken, in nats.
        values: V of each state when it was visited.
        advantages: as from `gae`.
        value_targets: what the critic should say, `advantages + values` with GAE.

    Returns:
        A `Batch` with leaves `[N, ...]`.

    Raises:
        TypeError: the leading axes of any leaf disagree.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.arange(6.0).reshape(3, 2)
        >>> make_batch({"grid": x[..., None]}, x, x, x, x, x).values.tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    rollout = Batch(observations, actions, log_probs, values, advantages, value_targets)
    return jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), rollout)


@checked
def minibatch_indices(
    key: PRNGKeyArray, *, size: int, minibatch_size: int
) -> Int[Array, "minibatches minibatch_size"]:
    """Which samples go into which minibatch: one random permutation, cut evenly.

    Only indices are shuffled. Gather a minibatch with `take` when it is used, so that no
    shuffled copy of the data ever exists.

    Args:
        key: consumed.
        size: number of samples in the batch.
        minibatch_size: number of samples in a minibatch; must divide `size`.

    Returns:
        Indices, each of `0 .. size - 1` exactly once.

    Raises:
        ValueError: `minibatch_size` does not divide `size`, or is not positive.

    Example:
        >>> import jax
        >>> minibatch_indices(jax.random.key(0), size=6, minibatch_size=2).shape
        (3, 2)
    """
    if minibatch_size < 1 or size < 1 or size % minibatch_size:
        raise ValueError(
            f"minibatch_indices(): {size} samples cannot be cut into minibatches of "
            f"{minibatch_size}; choose a divisor of {size}."
        )
    return jax.random.permutation(key, size).reshape(-1, minibatch_size)


@checked
def take(batch: _Tree, indices: Int[Array, " n"]) -> _Tree:
    """Gather samples of a batch.

    Args:
        batch: any tree of arrays `[N, ...]`.
        indices: which samples; the caller keeps them within `0 .. N - 1`.

    Returns:
        The same tree with arrays `[n, ...]`.

    Raises:
        TypeError: `indices` is no vector of integers.

    Example:
        >>> import jax.numpy as jnp
        >>> take({"x": jnp.arange(4)}, jnp.array([3, 0]))["x"].tolist()
        [3, 0]
    """
    # Promising that indices are in bounds spares a clamp per leaf.
    return jax.tree.map(lambda x: jnp.asarray(x).at[indices].get(mode="promise_in_bounds"), batch)
