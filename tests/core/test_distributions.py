"""Policies against the definitions of their quantities, in float64 NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from vernal.core import Categorical, FactorisedCategorical, SquashedNormal, mask_logits

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]
MASKED = np.array([1.0, 2.0, -np.inf])
LOGITS = np.random.default_rng(0).normal(size=(3, 4))
OTHER = np.random.default_rng(1).normal(size=(3, 4))
MEANS, STDS = np.array([[0.3, -1.0], [2.0, 0.0]]), np.array([[0.5, 1.0], [0.1, 2.0]])


def masked_row(dtype=jnp.float32):
    """The logits 1 and 2, and an illegal one."""
    return mask_logits(jnp.array([1, 2, 5], dtype), jnp.array([True, True, False]))


def normal(means: Any = MEANS, stds: Any = STDS, dtype: Any = jnp.float32) -> SquashedNormal:
    return SquashedNormal(jnp.asarray(means, dtype), jnp.asarray(stds, dtype))


def softmax(logits):
    weights = np.exp(logits)
    return weights / weights.sum(-1, keepdims=True)


def entropy_by_definition(logits):
    p = softmax(logits)
    return -(p * np.log(p)).sum(-1)


def kl_by_definition(logits, other):
    p, q = softmax(logits), softmax(other)
    return (p * np.log(p / q)).sum(-1)


def squashed_density(x, mean, std):
    """Density of a = tanh(u): that of u over the slope of tanh."""
    u = np.arctanh(x)
    return np.exp(-(((u - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi)) / (1 - x**2)


@jax.jit
def entropy(logits):
    return Categorical(logits).entropy()


@jax.jit
def kl(logits, other):
    return Categorical(logits).kl(Categorical(other))


@jax.jit
def log_prob(logits, actions):
    return Categorical(logits).log_prob(actions)


@jax.jit
def sample_many(logits, key):
    return jax.vmap(Categorical(logits).sample)(jax.random.split(key, 20_000))


@jax.jit
def squashed_log_prob(means, stds, actions):
    return SquashedNormal(means, stds).log_prob(actions)


@jax.jit
def squashed_entropy(means, stds):
    return SquashedNormal(means, stds).entropy()


@jax.jit
def squashed_kl(policy, other):
    return policy.kl(other)


@jax.jit
def squashed_samples(policy, key):
    return jax.vmap(policy.sample)(jax.random.split(key, 100_000))


# Methods of any policy, jitted: eager, each operation of each shape is compiled apart.
entropy_of = jax.jit(lambda policy: policy.entropy())
log_prob_of = jax.jit(lambda policy, actions: policy.log_prob(actions))
kl_of = jax.jit(lambda policy, other: policy.kl(other))
entropy_gradient = jax.jit(jax.grad(lambda logits: Categorical(logits).entropy().sum()))
kl_gradients = jax.jit(
    jax.grad(lambda a, b: Categorical(a).kl(Categorical(b)).sum(), argnums=(0, 1))
)
log_prob_gradient = jax.jit(jax.grad(lambda x, a: Categorical(x).log_prob(a).sum()))


# Categorical: right answers.


def test_log_prob_is_the_log_of_the_softmax():
    actions = np.array([2, 0, 3])
    wanted = np.log(softmax(LOGITS))[np.arange(3), actions]
    np.testing.assert_allclose(log_prob(jnp.array(LOGITS), jnp.array(actions)), wanted, rtol=1e-5)


def test_entropy_is_minus_the_sum_of_p_log_p():
    np.testing.assert_allclose(entropy(jnp.array(LOGITS)), entropy_by_definition(LOGITS), rtol=1e-5)


def test_kl_is_the_sum_of_p_log_p_over_q():
    given = kl(jnp.array(LOGITS), jnp.array(OTHER))
    np.testing.assert_allclose(given, kl_by_definition(LOGITS, OTHER), rtol=1e-5)


def test_kl_runs_from_self_to_other():
    given = Categorical(jnp.log(jnp.array([0.9, 0.1]))).kl(Categorical(jnp.zeros(2)))
    np.testing.assert_allclose(given, 0.9 * np.log(1.8) + 0.1 * np.log(0.2), rtol=1e-5)


def test_kl_to_itself_is_zero():
    np.testing.assert_allclose(kl(jnp.array(LOGITS), jnp.array(LOGITS)), 0.0, atol=1e-7)


def test_entropy_of_equal_logits_is_the_log_of_their_number():
    np.testing.assert_allclose(entropy(jnp.full((2, 5), 3.0)), np.log(5), rtol=1e-6)


def test_adding_a_number_to_all_logits_changes_nothing():
    actions = jnp.array([2, 0, 3])
    shifted = jnp.array(LOGITS, jnp.float32) + 64.0
    given = log_prob(shifted, actions)
    np.testing.assert_allclose(given, log_prob(jnp.array(LOGITS), actions), atol=1e-4)


def test_mode_is_the_most_probable_action():
    assert Categorical(jnp.array(LOGITS)).mode().tolist() == LOGITS.argmax(-1).tolist()


def test_mode_of_equals_is_the_first():
    assert Categorical(jnp.array([0.0, 1.0, 1.0])).mode() == 1


def test_samples_have_the_probabilities_of_the_softmax():
    samples = sample_many(jnp.array(LOGITS), jax.random.key(0))
    shares = (np.asarray(samples)[..., None] == np.arange(4)).mean(0)
    np.testing.assert_allclose(shares, softmax(LOGITS), atol=0.015)


def test_rows_are_sampled_independently():
    samples = np.asarray(sample_many(jnp.zeros((2, 2)), jax.random.key(0)))
    assert abs((samples[:, 0] == samples[:, 1]).mean() - 0.5) < 0.015


def test_same_key_gives_the_same_sample():
    policy, key = Categorical(jnp.array(LOGITS)), jax.random.key(3)
    assert policy.sample(key).tolist() == policy.sample(key).tolist()


def test_old_style_key_samples_like_the_new_one_of_its_seed():
    policy = Categorical(jnp.array(LOGITS))
    given = policy.sample(jax.random.PRNGKey(3))
    assert given.tolist() == policy.sample(jax.random.key(3)).tolist()


# Categorical: illegal actions.


@pytest.mark.parametrize("logits", [masked_row(), jnp.array(MASKED)], ids=["masked", "-inf"])
def test_masked_row_has_the_known_log_prob_entropy_and_kl(logits):
    np.testing.assert_allclose(log_prob(logits, jnp.array(0)), -1.3132616, rtol=1e-6)
    np.testing.assert_allclose(entropy(logits), 0.58220303, rtol=1e-6)
    np.testing.assert_allclose(kl(logits, jnp.zeros(3)), 0.5164093, rtol=1e-6)


@pytest.mark.parametrize("logits", [masked_row(), jnp.array(MASKED)], ids=["masked", "-inf"])
def test_masked_row_has_the_known_gradient_of_the_entropy(logits):
    given = entropy_gradient(logits)
    np.testing.assert_allclose(given, [0.19661193, -0.19661193, 0.0], rtol=1e-5)
    assert given[2] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("action", [0, 1, 2])
def test_gradient_of_log_prob_is_finite_for_illegal_actions_too(action, dtype):
    gradient = log_prob_gradient(masked_row(dtype), jnp.array(action))
    assert gradient.dtype == dtype
    assert jnp.isfinite(gradient).all()


def test_gradient_of_log_prob_is_indicator_minus_probability():
    gradient = log_prob_gradient(masked_row(), jnp.array(0))
    np.testing.assert_allclose(gradient, [1 - 0.26894143, -0.7310586, 0.0], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kl_of_masked_rows_has_finite_gradients(dtype):
    rows = masked_row(dtype), mask_logits(jnp.zeros(3, dtype), jnp.array([True, True, False]))
    for gradient in kl_gradients(*rows):
        assert gradient.dtype == dtype
        assert jnp.isfinite(gradient).all()
        assert gradient[2] == 0


def test_kl_to_a_policy_that_forbids_what_is_possible_is_huge_but_finite():
    given = kl(jnp.zeros(3), jnp.array(MASKED))
    assert jnp.isfinite(given)
    assert given > 1e30


def test_log_prob_of_an_illegal_action_is_hugely_negative_but_finite():
    given = log_prob(jnp.array(MASKED), jnp.array(2))
    assert jnp.isfinite(given)
    assert jnp.exp(given) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_illegal_actions_are_never_sampled(dtype):
    logits = mask_logits(jnp.array([0, -8, 8], dtype), jnp.array([True, True, False]))
    assert set(np.unique(sample_many(logits, jax.random.key(0)))) == {0, 1}


def test_minus_infinite_logits_are_never_sampled():
    assert set(np.unique(sample_many(jnp.array(MASKED), jax.random.key(0)))) == {0, 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_with_nothing_legal_is_uniform_and_finite(dtype):
    logits = mask_logits(jnp.array([1, 2, 5], dtype), jnp.zeros(3, bool))
    np.testing.assert_allclose(entropy(logits), np.log(3), rtol=1e-6)
    np.testing.assert_allclose(log_prob(logits, jnp.array(1)), -np.log(3), rtol=1e-6)
    assert entropy_gradient(logits).tolist() == [0.0, 0.0, 0.0]


def test_row_of_minus_infinities_is_uniform_and_finite():
    logits = jnp.full(3, -jnp.inf)
    np.testing.assert_allclose(entropy(logits), np.log(3), rtol=1e-6)
    assert entropy_gradient(logits).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_legal_action_is_certain(dtype):
    logits = mask_logits(jnp.array([1, 2, 5], dtype), jnp.array([False, True, False]))
    assert (entropy(logits), log_prob(logits, jnp.array(1))) == (0.0, 0.0)
    assert set(np.unique(sample_many(logits, jax.random.key(0)))) == {1}
    assert entropy_gradient(logits).tolist() == [0.0, 0.0, 0.0]


def test_one_action_in_all_is_certain():
    policy = Categorical(jnp.array([[7.0]]))
    assert (policy.entropy().item(), policy.sample(jax.random.key(0)).item()) == (0.0, 0)


@pytest.mark.parametrize("scale", [1e4, 1e30, 1e38])
def test_extreme_logits_give_finite_values_and_gradients(scale):
    logits = jnp.array(LOGITS * scale, jnp.float32)
    other = jnp.array(OTHER * scale, jnp.float32)
    values = entropy(logits), kl(logits, other), log_prob(logits, jnp.array([0, 1, 2]))
    gradients = (
        entropy_gradient(logits),
        *kl_gradients(logits, other),
        log_prob_gradient(logits, jnp.array([0, 1, 2])),
    )
    assert all(jnp.isfinite(x).all() for x in (*values, *gradients))


# Categorical: transformations and dtypes.


def test_jit_of_a_categorical_changes_nothing():
    eager = Categorical(jnp.array(LOGITS))
    np.testing.assert_allclose(entropy(eager.logits), eager.entropy(), rtol=1e-6)


def test_vmap_of_a_categorical_equals_the_batched_call():
    policy, actions = Categorical(jnp.array(LOGITS)), jnp.array([0, 1, 2])
    np.testing.assert_array_equal(
        jax.vmap(log_prob_of)(policy, actions), log_prob_of(policy, actions)
    )


def test_tree_map_of_a_categorical_gives_one():
    first = jax.tree.map(lambda x: x[0], Categorical(jnp.array(LOGITS)))
    assert isinstance(first, Categorical)
    assert first.entropy().shape == ()


def test_gradients_of_entropy_and_kl_are_those_of_their_equations():
    with jax.enable_x64(True):
        check_grads(entropy, (jnp.array(LOGITS),), order=1, modes=["rev"])
        check_grads(kl, (jnp.array(LOGITS), jnp.array(OTHER)), order=1, modes=["rev"])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_logits_give_float32_quantities(dtype):
    logits = jnp.array(LOGITS, dtype)
    wide = logits.astype(jnp.float32)
    assert entropy(logits).dtype == jnp.float32
    np.testing.assert_array_equal(entropy(logits), entropy(wide))
    np.testing.assert_array_equal(kl(logits, wide), kl(wide, wide))


def test_float64_is_exact_where_it_is_switched_on():
    with jax.enable_x64(True):
        np.testing.assert_allclose(
            entropy(jnp.array(LOGITS)), entropy_by_definition(LOGITS), rtol=1e-12
        )


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32])
def test_actions_of_any_integer_dtype_are_taken(dtype):
    actions = jnp.array([2, 0, 3], dtype)
    np.testing.assert_array_equal(
        log_prob(jnp.array(LOGITS), actions), log_prob(jnp.array(LOGITS), jnp.array([2, 0, 3]))
    )


# Categorical: bad input.


@pytest.mark.parametrize("action", [-1, -4, 4, 99])
def test_log_prob_of_an_action_that_does_not_exist_is_nan_and_leaves_other_rows(action):
    logits, good = jnp.array(LOGITS, jnp.float32), jnp.array([2, 0, 3])
    bad = good.at[1].set(action)
    given, wanted = log_prob(logits, bad), log_prob(logits, good)
    assert np.isnan(given).tolist() == [False, True, False]
    np.testing.assert_array_equal(given[::2], wanted[::2])
    gradient = log_prob_gradient(logits, bad)
    np.testing.assert_array_equal(gradient[::2], log_prob_gradient(logits, good)[::2])


def test_a_padding_mark_of_a_small_dtype_is_nan_for_many_actions_too():
    assert jnp.isnan(Categorical(jnp.zeros(200)).log_prob(jnp.array(-1, jnp.int8)))


def test_padded_rows_may_be_left_out_of_a_loss():
    actions = jnp.array([2, -1, 3])

    @jax.jit
    def loss(logits):
        return jnp.sum(jnp.where(actions >= 0, Categorical(logits).log_prob(actions), 0))

    value, gradient = jax.value_and_grad(loss)(jnp.array(LOGITS, jnp.float32))
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()
    assert gradient[1].tolist() == [0.0] * 4


def test_actions_of_another_shape_are_refused_by_name():
    message = r"Categorical\.log_prob\(\): argument 'actions' should be Integer\[Array, '\*batch'\]"
    with pytest.raises(TypeError, match=message + r", but is int32\[3,1\]"):
        log_prob(jnp.array(LOGITS), jnp.zeros((3, 1), int))


def test_float_actions_are_refused_by_name():
    with pytest.raises(TypeError, match=r"'actions' should be Integer.* but is float32\[3\]"):
        log_prob(jnp.array(LOGITS), jnp.zeros(3))


def test_integer_logits_are_refused_by_the_name_of_the_field():
    with pytest.raises(TypeError, match=r"field 'logits', should be Float.* but is int32\[2,3\]"):
        Categorical(jnp.zeros((2, 3), int)).entropy()


def test_logits_without_an_axis_are_refused_by_the_name_of_the_field():
    with pytest.raises(TypeError, match=r"field 'logits', should be .*\*batch A.* float32\[\]"):
        Categorical(jnp.zeros(())).mode()


def test_other_number_of_actions_is_refused_by_the_name_of_the_field():
    message = r"Categorical\.kl\(\): argument 'other', field 'logits', .* float32\[3,5\]"
    with pytest.raises(TypeError, match=message):
        Categorical(jnp.zeros((3, 4))).kl(Categorical(jnp.zeros((3, 5))))


def test_other_policy_of_another_kind_is_refused_by_name():
    with pytest.raises(TypeError, match=r"argument 'other' should be Categorical"):
        Categorical(jnp.zeros(2)).kl(normal())  # pyright: ignore[reportArgumentType]


def test_number_in_place_of_a_key_is_refused_by_name():
    with pytest.raises(TypeError, match=r"'key' should be PRNGKeyArray, but is the int 0"):
        Categorical(jnp.zeros(2)).sample(0)  # pyright: ignore[reportArgumentType]


# FactorisedCategorical: heads add.


def test_factorised_quantities_are_sums_over_heads():
    logits = np.random.default_rng(2).normal(size=(3, 2, 4))
    other = np.random.default_rng(3).normal(size=(3, 2, 4))
    actions = np.random.default_rng(4).integers(0, 4, (3, 2))
    policy = FactorisedCategorical(jnp.array(logits))
    log_probs = np.take_along_axis(np.log(softmax(logits)), actions[..., None], -1)[..., 0]
    np.testing.assert_allclose(
        log_prob_of(policy, jnp.array(actions)), log_probs.sum(-1), rtol=1e-5
    )
    np.testing.assert_allclose(entropy_of(policy), entropy_by_definition(logits).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(
        kl_of(policy, FactorisedCategorical(jnp.array(other))),
        kl_by_definition(logits, other).sum(-1),
        rtol=1e-5,
    )


def test_factorised_probabilities_of_all_joint_actions_sum_to_one():
    policy = FactorisedCategorical(jnp.array(LOGITS[:2, :3]))
    joint = jnp.array([[a, b] for a in range(3) for b in range(3)])
    total = jnp.exp(jax.vmap(functools.partial(log_prob_of, policy))(joint)).sum()
    np.testing.assert_allclose(total, 1.0, rtol=1e-6)


def test_factorised_mode_is_that_of_each_head():
    policy = FactorisedCategorical(jnp.array(LOGITS))
    assert policy.mode().tolist() == LOGITS.argmax(-1).tolist()


def test_factorised_heads_are_sampled_independently_and_legally():
    legal = jnp.array([[True, True, False], [True, True, False]])
    policy = FactorisedCategorical(mask_logits(jnp.zeros((2, 3)), legal))
    keys = jax.random.split(jax.random.key(0), 20_000)
    samples = np.asarray(jax.jit(jax.vmap(policy.sample))(keys))
    shares = [((samples == [a, b]).all(-1)).mean() for a in range(2) for b in range(2)]
    np.testing.assert_allclose(shares, 0.25, atol=0.015)


def test_padded_head_counts_as_the_head_without_its_padding():
    legal = jnp.array([[True, True, True], [True, True, False]])
    policy = FactorisedCategorical(mask_logits(jnp.zeros((2, 3)), legal))
    np.testing.assert_allclose(entropy_of(policy), np.log(3) + np.log(2), rtol=1e-6)


def test_vmap_of_a_factorised_categorical_equals_the_batched_call():
    policy = FactorisedCategorical(jnp.array(np.random.default_rng(2).normal(size=(3, 2, 4))))
    np.testing.assert_allclose(jax.vmap(entropy_of)(policy), entropy_of(policy), rtol=1e-6)


def test_gradient_of_factorised_entropy_is_finite_where_a_head_has_nothing_legal():
    legal = jnp.array([[True, True, True], [False, False, False]])

    def total(logits):
        return FactorisedCategorical(mask_logits(logits, legal)).entropy()

    gradient = jax.jit(jax.grad(total))(jnp.array(LOGITS[:2, :3]))
    assert jnp.isfinite(gradient).all()
    assert gradient[1].tolist() == [0.0, 0.0, 0.0]


def test_factorised_actions_without_heads_are_refused_by_name():
    message = r"FactorisedCategorical\.log_prob\(\): argument 'actions' .*'\*batch H'.* int32\[2\]"
    with pytest.raises(TypeError, match=message):
        FactorisedCategorical(jnp.zeros((2, 3, 4))).log_prob(jnp.zeros(2, int))


@pytest.mark.parametrize("action", [-1, 4])
def test_log_prob_of_a_joint_action_that_does_not_exist_is_nan(action):
    policy = FactorisedCategorical(jnp.array(LOGITS)[:, None].repeat(2, axis=1))
    actions = jnp.array([[0, 1], [2, action], [3, 3]])
    assert np.isnan(log_prob_of(policy, actions)).tolist() == [False, True, False]


def test_log_prob_of_several_illegal_actions_and_divergence_are_huge_but_finite():
    policy = FactorisedCategorical(jnp.stack([masked_row()] * 3))
    free = FactorisedCategorical(jnp.zeros((3, 3)))
    assert jnp.isfinite(log_prob_of(policy, jnp.array([2, 2, 2])))
    assert jnp.isfinite(kl_of(free, policy))


def test_factorised_logits_without_heads_are_refused_by_the_name_of_the_field():
    with pytest.raises(TypeError, match=r"field 'logits', .*'\*batch H A'.* float32\[4\]"):
        FactorisedCategorical(jnp.zeros(4)).entropy()


# SquashedNormal.


def test_squashed_log_prob_is_the_density_of_a_tanh():
    actions = np.array([[0.1, -0.9], [0.95, 0.5]])
    wanted = np.log(squashed_density(actions, MEANS, STDS)).sum(-1)
    given = squashed_log_prob(*map(jnp.array, (MEANS, STDS, actions)))
    np.testing.assert_allclose(given, wanted, rtol=1e-4)


def test_squashed_density_integrates_to_one():
    grid = (np.arange(20_000) + 0.5) / 10_000 - 1
    row = jnp.array(grid[:, None])
    same = jnp.ones_like(row)
    density = jnp.exp(squashed_log_prob(0.3 * same, 0.7 * same, row))
    np.testing.assert_allclose(density.sum() / 10_000, 1.0, atol=1e-4)


@pytest.mark.parametrize("std", [0.05, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0])
def test_squashed_entropy_is_the_integral_of_minus_log_density(mean, std):
    # Over u = arctanh(a): entropy of the normal plus the mean log slope of tanh.
    u = np.linspace(mean - 12 * std, mean + 12 * std, 100_001)
    weights = np.exp(-(((u - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi))
    slope = 2 * (np.log(2) - np.logaddexp(u, -u))
    wanted = np.log(std * np.sqrt(2 * np.pi * np.e)) + np.sum(weights * slope) * (u[1] - u[0])
    given = squashed_entropy(jnp.array([mean]), jnp.array([std]))
    np.testing.assert_allclose(given, wanted, atol=1e-3)


def test_squashed_kl_is_that_of_the_normals_within():
    other_means, other_stds = MEANS[::-1], STDS[::-1]
    ratio, distance = STDS / other_stds, (MEANS - other_means) / other_stds
    wanted = ((ratio**2 + distance**2 - 1) / 2 - np.log(ratio)).sum(-1)
    given = squashed_kl(normal(), normal(other_means, other_stds))
    np.testing.assert_allclose(given, wanted, rtol=1e-5)


def test_squashed_kl_is_the_mean_log_ratio_of_samples():
    policy, other = normal([[0.2]], [[0.5]]), normal([[-0.3]], [[0.8]])
    samples = squashed_samples(policy, jax.random.key(0))
    given = jnp.mean(policy_log_ratio(policy, other, samples))
    np.testing.assert_allclose(given, kl_of(policy, other)[0], atol=0.01)


@jax.jit
def policy_log_ratio(policy, other, samples):
    return jax.vmap(policy.log_prob)(samples) - jax.vmap(other.log_prob)(samples)


def test_squashed_samples_have_the_mean_and_spread_asked_for():
    unsquashed = np.arctanh(
        squashed_samples(normal([[0.3, -1.0]], [[0.5, 1.0]]), jax.random.key(0))
    )
    np.testing.assert_allclose(unsquashed.mean(0), [[0.3, -1.0]], atol=0.02)
    np.testing.assert_allclose(unsquashed.std(0), [[0.5, 1.0]], atol=0.02)


def test_squashed_mode_is_the_tanh_of_the_mean():
    np.testing.assert_allclose(normal().mode(), np.tanh(MEANS), rtol=1e-6)


def test_squashed_sample_passes_gradients_to_mean_and_deviation():
    key = jax.random.key(0)
    policy = normal([[0.3]], [[0.5]])
    gradient = jax.jit(jax.grad(lambda x: x.sample(key).sum()))(policy)
    slope = 1 - policy.sample(key) ** 2
    noise = (jnp.arctanh(policy.sample(key)) - 0.3) / 0.5
    np.testing.assert_allclose(gradient.means, slope, rtol=1e-5)
    np.testing.assert_allclose(gradient.stds, slope * noise, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squashed_log_prob_at_the_bounds_is_finite_with_its_gradient(dtype):
    policy = normal([[0.0, 0.0]], [[1.0, 1.0]], dtype)
    actions = jnp.array([[1, -1]], dtype)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: x.log_prob(actions).sum()))(policy)
    assert value.dtype == jnp.float32
    assert gradient.means.dtype == dtype
    assert all(jnp.isfinite(x).all() for x in (value, *gradient))


@pytest.mark.parametrize("action", [-1.01, 3.0])
def test_squashed_log_prob_beyond_the_bounds_is_nan(action):
    actions = jnp.array([[0.5, 0.5], [0.5, action]])
    assert np.isnan(log_prob_of(normal(), actions)).tolist() == [False, True]


def test_squashed_log_prob_of_far_means_is_finite():
    policy = normal([[50.0]], [[1.0]])
    assert jnp.isfinite(log_prob_of(policy, policy.sample(jax.random.key(0)))).all()
    assert jnp.isfinite(entropy_of(policy)).all()


def test_squashed_gradients_are_those_of_their_equations():
    with jax.enable_x64(True):
        means, stds = jnp.array(MEANS), jnp.array(STDS)
        actions = jnp.array([[0.1, -0.9], [0.95, 0.5]])
        check_grads(squashed_log_prob, (means, stds, actions), order=1, modes=["rev"], eps=1e-6)
        check_grads(squashed_entropy, (means, stds), order=1, modes=["rev"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_squashed_actions_keep_the_dtype(dtype):
    policy = normal(dtype=dtype)
    assert policy.sample(jax.random.key(0)).dtype == dtype
    assert policy.mode().dtype == dtype


def test_vmap_of_a_squashed_normal_equals_the_batched_call():
    policy, actions = normal(), jnp.array([[0.1, -0.9], [0.95, 0.5]])
    mapped = jax.vmap(log_prob_of)(policy, actions)
    np.testing.assert_allclose(mapped, log_prob_of(policy, actions), rtol=1e-6)


def test_squashed_normal_accepts_an_old_style_key():
    given = normal().sample(jax.random.PRNGKey(1))
    np.testing.assert_array_equal(given, normal().sample(jax.random.key(1)))


def test_deviations_of_another_shape_are_refused_by_the_name_of_the_field():
    message = r"field 'stds', should be .*'\*batch D'.* but is float32\[2\]"
    with pytest.raises(TypeError, match=message):
        SquashedNormal(jnp.zeros((3, 2)), jnp.ones(2)).entropy()


def test_squashed_actions_of_another_shape_are_refused_by_name():
    with pytest.raises(
        TypeError, match=r"SquashedNormal\.log_prob\(\): argument 'actions' .*\[2\]"
    ):
        log_prob_of(normal(), jnp.zeros(2))
