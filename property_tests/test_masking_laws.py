"""Laws of masked logits."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vernal.core import mask_logits

from .strategies import alike, assert_near, bools, floats, masks

ROWS = [(1,), (5,), (2, 3)]
DTYPES = [np.float16, jnp.bfloat16, np.float32]

jit_mask = jax.jit(mask_logits)
masked_softmax = jax.jit(lambda logits, legal: jax.nn.softmax(mask_logits(logits, legal)))


@given(alike(ROWS, floats, masks))
def test_masking_is_softmax_over_the_legal(drawn):
    """Legal actions share all probability as if alone; illegal ones have exactly 0."""
    logits, legal = drawn
    probs = np.asarray(masked_softmax(logits, legal))
    np.testing.assert_array_equal(probs[~legal], 0)
    exact = np.where(legal, logits.astype(np.float64), -np.inf)
    weights = np.exp(exact - exact.max(-1, keepdims=True))
    assert_near(probs, weights / weights.sum(-1, keepdims=True), scale=1)


@given(alike(ROWS, floats, bools), st.sampled_from(DTYPES))
def test_masking_touches_illegal_logits_only(drawn, dtype):
    """Logits of legal actions stay as they are, those of others become finite and lowest."""
    logits, legal = drawn
    logits = logits.astype(dtype)
    masked = jit_mask(logits, legal)
    assert masked.dtype == dtype
    lowest = jnp.finfo(dtype).min
    np.testing.assert_array_equal(masked, np.where(legal, logits, lowest))
    assert np.isfinite(np.float64(lowest))


@given(alike(ROWS, floats, bools, bools))
def test_masks_combine(drawn):
    """Masking by one mask and then another is masking by both, in either order."""
    logits, one, other = drawn
    both = jit_mask(logits, one & other)
    np.testing.assert_array_equal(jit_mask(jit_mask(logits, one), other), both)
    np.testing.assert_array_equal(jit_mask(jit_mask(logits, other), one), both)


@given(alike(ROWS, floats))
def test_a_row_without_a_legal_action_is_uniform(drawn):
    """Where nothing is legal, all actions are equally probable."""
    (logits,) = drawn
    probs = masked_softmax(logits, np.zeros(logits.shape, bool))
    assert_near(probs, np.full(logits.shape, 1 / logits.shape[-1]))


@given(alike(ROWS, floats, bools), st.randoms(use_true_random=False))
def test_masking_does_not_see_the_order_of_actions(drawn, random):
    """Permuting actions and mask alike permutes the masked logits."""
    logits, legal = drawn
    order = np.array(random.sample(range(logits.shape[-1]), logits.shape[-1]))
    masked = np.asarray(jit_mask(logits, legal))
    np.testing.assert_array_equal(
        jit_mask(logits[..., order], legal[..., order]), masked[..., order]
    )


@jax.jit
def policy_gradient(weights, logits, legal):
    def objective(logits):
        return jnp.vdot(weights, jax.nn.softmax(mask_logits(logits, legal)))

    return jax.grad(objective)(logits)


@given(alike(ROWS, lambda shape: floats(shape, -10, 10), floats, bools))
def test_no_gradient_reaches_an_illegal_logit(drawn):
    """Gradients are finite, and exactly 0 at the logits of illegal actions."""
    weights, logits, legal = drawn
    gradient = np.asarray(policy_gradient(weights, logits, legal))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[~legal], 0)


@given(alike(ROWS, lambda shape: floats(shape, -10, 10), floats, masks))
def test_the_gradient_of_legal_logits_is_that_of_the_softmax(drawn):
    """At legal logits the gradient is probability times weight beyond the mean weight."""
    weights, logits, legal = drawn
    probs = np.asarray(masked_softmax(logits, legal), np.float64)
    wanted = probs * (weights - (probs * weights).sum(-1, keepdims=True))
    assert_near(policy_gradient(weights, logits, legal), wanted, scale=20)
