"""Laws of advantages and returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vernal.core import (
    discounted_returns,
    gae,
    lambda_returns,
    n_step_returns,
    normalise,
    vtrace,
)

from .strategies import (
    BATCHES,
    ROLLOUTS,
    UNIT,
    Rollout,
    alike,
    arrays,
    assert_near,
    bools,
    floats,
    numbers,
    rollouts,
)

jit_gae = jax.jit(gae)
jit_lambda_returns = jax.jit(lambda_returns)
jit_discounted_returns = jax.jit(discounted_returns)
jit_n_step_returns = jax.jit(n_step_returns, static_argnames="n")
jit_vtrace = jax.jit(vtrace)
jit_normalise = jax.jit(normalise)

LOG_RATIOS = st.sampled_from([-200.0, 0.0, 200.0]) | numbers(-2, 2)
CLIPS = numbers(0.5, 2)


def weighted_sums(terms, decays):
    """Sum of each term and all later ones, times the product of the decays between."""
    sums = np.zeros(terms.shape)
    for t in range(len(terms)):
        weight = np.ones(terms.shape[1:])
        for term, decay in zip(terms[t:], decays[t:], strict=True):
            sums[t] += weight * term
            weight *= decay
    return sums


def numpy_gae(rollout: Rollout, lambda_):
    r, d, v, v_next, resets = rollout.wide
    return weighted_sums(r + d * v_next - v, np.where(resets, 0, d * lambda_))


def horizons(rollout: Rollout, t, column):
    """Returns from a step by 1, 2, ... rewards, up to the end of its episode or rollout."""
    r, d, _, v_next, resets = (x.reshape(len(x), -1)[t:, column] for x in rollout.wide)
    last = np.argmax(np.append(resets[:-1], True))
    weights = np.cumprod(np.append(1, d))
    return [weights[: n + 1] @ np.append(r[:n], v_next[n - 1]) for n in range(1, last + 2)]


def from_horizons(blend, rollout: Rollout):
    """Blend the returns of each step in a way of one's own."""
    shape = rollout.rewards.shape
    columns = range(int(np.prod(shape[1:])))
    blended = [[blend(horizons(rollout, t, c)) for c in columns] for t in range(shape[0])]
    return np.reshape(blended, shape)


@given(rollouts(), UNIT)
def test_gae_is_the_decayed_sum_of_later_errors(rollout, lambda_):
    """An advantage is the sum of its episode's later errors, decayed once a step."""
    advantages = jit_gae(*rollout, lambda_=lambda_)
    assert_near(
        advantages, numpy_gae(rollout, lambda_), scale=numpy_gae(rollout.magnitudes, lambda_)
    )


@given(rollouts())
def test_gae_at_lambda_0_is_the_one_step_error(rollout):
    """With lambda 0 an advantage is reward plus discounted next value less value."""
    r, d, v, v_next, _ = rollout.wide
    one_step = r + d * v_next - v
    assert_near(jit_gae(*rollout, lambda_=0.0), one_step, scale=abs(r) + abs(v_next) + abs(v))


@given(rollouts(consistent=True))
def test_gae_at_lambda_1_is_monte_carlo(rollout):
    """With lambda 1 an advantage is the episode's longest return less the value."""
    returns = from_horizons(lambda by_horizon: by_horizon[-1], rollout)
    advantages = jit_gae(*rollout, lambda_=1.0)
    assert_near(
        advantages, returns - rollout.values, scale=numpy_gae(rollout.magnitudes, 1), tolerance=2e-5
    )


@given(alike(ROLLOUTS, rollouts, rollouts), UNIT)
def test_gae_is_additive(pair, lambda_):
    """The advantages of summed rewards and values are the sums of their advantages."""
    one, other = pair
    other = other._replace(discounts=one.discounts, resets=one.resets)
    both = Rollout(
        one.rewards + other.rewards,
        one.discounts,
        one.values + other.values,
        one.next_values + other.next_values,
        one.resets,
    )
    separate = jit_gae(*one, lambda_=lambda_) + jit_gae(*other, lambda_=lambda_)
    scale = numpy_gae(one.magnitudes, lambda_) + numpy_gae(other.magnitudes, lambda_)
    assert_near(jit_gae(*both, lambda_=lambda_), separate, scale=scale)


