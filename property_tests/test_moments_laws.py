"""Laws of the running moments."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vernal.core import init_moments, update_moments

from .strategies import UNIT, floats, numbers

update = jax.jit(update_moments)
SAMPLES = st.sampled_from([1, 5]).flatmap(lambda n: floats((n, 2)))


@given(st.lists(SAMPLES, min_size=1, max_size=5), UNIT)
def test_mean_lies_within_the_samples_and_deviation_within_their_range(batches, decay):
    moments = init_moments((2,))
    for batch in batches:
        moments = update(moments, batch, decay=decay)
    samples = np.concatenate(batches)
    low, high = samples.min(axis=0), samples.max(axis=0)
    slack = 1e-5 * np.abs(samples).max() + 1e-6
    assert (low - slack <= moments.mean).all()
    assert (moments.mean <= high + slack).all()
    assert (np.sqrt(moments.variance) <= (high - low) / 2 + slack).all()


@given(floats((5, 2), -1e3, 1e3), floats((5, 2), -1e3, 1e3))
def test_order_of_batches_does_not_matter_without_decay(first, second):
    one = update(update(init_moments((2,)), first, decay=1.0), second, decay=1.0)
    other = update(update(init_moments((2,)), second, decay=1.0), first, decay=1.0)
    np.testing.assert_allclose(one.mean, other.mean, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(one.variance, other.variance, rtol=1e-3, atol=1e-1)


@given(floats((5, 2), -100, 100), numbers(-100, 100), numbers(0.125, 8))
def test_moments_follow_a_shift_and_a_scale_of_the_samples(samples, shift, scale):
    moments = update(init_moments((2,)), samples, decay=1.0)
    moved = update(init_moments((2,)), samples * scale + shift, decay=1.0)
    np.testing.assert_allclose(moved.mean, moments.mean * scale + shift, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(
        np.sqrt(moved.variance), np.sqrt(moments.variance) * scale, rtol=1e-3, atol=1e-2
    )


@given(SAMPLES, SAMPLES)
def test_decay_0_forgets_all_that_came_before(first, second):
    fresh = update(init_moments((2,)), second, decay=0.0)
    after = update(update(init_moments((2,)), first, decay=1.0), second, decay=0.0)
    np.testing.assert_allclose(after.mean, fresh.mean, rtol=1e-5, atol=2e-3)
    np.testing.assert_allclose(after.variance, fresh.variance, rtol=1e-4, atol=1e-3)
