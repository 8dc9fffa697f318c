"""How good a policy is: whole episodes, each counted once, on instances of a key of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped
from jumanji.environments import Maze

from vernal.core._arrays import where

from .actions import make_action_codec
from .environments import Environment, read_outcome
from .mazes import shortest_path_length
from .mesh import keys_by_index

Act = Callable[..., Any]

# Steps after which an episode is left; the longest of Jumanji's games end long before.
MOST_STEPS = 10_000


class Episodes(NamedTuple):
    """Outcomes of `N` whole episodes.

    Attributes:
        returns: sum of rewards of each, agents added up.
        lengths: number of steps of each.
        cut: whether it was left before its end, for it took too many steps; `False` for none.
    """

    returns: Float[Array, " N"]
    lengths: Int[Array, " N"]
    cut: Bool[Array, " N"] | bool = False


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval, by the normal approximation."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        """As `0.950 ± 0.013`."""
        return f"{self.mean:.3f} ± {self.half_width:.3f}"


def play(
    environment: Environment,
    act: Act,
    key: PRNGKeyArray,
    episodes: int,
    *,
    max_steps: int = MOST_STEPS,
    sees_states: bool = False,
) -> Episodes:
    """Play whole episodes side by side, each from its start to its own end.

    No episode is counted twice, so short episodes weigh no more than long ones. A finished episode
    is never stepped: its place in the batch goes back to its first state.

    Args:
        environment: one environment, without automatic reset.
        act: `(key, observation) -> action` for one observation.
        key: consumed; instance `n` depends on it and on `n` alone.
        episodes: how many.
        max_steps: after so many steps an episode is left where it is, and marked as cut.
        sees_states: whether `act` is `(key, observation, state) -> action`, for one that
            searches from the environment's own state.

    Returns:
        Their returns and lengths, and which of them were cut.

    Raises:
        ValueError: `episodes` or `max_steps` is below 1.

    Example:
        >>> import jax
        >>> from vernal.adapters.registry import make_environment
        >>> maze = make_environment("maze-easy")
        >>> outcome = play(maze, make_random_policy(maze), jax.random.key(0), episodes=8)
        >>> bool((outcome.lengths <= 100).all())
        True
    """
    for name, count in (("episodes", episodes), ("max_steps", max_steps)):
        if count < 1:
            raise ValueError(f"{name} is {count}; give at least 1.")
    reset_key, act_key = jax.random.split(key)
    first_states, timesteps = jax.vmap(environment.reset)(
        keys_by_index(reset_key, jnp.arange(episodes))
    )
    first_observations = timesteps.observation

    def goes_on(carry: Any) -> Bool[Array, ""]:
        _, _, running, outcome, _ = carry
        return jnp.any(running) & (jnp.max(outcome.lengths) < max_steps)

    def walk(carry: Any) -> Any:
        states, observations, running, outcome, key = carry
        key, step_key = jax.random.split(key)
        seen = (observations, states) if sees_states else (observations,)
        actions = jax.vmap(act)(jax.random.split(step_key, episodes), *seen)
        states, timesteps = jax.vmap(environment.step)(states, actions)
        rewards = jax.vmap(read_outcome)(timesteps).reward
        outcome = outcome._replace(
            returns=outcome.returns + jnp.where(running, rewards, 0),
            lengths=outcome.lengths + running.astype(int),
        )
        running = running & ~timesteps.last()
        # A step from a finished state may do anything, even never return.
        states = where(running, states, first_states)
        observations = where(running, timesteps.observation, first_observations)
        return states, observations, running, outcome, key

    running = jnp.ones(episodes, bool)
    nothing = Episodes(jnp.zeros(episodes), jnp.zeros(episodes, int), ~running)
    carry = (first_states, first_observations, running, nothing, act_key)
    _, _, running, outcome, _ = jax.lax.while_loop(goes_on, walk, carry)
    return outcome._replace(cut=running)


def make_random_policy(environment: Environment) -> Act:
    """Uniform over the legal actions.

    Args:
        environment: whose actions to draw.

    Returns:
        `(key, observation) -> action`.

    Example:
        >>> import jax, jumanji
        >>> policy = make_random_policy(jumanji.make("Snake-v1"))
        >>> _, timestep = jumanji.make("Snake-v1").reset(jax.random.key(0))
        >>> bool(timestep.observation.action_mask[policy(jax.random.key(1), timestep.observation)])
        True
    """
    codec = make_action_codec(environment)

    def act(key: PRNGKeyArray, observation: Any) -> Any:
        if codec.kind == "normal":  # A normal squashed by tanh is uniform at no deviation.
            uniform = jax.random.uniform(key, codec.output_shape[1:], minval=-1, maxval=1)
            return codec.to_environment(uniform)
        policy = codec.distribution(jnp.zeros(codec.output_shape), codec.legal(observation))
        return codec.to_environment(policy.sample(key))

    return act


def summarise(environment: Any, key: PRNGKeyArray, episodes: Episodes) -> dict[str, str]:
    """What to print of some episodes.

    In a maze: how many reached the goal, and how much longer their ways were than the shortest.
    Where episodes were cut: how many; they count with what they had by then.

    Args:
        environment: where they were played.
        key: the one they were played with.
        episodes: their outcomes.

    Returns:
        Column titles and texts.

    Example:
        >>> import jax
        >>> from vernal.adapters.registry import make_environment
        >>> maze, key = make_environment("maze-easy"), jax.random.key(0)
        >>> outcome = Episodes(np.array([1.0, 0.0]), np.array([27, 100]))
        >>> summarise(maze, key, outcome)["steps / shortest"]
        '1.500'
    """
    returns, lengths = np.asarray(episodes.returns), np.asarray(episodes.lengths)
    summary = {
        "return": str(confidence_interval(returns)),
        "length": str(confidence_interval(lengths)),
    }
    if np.any(episodes.cut):
        summary["cut"] = f"{np.sum(episodes.cut)} of {len(returns)}"
    if isinstance(environment, Maze):
        solved = returns > 0
        states, _ = jax.vmap(environment.reset)(instance_keys(key, len(returns)))
        starts = zip(*map(np.asarray, states.agent_position), strict=True)
        goals = zip(*map(np.asarray, states.target_position), strict=True)
        mazes = zip(np.asarray(states.walls), starts, goals, strict=True)
        shortest = np.array([shortest_path_length(*maze) for maze in mazes])
        ratio = lengths[solved].sum() / shortest[solved].sum() if solved.any() else None
        summary["solved"] = str(confidence_interval(solved))
        summary["shortest path"] = f"{shortest.mean():.1f}"
        summary["steps / shortest"] = "none solved" if ratio is None else f"{ratio:.3f}"
    return summary


def instance_keys(key: PRNGKeyArray, episodes: int) -> Shaped[Array, "N ..."]:
    """Reset keys of the instances that `play` meets with this key.

    Example:
        >>> instance_keys(jax.random.key(0), 3).shape
        (3,)
    """
    reset_key, _ = jax.random.split(key)
    return keys_by_index(reset_key, jnp.arange(episodes))


def confidence_interval(samples: Any) -> Interval:
    """Mean of independent samples and half the width of its 95 % interval.

    Args:
        samples: at least one number.

    Returns:
        The interval; its half width is infinite for one sample.

    Example:
        >>> str(confidence_interval([0.0, 1.0, 1.0, 0.0]))
        '0.500 ± 0.566'
    """
    samples = np.asarray(samples, np.float64)
    if len(samples) == 1:
        return Interval(float(samples[0]), float("inf"))
    error = samples.std(ddof=1) / np.sqrt(len(samples))
    return Interval(float(samples.mean()), float(1.96 * error))
