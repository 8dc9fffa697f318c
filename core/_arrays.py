"""What several modules do to arrays, and to trees of them."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

_Tree = TypeVar("_Tree")


def widen(x: Array) -> Array:
    """At least float32: half precision has no room for long sums or for logs of small numbers."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def where(condition: Bool[Array, " B"], yes: _Tree, no: _Tree) -> _Tree:
    """Row by row, the leaves of one tree or of the other.

    Args:
        condition: which rows to take from `yes`.
        yes: tree of arrays `[B, ...]`.
        no: the same structure and shapes.

    Returns:
        The same structure and shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> where(jnp.array([True, False]), {"x": jnp.ones(2)}, {"x": jnp.zeros(2)})["x"].tolist()
        [1.0, 0.0]
    """

    def choose(a: Shaped[Array, "B ..."], b: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
        return jnp.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, yes, no)
