"""Fixed mazes and the length of a shortest way."""

import itertools

import jax
import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import shortest_path

from vernal.adapters.mazes import (
    FixedWallsGenerator,
    make_easy_maze,
    make_medium_maze,
    shortest_path_length,
)

MEDIUM_WALLS = np.array(
    [
        [0, 0, 1, 0, 0, 1, 0, 1, 1, 0],
        [0, 0, 1, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 1, 1],
        [1, 1, 1, 1, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 0, 0, 1, 0],
        [0, 0, 1, 0, 1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 1, 1, 0, 1, 1, 1],
        [0, 0, 1, 0, 0, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
    ],
    bool,
)
STARTS = [(0, 0), (9, 0), (0, 9)]
GOALS = [(3, 9), (7, 8), (7, 0)]
PAIRS = list(itertools.product(STARTS, GOALS))


def all_distances(walls):
    """Distances between all open cells, by scipy; infinite where there is no way."""
    number = np.arange(walls.size).reshape(walls.shape)
    edges = []
    for one, other in ((np.s_[:-1, :], np.s_[1:, :]), (np.s_[:, :-1], np.s_[:, 1:])):
        is_open = ~walls[one] & ~walls[other]
        edges.append(np.stack([number[one][is_open], number[other][is_open]]))
    rows, cols = np.concatenate(edges, axis=1)
    graph = coo_array((np.ones(len(rows)), (rows, cols)), shape=(walls.size, walls.size))
    return shortest_path(graph.tocsr(), directed=False, unweighted=True)


def draw_pairs(count):
    keys = jax.random.split(jax.random.key(0), count)
    states, _ = jax.jit(jax.vmap(make_medium_maze().reset))(keys)
    cells = (*states.agent_position, *states.target_position)
    rows = np.stack([np.asarray(cell) for cell in cells], axis=1).tolist()
    return [((a, b), (c, d)) for a, b, c, d in rows]


def test_medium_walls_are_those_of_the_post():
    state, timestep = make_medium_maze().reset(jax.random.key(0))
    np.testing.assert_array_equal(state.walls, MEDIUM_WALLS)
    np.testing.assert_array_equal(timestep.observation.walls, MEDIUM_WALLS)


def test_all_nine_pairs_are_drawn_about_equally():
    drawn = draw_pairs(4500)
    assert set(drawn) == set(PAIRS)
    counts = np.array([drawn.count(pair) for pair in PAIRS])
    # Chi-square with 8 degrees of freedom exceeds 26.1 once in a thousand times.
    assert ((counts - 500) ** 2 / 500).sum() < 26.1


@pytest.mark.parametrize(("start", "goal"), PAIRS)
def test_every_pair_is_connected(start, goal):
    assert np.isfinite(
        all_distances(MEDIUM_WALLS)[10 * start[0] + start[1], 10 * goal[0] + goal[1]]
    )


def test_easy_maze_goes_from_corner_to_corner_without_walls():
    state, _ = make_easy_maze().reset(jax.random.key(3))
    cells = (*state.agent_position, *state.target_position)
    assert [int(cell) for cell in cells] == [0, 0, 9, 9]
    assert not state.walls.any()
    assert state.walls.shape == (10, 10)


@pytest.mark.parametrize("make", [make_easy_maze, make_medium_maze])
def test_time_limit_is_100_steps(make):
    assert make().time_limit == 100


def test_reset_is_the_same_for_the_same_key_under_jit():
    maze = make_medium_maze()
    for seed in range(4):
        state, _ = maze.reset(jax.random.key(seed))
        jitted, _ = jax.jit(maze.reset)(jax.random.key(seed))
        assert [*state.agent_position, *state.target_position] == [
            *jitted.agent_position,
            *jitted.target_position,
        ]


def test_first_mask_shows_the_ways_out_of_the_start():
    state, timestep = make_medium_maze().reset(jax.random.key(0))
    row, col = map(int, state.agent_position)
    ways = [(row - 1, col), (row, col + 1), (row + 1, col), (row, col - 1)]
    inside = [0 <= r < 10 and 0 <= c < 10 and not MEDIUM_WALLS[r, c] for r, c in ways]
    assert timestep.observation.action_mask.tolist() == inside


@pytest.mark.parametrize("shape", [(6, 6), (3, 9), (1, 7)])
@pytest.mark.parametrize("seed", range(3))
def test_shortest_path_length_equals_scipys_between_all_open_cells(shape, seed):
    walls = np.random.default_rng(seed).random(shape) < 0.35
    expected = all_distances(walls)
    cells = [(int(row), int(col)) for row, col in np.argwhere(~walls)]
    for start, goal in itertools.product(cells, cells):
        distance = expected[start[0] * shape[1] + start[1], goal[0] * shape[1] + goal[1]]
        assert shortest_path_length(walls, start, goal) == distance


def test_a_goal_behind_walls_is_infinitely_far():
    walls = np.array([[0, 1, 0]], bool)
    assert shortest_path_length(walls, (0, 0), (0, 2)) == float("inf")


def test_a_goal_at_the_start_is_0_steps_away():
    assert shortest_path_length(np.zeros((2, 2), bool), (1, 1), (1, 1)) == 0


WALLS = np.array([[0, 1], [0, 0]])


@pytest.mark.parametrize("cell", [(2, 0), (0, 2), (-1, 0), (0, -1)])
def test_a_start_outside_is_refused_by_name_and_place(cell):
    with pytest.raises(ValueError, match=r"the start .* lies outside of \(2, 2\) cells") as error:
        FixedWallsGenerator(WALLS, [(0, 0), cell], [(1, 1)])
    assert str(cell) in str(error.value)


def test_a_goal_in_a_wall_is_refused_by_name_and_place():
    with pytest.raises(ValueError, match=r"the goal \(0, 1\) lies in a wall"):
        FixedWallsGenerator(WALLS, [(0, 0)], [(1, 1), (0, 1)])


@pytest.mark.parametrize(
    ("starts", "goals", "name"), [([], [(0, 0)], "start"), ([(0, 0)], [], "goal")]
)
def test_an_empty_list_is_refused_by_name(starts, goals, name):
    with pytest.raises(ValueError, match=f"at least one {name}; got none"):
        FixedWallsGenerator(WALLS, starts, goals)
