"""Environments by name: Jumanji's, and the mazes that vernal brings."""

import difflib
from collections.abc import Callable
from typing import Any

import jumanji

from .mazes import make_easy_maze, make_medium_maze

BUILT_IN: dict[str, Callable[[], Any]] = {
    "maze-easy": make_easy_maze,
    "maze-medium": make_medium_maze,
}


def environment_names() -> list[str]:
    """Every name that `make_environment` knows, vernal's own first.

    Example:
        >>> environment_names()[:2]
        ['maze-easy', 'maze-medium']
    """
    return [*BUILT_IN, *sorted(jumanji.registered_environments())]


def make_environment(name: str) -> Any:
    """Make an environment by its name.

    Args:
        name: one of `environment_names()`.

    Returns:
        A Jumanji environment.

    Raises:
        ValueError: the name is unknown (the sentence offers near ones), or the environment
            needs files that are not there.

    Example:
        >>> make_environment("maze-esy")
        Traceback (most recent call last):
        ValueError: there is no environment 'maze-esy'; did you mean maze-easy or Maze-v0 \
or maze-medium? `vernal envs` lists all.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if name not in jumanji.registered_environments():
        by_lower_case = {known.lower(): known for known in environment_names()}
        near = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.5)
        offer = f"did you mean {' or '.join(by_lower_case[n] for n in near)}? " if near else ""
        raise ValueError(f"there is no environment '{name}'; {offer}`vernal envs` lists all.")
    if name.startswith("Sokoban"):
        raise ValueError(
            f"{name} downloads its levels when it is made, which vernal does not do; make "
            "jumanji's Sokoban with its ToyGenerator or SimpleSolveGenerator in a script of yours."
        )
    return jumanji.make(name)
