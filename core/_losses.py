"""Losses: pure functions of arrays. Networks, optimisers and rollouts stay outside.

All are computed and given in float32 at least. Whatever finite data they are of, they, their
parts and their gradients are finite: a ratio, a surrogate or a squared error that float32 (or
the data's dtype, if narrower) does not hold counts as the end of what it holds, without gradient.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, ScalarLike

from ._arrays import bound, mean, power_of_two, widen
from ._checks import checked, require_samples
from ._distributions import Categorical
from ._ratios import bound_log_ratios


class PPOLossParts(NamedTuple):
    """The parts of `ppo_loss`, each a mean over the batch.

    Attributes:
        policy: clipped surrogate, in units of the advantages.
        value: `value_loss`, in squared units of the values.
        entropy: entropy of the policy, in nats.
        kl: estimate of KL(old || new) in nats, at least 0.
        clip_fraction: share of samples whose ratio lies outside the clip range.
        explained_variance: 1 - var(value_targets - values) / var(value_targets); 1 is a
            perfect critic, 0 one that says the mean; 0 where the targets do not vary.
    """

    policy: Float[Array, ""]
    value: Float[Array, ""]
    entropy: Float[Array, ""]
    kl: Float[Array, ""]
    clip_fraction: Float[Array, ""]
    explained_variance: Float[Array, ""]


@checked
def ppo_loss(
    log_probs: Float[Array, " *batch"],
    old_log_probs: Float[Array, " *batch"],
    advantages: Float[Array, " *batch"],
    entropies: Float[Array, " *batch"],
    values: Float[Array, " *batch"],
    value_targets: Float[Array, " *batch"],
    old_values: Float[Array, " *batch"] | None = None,
    *,
    clip_epsilon: ScalarLike = 0.2,
    value_weight: ScalarLike = 0.5,
    entropy_weight: ScalarLike = 0.01,
    value_clip_epsilon: ScalarLike | None = None,
) -> tuple[Float[Array, ""], PPOLossParts]:
    """Proximal policy optimisation's loss, and its parts for a person to read.

    With `ratio = exp(log_probs - old_log_probs)`, the mean over the batch of

        - min(ratio * advantage, clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon) * advantage)
        + value_weight * value_loss - entropy_weight * entropy

    Equations 7 and 9 of Schulman et al. 2017, https://arxiv.org/abs/1707.06347. The KL part
    is the mean of `ratio - 1 - log(ratio)` (http://joschu.net/blog/kl-approx.html).

    Args:
        log_probs: log-probability of each taken action under the policy being trained.
        old_log_probs: the same under the policy that collected the data.
        advantages: how much better each action was than expected; used as they are, see
            `normalise`. No gradient should flow through them.
        entropies: entropy of the policy being trained in each state, in nats.
        values: V(s) under the critic being trained.
        value_targets: what the critic should say.
        old_values: V(s) under the critic that collected the data; only to clip values.
        clip_epsilon: how far the ratio may leave 1 before its gradient stops.
        value_weight: weight of the value loss.
        entropy_weight: weight of the entropy bonus.
        value_clip_epsilon: see `value_loss`; no clipping by default.

    Returns:
        The scalar to minimise and a `PPOLossParts`, in float32 at least. Both and their gradients
        are finite for all finite data: a ratio, a surrogate or a squared error too large for its
        dtype counts as the largest that fits, and has no gradient.

    Raises:
        TypeError: shapes or dtypes disagree: a value head that returns `(N, 1)`, say.
        ValueError: only one of `old_values` and `value_clip_epsilon` is given, or there is no
            sample.

    Example:
        >>> import jax.numpy as jnp
        >>> old, new = jnp.log(jnp.array([0.25, 0.4])), jnp.log(jnp.array([0.5, 0.2]))
        >>> one, zero = jnp.ones(2), jnp.zeros(2)
        >>> loss, parts = ppo_loss(new, old, one, zero, zero, zero)
        >>> round(loss.item(), 4)  # -(1.2 + 0.5) / 2
        -0.85
        >>> parts.clip_fraction.item()
        1.0
    """
    require_samples("ppo_loss()", log_probs.size)
    dtype = log_probs.dtype
    log_ratios = bound_log_ratios(widen(log_probs) - widen(old_log_probs), dtype)
    ratios, advantages = jnp.exp(log_ratios), widen(advantages)
    clipped = jnp.clip(ratios, 1 - clip_epsilon, 1 + clip_epsilon)
    surrogate = mean(jnp.minimum(ratios * advantages, clipped * advantages), dtype)
    policy = -_nan_unless_finite(surrogate, advantages)
    value = value_loss(values, value_targets, old_values, clip_epsilon=value_clip_epsilon)
    entropy = _nan_unless_finite(mean(entropies), entropies)
    parts = PPOLossParts(
        policy=policy,
        value=value,
        entropy=entropy,
        kl=mean(jnp.expm1(log_ratios) - log_ratios),
        clip_fraction=jnp.mean(jnp.abs(ratios - 1) > clip_epsilon, dtype=ratios.dtype),
        explained_variance=explained_variance(values, value_targets),
    )
    loss = policy + value_weight * value - entropy_weight * entropy
    return _finite(loss), parts


class PolicyValueLossParts(NamedTuple):
    """The parts of `policy_value_loss`, each a mean over the batch.

    Attributes:
        policy: cross-entropy of the policy to its targets, in nats.
        value: `value_loss`, in squared units of the values.
        entropy: entropy of the policy, in nats.
        kl: KL(target || policy) in nats: 0 for a policy that equals its targets.
        explained_variance: as in `PPOLossParts`.
    """

    policy: Float[Array, ""]
    value: Float[Array, ""]
    entropy: Float[Array, ""]
    kl: Float[Array, ""]
    explained_variance: Float[Array, ""]


@checked
def policy_value_loss(
    logits: Float[Array, "*batch A"],
    target_probs: Float[Array, "*batch A"],
    values: Float[Array, " *batch"],
    value_targets: Float[Array, " *batch"],
    *,
    value_weight: ScalarLike = 1.0,
    entropy_weight: ScalarLike = 0.0,
) -> tuple[Float[Array, ""], PolicyValueLossParts]:
    """AlphaZero's loss: a policy learns what a search weighed, a critic what came of it.

    The mean over the batch of

        - sum(target_probs * log softmax(logits)) + value_weight * (value_targets - values)^2 / 2
        - entropy_weight * entropy

    Equation 1 of Silver et al. 2017, https://arxiv.org/abs/1712.01815, where the squared error
    is not halved, a weight decay is added, and there is no bonus for entropy.

    Args:
        logits: policy being trained, masked as when the targets were made.
        target_probs: what it should say, `action_weights` of a search. No gradient should flow
            through them.
        values: V(s) under the critic being trained.
        value_targets: what the critic should say.
        value_weight: weight of the value loss.
        entropy_weight: weight of the entropy bonus: a policy that is sure too early stops
            finding anything new.

    Returns:
        The scalar to minimise and a `PolicyValueLossParts`.

    Raises:
        TypeError: shapes or dtypes disagree: a value head that returns `(N, 1)`, say.
        ValueError: there is no sample.

    Example:
        >>> import jax.numpy as jnp
        >>> probs, zero = jnp.array([[0.5, 0.5], [1.0, 0.0]]), jnp.zeros(2)
        >>> loss, parts = policy_value_loss(jnp.zeros((2, 2)), probs, zero, zero)
        >>> round(loss.item(), 4), round(parts.kl.item(), 4)  # log(2), log(2) / 2
        (0.6931, 0.3466)
    """
    require_samples("policy_value_loss()", values.size)
    log_probs, target_probs = jax.nn.log_softmax(widen(logits)), widen(target_probs)
    log_probs = bound(log_probs, log_probs.dtype)
    # What the target rules out counts 0, also where the policy has it at minus infinity.
    weighted = jnp.where(target_probs > 0, target_probs * log_probs, 0)
    policy = -_nan_unless_finite(mean(jnp.sum(weighted, axis=-1)), target_probs)
    target_entropy = mean(jnp.sum(jax.scipy.special.entr(target_probs), axis=-1))
    value = value_loss(values, value_targets)
    parts = PolicyValueLossParts(
        policy=policy,
        value=value,
        entropy=mean(Categorical(logits).entropy()),
        kl=jnp.maximum(policy - target_entropy, 0),  # rounding may lead below
        explained_variance=explained_variance(values, value_targets),
    )
    loss = policy + value_weight * value - entropy_weight * parts.entropy
    return _finite(loss), parts


@checked
def value_loss(
    values: Float[Array, " *batch"],
    value_targets: Float[Array, " *batch"],
    old_values: Float[Array, " *batch"] | None = None,
    *,
    clip_epsilon: ScalarLike | None = None,
) -> Float[Array, ""]:
    """Half the mean squared error of a critic, clipped or not.

    With `clip_epsilon`, the larger of the errors of `values` and of `values` moved to within
    `clip_epsilon` of `old_values` counts, as in the original code of PPO (detail 9 of Huang et
    al. 2022, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/).

    Args:
        values: V(s) under the critic being trained.
        value_targets: what the critic should say, in the same units.
        old_values: V(s) under the critic that collected the data.
        clip_epsilon: how far a value may move from its old one, in units of the values.

    Returns:
        The loss, in squared units of the values.

    Raises:
        TypeError: shapes or dtypes disagree: a value head that returns `(N, 1)`, say.
        ValueError: only one of `old_values` and `clip_epsilon` is given, or there is no sample.

    Example:
        >>> import jax.numpy as jnp
        >>> value_loss(jnp.array([1.0, 3.0]), jnp.array([0.0, 0.0])).item()
        2.5
    """
    if (old_values is None) != (clip_epsilon is None):
        missing = "old_values" if old_values is None else "clip_epsilon"
        raise ValueError(
            f"value_loss(): clipping takes both old_values and an epsilon; {missing} is missing."
        )
    require_samples("value_loss()", values.size)
    data = values, value_targets
    errors = _squared_errors(values, value_targets, values.dtype)
    if old_values is not None and clip_epsilon is not None:
        dtype, values, old_values = values.dtype, widen(values), widen(old_values)
        epsilon = jnp.asarray(clip_epsilon, values.dtype)
        moved = old_values + jnp.clip(values - old_values, -epsilon, epsilon)
        errors = jnp.maximum(errors, _squared_errors(moved, value_targets, dtype))
        data = *data, old_values
    return _nan_unless_finite(mean(errors), *data) / 2


@functools.partial(jax.jit, inline=True)
def _nan_unless_finite(part: Float[Array, ""], *data: Float[Array, "..."]) -> Float[Array, ""]:
    """A part of a loss, which bounds would make finite whatever the data are."""
    is_finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in data])
    # A constant that is added leaves value and gradient as they are, to the last bit.
    return part + jnp.where(jnp.all(is_finite), 0, jnp.nan).astype(part.dtype)


@functools.partial(jax.jit, inline=True)
def _finite(loss: Float[Array, ""]) -> Float[Array, ""]:
    """A sum of finite parts, which may have been too much; its gradient is theirs all the same."""
    return _bound_value(loss)


@jax.custom_jvp
def _bound_value(loss: Array) -> Array:
    return bound(loss, loss.dtype)


_bound_value.defjvps(lambda tangent, _, __: tangent)


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _squared_errors(
    values: Float[Array, " *batch"], targets: Float[Array, " *batch"], dtype: Any
) -> Float[Array, " *batch"]:
    """Squares that fit, of errors whose gradients fit into a dtype."""
    errors = widen(values) - widen(targets)
    root = math.sqrt(float(jnp.finfo(errors.dtype).max)) / 2
    largest = min(root, float(jnp.finfo(dtype).max))
    return jnp.clip(errors, -largest, largest) ** 2


@checked
def explained_variance(
    values: Float[Array, " *batch"], value_targets: Float[Array, " *batch"]
) -> Float[Array, ""]:
    """Share of the targets' variance that a critic accounts for.

        1 - var(value_targets - values) / var(value_targets)

    Args:
        values: V(s) as the critic says.
        value_targets: what it should say.

    Returns:
        At most 1; below 0 for a critic worse than a constant; 0 where targets do not vary.

    Raises:
        TypeError: shapes or dtypes disagree.

    Example:
        >>> import jax.numpy as jnp
        >>> explained_variance(jnp.array([0.0, 1.0]), jnp.array([0.0, 2.0])).item()
        0.75
    """
    varied, targets, errors = _in_their_range(values, value_targets)
    variance = jnp.where(varied, jnp.var(targets), 1)
    return jnp.where(varied, 1 - jnp.var(errors) / variance, 0)


@functools.partial(jax.jit, inline=True)
def _in_their_range(
    values: Float[Array, " *batch"], targets: Float[Array, " *batch"]
) -> tuple[Bool[Array, ""], Float[Array, " *batch"], Float[Array, " *batch"]]:
    """Whether targets vary; they, and errors, in a unit of their range, so that squares fit."""
    values, targets = widen(values), widen(targets)
    high, low = jnp.max(targets, initial=-jnp.inf), jnp.min(targets, initial=jnp.inf)
    # Not from the variance: that of equal targets is above 0 where their mean is rounded.
    varied = high > low
    scale = jnp.where(varied, 1 / power_of_two(high / 2 - low / 2), 1)
    targets = targets * scale
    largest = math.sqrt(float(jnp.finfo(targets.dtype).max) / (4 * max(targets.size, 1)))
    return varied, targets, jnp.clip(targets - values * scale, -largest, largest)
