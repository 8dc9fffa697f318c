"""What a run is: everything needed to make its agents again."""

import dataclasses
import importlib.metadata
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..agents.agent import Agent
from ..agents.alphazero import AlphaZeroConfig, AlphaZeroHyperparameters, make_alphazero
from ..agents.ppo import PPOConfig, PPOHyperparameters, make_ppo
from ..networks import NETWORKS


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
# What may change from one part of a run to the next; versions are compared by themselves.
_FREE = ("steps", "devices", "versions")


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
        for name in ("steps", "seeds", "devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1.")
        if self.at_once < 0:
            raise ValueError(f"at_once is {self.at_once}; give 0 or more.")
        if not 0 <= self.seed <= 2**32 - self.seeds:
            raise ValueError(
                f"seed is {self.seed}; give a number from 0 to {2**32 - self.seeds:,}."
            )
        if self.network not in NETWORKS:
            raise ValueError(
                f"there is no network '{self.network}'; choose one of {', '.join(NETWORKS)}."
            )
        for name, values in self.vary.items():
            self._check_varied(name, values)

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the versions of what matters."""
        return {**dataclasses.asdict(self), "versions": versions()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Inverse of `to_dict`.

        Raises:
            ValueError: a name is missing or unknown.
        """
        values = {name: value for name, value in values.items() if name != "versions"}
        try:
            settings = AGENTS[values["agent"]].settings(**values.pop("settings"))
            return cls(**values, settings=settings)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the run's config.toml does not fit this vernal: {error}.") from None


def versions() -> dict[str, str]:
    """Installed versions of what decides a run's numbers."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


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
