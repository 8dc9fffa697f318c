"""The solvers of the benchmarks: each against all possibilities, tried one by one."""

import doctest
import importlib
import itertools
import math
import pkgutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
colouring, job_shop, knapsack, program, puzzles, routes, tours = (
    importlib.import_module(f"solvers.{name}")
    for name in ("colouring", "job_shop", "knapsack", "program", "puzzles", "routes", "tours")
)

SEEDS = range(6)


@pytest.mark.parametrize(
    "name",
    [
        m.name
        for m in pkgutil.iter_modules([str(Path(__file__).parents[1] / "benchmarks" / "solvers")])
    ],
)
def test_examples_of_the_documentation(name):
    assert doctest.testmod(importlib.import_module(f"solvers.{name}")).failed == 0


def test_a_program_without_a_solution_is_an_error():
    with pytest.raises(RuntimeError, match="no solution"):
        program.minimise([1.0], [[1.0]], least=2)


def random_knapsack(seed, items=10):
    rng = np.random.default_rng(seed)
    weights, values = rng.random((2, items), np.float32)
    return weights, values, items / 4


@pytest.mark.parametrize("seed", SEEDS)
def test_greatest_value_is_the_best_of_all_choices(seed):
    weights, values, capacity = random_knapsack(seed)
    choices = np.array(list(itertools.product([0, 1], repeat=len(values))))
    fits = choices @ weights <= capacity
    assert knapsack.greatest_value(weights, values, capacity) == pytest.approx(
        (choices[fits] @ values).max()
    )


def test_densest_first_leaves_out_what_does_not_fit_and_goes_on():
    weights, values = np.array([3.0, 2.0, 1.0]), np.array([9.0, 4.0, 1.0])
    assert knapsack.densest_first(weights, values, 4.0) == 10.0


def cities(seed, n):
    return np.random.default_rng(seed).random((n, 2))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_shortest_tour_is_the_best_of_all_orders(n):
    for seed in SEEDS:
        places = cities(seed, n)
        orders = itertools.permutations(range(1, n))
        shortest = min(tours.tour_length(places[[0, *order]]) for order in orders)
        assert tours.shortest_tour(places) == pytest.approx(shortest)


def test_shortest_tour_of_two_distant_circles_is_one_circle():
    corners = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    assert tours.shortest_tour(
        np.concatenate([corners, corners + np.array([10, 0])])
    ) == pytest.approx(24)


def test_nearest_neighbour_is_one_of_the_tours():
    places = cities(0, 12)
    assert tours.nearest_neighbour(places) >= tours.shortest_tour(places)


def customers(seed, n):
    rng = np.random.default_rng(seed)
    demands = rng.integers(1, 10, n + 1)
    demands[0] = 0
    return rng.random((n + 1, 2)), demands, 12


