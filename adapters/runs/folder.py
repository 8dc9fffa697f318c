"""A run's folder: what lies where, and that no run is ever overwritten by another."""

import dataclasses
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import tomli_w


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
        aside.write_text(tomli_w.dumps(config))
        aside.replace(self.config_path)

    def read_config(self) -> dict[str, Any]:
        """Read the configuration.

        Raises:
            ValueError: this is no run's folder, or its configuration is damaged.
        """
        if not self.config_path.is_file():
            raise ValueError(
                f"{self.path} is no run: it has no config.toml. Give the folder that "
                "`vernal train` named, as runs/maze-medium/ppo/seed-0."
            )
        try:
            return tomllib.loads(self.config_path.read_text())
        except tomllib.TOMLDecodeError as error:
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
                f"before is whole. Make room, then go on with `vernal resume {self.path}`."
            ) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines; one that was cut short by a crash is left out."""
        rows = []
        if self.metrics_path.is_file():
            for line in self.metrics_path.read_text().splitlines():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
        return rows

    def cut_metrics(self, iteration: int) -> None:
        """Drop the lines after an iteration, to go on from its checkpoint."""
        kept = [row for row in self.read_metrics() if row["iteration"] <= iteration]
        aside = self.metrics_path.with_suffix(".jsonl.new")
        aside.write_text("".join(json.dumps(row) + "\n" for row in kept))
        aside.replace(self.metrics_path)

    def set_metrics_aside(self, iteration: int) -> None:
        """Move the lines after an iteration to another file: the run will not come there again."""
        aside = RunFolder(self.path, metrics_name="metrics-set-aside.jsonl")
        aside.append_metrics(*(row for row in self.read_metrics() if row["iteration"] > iteration))
        self.cut_metrics(iteration)


def create_run_folder(path: Path) -> RunFolder:
    """Make a new, empty folder for a run.

    Args:
        path: where; its parents are made too.

    Returns:
        The folder.

    Raises:
        ValueError: something is there already.

    Example:
        >>> import pathlib, tempfile
        >>> parent = pathlib.Path(tempfile.mkdtemp())
        >>> create_run_folder(parent / "run").config_path.name
        'config.toml'
    """
    try:
        path.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"{path} exists already, and a run is never overwritten; give another folder with "
            f"--folder, go on with `vernal resume {path}`, or remove it yourself."
        ) from None
    return RunFolder(path)


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
