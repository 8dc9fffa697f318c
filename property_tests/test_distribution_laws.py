"""Laws of the policies' distributions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vernal.core import Categorical, FactorisedCategorical, SquashedNormal, mask_logits

from .strategies import alike, arrays, assert_near, floats, masks, numbers

ROWS = [(1,), (5,), (2, 3)]
HEADS = [(1, 3), (3, 2, 2)]
SEEDS = st.integers(0, 2**31 - 1)
KEY_COUNT = 1024

log_prob = jax.jit(lambda logits, actions: Categorical(logits).log_prob(actions))
entropy = jax.jit(lambda logits: Categorical(logits).entropy())
kl = jax.jit(lambda logits, other: Categorical(logits).kl(Categorical(other)))
mode = jax.jit(lambda logits: Categorical(logits).mode())


@jax.jit
def samples(logits, seed):
    keys = jax.random.split(jax.random.key(seed), KEY_COUNT)
    return jax.vmap(Categorical(logits).sample)(keys)


@jax.jit
def all_log_probs(logits):
    """Log-probability of every action of every row, on a last axis."""
    actions = jnp.arange(logits.shape[-1])
    ask = jax.vmap(lambda a: Categorical(logits).log_prob(jnp.full(logits.shape[:-1], a)))
    return jnp.moveaxis(ask(actions), 0, -1)


def masked(logits, legal):
    return np.where(legal, logits, np.finfo(np.float32).min)


def exact_log_probs(logits, legal):
    """In float64; minus infinity for illegal actions."""
    logits = np.where(legal, logits.astype(np.float64), -np.inf)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def expectation(log_probs, of):
    """Mean over the actions that have a probability."""
    return np.sum(np.exp(log_probs) * np.where(np.isfinite(log_probs), of, 0), axis=-1)


@given(alike(ROWS, floats, masks))
def test_log_probs_are_those_of_the_legal_softmax(drawn):
    """A legal action's log-probability is its logit less the log of the legal sum."""
    logits, legal = drawn
    got = np.asarray(all_log_probs(masked(logits, legal)))
    wanted = exact_log_probs(logits, legal)
    assert_near(got[legal], wanted[legal], scale=abs(wanted[legal]) + 1)
    assert (got[~legal] < -1e30).all()
    assert np.isfinite(got).all()


@given(alike([(1, 5), (3, 2)], floats), st.integers(-6, 6) | st.integers(-(2**31), 2**31 - 1))
def test_an_action_that_does_not_exist_has_no_log_prob(drawn, action):
    """It is NaN below 0 and beyond the last action, in its own row only."""
    (logits,) = drawn
    actions = np.zeros(len(logits), np.int32)
    wanted = np.array(log_prob(logits, actions))
    actions[-1] = action
    exists = 0 <= action < logits.shape[-1]
    wanted[-1] = all_log_probs(logits)[-1, action] if exists else np.nan
    np.testing.assert_array_equal(log_prob(logits, actions), wanted)


@given(alike(ROWS, floats, masks))
def test_entropy_is_the_mean_surprise(drawn):
    """Entropy is minus the sum of probability times its log, over legal actions."""
    logits, legal = drawn
    log_probs = exact_log_probs(logits, legal)
    got = np.asarray(entropy(masked(logits, legal)))
    assert_near(got, expectation(log_probs, -log_probs), scale=1)
    assert (got >= 0).all()
    assert (got <= np.log(legal.sum(-1)) + 1e-6).all()


@given(alike(ROWS, masks), numbers(-1e4, 1e4))
def test_equal_logits_have_the_highest_entropy(drawn, logit):
    """With equal logits the entropy is the log of the number of legal actions."""
    (legal,) = drawn
    got = entropy(masked(np.full(legal.shape, logit, np.float32), legal))
    assert_near(got, np.log(legal.sum(-1)), scale=1)


@given(alike(ROWS, lambda shape: floats(shape, -10, 10), masks), numbers(-1e3, 1e3))
def test_a_constant_in_all_logits_changes_nothing(drawn, shift):
    """Logits matter only by their differences."""
    logits, legal = drawn
    one, other = masked(logits, legal), masked(logits + np.float32(shift), legal)
    scale = abs(shift) + 10
    assert_near(entropy(one), entropy(other), scale=scale)
    assert_near(kl(one, other), np.zeros(logits.shape[:-1]), scale=scale)
    probs, other_probs = np.exp(all_log_probs(one)), np.exp(all_log_probs(other))
    assert_near(probs, other_probs, scale=scale)


