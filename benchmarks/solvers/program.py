"""Integer programs: the cheapest choice under linear rules, found and proven by HiGHS."""

from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def minimise(
    costs: Any,
    rules: Any,
    least: Any = -np.inf,
    most: Any = np.inf,
    *,
    lower: Any = 0,
    upper: Any = 1,
    whole: Any = 1,
    seconds: float | None = None,
) -> Any:
    """Choose numbers `x` with the least `costs @ x` such that `least <= rules @ x <= most`.

    Args:
        costs: of each unit of each number.
        rules: a matrix, dense or sparse.
        least: of each rule, or of all.
        most: likewise.
        lower: of each number, or of all.
        upper: likewise.
        whole: 1 for each number that must be whole, else 0.
        seconds: to stop after; until the optimum is proven by default.

    Returns:
        `x`, `fun` (its cost) and `mip_dual_bound` (no cost is less); `None` what is not known.

    Raises:
        RuntimeError: without a limit of time, no optimum was found.

    Example:
        >>> minimise([1, 2], [[1, 1]], least=1).x.tolist()
        [1.0, 0.0]
    """
    solution = milp(
        costs,
        constraints=LinearConstraint(rules, least, most),
        bounds=Bounds(lower, upper),
        integrality=np.broadcast_to(whole, np.shape(costs)),
        options={"mip_rel_gap": 0} | ({} if seconds is None else {"time_limit": seconds}),
    )
    if seconds is None and solution.status != 0:
        raise RuntimeError(f"the integer program has no solution: {solution.message}")
    return solution
