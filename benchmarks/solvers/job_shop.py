"""Job shops: the shortest schedule of jobs whose operations each take one machine for a while.

`machines[j, o]` and `durations[j, o]` belong to operation `o` of job `j`; both are -1 after a
job's last operation. A schedule is the start of each operation, in the same places.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from scipy.sparse import lil_array

from .program import minimise

Table = Int[np.ndarray, "jobs operations"]


class Makespan(NamedTuple):
    """How long the shortest schedule takes.

    Attributes:
        least: no schedule is shorter.
        found: length of one that exists; the optimum where both are equal.
    """

    least: int
    found: int


def shortest_makespan(
    machines: Table, durations: Table, *, tries: int = 1000, seconds: float = 10.0
) -> Makespan:
    """Length of the shortest schedule, proven where that is quick.

    Often a list schedule takes no longer than the busiest machine must work, and is the
    optimum. Else integer programming goes on between the two: for each two operations of a
    machine, which is first?

    Args:
        machines: of each operation.
        durations: of each, at least 1.
        tries: list schedules to make.
        seconds: after which the integer program is left, and bounds are all there is.

    Returns:
        The bounds, equal where the optimum is proven.

    Example:
        >>> shortest_makespan(np.array([[0, 1], [0, -1]]), np.array([[1, 3], [2, -1]]))
        Makespan(least=4, found=4)
    """
    least = machine_bound(machines, durations)
    starts = improved_schedule(machines, durations, tries=tries, enough=least)
    found = makespan(starts, durations)
    if least == found:
        return Makespan(least, found)
    solution = _solve_disjunctions(machines, durations, least, found, seconds)
    if solution.mip_dual_bound is not None:
        least = max(least, int(np.ceil(solution.mip_dual_bound - 1e-3)))
    if solution.x is not None:
        found = min(found, round(solution.fun))
    return Makespan(least, found)


def makespan(starts: Table, durations: Table) -> int:
    """When the last operation of a schedule ends.

    Example:
        >>> makespan(np.array([[0, 1]]), np.array([[1, 3]]))
        4
    """
    return int((starts + np.maximum(durations, 0)).max())


def machine_bound(machines: Table, durations: Table) -> int:
    """A length that no schedule can beat, from one machine at a time.

    Some operations of a machine all wait for at least `a` before, and have at least `b` of
    their jobs after them: then `a`, their durations and `b` come one after the other.

    Example:
        >>> machine_bound(np.array([[0, 1], [0, -1]]), np.array([[1, 3], [2, -1]]))
        4
    """
    heads, durations, tails = _heads_and_tails(durations)
    bounds = [(heads + durations + tails).max()]
    for machine in range(machines.max() + 1):
        here = machines == machine
        for head in np.unique(heads[here]):
            for tail in np.unique(tails[here]):
                among = here & (heads >= head) & (tails >= tail)
                if among.any():
                    bounds.append(head + durations[among].sum() + tail)
    return int(max(bounds))


def improved_schedule(
    machines: Table, durations: Table, *, tries: int, enough: int = 0, seed: int = 0
) -> Table:
    """The best of many list schedules, each made from the one before.

    The first puts the job with most work left first. The next schedules time backwards, and
    puts first what ended last; the one after that forwards again, and so on, with some noise.

    Args:
        machines: of each operation.
        durations: of each.
        tries: schedules to make.
        enough: a length to stop at.
        seed: of the noise.

    Returns:
        The starts.

    Example:
        >>> table = np.array([[0, 1], [0, -1]]), np.array([[1, 3], [2, -1]])
        >>> improved_schedule(*table, tries=1).tolist()
        [[0, 1], [1, 0]]
    """
    rng = np.random.default_rng(seed)
    jobs = [
        [(m, d) for m, d in zip(*job, strict=True) if m >= 0]
        for job in zip(machines.tolist(), durations.tolist(), strict=True)
    ]
    urgency = np.cumsum(np.maximum(durations, 0)[:, ::-1], axis=1)[:, ::-1].tolist()
    best, shortest = [], np.inf
    for attempt in range(tries):
        starts = _list_schedule(jobs, urgency)
        ends = [
            [s + d for s, (_, d) in zip(*job, strict=True)]
            for job in zip(starts, jobs, strict=True)
        ]
        length = max(map(max, ends))
        if length < shortest:
            shortest = length
            backwards = [[length - end for end in reversed(job)] for job in ends]
            best = backwards if attempt % 2 else starts
        if shortest <= enough:
            break
        noise = rng.normal(0, 1 if attempt % 10 else 6, machines.shape)  # A leap now and then.
        urgency = [(job[::-1] + noise[j, : len(job)]).tolist() for j, job in enumerate(ends)]
        jobs = [job[::-1] for job in jobs]
    return np.array([[*job, *[0] * (machines.shape[1] - len(job))] for job in best])


def _list_schedule(
    jobs: list[list[tuple[int, int]]], urgency: list[list[float]]
) -> list[list[int]]:
    """Starts where a free machine takes, at any time, the most urgent operation that waits."""
    starts: list[list[int]] = [[] for _ in jobs]
    ready, free = [0] * len(jobs), dict.fromkeys((m for job in jobs for m, _ in job), 0)
    left, now = sum(map(len, jobs)), 0
    while left:
        chosen: dict[int, int] = {}
        for j, job in enumerate(jobs):
            done = len(starts[j])
            if done == len(job) or ready[j] > now or free[job[done][0]] > now:
                continue
            machine = job[done][0]
            rival = chosen.get(machine)
            if rival is None or urgency[j][done] > urgency[rival][len(starts[rival])]:
                chosen[machine] = j
        for machine, j in chosen.items():
            ready[j] = free[machine] = now + jobs[j][len(starts[j])][1]
            starts[j].append(now)
        left, now = left - len(chosen), now + 1
    return starts


def _heads_and_tails(durations: Table) -> tuple[Table, Table, Table]:
    """What a job must do before each operation, the duration itself (0 if none), and after."""
    durations = np.maximum(durations, 0)
    heads = np.cumsum(durations, axis=1) - durations
    return heads, durations, durations.sum(axis=1, keepdims=True) - heads - durations


def _solve_disjunctions(
    machines: Table, durations: Table, least: int, most: int, seconds: float
) -> Any:
    """Minimise the makespan over starts, and over one bit for each two that share a machine."""
    heads, lengths, tails = _heads_and_tails(durations)
    here = machines >= 0
    earliest, latest = heads[here], (most - tails - lengths)[here]
    lengths, machine, job = lengths[here], machines[here], np.nonzero(here)[0]
    n = len(lengths)
    pairs = np.triu(machine[:, None] == machine, 1) & (job[:, None] != job)
    first, second = (side.tolist() for side in np.nonzero(pairs))
    bits, end = range(n, n + len(first)), n + len(first)
    rules: list[tuple[dict[int, float], float]] = []  # The sum of factors is at least a bound.
    for o in range(n):
        follows = o + 1 < n and job[o + 1] == job[o]
        rules.append(({o + 1 if follows else end: 1, o: -1}, lengths[o]))
    for a, b, bit in zip(first, second, bits, strict=True):
        # The bit says that b goes first; the rule that does not hold is slack by its factor.
        slack_a = latest[a] + lengths[a] - earliest[b]
        slack_b = latest[b] + lengths[b] - earliest[a]
        rules.append(({b: 1, a: -1, bit: slack_a}, lengths[a]))
        rules.append(({a: 1, b: -1, bit: -slack_b}, lengths[b] - slack_b))
    matrix = lil_array((len(rules), end + 1))
    for row, (factors, _) in enumerate(rules):
        for column, factor in factors.items():
            matrix[row, column] = factor
    return minimise(
        np.eye(1, end + 1, end)[0],
        matrix.tocsr(),
        np.array([bound for _, bound in rules]),
        lower=np.concatenate([earliest, np.zeros(len(bits)), [least]]),
        upper=np.concatenate([latest, np.ones(len(bits)), [most]]),
        whole=np.concatenate([np.zeros(n), np.ones(len(bits)), [0]]),
        seconds=seconds,
    )
