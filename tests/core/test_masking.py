"""`mask_logits`: probability and gradient of an illegal action are exactly 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.core import mask_logits

LOGITS = np.array([[1.0, -2.0, 0.5, 3.0], [0.0, 9.0, -9.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
LEGAL = np.array([[1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0]], bool)
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]

jitted = jax.jit(mask_logits)


def softmax_over_legal(logits, legal):
    """The definition: exponentials of the legal actions over their sum."""
    weights = np.where(legal, np.exp(logits), 0)
    return weights / weights.sum(-1, keepdims=True)


@jax.jit
def weighted_probability(logits, legal, weights):
    return jnp.sum(jax.nn.softmax(mask_logits(logits, legal)) * weights)


gradient = jax.jit(jax.grad(weighted_probability))


def test_probabilities_are_the_softmax_over_legal_actions():
    probabilities = jax.nn.softmax(mask_logits(jnp.array(LOGITS), jnp.array(LEGAL)))
    np.testing.assert_allclose(probabilities, softmax_over_legal(LOGITS, LEGAL), rtol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_illegal_probability_is_exactly_zero_whatever_the_legal_logits(scale):
    logits = jnp.array(-LOGITS * scale, jnp.float32)
    probabilities = jax.nn.softmax(mask_logits(logits, jnp.array(LEGAL)))
    assert (np.asarray(probabilities)[~LEGAL] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_legal_logits_stay_as_they_are(dtype):
    logits = jnp.array(LOGITS, dtype)
    masked = mask_logits(logits, jnp.array(LEGAL))
    np.testing.assert_array_equal(masked[LEGAL], logits[LEGAL])


@pytest.mark.parametrize("dtype", DTYPES)
def test_illegal_logits_are_the_lowest_finite_number_of_the_same_dtype(dtype):
    masked = mask_logits(jnp.array(LOGITS, dtype), jnp.array(LEGAL))
    assert masked.dtype == dtype
    assert (masked[~LEGAL] == jnp.finfo(dtype).min).all()


def test_everything_legal_changes_nothing():
    logits = jnp.array(LOGITS, jnp.float32)
    np.testing.assert_array_equal(mask_logits(logits, jnp.ones((3, 4), bool)), logits)


def test_row_without_a_legal_action_is_uniform_and_leaves_other_rows_alone():
    legal = jnp.array([[False] * 4, LEGAL[1], LEGAL[2]])
    probabilities = jax.nn.softmax(mask_logits(jnp.array(LOGITS), legal))
    np.testing.assert_allclose(probabilities[0], 0.25)
    np.testing.assert_allclose(probabilities[1:], softmax_over_legal(LOGITS, LEGAL)[1:])


def test_one_legal_action_has_probability_one():
    probabilities = jax.nn.softmax(mask_logits(jnp.array(LOGITS), jnp.array(LEGAL)))
    assert probabilities[1].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_one_action_in_all_works():
    assert mask_logits(jnp.array([7.0]), jnp.array([True])).tolist() == [7.0]


@pytest.mark.parametrize("illegal_logit", [-jnp.inf, jnp.inf, jnp.nan])
def test_illegal_logit_that_is_not_finite_does_not_matter(illegal_logit):
    logits, legal = jnp.array([1.0, illegal_logit]), jnp.array([True, False])
    assert jax.nn.softmax(mask_logits(logits, legal)).tolist() == [1.0, 0.0]
    assert gradient(logits, legal, jnp.array([1.0, 2.0])).tolist() == [0.0, 0.0]


def test_jit_changes_nothing():
    arguments = jnp.array(LOGITS), jnp.array(LEGAL)
    np.testing.assert_array_equal(jitted(*arguments), mask_logits(*arguments))


def test_vmap_equals_the_batched_call():
    arguments = jnp.array(LOGITS), jnp.array(LEGAL)
    np.testing.assert_array_equal(jax.vmap(mask_logits)(*arguments), mask_logits(*arguments))


def test_gradient_is_that_of_the_softmax_over_legal_actions():
    weights = np.arange(12.0).reshape(3, 4)
    p = softmax_over_legal(LOGITS, LEGAL)
    wanted = p * (weights - (p * weights).sum(-1, keepdims=True))
    given = gradient(jnp.array(LOGITS), jnp.array(LEGAL), jnp.array(weights))
    np.testing.assert_allclose(given, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_is_exactly_zero_at_illegal_actions_and_finite_elsewhere(dtype):
    weights = jnp.arange(12, dtype=dtype).reshape(3, 4)
    given = gradient(jnp.array(LOGITS, dtype), jnp.array(LEGAL), weights)
    assert given.dtype == dtype
    assert jnp.isfinite(given).all()
    assert (np.asarray(given)[~LEGAL] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_is_zero_where_nothing_is_legal(dtype):
    given = gradient(jnp.array([1, 2], dtype), jnp.zeros(2, bool), jnp.array([1, 3], dtype))
    assert given.tolist() == [0.0, 0.0]


def test_float64_is_kept_where_it_is_switched_on():
    with jax.enable_x64(True):
        masked = mask_logits(jnp.array(LOGITS), jnp.array(LEGAL))
        assert masked.dtype == jnp.float64
        assert masked[0, 1] == np.finfo(np.float64).min


def test_mask_of_another_shape_is_refused_by_name():
    message = (
        r"mask_logits\(\): argument 'legal' should be Bool\[Array, '\*batch A'\], .* bool\[4\]"
    )
    with pytest.raises(TypeError, match=message):
        mask_logits(jnp.array(LOGITS), jnp.array(LEGAL[0]))


def test_mask_of_numbers_is_refused_by_name():
    with pytest.raises(TypeError, match=r"'legal' should be Bool.* but is float32\[3,4\]"):
        mask_logits(jnp.array(LOGITS), jnp.array(LEGAL, float))


def test_integer_logits_are_refused_by_name():
    with pytest.raises(TypeError, match=r"'logits' should be Float.* but is int32\[2\]"):
        mask_logits(jnp.array([1, 2]), jnp.array([True, True]))


def test_numpy_logits_are_refused_by_name():
    with pytest.raises(TypeError, match=r"'logits' should be Float.* the ndarray float64\[3,4\]"):
        mask_logits(LOGITS, jnp.array(LEGAL))  # pyright: ignore[reportArgumentType]


def test_missing_mask_is_named():
    with pytest.raises(TypeError, match=r"missing .* 'legal'"):
        mask_logits(jnp.array(LOGITS))  # pyright: ignore[reportCallIssue]
