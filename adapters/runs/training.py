"""Train a run's agents into a folder, and make them again from there."""

import dataclasses
import functools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .. import hosts
from ..agents.agent import Agent
from .checkpoints import Checkpoints, Damaged, array_shapes, as_state, flatten, require_name
from .config import RunConfig, differences, jax_options, versions
from .curve import draw_curve
from .folder import RunFolder, create_run_folder, next_free_path, require_free, resume_command
from .program import Program, compile_step, make_program, memory_faults
from .summary import describe_setting

# A run that meets NaN again and again after it was set back is not to be helped.
_MOST_SETBACKS = 10
# Options of JAX that give arrays other shapes or dtypes: a state cannot be read under others.
_SHAPING = ("jax_default_prng_impl", "jax_enable_x64")


@dataclasses.dataclass(frozen=True)
class Safety:
    """What a run does so that nothing is lost, and when something goes wrong."""

    save_every: float = 30.0
    """Seconds between two checkpoints."""
    keep: int = 2
    """How many of the newest checkpoints to keep, beside the best one."""
    on_nan: Literal["stop", "skip"] = "stop"
    """When a loss or a parameter is not finite: stop, or go on from the last checkpoint with
    other random numbers. Of several agents one that breaks is left behind."""
    on_full_disk: Literal["stop", "go-on"] = "stop"
    """When a file cannot be written: stop, or go on and write later what can still be written."""

    def check(self) -> None:
        """Refuse what cannot work."""
        if not self.save_every >= 0:
            raise ValueError(f"save_every is {self.save_every}; give 0 seconds or more.")
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}; give at least 1 checkpoint.")


_SAFE = Safety()


@dataclasses.dataclass(frozen=True)
class Progress:
    """What there is to say after an iteration.

    Attributes:
        row: what its line of `metrics.jsonl` says; of several agents, the means.
        iterations: how many there will be in all.
        seconds_left: estimated from the iterations after the first one, in which there is much
            that happens once; `None` before there are any.
        agents: how many there are.
    """

    row: dict[str, Any]
    iterations: int
    seconds_left: float | None
    agents: int = 1


class Loaded(NamedTuple):
    """An agent of a run, made again.

    Attributes:
        config: of the run.
        environment: what it was trained on.
        agent: its functions.
        state: its state.
    """

    config: RunConfig
    environment: Any
    agent: Agent
    state: Any


class Preempted(KeyboardInterrupt):
    """SIGTERM or SIGHUP came, as before a machine or a terminal goes away; the state is saved."""


def default_folder(config: RunConfig) -> Path:
    """`runs/ENVIRONMENT/AGENT/seed-N` (or `seeds-N-M`, or `sweep-SETTING`), the first free one.

    Example:
        >>> from ..agents.ppo import PPOConfig
        >>> config = RunConfig("ppo", "my_package.mazes:Corridor", "auto", 3, 1000, PPOConfig())
        >>> default_folder(config).as_posix()
        'runs/Corridor/ppo/seed-3'
    """
    environment = config.environment.rpartition(":")[2]
    if config.vary:
        name = "-".join(["sweep", *config.vary])
    elif config.seeds > 1:
        name = f"seeds-{config.seed}-{config.seed + config.seeds - 1}"
    else:
        name = f"seed-{config.seed}"
    return next_free_path(Path("runs", environment, config.agent, name))


def start(
    config: RunConfig,
    path: Path | str | None,
    report: Callable[[Progress], None],
    safety: Safety = _SAFE,
) -> RunFolder:
    """Train new agents.

    Args:
        config: what to train.
        path: a folder that does not exist yet; `default_folder` if not given.
        report: called after every iteration.
        safety: what to do so that nothing is lost.

    Returns:
        The run's folder.

    Raises:
        ValueError: the folder exists, the configuration does not fit, it takes more memory than
            there is, or training broke.
        OSError: something could not be written; what was written before is whole.
        KeyboardInterrupt: Ctrl-C; the last iteration's state is saved.
        Preempted: SIGTERM; the same.
    """
    safety.check()
    program = make_program(config, trust=True)

    def choose() -> str:
        free = default_folder(config) if path is None else Path(path)
        require_name(free)
        require_free(free)
        return str(free)

    # All that may fail comes before there is anything to clear away.
    hosts.from_first(choose)
    state = _init(program)
    compile_step(program, state)

    def create() -> str:
        folder = create_run_folder(Path(choose()))
        try:
            folder.write_config(config.to_dict())
        except OSError:
            folder.path.rmdir()
            raise
        return str(folder.path)

    folder = RunFolder(Path(hosts.from_first(create)))
    try:
        with _owned(folder):
            _Training(config, program, folder, report, safety).run(state)
    except BaseException:
        if hosts.is_first():
            folder.remove_unused()
        raise
    return folder