@given(rollouts(), UNIT, st.sampled_from([-4.0, -1.0, 0.5, 8.0]))
def test_gae_scales_with_its_unit(rollout, lambda_, unit):
    """In another unit of reward and value the advantages are the same, in that unit."""
    rescaled = rollout._replace(
        rewards=unit * rollout.rewards,
        values=unit * rollout.values,
        next_values=unit * rollout.next_values,
    )
    scale = numpy_gae(rescaled.magnitudes, lambda_)
    assert_near(
        jit_gae(*rescaled, lambda_=lambda_), unit * jit_gae(*rollout, lambda_=lambda_), scale=scale
    )


@given(
    alike(ROLLOUTS, rollouts, rollouts),
    UNIT,
    st.integers(0, 9),
    st.booleans(),
)
def test_nothing_behind_an_end_is_seen(pair, lambda_, step, terminal):
    """Beyond a terminal state or a reset, rewards and values change no bit before it."""
    one, other = pair
    step %= len(one.rewards)
    (one.discounts if terminal else one.resets)[step] = not terminal
    changed = Rollout._make(map(np.copy, one))
    for ours, theirs in zip(changed, other, strict=True):
        ours[step + 1 :] = theirs[step + 1 :]
    if terminal:
        changed.next_values[step] = other.next_values[step]
    for estimate, args in [
        (jit_gae, tuple),
        (jit_lambda_returns, lambda rollout: rollout.for_returns),
    ]:
        before, after = (estimate(*args(x), lambda_=lambda_) for x in (one, changed))
        np.testing.assert_array_equal(before[: step + 1], after[: step + 1])


@jax.jit
def all_estimates(rollout, log_ratios, lambda_, counted):
    """What all estimators say, and the gradients of the sum of its squares, where it counts."""

    def total(rewards, values, next_values):
        discounts, resets = rollout.discounts, rollout.resets
        both = vtrace(rewards, discounts, values, next_values, resets, log_ratios, lambda_=lambda_)
        estimates = jnp.stack(
            [
                gae(rewards, discounts, values, next_values, resets, lambda_=lambda_),
                lambda_returns(rewards, discounts, next_values, resets, lambda_=lambda_),
                *both,
                n_step_returns(rewards, discounts, next_values, resets, n=1),
                n_step_returns(rewards, discounts, next_values, resets, n=2),
                discounted_returns(rewards, discounts, next_values, resets),
            ]
        )
        estimates = jnp.where(counted.reshape(-1, *[1] * rewards.ndim), estimates, 0)
        return jnp.sum(estimates**2), estimates

    gradient = jax.grad(total, argnums=(0, 1, 2), has_aux=True)
    return gradient(rollout.rewards, rollout.values, rollout.next_values)


BEHIND = alike(ROLLOUTS, rollouts, lambda shape: arrays(shape, LOG_RATIOS))


@given(
    BEHIND,
    st.sampled_from(["reset", "discount", "horizon"]),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.integers(0, 5),
    st.integers(1, 6),
    UNIT,
)
def test_what_has_weight_0_counts_for_nothing(drawn, cut, poison, start, length, lambda_):
    """NaN and infinities stay between the ends around them, in values and in gradients.

    They come over no reset, no discount of 0, and not beyond the horizon of one step; and a
    critic may say them of a state behind a discount of 0.
    """
    rollout, log_ratios = drawn
    steps = len(rollout.rewards)
    start %= steps
    inside = np.zeros(rollout.rewards.shape, bool)
    inside[start : start + length] = True
    ends = [t for t in (start - 1, start + length - 1) if 0 <= t < steps]
    rollout.resets[ends] |= cut == "reset"
    rollout.discounts[ends] *= cut != "discount"
    counted = np.array([True] * 5 + [cut != "horizon"] * 2)
    knobs = log_ratios, 0.0 if cut == "horizon" else lambda_, counted

    def poisoned(x, where):
        return np.where(where, np.float32(poison), x)

    dirty = rollout._replace(
        rewards=poisoned(rollout.rewards, inside),
        values=poisoned(rollout.values, inside),
        next_values=poisoned(rollout.next_values, inside | (rollout.discounts == 0)),
    )
    gradients, estimates = all_estimates(rollout, *knobs)
    dirty_gradients, dirty_estimates = all_estimates(dirty, *knobs)
    for given_arrays, wanted_arrays in [(dirty_gradients, gradients), (dirty_estimates, estimates)]:
        for ours, wanted in zip(given_arrays, wanted_arrays, strict=True):
            np.testing.assert_array_equal(ours[~inside], wanted[~inside])
            assert np.isfinite(ours[~inside]).all()


