"""Environments of someone's own: imported by `module:callable`, and checked before use."""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

from .checks import (
    require_alike,
    require_as_specified,
    require_members,
    require_no_automatic_reset,
    require_specs,
    require_timesteps,
)
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
        TypeError: it resets itself.

    Example:
        >>> import jumanji
        >>> check_own_environment(jumanji.make("Snake-v1"))
        >>> check_own_environment(jumanji)
        Traceback (most recent call last):
        ValueError: the environment lacks reset, step, observation_spec, action_spec, ...
    """
    file = source_file(type(environment))
    require_members(environment, name)
    require_no_automatic_reset(environment)
    with faults_as(f"the specs of {name} fail", file):
        observation_spec, action_spec = read_specs(environment)
    require_specs(name, observation_spec=observation_spec, action_spec=action_spec)
    with faults_as(f"the reset of {name} fails", file):
        first_state, first = jax.eval_shape(environment.reset, jax.random.key(0))
    with faults_as(f"the step of {name} fails", file):
        action = action_spec.generate_value()
        state, timestep = jax.eval_shape(environment.step, first_state, action)
    require_timesteps(name, reset=first, step=timestep)
    require_as_specified(f"the first observation of {name}", first.observation, observation_spec)
    require_as_specified(f"a later observation of {name}", timestep.observation, observation_spec)
    require_alike(f"the state after a step of {name}", state, "that of reset", first_state)
