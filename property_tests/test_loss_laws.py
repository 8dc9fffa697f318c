"""Laws of the losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vernal.core import (
    Categorical,
    explained_variance,
    mask_logits,
    policy_value_loss,
    ppo_loss,
    value_loss,
)

from .strategies import alike, arrays, assert_near, floats, masks, numbers

SHAPES = [(1,), (6,), (3, 2)]
jit_ppo_loss = jax.jit(ppo_loss)
jit_value_loss = jax.jit(value_loss)
jit_policy_value_loss = jax.jit(policy_value_loss)
jit_explained_variance = jax.jit(explained_variance)


@jax.jit
@jax.grad
def target_gradient(logits, legal, targets):
    zeros = jnp.zeros(len(logits))
    return policy_value_loss(mask_logits(logits, legal), targets, zeros, zeros)[0]


CLIPS = numbers(0.05, 0.5)
WEIGHTS = numbers(0, 10)


def log_ratios(shape):
    return arrays(shape, st.sampled_from([-20.0, 0.0]) | numbers(-1, 1))


def some(shape):
    return floats(shape, -100, 100)


# Log-ratios and advantages; then entropies, values, targets and old values too.
POLICIES = alike(SHAPES, log_ratios, some)
BATCHES = alike(SHAPES, log_ratios, some, some, some, some, some)


def mean(x):
    return np.mean(x, dtype=np.float64)


def surrogate(ratios, advantages, epsilon):
    return np.minimum(ratios * advantages, np.clip(ratios, 1 - epsilon, 1 + epsilon) * advantages)


def policy_loss(log_ratios, advantages, epsilon):
    zeros = np.zeros_like(log_ratios)
    loss, parts = jit_ppo_loss(
        log_ratios, zeros, advantages, zeros, zeros, zeros, clip_epsilon=epsilon
    )
    np.testing.assert_array_equal(loss, parts.policy)
    return loss


@given(POLICIES, CLIPS)
def test_the_policy_loss_is_the_clipped_surrogate(drawn, epsilon):
    """The policy loss is minus the mean of the smaller of plain and clipped surrogate."""
    log_ratios, advantages = drawn
    ratios = np.exp(np.float64(log_ratios))
    wanted = -mean(surrogate(ratios, advantages, epsilon))
    scale = mean((ratios + 1) * abs(advantages))
    assert_near(policy_loss(log_ratios, advantages, epsilon), wanted, scale=scale)


@given(POLICIES, CLIPS)
def test_clipping_is_pessimistic(drawn, epsilon):
    """Clipping never makes the policy look better than its ratios say."""
    log_ratios, advantages = drawn
    ratios = np.exp(np.float64(log_ratios))
    scale = mean((ratios + 1) * abs(advantages))
    unclipped = -mean(ratios * advantages)
    assert policy_loss(log_ratios, advantages, epsilon) >= unclipped - 1e-5 * scale


@jax.jit
def policy_gradient(log_probs, old_log_probs, advantages, epsilon):
    def loss(log_probs):
        zeros = jnp.zeros_like(log_probs)
        return ppo_loss(
            log_probs, old_log_probs, advantages, zeros, zeros, zeros, clip_epsilon=epsilon
        )[0]

    return jax.grad(loss)(log_probs)


FINITE = {
    dtype: numbers(float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max))
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)
}
losses_and_gradients = jax.jit(jax.value_and_grad(ppo_loss, argnums=range(7), has_aux=True))
KINDS = [((1,), jnp.float32), ((6,), jnp.float32), ((6,), jnp.float16), ((6,), jnp.bfloat16)]


@st.composite
def wild(draw, count, kinds=KINDS):
    """Arrays of any finite numbers of a dtype, and of some that are likelier to meet."""
    shape, dtype = draw(st.sampled_from(kinds))
    likely = st.sampled_from([-1e4, -100.0, -10.5, 0.0, 1.0])
    return [
        np.clip(x, float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)).astype(dtype)
        for x in (draw(arrays(shape, FINITE[dtype] | likely)) for _ in range(count))
    ]


@given(wild(7), numbers(0, 1e30) | CLIPS, numbers(0, 1), numbers(0, 1), numbers(0, 1e4))
def test_all_is_finite_for_finite_input(data, epsilon, value_weight, entropy_weight, value_epsilon):
    """However wild the data, loss, parts and gradients are finite, in every dtype."""
    results = losses_and_gradients(
        *data,
        clip_epsilon=epsilon,
        value_weight=value_weight,
        entropy_weight=entropy_weight,
        value_clip_epsilon=value_epsilon,
    )
    for result in jax.tree.leaves(results):
        assert np.isfinite(np.float64(result)).all()


@given(
    alike(
        SHAPES,
        lambda shape: floats(shape, -80, 80),
        lambda shape: arrays(shape, st.integers(-100, 100)),
    ),
    CLIPS,
)
def test_far_ratios_count_in_full_as_long_as_the_dtype_holds_them(drawn, epsilon):
    """Loss, divergence and gradient are those of the plain formula wherever it is finite."""
    log_ratios, advantages = drawn
    zeros = np.zeros_like(log_ratios)
    exact, ratios = np.float64(log_ratios), np.exp(np.float64(log_ratios))
    assume((abs(abs(ratios - 1) - epsilon) > 1e-5).all())
    _, parts = jit_ppo_loss(log_ratios, zeros, advantages, *(zeros,) * 3, clip_epsilon=epsilon)
    terms = surrogate(ratios, advantages, epsilon)
    assert_near(parts.policy, -mean(terms), scale=mean(abs(terms)) * 10)
    assert_near(parts.kl, mean(ratios - 1 - exact), scale=mean(ratios + abs(exact)) * 10)
    stopped = np.where(advantages > 0, ratios > 1 + epsilon, ratios < 1 - epsilon)
    wanted = np.where(stopped, 0, -ratios * advantages / advantages.size)
    gradient = policy_gradient(log_ratios, zeros, advantages, epsilon)
    assert_near(gradient, wanted, tolerance=1e-4)


@given(POLICIES, CLIPS)
def test_the_first_step_is_a_policy_gradient_step(drawn, epsilon):
    """At the old policy the loss is minus the mean advantage, its slope minus each one."""
    log_probs, advantages = drawn
    zeros = np.zeros_like(log_probs)
    scale = mean(abs(advantages))
    assert_near(policy_loss(zeros, advantages, epsilon), -mean(advantages), scale=scale)
    gradient = policy_gradient(log_probs, log_probs, advantages, epsilon)
    assert_near(gradient, -np.float64(advantages) / advantages.size)


@given(POLICIES, CLIPS)
def test_the_gradient_stops_at_the_clip(drawn, epsilon):
    """No gradient where an action is already enough likelier if good, or unlikelier if bad."""
    log_ratios, advantages = drawn
    ratios = np.exp(np.float64(log_ratios))
    assume((abs(abs(ratios - 1) - epsilon) > 1e-5).all())
    stopped = np.where(advantages > 0, ratios > 1 + epsilon, ratios < 1 - epsilon)
    wanted = np.where(stopped, 0, -ratios * advantages / advantages.size)
    zeros = np.zeros_like(log_ratios)
    assert_near(policy_gradient(log_ratios, zeros, advantages, epsilon), wanted)


@given(alike(SHAPES, lambda shape: floats(shape, 1, 1e4), some), CLIPS)
def test_no_ratio_is_too_far_off(drawn, epsilon):
    """However far a good action got likelier, or a bad one unlikelier, the gradient is 0."""
    distances, advantages = drawn
    log_ratios = np.copysign(distances, advantages)
    zeros = np.zeros_like(distances)
    assert np.isfinite(policy_loss(log_ratios, advantages, epsilon))
    gradient = policy_gradient(log_ratios, zeros, advantages, epsilon)
    np.testing.assert_array_equal(gradient, zeros)


@given(BATCHES, CLIPS, WEIGHTS, WEIGHTS)
def test_the_loss_is_the_weighted_sum_of_its_parts(drawn, epsilon, value_weight, entropy_weight):
    """Policy loss, plus weighted value loss, less weighted mean entropy, is all there is."""
    log_ratios, advantages, entropies, values, targets, _ = drawn
    loss, parts = jit_ppo_loss(
        log_ratios,
        np.zeros_like(log_ratios),
        advantages,
        entropies,
        values,
        targets,
        clip_epsilon=epsilon,
        value_weight=value_weight,
        entropy_weight=entropy_weight,
    )
    policy, value, entropy = map(np.float64, parts[:3])
    terms = [policy, value_weight * value, -entropy_weight * entropy]
    assert_near(loss, sum(terms), scale=sum(map(abs, terms)))
    assert_near(policy, policy_loss(log_ratios, advantages, epsilon), scale=mean(abs(advantages)))
    assert_near(entropy, mean(entropies), scale=mean(abs(entropies)))
    assert_near(value, jit_value_loss(values, targets))
    assert_near(parts.explained_variance, jit_explained_variance(values, targets), scale=1e4)


@given(BATCHES, st.randoms(use_true_random=False))
def test_the_order_of_a_batch_does_not_matter(drawn, random):
    """Permuting the samples leaves the loss and all its parts."""
    flat = [x.reshape(-1) for x in drawn]
    size = flat[0].size
    order = np.array(random.sample(range(size), size))
    compare_losses(flat, [x[order] for x in flat])


@given(BATCHES)
def test_repeating_a_batch_changes_nothing(drawn):
    """The loss and all its parts are means: of a batch twice they are the same."""
    compare_losses(drawn, [np.concatenate([x, x]) for x in drawn])


def compare_losses(batch, other):
    log_ratios, advantages, entropies, values, targets, old_values = batch
    scale = (1 + abs(entropies).max() + abs(advantages).max() * np.exp(abs(log_ratios).max())) + (
        abs(values) + abs(targets) + abs(old_values)
    ).max() ** 2
    results = []
    for ratios, *rest in (batch, other):
        old = rest.pop()
        results.append(
            jit_ppo_loss(ratios, 0 * ratios, *rest, old_values=old, value_clip_epsilon=1.0)
        )
    (loss, parts), (other_loss, other_parts) = results
    assert_near(loss, other_loss, scale=scale)
    assume(np.ptp(targets) > 1 or np.ptp(targets) == 0)
    assert_near(np.asarray(parts), np.asarray(other_parts), scale=scale)


@given(alike([(6,)], log_ratios, some, some, some, some, some))
def test_equal_minibatches_average_to_the_whole(drawn):
    """The mean loss of equal minibatches is the loss of all, in everything but its variance."""

    def loss_of(batch):
        ratios, *rest, old = batch
        loss, parts = jit_ppo_loss(
            ratios, 0 * ratios, *rest, old_values=old, value_clip_epsilon=1.0
        )
        return np.array([loss, *parts[:-1]], np.float64)

    halves = [loss_of([x[part] for x in drawn]) for part in (slice(3), slice(3, 6))]
    log_ratios, advantages, entropies, values, targets, old_values = map(abs, drawn)
    scale = (values + targets + old_values).max() ** 2 + entropies.max()
    scale += 1 + advantages.max() * np.exp(log_ratios.max())
    assert_near(loss_of(drawn), np.mean(halves, axis=0), scale=scale)


@given(POLICIES, CLIPS)
def test_diagnostics_of_the_ratios(drawn, epsilon):
    """KL is the mean of ratio - 1 - log ratio, at least 0; the clip fraction is a share."""
    log_ratios, _ = drawn
    exact = np.float64(log_ratios)
    ratios = np.exp(exact)
    assume((abs(abs(ratios - 1) - epsilon) > 1e-5).all())
    zeros = np.zeros_like(log_ratios)
    _, parts = jit_ppo_loss(log_ratios, zeros, *(zeros,) * 4, clip_epsilon=epsilon)
    assert_near(parts.kl, mean(np.expm1(exact) - exact), scale=mean(abs(exact)))
    assert parts.kl >= 0
    assert_near(parts.clip_fraction, mean(abs(ratios - 1) > epsilon))
    _, same = jit_ppo_loss(log_ratios, log_ratios, *(zeros,) * 4, clip_epsilon=epsilon)
    assert (same.kl, same.clip_fraction) == (0, 0)


@jax.jit
def loss_of_logits(logits, legal, actions, advantages):
    def loss(logits):
        policy = Categorical(mask_logits(logits, legal))
        log_probs = policy.log_prob(actions)
        zeros = jnp.zeros_like(advantages)
        old = jax.lax.stop_gradient(log_probs)
        return ppo_loss(log_probs, old, advantages, policy.entropy(), zeros, zeros)[0]

    return jax.value_and_grad(loss)(logits)


@given(alike([(3, 5), (1, 4)], floats, masks), st.integers(0, 4), numbers(-100, 100))
def test_a_masked_policy_learns_without_overflow(drawn, action, advantage):
    """However large the logits, loss and gradient are finite, and 0 at illegal actions."""
    logits, legal = drawn
    best = np.where(legal, logits, -np.inf).argsort(-1)[:, -1 - action % legal.shape[-1]]
    actions = np.where(legal[np.arange(len(legal)), best], best, legal.argmax(-1))
    advantages = np.full(len(legal), advantage, np.float32)
    loss, gradient = loss_of_logits(logits, legal, actions, advantages)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(np.asarray(gradient)[~legal], 0)


VALUES = alike(SHAPES, some, some, some)


@given(VALUES)
def test_the_value_loss_is_half_the_mean_square(drawn):
    """Without a clip the loss is half the mean squared error, and 0 for a perfect critic."""
    values, targets, _ = drawn
    wanted = mean((np.float64(values) - targets) ** 2) / 2
    assert_near(jit_value_loss(values, targets), wanted)
    assert_near(jit_value_loss(targets, values), wanted)
    assert jit_value_loss(values, values) == 0


@given(VALUES, numbers(0.125, 50))
def test_the_clipped_value_loss_is_the_larger_error(drawn, epsilon):
    """With a clip the larger error counts, of the value and of the value kept near its old."""
    values, targets, old = map(np.float64, drawn)
    moved = old + np.clip(values - old, -epsilon, epsilon)
    wanted = mean(np.maximum((values - targets) ** 2, (moved - targets) ** 2)) / 2
    got = jit_value_loss(*drawn, clip_epsilon=epsilon)
    scale = mean((abs(values) + abs(targets) + abs(old)) ** 2)
    assert_near(got, wanted, scale=scale)
    assert got >= jit_value_loss(*drawn[:2]) - 1e-5 * scale
    assert_near(jit_value_loss(*drawn, clip_epsilon=1e9), jit_value_loss(*drawn[:2]), scale=scale)


value_gradient = jax.jit(jax.grad(value_loss))


@given(VALUES, numbers(0.125, 50))
def test_gradients_of_the_value_loss(drawn, epsilon):
    """A value's slope is its error, and 0 where the clipped value is the worse one."""
    values, targets, old = map(np.float64, drawn)
    errors = values - targets
    scale = abs(values) + abs(targets)
    assert_near(value_gradient(*drawn[:2]), errors / errors.size, scale=scale)
    moved = old + np.clip(values - old, -epsilon, epsilon)
    assume((abs(abs(moved - targets) - abs(errors)) > 1e-3).all())
    stopped = abs(moved - targets) > abs(errors)
    wanted = np.where(stopped, 0, errors / errors.size)
    assert_near(value_gradient(*drawn, clip_epsilon=epsilon), wanted, scale=scale)


