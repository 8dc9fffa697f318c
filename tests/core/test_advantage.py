"""Advantages and returns against their equations, written as sums in float64 NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from vernal.core import (
    VTrace,
    discounted_returns,
    gae,
    lambda_returns,
    n_step_returns,
    normalise,
    vtrace,
)

T, B = 7, 3
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]
EAGER: dict[str, Any] = {
    "gae": functools.partial(gae, lambda_=0.8),
    "vtrace": functools.partial(
        vtrace, lambda_=0.9, rho_clip=1.1, c_clip=0.8, advantage_rho_clip=1.5
    ),
    "lambda_returns": functools.partial(lambda_returns, lambda_=0.7),
    "discounted_returns": discounted_returns,
    "n_step_returns": functools.partial(n_step_returns, n=3),
}
JITTED: dict[str, Any] = {name: jax.jit(function) for name, function in EAGER.items()}
RETURNS = {name: JITTED[name] for name in list(EAGER)[2:]}
SAMPLE_GAE, SAMPLE_VTRACE = JITTED["gae"], JITTED["vtrace"]

# Everything is jitted here but where a test says otherwise: eager, each operation of each
# shape is compiled apart.
jitted_gae, jitted_vtrace, jitted_lambda_returns = map(jax.jit, (gae, vtrace, lambda_returns))
jitted_n_step_returns = jax.jit(n_step_returns, static_argnames="n")
jitted_normalise: Any = jax.jit(normalise)
cubed_gradient = jax.jit(jax.grad(lambda x, where=None: (normalise(x, where) ** 3).sum()))


def rollout(shape=(T, B), seed=0):
    """Rewards, discounts with terminal states, values, next values, resets, log ratios.

    Episodes end by termination (discount 0) and by truncation (discount above 0), and
    next values are drawn apart from values, as at a time limit.
    """
    random = np.random.default_rng(seed)
    rewards, values, next_values, log_ratios = random.normal(size=(4, *shape))
    terminal = random.random(shape) < 0.2
    resets = terminal | (random.random(shape) < 0.2)
    discounts = np.where(terminal, 0, random.uniform(0.8, 1, shape))
    return rewards, discounts, values, next_values, resets, 0.5 * log_ratios


def arrays(*values, dtype=jnp.float32):
    """The same in JAX; what is no mask gets the dtype."""
    return [jnp.asarray(x, None if x.dtype == bool else dtype) for x in map(np.asarray, values)]


def returns_of(data):
    """What returns take of a rollout: all but the values and log ratios."""
    rewards, discounts, _, next_values, resets, _ = data
    return rewards, discounts, next_values, resets


def ends_of_segments(resets):
    """For each step the last step of its segment: its first reset, or the rollout's end."""
    ends = np.full(resets.shape, len(resets) - 1)
    for index in np.ndindex(resets.shape):
        after = np.flatnonzero(resets[(slice(index[0], None), *index[1:])])
        if after.size:
            ends[index] = index[0] + after[0]
    return ends


def discounted_sum(terms, decays, resets):
    """sum over k of (product of decays[t .. k - 1]) * terms[k], to the end of the segment."""
    ends, sums = ends_of_segments(resets), np.zeros_like(terms)
    for index in np.ndindex(terms.shape):
        t, column = index[0], index[1:]
        for k in range(t, ends[index] + 1):
            sums[index] += np.prod(decays[(slice(t, k), *column)]) * terms[(k, *column)]
    return sums


def gae_by_definition(rewards, discounts, values, next_values, resets, lambda_):
    deltas = rewards + discounts * next_values - values
    return discounted_sum(deltas, discounts * lambda_, resets)


def bootstrapped(rewards, discounts, next_values, resets, n):
    """`n` rewards, or fewer where the segment ends before, and the value of where that led."""
    ends, sums = ends_of_segments(resets), np.zeros_like(rewards)
    for index in np.ndindex(rewards.shape):
        t, column = index[0], index[1:]
        last = min(t + n - 1, ends[index])
        for k in range(t, last + 1):
            sums[index] += np.prod(discounts[(slice(t, k), *column)]) * rewards[(k, *column)]
        decay = np.prod(discounts[(slice(t, last + 1), *column)])
        sums[index] += decay * next_values[(last, *column)]
    return sums


