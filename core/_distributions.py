"""Policies over actions: masked categorical, several heads at once, squashed normal."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from ._arrays import bound, widen
from ._checks import checked


class Categorical(NamedTuple):
    """Distribution over `A` actions, one of which is taken.

    Illegal actions are those whose logits passed through `mask_logits` (or are minus
    infinity): they are never sampled, and every quantity and gradient stays finite.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.core import mask_logits
        >>> legal = jnp.array([True, True, False])
        >>> policy = Categorical(mask_logits(jnp.array([1.0, 2.0, 9.0]), legal))
        >>> policy.mode().item(), round(policy.entropy().item(), 4)
        (1, 0.5822)
    """

    logits: Float[Array, " *batch A"]

    @checked
    def sample(self, key: PRNGKeyArray) -> Integer[Array, " *batch"]:
        """One action per row; the key is consumed."""
        return jax.random.categorical(key, log_softmax(self.logits))

    @checked
    def log_prob(self, actions: Integer[Array, " *batch"]) -> Float[Array, " *batch"]:
        """Log-probability of each action, in nats; hugely negative for an illegal one.

        NaN for one that does not exist: below 0 (a padding mark, say), or beyond the last.
        """
        indices = jnp.expand_dims(actions, -1)
        chosen = jnp.take_along_axis(log_softmax(self.logits), indices, axis=-1, mode="fill")
        # As an index, a negative one would count from the last.
        return jnp.where(actions < 0, jnp.nan, jnp.squeeze(chosen, -1))

    @checked
    def entropy(self) -> Float[Array, " *batch"]:
        """Entropy in nats: between 0 and the log of the number of legal actions."""
        log_probs = log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    @checked
    def kl(self, other: "Categorical") -> Float[Array, " *batch"]:
        """Divergence KL(self || other) in nats."""
        log_probs, other_log_probs = log_softmax(self.logits), log_softmax(other.logits)
        return jnp.sum(jnp.exp(log_probs) * (log_probs - other_log_probs), axis=-1)

    @checked
    def mode(self) -> Integer[Array, " *batch"]:
        """The most probable action; the first of equals."""
        return jnp.argmax(self.logits, axis=-1)


class FactorisedCategorical(NamedTuple):
    """`H` independent categorical heads, each over up to `A` actions.

    Log-probability, entropy and KL are sums over heads. A head with fewer than `A`
    actions is padded with illegal ones (`mask_logits`).

    Example:
        >>> import jax.numpy as jnp
        >>> policy = FactorisedCategorical(jnp.zeros((2, 4)))
        >>> policy.log_prob(jnp.array([0, 3])).item() == 2 * -jnp.log(4.0).item()
        True
    """

    logits: Float[Array, " *batch H A"]

    @checked
    def sample(self, key: PRNGKeyArray) -> Integer[Array, " *batch H"]:
        """One action per head; the key is consumed."""
        return Categorical(self.logits).sample(key)

    @checked
    def log_prob(self, actions: Integer[Array, " *batch H"]) -> Float[Array, " *batch"]:
        """Joint log-probability of the heads' actions, in nats; NaN if one does not exist."""
        total = jnp.sum(Categorical(self.logits).log_prob(actions), axis=-1)
        return jnp.maximum(total, jnp.finfo(total.dtype).min)

    @checked
    def entropy(self) -> Float[Array, " *batch"]:
        """Joint entropy in nats."""
        return jnp.sum(Categorical(self.logits).entropy(), axis=-1)

    @checked
    def kl(self, other: "FactorisedCategorical") -> Float[Array, " *batch"]:
        """Joint divergence KL(self || other) in nats."""
        total = jnp.sum(Categorical(self.logits).kl(Categorical(other.logits)), axis=-1)
        return jnp.minimum(total, jnp.finfo(total.dtype).max)

    @checked
    def mode(self) -> Integer[Array, " *batch H"]:
        """The most probable action of each head."""
        return Categorical(self.logits).mode()