@given(rollouts(), UNIT)
def test_a_reset_keeps_the_bootstrap(rollout, lambda_):
    """Where every step ends by a time limit, all that is left is the one-step error."""
    cut = rollout._replace(resets=np.ones_like(rollout.resets))
    r, d, v, v_next, _ = rollout.wide
    scale = abs(r) + abs(v_next) + abs(v)
    assert_near(jit_gae(*cut, lambda_=lambda_), r + d * v_next - v, scale=scale)


@given(rollouts((4, 2)), UNIT, st.permutations(range(2)))
def test_environments_are_apart(rollout, lambda_, order):
    """Permuting the environments permutes the advantages, bit by bit."""
    permuted = (x[:, np.array(order)] for x in rollout)
    advantages = jit_gae(*rollout, lambda_=lambda_)
    np.testing.assert_array_equal(
        jit_gae(*permuted, lambda_=lambda_), advantages[:, np.array(order)]
    )


columnwise_gae = jax.jit(
    jax.vmap(
        lambda r, d, v, v_next, resets, lambda_: gae(r, d, v, v_next, resets, lambda_=lambda_),
        in_axes=(1, 1, 1, 1, 1, None),
        out_axes=1,
    )
)


@given(rollouts((4, 2)), UNIT)
def test_a_batch_is_its_columns(rollout, lambda_):
    """Mapped over environments one by one, GAE is GAE of them all."""
    batched = jit_gae(*rollout, lambda_=lambda_)
    scale = numpy_gae(rollout.magnitudes, lambda_)
    assert_near(columnwise_gae(*rollout, lambda_), batched, scale=scale)


@given(rollouts((4, 2)), UNIT)
def test_compiling_changes_nothing(rollout, lambda_):
    """Compiled or not, GAE is the same up to rounding."""
    eager = gae(*map(jnp.asarray, rollout), lambda_=lambda_)
    scale = numpy_gae(rollout.magnitudes, lambda_)
    assert_near(jit_gae(*rollout, lambda_=lambda_), eager, scale=scale)


@given(rollouts(), UNIT)
def test_a_perfect_critic_leaves_no_advantage(rollout, lambda_):
    """If values are exactly what steps pay and lead to, every advantage is 0."""
    r, d, _, v_next, _ = rollout
    rewards, next_values = np.round(r), np.round(v_next)
    discounts = np.round(d)  # whole numbers, so that nothing is rounded
    perfect = rollout._replace(
        rewards=rewards,
        next_values=next_values,
        discounts=discounts,
        values=rewards + discounts * next_values,
    )
    np.testing.assert_array_equal(jit_gae(*perfect, lambda_=lambda_), np.zeros_like(r))


@given(rollouts(), UNIT, numbers(-100, 100))
def test_only_differences_of_values_count(rollout, lambda_, shift):
    """A constant in all values, paid for in the rewards, leaves the advantages."""
    r, d, v, v_next, resets = rollout.wide
    shifted = Rollout(r + shift * (1 - d), d, v + shift, v_next + shift, resets).narrow
    larger = shifted._replace(rewards=abs(shifted.rewards) + abs(shift))
    scale = numpy_gae(rollout.magnitudes, lambda_) + numpy_gae(larger.magnitudes, lambda_)
    assert_near(jit_gae(*shifted, lambda_=lambda_), jit_gae(*rollout, lambda_=lambda_), scale=scale)


