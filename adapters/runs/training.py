"""Train an agent into a folder, and make it again from there."""

import dataclasses
import importlib.metadata
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from ..agents.agent import Agent
from ..agents.alphazero import AlphaZeroConfig, make_alphazero
from ..agents.ppo import PPOConfig, make_ppo
from ..networks import NETWORKS
from ..registry import make_environment
from .checkpoints import Checkpoints
from .curve import draw_curve
from .folder import RunFolder, create_run_folder, next_free_path

AGENTS: dict[str, tuple[type, Callable[..., Agent]]] = {
    "ppo": (PPOConfig, make_ppo),
    "alphazero": (AlphaZeroConfig, make_alphazero),
}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything needed to make a run again.

    Attributes:
        agent: name of the agent.
        environment: name of the environment.
        network: name of the network.
        seed: of every random number.
        steps: environment steps to train for, rounded up to whole iterations.
        settings: the agent's own.
        environment_arguments: options of the environment, as text by name.
    """

    agent: str
    environment: str
    network: str
    seed: int
    steps: int
    settings: Any
    environment_arguments: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything compiles or is written."""
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; give at least 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; give a number from 0 to 4,294,967,295.")
        if self.network not in NETWORKS:
            raise ValueError(
                f"there is no network '{self.network}'; choose one of {', '.join(NETWORKS)}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the versions of what matters."""
        packages = ("vernal", "jax", "jaxlib", "equinox", "optax", "jumanji")
        versions = {name: importlib.metadata.version(name) for name in packages}
        return {**dataclasses.asdict(self), "versions": versions}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Inverse of `to_dict`.

        Raises:
            ValueError: a name is missing or unknown.
        """
        values = {name: value for name, value in values.items() if name != "versions"}
        try:
            settings_class, _ = AGENTS[values["agent"]]
            settings = settings_class(**values.pop("settings"))
            return cls(**values, settings=settings)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the run's config.toml does not fit this vernal: {error}.") from None


@dataclasses.dataclass(frozen=True)
class Progress:
    """What there is to say after an iteration.

    Attributes:
        row: the line of `metrics.jsonl`.
        iterations: how many there will be in all.
        seconds_left: estimated from the iterations so far.
    """

    row: dict[str, Any]
    iterations: int
    seconds_left: float


def build(config: RunConfig) -> tuple[Any, Agent]:
    """Make the environment and the agent of a run; nothing compiles or is written yet.

    Args:
        config: the run.

    Returns:
        Environment and agent.

    Raises:
        ValueError: the environment is unknown, or something does not fit it.
    """
    environment = make_environment(config.environment, config.environment_arguments)
    make_network = NETWORKS[config.network](environment)
    return environment, AGENTS[config.agent][1](environment, make_network, config.settings)


def default_folder(config: RunConfig) -> Path:
    """`runs/ENVIRONMENT/AGENT/seed-N`, or the first free one like it.

    Example:
        >>> config = RunConfig("ppo", "my_package.mazes:Corridor", "auto", 3, 1000, PPOConfig())
        >>> default_folder(config).as_posix()
        'runs/Corridor/ppo/seed-3'
    """
    environment = config.environment.rpartition(":")[2]
    return next_free_path(Path("runs", environment, config.agent, f"seed-{config.seed}"))


def start(config: RunConfig, path: Path | None, report: Callable[[Progress], None]) -> RunFolder:
    """Train a new agent.

    Args:
        config: what to train.
        path: a folder that does not exist yet; `default_folder` if not given.
        report: called after every iteration.

    Returns:
        The run's folder.

    Raises:
        ValueError: the folder exists, or the configuration does not fit.
        OSError: something could not be written; what was written before is whole.
        KeyboardInterrupt: Ctrl-C; the last iteration's state is saved.
    """
    _, agent = build(config)
    folder = create_run_folder(default_folder(config) if path is None else path)
    folder.write_config(config.to_dict())
    state = _first_state(config, agent)
    _train(config, agent, state, folder, report)
    return folder


def resume(
    folder: RunFolder, report: Callable[[Progress], None], *, steps: int | None = None
) -> RunFolder:
    """Go on with a run from its newest checkpoint, as if it had never stopped.

    Args:
        folder: the run.
        report: called after every iteration.
        steps: environment steps to train for in all; as configured by default.

    Returns:
        The run's folder.

    Raises:
        ValueError: this is no run, its checkpoint does not fit, or it has come so far already.
        OSError: something could not be written; what was written before is whole.
        KeyboardInterrupt: Ctrl-C; the last iteration's state is saved.
    """
    config = RunConfig.from_dict(folder.read_config())
    if steps is not None:
        config = dataclasses.replace(config, steps=steps)
    if folder.checkpoints_path.is_dir() and any(folder.checkpoints_path.iterdir()):
        _, _, agent, state = load(folder)
    else:  # It stopped before its first checkpoint: its configuration is all of it.
        _, agent = build(config)
        state = _first_state(config, agent)
    done = int(state.iteration) * agent.steps_per_iteration
    if done >= config.steps:
        raise ValueError(
            f"{folder.path} has taken {done:,} steps already, and {config.steps:,} are asked for; "
            "ask for more with --steps."
        )
    folder.replace_config(config.to_dict())
    folder.cut_metrics(int(state.iteration))
    _train(config, agent, state, folder, report)
    return folder


def load(folder: RunFolder, *, best: bool = False) -> tuple[RunConfig, Any, Agent, Any]:
    """Make a run's agent again.

    Args:
        folder: the run.
        best: its best checkpoint; the newest by default.

    Returns:
        Configuration, environment, agent, and the agent's state.

    Raises:
        ValueError: this is no run, or its checkpoint does not fit.
    """
    config = RunConfig.from_dict(folder.read_config())
    environment, agent = build(config)
    shapes = jax.eval_shape(agent.init, jax.random.key(0), agent.hyperparameters)
    if not folder.checkpoints_path.is_dir():
        raise ValueError(f"{folder.path} holds no checkpoint yet; train the run first.")
    checkpoints = Checkpoints(folder.checkpoints_path, read_only=True)
    try:
        iteration = checkpoints.best_iteration() if best else None
        state = checkpoints.restore(shapes, iteration)
    finally:
        checkpoints.close()
    return config, environment, agent, state


def _first_state(config: RunConfig, agent: Agent) -> Any:
    return jax.jit(agent.init)(jax.random.key(config.seed), agent.hyperparameters)


def _train(
    config: RunConfig,
    agent: Agent,
    state: Any,
    folder: RunFolder,
    report: Callable[[Progress], None],
    save_every_seconds: float = 30.0,
) -> None:
    iterations = math.ceil(config.steps / agent.steps_per_iteration)
    step = jax.jit(agent.step, donate_argnums=0)
    checkpoints = Checkpoints(folder.checkpoints_path)
    first, began, saved = int(state.iteration), time.monotonic(), time.monotonic()
    scores = [r["mean_return"] for r in folder.read_metrics() if r["mean_return"] is not None]
    score = scores[-1] if scores else -math.inf
    try:
        with _interrupts() as interrupted:
            for iteration in range(first + 1, iterations + 1):
                before = time.monotonic()
                state, metrics = step(state)
                row = _row(iteration, agent, metrics)
                _require_finite(row, folder, checkpoints)
                now = time.monotonic()
                row["seconds"] = round(now - began, 3)
                row["steps_per_second"] = round(agent.steps_per_iteration / (now - before))
                folder.append_metrics(row)
                per_iteration = (now - began) / (iteration - first)
                report(Progress(row, iterations, per_iteration * (iterations - iteration)))
                if row["mean_return"] is not None:
                    score = row["mean_return"]
                is_last = iteration == iterations or interrupted.is_set()
                if is_last or now - saved > save_every_seconds:
                    checkpoints.save(iteration, state, score)
                    saved = time.monotonic()
                if is_last and any(row["episodes"] for row in folder.read_metrics()):
                    draw_curve([folder], folder.curve_path)
                if interrupted.is_set():
                    is_complete = iteration == iterations
                    goes_on = f"`vernal resume {folder.path}` goes on"
                    raise KeyboardInterrupt(
                        f"stopped after iteration {iteration}, whose state is saved; "
                        f"{'the run is complete' if is_complete else goes_on}."
                    )
    finally:
        checkpoints.close()


def _row(iteration: int, agent: Agent, metrics: Any) -> dict[str, Any]:
    """One line of the metrics: numbers by name, `None` where there is nothing to say."""
    metrics = jax.device_get(metrics)
    count = int(metrics.episodes.ended)
    row = {
        "iteration": iteration,
        "steps": iteration * agent.steps_per_iteration,
        "episodes": count,
        "mean_return": float(metrics.episodes.returns) / count if count else None,
        "mean_length": float(metrics.episodes.lengths) / count if count else None,
    }
    losses = {**metrics.loss._asdict(), "gradient_norm": metrics.gradient_norm}
    return {**row, **{name: float(value) for name, value in losses.items()}}


def _require_finite(row: dict[str, Any], folder: RunFolder, checkpoints: Checkpoints) -> None:
    wrong = [n for n, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
    if wrong:
        saved = checkpoints.iterations()
        state = f"that of iteration {saved[-1]} is saved" if saved else "no state was saved before"
        raise ValueError(
            f"{folder.path} stopped: in iteration {row['iteration']} {', '.join(wrong)} is not a "
            f"finite number. Its state is not kept; {state}. A smaller learning rate often helps."
        )


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into a flag, read between iterations; a second one stops at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    previous = signal.getsignal(signal.SIGINT)

    def remember(*_: Any) -> None:
        flag.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, remember)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)
