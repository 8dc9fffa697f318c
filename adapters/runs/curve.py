"""The learning curve of one run or several, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from .folder import RunFolder


def draw_curve(folders: Sequence[RunFolder], path: Path) -> None:
    """Draw mean return and length of the episodes that ended, over environment steps.

    Args:
        folders: the runs, one line each.
        path: picture to write.

    Raises:
        ValueError: no run has an iteration in which an episode ended.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    drawn = False
    for folder in folders:
        rows = [row for row in folder.read_metrics() if row["episodes"]]
        steps = [row["steps"] for row in rows]
        drawn = drawn or bool(rows)
        label = "/".join(folder.path.parts[-3:])
        for axis, name in zip(axes, ("mean_return", "mean_length"), strict=True):
            marker = "o" if len(rows) < 30 else None
            axis.plot(steps, [row[name] for row in rows], marker=marker, ms=3, label=label)
    if not drawn:
        raise ValueError("there is nothing to draw yet: no episode has ended in these runs.")
    for axis, title in zip(axes, ("return", "length in steps"), strict=True):
        axis.set(xlabel="environment steps", ylabel=f"mean episode {title}")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if len(folders) > 1:
        axes[0].legend(frameon=False)
    else:
        figure.suptitle("/".join(folders[0].path.parts[-3:]))
    figure.savefig(path, dpi=120)
