"""Laws of value transforms and two-hot supports."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vernal.core import from_two_hot, signed_hyperbolic, signed_parabolic, two_hot

from .strategies import BATCHES, alike, assert_near, floats, numbers

squash = jax.jit(signed_hyperbolic)
unsquash = jax.jit(signed_parabolic)
spread = jax.jit(two_hot)
gather = jax.jit(from_two_hot)

EPSILONS = st.sampled_from([1e-4, 1e-3, 1e-2]) | numbers(1e-4, 0.5)
REALS = alike(BATCHES, lambda shape: floats(shape, -1e6, 1e6))


def exact_squash(x, epsilon):
    x = np.float64(x)
    # expm1(log1p(x) / 2) is sqrt(x + 1) - 1 without its cancellation.
    return np.sign(x) * np.expm1(np.log1p(abs(x)) / 2) + epsilon * x


def exact_unsquash(y, epsilon):
    y = np.float64(y)
    root = (np.sqrt(1 + 4 * epsilon * (abs(y) + 1 + epsilon)) - 1) / (2 * epsilon)
    return np.sign(y) * (root**2 - 1)


@given(REALS, EPSILONS)
def test_the_hyperbolic_transform_is_the_papers(drawn, epsilon):
    """It is the signed root of one more, less one, plus a slope: relatively exact."""
    (x,) = drawn
    epsilon = np.float32(epsilon).item()
    assert_near(squash(x, epsilon=epsilon), exact_squash(x, epsilon))


@given(REALS, EPSILONS)
def test_the_parabolic_transform_is_the_papers(drawn, epsilon):
    """It is the inverse as printed, in float64."""
    (y,) = drawn
    epsilon = np.float32(epsilon).item()
    wanted = exact_unsquash(y, epsilon)
    assert_near(unsquash(y, epsilon=epsilon), wanted, scale=abs(wanted) + 1e-6)


@given(REALS, EPSILONS)
def test_the_transforms_are_inverses(drawn, epsilon):
    """There and back, or back and there, a value is the same to relative rounding."""
    (x,) = drawn
    assert_near(unsquash(squash(x, epsilon=epsilon), epsilon=epsilon), x)
    assert_near(squash(unsquash(x, epsilon=epsilon), epsilon=epsilon), x)


@given(REALS, EPSILONS)
def test_the_transforms_are_odd(drawn, epsilon):
    """The transform of a value's negative is the negative of its transform."""
    (x,) = drawn
    for transform in (squash, unsquash):
        np.testing.assert_array_equal(
            transform(-x, epsilon=epsilon), -transform(x, epsilon=epsilon)
        )


@given(alike([(4,), (3, 2)], lambda shape: floats(shape, -1e6, 1e6)), EPSILONS)
def test_the_transforms_keep_the_order(drawn, epsilon):
    """The larger of two values has the larger transform, unless both are all but equal."""
    x = np.sort(drawn[0], axis=None).reshape(drawn[0].shape)
    apart = np.diff(x.reshape(-1)) > 1e-5 * abs(x.reshape(-1)[1:]) + 1e-5 * abs(x.reshape(-1)[:-1])
    for transform in (squash, unsquash):
        y = np.asarray(transform(x, epsilon=epsilon)).reshape(-1)
        assert (np.diff(y)[apart] > 0).all()


slopes = {
    transform: jax.jit(
        jax.grad(lambda x, epsilon, f=transform: f(x, epsilon=epsilon).sum(), argnums=0)
    )
    for transform in (signed_hyperbolic, signed_parabolic)
}


@given(REALS, EPSILONS)
def test_the_slopes_of_the_transforms(drawn, epsilon):
    """Slopes are positive everywhere, 0 included, and those of inverses are reciprocal."""
    (x,) = drawn
    epsilon = np.float32(epsilon).item()
    slope = slopes[signed_hyperbolic](x, epsilon)
    assert_near(slope, 0.5 / np.sqrt(abs(np.float64(x)) + 1) + epsilon)
    back = slopes[signed_parabolic](squash(x, epsilon=epsilon), epsilon)
    assert_near(back, 1 / np.float64(slope), tolerance=1e-4)


@st.composite
def supports(draw: st.DrawFn) -> np.ndarray:
    """Strictly increasing numbers, evenly spaced or not."""
    gaps = draw(st.sampled_from([(1,), (4,)]).flatmap(lambda s: floats(s, 0.125, 8)))
    return np.cumsum(np.append(draw(numbers(-20, 5)), gaps)).astype(np.float32)


VALUES = alike([(), (1,), (3, 2)], lambda shape: floats(shape, -30, 30))


@given(VALUES, supports())
def test_two_hot_is_linear_interpolation(drawn, support):
    """Each number of the support gets what interpolation between its neighbours gives it."""
    (values,) = drawn
    wanted = [np.interp(np.float64(values), support, unit) for unit in np.eye(len(support))]
    assert_near(spread(values, support), np.stack(wanted, axis=-1), scale=100)


@given(VALUES, supports())
def test_two_hot_is_a_distribution_over_two_neighbours(drawn, support):
    """Probabilities are not negative, sum to 1, and none lies beside another's neighbour."""
    (values,) = drawn
    probs = np.asarray(spread(values, support)).reshape(-1, len(support))
    assert (probs >= 0).all()
    assert_near(probs.sum(-1), np.ones(len(probs)))
    for row in probs:
        (used,) = np.nonzero(row)
        assert np.ptp(used) <= 1


@given(VALUES, supports())
def test_the_mean_of_two_hot_is_the_value(drawn, support):
    """The mean gives back the value, or the nearer end for one outside the support."""
    (values,) = drawn
    wanted = np.clip(values, support[0], support[-1])
    assert_near(gather(spread(values, support), support), wanted, scale=abs(support).max())


@given(supports())
def test_two_hot_is_one_hot_on_the_support(support):
    """A value that is a number of the support gets all of its probability there."""
    np.testing.assert_array_equal(spread(support, support), np.eye(len(support)))


there_and_back = jax.jit(
    jax.grad(lambda values, support: from_two_hot(two_hot(values, support), support).sum())
)


@given(VALUES, supports())
def test_the_gradient_through_two_hot(drawn, support):
    """There and back is the identity inside the support, slope and all, and flat outside."""
    (values,) = drawn
    inside = (values > support[0]) & (values < support[-1])
    outside = (values < support[0]) | (values > support[-1])
    gradient = np.asarray(there_and_back(values, support))
    assert_near(gradient[inside], np.ones(inside.sum()), scale=1000)
    np.testing.assert_array_equal(gradient[outside], 0)


@given(alike(BATCHES, lambda shape: floats((*shape, 5), 0, 1)), floats((5,), -100, 100))
def test_a_mean_is_the_weighted_sum(drawn, support):
    """The mean over a support is the sum of its numbers times their probabilities."""
    (probs,) = drawn
    wanted = probs.astype(np.float64) @ support.astype(np.float64)
    assert_near(gather(probs, support), wanted, scale=probs.astype(np.float64) @ abs(support))


@given(st.sampled_from([0, 1]), VALUES)
def test_a_support_has_two_numbers(size, drawn):
    """Fewer than two numbers are no support."""
    (values,) = drawn
    with pytest.raises(ValueError, match=f"the support has {size} numbers"):
        spread(values, np.zeros(size, np.float32))
