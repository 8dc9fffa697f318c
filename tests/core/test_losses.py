"""Losses against their equations in NumPy, and the PPO numbers worked out by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

from vernal.core import (
    Categorical,
    PolicyValueLossParts,
    PPOLossParts,
    explained_variance,
    mask_logits,
    policy_value_loss,
    ppo_loss,
    value_loss,
)

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]
NAMES = ["log_probs", "old_log_probs", "advantages", "entropies", "values", "value_targets"]
N = 8

jitted_ppo_loss: Any = jax.jit(ppo_loss)
jitted_value_loss = jax.jit(value_loss)
jitted_explained_variance: Any = jax.jit(explained_variance)
ppo_gradients = jax.jit(jax.grad(ppo_loss, argnums=range(6), has_aux=True))
value_gradient = jax.jit(jax.grad(value_loss))


def samples(shape=(N,), seed=0):
    """Arguments of `ppo_loss`, with ratios on both sides of 1 and of the clip range."""
    random = np.random.default_rng(seed)
    log_probs, advantages, values, value_targets = random.normal(size=(4, *shape))
    old_log_probs = log_probs - random.normal(0, 0.3, shape)
    entropies = random.random(shape)
    return [log_probs, old_log_probs, advantages, entropies, values, value_targets]


def arrays(data, dtype: Any = jnp.float32) -> Any:
    return [jnp.asarray(x, dtype) for x in data]


def one_sample(ratio, advantage):
    """A single sample that has this ratio; everything else is 0."""
    zero = jnp.zeros(1)
    return jnp.log(jnp.array([ratio])), zero, jnp.array([advantage]), zero, zero, zero


def ppo_by_definition(
    data: Any, clip_epsilon: Any = 0.2, value_weight: Any = 0.5, entropy_weight: Any = 0.01
) -> Any:
    log_probs, old_log_probs, advantages, entropies, values, value_targets = data
    ratios = np.exp(log_probs - old_log_probs)
    policy: Any = np.mean(
        [
            -min(r * a, min(max(r, 1 - clip_epsilon), 1 + clip_epsilon) * a)
            for r, a in zip(ratios.ravel(), advantages.ravel(), strict=True)
        ]
    )
    value = ((values - value_targets) ** 2).mean() / 2
    parts: Any = PPOLossParts(
        policy=policy,
        value=value,
        entropy=entropies.mean(),
        kl=(ratios - 1 - np.log(ratios)).mean(),
        clip_fraction=(np.abs(ratios - 1) > clip_epsilon).mean(),
        explained_variance=1 - (value_targets - values).var() / value_targets.var(),
    )
    return policy + value_weight * value - entropy_weight * parts.entropy, parts


# `ppo_loss`: right answers.


@pytest.mark.parametrize("shape", [(N,), (1,), (4, 3), (2, 2, 2)])
@pytest.mark.parametrize(
    "knobs", [{}, {"clip_epsilon": 0.05, "value_weight": 2.0, "entropy_weight": 0.5}]
)
def test_ppo_loss_is_that_of_its_equation(shape, knobs):
    data = samples(shape)
    if np.size(data[0]) == 1:
        data[5] = data[4]  # one target has no variance: the definition would divide by 0
    with np.errstate(invalid="ignore"):
        loss, parts = ppo_by_definition(data, **knobs)
    given_loss, given = jitted_ppo_loss(*arrays(data), **knobs)
    np.testing.assert_allclose(given_loss, loss, rtol=1e-5, atol=1e-6)
    for name in PPOLossParts._fields[:5]:
        np.testing.assert_allclose(getattr(given, name), getattr(parts, name), atol=1e-6)
    wanted = 0.0 if np.size(data[0]) == 1 else parts.explained_variance
    np.testing.assert_allclose(given.explained_variance, wanted, atol=1e-5)


def test_ppo_loss_of_four_samples_worked_by_hand():
    new, old = np.array([0.5, 0.2, 0.3, 0.9]), np.array([0.25, 0.4, 0.3, 0.6])
    zero = np.zeros(4)
    data = np.log(new), np.log(old), np.array([1, 1, -1, -2]), zero, zero, zero
    loss, parts = jitted_ppo_loss(*arrays(data))
    np.testing.assert_allclose(loss, 0.575, rtol=1e-6)
    np.testing.assert_allclose(parts.policy, 0.575, rtol=1e-6)
    np.testing.assert_allclose(parts.clip_fraction, 0.75)
    np.testing.assert_allclose(parts.kl, 0.148634, rtol=1e-5)


@pytest.mark.parametrize(("sign", "wanted"), [(1, -0.17117467), (-1, 0.19333333)])
def test_ppo_policy_loss_is_the_published_number_of_rlax(sign, wanted):
    logits = jnp.array([[1.0, 1, 1], [2, 0, 0], [-1, -2, -3]])
    old_logits = logits.at[2].set(jnp.array([-3.0, -2, -1]))
    actions = jnp.array([0, 1, 2])
    log_probs = Categorical(logits).log_prob(actions)
    old_log_probs = Categorical(old_logits).log_prob(actions)
    advantages = sign * jnp.array([0.3, 0.2, 0.1])
    zero = jnp.zeros(3)
    _, parts = jitted_ppo_loss(log_probs, old_log_probs, advantages, zero, zero, zero)
    np.testing.assert_allclose(parts.policy, wanted, atol=1e-5)  # rlax rounds it


def test_ppo_loss_of_an_unchanged_policy_has_ratio_one_and_no_divergence():
    data = arrays(samples())
    data[1] = data[0]
    _, parts = jitted_ppo_loss(*data)
    np.testing.assert_allclose(parts.policy, -data[2].mean(), rtol=1e-6)
    assert (parts.kl, parts.clip_fraction) == (0.0, 0.0)


def test_ppo_gradient_of_an_unchanged_policy_is_the_policy_gradient():
    data = arrays(samples())
    data[1] = data[0]
    gradients, _ = ppo_gradients(*data)
    np.testing.assert_allclose(gradients[0], -data[2] / N, rtol=1e-6)


# `ppo_loss`: the edges of the clip range, advantage by advantage.

EDGES = [
    (1.199, 1.0, -1.199, True),
    (1.201, 1.0, -1.2, False),
    (1.201, -1.0, 1.201, True),
    (0.801, -1.0, 0.801, True),
    (0.799, -1.0, 0.8, False),
    (0.799, 1.0, -0.799, True),
]


@pytest.mark.parametrize(("ratio", "advantage", "wanted", "learns"), EDGES)
def test_ppo_policy_loss_is_clipped_just_outside_the_range_only(ratio, advantage, wanted, learns):
    loss, parts = jitted_ppo_loss(*one_sample(ratio, advantage), clip_epsilon=0.2)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert parts.clip_fraction == (abs(ratio - 1) > 0.2)


@pytest.mark.parametrize(("ratio", "advantage", "wanted", "learns"), EDGES)
def test_ppo_gradient_stops_just_outside_the_range_only(ratio, advantage, wanted, learns):
    gradients, _ = ppo_gradients(*one_sample(ratio, advantage), clip_epsilon=0.2)
    np.testing.assert_allclose(gradients[0], [-ratio * advantage if learns else 0.0], rtol=1e-5)


# `ppo_loss`: transformations and dtypes.


def test_jit_of_ppo_loss_changes_nothing():
    data = arrays(samples())
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        jitted_ppo_loss(*data),
        ppo_loss(*data),
    )


def test_vmap_of_ppo_loss_treats_each_batch_alone():
    data = arrays(samples((3, N)))
    losses, parts = jax.vmap(jitted_ppo_loss)(*data)
    for row in range(3):
        loss, row_parts = jitted_ppo_loss(*[x[row] for x in data])
        np.testing.assert_allclose(losses[row], loss, rtol=1e-5)
        np.testing.assert_allclose(parts.kl[row], row_parts.kl, rtol=1e-4)


def test_knobs_of_ppo_loss_may_be_mapped_over():
    data, epsilons = arrays(samples()), jnp.array([0.05, 0.2])
    mapped = jax.vmap(lambda epsilon: jitted_ppo_loss(*data, clip_epsilon=epsilon)[0])(epsilons)
    wanted = [jitted_ppo_loss(*data, clip_epsilon=epsilon)[0] for epsilon in (0.05, 0.2)]
    np.testing.assert_allclose(mapped, wanted, rtol=1e-5)


@pytest.mark.parametrize("clipped", [False, True])
def test_gradient_of_ppo_loss_is_that_of_its_equation(clipped):
    with jax.enable_x64(True):
        data = arrays(samples(), jnp.float64)
        old_values = data[4] + 0.1 if clipped else None
        epsilon = 0.2 if clipped else None

        @jax.jit
        def loss(*arguments):
            return jitted_ppo_loss(*arguments, old_values, value_clip_epsilon=epsilon)[0]

        check_grads(loss, data, order=1, modes=["rev"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_ppo_loss_is_float32_and_its_gradients_have_the_dtype_and_are_finite(dtype):
    data = arrays(samples(), dtype)
    gradients, parts = ppo_gradients(*data)
    loss, _ = jitted_ppo_loss(*data)
    assert {x.dtype for x in (loss, *parts)} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in gradients} == {jnp.dtype(dtype)}
    assert all(jnp.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ppo_loss_close_to_the_definition_in_every_dtype(dtype):
    data = arrays(samples(), dtype)
    wanted, _ = ppo_by_definition([np.asarray(x, np.float64) for x in data])
    given, _ = jitted_ppo_loss(*data)
    np.testing.assert_allclose(np.float64(given), wanted, atol=10 * float(jnp.finfo(dtype).eps))


def test_ppo_loss_is_exact_in_float64_where_it_is_switched_on():
    data = samples()
    with jax.enable_x64(True):
        loss, parts = jitted_ppo_loss(*arrays(data, jnp.float64))
        assert {x.dtype for x in (loss, *parts)} == {jnp.dtype(jnp.float64)}
        np.testing.assert_allclose(loss, ppo_by_definition(data)[0], rtol=1e-12)


def test_masked_policy_has_a_finite_gradient_through_ppo_loss():
    legal = jnp.array([[True, True, False], [False, True, False], [False, False, False]])
    actions, zero = jnp.array([0, 1, 2]), jnp.zeros(3)

    @jax.jit
    def loss(logits):
        policy = Categorical(mask_logits(logits, legal))
        log_probs = policy.log_prob(actions)
        old = jax.lax.stop_gradient(log_probs)
        return ppo_loss(log_probs, old, jnp.ones(3), policy.entropy(), zero, zero)[0]

    gradient = np.asarray(jax.jit(jax.grad(loss))(jnp.arange(9.0).reshape(3, 3)))
    assert np.isfinite(gradient).all()
    assert (gradient[~np.asarray(legal)] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log_ratio", [10.0, 60.0, 200.0])
def test_ratio_that_would_overflow_is_clipped_with_gradient_zero(log_ratio, dtype):
    zero = jnp.zeros(1, dtype)
    data = jnp.array([log_ratio], dtype), zero, zero + 1, zero, zero, zero
    np.testing.assert_allclose(np.float64(jitted_ppo_loss(*data)[0]), -1.2, rtol=1e-2)
    gradients, _ = ppo_gradients(*data)
    assert gradients[0].tolist() == [0.0]


RUINOUS = [(jnp.float32, -100.0), (jnp.float32, -89.0), (jnp.bfloat16, -100.0)]


@pytest.mark.parametrize(("dtype", "old"), [*RUINOUS, (jnp.float16, -10.5)])
def test_one_bad_action_that_was_all_but_impossible_does_not_ruin_a_batch(dtype, old):
    data = arrays(samples(), dtype)
    data[0], data[1] = data[0].at[3].set(0), data[1].at[3].set(old)
    data[2] = data[2].at[3].set(-9.0)  # ratio times advantage is more than the dtype holds
    loss, parts = jitted_ppo_loss(*data)
    gradients, _ = ppo_gradients(*data)
    assert all(jnp.isfinite(x).all() for x in (loss, *parts, *gradients))
    others = np.arange(N) != 3
    without, _ = ppo_gradients(*[x[others] for x in data])
    for given, wanted in zip(gradients, without, strict=True):
        shares = np.float64(wanted) * (N - 1) / N
        tolerance = 2 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.float64(given[others]), shares, rtol=tolerance)


def test_surrogates_whose_sum_overflows_have_their_mean():
    zero, one = jnp.zeros(4), jnp.ones(4)
    data = 80 * one, zero, -3e3 * one, zero, zero, zero
    np.testing.assert_allclose(jitted_ppo_loss(*data)[0], 3e3 * np.exp(80), rtol=1e-5)
    gradients, _ = ppo_gradients(*data)
    np.testing.assert_allclose(gradients[0], 3e3 * np.exp(80) / 4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_losses_of_half_precision_are_those_of_the_same_numbers_in_float32(dtype):
    data = arrays(samples((64,)), dtype)
    wide = arrays(data)
    jax.tree.map(np.testing.assert_array_equal, jitted_ppo_loss(*data), jitted_ppo_loss(*wide))
    halves = [jnp.asarray(x, dtype) for x in policy_and_values()]
    given, wanted = policy_value_loss(*halves), policy_value_loss(*arrays(halves))
    jax.tree.map(np.testing.assert_array_equal, given, wanted)


def test_parts_survive_tree_map():
    parts = PPOLossParts(*jnp.arange(6.0))
    doubled = jax.tree.map(lambda x: 2 * x, parts)
    assert isinstance(doubled, PPOLossParts)
    assert doubled.explained_variance == 10.0


# `ppo_loss`: bad input.


@pytest.mark.parametrize("function", [ppo_loss, value_loss, policy_value_loss])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_losses_of_no_sample_are_refused(function, shape):
    nothing = jnp.zeros(shape)
    logits = jnp.zeros((*shape, 2))
    data = {
        "ppo_loss": [nothing] * 6,
        "value_loss": [nothing] * 2,
        "policy_value_loss": [logits, logits, nothing, nothing],
    }[function.__name__]
    message = rf"{function.__name__}\(\): the batch has no sample; give at least one\."
    with pytest.raises(ValueError, match=message):
        function(*data)


@pytest.mark.parametrize("index", range(1, 6))
def test_argument_of_ppo_loss_with_an_axis_too_many_is_refused_by_name(index):
    data = arrays(samples())
    data[index] = data[index][:, None]
    message = rf"ppo_loss\(\): argument '{NAMES[index]}' should be Float\[Array, '\*batch'\]"
    with pytest.raises(TypeError, match=message + r", but is float32\[8,1\], where 'log_probs' is"):
        jitted_ppo_loss(*data)


def test_old_values_with_an_axis_too_many_are_refused_by_name():
    data = arrays(samples())
    with pytest.raises(TypeError, match=r"ppo_loss\(\): argument 'old_values' .* float32\[8,1\]"):
        jitted_ppo_loss(*data, data[4][:, None], value_clip_epsilon=0.2)


def test_integer_advantages_are_refused_by_name():
    data = arrays(samples())
    data[2] = jnp.ones(N, int)
    with pytest.raises(TypeError, match=r"'advantages' should be Float.* but is int32\[8\]"):
        ppo_loss(*data)


def test_numpy_log_probs_are_refused_by_name():
    with pytest.raises(TypeError, match=r"'log_probs' should be Float.* ndarray float64\[8\]"):
        ppo_loss(*samples())


def test_clip_epsilon_that_is_no_scalar_is_refused_by_name():
    with pytest.raises(TypeError, match=r"'clip_epsilon' should be ScalarLike, .* the str 'big'"):
        ppo_loss(*arrays(samples()), clip_epsilon="big")  # pyright: ignore[reportArgumentType]


def test_missing_value_targets_are_named():
    with pytest.raises(TypeError, match=r"missing .* 'value_targets'"):
        ppo_loss(*arrays(samples())[:5])


# `value_loss`.


def test_value_loss_is_half_the_mean_squared_error():
    values, targets = np.array([1.0, 0, 2]), np.array([1.2, -1, 0.5])
    given = jitted_value_loss(*arrays([values, targets]))
    np.testing.assert_allclose(given, ((values - targets) ** 2).mean() / 2, rtol=1e-6)
    np.testing.assert_allclose(given, 0.548333, rtol=1e-5)


def test_clipped_value_loss_takes_the_larger_error():
    data = arrays([[1, 0, 2], [1.2, -1, 0.5], [0.5, 0.1, 0]])
    np.testing.assert_allclose(jitted_value_loss(*data, clip_epsilon=0.2), 0.583333, rtol=1e-5)


def test_ppo_loss_passes_the_value_clip_on():
    zero = jnp.zeros(3)
    values, targets, old_values = arrays([[1, 0, 2], [1.2, -1, 0.5], [0.5, 0.1, 0]])
    loss, parts = jitted_ppo_loss(
        zero, zero, zero, zero, values, targets, old_values, value_clip_epsilon=0.2
    )
    np.testing.assert_allclose(parts.value, 0.583333, rtol=1e-5)
    np.testing.assert_allclose(loss, 0.583333 / 2, rtol=1e-5)


@pytest.mark.parametrize(("value", "learns"), [(0.199, True), (0.201, False), (-0.201, True)])
def test_value_gradient_stops_just_outside_the_clip_range_only(value, learns):
    # The old value is 0 and the target 5: moving up by more than 0.2 stops paying off.
    given = value_gradient(jnp.array([value]), jnp.array([5.0]), jnp.zeros(1), clip_epsilon=0.2)
    unclipped = value_gradient(jnp.array([value]), jnp.array([5.0]))
    np.testing.assert_allclose(given, unclipped if learns else [0.0], rtol=1e-6)


def test_value_gradient_is_the_error_over_the_number_of_samples():
    values, targets = arrays([[1, 0, 2], [1.2, -1, 0.5]])
    np.testing.assert_allclose(value_gradient(values, targets), (values - targets) / 3, rtol=1e-6)


def test_gradient_of_the_clipped_value_loss_is_that_of_its_equation():
    with jax.enable_x64(True):
        data = arrays([[1, 0, 2], [1.2, -1, 0.5], [0.5, 0.1, 0]], jnp.float64)
        clipped = functools.partial(jitted_value_loss, clip_epsilon=0.2)
        check_grads(clipped, data, order=1, modes=["rev"])


def test_vmap_of_value_loss_treats_each_batch_alone():
    values, targets = arrays(np.random.default_rng(0).normal(size=(2, 3, 5)))
    rows = jax.vmap(jitted_value_loss)(values, targets)
    wanted = ((np.asarray(values) - np.asarray(targets)) ** 2).mean(1) / 2
    np.testing.assert_allclose(rows, wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipped_value_loss_is_float32_whatever_the_dtype_of_epsilon(dtype):
    data = arrays([[1, 0, 2], [1.2, -1, 0.5], [0.5, 0.1, 0]])
    assert jitted_value_loss(*data, clip_epsilon=jnp.asarray(0.2, dtype)).dtype == jnp.float32


def test_value_head_of_one_column_is_refused_by_name():
    message = r"value_loss\(\): argument 'value_targets' .* but is float32\[8\], where 'values' is"
    with pytest.raises(TypeError, match=message + r" float32\[8,1\]"):
        value_loss(jnp.zeros((8, 1)), jnp.zeros(8))


def test_epsilon_without_old_values_is_refused_by_name():
    with pytest.raises(ValueError, match="old_values is missing"):
        value_loss(jnp.zeros(2), jnp.zeros(2), clip_epsilon=0.2)


def test_old_values_without_epsilon_are_refused_by_name():
    with pytest.raises(ValueError, match="clip_epsilon is missing"):
        value_loss(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2))


def test_ppo_loss_with_half_of_the_value_clip_is_refused():
    data = arrays(samples())
    with pytest.raises(ValueError, match="old_values is missing"):
        ppo_loss(*data, value_clip_epsilon=0.2)
    with pytest.raises(ValueError, match="epsilon is missing"):
        jitted_ppo_loss(*data, data[4])


# `explained_variance`.


def test_explained_variance_is_one_minus_a_ratio_of_variances():
    values, targets = np.random.default_rng(0).normal(size=(2, 50))
    wanted = 1 - (targets - values).var() / targets.var()
    np.testing.assert_allclose(
        jitted_explained_variance(*arrays([values, targets])), wanted, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([1.0, 2.0, 4.0], 1.0), ([7.0, 7.0, 7.0], 0.0), ([-1.0, -2.0, -4.0], -3.0)],
)
def test_explained_variance_of_a_perfect_a_constant_and_a_contrary_critic(values, wanted):
    given = jitted_explained_variance(jnp.array(values), jnp.array([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(given, wanted, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", [0.0, 0.1, 1e3])
def test_explained_variance_of_equal_targets_is_zero(target, dtype):
    given = jitted_explained_variance(jnp.arange(7, dtype=dtype), jnp.full(7, target, dtype))
    assert given.dtype == jnp.float32
    assert given == 0


@pytest.mark.parametrize("unit", [1e30, 1e-30])
def test_explained_variance_does_not_depend_on_the_unit(unit):
    values, targets = np.array([1.0, 3, 2, 2]), np.array([1.0, 2, 6, 3])
    given = jitted_explained_variance(*arrays([values * unit, targets * unit]))
    np.testing.assert_allclose(given, 1 - (targets - values).var() / targets.var(), rtol=1e-5)


@pytest.mark.parametrize(("value", "target"), [(1e30, 0.0), (-1e30, 1e30), (3e38, -3e38)])
def test_value_loss_that_overflows_is_finite_and_leaves_other_gradients(value, target):
    values, targets = jnp.array([value, 1.0, 0.0]), jnp.array([target, 0.5, 2.0])
    assert jnp.isfinite(jitted_value_loss(values, targets))
    assert jnp.isfinite(jitted_explained_variance(values, targets))
    gradient = value_gradient(values, targets)
    np.testing.assert_allclose(gradient, [0.0, 0.5 / 3, -2 / 3], rtol=1e-6)


@pytest.mark.parametrize("size", [0, 1])
def test_explained_variance_of_hardly_a_sample_is_zero(size):
    assert explained_variance(jnp.ones(size), jnp.zeros(size)) == 0


def test_gradient_of_explained_variance_of_equal_targets_is_finite():
    gradient = jax.grad(jitted_explained_variance)(jnp.arange(3.0), jnp.ones(3))
    assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_vmap_of_explained_variance_treats_each_batch_alone():
    values, targets = np.random.default_rng(0).normal(size=(2, 3, 5))
    rows = jax.vmap(jitted_explained_variance)(*arrays([values, targets]))
    wanted = 1 - (targets - values).var(-1) / targets.var(-1)
    np.testing.assert_allclose(rows, wanted, rtol=1e-4)


def test_explained_variance_refuses_a_value_head_of_one_column_by_name():
    with pytest.raises(
        TypeError, match=r"explained_variance\(\): argument 'value_targets' .*\[8\]"
    ):
        explained_variance(jnp.zeros((8, 1)), jnp.zeros(8))


def policy_and_values(shape=(N,), actions=5, seed=0):
    """Arguments of `policy_value_loss`: some actions are ruled out by the targets."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(*shape, actions))
    weights = random.random((*shape, actions)) * (random.random((*shape, actions)) < 0.7)
    weights[..., 0] += 0.1
    target_probs = weights / weights.sum(axis=-1, keepdims=True)
    values, value_targets = random.normal(size=(2, *shape))
    return [logits, target_probs, values, value_targets]


