"""What a run is: everything needed to make its agents again."""

import dataclasses
import importlib.metadata
import itertools
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..agents.agent import Agent
from ..agents.alphazero import AlphaZeroConfig, AlphaZeroHyperparameters, make_alphazero
from ..agents.learner import make_plain
from ..agents.ppo import PPOConfig, PPOHyperparameters, make_ppo
from ..networks import NETWORKS
from ..registry import find_outside


class AgentKind(NamedTuple):
    """An agent that can be trained by name.

    Attributes:
        settings: class of its settings.
        hyperparameters: class of those that are numbers inside its compiled program.
        make: `(environment, make_network, settings, mesh=...) -> Agent`.
    """

    settings: type[Any]
    hyperparameters: type[Any]
    make: Callable[..., Agent]


AGENTS = {
    "ppo": AgentKind(PPOConfig, PPOHyperparameters, make_ppo),
    "alphazero": AgentKind(AlphaZeroConfig, AlphaZeroHyperparameters, make_alphazero),
}

_PACKAGES = ("vernal", "jax", "jaxlib", "equinox", "optax", "jumanji", "mctx")
# What JAX may be told from outside that decides a run's numbers.
_JAX_OPTIONS = (
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_enable_x64",
    "jax_default_matmul_precision",
)
# What a run is recorded with beside its configuration, compared by itself.
_RECORDS = ("versions", "jax_options")
# What may change from one part of a run to the next.
_FREE = ("steps", "devices", *_RECORDS)
# A list of agents is made of them before memory is thought of.
_MOST_AGENTS = 2**20


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything needed to make a run again.

    Attributes:
        agent: name of the agent.
        environment: name of the environment.
        network: name of the network.
        seed: of every random number; the first one of several.
        steps: environment steps for each agent to train for, rounded up to whole iterations.
        settings: the agent's own.
        environment_arguments: options of the environment, as text by name.
        seeds: how many agents to train at once, each from a seed of its own.
        vary: settings to try, each with its values: every combination is trained.
        devices: how many to train on.
        at_once: how many of several agents to step side by side on each device; 0 for all of
            them, or for one after the other on a CPU.
    """

    agent: str
    environment: str
    network: str
    seed: int
    steps: int
    settings: Any
    environment_arguments: dict[str, str] = dataclasses.field(default_factory=dict)
    seeds: int = 1
    vary: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    devices: int = 1
    at_once: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything compiles or is written."""
        make_plain(self)
        for name in ("steps", "seeds", "devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1.")
        if self.at_once < 0:
            raise ValueError(f"at_once is {self.at_once}; give 0 or more.")
        _require_count(self.seeds)
        if not 0 <= self.seed <= 2**32 - self.seeds:
            raise ValueError(
                f"seed is {self.seed}; give a number from 0 to {2**32 - self.seeds:,}."
            )
        if isinstance(self.vary, dict):
            plain = {name: np.asarray(values).tolist() for name, values in self.vary.items()}
            object.__setattr__(self, "vary", plain)
        _require_kinds(type(self), vars(self))
        _require_agent(self.agent)
        kind = AGENTS[self.agent].settings
        if not isinstance(self.settings, kind):
            raise ValueError(
                f"the settings of {self.agent} are of type {type(self.settings).__name__}; make "
                f"them with {kind.__name__}(...)."
            )
        _require_kinds(type(self.settings), vars(self.settings))
        if self.network not in NETWORKS:
            raise ValueError(
                f"there is no network {self.network!r}; choose one of {', '.join(NETWORKS)}."
            )
        for name, values in self.vary.items():
            self._check_varied(name, values)
        _require_count(self.seeds * math.prod(map(len, self.vary.values())))

    def _check_varied(self, name: str, values: Sequence[float]) -> None:
        numbers = self.hyperparameters()
        if name not in numbers:
            raise ValueError(
                f"{name} cannot be varied within one program; choose of {', '.join(numbers)}, or "
                "train several runs."
            )
        trained = {np.float32(value) for value in values}
        if not values or len(trained) != len(values):
            raise ValueError(
                f"{name} is to be varied over {list(values)}; give values that differ in float32."
            )
        for value in values:
            if value and not np.float32(value):
                raise ValueError(f"{name} is {value}, which is 0 in float32; give a larger one.")
            dataclasses.replace(self.settings, **{name: value})

    @property
    def is_several(self) -> bool:
        """Whether it has more than one agent."""
        return len(self.members()) > 1

    def hyperparameters(self) -> list[str]:
        """Names of the settings that are numbers inside the compiled program.

        Example:
            >>> config = RunConfig("ppo", "maze-easy", "auto", 0, 1, PPOConfig())
            >>> config.hyperparameters()[:2]
            ['learning_rate', 'adam_epsilon']
        """
        return list(AGENTS[self.agent].hyperparameters._fields)

    def members(self) -> list[dict[str, Any]]:
        """What sets each agent of the run apart: the varied settings, and its seed.

        Example:
            >>> vary = {"gamma": [0.9, 0.99]}
            >>> config = RunConfig(
            ...     "ppo", "maze-easy", "auto", 5, 1, PPOConfig(), seeds=2, vary=vary
            ... )
            >>> config.members()[:3]
            [{'gamma': 0.9, 'seed': 5}, {'gamma': 0.9, 'seed': 6}, {'gamma': 0.99, 'seed': 5}]
        """
        seeds = range(self.seed, self.seed + self.seeds)
        combinations = itertools.product(*self.vary.values(), seeds)
        return [dict(zip((*self.vary, "seed"), values, strict=True)) for values in combinations]

    def find_outside(self) -> list[str]:
        """What making its agents does beyond what vernal does by itself; it needs trust.

        Example:
            >>> RunConfig("ppo", "my_maze:Maze", "auto", 0, 1, PPOConfig()).find_outside()
            ['imports and runs my_maze:Maze as its environment']
        """
        return find_outside(self.environment, self.environment_arguments)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the versions of what matters and what JAX was told."""
        recorded = {"versions": versions(), "jax_options": jax_options()}
        return {**dataclasses.asdict(self), **recorded}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Inverse of `to_dict`; whoever wrote the values, nothing is imported or run.

        Raises:
            ValueError: a name is missing or unknown, or a value is none that could be.
        """
        values = dict(values)
        try:
            for name in _RECORDS:
                _require_kind(name, values.pop(name, {}), dict[str, str])
            agent: Any = values.get("agent")
            settings = values.get("settings")
            _require_kind("agent", agent, str)
            _require_kind("settings", settings, dict[str, Any])
            _require_agent(agent)
            values["settings"] = _make(AGENTS[agent].settings, settings)
            return _make(cls, values)
        except ValueError as error:
            text = str(error).rstrip(".")
            raise ValueError(f"the run's config.toml does not fit this vernal: {text}.") from None