def resume(
    folder: RunFolder,
    report: Callable[[Progress], None],
    safety: Safety = _SAFE,
    *,
    steps: int | None = None,
    devices: int | None = None,
    any_versions: bool = False,
    trust: bool = False,
) -> RunFolder:
    """Go on with a run from its newest whole checkpoint, as if it had never stopped.

    On as many devices and with the same software it is the same bit for bit.

    Args:
        folder: the run.
        report: called after every iteration.
        safety: what to do so that nothing is lost.
        steps: environment steps to train for in all; as configured by default.
        devices: how many to train on; as many as before by default.
        any_versions: go on with other versions of libraries or options of JAX than the run was
            begun with.
        trust: whether to import code of one's own that its configuration names.

    Returns:
        The run's folder.

    Raises:
        ValueError: this is no run, another process trains it, its checkpoints do not fit or are
            damaged, it is not trusted, or it has come so far already.
        OSError: something could not be written; what was written before is whole.
        KeyboardInterrupt: Ctrl-C; the last iteration's state is saved.
        Preempted: SIGTERM; the same.
    """
    safety.check()
    values = hosts.from_first(folder.read_config)
    config = RunConfig.from_dict(values)
    changes = {"steps": steps, "devices": devices}
    config = dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})
    _require_same_software(folder, values, any_versions=any_versions)
    program = make_program(config, trust=trust)
    with _owned(folder):
        state = _restore(folder, config, program, is_owner=True)
        if state is None:
            _say(f"{folder.path} holds no checkpoint; it begins from the start.")
            state = _init(program)
        done = _iteration(state)
        taken = done * program.agent.steps_per_iteration
        if taken >= config.steps:
            raise ValueError(
                f"{folder.path} has taken {taken:,} steps already, and {config.steps:,} are asked "
                "for; ask for more with --steps."
            )
        compile_step(program, state)

        def cut() -> None:
            folder.replace_config(config.to_dict())
            folder.set_metrics_aside(done)
            gaps = set(range(1, done + 1)) - {row["iteration"] for row in folder.read_metrics()}
            if gaps:
                _say(
                    f"{folder.metrics_path} lacks {len(gaps)} of the {done} iterations before, "
                    f"from iteration {min(gaps)} on; they were lost, and the run goes on."
                )

        hosts.from_first(cut)
        _Training(config, program, folder, report, safety).run(state)
    return folder


def load(
    folder: RunFolder, *, best: bool = False, member: int | None = None, trust: bool = False
) -> Loaded:
    """Make a run's agent again, on one device.

    Where the checkpoint is damaged the newest whole one is taken, and a line says so.

    Args:
        folder: the run.
        best: its best checkpoint; the newest by default.
        member: which of several agents, from 0; by default the one with the highest mean return
            at last.
        trust: whether to import code of one's own that the run's configuration names.

    Returns:
        Configuration, environment, agent, and the agent's state.

    Raises:
        ValueError: this is no run, its checkpoints do not fit or are damaged, it is not trusted,
            or there is no such member.
    """
    values = folder.read_config()
    config = dataclasses.replace(RunConfig.from_dict(values), devices=1)
    _require_same_software(folder, values, any_versions=True)
    program = make_program(config, trust=trust)
    state = _restore(folder, config, program, best=best)
    if state is None:
        raise ValueError(f"{folder.path} holds no checkpoint yet; train the run first.")
    count = len(program.members)
    if member is not None and not 0 <= member < count:
        wanted = f"{count}, so give 0 to {count - 1}" if count > 1 else "one agent; give 0"
        raise ValueError(f"member is {member}; this run has {wanted}.")
    if count > 1:
        chosen = best_member(folder, program.members) if member is None else member
        state = jax.tree.map(lambda x: x[chosen], state)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params)):
            raise ValueError(
                f"member {chosen} broke: its parameters are not finite; choose another one."
            )
    return Loaded(config, program.environment, program.agent, state)


