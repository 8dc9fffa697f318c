"""How far from the best? A trained agent beside the optimum, simple rules and a random policy.

    vernal train ppo TSP-v1
    python benchmarks/gap.py runs/TSP-v1/ppo/seed-0 --samples 16

Every policy plays the same instances, which the agent never saw (those of `vernal evaluate`), and
a solver says of each what was possible. The gap is how much worse an episode was, in percent,
averaged over the episodes that were finished. A number means little alone: the rules, a few
lines of code each, show what a gap of so many percent is worth.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from jumanji import environments as jumanji
from jumanji.environments.logic.rubiks_cube.utils import rotate_cube
from rich.console import Console
from rich.table import Table
from solvers import colouring, job_shop, knapsack, puzzles, routes, tours

from vernal.adapters.evaluation import (
    confidence_interval,
    instance_keys,
    make_random_policy,
    play,
)
from vernal.adapters.mazes import shortest_path_length
from vernal.adapters.runs import training
from vernal.adapters.runs.folder import RunFolder

Numbers = Float[np.ndarray, " N"]


class Problem(NamedTuple):
    """What is to be made small or large in an environment, and how far that can go.

    Attributes:
        score: what is counted, in words.
        read: `states -> arrays` that the solvers take, one instance a row.
        tally: `(environment, returns, lengths) -> scores`, not a number where an episode failed.
        best: the solver: `(*arrays) -> score` of one instance.
        rules: others like it that only follow a rule.
        yardstick: what `best` gives, in words.
        sign: 1 where less is better, -1 where more is.
    """

    score: str
    read: Callable[[Any], tuple[Any, ...]]
    tally: Callable[[Any, np.ndarray, np.ndarray], np.ndarray]
    best: Callable[..., float]
    rules: dict[str, Callable[..., float]]
    yardstick: str = "optimum"
    sign: int = 1


def main() -> None:
    """Measure a run and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a run, as `vernal train` named it")
    parser.add_argument("--episodes", type=int, default=256, help="how many instances")
    parser.add_argument("--samples", type=int, default=1, help="sampled tries; the best counts")
    parser.add_argument("--seed", type=int, default=1, help="of the instances and the sampling")
    options = parser.parse_args()
    try:
        table = measure(options.run, options.episodes, options.samples, options.seed)
    except ValueError as error:
        sys.exit(f"gap: {error}")
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def measure(run: Path, episodes: int, samples: int, seed: int) -> Table:
    """Play all policies on the same instances, and compare with the best.

    Args:
        run: folder of the run.
        episodes: how many instances.
        samples: sampled tries of the agent, of which the best counts.
        seed: of the instances and the sampling.

    Returns:
        A row for the optimum, each rule and each policy.

    Raises:
        ValueError: this is no run, or no solver knows its environment or its size.
    """
    config, environment, agent, state = training.load(RunFolder(run))
    problem, key = find_problem(environment), jax.random.key(seed)
    instances = read_instances(problem, environment, key, episodes)
    began = time.perf_counter()
    best = solve(problem.best, instances)
    seconds = (time.perf_counter() - began) / episodes
    rows = {problem.yardstick: best}
    rows |= {name: solve(rule, instances) for name, rule in problem.rules.items()}
    random = make_random_policy(environment)
    policies: dict[str, tuple[Any, int]] = {
        "agent, greedy": (lambda _, observation: agent.act(state, None, observation), 1),
        f"agent, best of {samples} sampled" if samples > 1 else "agent, sampled": (
            lambda key, observation: agent.act(state, key, observation),
            samples,
        ),
        "random legal": (random, 1),
    }
    for name, (act, tries) in policies.items():
        rows[name] = play_scores(problem, environment, act, key, episodes, tries)
    options = [f"{name}={value}" for name, value in config.environment_arguments.items()]
    name = " ".join([config.environment, *options])
    title = f"{name}, {episodes} instances, {seconds:.3f} s to solve one"
    return tabulate(title, problem, best, rows)


def find_problem(environment: Any) -> Problem:
    """The problem that an environment poses.

    Raises:
        ValueError: no solver knows it.
    """
    for kind, problem in PROBLEMS.items():
        if isinstance(environment, kind):
            return problem
    known = ", ".join(kind.__name__ for kind in PROBLEMS)
    raise ValueError(f"no solver knows {type(environment).__name__}; there are some for {known}.")


def read_instances(
    problem: Problem, environment: Any, key: jax.Array, episodes: int
) -> list[tuple[np.ndarray, ...]]:
    """The arrays of the instances that `play` meets with this key."""
    states, _ = jax.jit(jax.vmap(environment.reset))(instance_keys(key, episodes))
    return list(zip(*map(np.asarray, problem.read(states)), strict=True))


def solve(solver: Callable[..., float], instances: list[tuple[np.ndarray, ...]]) -> Numbers:
    """A solver's score on each instance."""
    return np.array([solver(*instance) for instance in instances], float)