def length_of_routes(places, demands, capacity, order):
    """The best way to cut an order of customers into routes."""
    best = [0.0] + [math.inf] * len(order)
    for start, stop in itertools.combinations(range(len(order) + 1), 2):
        part = list(order[start:stop])
        if demands[part].sum() <= capacity:
            length = tours.tour_length(places[[0, *part]])
            best[stop] = min(best[stop], best[start] + length)
    return best[-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_best_routes_are_the_best_of_all_orders_and_cuts(seed):
    instance = customers(seed, 6)
    orders = itertools.permutations(range(1, 7))
    shortest = min(length_of_routes(*instance, order) for order in orders)
    assert routes.best_routes(*instance) == pytest.approx(shortest)


def test_one_vehicle_for_all_drives_the_shortest_tour():
    places, demands, _ = customers(0, 8)
    assert routes.best_routes(places, demands, 1000) == pytest.approx(tours.shortest_tour(places))


def test_too_many_customers_are_told():
    with pytest.raises(ValueError, match="30 customers"):
        routes.best_routes(*customers(0, 30))


def test_nearest_customer_goes_home_when_nothing_fits():
    places = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    assert routes.nearest_customer(places, np.array([0, 2, 2]), 3) == 6.0


def graph(seed, n=6, density=0.6):
    upper = np.triu(np.random.default_rng(seed).random((n, n)) < density, 1)
    return upper | upper.T


def is_colouring(adjacent, colours):
    return not (adjacent & (colours[:, None] == colours)).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_fewest_colours_are_the_fewest_of_all_colourings(seed):
    adjacent = graph(seed)
    colourings = map(np.array, itertools.product(range(6), repeat=6))
    fewest = min(len(np.unique(c)) for c in colourings if is_colouring(adjacent, c))
    assert colouring.fewest_colours(adjacent) == fewest


def test_an_odd_circle_takes_three_colours():
    circle = np.zeros((5, 5), bool)
    circle[np.arange(5), (np.arange(5) + 1) % 5] = True
    assert colouring.fewest_colours(circle | circle.T) == 3


def test_the_petersen_graph_takes_three_colours():
    pairs = list(itertools.combinations(range(5), 2))
    petersen = np.array([[not set(a) & set(b) for b in pairs] for a in pairs])
    assert colouring.fewest_colours(petersen) == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_rules_of_colouring_never_beat_the_optimum(seed):
    adjacent = graph(seed, n=15)
    fewest = colouring.fewest_colours(adjacent)
    assert fewest <= colouring.most_constrained_first(adjacent) <= 15
    assert fewest <= colouring.first_fit(adjacent) <= 15


def test_first_fit_in_a_bad_order_takes_more_colours():
    crown = np.zeros((6, 6), bool)  # Nodes 0, 2, 4 face 1, 3, 5, each but its partner.
    for a, b in itertools.permutations(range(3), 2):
        crown[2 * a, 2 * b + 1] = crown[2 * b + 1, 2 * a] = True
    assert colouring.first_fit(crown) == 3
    assert colouring.most_constrained_first(crown) == 2


FT06 = (  # Fisher and Thompson 1963; its optimum is 55.
    np.array([[2, 0, 1, 3, 5, 4], [1, 2, 4, 5, 0, 3], [2, 3, 5, 0, 1, 4],
              [1, 0, 2, 3, 4, 5], [2, 1, 4, 5, 0, 3], [1, 3, 5, 0, 4, 2]]),
    np.array([[1, 3, 6, 7, 3, 6], [8, 5, 10, 10, 10, 4], [5, 4, 8, 9, 1, 7],
              [5, 5, 5, 3, 8, 9], [9, 3, 5, 4, 3, 1], [3, 3, 9, 10, 4, 1]]),
)  # fmt: skip


def jobs(seed, count=3, operations=2, machines=2):
    rng = np.random.default_rng(seed)
    exists = np.arange(operations) < rng.integers(1, operations + 1, (count, 1))
    where = rng.integers(0, machines, exists.shape), rng.integers(1, 7, exists.shape)
    return tuple(np.where(exists, table, -1) for table in where)


def makespan_of_all_orders(machines, durations):
    """The shortest of all schedules that start operations in some order, as soon as can be."""
    queue = np.nonzero(machines >= 0)[0].tolist()
    shortest = math.inf
    for order in set(itertools.permutations(queue)):
        done, ready, free = [0] * len(machines), [0] * len(machines), {}
        for j in order:
            machine, duration = machines[j, done[j]], durations[j, done[j]]
            ready[j] = free[machine] = max(ready[j], free.get(machine, 0)) + duration
            done[j] += 1
        shortest = min(shortest, max(ready))
    return shortest


@pytest.mark.parametrize("tries", [1, 100])
def test_shortest_makespan_is_that_of_the_best_order(tries):
    for seed in range(10):
        shortest = makespan_of_all_orders(*jobs(seed))
        assert job_shop.shortest_makespan(*jobs(seed), tries=tries) == (shortest, shortest)


def test_integer_program_proves_a_published_optimum():
    assert job_shop.machine_bound(*FT06) < 55
    assert job_shop.shortest_makespan(*FT06, tries=1, seconds=60) == (55, 55)


def assert_is_schedule(starts, machines, durations):
    exists, ends = machines >= 0, starts + durations
    assert (starts[:, 1:] >= ends[:, :-1])[exists[:, 1:]].all()
    for machine in range(machines.max() + 1):
        here = machines == machine
        order = np.argsort(starts[here])
        assert (starts[here][order][1:] >= ends[here][order][:-1]).all()


@pytest.mark.parametrize("tries", [1, 2, 30])
def test_a_schedule_keeps_the_order_of_jobs_and_one_operation_a_machine(tries):
    instance = jobs(3, count=8, operations=5, machines=4)
    assert_is_schedule(job_shop.improved_schedule(*instance, tries=tries), *instance)


def test_more_tries_are_never_worse():
    lengths = [
        job_shop.makespan(job_shop.improved_schedule(*FT06, tries=tries), FT06[1])
        for tries in (1, 10, 100)
    ]
    assert lengths == sorted(lengths, reverse=True)


def test_slides_of_known_puzzles():
    assert puzzles.fewest_slides(np.array([[1, 2, 3], [4, 5, 6], [7, 0, 8]])) == 1
    assert puzzles.fewest_slides(np.array([[8, 6, 7], [2, 5, 4], [3, 0, 1]])) == 31


def test_no_puzzle_of_three_by_three_is_more_than_31_slides_away():
    distances = puzzles._slide_distances(3)
    assert (len(distances), max(distances.values())) == (math.factorial(9) // 2, 31)


def test_a_solved_puzzle_takes_a_move_and_the_way_back():
    assert puzzles.fewest_slides(np.array([[1, 2, 3], [4, 5, 6], [7, 8, 0]])) == 2


@pytest.mark.parametrize(
    ("puzzle", "fault"),
    [([[2, 1, 3], [4, 5, 6], [7, 8, 0]], "no moves"), (np.arange(16).reshape(4, 4), "4 wide")],
)
def test_a_puzzle_without_a_known_answer_is_told(puzzle, fault):
    with pytest.raises(ValueError, match=fault):
        puzzles.fewest_slides(np.asarray(puzzle))


# A cube of one ring of 24 stickers, all different, that turns by one either way.
RING = np.stack([np.roll(np.arange(24), 1), np.roll(np.arange(24), -1)])


@pytest.mark.parametrize("turns", range(1, 9))
def test_turns_are_counted_from_both_ends(turns):
    assert puzzles.fewest_turns(np.roll(np.arange(24, dtype=np.int8), turns), RING) == turns


def test_a_solved_cube_takes_a_turn_and_the_way_back():
    assert puzzles.fewest_turns(np.arange(24, dtype=np.int8), RING) == 2


def test_a_cube_too_far_away_is_told():
    with pytest.raises(ValueError, match="more than 8 turns"):
        puzzles.fewest_turns(np.roll(np.arange(24, dtype=np.int8), 9), RING)
