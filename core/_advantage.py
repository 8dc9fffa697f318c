"""Advantages and returns of a stored rollout.

One convention for all of them: entry `t` belongs to the step that left state `s[t]`.
`rewards[t]` is what that step paid, `discounts[t]` is gamma (0 where it reached a
terminal state), and `next_values[t]` is V of the state it arrived in, read before any
automatic reset. `resets[t]` is true where row `t + 1` starts a new episode, be it after
a terminal state or after a time limit. A rollout may end anywhere: its last row always
bootstraps from `next_values`.

What has weight 0 counts for nothing, in values and in gradients, even if it is NaN or infinite:
what lies behind a discount of 0, behind a reset, or behind a horizon that `lambda_` rules out.
Half precision is computed in float32 and rounded at the end.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, ScalarLike

from ._arrays import power_of_two, weigh, widen
from ._checks import checked
from ._ratios import bound_log_ratios


@checked
def gae(
    rewards: Float[Array, " T *batch"],
    discounts: Float[Array, " T *batch"],
    values: Float[Array, " T *batch"],
    next_values: Float[Array, " T *batch"],
    resets: Bool[Array, " T *batch"],
    *,
    lambda_: ScalarLike,
) -> Float[Array, " T *batch"]:
    """Advantage of each action, blended over horizons by `lambda_`.

    Walks the rollout from its last step to its first:

        delta[t] = rewards[t] + discounts[t] * next_values[t] - values[t]
        adv[t]   = delta[t] + discounts[t] * lambda_ * adv[t + 1]

    where the second term is dropped on the last step and wherever `resets[t]` is true.
    This is the estimator of section 3 of Schulman et al. 2016,
    https://arxiv.org/abs/1506.02438, with a per-step discount instead of one gamma.

    Args:
        rewards: reward paid by each step, in environment units.
        discounts: gamma, or 0 where the step reached a terminal state.
        values: V(s[t]) under the critic that collected the data.
        next_values: V of the arrived-in state, read before any automatic reset. Do not
            pass `values[1:]`: after a time limit that row is a new episode's start.
        resets: true where row `t + 1` starts a new episode, for either reason.
        lambda_: horizon blend in [0, 1]; 0 is one-step TD, 1 is Monte Carlo.

    Returns:
        Advantages in the units and layout of `rewards`. Gradients flow through `values`
        and `next_values`; stop them in the caller if they are targets.

    Raises:
        TypeError: shapes or dtypes disagree.
        ValueError: the rollout has no step.

    Example:
        >>> import jax.numpy as jnp
        >>> one, no = jnp.ones(2), jnp.zeros(2, bool)
        >>> gae(one, one, 0 * one, 0 * one, no, lambda_=1.0).tolist()
        [2.0, 1.0]
    """
    dtype = jnp.result_type(rewards, discounts, values, next_values)
    rewards, discounts, values, next_values = map(widen, (rewards, discounts, values, next_values))
    deltas = rewards + weigh(discounts, next_values) - values
    decays = jnp.where(resets, 0, discounts * _like(rewards, lambda_))
    return _sum_backwards(deltas, decays).astype(dtype)


@checked
def lambda_returns(
    rewards: Float[Array, " T *batch"],
    discounts: Float[Array, " T *batch"],
    next_values: Float[Array, " T *batch"],
    resets: Bool[Array, " T *batch"],
    *,
    lambda_: ScalarLike,
) -> Float[Array, " T *batch"]:
    """Return of each state, bootstrapped at every horizon with weight by `lambda_`.

        G[t] = rewards[t] + discounts[t] * ((1 - lambda_) * next_values[t] + lambda_ * G[t + 1])

    where `next_values[t]` stands for `G[t + 1]` on the last step and wherever `resets[t]`
    is true. The lambda-return of section 12.1 of Sutton and Barto 2018,
    http://incompleteideas.net/book/the-book-2nd.html.

    Args:
        rewards: reward paid by each step, in environment units.
        discounts: gamma, or 0 where the step reached a terminal state.
        next_values: V of the arrived-in state, read before any automatic reset.
        resets: true where row `t + 1` starts a new episode, for either reason.
        lambda_: horizon blend in [0, 1]; 0 is one-step TD, 1 is Monte Carlo.

    Returns:
        Returns in the units and layout of `rewards`.

    Raises:
        TypeError: shapes or dtypes disagree.
        ValueError: the rollout has no step.

    Example:
        >>> import jax.numpy as jnp
        >>> one, no = jnp.ones(2), jnp.zeros(2, bool)
        >>> lambda_returns(one, one, 4 * one, no, lambda_=0.5).tolist()
        [5.5, 5.0]
    """
    dtype = jnp.result_type(rewards, discounts, next_values)
    rewards, discounts, next_values = map(widen, (rewards, discounts, next_values))
    lambda_ = _like(rewards, lambda_)
    cut = resets.at[-1:].set(True)
    terms = rewards + weigh(discounts * jnp.where(cut, 1, 1 - lambda_), next_values)
    return _sum_backwards(terms, jnp.where(cut, 0, discounts * lambda_)).astype(dtype)


@checked
def discounted_returns(
    rewards: Float[Array, " T *batch"],
    discounts: Float[Array, " T *batch"],
    next_values: Float[Array, " T *batch"],
    resets: Bool[Array, " T *batch"],
) -> Float[Array, " T *batch"]:
    """Discounted sum of rewards to the episode's end, or to the rollout's.

        G[t] = rewards[t] + discounts[t] * G[t + 1]

    where `next_values[t]` stands for `G[t + 1]` on the last step and wherever `resets[t]`
    is true (equation 3.9 of Sutton and Barto 2018,
    http://incompleteideas.net/book/the-book-2nd.html). Pass zeros as `next_values` for
    returns without bootstrap.

    Args:
        rewards: reward paid by each step, in environment units.
        discounts: gamma, or 0 where the step reached a terminal state.
        next_values: V of the arrived-in state, read before any automatic reset.
        resets: true where row `t + 1` starts a new episode, for either reason.

    Returns:
        Returns in the units and layout of `rewards`.

    Raises:
        TypeError: shapes or dtypes disagree.
        ValueError: the rollout has no step.

    Example:
        >>> import jax.numpy as jnp
        >>> one, no = jnp.ones(3), jnp.zeros(3, bool)
        >>> discounted_returns(one, 0.5 * one, 0 * one, no).tolist()
        [1.75, 1.5, 1.0]
    """
    return lambda_returns(rewards, discounts, next_values, resets, lambda_=1.0)


@checked
def n_step_returns(
    rewards: Float[Array, " T *batch"],
    discounts: Float[Array, " T *batch"],
    next_values: Float[Array, " T *batch"],
    resets: Bool[Array, " T *batch"],
    *,
    n: int,
) -> Float[Array, " T *batch"]:
    """Sum of up to `n` discounted rewards, then the value of the state reached.

        G1[t] = rewards[t] + discounts[t] * next_values[t]
        Gk[t] = rewards[t] + discounts[t] * G(k-1)[t + 1]

    where `next_values[t]` stands for `G(k-1)[t + 1]` on the last step and wherever
    `resets[t]` is true: near an end the sum is shorter (equation 7.1 of Sutton and Barto
    2018, http://incompleteideas.net/book/the-book-2nd.html).

    Args:
        rewards: reward paid by each step, in environment units.
        discounts: gamma, or 0 where the step reached a terminal state.
        next_values: V of the arrived-in state, read before any automatic reset.
        resets: true where row `t + 1` starts a new episode, for either reason.
        n: number of steps, at least 1.

    Returns:
        Returns in the units and layout of `rewards`.

    Raises:
        TypeError: shapes or dtypes disagree.
        ValueError: `n` is below 1, or the rollout has no step.

    Example:
        >>> import jax.numpy as jnp
        >>> one, no = jnp.ones(3), jnp.zeros(3, bool)
        >>> n_step_returns(one, one, 10 * one, no, n=2).tolist()
        [12.0, 12.0, 11.0]
    """
    if n < 1:
        raise ValueError(f"n_step_returns(): n is {n}, but at least one step is needed.")
    _require_steps(rewards)
    dtype = jnp.result_type(rewards, discounts, next_values)
    rewards, discounts, next_values = map(widen, (rewards, discounts, next_values))
    cut = resets.at[-1:].set(True)
    one_step = rewards + weigh(discounts, next_values)
    carry = (one_step, rewards, discounts, next_values, cut)
    return jax.lax.fori_loop(1, min(n, len(rewards)), _lengthen, carry)[0].astype(dtype)


class VTrace(NamedTuple):
    """What `vtrace` gives.

    Attributes:
        targets: what the critic should learn, V-trace's `v[t]`.
        advantages: weights of the policy gradient, already times the clipped ratio.
    """

    targets: Float[Array, " T *batch"]
    advantages: Float[Array, " T *batch"]


@checked
def vtrace(
    rewards: Float[Array, " T *batch"],
    discounts: Float[Array, " T *batch"],
    values: Float[Array, " T *batch"],
    next_values: Float[Array, " T *batch"],
    resets: Bool[Array, " T *batch"],
    log_ratios: Float[Array, " T *batch"],
    *,
    lambda_: ScalarLike = 1.0,
    rho_clip: ScalarLike = 1.0,
    c_clip: ScalarLike = 1.0,
    advantage_rho_clip: ScalarLike = 1.0,
) -> VTrace:
    """Value targets and advantages from data of an older policy.

    With `rho = min(rho_clip, exp(log_ratios))`, `c = lambda_ * min(c_clip, exp(log_ratios))`:

        delta[t] = rho[t] * (rewards[t] + discounts[t] * next_values[t] - values[t])
        error[t] = delta[t] + discounts[t] * c[t] * error[t + 1]
        target[t] = values[t] + error[t]

    where the second term of the error is dropped on the last step and wherever
    `resets[t]` is true. The advantage is
    `min(advantage_rho_clip, ratio) * (rewards + discounts * bootstrap - values)` whose
    bootstrap blends `next_values[t]` with the next state's target by `lambda_`. Espeholt et
    al. 2018, section 4, https://arxiv.org/abs/1802.01561.

    Args:
        rewards: reward paid by each step, in environment units.
        discounts: gamma, or 0 where the step reached a terminal state.
        values: V(s[t]) under the critic being trained.
        next_values: V of the arrived-in state, read before any automatic reset.
        resets: true where row `t + 1` starts a new episode, for either reason.
        log_ratios: log of new over old probability of each action, in nats.
        lambda_: horizon blend in [0, 1].
        rho_clip: upper bound of the ratio that weights a step's own error.
        c_clip: upper bound of the ratio that weights later errors.
        advantage_rho_clip: upper bound of the ratio in the advantages.

    Returns:
        Targets and advantages in the units and layout of `rewards`.

    Raises:
        TypeError: shapes or dtypes disagree.
        ValueError: the rollout has no step.

    Example:
        >>> import jax.numpy as jnp
        >>> one, no = jnp.ones(2), jnp.zeros(2, bool)
        >>> on_policy = vtrace(one, one, 0 * one, 0 * one, no, 0 * one)
        >>> on_policy.targets.tolist()
        [2.0, 1.0]
    """
    dtype = jnp.result_type(rewards, discounts, values, next_values, log_ratios)
    rewards, discounts, values, next_values = map(widen, (rewards, discounts, values, next_values))
    ratios = jnp.exp(bound_log_ratios(widen(log_ratios), log_ratios.dtype))
    lambda_ = _like(rewards, lambda_)
    traces = lambda_ * jnp.minimum(_like(rewards, c_clip), ratios)
    deltas = rewards + weigh(discounts, next_values) - values
    weighted = jnp.minimum(_like(rewards, rho_clip), ratios) * deltas
    errors = _sum_backwards(weighted, jnp.where(resets, 0, discounts * traces))
    # The next state's target minus its value; nothing is known beyond a cut.
    next_errors = jnp.where(resets.at[-1:].set(True), 0, jnp.roll(errors, -1, axis=0))
    next_targets = next_values + weigh(lambda_, next_errors)
    advantages = rewards + weigh(discounts, next_targets) - values
    advantages = jnp.minimum(_like(rewards, advantage_rho_clip), ratios) * advantages
    return VTrace((values + errors).astype(dtype), advantages.astype(dtype))


@checked
def normalise(
    values: Float[Array, " *shape"],
    where: Bool[Array, " *shape"] | None = None,
    *,
    epsilon: ScalarLike = 1e-8,
) -> Float[Array, " *shape"]:
    """Shift and scale to mean 0 and standard deviation 1.

        (values - mean) / (std + epsilon)

    with the population's standard deviation (division by `n`, NumPy's `ddof=0`), as
    PPO's advantages are commonly treated: Andrychowicz et al. 2021, choice C67,
    https://arxiv.org/abs/2006.05990. Equal values become zeros.

    Args:
        values: any shape; statistics run over all entries.
        where: entries that count; the others become 0. All by default.
        epsilon: added to the standard deviation, in the units of `values`.

    Returns:
        Numbers without a unit, of the same shape and dtype.

    Raises:
        TypeError: shapes or dtypes disagree.

    Example:
        >>> import jax.numpy as jnp
        >>> [round(x, 3) for x in normalise(jnp.arange(4.0)).tolist()]
        [-1.342, -0.447, 0.447, 1.342]
    """
    if where is None:
        where = jnp.ones(values.shape, bool)
    unit, shifted = _from_the_largest(widen(values), where)
    centred = jnp.where(where, shifted - jnp.mean(shifted, where=where), 0)
    variance = jnp.mean(centred**2, where=where)
    # The root's slope at 0 is infinite: its gradient would be NaN.
    std = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)
    divisor = (unit * std + epsilon) / unit
    return (centred / jnp.where(divisor > 0, divisor, 1)).astype(values.dtype)


@functools.partial(jax.jit, inline=True)
def _from_the_largest(
    values: Float[Array, " *shape"], where: Bool[Array, " *shape"]
) -> tuple[Float[Array, ""], Float[Array, " *shape"]]:
    """Values in a unit of their own size, less the largest; and that unit.

    The squares of the largest and of the smallest numbers fit, and equal ones are exactly 0:
    seen from their rounded mean they would not be.
    """
    unit = power_of_two(jnp.max(jnp.abs(values), where=where, initial=0))
    largest = jax.lax.stop_gradient(jnp.max(values, where=where, initial=-jnp.inf))
    return unit, jnp.where(where, values * (1 / unit) - largest * (1 / unit), 0)


def _like(array: Array, scalar: ScalarLike) -> Array:
    """The scalar in the array's dtype: a float32 scalar must not widen bfloat16 data."""
    return jnp.asarray(scalar, array.dtype)


def _require_steps(rewards: Array) -> None:
    if rewards.shape[0] == 0:
        raise ValueError("the rollout has no step (T is 0); give at least one.")


def _sum_backwards(
    terms: Float[Array, " T *batch"], decays: Float[Array, " T *batch"]
) -> Float[Array, " T *batch"]:
    """Solve `sums[t] = terms[t] + decays[t] * sums[t + 1]` from a zero behind the end.

    Sequential on purpose: on a CPU it is 1 to 20 times faster than an associative scan at
    every size tried, from 5 x 1 to 100,000 x 1 and 128 x 2,048 (`benchmarks/core.py`).
    """
    _require_steps(terms)
    # Loop bodies are module-level functions: a closure would be compiled at each eager call.
    nothing = jnp.zeros_like(jax.lax.index_in_dim(terms, 0, keepdims=False))
    return jax.lax.scan(_backup, nothing, (terms, decays), reverse=True)[1]


def _backup(later: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
    term, decay = step
    total = term + weigh(decay, later)
    return total, total


_Carry = tuple[Array, Array, Array, Array, Array]


def _lengthen(_: ScalarLike, carry: _Carry) -> _Carry:
    shorter, rewards, discounts, next_values, cut = carry
    later = jnp.where(cut, next_values, jnp.roll(shorter, -1, axis=0))
    return rewards + weigh(discounts, later), rewards, discounts, next_values, cut
