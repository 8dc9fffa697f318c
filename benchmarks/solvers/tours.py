"""The travelling salesman: the shortest way through all cities and back."""

import numpy as np
from jaxtyping import Float
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist

from .program import minimise


def tour_length(cities: Float[np.ndarray, "n 2"]) -> float:
    """Length of the way through the cities in the order given, and back to the first.

    Example:
        >>> tour_length(np.array([[0.0, 0.0], [0.0, 3.0], [4.0, 3.0]]))
        12.0
    """
    return float(np.linalg.norm(cities - np.roll(cities, -1, axis=0), axis=1).sum())


def shortest_tour(cities: Float[np.ndarray, "n 2"]) -> float:
    """Length of the shortest tour, by integer programming.

    First every city is joined to two others as cheaply as can be, which may give several
    circles. Each circle is then asked to send two edges to the rest, and the program is solved
    again, until one circle is left: Dantzig, Fulkerson and Johnson 1954,
    https://doi.org/10.1287/opre.2.4.393. As no tour breaks a rule, the circle is the shortest.

    Args:
        cities: x and y of each.

    Returns:
        The length, way back included.

    Example:
        >>> shortest_tour(np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 4.0], [3.0, 0.0]]))
        14.0
    """
    n = len(cities)
    if n <= 3:
        return tour_length(cities)
    start, end = np.triu_indices(n, 1)
    lengths = cdist(cities, cities)[start, end]
    touches = (start == np.arange(n)[:, None]) | (end == np.arange(n)[:, None])
    rules, most = touches.astype(float), np.full(n, 2.0)
    while True:
        taken = minimise(lengths, rules, 2, most).x > 0.5
        edges = coo_array((np.ones(n), (start[taken], end[taken])), shape=(n, n))
        circles, circle = connected_components(edges, directed=False)
        if circles == 1:
            return float(lengths[taken].sum())
        leaves = [(circle[start] == c) != (circle[end] == c) for c in range(circles)]
        rules, most = np.vstack([rules, leaves]), np.append(most, np.full(circles, np.inf))


def nearest_neighbour(cities: Float[np.ndarray, "n 2"]) -> float:
    """Length of the tour that starts at the first city and goes on to the nearest new one.

    Example:
        >>> nearest_neighbour(np.array([[0.0, 0.0], [1.0, 0.0], [-2.0, 0.0]]))
        6.0
    """
    order, left = [0], list(range(1, len(cities)))
    while left:
        away = np.linalg.norm(cities[left] - cities[order[-1]], axis=1)
        order.append(left.pop(int(away.argmin())))
    return tour_length(cities[order])