def lambda_returns_by_definition(rewards, discounts, next_values, resets, lambda_):
    """Weighted mean of the n-step returns: (1 - l) l^(n-1), the rest on the longest."""
    steps_left = (
        ends_of_segments(resets)
        - np.arange(len(rewards)).reshape(-1, *[1] * (rewards.ndim - 1))
        + 1
    )
    total = np.zeros_like(rewards)
    for n in range(1, len(rewards) + 1):
        weight = np.where(n < steps_left, (1 - lambda_) * lambda_ ** (n - 1), 0)
        weight = np.where(n == steps_left, lambda_ ** (n - 1), weight)
        total += weight * bootstrapped(rewards, discounts, next_values, resets, n)
    return total


def vtrace_by_definition(data, *, lambda_, rho_clip, c_clip, advantage_rho_clip):
    rewards, discounts, values, next_values, resets, log_ratios = data
    ratios = np.exp(log_ratios)
    deltas = np.minimum(rho_clip, ratios) * (rewards + discounts * next_values - values)
    errors = discounted_sum(deltas, discounts * lambda_ * np.minimum(c_clip, ratios), resets)
    targets = values + errors
    bootstraps = next_values.copy()
    for index in np.ndindex(rewards.shape):
        later = (index[0] + 1, *index[1:])
        if index[0] + 1 < len(rewards) and not resets[index]:
            # next_values is values of the next row, there: what differs is the critic's error.
            bootstraps[index] += lambda_ * (targets[later] - values[later])
    advantages = np.minimum(advantage_rho_clip, ratios) * (
        rewards + discounts * bootstraps - values
    )
    return targets, advantages


# Right answers.


@pytest.mark.parametrize("shape", [(T,), (T, B), (5, 2, 2), (1,), (1, 4)])
@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_gae_is_the_discounted_sum_of_temporal_differences(shape, lambda_):
    data = rollout(shape)[:5]
    given = jitted_gae(*arrays(*data), lambda_=lambda_)
    np.testing.assert_allclose(given, gae_by_definition(*data, lambda_), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(T,), (T, B), (1, 4)])
@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_lambda_return_is_the_weighted_mean_of_n_step_returns(shape, lambda_):
    data = returns_of(rollout(shape, seed=1))
    wanted = lambda_returns_by_definition(*data, lambda_)
    given = jitted_lambda_returns(*arrays(*data), lambda_=lambda_)
    np.testing.assert_allclose(given, wanted, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(T,), (T, B), (1, 4)])
def test_discounted_return_is_the_sum_to_the_end_of_the_segment(shape):
    data = returns_of(rollout(shape, seed=2))
    given = RETURNS["discounted_returns"](*arrays(*data))
    np.testing.assert_allclose(given, bootstrapped(*data, n=T), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(T,), (T, B), (1, 4)])
