"""What an environment must be: each fault is one sentence, and nothing compiles."""

from collections.abc import Iterator
from typing import Any

import jax
from jumanji import specs
from jumanji.wrappers import AutoResetWrapper, VmapAutoResetWrapper


def require_members(environment: Any, name: str = "the environment") -> None:
    """Refuse what has no reset, step or specs, as an environment's name has none.

    Args:
        environment: one environment.
        name: what a sentence calls it.

    Raises:
        ValueError: something is missing.

    Example:
        >>> require_members("Snake-v1")
        Traceback (most recent call last):
        ValueError: the environment is the text 'Snake-v1'; make an environment of that name by \
make_environment, in vernal.adapters.registry.
    """
    if isinstance(environment, str):
        raise ValueError(
            f"{name} is the text {environment!r:.60}; make an environment of that name by "
            "make_environment, in vernal.adapters.registry."
        )
    if isinstance(environment, jax.Array):
        raise ValueError(
            f"{name} is an array, as a random key is: where a function from a key to a network is "
            "wanted, give make_spec_network(environment), not make_spec_network."
        )
    if isinstance(environment, type):
        raise ValueError(
            f"{name} is the class {environment.__name__} itself; make one of it, as by "
            f"{environment.__name__}()."
        )
    kind, needed = type(environment), ("reset", "step", "observation_spec", "action_spec")
    missing = [n for n in needed if not (hasattr(kind, n) or hasattr(environment, n))]
    if missing:
        raise ValueError(
            f"{name} lacks {', '.join(missing)}, which an environment needs; it is of type "
            f"{kind.__name__}."
        )


def require_specs(name: str, **given: Any) -> None:
    """Refuse specs that are not Jumanji's.

    Args:
        name: what a sentence calls the environment.
        **given: its specs, by the names of its members.

    Raises:
        ValueError: one is something else.
    """
    for member, spec in given.items():
        if not isinstance(spec, specs.Spec):
            raise ValueError(
                f"the {member} of {name} is of type {type(spec).__name__}; make it one of "
                "jumanji.specs, as an attribute or a property."
            )


def require_no_automatic_reset(environment: Any) -> None:
    """Refuse an environment that resets itself, however deeply it is wrapped.

    Args:
        environment: one environment, perhaps with others inside.

    Raises:
        TypeError: one of them resets itself.
    """
    if any(isinstance(e, AutoResetWrapper | VmapAutoResetWrapper) for e in _inside(environment)):
        raise TypeError(
            "the environment resets itself, which hides the true last observations; give the one "
            "inside the wrapper."
        )


def require_timesteps(name: str, **given: Any) -> None:
    """Refuse what has not the fields of Jumanji's timesteps.

    Args:
        name: what a sentence calls the environment.
        **given: what its methods return beside the state, by their names.

    Raises:
        ValueError: one lacks something.
    """
    for method, timestep in given.items():
        if not all(hasattr(timestep, n) for n in ("observation", "reward", "discount", "last")):
            raise ValueError(
                f"the {method} of {name} returns no jumanji.types.TimeStep beside the state; make "
                "one by restart, transition, termination or truncation."
            )


def require_alike(what: str, given: Any, whose: str, wanted: Any) -> None:
    """Refuse a tree that has not the same arrays as another.

    Args:
        what: what a sentence calls the tree.
        given: the tree; arrays, or their shapes.
        whose: what a sentence calls the other.
        wanted: the other.

    Raises:
        ValueError: an array is missing, is one too many, or has another dtype or shape.

    Example:
        >>> import jax.numpy as jnp
        >>> require_alike("this", {"a": jnp.zeros(2)}, "that", {"a": jnp.zeros(3)})
        Traceback (most recent call last):
        ValueError: this differs from that: ['a'] should be float32[3], not float32[2].
    """
    difference = _first_difference(_describe(given), _describe(wanted))
    if difference:
        raise ValueError(f"{what} differs from {whose}: {difference}.")


def require_as_specified(what: str, observation: Any, spec: Any) -> None:
    """Refuse an observation that is not what its spec says.

    Args:
        what: what a sentence calls it.
        observation: arrays, or their shapes.
        spec: its spec. In JAX's 64-bit mode it may be wrong about 64 or 32 bits, as many of
            Jumanji's are.

    Raises:
        ValueError: as `require_alike`.
    """
    wanted = jax.eval_shape(spec.generate_value)
    observation, wanted = (jax.tree.map(_in_32_bits, tree) for tree in (observation, wanted))
    require_alike(what, observation, "its spec", wanted)


def _inside(environment: Any) -> Iterator[Any]:
    """The environment and all that it wraps, whatever its wrappers call what they wrap."""
    found = [environment]
    for outer in found:  # which grows
        yield outer
        parts = getattr(outer, "__dict__", {}).values()
        inner = (p for p in parts if hasattr(type(p), "reset") and hasattr(type(p), "step"))
        found += [part for part in inner if not any(part is known for known in found)]


def _in_32_bits(leaf: Any) -> jax.ShapeDtypeStruct:
    wide = {"float64": "float32", "int64": "int32", "uint64": "uint32"}
    return jax.ShapeDtypeStruct(leaf.shape, wide.get(str(leaf.dtype), leaf.dtype))


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
