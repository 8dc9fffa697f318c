"""An animation of an agent in its environment."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
from jaxtyping import PRNGKeyArray

from ..environments import Environment
from ..evaluation import Act


def record_states(
    environment: Environment, act: Act, key: PRNGKeyArray, *, episodes: int, max_steps: int
) -> list[Any]:
    """Play some episodes one after the other, and keep every state.

    Args:
        environment: one environment, without automatic reset.
        act: `(key, observation) -> action`.
        key: consumed.
        episodes: how many.
        max_steps: after so many steps an episode is left.

    Returns:
        The environment's states, in order.
    """
    reset, step, choose = jax.jit(environment.reset), jax.jit(environment.step), jax.jit(act)
    states = []
    for episode_key in jax.random.split(key, episodes):
        reset_key, act_key = jax.random.split(episode_key)
        state, timestep = reset(reset_key)
        states.append(state)
        for step_key in jax.random.split(act_key, max_steps):
            state, timestep = step(state, choose(step_key, timestep.observation))
            states.append(state)
            if bool(jnp.all(timestep.last())):
                break
    return states


def animate(environment: Any, states: list[Any], path: Path, *, frames_per_second: int) -> None:
    """Write states as a GIF or, where ffmpeg is installed, an MP4.

    Args:
        environment: with Jumanji's `animate`.
        states: from `record_states`.
        path: ends in `.gif` or `.mp4`.
        frames_per_second: speed.

    Raises:
        ValueError: the ending is another one, or ffmpeg is needed and missing.
    """
    require_film(path)
    matplotlib.use("Agg")
    writer = "ffmpeg" if path.suffix == ".mp4" else "pillow"
    animation = environment.animate(states, interval=1000 // frames_per_second)
    animation.save(path, writer=writer, fps=frames_per_second)


def require_film(path: Path) -> None:
    """Refuse a path that `animate` cannot write.

    Args:
        path: where an animation should go.

    Raises:
        ValueError: it ends neither in `.gif` nor in `.mp4`, or ffmpeg is needed and missing.

    Example:
        >>> require_film(Path("agent.avi"))
        Traceback (most recent call last):
        ValueError: an animation ends in .gif or .mp4; agent.avi does not.
    """
    if path.suffix not in (".gif", ".mp4"):
        raise ValueError(f"an animation ends in .gif or .mp4; {path} does not.")
    if path.suffix == ".mp4" and shutil.which("ffmpeg") is None:
        raise ValueError(f"ffmpeg is not installed, which {path} needs; ask for a .gif instead.")
