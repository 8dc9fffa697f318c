"""Agents beside the optimum: what an environment pays is what the solvers count."""

import importlib
import io
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
import pytest
from jumanji.environments import JobShop, SlidingTilePuzzle
from jumanji.environments.logic.sliding_tile_puzzle.constants import MOVES
from jumanji.environments.logic.sliding_tile_puzzle.generator import RandomWalkGenerator
from jumanji.environments.packing.job_shop.generator import ToyGenerator
from rich.console import Console

from vernal.adapters.agents.ppo import PPOConfig
from vernal.adapters.evaluation import Episodes
from vernal.adapters.registry import make_environment
from vernal.adapters.runs.training import RunConfig

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
gap, job_shop, puzzles, tours = map(
    importlib.import_module, ("gap", "solvers.job_shop", "solvers.puzzles", "solvers.tours")
)
KEY = jax.random.key(3)


def play_out(environment, choose):
    """One episode; its return, number of steps and last state."""
    reset, step = jax.jit(environment.reset), jax.jit(environment.step)
    total, length = 0.0, 0
    with jax.numpy_rank_promotion("allow"):
        state, timestep = reset(KEY)
        while not timestep.last():
            state, timestep = step(state, choose(state, timestep.observation))
            total, length = total + float(timestep.reward), length + 1
    return total, length, state


def any_legal(seed=0):
    rng = np.random.default_rng(seed)
    return lambda _, seen: np.int32(rng.choice(np.flatnonzero(seen.action_mask)))


def test_return_of_a_tour_is_its_length_with_the_way_back():
    total, _, state = play_out(jumanji.make("TSP-v1"), any_legal())
    visited = np.asarray(state.coordinates)[state.trajectory]
    assert -total == pytest.approx(tours.tour_length(visited), rel=1e-5)


def test_return_of_routes_is_their_length_from_depot_to_depot():
    total, length, state = play_out(jumanji.make("CVRP-v1"), any_legal())
    visited = np.asarray(state.coordinates)[state.trajectory[: length + 1]]
    assert -total == pytest.approx(tours.tour_length(visited), rel=1e-5)


def test_return_of_a_knapsack_is_the_value_in_it():
    total, _, state = play_out(jumanji.make("Knapsack-v1"), any_legal())
    packed = np.asarray(state.packed_items)
    assert total == pytest.approx(np.asarray(state.values)[packed].sum(), rel=1e-5)


def test_return_of_a_colouring_is_how_many_colours_it_has():
    total, _, state = play_out(jumanji.make("GraphColoring-v1"), any_legal())
    assert -total == len(np.unique(state.colors))


def follow(starts, machines):
    """Each machine starts the job whose operation begins now, and else does nothing."""

    def choose(state, _):
        action = np.full(machines.max() + 1, len(machines), np.int32)
        for j, o in zip(*np.nonzero((starts == state.step_count) & (machines >= 0)), strict=True):
            action[machines[j, o]] = j
        return action

    return choose


TOY = ToyGenerator()(KEY)
TOY_JOBS = np.asarray(TOY.ops_machine_ids), np.asarray(TOY.ops_durations)


def test_the_toy_job_shop_takes_the_eight_steps_that_jumanji_says():
    assert job_shop.shortest_makespan(*TOY_JOBS) == (8, 8)


def test_a_schedule_followed_takes_its_makespan_in_steps_and_pays_one_for_each():
    starts = job_shop.improved_schedule(*TOY_JOBS, tries=100)
    total, length, _ = play_out(JobShop(ToyGenerator()), follow(starts, TOY_JOBS[0]))
    assert (-total, length) == (job_shop.makespan(starts, TOY_JOBS[1]),) * 2


def test_idle_machines_are_no_finished_schedule():
    problem, idle = gap.find_problem(JobShop()), np.array([-3 - 960.0])
    assert np.isnan(problem.tally(JobShop(), idle, np.array([4]))).all()