def as_float32(arguments):
    return [jnp.asarray(x, jnp.float32) for x in arguments]


@pytest.mark.parametrize("shape", [(), (N,), (3, 2)])
def test_policy_value_loss_is_that_of_its_equation(shape):
    logits, targets, values, value_targets = arguments = policy_and_values(shape)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    policy = -(targets * log_probs).sum(axis=-1).mean()
    value = ((values - value_targets) ** 2).mean() / 2
    entropy = -(np.exp(log_probs) * log_probs).sum(axis=-1).mean()
    loss, parts = policy_value_loss(*as_float32(arguments), value_weight=0.25, entropy_weight=0.1)
    np.testing.assert_allclose(loss, policy + 0.25 * value - 0.1 * entropy, rtol=1e-5)
    np.testing.assert_allclose(parts.policy, policy, rtol=1e-5)
    np.testing.assert_allclose(parts.entropy, entropy, rtol=1e-5)


def test_policy_loss_of_a_target_is_the_cross_entropy_of_optax():
    logits, targets, values, value_targets = as_float32(policy_and_values())
    _, parts = policy_value_loss(logits, targets, values, value_targets)
    wanted = optax.losses.softmax_cross_entropy(logits, targets).mean()
    np.testing.assert_allclose(parts.policy, wanted, rtol=1e-6)


