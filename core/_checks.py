"""Shape and dtype checks of the public functions, in one sentence each.

Every public function of `core` carries `@checked`. Its jaxtyping annotations are then
verified whenever it is called eagerly or traced, so a compiled step pays nothing.
`JAXTYPING_DISABLE=1` switches all checks off.
"""

import functools
import inspect
import itertools
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from beartype.door import is_bearable
from jaxtyping import AbstractArray, PRNGKeyArray, ScalarLike, jaxtyped
from jaxtyping import config as jaxtyping_config

_Function = TypeVar("_Function", bound=Callable[..., Any])


def checked(function: _Function) -> _Function:
    """Check the arguments and the result of a function against its annotations.

    Axis names are shared between all arguments and the result: `" T B"` twice means
    equal lengths. A `NamedTuple` is checked field by field, also as a method's `self`.

    Args:
        function: what to check; it keeps its name, signature and docstring.

    Returns:
        The same function. It raises `TypeError` with one sentence that names the
        argument, what was given and what is wanted.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxtyping import Array, Float
        >>> @checked
        ... def dot(x: Float[Array, " n"], y: Float[Array, " n"]) -> Float[Array, ""]:
        ...     return x @ y
        >>> dot(jnp.ones((2, 1)), jnp.ones(2))
        Traceback (most recent call last):
        TypeError: dot(): argument 'x' should be Float[Array, 'n'], but is float32[2,1].
    """
    signature = inspect.signature(function)
    where = f"{function.__qualname__}()"

    @functools.cache
    def hints() -> dict[str, Any]:
        # Read at the first call: by then a class that its own method names is defined.
        return typing.get_type_hints(function, include_extras=True)

    def arguments_of(args: Any, kwargs: Any) -> "list[_Value]":
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:
            function(*args, **kwargs)  # Python's own sentence names the function.
            raise
        hinted = {name: hints().get(name, Any) for name in arguments}
        if "self" in hinted:
            hinted["self"] = type(arguments["self"])
        values = [
            value
            for name, argument in arguments.items()
            for value in _fields(f"argument '{name}'", argument, hinted[name])
        ]
        # Plain arrays bind the axis names, so that it is a tree's odd leaf that is blamed.
        return sorted(values, key=lambda value: hasattr(value.hint, "leaftype"))

    @functools.wraps(function)
    def check(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping_config.jaxtyping_disable:
            return function(*args, **kwargs)
        arguments = arguments_of(args, kwargs)
        # One context for arguments and result: axis names hold for both. Between them and
        # it no other annotated function may stand, for it would open a context of its own.
        with jaxtyped("context"):
            for value in arguments:
                if not is_bearable(value.value, value.hint):
                    raise TypeError(_explain(where, value, arguments))
            result = function(*args, **kwargs)
            for value in _fields("the result", result, hints().get("return", Any)):
                if not is_bearable(value.value, value.hint):
                    raise TypeError(_explain(where, value, arguments))
        return result

    return check  # pyright: ignore[reportReturnType]


def check_values(where: str, values: dict[str, tuple[Any, Any]]) -> None:
    """Check what a user's own function returned; axis names hold for all values.

    Args:
        where: the function's name, as `predict()`.
        values: label to value and annotation.

    Raises:
        TypeError: with one sentence that names the value.

    Example:
        >>> from jaxtyping import Array, Float
        >>> check_values("predict()", {"value": (jax.numpy.zeros(1), Float[Array, ""])})
        Traceback (most recent call last):
        TypeError: predict(): value should be Float[Array, ''], but is float32[1].
    """
    if jaxtyping_config.jaxtyping_disable:
        return
    flat = [f for label, (value, hint) in values.items() for f in _fields(label, value, hint)]
    with jaxtyped("context"):
        for value in flat:
            if not is_bearable(value.value, value.hint):
                raise TypeError(_explain(where, value, flat))


def require_samples(where: str, count: int) -> None:
    """Refuse a batch of no sample: its mean would be NaN.

    Args:
        where: the function's name, as `ppo_loss()`.
        count: number of samples.

    Raises:
        ValueError: with one sentence.

    Example:
        >>> require_samples("ppo_loss()", 0)
        Traceback (most recent call last):
        ValueError: ppo_loss(): the batch has no sample; give at least one.
    """
    if count == 0:
        raise ValueError(f"{where}: the batch has no sample; give at least one.")


def check_embedding(where: str, arrived: Any, left: Any) -> None:
    """Check that a model's step leads to a state like the one it left.

    Args:
        where: the function's name, as `transition()`.
        arrived: the embedding of the state arrived in.
        left: that of the state left.

    Raises:
        TypeError: with one sentence that names the leaf, or the structure.

    Example:
        >>> check_embedding("transition()", {"x": jax.numpy.ones(2)}, {"x": jax.numpy.ones(3)})
        Traceback (most recent call last):
        TypeError: transition(): the embedding's leaf at ['x'] is float32[2], but that of the \
state left is float32[3]; a tree stores them side by side, so they must agree.
    """
    given, wanted = map(_describe_parts, (arrived, left))
    for part in sorted(wanted | given):  # leaves, then the structure: a list for a tuple, say
        if given.get(part) != wanted.get(part):
            raise TypeError(
                f"{where}: the embedding's {part} is {given.get(part, 'missing')}, but that "
                f"of the state left is {wanted.get(part, 'missing')}; a tree stores them side by "
                "side, so they must agree."
            )


def _describe_parts(embedding: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(embedding)
    parts = {
        f"leaf at {jax.tree_util.keystr(path) or 'its root'}": describe(leaf)
        for path, leaf in leaves
    }
    return parts | {"structure": str(jax.tree.structure(embedding))}


def describe(value: Any) -> str:
    """What a value is, in a phrase: `float32[5,3]`, `the str 'a'`, `a dict of 2 leaves`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        text = f"{value.dtype}[{','.join(map(str, value.shape))}]"
        return (
            text
            if isinstance(value, jax.Array | jax.ShapeDtypeStruct)
            else f"the {type(value).__name__} {text}"
        )
    leaves = jax.tree.leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return f"the {type(value).__name__} {value!r:.40}"
    return f"a {type(value).__name__} of {len(leaves)} leaves"


class _Value(NamedTuple):
    label: str
    value: Any
    hint: Any


def _fields(label: str, value: Any, hint: Any) -> list[_Value]:
    """The value itself, or the fields of the `NamedTuple` that its annotation names."""
    if not (isinstance(hint, type) and hasattr(hint, "_fields") and isinstance(value, hint)):
        return [_Value(label, value, hint)]
    return [
        each
        for name, field_hint in _field_hints(hint).items()
        for each in _fields(f"{label}, field '{name}',", getattr(value, name), field_hint)
    ]


@functools.cache
def _field_hints(named_tuple: type) -> dict[str, Any]:
    return typing.get_type_hints(named_tuple, include_extras=True)


# Under jaxtyping's import hook the two functions below would have contexts of their own, where
# no axis is bound yet, and blame the wrong leaf.


@typing.no_type_check
def _explain(where: str, wrong: _Value, values: list[_Value]) -> str:
    wanted, given = _describe_hint(wrong.hint), _describe_wrong_leaves(wrong)
    sentence = f"{where}: {wrong.label} should be {wanted}, but is {given}"
    before = itertools.takewhile(lambda value: value is not wrong, values)
    context = [f"{v.label.removeprefix('argument ')} is {describe(v.value)}" for v in before]
    return sentence + (f", where {', '.join(context)}." if context else ".")


@typing.no_type_check
def _describe_wrong_leaves(wrong: _Value) -> str:
    """Blame the leaves of a tree by their paths; describe any other value as a whole."""
    leaf_hint: Any = getattr(wrong.hint, "leaftype", None)
    leaves = jax.tree_util.tree_leaves_with_path(wrong.value) if leaf_hint else []
    misfits = [(path, leaf) for path, leaf in leaves if not is_bearable(leaf, leaf_hint)]
    if not misfits:
        return describe(wrong.value)
    return ", ".join(
        f"{describe(leaf)} at {jax.tree_util.keystr(path) or 'its root'}" for path, leaf in misfits
    )


def _describe_hint(hint: Any) -> str:
    for name, alias in {"ScalarLike": ScalarLike, "PRNGKeyArray": PRNGKeyArray}.items():
        if hint == alias:
            return name
    if leaf_hint := getattr(hint, "leaftype", None):
        return f"PyTree[{_describe_hint(leaf_hint)}]"
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return f"{hint.dtype.__name__}[Array, '{hint.dim_str.strip()}']"
    if isinstance(hint, type):
        return "None" if hint is type(None) else hint.__name__
    if args := typing.get_args(hint):
        return " | ".join(map(_describe_hint, args))
    return str(hint)
