"""What several agents reached: curves and numbers over the seeds of each setting."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy  # Loads scipy.stats when it is first used: most commands need not wait for it.
from jaxtyping import Bool, Float, Int

from .config import RunConfig
from .folder import RunFolder

# Agarwal et al. 2021 compare by the interquartile mean; with fewer seeds it is that of two.
_ENOUGH_SEEDS = 5
_LAST_PART = 0.1


class Curves(NamedTuple):
    """What the agents of one setting did, a row for each seed; NaN where no episode ended.

    Attributes:
        setting: the varied settings, empty where nothing was varied.
        arrived: whether an agent came to the last iteration; the others broke.
        steps: environment steps of each iteration.
        episodes: number of episodes that ended in it.
        returns: their mean return, in units of the rewards.
        lengths: their mean length, in steps.
    """

    setting: dict[str, Any]
    arrived: Bool[np.ndarray, " S"]
    steps: Int[np.ndarray, " I"]
    episodes: Int[np.ndarray, "S I"]
    returns: Float[np.ndarray, "S I"]
    lengths: Float[np.ndarray, "S I"]


class Summary(NamedTuple):
    """Numbers of one setting over its seeds, of mean episode returns.

    Attributes:
        setting: the varied settings.
        seeds: how many agents the means are over: they ended an episode in the last tenth.
        broken: how many did not come to the end, for their numbers were not finite.
        last: mean over seeds of the last tenth of training.
        margin: half of its 95 % interval, by Student's t; NaN of one seed.
        iqm: interquartile mean of the same; NaN of fewer than five seeds.
        iqm_interval: its 95 % interval, by bootstrap over seeds.
        whole: mean over seeds of all of training: higher is faster.
    """

    setting: dict[str, Any]
    seeds: int
    broken: int
    last: float
    margin: float
    iqm: float
    iqm_interval: tuple[float, float]
    whole: float


def read_curves(folder: RunFolder) -> list[Curves]:
    """Read a run's metrics, a setting at a time.

    Args:
        folder: of one agent or several.

    Returns:
        Curves of each setting, in the order they were given.
    """
    config = RunConfig.from_dict(folder.read_config())
    members = config.members()
    rows = folder.read_metrics()
    if len(members) == 1:
        rows = [{**members[0], **row} for row in rows]
    iterations = sorted({row["iteration"] for row in rows})
    place = {iteration: number for number, iteration in enumerate(iterations)}
    steps = np.zeros(len(iterations), int)
    curves = []
    for setting in _settings(members):
        shape = (config.seeds, len(iterations))
        episodes, returns = np.zeros(shape, int), np.full(shape, np.nan)
        lengths, is_there = returns.copy(), np.zeros(shape, bool)
        for row in rows:
            at = row["seed"] - config.seed, place[row["iteration"]]
            steps[at[1]] = row["steps"]
            if all(row[name] == value for name, value in setting.items()):
                is_there[at], episodes[at] = True, row["episodes"]
                if row["episodes"]:
                    returns[at], lengths[at] = row["mean_return"], row["mean_length"]
        arrived = np.all(is_there[:, -1:], axis=1)
        curves.append(Curves(setting, arrived, steps, episodes, returns, lengths))
    return curves


def summarise(curves: Curves) -> Summary:
    """Put the seeds of a setting together.

    Agarwal et al. 2021, https://arxiv.org/abs/2108.13264, on interquartile means.

    Args:
        curves: of one setting.

    Returns:
        The numbers.

    Example:
        >>> returns = np.array([[0.0, 1.0], [0.0, 3.0]])
        >>> arrived, episodes = np.ones(2, bool), np.ones((2, 2), int)
        >>> curves = Curves({}, arrived, np.arange(2), episodes, returns, returns)
        >>> summary = summarise(curves)
        >>> summary.last, summary.whole, round(summary.margin, 2)
        (2.0, 1.0, 12.71)
    """
    count = curves.returns.shape[1]
    last = _means(curves, slice(count - max(1, round(_LAST_PART * count)), count))
    counted = curves.arrived & ~np.isnan(last)
    last, whole = last[counted], _means(curves, slice(None))[counted]
    iqm, interval = float("nan"), (float("nan"), float("nan"))
    if len(last) >= _ENOUGH_SEEDS:
        iqm = _interquartile_mean(last)
        low, high = scipy.stats.bootstrap(
            (last,), _interquartile_mean, method="percentile", rng=np.random.default_rng(0)
        ).confidence_interval
        interval = float(low), float(high)
    return Summary(
        setting=curves.setting,
        seeds=len(last),
        broken=int(np.sum(~curves.arrived)),
        last=float(np.mean(last)) if len(last) else float("nan"),
        margin=float(margins(last[:, None])[0]),
        iqm=float(iqm),
        iqm_interval=interval,
        whole=float(np.mean(whole)) if len(last) else float("nan"),
    )


def margins(values: Float[np.ndarray, "S I"]) -> Float[np.ndarray, " I"]:
    """Half of the 95 % interval of the mean over seeds, by Student's t; NaN of fewer than two."""
    count = np.sum(~np.isnan(values), axis=0)
    enough = np.maximum(count, 2)
    centre = np.nansum(values, axis=0) / np.maximum(count, 1)
    variance = np.nansum((values - centre) ** 2, axis=0) / (enough - 1)
    margin = scipy.stats.t.ppf(0.975, enough - 1) * np.sqrt(variance / enough)
    return np.where(count > 1, margin, np.nan)


def describe_setting(setting: dict[str, Any]) -> str:
    """Such as `gamma 0.9, gae_lambda 1`."""
    return ", ".join(f"{name} {describe_value(value)}" for name, value in setting.items())


def describe_value(value: float | int) -> str:
    """All digits that a float32 has, or a whole number as it is."""
    return str(value) if isinstance(value, int) else f"{value:.7g}"


def _settings(members: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    without = [{k: v for k, v in member.items() if k != "seed"} for member in members]
    return [setting for n, setting in enumerate(without) if setting not in without[:n]]


def _means(curves: Curves, part: slice) -> Float[np.ndarray, " S"]:
    """Mean return of each seed over all episodes of a part of training; NaN if none ended."""
    episodes, returns = curves.episodes[:, part], np.nan_to_num(curves.returns[:, part])
    count = episodes.sum(axis=1)
    return np.where(count, (episodes * returns).sum(axis=1) / np.maximum(count, 1), np.nan)


def _interquartile_mean(values: Any, axis: int = -1) -> Any:
    return scipy.stats.trim_mean(values, 0.25, axis=axis)