@jax.jit
def pulled_back(weights, rollout, lambda_):
    def estimate(rewards, values, next_values):
        discounts, resets = rollout.discounts, rollout.resets
        return gae(rewards, discounts, values, next_values, resets, lambda_=lambda_)

    pull = jax.vjp(estimate, rollout.rewards, rollout.values, rollout.next_values)[1]
    return pull(weights)


@given(
    alike(ROLLOUTS, rollouts, floats),
    UNIT,
)
def test_gradients_of_gae_are_its_transpose(drawn, lambda_):
    """GAE is linear in rewards and values, and its gradient is the transposed map."""
    rollout, weights = drawn
    r, _, v, v_next, _ = rollout.wide
    gradients = map(np.float64, pulled_back(weights, rollout, lambda_))
    through_gradient = sum((g * x).sum() for g, x in zip(gradients, (r, v, v_next), strict=True))
    scale = (abs(weights) * numpy_gae(rollout.magnitudes, lambda_)).sum()
    assert_near(through_gradient, (weights * numpy_gae(rollout, lambda_)).sum(), scale=scale)


@given(rollouts(), UNIT)
def test_a_lambda_return_blends_all_horizons(rollout, lambda_):
    """A lambda-return is the mean of the returns of all horizons, with geometric weights."""

    def blend(by_horizon):
        weights = lambda_ ** np.arange(len(by_horizon))
        weights[:-1] *= 1 - lambda_
        return weights @ by_horizon

    returns = jit_lambda_returns(*rollout.for_returns, lambda_=lambda_)
    scale = from_horizons(blend, rollout.magnitudes)
    assert_near(returns, from_horizons(blend, rollout), scale=scale)


@given(rollouts(consistent=True), UNIT)
def test_an_advantage_is_a_lambda_return_less_the_value(rollout, lambda_):
    """GAE and the lambda-return differ by the value of the state left."""
    returns = jit_lambda_returns(*rollout.for_returns, lambda_=lambda_)
    scale = numpy_gae(rollout.magnitudes, lambda_) + abs(rollout.values)
    assert_near(
        jit_gae(*rollout, lambda_=lambda_),
        np.float64(returns) - rollout.values,
        scale=scale,
        tolerance=2e-5,
    )


@given(rollouts())
def test_a_discounted_return_goes_to_the_end(rollout):
    """A discounted return has the longest horizon that its episode or rollout allows."""

    def longest(by_horizon):
        return by_horizon[-1]

    returns = jit_discounted_returns(*rollout.for_returns)
    scale = from_horizons(longest, rollout.magnitudes)
    assert_near(returns, from_horizons(longest, rollout), scale=scale)


@given(rollouts(), st.sampled_from([1, 2, 4, 50]))
def test_an_n_step_return_has_n_rewards_or_all_there_are(rollout, n):
    """An n-step return is that of the n-th horizon, or of the longest if none is as long."""

    def nth(by_horizon):
        return by_horizon[min(n, len(by_horizon)) - 1]

    returns = jit_n_step_returns(*rollout.for_returns, n=n)
    scale = from_horizons(nth, rollout.magnitudes)
    assert_near(returns, from_horizons(nth, rollout), scale=scale)


OFF_POLICY = alike(ROLLOUTS, rollouts, lambda shape: arrays(shape, LOG_RATIOS))


