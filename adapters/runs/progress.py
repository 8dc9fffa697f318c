"""The live progress of a training run, on a terminal or in a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..output import make_console
from .training import Progress


@contextmanager
def progress_line(log_every_seconds: float = 5.0) -> Iterator[Callable[[Progress], None]]:
    """Show an iteration's numbers: one line that is rewritten, or lines now and then.

    Args:
        log_every_seconds: where the output is no terminal, time between two lines.

    Yields:
        What to call after every iteration.
    """
    console = make_console()
    if console.is_terminal:
        with Live(Text("compiling ..."), console=console) as live:
            yield lambda progress: live.update(_line(progress))
        return
    printed = -log_every_seconds

    def report(progress: Progress) -> None:
        nonlocal printed
        now, row = time.monotonic(), progress.row
        is_last = row["iteration"] == progress.iterations
        if row["iteration"] == 1 or is_last or now - printed >= log_every_seconds:
            printed = now
            print(describe(progress), flush=True)

    yield report


def describe(progress: Progress) -> str:
    """One line for a person.

    Args:
        progress: of an iteration.

    Returns:
        Steps, speed, returns, losses and the time left.

    Example:
        >>> row = {"steps": 8192, "steps_per_second": 60000, "episodes": 0, "mean_return": None}
        >>> row |= {"mean_length": None, "policy": -0.01, "value": 0.2, "entropy": 1.0, "kl": 0.0}
        >>> describe(Progress(row, iterations=10, seconds_left=75.0))
        '8,192 steps · 60,000/s · no episode ended yet · policy -0.010 value 0.200 entropy 1.00 kl \
0.0000 · 1:15 left'
    """
    row = progress.row
    episodes = (
        f"return {row['mean_return']:.3f} length {row['mean_length']:.1f} "
        f"of {row['episodes']} episodes"
        if row["episodes"]
        else "no episode ended yet"
    )
    left = "" if progress.seconds_left is None else f" · {_clock(progress.seconds_left)} left"
    return (
        f"{row['steps']:,} steps · {row['steps_per_second']:,}/s · {episodes} · "
        f"policy {row['policy']:.3f} value {row['value']:.3f} entropy {row['entropy']:.2f} "
        f"kl {row['kl']:.4f}{left}"
    )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _line(progress: Progress) -> Table:
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=progress.iterations, completed=progress.row["iteration"], width=20)
    grid.add_row(bar, describe(progress))
    return grid
