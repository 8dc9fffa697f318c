"""How observations are read: the layout that the specs give, and the features of a state."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji import specs

from vernal.adapters.networks.features import see, unbounded_leaves, window
from vernal.adapters.networks.layout import Cell, Cells, Owned, read_layout
from vernal.adapters.registry import make_environment
from vernal.core import Moments, init_moments

from .environments_for_tests import OFFLINE, SpecsOnly, make_once

KEY = jax.random.key(0)


def names(parts):
    """The leaves' names; of a cell its row's."""
    leaves = [getattr(part, "row", getattr(part, "leaf", part)) for part in parts]
    return [".".join(leaf.path) for leaf in leaves]


def sides(name):
    """Kind, axes and size of each side."""
    return [(side.kind, side.axes, side.size) for side in read_layout(make_once(name)).sides]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Maze-v0", []),
        ("Game2048-v1", []),
        ("PacMan-v1", []),
        ("RubiksCube-v0", []),
        ("SlidingTilePuzzle-v0", []),
        ("Snake-v1", []),
        ("Tetris-v0", []),
        ("CVRP-v1", [("items", (0,), 21)]),
        ("GraphColoring-v1", [("items", (0,), 20)]),
        ("Knapsack-v1", [("items", (0,), 50)]),
        ("TSP-v1", [("items", (0,), 20)]),
        ("BinPack-v2", [("items", (0,), 40), ("items", (1,), 20)]),
        ("Minesweeper-v0", [("cells", (0, 1), 100)]),
        ("Sudoku-v0", [("cells", (0, 1), 81)]),
        ("FlatPack-v0", [("cells", (2, 3), 81), ("items", (0,), 25)]),
        ("Cleaner-v0", [("agents", (0,), 3)]),
        ("Connector-v3", [("agents", (0,), 10)]),
        ("LevelBasedForaging-v0", [("agents", (0,), 2)]),
        ("RobotWarehouse-v0", [("agents", (0,), 4)]),
        ("SearchAndRescue-v0", [("agents", (0,), 2)]),
        ("JobShop-v0", [("agents", (0,), 10), ("items", (1,), 20)]),
        ("MMST-v0", [("agents", (0,), 3), ("items", (1,), 36)]),
        ("MultiCVRP-v0", [("agents", (0,), 2), ("items", (1,), 21)]),
    ],
)
def test_sets_among_the_axes_of_the_action_are_found(name, expected):
    assert sides(name) == expected


def test_a_job_shops_last_choice_is_no_job():
    assert [side.has_none for side in read_layout(make_once("JobShop-v0")).sides] == [False, True]


@pytest.mark.parametrize(
    ("name", "role", "expected"),
    [
        ("TSP-v1", "leaves", ["coordinates"]),
        ("TSP-v1", "pointers", ["position", "trajectory"]),
        ("TSP-v1", "relations", ["coordinates"]),
        ("GraphColoring-v1", "pointers", ["colors", "current_node_index"]),
        ("GraphColoring-v1", "relations", ["adj_matrix"]),
        ("Knapsack-v1", "leaves", ["weights", "values", "packed_items"]),
        ("JobShop-v0", "pointers", ["machines_job_ids"]),
        ("MMST-v0", "pointers", ["positions"]),
        ("MMST-v0", "relations", ["adj_matrix"]),
        ("FlatPack-v0", "owned", ["grid", "blocks"]),
    ],
)
def test_leaves_that_speak_of_items_are_told_apart(name, role, expected):
    items = next(side for side in read_layout(make_once(name)).sides if side.kind == "items")
    assert names(getattr(items, role)) == expected


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("Connector-v3", {"grid": 3}), ("MMST-v0", {"node_types": 2}), ("Cleaner-v0", {})],
)
def test_values_that_belong_to_agents_in_turn_are_found(name, kinds):
    agents = read_layout(make_once(name)).sides[0]
    assert dict(zip(names(agents.owned), [o.kinds for o in agents.owned], strict=True)) == kinds


@pytest.mark.parametrize(
    ("name", "grids", "vectors"),
    [
        ("Snake-v1", {(12, 12): (["grid"], [])}, ["step_count"]),
        ("Connector-v3", {(10, 10): (["grid"], [])}, ["step_count"]),
        ("Cleaner-v0", {(10, 10): (["grid"], ["agents_locations"])}, ["step_count"]),
        (
            "SlidingTilePuzzle-v0",
            {(5, 5): (["puzzle"], ["empty_tile_position"])},
            ["empty_tile_position", "step_count"],
        ),
        ("RubiksCube-v0", {}, ["cube", "step_count"]),
        ("Tetris-v0", {(10, 10): (["grid"], []), (4, 4): (["tetromino"], [])}, ["step_count"]),
        ("Knapsack-v1", {}, []),
        (
            "Maze-v0",
            {(10, 10): (["walls"], ["agent_position.row", "target_position.row"])},
            ["step_count"],
        ),
    ],
)
def test_grids_and_the_places_on_them_are_told_from_vectors(name, grids, vectors):
    layout = read_layout(make_once(name))
    found = {
        grid.size: (names((*grid.leaves, *grid.owned)), names(grid.cells)) for grid in layout.grids
    }
    assert found == grids
    assert names(layout.vectors) == vectors


def test_pairs_without_bounds_are_read_in_both_orders():
    (grid,) = read_layout(make_once("PacMan-v1")).grids
    pellets = [c for c in grid.cells if isinstance(c, Cells) and names([c]) == ["pellet_locations"]]
    assert [cells.is_swapped for cells in pellets] == [False, True]
    assert isinstance(grid.cells[0], Cell)


class Seen(dict[str, Any]):
    """An observation whose parts are read as attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def observing(action=None, **parts):
    action = action or specs.DiscreteArray(2)
    return SpecsOnly(lambda: action, lambda: specs.Spec(Seen, "SeenSpec", **parts))