def test_divergence_from_the_targets_is_zero_for_a_policy_that_equals_them():
    logits, _, values, value_targets = as_float32(policy_and_values())
    _, parts = policy_value_loss(logits, jax.nn.softmax(logits), values, value_targets)
    np.testing.assert_allclose(parts.kl, 0, atol=1e-6)


def test_gradient_of_the_policy_loss_is_policy_minus_target():
    logits, targets, values, value_targets = as_float32(policy_and_values())
    gradient = jax.jit(jax.grad(lambda x: policy_value_loss(x, targets, values, value_targets)[0]))
    np.testing.assert_allclose(gradient(logits), (jax.nn.softmax(logits) - targets) / N, atol=1e-6)


@pytest.mark.parametrize("masked", [-jnp.inf, jnp.finfo(jnp.float32).min])
def test_masked_actions_leave_the_policy_value_loss_and_its_gradient_finite(masked):
    logits, _, values, value_targets = as_float32(policy_and_values())
    logits = logits.at[:, 1].set(masked)
    targets = jax.nn.softmax(logits)
    loss, gradient = jax.value_and_grad(
        lambda x: policy_value_loss(x, targets, values, value_targets)[0]
    )(logits)
    assert jnp.isfinite(loss)
    assert gradient[:, 1].tolist() == [0.0] * N


