"""What many seeds cost in one program, and what a second device brings.

    python benchmarks/scaling.py seeds
    python benchmarks/scaling.py devices

Seeds: an iteration of eight agents at once (`vmap`), and of eight one after the other in one
program, beside eight times the iteration of one. Eight runs in turn take that, and compile the
program of one eight times.

Devices: two devices made of the CPU, beside one, which computes with several threads already; under
`taskset -c 0` the column `one device` is that of one core. `half alone` is an iteration of half the
environments in minibatches of half the size on one device. What two devices take more than that is
lost to each other's words, to waiting, and to threads that both would have had.
"""

import argparse
import dataclasses
import time
from typing import Any

import jax

DEVICES = 2
jax.config.update("jax_num_cpu_devices", DEVICES)

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from vernal.adapters.agents.ppo import PPOConfig  # noqa: E402
from vernal.adapters.runs.config import RunConfig  # noqa: E402
from vernal.adapters.runs.program import make_program  # noqa: E402

AGENTS = 8
TASKS = [("maze-medium", "blog"), ("maze-medium", "spec"), ("Snake-v1", "spec")]
# Environments and minibatch.
SIZES = [(16, 128), (64, 512), (256, 2048)]


def main() -> None:
    """Time one of the two, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["seeds", "devices"])
    parser.add_argument("--repeats", type=int, default=5, help="iterations timed of each")
    options = parser.parse_args()
    measure = measure_seeds if options.what == "seeds" else measure_devices
    Console().print(measure(options.repeats))


def measure_seeds(repeats: int) -> Table:
    """Eight agents in one program beside one."""
    table = Table(
        "environment, network", "one", "8 at once", "8 in turn", "8 on two devices",
        "compiling one", "compiling 8 at once",
        title="milliseconds of an iteration; in brackets, of 8 times one",
    )  # fmt: skip
    for environment, network in TASKS:
        one = RunConfig("ppo", environment, network, 0, 1, PPOConfig())
        at_once = dataclasses.replace(one, seeds=AGENTS, at_once=AGENTS)
        in_turn = dataclasses.replace(one, seeds=AGENTS, at_once=1)
        spread = dataclasses.replace(in_turn, devices=DEVICES)
        programs = [make_program(config) for config in (one, at_once, in_turn, spread)]
        compiling, seconds = time_in_turn(programs, repeats)
        alone, *others = seconds
        cells = [f"{x * 1e3:,.0f} ({x / (AGENTS * alone):.2f})" for x in others]
        starts = f"{compiling[0]:.1f} s", f"{compiling[1]:.1f} s"
        table.add_row(f"{environment}, {network}", f"{alone * 1e3:,.0f}", *cells, *starts)
    return table


def measure_devices(repeats: int) -> Table:
    """Two devices beside one, at several sizes."""
    table = Table(
        "environment, network", "envs", "minibatch", "one device", "two", "faster", "half alone",
        "lost", title="milliseconds of an iteration of 128 steps, 4 epochs",
    )  # fmt: skip
    for environment, network in TASKS:
        for envs, minibatch in SIZES:
            whole = PPOConfig(envs=envs, minibatch_size=minibatch)
            half = PPOConfig(envs=envs // DEVICES, minibatch_size=minibatch // DEVICES)
            programs = [
                make_program(RunConfig("ppo", environment, network, 0, 1, settings, devices=count))
                for settings, count in ((whole, 1), (whole, DEVICES), (half, 1))
            ]
            _, (one, two, alone) = time_in_turn(programs, repeats)
            times = f"{one * 1e3:,.0f}", f"{two * 1e3:,.0f}", f"{one / two:.2f} x"
            lost = f"{alone * 1e3:,.0f}", f"{1 - alone / two:.0%}"
            table.add_row(f"{environment}, {network}", f"{envs}", f"{minibatch}", *times, *lost)
    return table


def time_in_turn(programs: list[Any], repeats: int) -> tuple[list[float], list[float]]:
    """Seconds until each has done its first iteration, and the median of the later ones."""
    states, first, seconds = [], [], [[] for _ in programs]
    for program in programs:
        start = time.perf_counter()
        states.append(jax.block_until_ready(program.step(program.init())[0]))
        first.append(time.perf_counter() - start)
    for _ in range(repeats):
        for number, program in enumerate(programs):
            start = time.perf_counter()
            states[number] = jax.block_until_ready(program.step(states[number])[0])
            seconds[number].append(time.perf_counter() - start)
    return first, [float(np.median(times)) for times in seconds]


if __name__ == "__main__":
    main()