def test_slides_that_come_nearer_each_time_solve_the_puzzle_in_the_fewest_moves():
    environment = SlidingTilePuzzle(RandomWalkGenerator(3, 60))
    goal, first = np.asarray(environment.solved_puzzle), []

    def distance_after(puzzle, gap_at, move):
        moved = puzzle.copy()
        there = tuple(gap_at + MOVES[move])
        moved[tuple(gap_at)], moved[there] = puzzle[there], 0
        return 0 if (moved == goal).all() else puzzles.fewest_slides(moved)

    def nearest(state, seen):
        puzzle, gap_at = np.asarray(state.puzzle), np.asarray(state.empty_tile_position)
        first.append(puzzles.fewest_slides(puzzle))
        moves = np.flatnonzero(seen.action_mask)
        return min(moves, key=lambda move: distance_after(puzzle, gap_at, move))

    length = play_out(environment, nearest)[1]
    assert first[0] > 2
    assert length == first[0]


@pytest.mark.parametrize(("turns", "fewest"), [([0, 4, 9], 3), ([0, 3, 4], 1), ([0, 1], 2)])
def test_a_scrambled_cube_takes_no_more_turns_than_scrambled_it(turns, fewest):
    cube = np.repeat(np.arange(6, dtype=np.int8), 9)
    for turn in turns:
        cube = cube[gap.cube_turns()[turn]]
    assert puzzles.fewest_turns(cube, gap.cube_turns()) == fewest


def play_at_random(environment, act, key, episodes):
    """Episodes whose returns are what the policy says, without any environment."""
    keys = jax.random.split(key, episodes)
    return Episodes(jax.vmap(lambda k: act(k, None))(keys), jnp.ones(episodes, int))


@pytest.fixture
def played_at_random(monkeypatch):
    monkeypatch.setattr(gap, "play", play_at_random)


def random_return(key, observation):
    del observation
    return -jax.random.uniform(key, minval=9, maxval=10)


@pytest.mark.usefixtures("played_at_random")
def test_the_best_of_several_tries_is_the_best_of_each_instance():
    problem = gap.find_problem(jumanji.make("TSP-v1"))
    few, many = (
        gap.play_scores(problem, None, random_return, KEY, 8, tries=tries) for tries in (1, 3)
    )
    assert (many <= few).all()
    assert (many < few).any()


def test_more_of_what_is_good_has_no_gap_either_way():
    assert gap.gaps(np.array([8.0]), np.array([10.0]), sign=-1).tolist() == [20.0]
    assert gap.gaps(np.array([12.0]), np.array([10.0]), sign=1).tolist() == [20.0]


def test_an_environment_without_a_solver_is_told():
    with pytest.raises(ValueError, match="no solver knows Snake; there are some for Knapsack"):
        gap.find_problem(jumanji.make("Snake-v1"))


class GivenAgent(NamedTuple):
    act: Any = lambda state, key, observation: random_return(state if key is None else key, None)


@pytest.mark.usefixtures("played_at_random")
def test_table_of_a_run_has_the_optimum_the_rules_and_the_policies(monkeypatch):
    config = RunConfig("ppo", "TSP-v1", "auto", 0, 16, PPOConfig(), {"num_cities": "6"})
    environment = make_environment(config.environment, config.environment_arguments)
    run = (config, environment, GivenAgent(), jax.random.key(0))
    monkeypatch.setattr(gap.training, "load", lambda _: run)
    monkeypatch.setattr(gap, "make_random_policy", lambda _: random_return)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(gap.measure(Path("run"), episodes=4, samples=2, seed=1))
    text = console.export_text()
    assert "TSP-v1 num_cities=6, 4 instances" in text
    assert re.findall(r"│ (\w[\w ,]*\w) +│ +100.0%", text) == [
        "optimum",
        "nearest neighbour",
        "agent, greedy",
        "agent, best of 2 sampled",
        "random legal",
    ]