@given(alike(ROWS, floats, floats, masks))
def test_divergence_is_the_mean_log_ratio(drawn):
    """KL is the mean difference of log-probabilities; never negative, 0 to oneself."""
    logits, others, legal = drawn
    one, other = exact_log_probs(logits, legal), exact_log_probs(others, legal)
    with np.errstate(invalid="ignore"):
        wanted = expectation(one, one - other)
    scale = expectation(one, abs(one) + abs(other)) + 1
    got = np.asarray(kl(masked(logits, legal), masked(others, legal)))
    assert_near(got, wanted, scale=scale)
    assert (got >= -1e-5 * scale).all()
    np.testing.assert_array_equal(kl(masked(logits, legal), masked(logits, legal)), 0)


@given(alike(ROWS, floats, masks, masks))
def test_divergence_is_finite_whatever_is_illegal(drawn):
    """KL to a policy that forbids what this one does is huge, but a finite number."""
    logits, legal, other_legal = drawn
    got = np.asarray(kl(masked(logits, legal), masked(logits, other_legal)))
    assert np.isfinite(got).all()
    forbidden = (np.exp(exact_log_probs(logits, legal)) > 1e-3) & ~other_legal
    assert (got[forbidden.any(-1)] > 1e30).all()


@given(alike(ROWS, floats, masks), SEEDS)
def test_samples_and_mode_are_legal(drawn, seed):
    """No illegal action is sampled or is the mode, and the mode is the first best."""
    logits, legal = drawn
    actions = np.asarray(samples(masked(logits, legal), seed))
    assert np.take_along_axis(legal[None], actions[..., None], -1).all()
    best = np.where(legal, logits, -np.inf).argmax(-1)
    np.testing.assert_array_equal(mode(masked(logits, legal)), best)


@given(alike(ROWS, lambda shape: floats(shape, -2, 2), masks), SEEDS)
def test_samples_come_as_often_as_is_probable(drawn, seed):
    """Over many keys an action's share of the samples is its probability."""
    logits, legal = drawn
    probs = np.exp(exact_log_probs(logits, legal))
    actions = np.asarray(samples(masked(logits, legal), seed))
    shares = np.eye(logits.shape[-1])[actions].mean(0)
    # Seven standard deviations, and some counts more for the tails of rare actions.
    allowed = 7 * np.sqrt(probs * (1 - probs) / KEY_COUNT) + 10 / KEY_COUNT
    assert (abs(shares - probs) <= allowed).all()


@given(SEEDS)
def test_rows_and_keys_are_sampled_apart(seed):
    """Neither equal rows nor keys move in step."""
    actions = np.asarray(samples(np.zeros((8, 6), np.float32), seed))
    assert (actions != actions[:1]).any()
    assert (actions != actions[:, :1]).any()


@given(alike(ROWS, floats, masks))
def test_minus_infinity_masks_as_well(drawn):
    """A caller's own minus infinity gives what `mask_logits` gives."""
    logits, legal = drawn
    own = np.where(legal, logits, -np.inf).astype(np.float32)
    ours = masked(logits, legal)
    np.testing.assert_array_equal(entropy(own), entropy(ours))
    np.testing.assert_array_equal(all_log_probs(own), all_log_probs(ours))
    np.testing.assert_array_equal(kl(own, ours), kl(ours, ours))


@given(
    alike([(2, 3)], lambda shape: floats(shape, -100, 100), masks),
    st.sampled_from([np.float16, jnp.bfloat16]),
)
def test_half_precision_logits_are_widened(drawn, dtype):
    """From half precision the results are those of the same numbers in float32."""
    logits, legal = drawn
    half = np.asarray(mask_logits(jnp.asarray(logits, dtype), jnp.asarray(legal)))
    same = masked(half.astype(np.float32), legal)
    for quantity in (entropy, all_log_probs, lambda x: kl(x, x)):
        assert quantity(half).dtype == np.float32
    assert_near(entropy(half), entropy(same))
    np.testing.assert_array_equal(np.exp(all_log_probs(half)), np.exp(all_log_probs(same)))


@jax.jit
def gradients(logits, others, legal, actions):
    def mask(x):
        return mask_logits(x, legal)

    def total_log_prob(x):
        return Categorical(mask(x)).log_prob(actions).sum()

    def total_entropy(x):
        return Categorical(mask(x)).entropy().sum()

    def total_kl(x):
        return Categorical(mask(x)).kl(Categorical(mask(others))).sum()

    return [jax.grad(f)(logits) for f in (total_log_prob, total_entropy, total_kl)]