@given(OFF_POLICY, UNIT, CLIPS, CLIPS, CLIPS)
def test_vtrace_is_what_its_paper_says(drawn, lambda_, rho_clip, c_clip, advantage_clip):
    """Targets are values plus decayed clipped errors; advantages bootstrap from targets."""
    rollout, log_ratios = drawn
    ratios = np.exp(np.float64(log_ratios))

    def paper(rollout):
        r, d, v, v_next, resets = rollout.wide
        decays = np.where(resets, 0, d * lambda_ * np.minimum(c_clip, ratios))
        errors = weighted_sums(np.minimum(rho_clip, ratios) * (r + d * v_next - v), decays)
        later = np.append(errors[1:], np.zeros_like(errors[:1]), axis=0)
        bootstrap = v_next + lambda_ * np.where(resets, 0, later)
        return v + errors, np.minimum(advantage_clip, ratios) * (r + d * bootstrap - v)

    got = jit_vtrace(
        *rollout,
        log_ratios,
        lambda_=lambda_,
        rho_clip=rho_clip,
        c_clip=c_clip,
        advantage_rho_clip=advantage_clip,
    )
    targets, advantages = paper(rollout)
    target_scale, advantage_scale = paper(rollout.magnitudes)
    assert_near(got.targets, targets, scale=target_scale + 2 * abs(rollout.values))
    assert_near(got.advantages, advantages, scale=advantage_scale)


@given(rollouts(), UNIT)
def test_on_policy_vtrace_is_gae(rollout, lambda_):
    """With equal policies, V-trace's errors and its advantages are both those of GAE."""
    wanted, scale = numpy_gae(rollout, lambda_), numpy_gae(rollout.magnitudes, lambda_)
    on_policy = jit_vtrace(*rollout, np.zeros_like(rollout.rewards), lambda_=lambda_)
    assert_near(on_policy.advantages, wanted, scale=scale)
    assert_near(on_policy.targets, rollout.values + wanted, scale=scale + abs(rollout.values))


@given(OFF_POLICY, UNIT)
def test_vtrace_does_not_see_ratios_above_its_clips(drawn, lambda_):
    """A ratio above all clips counts as the clip, however far above it is."""
    rollout, log_ratios = drawn
    clipped = jit_vtrace(*rollout, np.minimum(log_ratios, 0), lambda_=lambda_)
    np.testing.assert_array_equal(jit_vtrace(*rollout, log_ratios, lambda_=lambda_), clipped)


@jax.jit
def vtrace_gradient(log_ratios, arrays, lambda_):
    def total(log_ratios):
        r, d, v, v_next, resets = arrays
        targets, advantages = vtrace(r, d, v, v_next, resets, log_ratios, lambda_=lambda_)
        return targets.sum() + advantages.sum()

    return jax.grad(total)(log_ratios)


@given(OFF_POLICY, UNIT)
def test_no_gradient_reaches_a_ratio_above_the_clips(drawn, lambda_):
    """Gradients of V-trace are finite, and exactly 0 where a ratio is clipped."""
    rollout, log_ratios = drawn
    gradient = np.asarray(vtrace_gradient(log_ratios, rollout, lambda_))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[log_ratios > 1e-3], 0)


@given(rollouts(), UNIT)
def test_vtrace_learns_nothing_from_impossible_actions(rollout, lambda_):
    """Where the new policy would never act so, targets are values and advantages are 0."""
    never = np.full_like(rollout.rewards, -200)
    targets, advantages = jit_vtrace(*rollout, never, lambda_=lambda_)
    np.testing.assert_array_equal(targets, rollout.values)
    np.testing.assert_array_equal(advantages, 0 * rollout.values)


@given(st.sampled_from([(0,), (0, 3)]), st.sampled_from([gae, lambda_returns, n_step_returns]))
def test_a_rollout_has_a_step(shape, estimate):
    """No estimator takes a rollout of no step."""
    x, no = jnp.zeros(shape), jnp.zeros(shape, bool)
    args = (x,) * (4 if estimate is gae else 3)
    knobs = {"n": 1} if estimate is n_step_returns else {"lambda_": 0.5}
    with pytest.raises(ValueError, match="no step"):
        estimate(*args, no, **knobs)


