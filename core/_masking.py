"""Illegal actions: one masking function for acting, loss and search."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._checks import checked


@checked
def mask_logits(
    logits: Float[Array, " *batch A"], legal: Bool[Array, " *batch A"]
) -> Float[Array, " *batch A"]:
    """Logits under which an illegal action has probability exactly 0.

    Illegal entries get the lowest finite number of their dtype. Unlike minus infinity
    it keeps entropy, KL and every gradient finite; the gradient with respect to an
    illegal logit is exactly 0. Huang and Ontañón 2020 show that the policy gradient of
    the masked policy is a valid one, https://arxiv.org/abs/2006.14171.

    A row without a legal action (a terminal state, often) becomes uniform over all
    actions; check `legal.any(-1)` where that would be a fault.

    Args:
        logits: unnormalised log-probabilities, any float dtype.
        legal: true where the action may be taken.

    Returns:
        Logits of the same shape and dtype; those of legal actions are unchanged.

    Raises:
        TypeError: shapes or dtypes disagree.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> masked = mask_logits(jnp.zeros(3), jnp.array([True, True, False]))
        >>> jax.nn.softmax(masked).tolist()
        [0.5, 0.5, 0.0]
    """
    return jnp.where(legal, logits, jnp.finfo(logits.dtype).min)