@given(BATCHES, numbers(0.125, 50))
def test_ppo_clips_values_as_the_value_loss_does(drawn, epsilon):
    """The value part is the value loss, with the same old values and the same clip."""
    log_ratios, advantages, entropies, values, targets, old = drawn
    _, parts = jit_ppo_loss(
        log_ratios,
        np.zeros_like(log_ratios),
        advantages,
        entropies,
        values,
        targets,
        old,
        value_clip_epsilon=epsilon,
    )
    assert_near(parts.value, jit_value_loss(values, targets, old, clip_epsilon=epsilon))


@given(st.sampled_from(SHAPES), st.booleans())
def test_clipping_takes_old_values_and_a_distance(shape, with_old):
    """Either without the other is refused, in a sentence that says which is missing."""
    x = jnp.zeros(shape)
    missing = "clip_epsilon" if with_old else "old_values"
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        value_loss(x, x, x if with_old else None, clip_epsilon=None if with_old else 0.2)


@given(VALUES)
def test_explained_variance_is_what_it_says(drawn):
    """It is 1 less the share of the targets' variance that the errors have; at most 1."""
    values, targets, _ = map(np.float64, drawn)
    assume(targets.std() > 1)
    unexplained = (targets - values).var() / targets.var()
    scale = 1 + (abs(targets) + abs(values)).max() ** 2 / targets.var()
    got = jit_explained_variance(*drawn[:2])
    assert_near(got, 1 - unexplained, scale=scale)
    assert got <= 1


