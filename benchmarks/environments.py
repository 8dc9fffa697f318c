"""Rollouts: vernal's prefetched episodes beside Jumanji's automatic reset, in one run.

    python benchmarks/environments.py

All walk the same environment under the same policy, uniform over legal actions. They are timed
in turn, several times; the ratio of the medians is what counts. `step alone` goes on past the
end of every episode, which means nothing but is the floor.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jumanji
import numpy as np
from jumanji.wrappers import AutoResetWrapper
from rich.console import Console
from rich.table import Table

from vernal.adapters.environments import VectorEnvironment
from vernal.adapters.evaluation import make_random_policy

CASES = [("Maze-v0", 16, 50), ("Maze-v0", 64, 20), ("Connector-v3", 64, 8)]
Step = Callable[[Any, Any], tuple[Any, Any, Any]]
Rollout = Callable[[], None]


def main() -> None:
    """Time every case and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="times that each is run")
    repeats = parser.parse_args().repeats
    table = Table("environment", "copies", "step alone", "vernal", "AutoReset", "ratio", "goal")
    for name, copies, goal in CASES:
        environment = jumanji.make(name)
        rollouts = [
            make_rollout(name, *raw(environment, copies), copies, 2000),
            make_rollout(name, *prefetched(environment, copies), copies, 2000),
            make_rollout(name, *raw(AutoResetWrapper(environment), copies), copies, 200),
        ]
        alone, vernal, stock = time_in_turn(rollouts, repeats)
        cells = (f"{seconds * 1e6:.1f} µs" for seconds in (alone, vernal, stock))
        table.add_row(name, str(copies), *cells, f"{stock / vernal:.0f} x", f">= {goal} x")
    Console().print(table)


def raw(environment: Any, copies: int) -> tuple[Step, Any, Any]:
    """Steps of an environment as it is, under `vmap`."""

    def step(states: Any, actions: Any) -> tuple[Any, Any, Any]:
        states, timesteps = jax.vmap(environment.step)(states, actions)
        return states, timesteps.observation, timesteps.reward

    keys = jax.random.split(jax.random.key(0), copies)
    states, timesteps = jax.jit(jax.vmap(environment.reset))(keys)
    return step, states, timesteps.observation


def prefetched(environment: Any, copies: int) -> tuple[Step, Any, Any]:
    """Steps of `VectorEnvironment`."""
    envs = VectorEnvironment(environment, copies)

    def step(env_state: Any, actions: Any) -> tuple[Any, Any, Any]:
        env_state, transitions = envs.step(env_state, actions)
        return env_state, env_state.observations, transitions.rewards

    env_state = jax.jit(envs.init)(jax.random.key(0))
    return step, env_state, env_state.observations


def make_rollout(
    name: str, step: Step, states: Any, observations: Any, copies: int, length: int
) -> tuple[Rollout, int]:
    """A compiled walk of `length` vectorised steps."""
    act = jax.vmap(make_random_policy(jumanji.make(name)))

    @jax.jit
    def walk(states: Any, observations: Any, key: jax.Array) -> Any:
        def body(carry: Any, key: jax.Array) -> Any:
            states, observations = carry
            actions = act(jax.random.split(key, copies), observations)
            states, observations, rewards = step(states, actions)
            return (states, observations), rewards

        return jax.lax.scan(body, (states, observations), jax.random.split(key, length))

    return lambda: jax.block_until_ready(walk(states, observations, jax.random.key(1))), length


def time_in_turn(rollouts: list[tuple[Rollout, int]], repeats: int) -> np.ndarray:
    """Median seconds of one step of each; the first walk of each compiles and is not counted."""
    seconds = np.zeros((repeats, len(rollouts)))
    for rollout, _ in rollouts:
        rollout()
    for repeat in range(repeats):
        for column, (rollout, length) in enumerate(rollouts):
            start = time.perf_counter()
            rollout()
            seconds[repeat, column] = (time.perf_counter() - start) / length
    return np.median(seconds, axis=0)


if __name__ == "__main__":
    main()
