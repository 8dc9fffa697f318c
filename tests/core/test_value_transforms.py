"""Value transforms and two-hot supports: definitions, gradients, edges, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from vernal.core import from_two_hot, signed_hyperbolic, signed_parabolic, two_hot

DTYPES = ["float16", "bfloat16", "float32"]
EVEN = jnp.linspace(-1, 1, 5)
UNEVEN = jnp.array([-10.0, -1.0, 0.0, 0.5, 30.0])
MAGNITUDES = np.geomspace(1e-6, 1e6, 200, dtype=np.float32)
WIDE_RANGE = np.concatenate([-MAGNITUDES, np.zeros(1, np.float32), MAGNITUDES])

hyperbolic = jax.jit(signed_hyperbolic)
parabolic = jax.jit(signed_parabolic)


def defined_hyperbolic(x, epsilon=1e-3):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + epsilon * x


def defined_parabolic(y, epsilon=1e-3):
    root = np.sqrt(1 + 4 * epsilon * (np.abs(y) + 1 + epsilon))
    return np.sign(y) * (((root - 1) / (2 * epsilon)) ** 2 - 1)


def defined_two_hot(value, support):
    """The only two neighbours, found by hand, that share the value."""
    probs = np.zeros(len(support))
    value = min(max(value, support[0]), support[-1])
    for low in range(len(support) - 1):
        if support[low] <= value <= support[low + 1]:
            share = (value - support[low]) / (support[low + 1] - support[low])
            probs[:] = 0
            probs[low], probs[low + 1] = 1 - share, share
    return probs


@pytest.mark.parametrize("epsilon", [1e-3, 0.1])
def test_hyperbolic_equals_its_definition(epsilon):
    given = hyperbolic(jnp.array(WIDE_RANGE), epsilon=epsilon)
    wanted = defined_hyperbolic(WIDE_RANGE.astype(float), epsilon)
    np.testing.assert_allclose(given, wanted, rtol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1])
def test_parabolic_equals_its_definition(epsilon):
    given = parabolic(jnp.array(WIDE_RANGE), epsilon=epsilon)
    wanted = defined_parabolic(WIDE_RANGE.astype(float), epsilon)
    np.testing.assert_allclose(given, wanted, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize(("value", "wanted"), [(1.0, 0.4152135), (300.0, 16.649351)])
def test_hyperbolic_gives_published_numbers_on_both_sides_of_zero(value, wanted):
    given = signed_hyperbolic(jnp.array([value, -value]))
    np.testing.assert_allclose(given, [wanted, -wanted], rtol=1e-6)


def test_round_trip_is_exact_to_a_few_units_in_the_last_place():
    given = parabolic(hyperbolic(jnp.array(WIDE_RANGE)))
    np.testing.assert_allclose(given, WIDE_RANGE, rtol=1e-6)


@pytest.mark.parametrize("transform", [signed_hyperbolic, signed_parabolic])
def test_gradients_equal_finite_differences(transform):
    values = jnp.array([-20.0, -1.0, 0.3, 5.0])
    check_grads(jax.jit(transform), (values,), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("transform", "slope"), [(signed_hyperbolic, 0.501), (signed_parabolic, 1 / 0.501)]
)
def test_gradient_at_zero_is_the_slope_there(transform, slope):
    np.testing.assert_allclose(jax.grad(transform)(0 * jnp.ones(())), slope, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transform", [signed_hyperbolic, signed_parabolic])
def test_transforms_keep_the_dtype_and_its_precision(transform, dtype):
    values = jnp.array([-20.0, 0.0, 0.25, 8.0], dtype)
    given = transform(values, epsilon=jnp.float32(1e-3))
    assert given.dtype == dtype
    wanted = transform(values.astype("float32"))
    np.testing.assert_allclose(
        np.asarray(given, float), wanted, rtol=8 * float(jnp.finfo(dtype).eps)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transform", [signed_hyperbolic, signed_parabolic])
def test_gradients_are_finite_in_every_dtype(transform, dtype):
    gradient = jax.grad(lambda x: transform(x).sum())(jnp.array([-20.0, 0.0, 8.0], dtype))
    assert np.isfinite(np.asarray(gradient, float)).all()


@pytest.mark.parametrize("transform", [signed_hyperbolic, signed_parabolic])
def test_epsilon_can_be_traced(transform):
    value = jnp.array(7.0)
    given = jax.jit(lambda epsilon: transform(value, epsilon=epsilon))(0.01)
    np.testing.assert_allclose(given, transform(value, epsilon=0.01), rtol=1e-6)


@pytest.mark.parametrize("transform", [signed_hyperbolic, signed_parabolic])
@pytest.mark.parametrize(
    ("values", "given"),
    [(jnp.array([1, 2]), r"int32\[2\]"), (np.ones(2), r"the ndarray"), (1.0, "the float 1.0")],
    ids=["ints", "numpy", "scalar"],
)
def test_transforms_refuse_what_is_no_float_array(transform, values, given):
    with pytest.raises(TypeError, match=rf"argument 'values' should be Float\[.* but is {given}"):
        transform(values)


@pytest.mark.parametrize("support", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_two_hot_equals_its_definition(support):
    low, high = float(support[0]), float(support[-1])
    values = np.array([*np.linspace(low - 1, high + 1, 41), *np.asarray(support)])
    wanted = [defined_two_hot(value, np.asarray(support, float)) for value in values]
    given = two_hot(jnp.array(values, "float32"), support)
    np.testing.assert_allclose(given, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (-0.4, [0, 0.8, 0.2, 0, 0]),
        (0.3, [0, 0, 0.4, 0.6, 0]),
        (-7.0, [1, 0, 0, 0, 0]),
        (-1.0, [1, 0, 0, 0, 0]),
        (0.5, [0, 0, 0, 1, 0]),
        (1.0, [0, 0, 0, 0, 1]),
        (7.0, [0, 0, 0, 0, 1]),
    ],
)
def test_two_hot_gives_known_rows(value, wanted):
    np.testing.assert_allclose(two_hot(jnp.array(value), EVEN), wanted, atol=1e-6)


@pytest.mark.parametrize("value", [-jnp.inf, jnp.inf])
def test_two_hot_saturates_at_infinity(value):
    end = 0 if value < 0 else 4
    np.testing.assert_array_equal(two_hot(jnp.array(value), EVEN), np.eye(5)[end])


def test_two_hot_has_a_support_of_two_numbers_at_least():
    np.testing.assert_allclose(two_hot(jnp.array(0.25), jnp.array([0.0, 1.0])), [0.75, 0.25])
    with pytest.raises(ValueError, match=r"two_hot\(\): the support has 1 numbers"):
        two_hot(jnp.array(0.25), jnp.array([0.0]))


def test_two_hot_gradient_shifts_mass_to_the_upper_neighbour():
    jacobian = jax.jacobian(lambda x: two_hot(x, EVEN))(jnp.array(0.3))
    np.testing.assert_allclose(jacobian, [0, 0, -2, 2, 0], atol=1e-6)


def test_from_two_hot_is_the_mean():
    probs = jnp.array([[0.1, 0.2, 0.3, 0.2, 0.2], [0, 0, 1.0, 0, 0]])
    wanted = np.asarray(probs, float) @ np.asarray(UNEVEN, float)
    np.testing.assert_allclose(from_two_hot(probs, UNEVEN), wanted, rtol=1e-6)


def test_from_two_hot_asks_for_full_precision_on_accelerators():
    jaxpr = jax.make_jaxpr(from_two_hot)(jnp.ones(5), EVEN)
    assert "HIGHEST" in str(jaxpr)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_hot_keeps_the_dtype_of_the_values(dtype):
    support = EVEN.astype(dtype)
    probs = two_hot(jnp.array([0.25, -3.0], dtype), support)
    assert probs.dtype == dtype
    assert from_two_hot(probs, support).dtype == dtype
    np.testing.assert_allclose(np.asarray(probs[0], float), [0, 0, 0.5, 0.5, 0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtypes_are_kept_when_float64_is_enabled(dtype):
    with jax.enable_x64(True):
        values, support = jnp.ones(2, dtype), jnp.linspace(-1, 1, 3, dtype=dtype)
        probs = two_hot(values, support)
        given = probs, from_two_hot(probs, support), hyperbolic(values), parabolic(values)
    assert {x.dtype for x in given} == {np.dtype(dtype)}


@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0,)], ids=str)
def test_two_hot_and_its_inverse_take_any_leading_axes(shape):
    values = jnp.linspace(-0.9, 0.9, int(np.prod(shape))).reshape(shape)
    probs = jax.jit(two_hot)(values, EVEN)
    assert probs.shape == (*shape, 5)
    np.testing.assert_allclose(from_two_hot(probs, EVEN), values, atol=1e-6)


def test_two_hot_maps_over_values_and_over_supports():
    values, supports = jnp.array([0.3, 4.0]), jnp.stack([EVEN, UNEVEN])
    mapped = jax.vmap(two_hot)(values, supports)
    rows = [two_hot(*pair) for pair in zip(values, supports, strict=True)]
    np.testing.assert_allclose(mapped, jnp.stack(rows), rtol=1e-6)


def test_from_two_hot_refuses_a_support_of_another_length():
    with pytest.raises(TypeError, match=r"'support' .* but is float32\[5\].*float32\[2,4\]"):
        from_two_hot(jnp.ones((2, 4)) / 4, EVEN)


def test_two_hot_refuses_a_support_for_every_value():
    with pytest.raises(TypeError, match=r"argument 'support' .* but is float32\[2,5\]"):
        two_hot(jnp.zeros(2), jnp.stack([EVEN, EVEN]))
