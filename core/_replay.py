"""A store of past samples, from which learning draws again and again."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray, PyTree, Shaped

from ._checks import checked, require_samples


class Replay(NamedTuple):
    """The newest samples, `C` of them at most, in a ring.

    Attributes:
        samples: the store; what was not written yet is zero.
        place: where the next samples go.
        filled: number of samples held.
    """

    samples: PyTree[Shaped[Array, "C ..."]]
    place: Int[Array, ""]
    filled: Int[Array, ""]


@checked
def init_replay(sample: PyTree, *, capacity: int) -> Replay:
    """An empty store.

    Args:
        sample: one sample, without a batch axis; only shapes and dtypes are read, so that
            `jax.ShapeDtypeStruct` will do.
        capacity: how many samples to keep, `C`.

    Returns:
        The store, of `C` times the bytes of a sample.

    Raises:
        ValueError: `capacity` is below 1, or the sample has no array.

    Example:
        >>> import jax.numpy as jnp
        >>> init_replay({"x": jnp.zeros(3)}, capacity=5).samples["x"].shape
        (5, 3)
    """
    if capacity < 1:
        raise ValueError(f"init_replay(): capacity should be 1 at least, but is {capacity}.")
    if not jax.tree.leaves(sample):
        raise ValueError("init_replay(): the sample has no array; give what is to be kept.")
    store = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), sample)
    return Replay(store, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


@checked
def add_to_replay(replay: Replay, batch: PyTree[Shaped[Array, "N ..."]]) -> Replay:
    """Add samples in place of the oldest.

    Args:
        replay: the store.
        batch: samples of the same structure; `N` divides the capacity, so that none is torn.

    Returns:
        The store with them.

    Raises:
        TypeError: the samples' shapes or structure are others than the store's.
        ValueError: `N` does not divide the capacity, or there is no sample.

    Example:
        >>> import jax.numpy as jnp
        >>> replay = init_replay(jnp.zeros(()), capacity=4)
        >>> for numbers in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]):
        ...     replay = add_to_replay(replay, jnp.array(numbers))
        >>> replay.samples.tolist()
        [5.0, 6.0, 3.0, 4.0]
    """
    given, wanted = _describe(batch), _describe(replay.samples)
    if given != wanted:
        raise TypeError(f"add_to_replay(): the samples are {given}, but the store's are {wanted}.")
    capacity, size = (len(jax.tree.leaves(tree)[0]) for tree in (replay.samples, batch))
    require_samples("add_to_replay()", size)
    if capacity % size:
        raise ValueError(
            f"add_to_replay(): a capacity of {capacity} is no multiple of {size}, the samples "
            "added at a time; choose one."
        )
    samples = jax.tree.map(
        lambda store, new: jax.lax.dynamic_update_slice_in_dim(store, new, replay.place, axis=0),
        replay.samples,
        batch,
    )
    # Not the number of all samples ever added, which would overflow.
    filled = jnp.minimum(replay.filled + size, capacity)
    return Replay(samples, (replay.place + size) % capacity, filled)


@checked
def replay_indices(
    replay: Replay, key: PRNGKeyArray, *, minibatches: int, minibatch_size: int
) -> Int[Array, "minibatches minibatch_size"]:
    """Which samples to learn from: uniform over those in the store, with replacement.

    Gather them with `take(replay.samples, indices)` when they are used.

    Args:
        replay: the store, which must hold a sample: of an empty one all places are 0.
        key: consumed.
        minibatches: how many.
        minibatch_size: samples in each.

    Returns:
        Places in the store.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> replay = add_to_replay(init_replay(jnp.zeros(()), capacity=4), jnp.ones(2))
        >>> indices = replay_indices(replay, jax.random.key(0), minibatches=3, minibatch_size=5)
        >>> indices.shape, bool((indices < 2).all())
        ((3, 5), True)
    """
    return jax.random.randint(key, (minibatches, minibatch_size), 0, replay.filled)


def _describe(samples: PyTree) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(samples)
    kinds = {jax.tree_util.keystr(p): f"{x.dtype}{list(x.shape[1:])}" for p, x in leaves}
    return {**kinds, "structure": str(jax.tree.structure(samples))}
