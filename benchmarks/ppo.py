"""One iteration of PPO: where its time goes, and how far it is from the floor.

    python benchmarks/ppo.py

An iteration on `maze-medium`: 16 environments x 512 steps, 10 epochs, minibatches of 1,024. Its
parts are compiled and timed each by itself, in turn; their sum need not be the whole.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from vernal.adapters.actions import make_action_codec
from vernal.adapters.agents.ppo import PPOConfig, collect, make_ppo, minibatch_loss
from vernal.adapters.environments import VectorEnvironment
from vernal.adapters.networks import NETWORKS
from vernal.adapters.registry import make_environment
from vernal.core import gae, minibatch_indices, take


def main() -> None:
    """Time an iteration and its parts, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="times that each is run")
    parser.add_argument("--networks", nargs="+", default=["spec", "blog"], choices=[*NETWORKS])
    options = parser.parse_args()
    for name in options.networks:
        Console().print(measure(name, options.repeats))


def measure(network_name: str, repeats: int) -> Table:
    """The table for one network."""
    config = PPOConfig()
    environment = make_environment("maze-medium")
    make_network = NETWORKS[network_name](environment)
    agent = make_ppo(environment, make_network, config)
    codec = make_action_codec(environment)
    envs = VectorEnvironment(environment, config.envs)
    state = jax.jit(agent.init)(jax.random.key(0), agent.hyperparameters)
    start = time.perf_counter()
    step = jax.jit(agent.step).lower(state).compile()
    compile_seconds = time.perf_counter() - start

    network = agent.network(state)
    params, static = eqx.partition(network, eqx.is_array)
    hyperparameters = state.hyperparameters
    numbers = (jax.random.key(1), hyperparameters, config.rollout_steps, state.returns)

    @jax.jit
    def rollout(params: Any, env_state: Any) -> Any:
        return collect(eqx.combine(params, static), envs, codec, env_state, *numbers)

    batch = rollout(params, state.envs)[1]
    indices = minibatch_indices(
        jax.random.key(2), size=len(batch.values), minibatch_size=config.minibatch_size
    )[0]
    minibatch = take(batch, indices)

    def loss(params: Any, minibatch: Any) -> Any:
        return minibatch_loss(
            eqx.combine(params, static), minibatch, codec, hyperparameters, False
        )[0]

    rows = batch.values.reshape(config.rollout_steps, config.envs)
    advantages = functools.partial(gae, lambda_=0.95)
    updates = config.epochs * len(batch.values) // config.minibatch_size
    parts: dict[str, tuple[Callable[[], Any], int]] = {
        "whole iteration": (lambda: step(state), 1),
        "rollout": (lambda: rollout(params, state.envs), 1),
        "advantages": (bind(advantages, rows, rows, rows, rows, rows > 0), 1),
        "gather": (bind(take, batch, indices), updates),
        "forward": (bind(loss, params, minibatch), updates),
        "forward and backward": (bind(jax.grad(loss), params, minibatch), updates),
    }
    seconds = time_in_turn({name: part for name, (part, _) in parts.items()}, repeats)
    table = Table("part", "once", "times", "in all", title=f"PPO, {network_name} network")
    for name, (_, times) in parts.items():
        cells = f"{seconds[name] * 1e3:.2f} ms", str(times), f"{seconds[name] * times * 1e3:.0f} ms"
        table.add_row(name, *cells)
    floor = multiply_adds(params) * 3 * 2 * len(batch.values) * config.epochs / peak_flops(repeats)
    table.add_row("floor of the update", "", "", f"{floor * 1e3:.0f} ms")
    table.add_row("compiling", "", "", f"{compile_seconds:.1f} s")
    return table


def bind(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Compile a function and hold its arguments."""
    compiled = jax.jit(function)
    return lambda: compiled(*args)


def time_in_turn(parts: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each; the first run of each compiles and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(repeats + 1):
        for name, part in parts.items():
            start = time.perf_counter()
            jax.block_until_ready(part())
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(times)) for name, times in seconds.items()}


def multiply_adds(params: Any) -> float:
    """Of one state through the network's dense layers, and its convolution at 64 places."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.ndim == 2:
            total += leaf.size * (64 if "conv" in jax.tree_util.keystr(path) else 1)
    return total


def peak_flops(repeats: int) -> float:
    """What one large matrix product reaches here: the floor's currency."""
    x = jnp.ones((2048, 2048))
    seconds = time_in_turn({"product": bind(jnp.matmul, x, x)}, repeats)["product"]
    return 2 * 2048**3 / seconds


if __name__ == "__main__":
    main()