class SquashedNormal(NamedTuple):
    """`tanh` of a diagonal normal: actions inside (-1, 1), `D` coordinates.

    The density is corrected for the squashing as in appendix C of Haarnoja et al. 2018,
    https://arxiv.org/abs/1801.01290, in the form that does not overflow.

    Example:
        >>> import jax.numpy as jnp
        >>> policy = SquashedNormal(jnp.zeros(1), jnp.ones(1))
        >>> policy.mode().tolist(), round(policy.log_prob(jnp.zeros(1)).item(), 4)
        ([0.0], -0.9189)
    """

    means: Float[Array, " *batch D"]
    stds: Float[Array, " *batch D"]

    @checked
    def sample(self, key: PRNGKeyArray) -> Float[Array, " *batch D"]:
        """One action per row; the key is consumed. Gradients flow to both fields."""
        noise = jax.random.normal(key, self.means.shape, self.means.dtype)
        return jnp.tanh(self.means + self.stds * noise)

    @checked
    def log_prob(self, actions: Float[Array, " *batch D"]) -> Float[Array, " *batch"]:
        """Log-density of each action, in nats; one at a bound is moved just inside.

        NaN for one beyond the bounds.
        """
        edge = 1 - jnp.finfo(actions.dtype).eps
        unsquashed = jnp.arctanh(widen(jnp.clip(actions, -edge, edge)))
        normal = jax.scipy.stats.norm.logpdf(unsquashed, widen(self.means), widen(self.stds))
        densities = jnp.where(jnp.abs(actions) > 1, jnp.nan, normal - _log_tanh_slope(unsquashed))
        return jnp.sum(densities, axis=-1)

    @checked
    def entropy(self) -> Float[Array, " *batch"]:
        """Differential entropy in nats, by 64-point Gauss-Hermite quadrature.

        Deterministic; its error is below 1e-3 nats for standard deviations up to 2.
        """
        means, stds = widen(self.means), widen(self.stds)
        nodes = jnp.asarray(_QUADRATURE_NODES, means.dtype)
        weights = jnp.asarray(_QUADRATURE_WEIGHTS, means.dtype)
        points = means[..., None] + jnp.multiply.outer(stds, nodes)
        squashing = jnp.matmul(_log_tanh_slope(points), weights, precision="highest")
        return jnp.sum(_NORMAL_ENTROPY + jnp.log(stds) + squashing, axis=-1)

    @checked
    def kl(self, other: "SquashedNormal") -> Float[Array, " *batch"]:
        """Divergence KL(self || other) in nats: squashing both alike does not change it."""
        means, stds, other_stds = map(widen, (self.means, self.stds, other.stds))
        ratio = stds / other_stds
        distance = (means - widen(other.means)) / other_stds
        return jnp.sum((ratio**2 + distance**2 - 1) / 2 - jnp.log(ratio), axis=-1)

    @checked
    def mode(self) -> Float[Array, " *batch D"]:
        """The squashed mean, which is the median of the distribution."""
        return jnp.tanh(self.means)


def log_softmax(logits: Float[Array, " *batch A"]) -> Float[Array, " *batch A"]:
    """Log-probabilities, finite for all logits but NaN and plus infinity, of which they are NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> bool(jnp.isfinite(log_softmax(jnp.array([0.0, -jnp.inf]))).all())
        True
    """
    # The floor turns a caller's own -inf into a finite number, so that 0 * log 0 is 0; half
    # of the lowest leaves room for the subtraction inside the softmax.
    logits = widen(logits)
    bounded = jnp.where(logits == jnp.inf, jnp.nan, bound(logits, logits.dtype))
    return jax.nn.log_softmax(bounded)


def _log_tanh_slope(x: Float[Array, " *batch"]) -> Float[Array, " *batch"]:
    """Log of 1 - tanh(x)^2, stable for any x."""
    return 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))


_QUADRATURE_NODES, _weights = np.polynomial.hermite_e.hermegauss(64)
_QUADRATURE_WEIGHTS = _weights / np.sqrt(2 * np.pi)
_NORMAL_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)