def bounded(low, high, dtype: Any = jnp.int32, shape=()):
    return specs.BoundedArray(shape, dtype, low, high)


def test_a_cell_of_another_grids_size_is_a_vector():
    layout = read_layout(
        observing(grid=specs.Array((5, 6), float), row=bounded(0, 4), col=bounded(0, 6))
    )
    assert names(layout.vectors) == ["row", "col"]


def test_a_row_without_its_column_is_a_vector():
    layout = read_layout(observing(grid=specs.Array((5, 6), float), row=bounded(0, 4)))
    assert names(layout.vectors) == ["row"]


def test_rows_of_a_grid_with_a_named_cell_are_no_items():
    walls, other = specs.Array((8, 5), bool), specs.Array((8, 7), bool)
    places = {"row": bounded(0, 7), "col": bounded(0, 4)}
    action = specs.DiscreteArray(8)
    assert read_layout(observing(action, walls=walls, **places)).sides == ()
    # Without the cell, two leaves of the action's length are enough.
    assert len(read_layout(observing(action, walls=walls, other=other)).sides) == 1


@pytest.mark.parametrize(("choices", "leaves"), [(9, 1), (3, 2), (6, 2)])
def test_few_rows_or_one_leaf_of_the_actions_length_may_be_chance(choices, leaves):
    parts = {f"leaf_{n}": specs.Array((choices,), float) for n in range(leaves)}
    assert read_layout(observing(specs.DiscreteArray(choices), **parts)).sides == ()


def make_with(name, **options):
    """An environment with options; inside some of Jumanji's, ranks are promoted."""
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return make_environment(name, options)


@pytest.mark.parametrize("size", [3, 4])
def test_a_small_puzzle_of_as_many_rows_as_moves_has_no_items(size):
    environment = make_with("SlidingTilePuzzle-v0", grid_size=size)
    assert read_layout(environment).sides == ()


