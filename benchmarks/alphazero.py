"""AlphaZero beside PPO: at equal environment steps, and at equal time.

    python benchmarks/alphazero.py                            # all, three seeds, 3 minutes each
    python benchmarks/alphazero.py Maze-v0 --minutes 1 --seeds 1

Both train with their default settings and the default network, each for the same time. PPO's
state is also kept from where it had taken as many steps as AlphaZero took in all. They are
evaluated on the same 256 instances, which training never met: the networks alone, and
AlphaZero's with searches. In mazes, `shortest` is the share solved in the fewest steps.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from vernal.adapters.agents.agent import Agent
from vernal.adapters.agents.alphazero import make_alphazero
from vernal.adapters.agents.ppo import make_ppo
from vernal.adapters.evaluation import confidence_interval, instance_keys, play
from vernal.adapters.mazes import shortest_path_length
from vernal.adapters.networks import make_default_network
from vernal.adapters.registry import make_environment

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "Maze-v0": {},
    "RubiksCube-partly-scrambled-v0": {},
    "SlidingTilePuzzle-v0": {"grid_size": "3"},
    "Game2048-v1": {},
}
EPISODES = 256
KEY = jax.random.key(1)
LINE = "{:32} {:>4} {:28} {:>12} {:>9} {:>22} {:>18} {:>9}"


def main() -> None:
    """Compare on each environment, seed by seed, and print each line as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("environments", nargs="*", choices=[[], *ENVIRONMENTS], metavar="ENV")
    parser.add_argument("--minutes", type=float, default=3, help="of training, for each agent")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--simulations", type=int, nargs="+", default=[16, 64])
    parser.add_argument(
        "--cpu-time", action="store_true", help="for a busy machine, with one core to run on"
    )
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    print(
        LINE.format(
            "environment", "seed", "who", "steps", "seconds", "return", "length", "shortest"
        )
    )
    for name in options.environments or ENVIRONMENTS:
        for seed in range(options.seeds):
            compare(name, seed, 60 * options.minutes, options.simulations, clock)
            jax.clear_caches()


def compare(
    name: str, seed: int, seconds: float, simulations: list[int], clock: Callable[[], float]
) -> None:
    """Train both, and print a line for each way of acting."""
    environment = make_environment(name, ENVIRONMENTS[name])
    network = make_default_network(environment)
    planner, learner = make_alphazero(environment, network), make_ppo(environment, network)
    *_, (planned, planned_steps, planned_seconds) = train(planner, seed, seconds, clock)
    at_equal_steps, at_equal_time = None, None
    for at_equal_time in train(learner, seed, seconds, clock):
        if at_equal_steps is None and at_equal_time[1] >= planned_steps:
            at_equal_steps = at_equal_time
    print_line = make_printer(name, seed, environment)
    for what, learned in (("steps", at_equal_steps), ("time", at_equal_time)):
        if learned is not None:
            print_line(f"PPO, equal {what}", greedy(learner, learned[0]), *learned[1:])
    print_line("AlphaZero, network alone", greedy(planner, planned), planned_steps, planned_seconds)
    for count in simulations:
        who = f"AlphaZero, {count} simulations"
        print_line(who, searching(planner, planned, count), planned_steps, planned_seconds)


def train(
    agent: Agent, seed: int, seconds: float, clock: Callable[[], float]
) -> Iterator[tuple[Any, int, float]]:
    """The state after each iteration, with steps and seconds so far; compilation not counted."""
    state = jax.jit(agent.init)(jax.random.key(seed), agent.hyperparameters)
    step = jax.jit(agent.step).lower(state).compile()
    began, steps = clock(), 0
    while clock() - began < seconds:
        state, _ = jax.block_until_ready(step(state))
        steps += agent.steps_per_iteration
        yield state, steps, clock() - began


def greedy(agent: Agent, state: Any) -> Callable[..., Any]:
    """The network's most probable action."""
    return lambda key, observation, environment_state: agent.act(state, None, observation)


def searching(agent: Agent, state: Any, simulations: int) -> Callable[..., Any]:
    """The best action that a search finds."""
    assert agent.plan is not None
    plan = agent.plan
    return lambda key, observation, environment_state: plan(
        state, key, environment_state, observation, simulations=simulations
    )


def make_printer(name: str, seed: int, environment: Any) -> Callable[..., None]:
    """What evaluates a policy and prints its line."""
    shortest = shortest_lengths(environment) if name.startswith("Maze") else None

    def print_line(who: str, act: Callable[..., Any], steps: int, seconds: float) -> None:
        outcome = jax.jit(lambda: play(environment, act, KEY, EPISODES, sees_states=True))()
        returns, lengths = np.asarray(outcome.returns), np.asarray(outcome.lengths)
        share = "" if shortest is None else f"{np.mean((returns > 0) & (lengths == shortest)):.1%}"
        means = [str(confidence_interval(x)) for x in (returns, lengths)]
        print(
            LINE.format(name, seed, who, f"{steps:,}", f"{seconds:.0f}", *means, share), flush=True
        )

    return print_line


def shortest_lengths(environment: Any) -> np.ndarray:
    """Fewest steps to the goal, of each instance."""
    states, _ = jax.vmap(environment.reset)(instance_keys(KEY, EPISODES))
    starts = zip(*map(np.asarray, states.agent_position), strict=True)
    goals = zip(*map(np.asarray, states.target_position), strict=True)
    mazes = zip(np.asarray(states.walls), starts, goals, strict=True)
    return np.array([shortest_path_length(*maze) for maze in mazes])


if __name__ == "__main__":
    main()
