"""What several modules do to arrays, and to trees of them."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

_Tree = TypeVar("_Tree")


def widen(x: Array) -> Array:
    """At least float32: half precision has no room for long sums or for logs of small numbers."""
    return x if x.dtype in (jnp.float32, jnp.float64) else x.astype(jnp.float32)


# The next three are compiled: a caller who is not pays for one operation, not for five.


@functools.partial(jax.jit, inline=True)
def weigh(weights: Float[Array, "*#batch"], x: Float[Array, "*#batch"]) -> Float[Array, "*batch"]:
    """The product, where what has weight 0 counts for nothing, be it NaN or infinite.

    No gradient reaches it either; the weight's own is left, where it is finite.

    Example:
        >>> import jax.numpy as jnp
        >>> weigh(jnp.array([0.0, 0.5]), jnp.array([jnp.nan, 4.0])).tolist()
        [0.0, 2.0]
    """
    return _product(weights, x)


@jax.custom_jvp
def _product(weights: Array, x: Array) -> Array:
    return weights * jnp.where(weights == 0, 0, x)


@_product.defjvp
def _tangent(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (weights, x), (dweights, dx) = primals, tangents
    slope = jnp.where((weights == 0) & ~jnp.isfinite(x), 0, x)
    return _product(weights, x), dweights * slope + _product(weights, dx)


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def bound(x: Float[Array, " *batch"], dtype: Any) -> Float[Array, " *batch"]:
    """What is beyond half of a dtype's range counts as its end, and has no gradient.

    Half leaves room for what is done next.

    Example:
        >>> import jax.numpy as jnp
        >>> bound(jnp.array([2.0, jnp.inf]), jnp.float16).tolist()
        [2.0, 32752.0]
    """
    largest = np.asarray(float(jnp.finfo(dtype).max) / 2, x.dtype)
    return jax.lax.clamp(-largest, x, largest)  # whose gradient takes less than that of `clip`


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def mean(x: Float[Array, " *batch"], dtype: Any = None) -> Float[Array, ""]:
    """Mean of numbers within the bounds of a dtype, their own by default.

    It is finite, although their sum may not be.

    Example:
        >>> import jax.numpy as jnp
        >>> round(mean(jnp.array([jnp.inf, jnp.inf, 0.0]), jnp.float16).item())
        21835
    """
    scale = 2.0 ** x.size.bit_length()  # a power of two: it rounds nothing
    return jnp.mean(bound(widen(x), dtype or x.dtype) * (1 / scale)) * scale


def power_of_two(x: Float[Array, " *batch"]) -> Float[Array, " *batch"]:
    """The power of two next to a number that is not negative, or within a factor of four.

    Multiplying by it or by its reciprocal rounds nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> power_of_two(jnp.array([0.9, 5.0, 7.0])).tolist()
        [1.0, 4.0, 8.0]
    """
    info = jnp.finfo(x.dtype)
    power = jax.lax.reduce_precision(jax.lax.stop_gradient(x), info.nexp, 0)
    return jnp.clip(power, float(info.tiny), 1 / float(info.tiny))


def where(condition: Bool[Array, " *batch"], yes: _Tree, no: _Tree) -> _Tree:
    """The leaves of one tree or of the other, row by row where there is a batch.

    Args:
        condition: which rows to take from `yes`, or whether to take all of it.
        yes: tree of arrays `[*batch, ...]`.
        no: the same structure and shapes.

    Returns:
        The same structure and shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> where(jnp.array([True, False]), {"x": jnp.ones(2)}, {"x": jnp.zeros(2)})["x"].tolist()
        [1.0, 0.0]
    """

    def choose(
        a: Shaped[Array, "*batch_and_rest"], b: Shaped[Array, "*batch_and_rest"]
    ) -> Shaped[Array, "*batch_and_rest"]:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            # As the integers under them: to JAX's check of reuse a selected key is a used one.
            data = choose(jax.random.key_data(a), jax.random.key_data(b))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(a))
        rows = condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim))
        return jnp.where(rows, a, b)

    return jax.tree.map(choose, yes, no)
