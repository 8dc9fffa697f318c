"""What core's functions cost: checked and unchecked, eager and compiled.

    python benchmarks/core.py

The second table is why the estimators walk the rollout step by step: the same recurrence as
an associative scan, which has a depth of log T, beside it.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import config
from rich.console import Console
from rich.table import Table

from vernal.core import Categorical, gae, make_batch, mask_logits, ppo_loss


def main() -> None:
    """Print both tables."""
    console = Console()
    console.print(overhead())
    console.print(recurrences())


def overhead() -> Table:
    """Microseconds of a call on small arrays."""
    x = jnp.linspace(0, 1, 64).reshape(16, 4)
    flags = x > 2
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "mask_logits": (mask_logits, (x, flags)),
        "Categorical.entropy": (lambda x: Categorical(x).entropy(), (x,)),
        "gae": (lambda *a: gae(*a, lambda_=0.95), (x, x, x, x, flags)),
        "ppo_loss": (ppo_loss, (x, x, x, x, x, x)),
        "make_batch": (make_batch, (x, x, x, x, x, x)),
    }
    table = Table("call", "eager, checked", "eager, unchecked", "check", "compiled")
    for name, (function, args) in calls.items():
        checked = microseconds(function, args)
        config.update("jaxtyping_disable", True)
        unchecked = microseconds(function, args)
        config.update("jaxtyping_disable", False)
        compiled = microseconds(jax.jit(function), args)
        numbers = (checked, unchecked, checked - unchecked, compiled)
        table.add_row(name, *(f"{number:.0f} µs" for number in numbers))
    return table


def recurrences() -> Table:
    """Microseconds of GAE, beside the same recurrence in parallel."""
    table = Table("steps x environments", "gae", "associative scan", "ratio")
    for shape in [(16, 64), (128, 16), (512, 16), (128, 2048), (4096, 1), (100_000, 1)]:
        x = jax.random.uniform(jax.random.key(0), shape)
        resets = x > 0.99
        walk = microseconds(jax.jit(lambda *a: gae(*a, lambda_=0.95)), (x, x, x, x, resets))
        leap = microseconds(jax.jit(parallel_gae), (x, x, x, x, resets))
        cells = f"{walk:.0f} µs", f"{leap:.0f} µs", f"{leap / walk:.1f} x"
        table.add_row(f"{shape[0]:,} x {shape[1]:,}", *cells)
    return table


def parallel_gae(rewards: Any, discounts: Any, values: Any, next_values: Any, resets: Any) -> Any:
    """GAE with an associative scan over time."""

    def join(late: Any, early: Any) -> Any:
        return early[0] + early[1] * late[0], early[1] * late[1]

    deltas = rewards + discounts * next_values - values
    decays = jnp.where(resets, 0, discounts * 0.95)
    return jax.lax.associative_scan(join, (deltas, decays), reverse=True)[0]


def microseconds(function: Callable[..., Any], args: tuple[Any, ...], repeats: int = 50) -> float:
    """Median time of a call, after one that is not counted."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return float(np.median(times) * 1e6)


if __name__ == "__main__":
    main()