def play_scores(
    problem: Problem, environment: Any, act: Any, key: jax.Array, episodes: int, tries: int
) -> Numbers:
    """A policy's score on each instance: the best of its tries."""

    @jax.jit
    def attempt(number: Any) -> Any:
        def act_anew(key: Any, observation: Any) -> Any:
            return act(jax.random.fold_in(key, number), observation)

        return play(environment, act_anew, key, episodes)

    best = np.full(episodes, np.nan)
    for number in range(tries):
        outcome = attempt(number)
        returns, lengths = np.asarray(outcome.returns), np.asarray(outcome.lengths)
        scores = problem.tally(environment, returns, lengths)
        best = problem.sign * np.fmin(problem.sign * best, problem.sign * scores)
    return best


def gaps(scores: Numbers, best: Numbers, sign: int) -> Numbers:
    """How much worse than the best, in percent of it.

    Example:
        >>> gaps(np.array([3.0, 2.0]), np.array([2.0, 2.0]), sign=1).tolist()
        [50.0, 0.0]
    """
    return 100 * sign * (scores - best) / best


def tabulate(title: str, problem: Problem, best: Numbers, rows: dict[str, Numbers]) -> Table:
    """Means with their 95 % intervals, over the finished episodes."""
    table = Table(title=title)
    table.add_column("who")
    for name in ("finished", problem.score, "gap", f"at the {problem.yardstick}"):
        table.add_column(name, justify="right")
    for name, scores in rows.items():
        finished = ~np.isnan(scores)
        gap = gaps(scores, best, problem.sign)
        texts = ["none", "none"]
        if finished.any():
            texts = [str(confidence_interval(scores[finished]))]
            texts += [f"{confidence_interval(gap[finished])} %"]
        at_best = np.mean(gap < 1e-3)  # In percent: float32 sums of an episode are less exact.
        table.add_row(name, f"{finished.mean():.1%}", *texts, f"{at_best:.1%}")
    return table


def _cost(environment: Any, returns: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return -returns


def _value(environment: Any, returns: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return returns


def _steps_if_rewarded(environment: Any, returns: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.where(returns > 0, lengths, np.nan)


def _steps_if_in_time(environment: Any, returns: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.where(lengths < environment.time_limit, lengths, np.nan)


def _steps_if_unpunished(environment: Any, returns: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """A schedule pays -1 a step; when all machines stand idle it ends, with a penalty."""
    return np.where(returns == -lengths, lengths, np.nan)


@functools.cache
def cube_turns() -> Int[np.ndarray, "18 54"]:
    """For each turn of the environment, which sticker it puts in each place."""
    places = jnp.arange(54, dtype=jnp.int8).reshape(6, 3, 3)
    turns = jax.vmap(rotate_cube, in_axes=(None, 0))(places, jnp.arange(18))
    return np.asarray(turns, int).reshape(18, 54)


def _turns_of_cube(cube: Int[np.ndarray, "6 n n"]) -> int:
    if cube.shape[-1] != 3:
        raise ValueError(f"the cube is {cube.shape[-1]} wide; distances are known of 3 only.")
    return puzzles.fewest_turns(cube.ravel(), cube_turns())


def _list_schedule(
    machines: Int[np.ndarray, "J O"], durations: Int[np.ndarray, "J O"], *, tries: int
) -> int:
    starts = job_shop.improved_schedule(machines, durations, tries=tries)
    return job_shop.makespan(starts, durations)


PROBLEMS: dict[type, Problem] = {
    jumanji.Knapsack: Problem(
        "value",
        lambda states: (states.weights, states.values, states.remaining_budget),
        _value,
        knapsack.greatest_value,
        {"densest first": knapsack.densest_first},
        sign=-1,
    ),
    jumanji.TSP: Problem(
        "tour length",
        lambda states: (states.coordinates,),
        _cost,
        tours.shortest_tour,
        {"nearest neighbour": tours.nearest_neighbour},
    ),
    jumanji.CVRP: Problem(
        "length of routes",
        lambda states: (states.coordinates, states.demands, states.capacity),
        _cost,
        routes.best_routes,
        {"nearest that fits": routes.nearest_customer},
        "best found",
    ),
    jumanji.GraphColoring: Problem(
        "colours",
        lambda states: (states.adj_matrix,),
        _cost,
        colouring.fewest_colours,
        {
            "first fit": colouring.first_fit,
            "most constrained first": colouring.most_constrained_first,
        },
    ),
    jumanji.JobShop: Problem(
        "makespan",
        lambda states: (states.ops_machine_ids, states.ops_durations),
        _steps_if_unpunished,
        # Mostly the optimum; how loose it is elsewhere, the 1,000 schedules show.
        lambda *instance: job_shop.shortest_makespan(*instance).least,
        {
            "most work left first": functools.partial(_list_schedule, tries=1),
            "best of 1,000 schedules": functools.partial(_list_schedule, tries=1000),
        },
        "lower bound",
    ),
    jumanji.SlidingTilePuzzle: Problem(
        "moves", lambda states: (states.puzzle,), _steps_if_in_time, puzzles.fewest_slides, {}
    ),
    jumanji.RubiksCube: Problem(
        "turns", lambda states: (states.cube,), _steps_if_rewarded, _turns_of_cube, {}
    ),
    jumanji.Maze: Problem(
        "steps",
        lambda states: (
            states.walls,
            np.stack([*states.agent_position], axis=1),
            np.stack([*states.target_position], axis=1),
        ),
        _steps_if_rewarded,
        shortest_path_length,
        {},
    ),
}

if __name__ == "__main__":
    main()
