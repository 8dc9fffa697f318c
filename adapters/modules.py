"""Equinox modules as plain JAX trees.

A module may hold functions, `jax.nn.relu` say, which `jax.jit`, `jax.vmap`, `jax.lax.scan`,
`jax.pmap` and `jax.shard_map` refuse as arguments: each wants arrays only. `pack` moves what is
no array into the tree's structure.
"""

import copy
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import numpy as np

_Module = TypeVar("_Module")


@jax.tree_util.register_pytree_node_class
class Packed(Generic[_Module]):
    """A module whose arrays are its only leaves; called, it calls the module.

    Two packed modules have the same structure if their functions and numbers are equal, so a
    packed module may be an argument, a carry or a result wherever JAX wants arrays.
    """

    def __init__(self, arrays: list[Any], static: tuple[Any, ...], structure: Any) -> None:
        """Hold the parts; `pack` makes them."""
        self._arrays, self._static, self._structure = arrays, static, structure

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.unpack()(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def unpack(self) -> _Module:
        """The module itself."""
        arrays = iter(self._arrays)
        leaves = [next(arrays) if leaf is _ARRAY else leaf for leaf in self._static]
        return jax.tree.unflatten(self._structure, leaves)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Packed[_Module]":
        """Copies of the arrays, with the very same functions: of the same structure."""
        return Packed(copy.deepcopy(self._arrays, memo), self._static, self._structure)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the module itself: a structure knows its parts by identity."""
        return pack, (self.unpack(),)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """Arrays and structure, for JAX."""
        return self._arrays, (self._static, self._structure)

    @classmethod
    def tree_unflatten(cls, structure: Any, arrays: Any) -> "Packed[_Module]":
        """Arrays and structure put together, for JAX."""
        return cls(list(arrays), *structure)


class _Array:
    """Stands for an array among the static leaves."""

    def __repr__(self) -> str:
        return "*"


_ARRAY = _Array()


def pack(module: _Module) -> Packed[_Module]:
    """Make a module fit to cross `jax.jit` and every other border of JAX.

    Args:
        module: an Equinox module, or any tree. What is no array must be hashable.

    Returns:
        The same as a tree of arrays.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> network = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
        >>> double = jax.jit(lambda network, x: 2 * network(x))
        >>> double(pack(network), jnp.ones(2)).shape
        (1,)
        >>> unpack(pack(network)).activation is network.activation
        True
    """
    leaves, structure = jax.tree.flatten(module)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    static = tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
    return Packed(arrays, static, structure)


def unpack(module: Any) -> Any:
    """The module inside a packed one; anything else as it is.

    Args:
        module: any tree.

    Returns:
        The same, or what was packed.

    Example:
        >>> unpack(pack({"f": abs}))["f"] is unpack({"f": abs})["f"]
        True
    """
    return module.unpack() if isinstance(module, Packed) else module


def is_array(leaf: Any) -> bool:
    """Whether a leaf is data: JAX's or NumPy's, or the shape of such an array.

    Args:
        leaf: of any tree.

    Returns:
        False for functions, strings and Python's own numbers.

    Example:
        >>> is_array(jax.numpy.ones(2)), is_array(2.0)
        (True, False)
    """
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct)
