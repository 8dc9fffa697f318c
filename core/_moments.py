"""Running mean and deviation, to bring numbers of any scale to order 1."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, ScalarLike

from ._arrays import widen
from ._checks import checked, require_samples

# Spread below this share of the mean is rounding.
_ROUNDING = 1e-5


class Moments(NamedTuple):
    """Running mean and variance, elementwise.

    Attributes:
        mean: weighted mean of all samples so far.
        variance: weighted variance of all samples so far.
        weight: how many updates they stand for; 0 at first.

    Example:
        >>> import jax.numpy as jnp
        >>> Moments(jnp.array(3.0), jnp.array(4.0), jnp.array(1.0)).deviation().item()
        2.0
    """

    mean: Float[Array, " *shape"]
    variance: Float[Array, " *shape"]
    weight: Float[Array, ""]

    def varies(self) -> Bool[Array, " *shape"]:
        """Whether the samples differed at all, by more than rounding does."""
        return self.variance > jnp.square(_ROUNDING * self.mean)

    def deviation(self) -> Float[Array, " *shape"]:
        """Standard deviation; 1 where all samples were equal, or there were none.

        Returns:
            Positive numbers, in the samples' units.
        """
        varies = self.varies()
        return jnp.where(varies, jnp.sqrt(jnp.where(varies, self.variance, 1)), 1)


def init_moments(shape: tuple[int, ...] = ()) -> Moments:
    """Moments of nothing yet: mean 0, deviation 1.

    Args:
        shape: of one sample.

    Returns:
        The moments.

    Example:
        >>> init_moments((2,)).deviation().tolist()
        [1.0, 1.0]
    """
    return Moments(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(()))


@checked
def update_moments(
    moments: Moments, samples: Float[Array, " N *shape"], *, decay: ScalarLike
) -> Moments:
    """Take in a batch of samples; what came before counts `decay` times as much as it did.

    With `decay` 1 every batch weighs the same for ever; below 1 the statistics follow what drifts,
    with a memory of `1 / (1 - decay)` batches. Means and variances of the past and of the batch
    are combined as in Chan et al. 1979, equation 2.1,
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf, which does not subtract
    large squares from each other. In float32 they hold for sizes from 1e-18 to 1e18.

    Args:
        moments: of the samples so far.
        samples: at least one, in any units.
        decay: in [0, 1].

    Returns:
        The new moments.

    Raises:
        TypeError: shapes or dtypes disagree (checked when called, or while tracing).
        ValueError: there is no sample.

    Example:
        >>> import jax.numpy as jnp
        >>> moments = update_moments(init_moments(), jnp.array([1.0, 3.0]), decay=1.0)
        >>> moments.mean.item(), moments.deviation().item()
        (2.0, 1.0)
    """
    require_samples("update_moments()", len(samples))
    samples = widen(samples)
    past = jnp.asarray(decay) * moments.weight
    weight = past + 1
    mean, variance = jnp.mean(samples, axis=0), jnp.var(samples, axis=0)
    change = mean - moments.mean
    return Moments(
        mean=moments.mean + change / weight,
        variance=(past * moments.variance + variance) / weight
        + jnp.square(change) * past / jnp.square(weight),
        weight=weight,
    )
