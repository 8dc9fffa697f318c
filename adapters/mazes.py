"""Mazes with fixed walls, for Jumanji's maze environment."""

import collections
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray
from jumanji.environments.routing.maze import Maze
from jumanji.environments.routing.maze.generator import Generator
from jumanji.environments.routing.maze.types import Position, State

_MEDIUM_WALLS = """
    0 0 1 0 0 1 0 1 1 0
    0 0 1 0 0 1 0 0 0 0
    0 0 0 0 0 1 1 0 1 1
    1 1 1 1 0 0 0 0 1 0
    0 0 0 0 0 1 0 0 1 0
    0 0 1 0 1 1 0 0 0 0
    1 0 1 0 1 1 0 1 1 1
    0 0 1 0 0 0 0 1 0 0
    1 1 1 0 0 1 0 1 1 0
    0 0 0 0 0 1 0 0 0 0
"""


class FixedWallsGenerator(Generator):
    """Episodes in one maze; start and goal are drawn from two lists, each pair alike.

    Example:
        >>> import jax, numpy as np
        >>> generator = FixedWallsGenerator(np.zeros((2, 2)), starts=[(0, 0)], goals=[(1, 1)])
        >>> state = generator(jax.random.key(0))
        >>> int(state.target_position.row), int(state.target_position.col)
        (1, 1)
    """

    def __init__(
        self,
        walls: np.ndarray,
        starts: Sequence[tuple[int, int]],
        goals: Sequence[tuple[int, int]],
    ) -> None:
        """Check that every start and goal lies on an open cell.

        Args:
            walls: shape `(rows, columns)`, nonzero where a wall stands.
            starts: rows and columns where an episode may start.
            goals: rows and columns of the goals that it may have.

        Raises:
            ValueError: a start or goal lies outside or in a wall, or a list is empty.
        """
        walls = np.asarray(walls, bool)
        super().__init__(*walls.shape)
        for name, cells in (("start", starts), ("goal", goals)):
            if not cells:
                raise ValueError(f"a maze needs at least one {name}; got none.")
            for row, col in cells:
                if not (0 <= row < walls.shape[0] and 0 <= col < walls.shape[1]):
                    raise ValueError(
                        f"the {name} {(row, col)} lies outside of {walls.shape} cells."
                    )
                if walls[row, col]:
                    raise ValueError(f"the {name} {(row, col)} lies in a wall.")
        self.walls = walls
        self.starts = np.asarray(starts)
        self.goals = np.asarray(goals)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]  # Jumanji's hint is wrong
        self, key: PRNGKeyArray
    ) -> State:
        """First state of an episode; the key is consumed."""
        key, start_key, goal_key = jax.random.split(key, 3)
        start = jax.random.choice(start_key, jnp.asarray(self.starts, jnp.int32))
        goal = jax.random.choice(goal_key, jnp.asarray(self.goals, jnp.int32))
        return State(
            agent_position=Position(row=start[0], col=start[1]),
            target_position=Position(row=goal[0], col=goal[1]),
            walls=jnp.asarray(self.walls),
            action_mask=None,  # pyright: ignore[reportArgumentType]  # filled in by the environment
            step_count=jnp.array(0, jnp.int32),
            key=key,
        )


def make_easy_maze() -> Maze:
    """10 x 10 cells without walls, from one corner to the opposite one.

    Example:
        >>> make_easy_maze().time_limit
        100
    """
    return Maze(FixedWallsGenerator(np.zeros((10, 10)), starts=[(0, 0)], goals=[(9, 9)]))


def make_medium_maze() -> Maze:
    """10 x 10 cells with fixed walls, three starts and three goals: nine pairs.

    Example:
        >>> make_medium_maze().generator.starts.shape
        (3, 2)
    """
    walls = np.array(_MEDIUM_WALLS.split(), int).reshape(10, 10)
    starts, goals = [(0, 0), (9, 0), (0, 9)], [(3, 9), (7, 8), (7, 0)]
    return Maze(FixedWallsGenerator(walls, starts, goals))


def shortest_path_length(
    walls: np.ndarray, start: Sequence[SupportsIndex], goal: Sequence[SupportsIndex]
) -> int | float:
    """Number of steps from start to goal, by breadth-first search.

    Args:
        walls: true where a wall stands.
        start: row and column.
        goal: row and column.

    Returns:
        The number; infinite if there is no way.

    Example:
        >>> shortest_path_length(np.array([[0, 1], [0, 0]], bool), (0, 0), (1, 1))
        2
    """
    start, goal = (int(start[0]), int(start[1])), (int(goal[0]), int(goal[1]))
    distances = {start: 0}
    frontier = collections.deque([start])
    while frontier:
        row, col = cell = frontier.popleft()
        if cell == goal:
            return distances[cell]
        for near in ((row - 1, col), (row, col + 1), (row + 1, col), (row, col - 1)):
            is_inside = 0 <= near[0] < walls.shape[0] and 0 <= near[1] < walls.shape[1]
            if is_inside and not walls[near] and near not in distances:
                distances[near] = distances[cell] + 1
                frontier.append(near)
    return float("inf")
