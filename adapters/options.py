"""Options of an environment by name: its constructor's, and those of the parts it is made of.

A part is what a parameter of the constructor takes if its type is a class of the environment's
own package: a generator, a reward function. It is chosen by the name of its class, whose own
parameters are options too. All of it is read from signatures and types. What is not given
stays as it is in the environment that is made without options.
"""

import ast
import difflib
import inspect
import textwrap
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import Any, NamedTuple

REQUIRED = inspect.Parameter.empty

_KINDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a word",
    NoneType: "None",
}


class Option(NamedTuple):
    """Something to choose by name.

    Attributes:
        hint: its type.
        default: its value if it is not given; `REQUIRED` if it has to be.
    """

    hint: Any
    default: Any


class Part(NamedTuple):
    """Something that an environment is made of.

    Attributes:
        classes: what it may be, by name.
        chosen: what it is; `None` if that is not known.
        options: of the chosen class.
    """

    classes: dict[str, type]
    chosen: type | None
    options: dict[str, Option]


class Options(NamedTuple):
    """All that may be chosen of an environment.

    Attributes:
        own: of its constructor, parts left out.
        parts: by the constructor's parameter that takes them.
    """

    own: dict[str, Option]
    parts: dict[str, Part]

    def names(self) -> list[str]:
        """Every name once: the constructor's, then each part's with those of its class."""
        inside = [name for part in self.parts for name in (part, *self.parts[part].options)]
        return list(dict.fromkeys([*self.own, *inside]))


def read_options(
    owner: str, make: Callable[..., Any], example: Any, arguments: Mapping[str, str]
) -> Options:
    """Find what may be chosen of an environment.

    Args:
        owner: what a sentence calls the environment.
        make: its class, or a function that makes it.
        example: the environment made without options, whose values are the defaults; `None` if
            there is none.
        arguments: what was chosen, as text by name: a chosen class brings options of its own.

    Returns:
        The options.

    Raises:
        ValueError: a part has no such class.

    Example:
        >>> import jumanji
        >>> maze = jumanji.make("Maze-v0")
        >>> read_options("Maze-v0", type(maze), maze, {}).names()
        ['time_limit', 'generator', 'num_rows', 'num_cols']
        >>> read_options("Maze-v0", type(maze), maze, {"generator": "ToyGenerator"}).names()
        ['time_limit', 'generator']
    """
    own, parts = _read_parameters(make, example), {}
    own.pop("viewer", None)
    for name, option in list(own.items()):
        classes = dict(_find_classes(option.hint, make))
        if classes:
            del own[name]
            parts[name] = _read_part(owner, name, classes, example, arguments.get(name))
    return Options(own, parts)


def read_arguments(owner: str, options: Options, arguments: Mapping[str, str]) -> dict[str, Any]:
    """Turn what was chosen into keyword arguments of the environment's constructor.

    A part is made if its class was chosen, or an option of it that nothing before it takes.

    Args:
        owner: what a sentence calls the environment.
        options: its options.
        arguments: what was chosen, as text by name.

    Returns:
        Values by name, parts made.

    Raises:
        ValueError: there is no such option, a value is of a wrong kind, one is missing, or a
            part cannot be made of them.

    Example:
        >>> import jumanji
        >>> maze = jumanji.make("Maze-v0")
        >>> options = read_options("Maze-v0", type(maze), maze, {})
        >>> made = read_arguments("Maze-v0", options, {"num_rows": "5", "time_limit": "30"})
        >>> made["time_limit"], made["generator"].num_rows, made["generator"].num_cols
        (30, 5, 10)
    """
    _require_known(owner, options, arguments)
    own = _fill(owner, options.own, arguments)
    keywords = {name: value for name, value in own.items() if name in arguments}
    taken = set(own)
    for name, part in options.parts.items():
        is_needed = name in arguments or arguments.keys() & part.options.keys() - taken
        if part.chosen is not None and is_needed:
            keywords[name] = _make_part(part.chosen, part.options, arguments)
        taken |= part.options.keys()
    return keywords


def split_arguments(words: Iterable[str]) -> dict[str, str]:
    """Names and values of words like `num_rows=5`.

    Args:
        words: each `NAME=VALUE`.

    Returns:
        Values by name, as text.

    Raises:
        ValueError: a word is no such pair, or a name comes twice.

    Example:
        >>> split_arguments(["generator=ToyGenerator", "time_limit=30"])
        {'generator': 'ToyGenerator', 'time_limit': '30'}
    """
    arguments: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip()
        if not name or not equals:
            raise ValueError(f"an option is written NAME=VALUE, as in num_rows=5; got '{word}'.")
        if name in arguments:
            raise ValueError(f"{name} is given twice, as {arguments[name]} and as {value}.")
        arguments[name] = value.strip()
    return arguments