@given(
    st.sampled_from([np.float16, jnp.bfloat16]),
    rollouts(),
    st.sampled_from([float, np.float32, jnp.asarray]),
)
def test_estimators_keep_the_dtype(dtype, rollout, kind):
    """Half precision stays half precision, whatever kind of scalar the knobs are."""
    knob = kind(0.5)

    def estimates(r, d, v, v_next, resets):
        return (
            gae(r, d, v, v_next, resets, lambda_=knob),
            lambda_returns(r, d, v_next, resets, lambda_=knob),
            n_step_returns(r, d, v_next, resets, n=2),
            vtrace(r, d, v, v_next, resets, r, lambda_=knob, rho_clip=knob, c_clip=knob),
            normalise(r, resets, epsilon=knob),
        )

    halves = [jax.ShapeDtypeStruct(x.shape, dtype) for x in rollout[:4]]
    results = jax.tree.leaves(jax.eval_shape(estimates, *halves, rollout.resets))
    assert {result.dtype for result in results} == {np.dtype(dtype)}


@given(alike(BATCHES, floats))
def test_normalised_values_are_centred_and_scaled(drawn):
    """Normalising subtracts the mean and divides by the population's deviation."""
    (values,) = drawn
    exact = values.astype(np.float64)
    wanted = (exact - exact.mean()) / (exact.std() + 1e-8)
    assert_near(jit_normalise(values), wanted, scale=values.size)


@given(
    alike(BATCHES, floats, bools),
    st.sampled_from([0.0, 1e30, np.nan, np.inf]),
)
def test_normalising_some_ignores_the_rest(drawn, junk):
    """Entries that do not count become 0, and whatever they were changes no other."""
    values, where = drawn
    counted = values[where].astype(np.float64)
    wanted = np.zeros(values.shape)
    if counted.size:
        wanted[where] = (counted - counted.mean()) / (counted.std() + 1e-8)
    got = jit_normalise(np.where(where, values, np.float32(junk)), where)
    assert_near(got, wanted, scale=values.size)
    np.testing.assert_array_equal(np.asarray(got)[~where], 0)


@given(st.sampled_from(BATCHES), numbers(-1e30, 1e30))
def test_equal_values_normalise_to_zeros(shape, value):
    """Values that are all the same become exactly 0."""
    values = np.full(shape, value, np.float32)
    np.testing.assert_array_equal(jit_normalise(values), np.zeros(shape))


@given(
    alike(BATCHES, lambda shape: arrays(shape, st.integers(-100, 100)), bools),
    st.integers(-110, 120),
)
def test_normalising_knows_no_unit(drawn, exponent):
    """In a unit that rounds nothing, however large or small, not a bit changes."""
    values, where = drawn
    scaled = np.ldexp(values, exponent)
    np.testing.assert_array_equal(
        jit_normalise(scaled, where, epsilon=0.0), jit_normalise(values, where, epsilon=0.0)
    )


@given(alike(BATCHES, floats), numbers(0.125, 8), numbers(-1e4, 1e4))
def test_normalising_forgets_origin_and_unit(drawn, unit, origin):
    """Shifting values and changing their unit leaves the normalised ones."""
    (values,) = drawn
    moved = np.float32(unit * values + origin)
    assume(values.std() > 10)  # what is left of smaller differences is rounding
    assert_near(jit_normalise(moved), jit_normalise(values), scale=values.size, tolerance=1e-3)


@jax.jit
def normalise_gradient(weights, values, where):
    return jax.vjp(lambda x: normalise(x, where), values)[1](weights)[0]


@given(alike(BATCHES, lambda shape: floats(shape, -10, 10), floats, bools))
def test_the_gradient_of_normalising_is_orthogonal(drawn):
    """The gradient is what is left of its weights beside the mean and the values."""
    weights, values, where = drawn
    gradient = np.asarray(normalise_gradient(weights, values, where))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[~where], 0)
    w, x = (a[where].astype(np.float64) for a in (weights, values))
    if x.size == 0 or x.std() < 0.1:
        return
    y = (x - x.mean()) / x.std()
    wanted = (w - w.mean() - y * (w * y).mean()) / x.std()
    assert_near(gradient[where], wanted, scale=100 * values.size / x.std(), tolerance=1e-5)
