"""Environments of someone's own: imported by `module:callable`, and checked before use."""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
from jumanji import specs
from jumanji.types import TimeStep

from .environments import read_specs
from .options import faults_as


def import_factory(name: str) -> Callable[..., Any]:
    """Import what makes an environment.

    Args:
        name: `module:callable`; the module may be installed, or lie in the working folder.

    Returns:
        The callable.

    Raises:
        ValueError: the module does not import, or has no such callable.

    Example:
        >>> import_factory("jumanji.environments:Maze").__name__
        'Maze'
        >>> import_factory("jumanji.environments:Mase")
        Traceback (most recent call last):
        ValueError: the module jumanji.environments has no 'Mase'.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise ValueError(f"an environment of your own is written MODULE:CALLABLE; got '{name}'.")
    # A command does not look for modules in the folder that it is called in, but people do.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with faults_as(f"{module_name} cannot be imported from what is installed or this folder"):
        module = importlib.import_module(module_name)
    try:
        factory = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        raise ValueError(f"the module {module_name} has no '{path}'.") from None
    if not callable(factory):
        raise ValueError(
            f"{name} is of type {type(factory).__name__}; name a class or a function that returns "
            "an environment."
        )
    return factory


def source_file(made: Any) -> str | None:
    """Where a class or a function is written, if it is in a file.

    Example:
        >>> source_file(source_file).endswith("factories.py")
        True
    """
    return getattr(sys.modules.get(getattr(made, "__module__", "")), "__file__", None)


def check_own_environment(environment: Any, name: str = "the environment") -> None:
    """Refuse what no agent could train on; a reset and a step are traced, and nothing compiles.

    Args:
        environment: one environment, without automatic reset.
        name: what a sentence calls it.

    Raises:
        ValueError: it lacks something, its reset or step fails, or they do not fit each other
            and the specs.

    Example:
        >>> import jumanji
        >>> check_own_environment(jumanji.make("Snake-v1"))
        >>> check_own_environment(jumanji)
        Traceback (most recent call last):
        ValueError: the environment lacks reset, step, observation_spec, action_spec, ...
    """
    file = source_file(type(environment))
    _require_members(environment, name)
    with faults_as(f"the specs of {name} fail", file):
        observation_spec, action_spec = read_specs(environment)
    _require_specs(name, observation_spec=observation_spec, action_spec=action_spec)
    with faults_as(f"the reset of {name} fails", file):
        first_state, first = jax.eval_shape(environment.reset, jax.random.key(0))
    with faults_as(f"the step of {name} fails", file):
        action = action_spec.generate_value()
        state, timestep = jax.eval_shape(environment.step, first_state, action)
    _require_timesteps(name, reset=first, step=timestep)
    seen = jax.eval_shape(observation_spec.generate_value)
    _require_alike(f"the first observation of {name}", first.observation, "its spec", seen)
    _require_alike(f"a later observation of {name}", timestep.observation, "its spec", seen)
    _require_alike(f"the state after a step of {name}", state, "that of reset", first_state)


def _require_members(environment: Any, name: str) -> None:
    kind, needed = type(environment), ("reset", "step", "observation_spec", "action_spec")
    missing = [n for n in needed if not (hasattr(kind, n) or hasattr(environment, n))]
    if missing:
        raise ValueError(
            f"{name} lacks {', '.join(missing)}, which an environment needs; it is of type "
            f"{kind.__name__}."
        )


def _require_specs(name: str, **given: Any) -> None:
    for member, spec in given.items():
        if not isinstance(spec, specs.Spec):
            raise ValueError(
                f"the {member} of {name} is of type {type(spec).__name__}; make it one of "
                "jumanji.specs, as an attribute or a property."
            )


def _require_timesteps(name: str, **given: Any) -> None:
    for method, timestep in given.items():
        if not isinstance(timestep, TimeStep):
            raise ValueError(
                f"the {method} of {name} returns no jumanji.types.TimeStep beside the state; make "
                "one by restart, transition, termination or truncation."
            )


def _require_alike(what: str, given: Any, whose: str, wanted: Any) -> None:
    """Refuse a tree that has not the same arrays as another."""
    difference = _first_difference(_describe(given), _describe(wanted))
    if difference:
        raise ValueError(f"{what} differs from {whose}: {difference}.")


def _describe(tree: Any) -> dict[str, str]:
    """Dtype and shape of each array by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p) or "it": f"{x.dtype}{list(x.shape)}" for p, x in leaves}


def _first_difference(given: dict[str, str], wanted: dict[str, str]) -> str | None:
    for path, description in wanted.items():
        if path not in given:
            return f"{path} should be {description}"
        if given[path] != description:
            return f"{path} should be {description}, not {given[path]}"
    for path in given.keys() - wanted.keys():
        return f"{path} should not be there"
    return None
