"""Environments by name: Jumanji's, the mazes that vernal brings, and anyone's own."""

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jumanji
from jumanji.environments import Sokoban

from .factories import check_own_environment, import_factory, source_file
from .mazes import make_easy_maze, make_medium_maze
from .options import Options, faults_as, read_arguments, read_options

BUILT_IN: dict[str, Callable[[], Any]] = {
    "maze-easy": make_easy_maze,
    "maze-medium": make_medium_maze,
}

# Of Jumanji's classes those that go outside of the program when they are made.
_GOING_OUT = {
    "DeepMindGenerator": "downloads levels",
    "HuggingFaceDeepMindGenerator": "downloads levels",
    "CSVGenerator": "reads a file",
}


def environment_names() -> list[str]:
    """Every name that `make_environment` knows, vernal's own first.

    Example:
        >>> environment_names()[:2]
        ['maze-easy', 'maze-medium']
    """
    return [*BUILT_IN, *sorted(jumanji.registered_environments())]


def make_environment(name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Make an environment by its name.

    Args:
        name: one of `environment_names()`, or `module:callable` for one of your own.
        arguments: values of options by name, as a command would be given them: their text
            counts. `find_options` tells which there are.

    Returns:
        A Jumanji environment, or what the callable returns.

    Raises:
        ValueError: the name is unknown (the sentence offers near ones), an option does not fit,
            the environment needs files that are not there, or it is one of your own that no
            agent could train on.

    Example:
        >>> make_environment("Maze-v0", {"num_rows": 5}).observation_spec.walls.shape
        (5, 10)
        >>> make_environment("maze-esy")
        Traceback (most recent call last):
        ValueError: there is no environment 'maze-esy'; did you mean maze-easy or Maze-v0 \
or maze-medium? `vernal envs` lists all.
    """
    make, is_own = _find_maker(name), ":" in name
    arguments = {option: str(value) for option, value in (arguments or {}).items()}
    if name == "Sokoban-v0" and "generator" not in arguments:
        raise ValueError(
            "Sokoban-v0 downloads its levels when it is made; choose others with "
            "--env-arg generator=ToyGenerator or generator=SimpleSolveGenerator."
        )
    if not arguments and not is_own:
        return make()
    keywords = read_arguments(name, find_options(name, arguments), arguments)
    given = " ".join(f"{option}={value}" for option, value in arguments.items())
    full_name = f"{name} with {given}" if given else name
    with faults_as(f"{full_name} cannot be made", source_file(make) if is_own else None):
        environment = make(**keywords)
    check_own_environment(environment, full_name)
    return environment


def find_outside(name: str, arguments: Mapping[str, str]) -> list[str]:
    """Find what making an environment does that a stranger should not have done.

    Args:
        name: as for `make_environment`.
        arguments: likewise.

    Returns:
        Clauses; none for an environment that is computed by what is installed here.

    Example:
        >>> find_outside("my_package:Corridor", {"length": "5"})
        ['imports and runs my_package:Corridor as its environment']
        >>> find_outside("Sokoban-v0", {"generator": "DeepMindGenerator"})
        ['downloads levels for its DeepMindGenerator']
        >>> find_outside("Maze-v0", {"generator": "ToyGenerator"})
        []
    """
    if ":" in name:
        return [f"imports and runs {name} as its environment"]
    return [f"{_GOING_OUT[v]} for its {v}" for v in arguments.values() if v in _GOING_OUT]


def find_options(name: str, arguments: Mapping[str, str] | None = None) -> Options:
    """Find what may be chosen of an environment.

    Args:
        name: as for `make_environment`.
        arguments: what is chosen already: a chosen class brings options of its own.

    Returns:
        The options.

    Raises:
        ValueError: the name is unknown, or a chosen class.

    Example:
        >>> find_options("Snake-v1").names()
        ['num_rows', 'num_cols', 'time_limit']
    """
    make, arguments = _find_maker(name), arguments or {}
    if name == "Sokoban-v0":
        return read_options(name, Sokoban, None, arguments)
    if name in jumanji.registered_environments():
        example = make()
        return read_options(name, type(example), example, arguments)
    return read_options(name, make, None, arguments)


def _find_maker(name: str) -> Callable[..., Any]:
    if ":" in name:
        return import_factory(name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in jumanji.registered_environments():
        return functools.partial(jumanji.make, name)
    by_lower_case = {known.lower(): known for known in environment_names()}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.5)
    offer = f"did you mean {' or '.join(by_lower_case[n] for n in near)}? " if near else ""
    raise ValueError(f"there is no environment '{name}'; {offer}`vernal envs` lists all.")