def test_a_list_of_numbers_within_the_range_of_indices_is_no_pointer():
    weights = {"weights": bounded(0, 20, shape=(20,)), "values": specs.Array((20,), float)}
    (side,) = read_layout(observing(specs.DiscreteArray(20), **weights)).sides
    assert names(side.leaves) == ["weights", "values"]


def test_of_two_axes_of_one_length_neither_is_a_set():
    layout = read_layout(make_with("BinPack-v2", obs_num_ems=20))
    assert layout.sides == ()
    assert len(layout.vectors) == 12


def test_windows_of_a_grid_are_cells_only_under_a_mask():
    grid, moves = specs.Array((6, 6), float), specs.MultiDiscreteArray(jnp.array([4, 4]))
    assert read_layout(observing(moves, grid=grid)).sides == ()
    mask = {"action_mask": bounded(False, True, bool, (4, 4))}
    assert [side.kind for side in read_layout(observing(moves, grid=grid, **mask)).sides] == [
        "cells"
    ]


def test_rows_of_a_map_that_agents_stand_on_are_no_agents():
    layout = read_layout(make_with("Cleaner-v0", num_rows=5, num_cols=8, num_agents=5))
    assert [grid.size for grid in layout.grids] == [(5, 8)]
    assert names(layout.sides[0].leaves) == ["agents_locations"]


def test_views_of_three_agents_are_no_square():
    view = specs.Array((3, 3, 128), float)
    action = specs.BoundedArray((3, 2), float, -1.0, 1.0)
    layout = read_layout(observing(action, views=view))
    assert names(layout.sides[0].leaves) == ["views"]
    assert layout.grids == ()


def test_as_many_jobs_as_machines_are_still_told_apart():
    options = {"num_jobs": 9, "num_machines": 9, "max_num_ops": 4, "max_op_duration": 5}
    layout = read_layout(make_with("JobShop-v0", **options))
    agents, items = layout.sides
    assert (items.kind, items.size, names(items.pointers)) == ("items", 9, ["machines_job_ids"])
    assert {"ops_machine_ids", "ops_durations", "ops_mask"} <= {*names(items.leaves)}
    assert "machines_remaining_times" in names(agents.leaves)


def test_x_and_y_on_a_square_grid_are_read_in_both_orders():
    environment = observing(grid=specs.Array((4, 4), bool), x=bounded(0, 3), y=bounded(0, 3))
    seen = Seen(grid=jnp.zeros((4, 4), bool), x=jnp.array(2), y=jnp.array(1))
    assert np.argwhere(planes_of(environment, seen)).tolist() == [[1, 2, 2], [2, 1, 1]]


def all_leaves(layout):
    """Names of whatever the layout reads anywhere."""
    parts = [leaf for grid in layout.grids for leaf in (*grid.leaves, *grid.owned)]
    parts += [cell for grid in layout.grids for cell in grid.cells]
    for side in layout.sides:
        parts += [*side.leaves, *side.pointers, *side.relations, *side.owned]
    cells = {leaf.name for part in parts if isinstance(part, Cell) for leaf in part}
    return cells | {*names([*parts, *layout.vectors])}


@pytest.mark.parametrize("name", OFFLINE)
def test_every_leaf_is_read_somewhere(name):
    environment = make_once(name)
    with jax.numpy_rank_promotion("allow"):
        _, timestep = jax.eval_shape(environment.reset, KEY)
    leaves = jax.tree_util.tree_leaves_with_path(timestep.observation)
    wanted = {jax.tree_util.keystr(p, simple=True, separator=".") for p, _ in leaves}
    assert all_leaves(read_layout(environment)) == wanted - {"action_mask"}


def test_a_list_that_belongs_to_agents_but_fits_nothing_is_a_vector():
    team = specs.MultiDiscreteArray(jnp.array([5, 5, 5]))
    mask = bounded(False, True, bool, (3, 5))
    layout = read_layout(observing(team, lights=bounded(0, 3, shape=(6,)), action_mask=mask))
    assert names(layout.vectors) == ["lights"]


