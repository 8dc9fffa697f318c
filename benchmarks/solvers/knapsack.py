"""Knapsacks: the items of greatest value that one knapsack holds."""

import numpy as np
from jaxtyping import Float

from .program import minimise


def greatest_value(
    weights: Float[np.ndarray, " items"], values: Float[np.ndarray, " items"], capacity: float
) -> float:
    """Value of the best choice, by integer programming.

    Args:
        weights: what each item takes of the capacity.
        values: what each adds to the sum.
        capacity: what the chosen items may weigh together.

    Returns:
        The greatest sum of values; weights are exact to a millionth.

    Example:
        >>> float(greatest_value(np.array([2.0, 2.0, 3.0]), np.array([3.0, 3.0, 5.0]), 4.0))
        6.0
    """
    taken = minimise(-values, weights[None], most=capacity).x > 0.5
    return float(values[taken].sum(dtype=float))


def densest_first(
    weights: Float[np.ndarray, " items"], values: Float[np.ndarray, " items"], capacity: float
) -> float:
    """Value of taking, again and again, the item of most value per weight that still fits.

    Example:
        >>> float(densest_first(np.array([2.0, 2.0, 3.0]), np.array([3.0, 3.0, 5.0]), 4.0))
        5.0
    """
    total = 0.0
    for item in np.argsort(-values / weights):
        if weights[item] <= capacity:
            capacity -= float(weights[item])
            total += float(values[item])
    return total
