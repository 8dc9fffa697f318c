"""Values on other scales: the signed hyperbolic transform and two-hot supports."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, ScalarLike

from ._checks import checked


@checked
def signed_hyperbolic(
    values: Float[Array, " *batch"], *, epsilon: ScalarLike = 1e-3
) -> Float[Array, " *batch"]:
    """Squash large values, near the identity over two for small ones.

        h(x) = sign(x) * (sqrt(|x| + 1) - 1) + epsilon * x

    Proposition A.2 of Pohlen et al. 2018, https://arxiv.org/abs/1805.11593; MuZero scales
    its rewards and values so.

    Args:
        values: any finite numbers.
        epsilon: slope that is left at infinity, above 0 for an inverse to exist.

    Returns:
        Transformed values, same shape and dtype.

    Raises:
        TypeError: `values` is no float array.

    Example:
        >>> import jax.numpy as jnp
        >>> round(signed_hyperbolic(jnp.array(300.0)).item(), 4)
        16.6494
    """
    epsilon = jnp.asarray(epsilon, values.dtype)
    # x / (sqrt(|x| + 1) + 1) is the paper's form without its cancellation near 0.
    return values / (jnp.sqrt(jnp.abs(values) + 1) + 1) + epsilon * values


@checked
def signed_parabolic(
    values: Float[Array, " *batch"], *, epsilon: ScalarLike = 1e-3
) -> Float[Array, " *batch"]:
    """Inverse of `signed_hyperbolic`.

        h⁻¹(y) = sign(y) * (((sqrt(1 + 4 epsilon (|y| + 1 + epsilon)) - 1) / (2 epsilon))² - 1)

    Proposition A.2 of Pohlen et al. 2018, https://arxiv.org/abs/1805.11593, evaluated in a
    form without cancellation: the round trip is exact to a few units in the last place,
    where the formula as printed loses three digits in float32.

    Args:
        values: transformed values.
        epsilon: the same as in `signed_hyperbolic`.

    Returns:
        Values on their own scale, same shape and dtype.

    Raises:
        TypeError: `values` is no float array.

    Example:
        >>> import jax.numpy as jnp
        >>> round(signed_parabolic(signed_hyperbolic(jnp.array(300.0))).item(), 3)
        300.0
    """
    epsilon = jnp.asarray(epsilon, values.dtype)
    size = jnp.abs(values)
    root = jnp.sqrt(1 + 4 * epsilon * (size + 1 + epsilon))
    # With p = (root - 1) / (2 epsilon), p² - 1 is (p - 1)(p + 1), and p - 1 is this, but for
    # the sign, which it takes along (a sign() apart would have no gradient at 0):
    below = 2 * values * (1 - 2 * epsilon / (1 + 2 * epsilon + root)) / (root + 1)
    return below * (jnp.abs(below) + 2)


@checked
def two_hot(
    values: Float[Array, " *batch"], support: Float[Array, " K"]
) -> Float[Array, " *batch K"]:
    """Distribution over a support whose mean is the value.

    A value between two neighbours of the support is shared between them in proportion to
    its closeness; one outside saturates at the nearer end. Appendix F of Schrittwieser et
    al. 2020, https://arxiv.org/abs/1911.08265.

    Args:
        values: finite numbers.
        support: at least two numbers, strictly increasing, evenly spaced or not.

    Returns:
        Probabilities, at most two of a row above 0. Gradients flow to `values`.

    Raises:
        TypeError: shapes or dtypes disagree.
        ValueError: the support has fewer than two numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> two_hot(jnp.array(0.25), jnp.array([-1.0, 0.0, 1.0])).tolist()
        [0.0, 0.75, 0.25]
    """
    size = support.shape[0]
    if size < 2:
        raise ValueError(f"two_hot(): the support has {size} numbers, but needs at least two.")
    values = jnp.clip(values, support[0], support[-1])
    upper = jnp.clip(jnp.searchsorted(support, values, side="right"), 1, size - 1)
    low, high = support[upper - 1], support[upper]
    share = ((values - low) / (high - low))[..., None]
    below, above = (jax.nn.one_hot(index, size, dtype=share.dtype) for index in (upper - 1, upper))
    return ((1 - share) * below + share * above).astype(values.dtype)


@checked
def from_two_hot(
    probs: Float[Array, " *batch K"], support: Float[Array, " K"]
) -> Float[Array, " *batch"]:
    """Mean of a distribution over a support; the inverse of `two_hot` inside it.

    Args:
        probs: probabilities, rows that sum to 1 (a softmax of a critic's logits).
        support: the numbers they belong to.

    Returns:
        Values between the support's ends.

    Raises:
        TypeError: shapes or dtypes disagree.

    Example:
        >>> import jax.numpy as jnp
        >>> support = jnp.array([-1.0, 0.0, 1.0])
        >>> from_two_hot(two_hot(jnp.array(0.25), support), support).item()
        0.25
    """
    return jnp.matmul(probs, support, precision="highest")  # accelerators round to 10 bits