@given(alike(ROWS, floats, floats, masks), SEEDS)
def test_gradients_of_a_categorical(drawn, seed):
    """Gradients are the textbook's at legal logits, and exactly 0 at illegal ones."""
    logits, others, legal = drawn
    actions = np.asarray(samples(masked(logits, legal), seed))[0]
    one, other = exact_log_probs(logits, legal), exact_log_probs(others, legal)
    probs = np.exp(one)
    with np.errstate(invalid="ignore"):
        surprises = np.where(legal, -one, 0)
        ratios = np.where(legal, one - other, 0)
    taken = np.eye(logits.shape[-1])[actions]

    def centred(x):
        return probs * (x - (probs * x).sum(-1, keepdims=True))

    wanted = [taken - probs, centred(surprises), centred(ratios)]
    got = gradients(logits, others, legal, actions)
    sizes = [1, abs(surprises).max() + 1, abs(ratios).max() + 1]
    for gradient, exact, size in zip(got, wanted, sizes, strict=True):
        assert_near(gradient, exact, scale=size)
        np.testing.assert_array_equal(np.asarray(gradient)[~legal], 0)


@jax.jit
def factorised(logits, others, seed):
    policy = FactorisedCategorical(logits)
    actions = policy.sample(jax.random.key(seed))
    return (
        actions,
        policy.log_prob(actions),
        policy.entropy(),
        policy.kl(FactorisedCategorical(others)),
        policy.mode(),
    )


@given(alike(HEADS, floats, floats, masks), SEEDS)
def test_heads_add_up(drawn, seed):
    """Log-probability, entropy and KL of several heads are sums of those of each."""
    logits, others, legal = drawn
    logits, others = masked(logits, legal), masked(others, legal)
    actions, joint_log_prob, joint_entropy, joint_kl, joint_mode = factorised(logits, others, seed)
    assert np.take_along_axis(legal, np.asarray(actions)[..., None], -1).all()
    np.testing.assert_array_equal(joint_mode, mode(logits))
    for joint, heads in [
        (joint_log_prob, log_prob(logits, actions)),
        (joint_entropy, entropy(logits)),
        (joint_kl, kl(logits, others)),
    ]:
        exact = np.float64(heads)
        assert_near(joint, exact.sum(-1), scale=abs(exact).sum(-1) + 1)


joint_log_prob = jax.jit(lambda logits, actions: FactorisedCategorical(logits).log_prob(actions))


@given(alike([(1, 3), (2, 4)], floats, masks))
def test_joint_actions_have_all_the_probability(drawn):
    """The probabilities of all combinations of the heads' actions sum to 1."""
    logits, legal = drawn
    heads, actions = logits.shape
    joint = np.array(list(itertools.product(range(actions), repeat=heads)), np.int32)
    rows = np.broadcast_to(masked(logits, legal), (len(joint), heads, actions))
    assert_near(np.exp(np.float64(joint_log_prob(rows, joint))).sum(), 1.0)


VECTORS = [(1,), (3, 2)]


def means(shape):
    return floats(shape, -2, 2)


def stds(shape):
    return floats(shape, 0.125, 2)


normal_log_prob = jax.jit(lambda m, s, actions: SquashedNormal(m, s).log_prob(actions))
normal_entropy = jax.jit(lambda m, s: SquashedNormal(m, s).entropy())
normal_kl = jax.jit(lambda m, s, n, t: SquashedNormal(m, s).kl(SquashedNormal(n, t)))
normal_mode = jax.jit(lambda m, s: SquashedNormal(m, s).mode())


@jax.jit
def normal_sample(m, s, seed):
    return SquashedNormal(m, s).sample(jax.random.key(seed))


def exact_density(x, m, s):
    """Log-density of tanh(x), x normal, coordinate by coordinate, in float64."""
    x, m, s = (np.asarray(a, np.float64) for a in (x, m, s))
    normal = -0.5 * ((x - m) / s) ** 2 - np.log(s) - 0.5 * np.log(2 * np.pi)
    return normal - 2 * (np.log(2) - np.logaddexp(x, -x))


@given(alike(VECTORS, means, stds, lambda shape: floats(shape, -0.9999, 0.9999)))
def test_density_of_a_squashed_normal(drawn):
    """Its log-density is the normal's at the unsquashed action, less the log of the slope."""
    m, s, actions = drawn
    x = np.arctanh(actions.astype(np.float64))
    density = exact_density(x, m, s)
    scale = (abs(density) + ((abs(x) + abs(m)) / s) ** 2 + 1).sum(-1)
    assert_near(normal_log_prob(m, s, actions), density.sum(-1), scale=scale)


GRID = np.linspace(-8, 8, 2001)  # in standard deviations


@given(numbers(-1, 1), numbers(0.125, 0.75))
def test_a_squashed_normal_has_all_the_density(m, s):
    """The density integrates to 1 over the interval of actions."""
    x = m + s * GRID
    x = x[abs(x) < 7]  # nearer to the bounds float32 has no actions
    actions = np.tanh(x).astype(np.float32)
    rows = np.ones((len(GRID), 1), np.float32)
    padded = np.zeros_like(rows)
    padded[: len(x), 0] = actions
    density = np.exp(np.float64(normal_log_prob(m * rows, s * rows, padded)))[: len(x)]
    slope = 1 - actions.astype(np.float64) ** 2
    assert_near(np.trapezoid(density * slope, np.arctanh(np.float64(actions))), 1.0, tolerance=3e-3)


