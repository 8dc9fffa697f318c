"""JAX's control flow over carries that contain Equinox modules.

A module holds functions (`jax.nn.relu`) that are no arrays, so JAX's own `scan` refuses it.
These functions split the carry once into arrays and the rest, loop over the arrays, and put
the module together inside: the user passes a module as it is.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

_Carry = TypeVar("_Carry")
_Tree = TypeVar("_Tree")
_X = TypeVar("_X")
_Y = TypeVar("_Y")


def scan(
    function: Callable[[_Carry, _X], tuple[_Carry, _Y]],
    init: _Carry,
    xs: _X,
    length: int | None = None,
) -> tuple[_Carry, _Y]:
    """`jax.lax.scan` whose carry may contain modules.

    Args:
        function: `(carry, x) -> (carry, y)`; `y` holds arrays only.
        init: first carry, any tree with arrays and static leaves; Python's numbers are static.
        xs: what to walk over, along leading axes; or `None`.
        length: number of steps, where `xs` is `None`.

    Returns:
        The last carry, and the stacked `y`.

    Raises:
        TypeError: a step changes a static part of the carry, an activation say.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> layer = eqx.nn.Lambda(jax.nn.relu)
        >>> def body(carry, x):
        ...     layer, total = carry
        ...     return (layer, total + layer(x)), total
        >>> (_, total), _ = scan(body, (layer, jnp.array(0.0)), jnp.array([-1.0, 2.0]))
        >>> total.item()
        2.0
    """
    arrays, static = eqx.partition(init, _is_carried)

    def body(arrays: Any, x: _X) -> tuple[Any, _Y]:
        carry, y = function(eqx.combine(arrays, static), x)
        return _arrays_of("scan", carry, static), y

    arrays, ys = jax.lax.scan(body, arrays, xs, length)
    return eqx.combine(arrays, static), ys


def while_loop(
    condition: Callable[[_Carry], Bool[Array, ""]],
    function: Callable[[_Carry], _Carry],
    init: _Carry,
) -> _Carry:
    """`jax.lax.while_loop` whose carry may contain modules.

    Args:
        condition: whether to go on.
        function: `carry -> carry`.
        init: first carry, any tree with arrays and static leaves; Python's numbers are static.

    Returns:
        The last carry.

    Raises:
        TypeError: a step changes a static part of the carry.

    Example:
        >>> import equinox as eqx, jax
        >>> layer = eqx.nn.Lambda(jax.nn.relu)
        >>> def double(carry):
        ...     layer, x = carry
        ...     return layer, layer(2 * x)
        >>> while_loop(lambda carry: carry[1] < 10, double, (layer, jax.numpy.array(1.0)))[1].item()
        16.0
    """
    arrays, static = eqx.partition(init, _is_carried)

    def body(arrays: Any) -> Any:
        return _arrays_of("while_loop", function(eqx.combine(arrays, static)), static)

    arrays = jax.lax.while_loop(lambda a: condition(eqx.combine(a, static)), body, arrays)
    return eqx.combine(arrays, static)


def cond(
    condition: Bool[Array, ""] | bool,
    if_true: Callable[..., _Tree],
    if_false: Callable[..., _Tree],
    *operands: Any,
) -> _Tree:
    """`jax.lax.cond` whose operands and results may contain modules.

    Args:
        condition: which function to call.
        if_true: called with the operands where `condition` is true.
        if_false: called with the operands otherwise.
        *operands: any trees with arrays and static leaves.

    Returns:
        What the called function returned.

    Raises:
        TypeError: the two functions return different static parts.

    Example:
        >>> import equinox as eqx, jax
        >>> layer = eqx.nn.Lambda(jax.nn.relu)
        >>> cond(True, lambda f, x: f(x), lambda f, x: x, layer, jax.numpy.array(-1.0)).item()
        0.0
    """
    arrays, static = eqx.partition(operands, _is_carried)
    static_out: list[Any] = []

    def branch(function: Callable[..., _Tree], arrays: Any) -> Any:
        out, static_part = eqx.partition(function(*eqx.combine(arrays, static)), _is_carried)
        static_out.append(static_part)
        return out

    out = jax.lax.cond(
        condition, lambda a: branch(if_true, a), lambda a: branch(if_false, a), arrays
    )
    if not eqx.tree_equal(*static_out[:2]):
        raise TypeError(f"cond(): the branches return different static parts: {static_out[:2]}.")
    return eqx.combine(out, static_out[0])


def value_and_grad(
    function: Callable[..., tuple[Array, _Y]],
) -> Callable[..., tuple[tuple[Array, _Y], Any]]:
    """`jax.value_and_grad` with respect to a module, of a loss that has parts to report.

    Args:
        function: `(module, *args) -> (loss, parts)`.

    Returns:
        `(module, *args) -> ((loss, parts), gradient)`, where the gradient has the module's
        structure, with `None` in place of what is not a float array.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = lambda module, x: (module["w"] * x, "parts")
        >>> (value, parts), gradient = value_and_grad(loss)({"w": jnp.array(2.0)}, 3.0)
        >>> value.item(), gradient["w"].item()
        (6.0, 3.0)
    """
    return eqx.filter_value_and_grad(function, has_aux=True)


def run_if(condition: Bool[Array, ""], function: Callable[[], _Tree], otherwise: _Tree) -> _Tree:
    """Call a function only if a condition holds, under `vmap` too.

    `jax.lax.cond` under `vmap` runs both branches. This is a loop of at most one turn, which
    under `vmap` runs if the condition holds anywhere. It has no reverse-mode derivative.

    Args:
        condition: whether to call.
        function: gives a tree like `otherwise`.
        otherwise: the result if it is not called.

    Returns:
        `function()` or `otherwise`.

    Example:
        >>> import jax.numpy as jnp
        >>> run_if(jnp.array(True), lambda: jnp.ones(2), jnp.zeros(2)).tolist()
        [1.0, 1.0]
    """
    pending, result = jax.lax.while_loop(
        lambda carry: carry[0],
        lambda _: (jnp.zeros_like(condition), function()),
        (condition, otherwise),
    )
    del pending
    return result


def _is_carried(leaf: Any) -> bool:
    # Not Python's own numbers: a module's `inference=True` is static, not data.
    return eqx.is_array(leaf)


def _arrays_of(where: str, carry: PyTree, static: PyTree) -> PyTree:
    arrays, new_static = eqx.partition(carry, _is_carried)
    if not eqx.tree_equal(new_static, static):
        raise TypeError(
            f"{where}(): a step changed a static part of the carry from {static} to {new_static}; "
            "only arrays can change inside a loop."
        )
    return arrays
