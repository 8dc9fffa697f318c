"""The learning curves of one run or several, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from .folder import RunFolder
from .summary import describe_setting, margins, read_curves


def draw_curve(folders: Sequence[RunFolder], path: Path) -> None:
    """Draw mean return and length of the episodes that ended, over environment steps.

    Of several seeds the mean over seeds, and its 95 % interval as a band.

    Args:
        folders: the runs, one line each, or one for each setting of a sweep.
        path: picture to write.

    Raises:
        ValueError: no run has an iteration in which an episode ended.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    drawn = False
    lines = [(_name(folder), curves) for folder in folders for curves in read_curves(folder)]
    for name, curves in lines:
        setting = describe_setting(curves.setting)
        label = ", ".join(filter(None, [name if len(folders) > 1 else "", setting]))
        for axis, values in zip(axes, (curves.returns, curves.lengths), strict=True):
            drawn |= _draw(axis, curves.steps, values, label)
    if not drawn:
        raise ValueError("there is nothing to draw yet: no episode has ended in these runs.")
    for axis, title in zip(axes, ("return", "length in steps"), strict=True):
        axis.set(xlabel="environment steps", ylabel=f"mean episode {title}")
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        axes[0].legend(frameon=False)
    if len(folders) == 1:
        figure.suptitle(_name(folders[0]))
    figure.savefig(path, dpi=120)


def _draw(axis: Any, steps: Any, values: Any, label: str) -> bool:
    """One line, with a band if there are several seeds; whether there is anything to see."""
    known = ~np.all(np.isnan(values), axis=0)
    steps, values = steps[known], values[:, known]
    mean, marker = np.nanmean(values, axis=0), "o" if len(steps) < 30 else None
    (line,) = axis.plot(steps, mean, marker=marker, ms=3, label=label)
    if len(values) > 1:
        margin = margins(values)
        axis.fill_between(
            steps, mean - margin, mean + margin, color=line.get_color(), alpha=0.2, lw=0
        )
    return bool(known.any())


def _name(folder: RunFolder) -> str:
    return "/".join(folder.path.parts[-3:])