@pytest.mark.parametrize("dtype", DTYPES)
def test_targets_that_want_what_is_illegal_give_a_finite_loss_and_gradient(dtype):
    legal = jnp.array([[True, True, False]] * 4)
    logits = mask_logits(jnp.array([[1, 2, 3]] * 4, dtype), legal)
    targets, zeros = jnp.full((4, 3), 0.25, dtype), jnp.zeros(4, dtype)

    @jax.jit
    def loss(logits):
        return policy_value_loss(logits, targets, zeros, zeros)

    (value, parts), gradient = jax.value_and_grad(loss, has_aux=True)(logits)
    assert all(jnp.isfinite(x).all() for x in (value, *parts, gradient))


def test_vmap_and_jit_of_policy_value_loss_change_nothing():
    arguments = as_float32(policy_and_values((3, 2)))
    mapped = jax.jit(jax.vmap(lambda *a: policy_value_loss(*a)[0]))(*arguments)
    alone = [policy_value_loss(*(x[i] for x in arguments))[0] for i in range(3)]
    np.testing.assert_allclose(mapped, jnp.stack(alone), rtol=1e-6)


def test_parts_of_policy_value_loss_survive_tree_map():
    _, parts = policy_value_loss(*as_float32(policy_and_values()))
    assert isinstance(jax.tree.map(lambda x: x, parts), PolicyValueLossParts)


def test_value_head_with_an_axis_too_many_is_refused_by_policy_value_loss():
    logits, targets, values, value_targets = as_float32(policy_and_values())
    with pytest.raises(
        TypeError, match=r"argument 'values' should be Float.*but is float32\[8,1\]"
    ):
        policy_value_loss(logits, targets, values[:, None], value_targets)


def test_targets_of_another_number_of_actions_are_refused_by_name():
    logits, targets, values, value_targets = as_float32(policy_and_values())
    with pytest.raises(TypeError, match="argument 'target_probs' should be"):
        policy_value_loss(logits, targets[:, :4], values, value_targets)
