"""A run's folder: what lies where, and that no run is ever overwritten by another."""

import contextlib
import dataclasses
import json
import os
import platform
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import tomli_w

try:
    import fcntl
except ImportError:  # Windows has no such locks.
    fcntl = None


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of a run, with its configuration and metrics.

    Attributes:
        path: the folder.
        metrics_name: of the file of metrics in it.
    """

    path: Path
    metrics_name: str = "metrics.jsonl"

    @property
    def config_path(self) -> Path:
        """Everything needed to make the agent again."""
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        """One JSON object a line, one line an iteration."""
        return self.path / self.metrics_name

    @property
    def checkpoints_path(self) -> Path:
        """Orbax checkpoints: the newest ones and the best."""
        return self.path / "checkpoints"

    @property
    def curve_path(self) -> Path:
        """Picture of the returns over steps."""
        return self.path / "curve.png"

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Be the only one that trains the run; the system forgets an owner that was killed.

        Raises:
            ValueError: another process trains it.
            OSError: nothing can be written here.
        """
        path = self.path / "lock"
        with _lock(path) as file:
            with contextlib.suppress(OSError):  # On a full disk it has no name.
                os.truncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the configuration, once.

        Raises:
            OSError: it could not be written; nothing is left of it.
        """
        try:
            with self.config_path.open("xb") as file:
                tomli_w.dump(config, file)
        except FileExistsError:
            raise
        except OSError as error:
            self.config_path.unlink(missing_ok=True)
            raise OSError(f"{self.config_path} could not be written ({error.strerror}).") from error

    def replace_config(self, config: dict[str, Any]) -> None:
        """Put another configuration in the place of the one that is there, at one stroke."""
        aside = self.config_path.with_suffix(".toml.new")
        aside.write_text(tomli_w.dumps(config), encoding="utf-8")
        aside.replace(self.config_path)

    def read_config(self) -> dict[str, Any]:
        """Read the configuration: data, of which nothing is imported or run.

        Raises:
            ValueError: this is no run's folder, or its configuration is damaged.
        """
        if not self.config_path.is_file():
            raise ValueError(
                f"{self.path} is no run: it has no config.toml. Give the folder that "
                "`vernal train` named, as runs/maze-medium/ppo/seed-0."
            )
        try:
            return tomllib.loads(self.config_path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.config_path} is damaged: {error}.") from None

    def append_metrics(self, *rows: dict[str, Any]) -> None:
        """Add a line for each row; all of them are in the file when this returns, or none.

        Raises:
            OSError: they could not be written; the lines before them are whole.
        """
        size = self.metrics_path.stat().st_size if self.metrics_path.is_file() else 0
        try:
            with self.metrics_path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            if self.metrics_path.is_file():
                os.truncate(self.metrics_path, size)
            raise OSError(
                f"{self.metrics_path} could not be written ({error.strerror}); what was written "
                f"before is whole. Make room, then go on with `{resume_command(self.path)}`."
            ) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines; one that was cut short by a crash or is damaged is left out."""
        return [row for row in map(_parse_row, self._metrics_lines()) if row is not None]

    def set_metrics_aside(self, iteration: int) -> None:
        """Move the lines after an iteration, and what is damaged, to another file.

        The run goes on from there: it will write those lines again, or others.
        """
        lines = self._metrics_lines()
        rows = [_parse_row(line) for line in lines]
        stays = [row is not None and row["iteration"] <= iteration for row in rows]
        aside = self.metrics_path.with_name("metrics-set-aside.jsonl")
        if not all(stays):
            with aside.open("ab") as file:
                file.writelines(line + b"\n" for line, s in zip(lines, stays, strict=True) if not s)
        new = self.metrics_path.with_suffix(".jsonl.new")
        new.write_bytes(b"".join(x + b"\n" for x, s in zip(lines, stays, strict=True) if s))
        new.replace(self.metrics_path)

    def remove_unused(self) -> None:
        """Remove the folder of a run that was not trained for even one iteration."""
        with contextlib.suppress(OSError):
            self.checkpoints_path.rmdir()
        with contextlib.suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [self.config_path.name]:
                self.config_path.unlink()
                self.path.rmdir()

    def _metrics_lines(self) -> list[bytes]:
        return self.metrics_path.read_bytes().splitlines() if self.metrics_path.is_file() else []


def resume_command(path: Path) -> str:
    """What to type to go on with a run, as a shell reads it.

    Example:
        >>> resume_command(Path("my runs"))
        "vernal resume 'my runs'"
    """
    return f"vernal resume {shlex.quote(str(path))}"


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(row, dict) and type(row.get("iteration")) is int
    return row if is_whole else None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[IO[str]]:
    """A file that is locked as long as it is open; its text tells who has it."""
    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise OSError(
                f"{path.parent} cannot be written to ({error.strerror}); copy the run to where "
                "it can, and go on there."
            ) from error
        with file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                owner = file.read() or "another process"
                raise ValueError(
                    f"{path.parent} is being trained by {owner}; wait for its end, or stop it."
                ) from None
            except OSError:
                pass  # A file system without locks: nothing can be known, and training goes on.
            if _is_still(path, file):
                yield file
                return


def _is_still(path: Path, file: IO[str]) -> bool:
    """Whether an owner before did not remove the file in the moment before it was locked."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def create_run_folder(path: Path) -> RunFolder:
    """Make a new, empty folder for a run.

    Args:
        path: where; its parents are made too.

    Returns:
        The folder.

    Raises:
        ValueError: something is there already, or a file is where its parent should be.
        OSError: it may not be made.

    Example:
        >>> import pathlib, tempfile
        >>> parent = pathlib.Path(tempfile.mkdtemp())
        >>> create_run_folder(parent / "run").config_path.name
        'config.toml'
    """
    require_free(path)
    path.mkdir(parents=True)
    return RunFolder(path)


def require_free(path: Path) -> None:
    """Refuse a path at which no folder can be made.

    Args:
        path: where.

    Raises:
        ValueError: something is there already, or a file is where its parent should be.
        OSError: it may not be made.
    """
    if os.path.lexists(path):
        raise ValueError(
            f"{path} exists already, and a run is never overwritten; give another folder with "
            f"--folder, go on with `{resume_command(path)}`, or remove it yourself."
        )
    parent = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not parent.is_dir():
        raise ValueError(f"{path} cannot be made: {parent} is a file; give another --folder.")
    if not os.access(parent, os.W_OK):
        raise OSError(f"{path} cannot be made: {parent} is read-only; give another --folder.")


def next_free_path(path: Path) -> Path:
    """The path itself if nothing is there, else the first free one with a number added.

    Example:
        >>> import pathlib, tempfile
        >>> taken = pathlib.Path(tempfile.mkdtemp())
        >>> next_free_path(taken).name == taken.name + "-2"
        True
    """
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate
