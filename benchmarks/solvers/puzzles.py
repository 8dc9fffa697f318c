"""Puzzles: the fewest moves to the goal, by breadth-first search."""

import functools

import numpy as np
from jaxtyping import Int, Integer

_TABLE_RADIUS = 4
CUBE_REACH = 2 * _TABLE_RADIUS


def fewest_slides(puzzle: Int[np.ndarray, "n n"]) -> int:
    """Moves from a sliding tile puzzle to the goal, the tiles in order and the gap (0) last.

    A solved puzzle takes 2: the environment ends after a move that solves it, not before.

    Args:
        puzzle: at most 3 by 3; beyond, the states are too many to list.

    Returns:
        The number of moves.

    Raises:
        ValueError: the puzzle is larger, or cannot be solved.

    Example:
        >>> fewest_slides(np.array([[1, 2, 3], [4, 5, 6], [0, 7, 8]]))
        2
    """
    if len(puzzle) > 3:
        raise ValueError(f"the puzzle is {len(puzzle)} wide; distances are known up to 3.")
    moves = _slide_distances(len(puzzle)).get(tuple(puzzle.ravel().tolist()))
    if moves is None:
        raise ValueError(f"no moves solve {puzzle.tolist()}.")
    return moves or 2


@functools.cache
def _slide_distances(width: int) -> dict[tuple[int, ...], int]:
    """Of every state that the goal can be reached from: 181,440 where the width is 3."""
    goal = (*range(1, width * width), 0)
    distances: dict[tuple[int, ...], int] = {goal: 0}
    frontier: list[tuple[int, ...]] = [goal]
    for state in frontier:  # It grows meanwhile.
        gap = state.index(0)
        row, col = divmod(gap, width)
        inside = (row > 0, row < width - 1, col > 0, col < width - 1)
        for step, is_inside in zip((-width, width, -1, 1), inside, strict=True):
            if is_inside:
                near = list(state)
                near[gap], near[gap + step] = near[gap + step], 0
                if (key := tuple(near)) not in distances:
                    distances[key] = distances[state] + 1
                    frontier.append(key)
    return distances


def fewest_turns(
    cube: Integer[np.ndarray, " stickers"], turns: Int[np.ndarray, "turns stickers"]
) -> int:
    """Turns from a scrambled cube to the solved one, by search from both ends.

    A solved cube takes 2: the environment ends after a turn that solves it, not before.

    Args:
        cube: the colour of each sticker; the solved cube's are in order.
        turns: for each turn, which sticker goes to each place.

    Returns:
        The number of turns.

    Raises:
        ValueError: they are more than `CUBE_REACH`.

    Example:
        >>> fewest_turns(np.array([1, 0]), np.array([[1, 0]]))
        1
    """
    turns = np.asarray(turns, np.int64)
    near_goal = _turn_distances(np.sort(cube).tobytes(), cube.dtype.str, turns.tobytes())
    ring, seen = {cube.tobytes()}, set()
    for walked in range(_TABLE_RADIUS + 1):
        met = [near_goal[state] for state in ring if state in near_goal]
        if met:  # All nearer ones were in an earlier ring.
            return (walked + min(met)) or 2
        seen |= ring
        ring = _next_ring(ring, cube.dtype.str, turns) - seen
    raise ValueError(f"the cube is more than {CUBE_REACH} turns from the goal.")


@functools.cache
def _turn_distances(goal: bytes, dtype: str, turns: bytes) -> dict[bytes, int]:
    """Of every cube within `_TABLE_RADIUS` turns of the goal."""
    table = np.frombuffer(turns, np.int64).reshape(-1, len(np.frombuffer(goal, dtype)))
    distances, ring = {goal: 0}, {goal}
    for distance in range(1, _TABLE_RADIUS + 1):
        ring = _next_ring(ring, dtype, table) - distances.keys()
        distances |= dict.fromkeys(ring, distance)
    return distances


def _next_ring(
    ring: set[bytes], dtype: str, turns: Int[np.ndarray, "turns stickers"]
) -> set[bytes]:
    """All cubes that one turn makes of these."""
    cubes = np.frombuffer(b"".join(ring), dtype).reshape(-1, turns.shape[1])
    return {row.tobytes() for row in cubes[:, turns].reshape(-1, turns.shape[1])}