def test_a_mask_beside_a_continuous_action_is_an_observation():
    action = specs.BoundedArray((2,), float, -1.0, 1.0)
    environment = observing(action, action_mask=bounded(False, True, bool, (3,)))
    assert vector_of(environment, Seen(action_mask=jnp.array([True, False, True]))) == [1, 0, 1]


@pytest.mark.parametrize("value", [np.inf, -np.inf, 3e38])
def test_what_is_infinite_is_seen_as_very_large(value):
    assert np.isfinite(see_one(specs.Array((), float), value)).all()


def test_a_window_around_a_cell_outside_is_empty():
    assert not window(jnp.ones((4, 6, 2)), jnp.array([-1, -1])).any()


def test_an_index_beside_a_leaf_of_the_actions_length_makes_items():
    parts = {"leaf": specs.Array((4,), float), "here": bounded(0, 3)}
    (side,) = read_layout(observing(specs.DiscreteArray(4), **parts)).sides
    assert (side.kind, names(side.pointers)) == ("items", ["here"])


def vector_of(environment, observation):
    layout = read_layout(environment)
    statistics = {n: init_moments(shape) for n, (_, shape) in unbounded_leaves(layout).items()}
    return see(layout, statistics, observation).vector.tolist()


def see_one(spec, values):
    # Three actions, for whose mask no pair of booleans is taken.
    environment = observing(specs.DiscreteArray(3), leaf=spec)
    return vector_of(environment, Seen(leaf=jnp.asarray(values, spec.dtype)))


def test_an_observation_that_is_one_array_is_read():
    environment = SpecsOnly(lambda: specs.DiscreteArray(5), lambda: bounded(0.0, 2.0, float, (2,)))
    assert vector_of(environment, jnp.array([0.0, 1.5])) == [-1.0, 0.5]


def test_numbers_that_an_environment_left_as_pythons_own_are_read():
    assert vector_of(observing(leaf=bounded(0, 3)), Seen(leaf=2)) == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("spec", "values", "expected"),
    [
        (bounded(0, 3), 2, [0, 0, 1, 0]),
        (bounded(-1, 1, jnp.int8, (2,)), [-1, 1], [1, 0, 0, 0, 0, 1]),
        (bounded(1, 32), 32, [0] * 31 + [1]),
    ],
)
def test_integers_of_up_to_32_values_are_one_hot(spec, values, expected):
    assert see_one(spec, values) == expected


@pytest.mark.parametrize(
    ("spec", "values", "expected"),
    [
        (bounded(0, 32, shape=(3,)), [0, 16, 32], [-1, 0, 1]),
        (bounded(-2.0, 6.0, float, (3,)), [-2, 0, 6], [-1, -0.5, 1]),
        (bounded(3.0, 3.0, float), 3, [0]),
    ],
)
def test_other_bounded_numbers_are_scaled_to_minus_1_to_1(spec, values, expected):
    assert see_one(spec, values) == expected


def one_hot(value, size):
    return np.eye(size)[value].tolist()


@pytest.mark.parametrize(
    ("spec", "values", "expected"),
    [
        # Scaled by its own range, and one-hot beside it where it has few values.
        (
            bounded([0, 0], [1, 64], shape=(2,)),
            [1, 16],
            [1, *one_hot(1, 2), -0.5, 0, 0],
        ),
        (
            bounded([-5, 90], [59, 92], shape=(2,)),
            [59, 91],
            [1, 0, 0, 0, 0, *one_hot(1, 3)],
        ),
        (bounded([0, -100], [40, 100], shape=(2,)), [10, 50], [-0.5, 0.5]),
        (bounded([7, 0], [7, 40], shape=(2,)), [7, 30], [0, 1, 0.5, 0]),
        (specs.MultiDiscreteArray(jnp.array([2, 1001])), [0, 500], [-1, *one_hot(0, 2), 0, 0, 0]),
        # Few enough values for one scale.
        (bounded([0, 3], [1, 5], shape=(2,)), [1, 4], [*one_hot(1, 6), *one_hot(4, 6)]),
    ],
)
def test_integers_with_a_range_each_are_read_by_it(spec, values, expected):
    np.testing.assert_allclose(see_one(spec, values), expected, atol=1e-6)


