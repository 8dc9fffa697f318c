"""The same functions in rlax: another hand's reading of the same papers.

rlax takes one sequence at a time, numbers rewards by the state arrived in, and knows no
time limits. A rollout without them is where the two must agree.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from vernal.core import (
    Categorical,
    discounted_returns,
    from_two_hot,
    gae,
    lambda_returns,
    mask_logits,
    n_step_returns,
    ppo_loss,
    signed_hyperbolic,
    signed_parabolic,
    two_hot,
    vtrace,
)

pytestmark = pytest.mark.filterwarnings("ignore:Rlax .* deprecated:PendingDeprecationWarning")

T, B = 9, 4


def over_batch(function):
    """A function of rlax, mapped over the environments of a time-major rollout."""
    return jax.jit(jax.vmap(function, in_axes=1, out_axes=1))


def rollout(seed=0):
    """Rewards, discounts (0 at ends), values with a row more, resets, log ratios."""
    random = np.random.default_rng(seed)
    rewards, log_ratios = random.normal(size=(2, T, B))
    values = random.normal(size=(T + 1, B))
    discounts = np.where(random.random((T, B)) < 0.2, 0, random.uniform(0.8, 1, (T, B)))
    floats = [jnp.array(x, jnp.float32) for x in (rewards, discounts, values, log_ratios)]
    return *floats[:3], jnp.array(discounts == 0), floats[3]


close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_gae(lambda_):
    rewards, discounts, values, resets, _ = rollout(seed=1)
    estimate = over_batch(
        lambda r, d, v: rlax.truncated_generalized_advantage_estimation(r, d, lambda_, v)
    )
    given = gae(rewards, discounts, values[:-1], values[1:], resets, lambda_=lambda_)
    close(given, estimate(rewards, discounts, values))


def test_gae_of_segments_apart_at_a_time_limit():
    rewards, discounts, values, _, _ = rollout(seed=2)
    cut = 4
    ends = jnp.zeros((T, B), bool).at[cut].set(True)
    last = jnp.arange(B) * 1.0  # the value of the state at the limit, which no row holds
    next_values = values[1:].at[cut].set(last)
    estimate = over_batch(
        lambda r, d, v: rlax.truncated_generalized_advantage_estimation(r, d, 0.8, v)
    )
    first = slice(0, cut + 1), jnp.concatenate([values[: cut + 1], last[None]])
    second = slice(cut + 1, T), values[cut + 1 :]
    wanted = [estimate(rewards[rows], discounts[rows], v) for rows, v in (first, second)]
    given = gae(rewards, discounts, values[:-1], next_values, ends, lambda_=0.8)
    close(given, jnp.concatenate(wanted))


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
def test_lambda_returns(lambda_):
    rewards, discounts, values, resets, _ = rollout(seed=3)
    estimate = over_batch(lambda r, d, v: rlax.lambda_returns(r, d, v, lambda_))
    given = lambda_returns(rewards, discounts, values[1:], resets, lambda_=lambda_)
    close(given, estimate(rewards, discounts, values[1:]))


def test_discounted_returns():
    rewards, discounts, values, resets, _ = rollout(seed=4)
    given = discounted_returns(rewards, discounts, values[1:], resets)
    close(given, over_batch(rlax.discounted_returns)(rewards, discounts, values[1:]))


@pytest.mark.parametrize("n", [1, 3, T])
def test_n_step_returns(n):
    rewards, discounts, values, resets, _ = rollout(seed=5)
    estimate = over_batch(lambda r, d, v: rlax.n_step_bootstrapped_returns(r, d, v, n))
    given = n_step_returns(rewards, discounts, values[1:], resets, n=n)
    close(given, estimate(rewards, discounts, values[1:]))


@pytest.mark.parametrize(
    ("lambda_", "rho_clip", "advantage_clip"), [(1.0, 1.0, 1.0), (0.9, 1.5, 0.7)]
)
def test_vtrace(lambda_, rho_clip, advantage_clip):
    rewards, discounts, values, resets, log_ratios = rollout(seed=6)
    estimate = over_batch(
        functools.partial(
            rlax.vtrace_td_error_and_advantage,
            lambda_=lambda_,
            clip_rho_threshold=rho_clip,
            clip_pg_rho_threshold=advantage_clip,
        )
    )
    wanted = estimate(values[:-1], values[1:], rewards, discounts, jnp.exp(log_ratios))
    given = vtrace(
        rewards,
        discounts,
        values[:-1],
        values[1:],
        resets,
        log_ratios,
        lambda_=lambda_,
        rho_clip=rho_clip,
        advantage_rho_clip=advantage_clip,
    )
    close(given.targets - values[:-1], wanted.errors)
    close(given.advantages, wanted.pg_advantage)


@pytest.mark.parametrize("epsilon", [0.1, 0.3])
def test_clipped_surrogate_and_its_gradient(epsilon):
    log_ratios, advantages = jnp.array(np.random.default_rng(7).normal(size=(2, 50)), jnp.float32)
    zero = jnp.zeros(50)

    def ours(x):
        return ppo_loss(x, zero, advantages, zero, zero, zero, clip_epsilon=epsilon)[1].policy

    def theirs(x):
        return rlax.clipped_surrogate_pg_loss(jnp.exp(x), advantages, epsilon)

    for given, wanted in zip(
        jax.value_and_grad(ours)(log_ratios), jax.value_and_grad(theirs)(log_ratios), strict=True
    ):
        close(given, wanted)


def policies(seed):
    legal = jnp.array(
        [[True, True, False, True, True], [True] * 5, [False, True, True] + [False] * 2]
    )
    logits = jnp.array(np.random.default_rng(seed).normal(size=(2, 3, 5)), jnp.float32)
    return [mask_logits(x, legal) for x in logits]


def test_importance_ratios_of_masked_policies():
    new, old = policies(seed=8)
    actions = jnp.array([3, 2, 1])
    given = jnp.exp(Categorical(new).log_prob(actions) - Categorical(old).log_prob(actions))
    close(given, jax.vmap(rlax.categorical_importance_sampling_ratios)(new, old, actions))


def test_entropy_of_masked_policies():
    logits, _ = policies(seed=9)
    softmax = rlax.softmax()
    close(Categorical(logits).entropy(), jax.vmap(softmax.entropy)(logits))


def test_kl_of_masked_policies():
    logits, other = policies(seed=10)
    wanted = jax.vmap(rlax.categorical_kl_divergence)(logits, other)
    close(Categorical(logits).kl(Categorical(other)), wanted)


def test_signed_hyperbolic_and_its_inverse():
    values = jnp.linspace(-300, 300, 61)
    given, wanted = signed_hyperbolic(values), rlax.signed_hyperbolic(values)
    close(given, wanted)
    # As printed, the inverse loses three digits in float32: it is theirs that is the less exact.
    np.testing.assert_allclose(
        signed_parabolic(given), rlax.signed_parabolic(given), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("bins", [2, 5, 21])
def test_two_hot_and_its_mean(bins):
    values, support = jnp.linspace(-1.5, 1.5, 31), jnp.linspace(-1, 1, bins)
    wanted = rlax.transform_to_2hot(values, -1.0, 1.0, bins)
    given = two_hot(values, support)
    np.testing.assert_allclose(given, wanted, atol=2e-4)  # theirs is off by 1e-4
    close(from_two_hot(given, support), rlax.transform_from_2hot(given, -1.0, 1.0, bins))