@given(
    alike(SHAPES, *[lambda shape: arrays(shape, st.integers(-100, 100))] * 2),
    st.integers(-110, 120),
)
def test_explained_variance_knows_no_unit(drawn, exponent):
    """In a unit that rounds nothing, however large or small, not a bit changes."""
    values, targets = drawn
    scaled = jit_explained_variance(np.ldexp(values, exponent), np.ldexp(targets, exponent))
    np.testing.assert_array_equal(scaled, jit_explained_variance(values, targets))


@given(VALUES, numbers(-100, 100))
def test_limits_of_explained_variance(drawn, constant):
    """A perfect critic explains all variance, a constant none, and of no variance none is."""
    values, targets, _ = drawn
    assume(targets.std() > 1)
    same = np.full_like(targets, constant)
    assert jit_explained_variance(targets, targets) == 1
    assert_near(jit_explained_variance(same, targets), 0.0, scale=100)
    assert jit_explained_variance(values, same) == 0


@given(floats((6, 4), -50, 50), floats((6, 4), -50, 50), masks((6, 4)))
def test_no_policy_is_nearer_to_its_targets_than_the_targets(logits, wanted, legal):
    logits, wanted = (mask_logits(jnp.asarray(x), jnp.asarray(legal)) for x in (logits, wanted))
    targets, zeros = jax.nn.softmax(wanted), jnp.zeros(6)
    _, parts = jit_policy_value_loss(logits, targets, zeros, zeros)
    _, best = jit_policy_value_loss(wanted, targets, zeros, zeros)
    assert parts.kl >= -1e-4
    assert abs(best.kl) <= 1e-4


@jax.jit
def policy_value_results(logits, legal, wanted, values, value_targets):
    def loss(logits, values):
        targets = jax.nn.softmax(wanted)
        return policy_value_loss(mask_logits(logits, legal), targets, values, value_targets)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(logits, values)


@given(
    wild(2, [((6, 4), jnp.float32), ((6, 4), jnp.float16)]), masks((6, 4)), floats((6, 4), -50, 50)
)
def test_learning_from_a_search_is_finite_for_finite_input(data, legal, wanted):
    """However wild logits and values, and whatever illegal actions the targets want."""
    logits, numbers_ = data
    wanted, (values, targets) = wanted.astype(logits.dtype), numbers_.T[:2]
    for result in jax.tree.leaves(policy_value_results(logits, legal, wanted, values, targets)):
        assert np.isfinite(np.float64(result)).all()


@given(floats((6, 4), -50, 50), floats((6, 4), -50, 50), masks((6, 4)))
def test_masked_actions_draw_no_gradient_towards_targets(logits, wanted, legal):
    targets = jax.nn.softmax(mask_logits(jnp.asarray(wanted), jnp.asarray(legal)))
    gradient = target_gradient(jnp.asarray(logits), jnp.asarray(legal), targets)
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient)[~legal] == 0).all()