@given(alike(VECTORS, means, stds))
def test_entropy_of_a_squashed_normal(drawn):
    """Its entropy is minus the mean log-density, by integration."""
    m, s = drawn
    x = m[..., None] + s[..., None] * GRID.astype(np.float64)
    weights = np.exp(-(GRID**2) / 2) / np.sqrt(2 * np.pi)
    surprise = -exact_density(x, m[..., None], s[..., None])
    wanted = np.trapezoid(weights * surprise, GRID, axis=-1).sum(-1)
    assert (abs(normal_entropy(m, s) - wanted) < 1e-3 * m.shape[-1]).all()


@given(alike(VECTORS, means, stds, means, stds))
def test_divergence_of_squashed_normals(drawn):
    """KL is the mean difference of log-densities by integration; 0 only to oneself."""
    m, s, n, t = drawn
    x = m[..., None] + s[..., None] * GRID.astype(np.float64)
    weights = np.exp(-(GRID**2) / 2) / np.sqrt(2 * np.pi)
    ratio = exact_density(x, m[..., None], s[..., None]) - exact_density(
        x, n[..., None], t[..., None]
    )
    wanted = np.trapezoid(weights * ratio, GRID, axis=-1).sum(-1)
    got = np.asarray(normal_kl(m, s, n, t))
    assert_near(got, wanted, scale=wanted + m.shape[-1])
    assert (got >= -1e-5).all()
    np.testing.assert_array_equal(normal_kl(m, s, m, s), 0)


@given(alike(VECTORS, means, stds), SEEDS)
def test_samples_of_a_squashed_normal_are_moved_noise(drawn, seed):
    """A sample is the squashed mean plus deviation times a noise that is the key's own."""
    m, s = drawn
    noise = np.arctanh(np.float64(normal_sample(np.zeros_like(m), np.full_like(s, 0.5), seed)))
    assert_near(normal_sample(m, s, seed), np.tanh(m + s * noise / 0.5), scale=1, tolerance=1e-4)
    assert_near(normal_sample(m, np.zeros_like(s), seed), normal_mode(m, s), scale=1)
    assert_near(normal_mode(m, s), np.tanh(np.float64(m)), scale=1)


@given(alike(VECTORS, means, stds, lambda shape: floats(shape, -0.999, 0.999)))
def test_a_squashed_normal_mirrors(drawn):
    """Mirroring the mean and the action changes no density and no entropy."""
    m, s, actions = drawn
    mirrored = normal_log_prob(-m, s, -actions)
    assert_near(normal_log_prob(m, s, actions), mirrored, scale=abs(np.asarray(mirrored)) + 100)
    assert_near(normal_entropy(m, s), normal_entropy(-m, s), scale=10)


normal_gradients = jax.jit(
    jax.grad(lambda m, s, actions: SquashedNormal(m, s).log_prob(actions).sum(), argnums=(0, 1))
)
entropy_gradients = jax.jit(
    jax.grad(lambda m, s: SquashedNormal(m, s).entropy().sum(), argnums=(0, 1))
)


@given(
    alike(
        VECTORS,
        lambda shape: floats(shape, -50, 50),
        lambda shape: floats(shape, 0.015625, 50),
        lambda shape: arrays(shape, st.sampled_from([-1.0, 1.0]) | numbers(-1, 1)),
    )
)
def test_a_squashed_normal_is_finite_up_to_its_bounds(drawn):
    """At the very bounds of the actions, and for any parameters, nothing overflows."""
    m, s, actions = drawn
    assert np.isfinite(normal_log_prob(m, s, actions)).all()
    assert np.isfinite(normal_entropy(m, s)).all()
    results = (*normal_gradients(m, s, actions), *entropy_gradients(m, s))
    assert all(np.isfinite(gradient).all() for gradient in results)


@given(alike(VECTORS, means, stds, lambda shape: floats(shape, -0.99, 0.99)))
def test_gradients_of_a_squashed_normal(drawn):
    """The log-density's slopes are the normal's: squashing does not depend on parameters."""
    m, s, actions = drawn
    wide_m, wide_s = np.float64(m), np.float64(s)
    z = (np.arctanh(np.float64(actions)) - wide_m) / wide_s
    to_means, to_stds = normal_gradients(m, s, actions)
    scale = ((abs(np.arctanh(np.float64(actions))) + abs(m)) / s + 1) ** 2 / s
    assert_near(to_means, z / wide_s, scale=scale)
    assert_near(to_stds, (z**2 - 1) / wide_s, scale=scale)