def best_member(folder: RunFolder, members: list[dict[str, Any]]) -> int:
    """Which agent of those that came to the last iteration had the highest mean return at last."""
    rows = folder.read_metrics()
    last: dict[int, float] = {}
    arrived = set()
    for row in rows:
        setting = {name: row.get(name) for name in members[0]}
        member = members.index(setting) if setting in members else None
        if member is not None and row["iteration"] == rows[-1]["iteration"]:
            arrived.add(member)
        if member is not None and row["mean_return"] is not None:
            last[member] = row["mean_return"]
    if not arrived:
        raise ValueError(
            f"{folder.metrics_path} does not tell which of the {len(members)} agents is best; "
            f"choose one with --member, from 0 to {len(members) - 1}."
        )
    return max(sorted(arrived), key=lambda member: last.get(member, -math.inf))


def _init(program: Program) -> Any:
    with memory_faults():
        return jax.block_until_ready(program.init())


@contextmanager
def _owned(folder: RunFolder) -> Iterator[None]:
    """Be the only ones who train a run; of several processes the first one stands for all."""
    with ExitStack() as stack:
        hosts.from_first(lambda: stack.enter_context(folder.own()))
        yield


def _require_same_software(
    folder: RunFolder, values: dict[str, Any], *, any_versions: bool
) -> None:
    """Refuse what would not go on as it was, or could not even be read."""
    here = {**versions(), **jax_options()}
    there = {**values.get("versions", {}), **values.get("jax_options", {})}
    changed = {
        name: f"{name} is {here[name]}, and was {there[name]}"
        for name in here
        if there.get(name, here[name]) != here[name]
    }
    unreadable = [changed[name] for name in _SHAPING if name in changed]
    if unreadable:
        raise ValueError(
            f"{folder.path} was trained with another option of JAX, and its numbers cannot be read "
            f"with this one: {'; '.join(unreadable)}. Set it as it was."
        )
    if changed and not any_versions:
        raise ValueError(
            f"{folder.path} was trained with other software, so it would not go on as it was: "
            f"{'; '.join(changed.values())}. Go back to what it was, or accept that with "
            "--any-versions."
        )


def _restore(
    folder: RunFolder,
    config: RunConfig,
    program: Program,
    *,
    best: bool = False,
    is_owner: bool = False,
) -> Any | None:
    """The state of the newest whole checkpoint, where the program wants it; `None` without any.

    Its owner moves those that are damaged out of the way: training comes there again.
    """
    shapes = array_shapes(program.shapes)
    arrays: dict[str, Any] = {}

    def read() -> bool:
        if not folder.checkpoints_path.is_dir():
            return False
        checkpoints = Checkpoints(folder.checkpoints_path, read_only=True)
        try:
            order = checkpoints.iterations()[::-1]
            if best and (first := checkpoints.best_iteration()) is not None:
                order = [first, *(n for n in order if n != first)]
            damaged: dict[int, str] = {}
            for iteration in order:
                try:
                    _require_same(folder, config, iteration, checkpoints.about(iteration))
                    arrays.update(checkpoints.restore_arrays(program.shapes, iteration))
                except Damaged as error:
                    damaged[iteration] = str(error)
                    continue
                for number, what in damaged.items():
                    moved = f" and now lies in {checkpoints.set_aside(number)}" if is_owner else ""
                    _say(f"{what}{moved}; that of iteration {iteration} is used.")
                return True
            if damaged:
                raise ValueError(
                    f"{'; '.join(damaged.values())}: no whole one is left. Bring back a copy of "
                    "the folder, or train again in another."
                )
            return False
        finally:
            checkpoints.close()

    if not hosts.from_first(read):
        return None
    return _place(hosts.tell(arrays, shapes), program)


