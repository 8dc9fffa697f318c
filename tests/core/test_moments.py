"""Running moments: right for any split of the data, under transformations, at the edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.core import Moments, init_moments, update_moments

BATCHES = np.random.default_rng(0).normal(300.0, 2.0, (5, 40, 3)).astype(np.float32)


def take_in(batches, decay=1.0):
    moments = init_moments(batches.shape[2:])
    for batch in batches:
        moments = update_moments(moments, jnp.asarray(batch), decay=decay)
    return moments


def test_without_decay_they_are_those_of_all_samples():
    moments = take_in(BATCHES)
    samples = BATCHES.reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(moments.mean, samples.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(moments.deviation(), samples.std(axis=0), rtol=1e-4)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9])
def test_with_decay_they_are_those_of_weighted_samples(decay):
    moments = take_in(BATCHES, decay)
    weights = decay ** np.arange(len(BATCHES))[::-1]
    weights /= weights.sum()
    wide = BATCHES.astype(np.float64)
    mean = np.einsum("b,bnf->f", weights, wide) / 40
    variance = np.einsum("b,bnf->f", weights, (wide - mean) ** 2) / 40
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(moments.deviation(), np.sqrt(variance), rtol=1e-4)


def test_a_large_mean_does_not_swallow_the_spread():
    moments = take_in(BATCHES + 30_000)
    wide = (BATCHES + 30_000).reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(moments.deviation(), wide.std(axis=0), rtol=1e-2)


def test_before_any_sample_nothing_is_shifted_or_scaled():
    assert init_moments((2,)).mean.tolist() == [0.0, 0.0]
    assert init_moments((2,)).deviation().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e5, 1e30])
def test_equal_samples_are_not_scaled(constant):
    moments = take_in(np.full((3, 1000, 1), constant, np.float32))
    assert moments.deviation().tolist() == [1.0]


def test_small_spreads_around_0_are_scaled():
    np.testing.assert_allclose(take_in((BATCHES - 300) * 1e-9).deviation(), 2e-9, rtol=0.2)


def test_jit_and_vmap_agree_with_eager():
    update = lambda batch: update_moments(init_moments((3,)), batch, decay=0.5)  # noqa: E731
    eager = [update(batch) for batch in jnp.asarray(BATCHES)]
    mapped = jax.jit(jax.vmap(update))(jnp.asarray(BATCHES))
    for index, moments in enumerate(eager):
        for one, all_ in zip(moments, mapped, strict=True):
            np.testing.assert_allclose(all_[index], one, rtol=1e-5)


def test_gradient_of_the_deviation_is_finite_where_nothing_varies():
    def deviation(sample):
        samples = jnp.stack([sample, sample])
        return update_moments(init_moments(), samples, decay=1.0).deviation()

    assert jnp.isfinite(jax.grad(deviation)(2.0))


def test_no_samples_are_refused():
    message = r"update_moments\(\): the batch has no sample; give at least one\."
    with pytest.raises(ValueError, match=message):
        update_moments(init_moments((3,)), jnp.zeros((0, 3)), decay=1.0)


def test_samples_without_an_entry_are_taken_in():
    assert update_moments(init_moments((0,)), jnp.zeros((5, 0)), decay=1.0).mean.shape == (0,)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_moments_of_half_precision_are_those_of_the_same_numbers_in_float32(dtype):
    samples = jnp.asarray(BATCHES[0], dtype)
    given = update_moments(init_moments((3,)), samples, decay=0.9)
    wanted = update_moments(init_moments((3,)), samples.astype(jnp.float32), decay=0.9)
    jax.tree.map(np.testing.assert_array_equal, given, wanted)


def test_samples_of_another_shape_are_refused_by_name():
    with pytest.raises(TypeError, match="samples"):
        update_moments(init_moments((3,)), jnp.zeros((4, 2)), decay=1.0)


def test_samples_that_are_integers_are_refused_by_name():
    with pytest.raises(TypeError, match="samples"):
        update_moments(init_moments(), jnp.zeros(4, int), decay=1.0)


def test_moments_are_checked_by_field():
    wrong = Moments(jnp.zeros(3), jnp.zeros(2), jnp.zeros(()))
    with pytest.raises(TypeError, match="variance"):
        update_moments(wrong, jnp.zeros((4, 3)), decay=1.0)