def versions() -> dict[str, str]:
    """Installed versions of what decides a run's numbers."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def jax_options() -> dict[str, str]:
    """What JAX was told that decides a run's numbers, by the environment or by a program.

    Example:
        >>> jax_options()["jax_default_prng_impl"]
        'threefry2x32'
    """
    return {name: str(getattr(jax.config, name)) for name in _JAX_OPTIONS}


def _require_count(agents: int) -> None:
    if agents > _MOST_AGENTS:
        raise ValueError(f"these are {agents:,} agents; give at most {_MOST_AGENTS:,} in a run.")


def _require_agent(name: str) -> None:
    if name not in AGENTS:
        raise ValueError(f"there is no agent {name!r:.60}; choose one of {', '.join(AGENTS)}.")


def _make(kind: Any, values: Any) -> Any:
    """A dataclass from values by name, each of its field's kind."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise ValueError(f"it has an unknown {unknown[0]!r:.60}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    _require_kinds(kind, values)
    return kind(**values)


def _require_kinds(kind: Any, values: Mapping[str, Any]) -> None:
    """Refuse values of a dataclass's fields that are of another kind than it says."""
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        _require_kind(name, value, hints[name])


def _is_text(value: Any) -> bool:
    # It is printed, and must not talk to a terminal.
    return isinstance(value, str) and value.isprintable()


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return type(value) is float or _is_whole(value)


def _is_table(value: Any, is_right: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(value, dict) and all(_is_text(k) and is_right(v) for k, v in value.items())


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    str: (_is_text, "printable text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_whole, "a whole number of at most 63 bits"),
    float: (_is_number, "a number"),
    dict[str, Any]: (_is_table, "a table"),
    dict[str, str]: (lambda value: _is_table(value, _is_text), "a table of texts"),
    dict[str, list[float]]: (
        lambda value: _is_table(value, _are_numbers),
        "a table of lists of numbers",
    ),
}


def _require_kind(name: str, value: Any, hint: Any) -> None:
    is_right, wanted = _KINDS.get(hint, (lambda _: True, ""))
    if not is_right(value):
        raise ValueError(f"{name} is {value!r:.60}; give {wanted}.")


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """What differs between two of a run's configurations, of what may not.

    Args:
        here: as `RunConfig.to_dict` gives it.
        there: another one.

    Returns:
        Such as `settings.gamma is 0.9 here and 0.99 there`, one for each.

    Example:
        >>> differences({"steps": 1, "seed": 0}, {"steps": 2, "seed": 1})
        ['seed is 0 here and 1 there']
    """
    one, other = (_flatten({k: v for k, v in d.items() if k not in _FREE}) for d in (here, there))
    absent = "absent"
    return [
        f"{name} is {one.get(name, absent)} here and {other.get(name, absent)} there"
        for name in dict.fromkeys([*one, *other])
        if one.get(name, absent) != other.get(name, absent)
    ]


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": v for inner, v in _flatten(value).items()}
        else:
            flat[name] = value
    return flat