def _require_same(
    folder: RunFolder, config: RunConfig, iteration: int, about: dict[str, Any]
) -> None:
    here = config.to_dict()
    try:
        # Read and written again, it has the settings that are newer than it, as config.toml does.
        there = RunConfig.from_dict(about["config"]).to_dict() if "config" in about else here
    except (ValueError, TypeError) as error:  # What config.toml says was read before.
        raise Damaged(
            f"the checkpoint of iteration {iteration} in {folder.path} is damaged: it does not "
            "tell its configuration"
        ) from error
    changed = differences(here, there)
    if changed:
        raise ValueError(
            f"the checkpoint of iteration {iteration} in {folder.path} is of another "
            f"configuration than its config.toml: {'; '.join(changed)}."
        )


def _place(arrays: dict[str, Any], program: Program) -> Any:
    """Make a state of arrays, each on the devices where the program has it."""
    if program.shardings is None:
        return as_state(arrays, program.shapes)
    placed = {}
    for path, sharding in jax.tree.leaves_with_path(program.shardings):
        name = jax.tree_util.keystr(path)
        if name in arrays:  # One without elements is not.
            array = np.asarray(arrays[name])
            placed[name] = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
    return as_state(placed, program.shapes)


def _iteration(state: Any) -> int:
    """Number of iterations behind a state; all agents of a run have as many."""
    return int(np.max(hosts.fetch(state.iteration)))


