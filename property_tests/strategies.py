"""What the laws draw their data from, and how near is near."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

# Few shapes, for each is compiled; unequal lengths, so that no two axes can be confused.
BATCHES = [(), (1,), (3, 2)]
ROLLOUTS = [(1,), (6,), (4, 2)]


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers that float32 holds, between bounds rounded to it.

    None is subnormal: compiled code flushes those to 0 in some operations only.
    """
    low, high = (np.float32(bound).item() for bound in (low, high))
    return st.floats(low, high, width=32, allow_subnormal=False)


UNIT = numbers(0, 1)
DISCOUNTS = st.sampled_from([0.0, np.float32(0.99).item(), 1.0]) | UNIT


def arrays(
    shape: tuple[int, ...], elements: st.SearchStrategy[Any], dtype: Any = np.float32
) -> st.SearchStrategy[np.ndarray]:
    """Arrays whose every entry is drawn: filled ones would hide mistakes of index."""
    return hnp.arrays(dtype, shape, elements=elements, fill=st.nothing())


def floats(
    shape: tuple[int, ...], low: float = -1e4, high: float = 1e4
) -> st.SearchStrategy[np.ndarray]:
    """Float32 arrays within bounds."""
    return arrays(shape, numbers(low, high))


def bools(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Boolean arrays."""
    return arrays(shape, st.booleans(), np.bool_)


def alike(
    shapes: list[tuple[int, ...]], *kinds: Callable[[tuple[int, ...]], st.SearchStrategy[Any]]
) -> st.SearchStrategy[tuple[Any, ...]]:
    """One value of each kind, all of one shape."""
    shape = st.sampled_from(shapes)
    return shape.flatmap(lambda chosen: st.tuples(*(kind(chosen) for kind in kinds)))


@st.composite
def masks(draw: st.DrawFn, shape: tuple[int, ...]) -> np.ndarray:
    """Masks that leave at least one action of each row legal."""
    legal = draw(bools(shape))
    kept = draw(arrays(shape[:-1], st.integers(0, shape[-1] - 1), np.int32))
    return legal | (np.arange(shape[-1]) == kept[..., None])


class Rollout(NamedTuple):
    """The arrays that every estimator takes."""

    rewards: np.ndarray
    discounts: np.ndarray
    values: np.ndarray
    next_values: np.ndarray
    resets: np.ndarray

    @property
    def for_returns(self) -> tuple[np.ndarray, ...]:
        """What the returns take: all but the values."""
        return self.rewards, self.discounts, self.next_values, self.resets

    @property
    def wide(self) -> "Rollout":
        """The same numbers in float64."""
        return Rollout._make([*(x.astype(np.float64) for x in self[:4]), self.resets])

    @property
    def narrow(self) -> "Rollout":
        """The same numbers in float32."""
        return Rollout._make([*(x.astype(np.float32) for x in self[:4]), self.resets])

    @property
    def magnitudes(self) -> "Rollout":
        """The rollout whose estimates are sums of the magnitudes of this one's terms."""
        return self._replace(
            rewards=abs(self.rewards), values=-abs(self.values), next_values=abs(self.next_values)
        )


@st.composite
def rollouts(
    draw: st.DrawFn, shape: tuple[int, ...] | None = None, consistent: bool = False
) -> Rollout:
    """Rollouts; consistent ones arrive in the very state whose value is on the next row."""
    shape = draw(st.sampled_from(ROLLOUTS)) if shape is None else shape
    resets = draw(bools(shape))
    values, next_values = draw(floats(shape)), draw(floats(shape))
    if consistent:
        next_values[:-1] = np.where(resets[:-1], next_values[:-1], values[1:])
    discounts = draw(arrays(shape, DISCOUNTS))
    return Rollout(draw(floats(shape)), discounts, values, next_values, resets)


def assert_near(actual: Any, wanted: Any, scale: Any = None, tolerance: float = 1e-5) -> None:
    """Compare in float64, with an error relative to `scale`.

    Args:
        actual: what was computed.
        wanted: what should have been.
        scale: size of the terms that were summed up to it; its own size by default.
        tolerance: how many times `scale` the error may be.
    """
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    assert actual.shape == wanted.shape
    allowed = tolerance * np.abs(wanted if scale is None else scale) + 1e-30
    wrong = ~(np.abs(actual - wanted) <= allowed)
    assert not wrong.any(), f"{actual[wrong]} should be {wanted[wrong]}"