@pytest.mark.parametrize("flag", [0, 1])
def test_each_number_of_a_table_is_read_by_its_own_range(flag):
    highs = jnp.array([[1, 99], [99, 1], [99, 99]])
    environment = observing(table=bounded(0, highs, shape=(3, 2)))
    table = jnp.full((3, 2), 99).at[0, 0].set(flag).at[1, 1].set(flag)
    rows = np.reshape(vector_of(environment, Seen(table=table)), (3, 2, 3))
    np.testing.assert_allclose(rows[0, 0], [2 * flag - 1, 1 - flag, flag], atol=1e-6)
    np.testing.assert_array_equal(rows[1, 1], rows[0, 0])
    np.testing.assert_array_equal(rows[2], [[1, 0, 0], [1, 0, 0]])


@pytest.mark.parametrize(("highs", "is_place"), [([2, 4], True), ([4, 2], False), ([1, 40], False)])
def test_a_pair_with_a_range_each_is_a_place_where_both_fit(highs, is_place):
    grid = specs.Array((3, 5), bool)
    (found,) = read_layout(observing(grid=grid, place=bounded(0, highs, shape=(2,)))).grids
    assert names(found.cells) == ["place"] * is_place


def test_numbers_with_a_range_each_are_no_indices_and_nobodys():
    parts = {"state": bounded(0, [1, 19], shape=(2,)), "rows": specs.Array((20, 3), float)}
    (side,) = read_layout(observing(specs.DiscreteArray(20), **parts)).sides
    assert side.pointers == ()
    team = specs.MultiDiscreteArray(jnp.array([5, 5, 5]))
    items = {"state": bounded(0, [[1, 3]] * 5, shape=(5, 2))}
    mask = {"action_mask": bounded(False, True, bool, (3, 5))}
    assert not any(side.owned for side in read_layout(observing(team, **items, **mask)).sides)


@pytest.mark.parametrize(
    ("spec", "values", "expected"),
    [
        (specs.DiscreteArray(65), 16, [-0.5, *one_hot(16, 65)]),
        (specs.DiscreteArray(1024), 1023, [1, *one_hot(1023, 1024)]),
        (
            specs.MultiDiscreteArray(jnp.array([65, 65])),
            [0, 48],
            [-1, *one_hot(0, 65), 0.5, *one_hot(48, 65)],
        ),
        (
            specs.MultiDiscreteArray(jnp.array([33, 65])),
            [16, 16],
            [0, *one_hot(16, 65), -0.5, *one_hot(16, 65)],
        ),
        (specs.DiscreteArray(1025), 256, [-0.5]),
        (specs.MultiDiscreteArray(jnp.full(513, 3)), [1] * 513, one_hot(1, 3) * 513),
        (specs.MultiDiscreteArray(jnp.full(26, 41)), [10] * 26, [-0.5] * 26),
    ],
)
def test_names_of_up_to_1024_inputs_are_one_hot_beside_their_number(spec, values, expected):
    np.testing.assert_allclose(see_one(spec, values), expected, atol=1e-6)


def test_a_count_is_no_name():
    environment = observing(step_count=specs.DiscreteArray(65))
    assert vector_of(environment, Seen(step_count=jnp.array(48))) == [0.5]


HALF, QUARTER = [jnp.float16, jnp.bfloat16], [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32]