@pytest.mark.parametrize("n", [1, 2, 3, T, 100])
def test_n_step_return_is_a_sum_of_n_rewards_and_a_value(shape, n):
    data = returns_of(rollout(shape, seed=3))
    given = jitted_n_step_returns(*arrays(*data), n=n)
    np.testing.assert_allclose(given, bootstrapped(*data, n), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    "clips",
    [
        {"lambda_": 1.0, "rho_clip": 1.0, "c_clip": 1.0, "advantage_rho_clip": 1.0},
        {"lambda_": 0.9, "rho_clip": 1.1, "c_clip": 0.8, "advantage_rho_clip": 1.5},
        {"lambda_": 0.0, "rho_clip": 10.0, "c_clip": 10.0, "advantage_rho_clip": 10.0},
    ],
)
@pytest.mark.parametrize("shape", [(T,), (T, B), (1, 4)])
def test_vtrace_is_the_sum_of_clipped_temporal_differences(shape, clips):
    data = rollout(shape, seed=4)
    targets, advantages = vtrace_by_definition(data, **clips)
    given = jitted_vtrace(*arrays(*data), **clips)
    np.testing.assert_allclose(given.targets, targets, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(given.advantages, advantages, rtol=2e-5, atol=1e-5)


def test_vtrace_clips_by_one_unless_told_otherwise():
    data = arrays(*rollout())
    given = jitted_vtrace(*data)
    wanted = jitted_vtrace(*data, lambda_=1.0, rho_clip=1.0, c_clip=1.0, advantage_rho_clip=1.0)
    np.testing.assert_array_equal(given.targets, wanted.targets)
    np.testing.assert_array_equal(given.advantages, wanted.advantages)


def test_vtrace_on_policy_gives_lambda_returns():
    rewards, discounts, values, next_values, resets, _ = rollout()
    next_values[:-1] = np.where(resets[:-1], next_values[:-1], values[1:])
    data = arrays(rewards, discounts, values, next_values, resets, np.zeros((T, B)))
    targets = jitted_lambda_returns(*returns_of(data), lambda_=0.7)
    given = jitted_vtrace(*data, lambda_=0.7)
    np.testing.assert_allclose(given.targets, targets, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(given.advantages, targets - data[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lambda_", "wanted"),
    [
        (1.0, [[-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3, 2, 1, 0, -4.9]]),
        (0.7, [[-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1, 0, -4.9]]),
        (0.4, [[0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1, 0, -4.9]]),
    ],
)
def test_gae_gives_the_published_numbers_of_rlax(lambda_, wanted):
    rewards = np.array([[0, 0, 1, 0, -0.5], [0, 0, 0, 0, 1]]).T
    values = np.array([[1, 4, -3, -2, -1, -1], [-3, -2, -1, 0, 5, -1]]).T
    discounts = np.array([[0.99] * 5, [0.9, 0.9, 0.9, 0, 0.9]]).T
    data = arrays(rewards, discounts, values[:-1], values[1:], discounts == 0)
    np.testing.assert_allclose(jitted_gae(*data, lambda_=lambda_), np.array(wanted).T, atol=1e-3)


def test_gae_at_a_time_limit_bootstraps_from_the_last_state_seen():
    rewards, discounts = np.array([1, 0, -1, 2, 0.5]), np.full(5, 0.9)
    values, next_values = np.array([0.5, -0.2, 0.3, 1, 0.8]), np.array([-0.2, 0.3, 0.9, 0.8, 0.4])
    cut = np.array([False, False, True, False, False])
    given = jitted_gae(*arrays(rewards, discounts, values, next_values, cut), lambda_=0.8)
    np.testing.assert_allclose(given, [0.404384, 0.1172, -0.49, 1.7632, 0.06], rtol=1e-5)


def test_gae_at_a_terminal_state_does_not_bootstrap():
    rewards, discounts = np.array([1, 0, -1, 2, 0.5]), np.array([0.9, 0.9, 0, 0.9, 0.9])
    values, next_values = np.array([0.5, -0.2, 0.3, 1, 0.8]), np.array([-0.2, 0.3, 0.9, 0.8, 0.4])
    given = jitted_gae(
        *arrays(rewards, discounts, values, next_values, discounts == 0), lambda_=0.8
    )
    np.testing.assert_allclose(given, [-0.01552, -0.466, -1.3, 1.7632, 0.06], rtol=1e-5)


PUBLISHED_RETURNS = {
    "rewards": [[1, 0, -1, 0, 1], [0.5, 0.8, -0.7, 0, 2.1]],
    "discounts": [[0.5, 0.9, 1, 0.5, 0.8], [0.9, 0.5, 0.3, 0.8, 0.7]],
    "next_values": [[3, 1, 5, -5, 3], [-1.7, 1.2, 2.3, 2.2, 2.7]],
    "resets": [[False] * 5] * 2,
}


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (
            functools.partial(jitted_lambda_returns, lambda_=0.75),
            [
                [1.6460547, 0.72281253, 0.7375001, 0.6500001, 3.4],
                [0.7866317, 0.9913063, 0.1101501, 2.834, 3.99],
            ],
        ),
        (
            RETURNS["discounted_returns"],
            [[1.315, 0.63, 0.7, 1.7, 3.4], [1.33592, 0.9288, 0.2576, 3.192, 3.99]],
        ),
        (
            RETURNS["n_step_returns"],
            [[2.8, -3.15, 0.7, 1.7, 3.4], [1.2155, 0.714, 0.2576, 3.192, 3.99]],
        ),
    ],
    ids=list(RETURNS),
)
def test_returns_are_the_published_numbers_of_rlax(function, wanted):
    given = function(*arrays(*[np.array(x).T for x in PUBLISHED_RETURNS.values()]))
    np.testing.assert_allclose(given, np.array(wanted).T, rtol=1e-5)


def test_vtrace_gives_the_published_errors_of_rlax():
    behaviour = np.array(
        [
            [[8.9, 0.7], [5.0, 1.0], [0.6, 0.1], [-0.9, -0.1]],
            [[0.3, -5.0], [1.0, -8.0], [0.3, 1.7], [4.7, 3.3]],
        ]
    )
    target = np.array(
        [
            [[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]],
            [[1.0, 0.9], [1.0, -1.0], [-4.3, 8.7], [0.8, 0.3]],
        ]
    )
    actions = np.array([[0, 1, 0, 0], [1, 0, 0, 1]])[..., None]

    def log_prob(logits):
        normalised = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return np.take_along_axis(normalised, actions, -1)[..., 0]

    rewards = np.array([[-1.3, -1.3, 2.3, 42.0], [1.3, 5.3, -3.3, -5.0]])
    discounts = np.array([[0.0, 0.89, 0.85, 0.99], [0.88, 1.0, 0.83, 0.95]])
    values = np.array([[2.1, 1.1, -3.1, 0.0, 8.4], [3.1, 0.1, -1.1, 7.4, -1.2]])
    log_ratios = log_prob(target) - log_prob(behaviour)
    data = (rewards, discounts, values[:, :-1], values[:, 1:], np.zeros((2, 4), bool), log_ratios)
    given = jitted_vtrace(*arrays(*[x.T for x in data]))
    wanted = [
        [-1.6155143, -3.4973226, 1.8670533, 50.316002],
        [1.4662437, 3.6116405, -8.3327e-5, -13.54],
    ]
    np.testing.assert_allclose(given.targets - values[:, :-1].T, np.array(wanted).T, atol=1e-5)
    np.testing.assert_allclose(given.advantages, np.array(wanted).T, atol=1e-5)


# Ends of episodes.


def test_terminal_and_truncated_episodes_equal_the_episodes_apart():
    data = arrays(*[x[:, 0] for x in rollout((9, 1), seed=5)])
    data[4] = jnp.array([False, False, True, False, False, False, True, False, False])
    data[1] = data[1].at[2].set(0.0)
    together = SAMPLE_GAE(*data[:5])
    pieces = [slice(0, 3), slice(3, 7), slice(7, 9)]
    apart = [SAMPLE_GAE(*[x[piece] for x in data[:5]]) for piece in pieces]
    np.testing.assert_allclose(together, jnp.concatenate(apart), rtol=1e-6)


@pytest.mark.parametrize("name", RETURNS)
def test_return_does_not_see_past_a_reset(name):
    rewards, discounts, next_values, _ = returns_of(arrays(*rollout((4,))))
    cut = jnp.array([False, True, False, False])
    changed = [x.at[2:].add(1e3) for x in (rewards, discounts, next_values)]
    before = RETURNS[name](rewards, discounts, next_values, cut)
    after = RETURNS[name](*changed, cut)
    np.testing.assert_array_equal(before[:2], after[:2])


@pytest.mark.parametrize("name", RETURNS)
def test_reset_on_the_last_row_changes_no_return(name):
    rewards, discounts, next_values, resets = returns_of(arrays(*rollout()))
    given = [
        RETURNS[name](rewards, discounts, next_values, resets.at[-1].set(last))
        for last in (False, True)
    ]
    np.testing.assert_array_equal(*given)


def test_reset_on_the_last_row_changes_no_advantage():
    data = arrays(*rollout())
    given = [
        (SAMPLE_GAE(*data[:4], cut), *SAMPLE_VTRACE(*data[:4], cut, data[5]))
        for cut in (data[4].at[-1].set(False), data[4].at[-1].set(True))
    ]
    jax.tree.map(np.testing.assert_array_equal, *given)


def test_two_states_that_loop_are_valued_by_the_geometric_series():
    one, no = jnp.ones(400), jnp.zeros(400, bool)
    given = RETURNS["discounted_returns"](one, 0.9 * one, 10 * one, no)
    np.testing.assert_allclose(given, 10.0, rtol=1e-5)


# Under jit, vmap and grad.


@pytest.mark.parametrize("name", RETURNS)
def test_jit_of_returns_changes_nothing(name):
    data = returns_of(arrays(*rollout()))
    np.testing.assert_allclose(JITTED[name](*data), EAGER[name](*data), rtol=1e-5, atol=1e-6)


def test_jit_of_advantages_changes_nothing():
    data = arrays(*rollout())
    np.testing.assert_allclose(SAMPLE_GAE(*data[:5]), EAGER["gae"](*data[:5]), rtol=1e-5, atol=1e-6)
    for given, wanted in zip(SAMPLE_VTRACE(*data), EAGER["vtrace"](*data), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RETURNS)
def test_vmap_of_returns_over_environments_equals_the_batched_call(name):
    data = returns_of(arrays(*rollout()))
    mapped = jax.vmap(RETURNS[name], in_axes=1, out_axes=1)(*data)
    np.testing.assert_allclose(mapped, RETURNS[name](*data), rtol=1e-6, atol=1e-6)


def test_vmap_of_advantages_over_environments_equals_the_batched_call():
    data = arrays(*rollout())
    mapped = jax.vmap(SAMPLE_GAE, in_axes=1, out_axes=1)(*data[:5])
    np.testing.assert_allclose(mapped, SAMPLE_GAE(*data[:5]), rtol=1e-6, atol=1e-6)
    mapped = jax.vmap(SAMPLE_VTRACE, in_axes=1, out_axes=1)(*data)
    for given, wanted in zip(mapped, SAMPLE_VTRACE(*data), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-6, atol=1e-6)


def test_lambda_may_be_traced_and_mapped_over():
    data, lambdas = arrays(*rollout())[:5], jnp.array([0.0, 0.5, 1.0])
    mapped = jax.vmap(lambda each: jitted_gae(*data, lambda_=each))(lambdas)
    for lambda_, given in zip(lambdas.tolist(), mapped, strict=True):
        np.testing.assert_allclose(given, jitted_gae(*data, lambda_=lambda_), rtol=1e-6)


def test_lambda_may_be_an_integer():
    data = arrays(*rollout())[:5]
    np.testing.assert_array_equal(gae(*data, lambda_=1), gae(*data, lambda_=1.0))


def test_gradient_of_gae_is_that_of_its_equation():
    with jax.enable_x64(True):
        *floats, resets, _ = arrays(*rollout((4, 2)), dtype=jnp.float64)
        check_grads(jax.jit(lambda *x: SAMPLE_GAE(*x, resets)), floats, order=1, modes=["rev"])


@pytest.mark.parametrize("name", RETURNS)
def test_gradient_of_returns_is_that_of_their_equation(name):
    with jax.enable_x64(True):
        *floats, resets = returns_of(arrays(*rollout((4, 2)), dtype=jnp.float64))
        check_grads(jax.jit(lambda *x: RETURNS[name](*x, resets)), floats, order=1, modes=["rev"])


def test_gradient_of_vtrace_is_that_of_its_equation():
    with jax.enable_x64(True):
        *floats, resets, log_ratios = arrays(*rollout((4, 2)), dtype=jnp.float64)
        check_grads(
            jax.jit(lambda *x: SAMPLE_VTRACE(*x[:4], resets, x[4])),
            (*floats, log_ratios),
            order=1,
            modes=["rev"],
        )


def test_gradient_with_respect_to_lambda_flows():
    with jax.enable_x64(True):
        data = arrays(*rollout((4, 2)), dtype=jnp.float64)[:5]
        check_grads(jax.jit(lambda x: gae(*data, lambda_=x)), (0.7,), order=1, modes=["rev"])


# Dtypes.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RETURNS)
def test_returns_keep_the_dtype(name, dtype):
    data = returns_of(rollout())
    given = RETURNS[name](*arrays(*data, dtype=dtype))
    assert given.dtype == dtype
    np.testing.assert_allclose(
        given.astype(jnp.float32),
        RETURNS[name](*arrays(*data)),
        atol=60 * float(jnp.finfo(dtype).eps),
    )


@jax.jit
def gradient_of_values(*data):
    return jax.grad(lambda values: SAMPLE_GAE(*data[:2], values, *data[3:]).sum())(data[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gae_keeps_the_dtype_and_its_gradient_is_finite(dtype):
    data = arrays(*rollout(), dtype=dtype)[:5]
    assert jitted_gae(*data, lambda_=jnp.float32(0.9)).dtype == dtype
    gradient = gradient_of_values(*data)
    assert gradient.dtype == dtype
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums_of_half_precision_do_not_stop_growing(dtype):
    one, no = jnp.ones(1000, dtype), jnp.zeros(1000, bool)
    lone = (one, one, 0 * one, no)
    for given in (
        jitted_gae(one, one, *lone[2:3] * 2, no, lambda_=1.0),
        RETURNS["discounted_returns"](*lone),
        jitted_n_step_returns(*lone, n=1000),
        jitted_vtrace(one, one, *lone[2:3] * 2, no, 0 * one).targets,
    ):
        assert given.dtype == dtype
        assert given[0] == 1000


def test_gae_of_huge_rewards_is_finite():
    data = arrays(*rollout())[:5]
    huge = [1e30 * x if index in (0, 2, 3) else x for index, x in enumerate(data)]
    np.testing.assert_allclose(SAMPLE_GAE(*huge), 1e30 * SAMPLE_GAE(*data), rtol=1e-4)


def test_gradient_of_lambda_at_0_is_that_of_the_next_advantage():
    data = arrays(*rollout((4,)))[:5]
    data[1], data[4] = jnp.array([0.9, 0.5, 1.0, 0.9]), jnp.array([False, True, False, False])
    gradient = jax.jacobian(lambda x: jitted_gae(*data, lambda_=x))(0.0)
    later = jnp.append(jitted_gae(*data, lambda_=0.0)[1:], 0)
    np.testing.assert_allclose(gradient, jnp.where(data[4], 0, data[1] * later), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vtrace_keeps_the_dtype_whatever_that_of_its_knobs(dtype):
    one = jnp.float32(1.0)
    given = jitted_vtrace(
        *arrays(*rollout(), dtype=dtype),
        lambda_=one,
        rho_clip=one,
        c_clip=one,
        advantage_rho_clip=one,
    )
    assert [x.dtype for x in given] == [dtype, dtype]


def test_float64_is_exact_where_it_is_switched_on():
    data = rollout()[:5]
    with jax.enable_x64(True):
        given = jitted_gae(*arrays(*data, dtype=jnp.float64), lambda_=0.8)
        assert given.dtype == jnp.float64
        np.testing.assert_allclose(given, gae_by_definition(*data, 0.8), rtol=1e-12, atol=1e-13)


# Bad input.


@pytest.mark.parametrize("name", RETURNS)
def test_returns_of_no_step_are_refused(name):
    data = returns_of(arrays(*rollout((0, 3))))
    with pytest.raises(ValueError, match=r"no step \(T is 0\); give at least one"):
        RETURNS[name](*data)


def test_advantages_of_no_step_are_refused():
    data = arrays(*rollout((0, 3)))
    with pytest.raises(ValueError, match=r"no step \(T is 0\)"):
        SAMPLE_GAE(*data[:5])
    with pytest.raises(ValueError, match=r"no step \(T is 0\)"):
        SAMPLE_VTRACE(*data)


def test_no_environment_gives_no_advantage():
    data = arrays(*rollout((3, 0)))
    assert SAMPLE_GAE(*data[:5]).shape == (3, 0)
    assert [x.shape for x in SAMPLE_VTRACE(*data)] == [(3, 0), (3, 0)]
    assert [RETURNS[name](*returns_of(data)).shape for name in RETURNS] == [(3, 0)] * 3


@pytest.mark.parametrize("n", [0, -1])
def test_fewer_than_one_step_is_refused(n):
    data = returns_of(arrays(*rollout()))
    with pytest.raises(ValueError, match=rf"n_step_returns\(\): n is {n}"):
        n_step_returns(*data, n=n)


def test_number_of_steps_that_is_no_integer_is_refused_by_name():
    data = returns_of(arrays(*rollout()))
    with pytest.raises(TypeError, match=r"n_step_returns\(\): argument 'n' should be int, .* 2\.5"):
        n_step_returns(*data, n=2.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("index", range(1, 5))
def test_argument_with_one_axis_too_many_is_refused_by_name(index):
    name = ["rewards", "discounts", "values", "next_values", "resets"][index]
    data = arrays(*rollout())[:5]
    data[index] = data[index][..., None]
    kind = "Bool" if name == "resets" else "Float"
    wanted = rf"gae\(\): argument '{name}' should be {kind}\[Array, 'T \*batch'\], but is"
    with pytest.raises(
        TypeError, match=wanted + r" \w+\[7,3,1\], where 'rewards' is float32\[7,3\]"
    ):
        SAMPLE_GAE(*data)


def test_values_with_a_row_too_many_are_refused_by_name():
    data = arrays(*rollout())[:5]
    data[2] = jnp.zeros((T + 1, B))
    with pytest.raises(TypeError, match=r"'values' should be .*but is float32\[8,3\]"):
        SAMPLE_GAE(*data)


def test_batch_that_would_broadcast_is_refused_by_name():
    data = returns_of(arrays(*rollout()))
    with pytest.raises(TypeError, match=r"'next_values' should be .*but is float32\[7,1\]"):
        RETURNS["discounted_returns"](*data[:2], data[2][:, :1], data[3])


def test_wrong_log_ratios_are_refused_by_name():
    data = arrays(*rollout())
    with pytest.raises(TypeError, match=r"vtrace\(\): argument 'log_ratios' .*float32\[6,3\]"):
        SAMPLE_VTRACE(*data[:5], data[5][1:])


def test_resets_that_are_numbers_are_refused_by_name():
    data = arrays(*rollout())[:5]
    with pytest.raises(TypeError, match=r"'resets' should be Bool.*but is float32\[7,3\]"):
        SAMPLE_GAE(*data[:4], data[0])


def test_integer_rewards_are_refused_by_name():
    data = arrays(*rollout())[:5]
    with pytest.raises(TypeError, match=r"'rewards' should be Float.*but is int32\[7,3\]"):
        SAMPLE_GAE(data[0].astype(jnp.int32), *data[1:])


def test_numpy_rewards_are_refused_by_name():
    data = rollout()[:5]
    with pytest.raises(TypeError, match=r"'rewards' should be Float.*the ndarray float64\[7,3\]"):
        EAGER["gae"](*data)


def test_lambda_of_every_step_is_refused_by_name():
    data = arrays(*rollout())[:5]
    with pytest.raises(TypeError, match=r"'lambda_' should be ScalarLike, but is float32\[7\]"):
        jitted_gae(*data, lambda_=jnp.ones(T))


def test_missing_lambda_is_named():
    with pytest.raises(TypeError, match=r"missing .* 'lambda_'"):
        gae(*arrays(*rollout())[:5])  # pyright: ignore[reportCallIssue]


def test_wrong_shape_is_refused_while_tracing_too():
    data = arrays(*rollout())[:5]
    with pytest.raises(TypeError, match=r"gae\(\): argument 'values' .*float32\[7,3,1\]"):
        SAMPLE_GAE(*data[:2], data[2][..., None], *data[3:])


# `VTrace` is a tree.


def test_vtrace_survives_tree_map_and_jit():
    both = VTrace(jnp.ones(2), jnp.zeros(2))
    doubled = jax.tree.map(lambda x: 2 * x, both)
    assert isinstance(doubled, VTrace)
    assert isinstance(SAMPLE_VTRACE(*arrays(*rollout())), VTrace)
    assert doubled.targets.tolist() == [2.0, 2.0]


# `normalise`.


def test_normalise_divides_by_the_population_deviation():
    given = jitted_normalise(jnp.array([1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_allclose(given, [-1.341641, -0.447214, 0.447214, 1.341641], rtol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 2)])
def test_normalise_runs_over_all_entries(shape):
    values = np.random.default_rng(0).normal(3, 2, shape)
    wanted = (values - values.mean()) / (values.std() + 1e-8)
    np.testing.assert_allclose(jitted_normalise(jnp.array(values)), wanted, atol=2e-6)


def test_normalise_with_a_mask_equals_normalise_of_what_counts():
    values = np.random.default_rng(1).normal(size=(4, 3))
    where = np.random.default_rng(2).random((4, 3)) < 0.6
    given = jitted_normalise(jnp.array(values), jnp.array(where))
    kept = values[where]
    np.testing.assert_allclose(given[where], (kept - kept.mean()) / kept.std(), atol=2e-6)
    assert (np.asarray(given)[~where] == 0).all()


def test_normalise_does_not_let_masked_entries_in_even_if_they_are_nan():
    values, where = jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True])
    np.testing.assert_allclose(jitted_normalise(values, where), [-1.0, 0.0, 1.0], rtol=1e-6)
    gradient = cubed_gradient(values, where)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("value", [0.0, 0.1, 6e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_normalise_of_equal_values_is_exactly_zero(value, dtype):
    assert (jitted_normalise(jnp.full(7, value, dtype)) == 0).all()


def test_normalise_of_equal_values_has_a_finite_gradient():
    gradient = cubed_gradient(jnp.full(4, 0.1))
    assert jnp.isfinite(gradient).all()


def test_normalise_of_nothing_that_counts_is_zero():
    assert jitted_normalise(jnp.arange(3.0), jnp.zeros(3, bool)).tolist() == [0.0, 0.0, 0.0]


def test_normalise_of_one_value_is_zero():
    assert jitted_normalise(jnp.array([7.0])).tolist() == [0.0]


@pytest.mark.parametrize("unit", [1e30, 1e-30, 3e19, 8e37])
def test_normalise_does_not_depend_on_the_unit(unit):
    values = jnp.array([-2.0, 0.5, 1.0, 4.0])
    given = jitted_normalise(jnp.float32(unit) * values, epsilon=0.0)
    np.testing.assert_allclose(given, jitted_normalise(values), rtol=1e-5)


def test_normalise_of_the_largest_and_the_lowest_number():
    largest = jnp.finfo(jnp.float32).max
    np.testing.assert_allclose(jitted_normalise(jnp.array([-largest, largest])), [-1, 1])


@pytest.mark.parametrize("value", [0.0, 0.1, 3e38])
def test_normalise_of_equal_values_needs_no_epsilon(value):
    assert jitted_normalise(jnp.full(3, value), epsilon=0.0).tolist() == [0.0] * 3


def test_normalise_of_no_values_is_empty():
    assert jitted_normalise(jnp.zeros((0, 3))).shape == (0, 3)


def test_normalise_adds_epsilon_to_the_deviation():
    given = jitted_normalise(jnp.array([-1.0, 1.0]), epsilon=1.0)
    np.testing.assert_allclose(given, [-0.5, 0.5])


def test_normalise_stays_exact_far_from_zero():
    values = np.float32(1e6) + np.arange(4, dtype=np.float32)
    wanted = [-1.341641, -0.447214, 0.447214, 1.341641]
    np.testing.assert_allclose(jitted_normalise(jnp.array(values)), wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalise_keeps_the_dtype_and_does_not_overflow(dtype):
    given = jitted_normalise(jnp.array([-300, 0, 300], dtype))
    assert given.dtype == dtype
    np.testing.assert_allclose(given.astype(jnp.float32), [-1.2247449, 0, 1.2247449], rtol=1e-2)


def test_gradient_of_normalise_is_that_of_its_equation():
    with jax.enable_x64(True):
        values = jnp.array([0.3, -1.2, 2.0, 0.7])
        where = jnp.array([True, True, False, True])
        check_grads(jax.jit(lambda x: normalise(x, where)), (values,), order=1, modes=["rev"])


def test_jit_and_vmap_of_normalise_treat_each_row_alone():
    values = jnp.array(np.random.default_rng(0).normal(size=(3, 5)), jnp.float32)
    rows = jax.vmap(jitted_normalise)(values)
    for given, row in zip(rows, values, strict=True):
        np.testing.assert_allclose(given, jitted_normalise(row), atol=1e-6)


def test_normalise_refuses_a_mask_of_another_shape_by_name():
    with pytest.raises(TypeError, match=r"normalise\(\): argument 'where' .* but is bool\[2\]"):
        normalise(jnp.ones(3), jnp.ones(2, bool))


@pytest.mark.parametrize("log_ratio", [50.0, 100.0, 1e4])
def test_vtrace_gradient_is_finite_where_a_ratio_would_overflow(log_ratio):
    one, no = jnp.ones(3), jnp.zeros(3, bool)

    def total(log_ratios):
        return jnp.sum(vtrace(one, one, 0 * one, 0 * one, no, log_ratios).advantages)

    gradient = jax.grad(total)(log_ratio * one)
    assert gradient.tolist() == [0.0, 0.0, 0.0]