def parse(name: str, text: str, hint: Any) -> Any:
    """Read a value as a Python literal; a bare word is itself.

    Args:
        name: of the option.
        text: its value.
        hint: its type; one that is neither a number, a word nor `None` is not checked.

    Returns:
        The value.

    Raises:
        ValueError: it is of another kind.

    Example:
        >>> parse("split_eps", "1", float), parse("dims", "(2, 3)", tuple), parse("x", "easy", str)
        (1.0, (2, 3), 'easy')
        >>> parse("num_rows", "five", int)
        Traceback (most recent call last):
        ValueError: num_rows is 'five'; give a whole number.
    """
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        value = text
    kinds = _members(hint)
    if not all(kind in _KINDS for kind in kinds) or type(value) in kinds:
        return value
    if float in kinds and type(value) is int:
        return float(value)
    if str in kinds:
        return text
    raise ValueError(f"{name} is {value!r}; give {' or '.join(_KINDS[kind] for kind in kinds)}.")


@contextmanager
def faults_as(what: str, file: str | None = None) -> Iterator[None]:
    """Turn any fault of someone else's code into one sentence.

    Args:
        what: how the sentence begins.
        file: the file whose line it names, if one is at fault.

    Raises:
        ValueError: something was raised inside.

    Example:
        >>> with faults_as("Maze-v0 does not work with num_rows=0"):
        ...     1 / 0
        Traceback (most recent call last):
        ValueError: Maze-v0 does not work with num_rows=0: ZeroDivisionError: division by zero.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        place = f" (line {lines[-1]} of {file})" if lines else ""
        said = textwrap.shorten(f"{type(error).__name__}: {error}", width=300).rstrip(".")
        raise ValueError(f"{what}: {said}{place}.") from error


def _require_known(owner: str, options: Options, arguments: Mapping[str, str]) -> None:
    names = options.names()
    chosen = [f"{part}={arguments[part]}" for part in options.parts if part in arguments]
    for name in arguments:
        if name not in names:
            known = ", ".join(_nearest_first(name, names)) or "none"
            where = f"{owner} with {' '.join(chosen)}" if chosen else owner
            raise ValueError(f"{where} has no option '{name}'; it has {known}.")


def _read_parameters(make: Callable[..., Any], example: Any) -> dict[str, Option]:
    """Parameters that can be given by name; an example's values in place of their defaults."""
    hints = _read_hints(make)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: Option(hints.get(name, Any), _read_default(parameter, example))
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind in named
    }


def _read_hints(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(make.__init__ if inspect.isclass(make) else make)
    except (NameError, TypeError):  # A name in quotes that only a type checker knows.
        return {}


def _read_default(parameter: inspect.Parameter, example: Any) -> Any:
    # None means that the value follows from others, as a time limit from the size of a maze.
    if parameter.default is None:
        return None
    named_so = getattr(example, f"_{parameter.name}", parameter.default)
    return getattr(example, parameter.name, named_so)


def _members(hint: Any) -> tuple[Any, ...]:
    """`int` and `None` of `int | None`; any other type alone."""
    is_union = typing.get_origin(hint) in (typing.Union, UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _find_classes(hint: Any, make: Callable[..., Any]) -> Iterator[tuple[str, type]]:
    """Classes that fit a type and come from the package that `make` is from."""
    package = make.__module__.rpartition(".")[0]
    waiting = [kind for kind in _members(hint) if inspect.isclass(kind)]
    while waiting:
        kind = waiting.pop(0)
        if package and kind.__module__.startswith(f"{package}."):
            waiting += kind.__subclasses__()
            if not inspect.isabstract(kind):
                yield kind.__name__, kind


def _read_part(
    owner: str, name: str, classes: dict[str, type], example: Any, text: str | None
) -> Part:
    kinds = tuple(classes.values())
    made = getattr(example, "__dict__", {}).values()
    used = next((value for value in made if isinstance(value, kinds)), None)
    if text is None:
        chosen = None if used is None else type(used)
    elif text in classes:
        chosen = classes[text]
    else:
        known = ", ".join(_nearest_first(text, classes))
        raise ValueError(f"{owner} has no {name} '{text}'; choose one of {known}.")
    return Part(classes, chosen, {} if chosen is None else _read_parameters(chosen, used))


def _make_part(kind: type, options: dict[str, Option], arguments: Mapping[str, str]) -> Any:
    values = _fill(kind.__name__, options, arguments)
    given = " ".join(f"{name}={values[name]}" for name in values if name in arguments)
    with faults_as(f"{kind.__name__} cannot be made with {given or 'its defaults'}"):
        return kind(**values)


def _fill(owner: str, options: dict[str, Option], arguments: Mapping[str, str]) -> dict[str, Any]:
    """The given values, and the defaults of the others."""
    values = {
        name: parse(name, arguments[name], option.hint) if name in arguments else option.default
        for name, option in options.items()
    }
    missing = [name for name, value in values.items() if value is REQUIRED]
    if missing:
        raise ValueError(f"{owner} needs {', '.join(missing)}; give each as NAME=VALUE.")
    return values


def _nearest_first(name: str, known: Iterable[str]) -> list[str]:
    known = list(known)
    parts = [other for other in known if name.lower() in other.lower()]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return list(dict.fromkeys([*parts, *near, *known]))