@pytest.mark.parametrize(
    ("dtypes", "spec"),
    [
        (HALF, lambda dtype: specs.Array((3,), dtype)),
        (HALF, lambda dtype: bounded(0, 64, dtype, (3,))),
        (QUARTER, lambda dtype: bounded(0, 3, dtype, (3,))),
        (QUARTER, lambda dtype: bounded(0, 100, dtype, (3,))),
        (QUARTER, lambda dtype: bounded(0, [3, 100, 3], dtype, (3,))),
        (QUARTER[2:], lambda dtype: specs.Array((3,), dtype)),
    ],
)
def test_narrow_numbers_are_read_as_wide_ones(dtypes, spec):
    wide = jnp.float32 if dtypes is HALF else jnp.int32
    for dtype in dtypes:
        assert see_one(spec(dtype), [0, 3, 2]) == see_one(spec(wide), [0, 3, 2])


UNBOUNDED = [
    specs.Array((3,), float),
    bounded(-jnp.inf, 9.0, float, (3,)),
    specs.Array((3,), np.int32),
    # One wide range beside narrow ones: no scale fits all.
    bounded(jnp.array([-9.0, -9.0, -99.0]), jnp.array([9.0, 9.0, 99.0]), float, (3,)),
    bounded(-np.finfo(np.float32).max, np.finfo(np.float32).max, float, (3,)),
    bounded(np.iinfo(np.int32).min, np.iinfo(np.int32).max, shape=(3,)),
]


@pytest.mark.parametrize("spec", UNBOUNDED)
def test_unbounded_numbers_are_log_scaled_with_their_sign(spec):
    expected = [-np.log(1 + 7), 0, np.log(1 + 5)]
    np.testing.assert_allclose(see_one(spec, [-7, 0, 5]), expected, rtol=1e-6)


@pytest.mark.parametrize("spec", UNBOUNDED)
def test_unbounded_numbers_are_scaled_by_running_statistics(spec):
    moments = Moments(jnp.array([1.0, 0.0, 2.0]), jnp.array([4.0, 1.0, 1e-6]), jnp.array(1.0))
    observation = Seen(leaf=jnp.asarray([-7, 0, 5], spec.dtype))
    vector = see(read_layout(observing(leaf=spec)), {"leaf": moments}, observation).vector
    np.testing.assert_allclose(vector, [(-np.log(8) - 1) / 2, 0, -10], rtol=1e-6)


@pytest.mark.parametrize("spec", [specs.Array((2,), bool), bounded(False, True, bool, (2,))])
def test_booleans_are_0_and_1(spec):
    assert see_one(spec, [True, False]) == [1, 0]


def planes_of(environment, observation):
    (planes,) = see(read_layout(environment), {}, observation).grids
    return planes


def test_a_cell_is_a_plane_with_one_1():
    environment = observing(grid=specs.Array((3, 4), bool), row=bounded(0, 2), col=bounded(0, 3))
    seen = Seen(grid=jnp.zeros((3, 4), bool), row=jnp.array(2), col=jnp.array(1))
    assert np.argwhere(planes_of(environment, seen)).tolist() == [[2, 1, 1]]


def test_pairs_are_a_plane_with_a_1_at_each_place():
    environment = observing(grid=specs.Array((3, 4), bool), places=bounded(0, 3, shape=(3, 2)))
    places = jnp.array([[2, 1], [0, 3], [2, 1]])
    planes = planes_of(environment, Seen(grid=jnp.zeros((3, 4), bool), places=places))
    assert np.argwhere(planes).tolist() == [[0, 3, 1], [2, 1, 1]]
    assert planes.max() == 1


def test_places_outside_of_the_grid_are_left_out():
    environment = observing(grid=specs.Array((3, 4), bool), places=specs.Array((2, 2), int))
    places = jnp.array([[-1, 1], [2, 3]])
    planes = planes_of(environment, Seen(grid=jnp.zeros((3, 4), bool), places=places))
    # Without bounds they are read both ways, and (3, 2) lies below the grid.
    assert np.argwhere(planes).tolist() == [[2, 3, 1]]


