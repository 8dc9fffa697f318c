"""Graph colouring: the fewest colours that leave no two neighbours alike."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool

from .program import minimise


def fewest_colours(adjacent: Bool[np.ndarray, "n n"]) -> int:
    """Chromatic number of a graph, by integer programming.

    The nodes of one colour are independent, so a colouring covers the graph with independent
    sets, and the largest ones are enough: as few of them as can be.

    Args:
        adjacent: symmetric, with a false diagonal.

    Returns:
        The number of colours.

    Example:
        >>> fewest_colours(~np.eye(3, dtype=bool))
        3
    """
    n = len(adjacent)
    apart = [set(np.flatnonzero(~row).tolist()) - {node} for node, row in enumerate(adjacent)]
    sets = list(_largest_sets(apart, set(), set(range(n)), set()))
    covers = np.array([[node in members for members in sets] for node in range(n)], float)
    return round(minimise(np.ones(len(sets)), covers, least=1).fun)


def _largest_sets(
    apart: list[set[int]], chosen: set[int], free: set[int], passed: set[int]
) -> Iterator[set[int]]:
    """Every independent set to which no node can be added: Bron and Kerbosch 1973."""
    if not free and not passed:
        yield chosen
    for node in sorted(free):
        near = apart[node]
        yield from _largest_sets(apart, chosen | {node}, free & near, passed & near)
        free, passed = free - {node}, passed | {node}


def first_fit(adjacent: Bool[np.ndarray, "n n"]) -> int:
    """Colours used when the nodes, in their order, take the first colour no neighbour has.

    Example:
        >>> first_fit(~np.eye(3, dtype=bool))
        3
    """
    colours = np.full(len(adjacent), -1)
    for node in range(len(adjacent)):
        colours[node] = _first_free(colours[adjacent[node]])
    return int(colours.max()) + 1


def most_constrained_first(adjacent: Bool[np.ndarray, "n n"]) -> int:
    """Colours used when the node with most colours around it goes first: DSATUR.

    Ties go to the node with more neighbours: Brélaz 1979, https://doi.org/10.1145/359094.359101.

    Example:
        >>> most_constrained_first(~np.eye(3, dtype=bool))
        3
    """
    colours = np.full(len(adjacent), -1)

    def constraint(node: int) -> tuple[int, int]:
        around = set(colours[adjacent[node]].tolist()) - {-1}
        return len(around), int(adjacent[node].sum())

    for _ in range(len(adjacent)):
        node = max(np.flatnonzero(colours < 0).tolist(), key=constraint)
        colours[node] = _first_free(colours[adjacent[node]])
    return int(colours.max()) + 1


def _first_free(taken: np.ndarray) -> int:
    return min(set(range(len(taken) + 1)) - set(taken.tolist()))