class _Training:
    """A run under way: the loop, and what it must not forget."""

    def __init__(
        self,
        config: RunConfig,
        program: Program,
        folder: RunFolder,
        report: Callable[[Progress], None],
        safety: Safety,
    ) -> None:
        self.config, self.program, self.folder = config, program, folder
        self.report, self.safety = report, safety
        self.iterations = -(-config.steps // program.agent.steps_per_iteration)
        self.score = -math.inf
        self.left_behind: set[int] = set()
        # How often the run was set back, and before which iteration.
        self.setbacks, self.broke_in = 0, 0
        # Of several processes the first one has what follows.
        self.checkpoints: Checkpoints | None = None
        self.unwritten: list[dict[str, Any]] = []
        self.fault = ""

    def run(self, state: Any) -> None:
        """Train from a state to the end, or to what stops it."""
        self.left_behind = set(hosts.from_first(self._open))
        try:
            with _signals() as received:
                self._loop(state, received)
        finally:
            if self.checkpoints is not None:
                self.checkpoints.close()

    def _open(self) -> list[int]:
        """Make ready to write; gives the agents that were left behind before."""
        self.checkpoints = Checkpoints(self.folder.checkpoints_path, keep=self.safety.keep)
        rows = self.folder.read_metrics()
        known = [row for row in rows if row.get("mean_return") is not None]
        if known:
            last = [row for row in known if row["iteration"] == known[-1]["iteration"]]
            self.score = _mean_row(last)["mean_return"]
        members = self.program.members
        if not rows or len(members) == 1:
            return []
        there = [row for row in rows if row["iteration"] == rows[-1]["iteration"]]
        arrived = [{name: row.get(name) for name in members[0]} for row in there]
        return [number for number, member in enumerate(members) if member not in arrived]

    def _loop(self, state: Any, received: Callable[[], int]) -> None:
        first = iteration = _iteration(state)
        began = saved = steady = time.monotonic()
        while iteration < self.iterations:
            before = time.monotonic()
            with memory_faults(), hosts.hearing_others():
                state, metrics, healthy = self.program.step(state)
                metrics, healthy = jax.device_get((metrics, healthy))
            rows = self._rows(iteration + 1, metrics)
            broken = self._broken(rows, healthy)
            if broken and not self._leave_behind(iteration + 1, broken):
                state = self._set_back(iteration + 1, broken)
                first = iteration = _iteration(state)
                began = time.monotonic()
                continue
            iteration += 1
            if iteration >= self.broke_in:
                self.setbacks = 0
            now = time.monotonic()
            speed = self.program.agent.steps_per_iteration * len(rows) / (now - before)
            times = {"seconds": round(now - began, 3), "steps_per_second": round(speed)}
            rows = [{**row, **times} for n, row in enumerate(rows) if n not in self.left_behind]
            if iteration == first + 1:
                steady = now
            left = _seconds_left(now - steady, iteration - first - 1, self.iterations - iteration)
            self._record(Progress(_mean_row(rows), self.iterations, left, len(rows)), rows)
            is_due = now - saved >= self.safety.save_every
            word = hosts.agree(hosts.Word(is_due, received(), self.fault))
            if word.fault:
                raise OSError(word.fault)
            if word.save or word.signal or iteration == self.iterations:
                self._save(iteration, state)
                saved = time.monotonic()
            is_ended = iteration == self.iterations and word.signal != signal.SIGINT
            if word.signal and not is_ended:
                self._finish(iteration)
                raise self._stop(word.signal, iteration)
        self._finish(iteration)

    def _rows(self, iteration: int, metrics: Any) -> list[dict[str, Any]]:
        """Lines of `metrics.jsonl`, one for each agent."""
        members = self.program.members
        steps = iteration * self.program.agent.steps_per_iteration
        if len(members) == 1:
            return [_row(iteration, steps, metrics)]
        each = [jax.tree.map(lambda x, n=n: x[n], metrics) for n in range(len(members))]
        return [
            {**member, **_row(iteration, steps, metrics)}
            for member, metrics in zip(members, each, strict=True)
        ]

    def _broken(self, rows: list[dict[str, Any]], healthy: Any) -> dict[int, str]:
        """What is not finite, by number of the agent."""
        leaves = {
            f"params{jax.tree_util.keystr(path)}": np.atleast_1d(leaf)
            for path, leaf in jax.tree.leaves_with_path(healthy)
        }
        broken = {}
        for number, row in enumerate(rows):
            names = [n for n, x in row.items() if isinstance(x, float) and not math.isfinite(x)]
            names += [name for name, is_finite in leaves.items() if not is_finite[number]]
            if names and number not in self.left_behind:
                more = f" and {len(names) - 6} more" if len(names) > 6 else ""
                verb = "is" if len(names) == 1 else "are"
                broken[number] = f"{', '.join(names[:6])}{more} {verb} not finite"
        return broken

    def _leave_behind(self, iteration: int, broken: dict[int, str]) -> bool:
        """Whether other agents go on without those that broke."""
        if len(self.left_behind) + len(broken) == len(self.program.members):
            return False
        for number, what in broken.items():
            self.left_behind.add(number)
            who = describe_setting(self.program.members[number])
            _say(f"the agent of {who} is left behind: in iteration {iteration} {what}.")
        return True

    def _set_back(self, iteration: int, broken: dict[int, str]) -> Any:
        """The last checkpoint's state with other random numbers; or the end."""

        def saved() -> list[int]:
            if self.checkpoints is None:
                return []
            self.checkpoints.wait()
            return self.checkpoints.iterations()

        iterations = hosts.from_first(saved)
        what = f"in iteration {iteration} {'; '.join(broken.values())}"
        fault = f"{self.folder.path} stopped: {what}. Its state is not kept; " + (
            f"that of iteration {iterations[-1]} is saved."
            if iterations
            else "no state was saved before."
        )
        if len(self.program.members) > 1:
            raise ValueError(f"{fault} A smaller learning rate often helps.")
        if self.safety.on_nan == "stop":
            raise ValueError(
                f"{fault} A smaller learning rate often helps; --on-nan skip goes on from the last "
                "state with other random numbers."
            )
        self.setbacks += 1
        self.broke_in = iteration
        if self.setbacks > _MOST_SETBACKS:
            raise ValueError(f"{fault} It was set back {_MOST_SETBACKS} times, in vain.")
        state = _restore(self.folder, self.config, self.program, is_owner=True)
        if self.checkpoints is not None:
            self.checkpoints.reload()
        state = self.program.init() if state is None else state
        done = _iteration(state)
        self.unwritten = [row for row in self.unwritten if row["iteration"] <= done]
        hosts.from_first(lambda: self.folder.set_metrics_aside(done))
        _say(f"{what}; going on from iteration {done} with other random numbers.")
        return state._replace(key=jax.random.fold_in(state.key, self.setbacks))

    def _record(self, progress: Progress, rows: list[dict[str, Any]]) -> None:
        """Write the metrics, hear of what was being saved, and tell the user."""
        if self.checkpoints is None:
            return
        self.unwritten += rows
        self._try(self._write_metrics)
        self._try(self.checkpoints.is_writing)
        if progress.row["mean_return"] is not None:
            self.score = progress.row["mean_return"]
        try:
            self.report(progress)
        except Exception as error:
            if jax.process_count() == 1:
                raise
            self.fault = f"the progress could not be shown ({error})."  # The others are to know.

    def _write_metrics(self) -> None:
        self.folder.append_metrics(*self.unwritten)
        self.unwritten = []

    def _save(self, iteration: int, state: Any) -> None:
        arrays = hosts.fetch(flatten(state))
        if self.checkpoints is not None:
            about = {"config": self.config.to_dict()}
            save = functools.partial(self.checkpoints.save, iteration, arrays, self.score, about)
            self._try(save)

    def _try(self, write: Callable[[], Any]) -> None:
        """Write; what cannot be written is a fault, or said and done without."""
        try:
            write()
        except OSError as error:
            if self.safety.on_full_disk == "stop":
                self.fault = str(error)
            else:
                _say(f"{error} Going on without.")

    def _finish(self, iteration: int) -> None:
        """Wait until all is written, and draw the curve."""

        def finish() -> None:
            if self.checkpoints is None:
                return
            self._write_metrics()
            self._try(self.checkpoints.wait)
            if iteration not in self.checkpoints.iterations():
                raise OSError(
                    self.fault
                    or f"the state of iteration {iteration}, the last one, is not saved; make "
                    f"room, then go on with `{resume_command(self.folder.path)}`."
                )
            if any(row["episodes"] for row in self.folder.read_metrics()):
                try:
                    draw_curve([self.folder], self.folder.curve_path)
                except Exception as error:  # Of no picture is a run to die.
                    _say(f"the curve could not be drawn ({error}).")

        hosts.from_first(finish)

    def _stop(self, number: int, iteration: int) -> KeyboardInterrupt:
        is_complete = iteration == self.iterations
        trust = " --trust" if self.config.find_outside() else ""
        goes_on = f"`{resume_command(self.folder.path)}{trust}` goes on"
        kind = KeyboardInterrupt if number == signal.SIGINT else Preempted
        return kind(
            f"stopped after iteration {iteration}, whose state is saved; "
            f"{'the run is complete' if is_complete else goes_on}."
        )


def _seconds_left(seconds: float, done: int, ahead: int) -> float | None:
    """Time for the iterations ahead, at the speed of those that are done after the first one."""
    if ahead == 0:
        return 0.0
    return seconds / done * ahead if done else None


def _row(iteration: int, steps: int, metrics: Any) -> dict[str, Any]:
    """One line of the metrics: numbers by name, `None` where there is nothing to say."""
    count = int(metrics.episodes.ended)
    row = {
        "iteration": iteration,
        "steps": steps,
        "episodes": count,
        "mean_return": float(metrics.episodes.returns) / count if count else None,
        "mean_length": float(metrics.episodes.lengths) / count if count else None,
    }
    losses = {**metrics.loss._asdict(), "gradient_norm": metrics.gradient_norm}
    return {**row, **{name: float(value) for name, value in losses.items()}}


def _mean_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over agents, of those that have something to say; the number of episodes is a sum."""
    if len(rows) == 1:
        return rows[0]
    columns = {name: [row[name] for row in rows if row[name] is not None] for name in rows[0]}
    means = {name: sum(x) / len(x) if x else None for name, x in columns.items()}
    whole = {name: rows[0][name] for name in ("iteration", "steps", "steps_per_second")}
    return {**means, **whole, "episodes": sum(columns["episodes"])}


def _say(text: str) -> None:
    if hosts.is_first():
        with suppress(OSError, ValueError):  # The terminal may be gone.
            print(f"vernal: {text}", file=sys.stderr, flush=True)


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Remember a signal, to answer it between iterations; a second Ctrl-C acts at once.

    A second SIGTERM does not: clusters send it to a job and to its steps. SIGHUP says that the
    terminal is gone, which `nohup` has told us to ignore.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none.
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        numbers.append(hangup)
    received = [0]
    if threading.current_thread() is not threading.main_thread():
        yield lambda: received[0]
        return
    previous = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def remember(number: int, _: Any) -> None:
        received[0] = number
        signal.signal(signal.SIGINT, previous[signal.SIGINT])

    for number in numbers:
        signal.signal(number, remember)
    try:
        yield lambda: received[0]
    finally:
        restore()
