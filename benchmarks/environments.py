"""Rollouts: vernal's prefetched episodes beside Jumanji's automatic reset, in one run.

    python benchmarks/environments.py
    python benchmarks/environments.py --environments Snake-v1 Maze-v0 --repeats 9

All walk the same environment, from the same states on, under the same policy, uniform over legal
actions. They are timed in turn, several times; the ratio of the medians is what counts.

`step alone` goes on past the end of every episode, and `resets` is what the episodes that begin in
a step take if they are generated in batches as large as vernal's: their sum is the floor.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jumanji
import numpy as np
from jumanji.environments import Sokoban
from jumanji.environments.routing.sokoban.generator import ToyGenerator
from jumanji.wrappers import AutoResetWrapper

from vernal.adapters.environments import VectorEnvironment
from vernal.adapters.evaluation import make_random_policy

COPIES = 64
FLOOR_GOAL = 1.5
# How many times as fast as Jumanji's automatic reset; other environments have no such goal.
SPEED_GOALS = {("Maze-v0", 16): 50, ("Maze-v0", 64): 20, ("Connector-v3", 64): 8}
WALK_SECONDS = 0.5
SHORTEST_WALK = 30
COLUMNS = ("step alone", "resets", "vernal", "to floor", "AutoReset", "ratio")
LINE = "{:30} {:>6}" + " {:>14}" * len(COLUMNS)

Step = Callable[[Any, Any], tuple[Any, Any, Any, Any]]
Run = Callable[[int], Any]


class Walkers(NamedTuple):
    """Where all copies are, and what they have met."""

    states: Any
    observations: Any
    key: jax.Array
    rewards: jax.Array
    ends: jax.Array


Walk = Callable[[Walkers, int], Walkers]


def main() -> None:
    """Time every case, and print each row as it comes."""
    names = sorted(jumanji.registered_environments())
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--environments", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5, help="times that each is run")
    parser.add_argument(
        "--cpu-time", action="store_true", help="for a busy machine, with one core to run on"
    )
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    print(LINE.format("environment", "copies", *COLUMNS), flush=True)
    for name in arguments.environments:
        for copies in (16, COPIES) if (name, 16) in SPEED_GOALS else (COPIES,):
            print(measure(name, copies, arguments.repeats, clock), flush=True)
            jax.clear_caches()  # or what was compiled would fill the memory


def make(name: str) -> Any:
    """An environment by its name; Sokoban with levels that need no download."""
    return Sokoban(generator=ToyGenerator()) if name == "Sokoban-v0" else jumanji.make(name)


def measure(name: str, copies: int, repeats: int, clock: Callable[[], float]) -> str:
    """Time one environment: a line of the table."""
    environment = make(name)
    envs = VectorEnvironment(environment, copies)
    walk = make_walk(environment, prefetched(envs), copies)
    start, length = begin(envs, walk, clock)
    inside = start._replace(states=start.states.states)
    stock = AutoResetWrapper(environment)
    walk_alone, walk_stock = (make_walk(environment, raw(e), copies) for e in (environment, stock))
    runs: list[Run] = [
        lambda n: walk_alone(inside, n),
        lambda n: walk_stock(inside, n),
        make_resets(environment, envs.batch_size),
    ]
    lengths = [steps_in(WALK_SECONDS, run, clock) for run in runs]
    alone, auto_reset, reset_batch, vernal = time_in_turn(
        [*runs, lambda n: walk(start, n)], [*lengths, length], repeats, clock
    )
    ends = int(walk(start, length).ends - start.ends) / length
    resets = reset_batch / envs.batch_size * ends
    goal = SPEED_GOALS.get((name, copies))
    return LINE.format(
        name,
        copies,
        *(f"{seconds * 1e6:.1f} µs" for seconds in (alone, resets, vernal)),
        f"{vernal / (alone + resets):.2f} (<= {FLOOR_GOAL})",
        f"{auto_reset * 1e6:.1f} µs",
        f"{auto_reset / vernal:.1f}" + (f" (>= {goal})" if goal else ""),
    )


def begin(envs: VectorEnvironment, walk: Walk, clock: Callable[[], float]) -> tuple[Walkers, int]:
    """Copies on their way, with queues as full as in the long run, and a length for their walk.

    It meets several batches of resets, unless that would take far longer than other walks.
    """
    env_state = jax.jit(envs.init)(jax.random.key(0))
    queue = env_state.queue
    env_state = env_state._replace(queue=queue._replace(taken=queue.generated))
    start = Walkers(
        env_state, env_state.observations, jax.random.key(1), jnp.zeros(()), jnp.zeros((), int)
    )
    length = steps_in(WALK_SECONDS, lambda n: walk(start, n), clock)
    start = walk(start, length)
    wanted = 8 * envs.batch_size / max(1, int(start.ends))
    return start, int(length * min(4, max(1, wanted)))


def raw(environment: Any) -> Step:
    """Steps of an environment as it is, under `vmap`."""

    def step(states: Any, actions: Any) -> tuple[Any, Any, Any, Any]:
        states, timesteps = jax.vmap(environment.step)(states, actions)
        return states, timesteps.observation, timesteps.reward, timesteps.last()

    return step


def prefetched(envs: VectorEnvironment) -> Step:
    """Steps of `VectorEnvironment`."""

    def step(env_state: Any, actions: Any) -> tuple[Any, Any, Any, Any]:
        env_state, transitions = envs.step(env_state, actions)
        return env_state, env_state.observations, transitions.rewards, transitions.resets

    return step


def make_walk(environment: Any, step: Step, copies: int) -> Walk:
    """A compiled walk of any length."""
    act = jax.vmap(make_random_policy(environment))

    def take_step(_: Any, at: Walkers) -> Walkers:
        key, step_key = jax.random.split(at.key)
        actions = act(jax.random.split(step_key, copies), at.observations)
        states, observations, rewards, ended = step(at.states, actions)
        return Walkers(states, observations, key, at.rewards + rewards.sum(), at.ends + ended.sum())

    return jax.jit(lambda start, length: jax.lax.fori_loop(0, length, take_step, start))


def make_resets(environment: Any, batch_size: int) -> Run:
    """Resets of a whole batch, again and again."""

    def reset(n: Any) -> Any:
        keys = jax.random.split(jax.random.key(n), batch_size)
        states, timesteps = jax.vmap(environment.reset)(keys)
        return states, timesteps.observation

    return jax.jit(lambda length: jax.lax.fori_loop(0, length, lambda n, _: reset(n), reset(0)))


def steps_in(seconds: float, run: Run, clock: Callable[[], float]) -> int:
    """About how many steps a run takes in a time."""
    jax.block_until_ready(run(1))  # compiles
    length, elapsed = SHORTEST_WALK, 0.0
    while True:
        start = clock()
        jax.block_until_ready(run(length))
        elapsed = clock() - start
        if elapsed > seconds / 10:
            return max(SHORTEST_WALK, int(length * seconds / elapsed))
        length *= 4


def time_in_turn(
    runs: list[Run], lengths: list[int], repeats: int, clock: Callable[[], float]
) -> np.ndarray:
    """Median seconds of one step of each."""
    seconds = np.zeros((repeats, len(runs)))
    for repeat in range(repeats):
        for column, (run, length) in enumerate(zip(runs, lengths, strict=True)):
            start = clock()
            jax.block_until_ready(run(length))
            seconds[repeat, column] = (clock() - start) / length
    return np.median(seconds, axis=0)


if __name__ == "__main__":
    main()
