"""The command's first step: what JAX must be told before it starts.

How many devices there are and which other processes take part is settled when JAX is first
used, and importing Jumanji uses it.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax

from . import hosts
from .output import make_output_safe
from .runs.folder import RunFolder


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The processes of a run; see docs/scaling.md."""

    coordinator: str | None = None
    """HOST:PORT of the first of several processes; `auto` where the cluster says all, as Slurm."""
    processes: int | None = None
    """How many processes there are."""
    process: int | None = None
    """Which of them this is, from 0."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare JAX, then run the command.

    Args:
        arguments: words after `vernal`; the process's own by default.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    make_output_safe()
    if arguments == ["--version"]:
        print(describe_version())
        return
    # Pictures go to files. A notebook names a backend to its child processes that works only there.
    os.environ["MPLBACKEND"] = "agg"
    try:
        prepare(arguments)
    except ValueError as error:
        print(f"vernal: {error}", file=sys.stderr)
        sys.exit(1)
    from .cli import main as run  # noqa: PLC0415 (see above)

    try:
        run(arguments)
    except hosts.Lost as error:
        print(f"vernal: {error}", file=sys.stderr)
        _leave_at_once()
    except Exception:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        _leave_at_once()


def describe_version() -> str:
    """As `vernal 0.1.0 (jax 0.10.2, Python 3.11.7)`."""
    ours, jax_version = map(importlib.metadata.version, ("vernal", "jax"))
    return f"vernal {ours} (jax {jax_version}, Python {platform.python_version()})"


def _leave_at_once() -> None:
    """End without taking leave of the other processes: JAX would wait for those that are lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def prepare(arguments: Sequence[str]) -> None:
    """Join other processes and divide the CPU, as the flags say; what is wrong in them waits.

    Args:
        arguments: words after `vernal`.

    Raises:
        ValueError: the other processes cannot be joined, or it is not said how.
    """
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--devices", "--processes", "--process", "--coordinator"):
        flags.add_argument(name)
    try:
        given, _ = flags.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return
    devices, processes, process = map(_whole, (given.devices, given.processes, given.process))
    if given.coordinator is not None:
        hosts.connect(given.coordinator, processes, process)
        return
    if (given.processes, given.process) != (None, None):
        raise ValueError(
            "--processes and --process are of several processes, which find each other by "
            "--coordinator HOST:PORT."
        )
    if given.devices is None and arguments[:1] == ["resume"]:
        devices = _recorded_devices(arguments[1:])
    if devices and devices <= _MOST_PARTS:
        jax.config.update("jax_num_cpu_devices", devices)


def _recorded_devices(words: Sequence[str]) -> int | None:
    """On how many devices the run was trained that is to be resumed."""
    for folder in (RunFolder(Path(word)) for word in words):
        if folder.config_path.is_file():
            with contextlib.suppress(ValueError):
                count = folder.read_config().get("devices")
                return count if type(count) is int and count > 0 else None
    return None


# A CPU cut into more parts starts for hours; what asks for them is refused once JAX has started.
_MOST_PARTS = 1024


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