def test_integers_without_bounds_on_a_grid_are_one_hot_too_up_to_a_limit():
    environment = observing(grid=specs.Array((3, 4), np.int32))
    grid = jnp.zeros((3, 4), int).at[1, 2].set(99).at[0, 0].set(-1)
    planes = planes_of(environment, Seen(grid=grid))
    assert planes.shape == (3, 4, 1 + 16)
    np.testing.assert_allclose(planes[1, 2], [np.log(100), *[0] * 15, 1], rtol=1e-6)
    np.testing.assert_allclose(planes[0, 0], [-np.log(2), 1, *[0] * 15], rtol=1e-6)


def test_pixels_are_scaled_by_their_dtype():
    environment = observing(grid=specs.Array((3, 4), np.uint8))
    planes = planes_of(environment, Seen(grid=jnp.full((3, 4), 255, jnp.uint8).at[0, 0].set(0)))
    assert (planes.min(), planes.max()) == (-1, 1)


def test_all_planes_of_a_size_lie_side_by_side():
    environment = observing(a=bounded(0, 2, shape=(3, 4)), b=specs.Array((3, 4, 2), float))
    planes = planes_of(environment, Seen(a=jnp.ones((3, 4), int), b=jnp.zeros((3, 4, 2))))
    assert planes.shape == (3, 4, 3 + 2)
    np.testing.assert_array_equal(planes[..., 1], np.ones((3, 4)))


@pytest.mark.parametrize("cell", [(0, 0), (3, 5), (2, 1)])
def test_a_window_shows_what_lies_around_a_cell(cell):
    planes = jax.random.normal(KEY, (4, 6, 2))
    seen = window(planes, jnp.array(cell))
    for row in range(5):
        for col in range(5):
            at = cell[0] + row - 2, cell[1] + col - 2
            is_inside = 0 <= at[0] < 4 and 0 <= at[1] < 6
            expected = [*planes[at], 1.0] if is_inside else [0.0, 0.0, 0.0]
            np.testing.assert_array_equal(seen[row, col], np.asarray(expected))


def test_owned_values_are_told_by_owner_and_kind():
    (leaf,) = (o.leaf for o in read_layout(make_once("Connector-v3")).sides[0].owned)
    owned = Owned(leaf, 3)
    seen = Seen(grid=jnp.zeros((10, 10), int).at[0, 0].set(1).at[4, 5].set(3 * 9 + 2))
    own = owned.own(seen, 10)
    assert np.argwhere(own).tolist() == [[0, 0, 0, 0], [9, 4, 5, 1]]
    assert np.argwhere(owned.anyones(seen)).tolist() == [[0, 0, 0], [4, 5, 1]]


def test_distances_to_the_city_pointed_to_are_features_of_the_others():
    _, timestep = make_once("TSP-v1").reset(KEY)
    observation = timestep.observation._replace(position=jnp.array(7))
    features = see(read_layout(make_once("TSP-v1")), {}, observation)
    (rows,), places = features.rows, np.asarray(observation.coordinates)
    expected = 2 * np.linalg.norm(places - places[7], axis=1)  # from [0, 1] to [-1, 1]
    columns = [n for n in range(rows.shape[1]) if np.allclose(rows[:, n], expected, atol=1e-5)]
    assert len(columns) == 1


def test_what_an_agent_points_to_is_a_feature_of_the_pair():
    environment = make_once("JobShop-v0")
    _, timestep = environment.reset(KEY)
    observation = timestep.observation
    observation = observation._replace(machines_job_ids=jnp.full(10, 20).at[3].set(5))
    pairs = see(read_layout(environment), {}, observation).pairs
    assert pairs is not None
    assert pairs.shape[:2] == (10, 21)
    assert np.argwhere(pairs[..., 0]).tolist() == [[3, 5]]
    np.testing.assert_array_equal(pairs[:, 20], 0)


def test_a_leaf_that_no_encoder_reads_is_refused_by_name():
    environment = observing(inner=specs.Spec(Seen, "Inner", secret=specs.Array((), KEY.dtype)))
    with pytest.raises(ValueError, match=r"leaf 'inner.secret' has dtype key.*; give a network of"):
        read_layout(environment)


EMPTY = {
    "numbers": specs.Array((0, 3), float),
    "places": bounded(0, 3, shape=(4, 0)),
    "ranges": specs.MultiDiscreteArray(jnp.zeros((0,), int)),
    "flags": specs.Array((0,), bool),
}


def test_leaves_without_elements_are_left_out():
    parts = {"x": bounded(0.0, 2.0, float)}
    layout = read_layout(observing(**parts, **EMPTY))
    assert layout == read_layout(observing(**parts))


@pytest.mark.parametrize(
    "parts", [{"action_mask": bounded(False, True, bool, (2,))}, EMPTY], ids=["mask", "empty"]
)
def test_an_observation_with_nothing_to_read_is_refused(parts):
    with pytest.raises(ValueError, match="no leaf to read besides the action mask"):
        read_layout(observing(**parts))


def test_a_complex_number_is_read_by_no_encoder():
    with pytest.raises(ValueError, match="leaf 'x' has dtype complex64, which no encoder reads"):
        read_layout(observing(x=specs.Array((3,), np.complex64)))


def test_a_mask_of_another_name_is_seen_as_a_mask():
    x, mask = bounded(0.0, 2.0, float), bounded(False, True, bool, (2,))
    inner = specs.Spec(Seen, "Inner", legal_action_mask=mask)
    layout = read_layout(observing(x=x, inner=inner))
    assert all_leaves(layout) == {"x"}
    seen = Seen(x=jnp.array(1.0), inner=Seen(legal_action_mask=jnp.array([True, False])))
    assert see(layout, {}, seen).vector.tolist() == [0, 1, 0]


def table_side(spec, choices=24):
    return read_layout(observing(specs.DiscreteArray(choices), table=spec)).sides


@pytest.mark.parametrize(
    "spec",
    [
        bounded(0.0, 1.0, float, (24, 4)),
        specs.Array((24, 2), float),
        bounded(0, 100, shape=(24, 4)),
        bounded(0, [[1, 9, 3]], shape=(24, 3)),
        bounded(0.0, 1.0, jnp.bfloat16, (24, 4)),
    ],
)
def test_a_table_of_as_many_rows_as_choices_is_items_that_know_their_numbers(spec):
    (side,) = table_side(spec)
    assert (side.kind, side.size, names(side.leaves)) == ("items", 24, ["table"])
    assert side.is_numbered


@pytest.mark.parametrize(
    ("choices", "spec"),
    [
        (24, specs.Array((24, 4), np.uint8)),  # pixels
        (24, bounded(0, 255, jnp.uint8, (24, 4))),
        (24, bounded(0, 5, shape=(24, 4))),  # a board
        (24, specs.Array((24, 4), bool)),
        (24, specs.Array((24, 4, 3), float)),
        (24, specs.Array((24, 24), float)),  # nothing tells rows from columns
        (6, specs.Array((6, 4), float)),
        (25, specs.Array((24, 4), float)),
    ],
)
def test_images_boards_and_what_may_be_chance_are_no_tables(choices, spec):
    assert table_side(spec, choices) == ()


def test_rows_of_a_table_are_its_numbers_and_the_rows_own():
    layout = read_layout(observing(specs.DiscreteArray(8), table=bounded(0.0, 2.0, float, (8, 3))))
    table = jax.random.uniform(KEY, (8, 3), maxval=2)
    (rows,) = see(layout, {}, Seen(table=table)).rows
    np.testing.assert_allclose(rows, np.concatenate([table - 1, np.eye(8)], axis=1), atol=1e-6)


def test_items_that_are_told_otherwise_do_not_know_their_numbers():
    for name in ("TSP-v1", "Knapsack-v1", "BinPack-v2", "JobShop-v0"):
        sides = read_layout(make_once(name)).sides
        assert not any(side.is_numbered for side in sides)
