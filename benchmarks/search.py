"""Tree search: vernal's loop beside mctx's, in one run, on identical trees.

    python benchmarks/search.py
    python benchmarks/search.py --cpu-time --repeats 5

The model is a small recurrence that costs next to nothing, so that what is timed is the search.
Each line is one size; both searches are timed in turn, several times, and the ratio of the
medians is what counts. `floor` is the model alone, called once for each simulation.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from vernal.adapters.search import search
from vernal.adapters.search.untyped import mctx

Run = Callable[[PRNGKeyArray, Any], Any]


class Size(NamedTuple):
    """One line of the table, and the ratio that it should not pass."""

    simulations: int = 32
    batch: int = 64
    actions: int = 4
    floats: int = 10
    policy: str = "gumbel_muzero"
    goal: float | None = None
    slice_size: int | None = None
    single: bool = False


SIZES = [
    Size(simulations=8),
    Size(goal=1.05),
    Size(simulations=128, goal=0.5),
    Size(simulations=256, goal=0.25),
    Size(simulations=128, policy="muzero"),
    Size(batch=1),
    Size(batch=8),
    Size(batch=256),
    Size(actions=19),
    Size(actions=82),
    Size(floats=1_000),
    Size(floats=10_000),
    Size(floats=1_000, slice_size=8),
    Size(floats=10_000, slice_size=8, goal=0.5),
]
COLUMNS = ("simulations", "batch", "actions", "floats", "slice", "policy")
TIMES = ("mctx", "vernal", "ratio", "floor", "memory", "compiling")


def main() -> None:
    """Time every size, and print each line as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="times that each is run")
    parser.add_argument(
        "--cpu-time", action="store_true", help="for a busy machine, with one core to run on"
    )
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    print(" ".join(f"{name:>12}" for name in (*COLUMNS, *TIMES)))
    for size in SIZES:
        print(measure(size, options.repeats, clock), flush=True)
        jax.clear_caches()  # or what was compiled would fill the memory
    for size in (Size(), Size(simulations=128)):
        print(measure_single(size, options.repeats, clock), flush=True)


def measure(size: Size, repeats: int, clock: Callable[[], float]) -> str:
    """Vernal beside mctx for one size: a line of the table."""
    require_equal(size, *(make_run(size, with_mctx=choice) for choice in (True, False)))
    # New functions, of which nothing is traced yet.
    runs = [make_run(size, with_mctx=choice) for choice in (True, False)]
    compiled, compiling = zip(*(compile_run(run, size, clock) for run in runs), strict=True)
    stock, ours, floor = time_in_turn([*compiled, compile_floor(size)], size, repeats, clock)
    ratio = f"{ours / stock:.2f}" + (f"<={size.goal}" if size.goal else "")
    memory = compiled[1].memory_analysis().temp_size_in_bytes / 2**20
    cells = (
        size.simulations,
        size.batch,
        size.actions,
        size.floats,
        size.slice_size or "",
        size.policy.removesuffix("_muzero"),
        f"{stock * 1e3:.2f} ms",
        f"{ours * 1e3:.2f} ms",
        ratio,
        f"{floor * 1e3:.2f} ms",
        f"{memory:.1f} MiB",
        f"{compiling[1] / compiling[0]:.2f}",
    )
    return " ".join(f"{cell!s:>12}" for cell in cells)


def measure_single(size: Size, repeats: int, clock: Callable[[], float]) -> str:
    """Single roots under `vmap` beside one batch of them."""
    runs = [make_run(size, with_mctx=False), make_run(size._replace(single=True), with_mctx=False)]
    compiled = [compile_run(run, size, clock)[0] for run in runs]
    batch, single = time_in_turn(compiled, size, repeats, clock)
    return (
        f"{size.batch} single roots under vmap, {size.simulations} simulations: "
        f"{single * 1e3:.2f} ms, one batch {batch * 1e3:.2f} ms, {single / batch:.2f} (<= 1.1)"
    )


def make_model(size: Size) -> Callable[..., Any]:
    """A recurrence with a value and a policy, deterministic, of hardly any arithmetic."""

    def recurrent_fn(params: Any, key: PRNGKeyArray, actions: Array, states: Array) -> Any:
        del params, key
        states = 0.9 * states + 0.1 * (actions[:, None] + 1) * (jnp.roll(states, 1, 1) - 0.3)
        value = jnp.tanh(states[:, 0])
        waves = states[:, :1] * (jnp.arange(size.actions) + 3)[None]
        step = mctx.RecurrentFnOutput(
            reward=0.1 * value,
            discount=jnp.full_like(value, 0.99),
            prior_logits=jnp.sin(waves),
            value=value,
        )
        return step, states

    return recurrent_fn


def make_root(size: Size) -> Any:
    """The states to search from."""
    logits_key, states_key = jax.random.split(jax.random.key(1))
    return mctx.RootFnOutput(
        prior_logits=jax.random.normal(logits_key, (size.batch, size.actions)),
        value=jnp.zeros(size.batch),
        embedding=jax.random.normal(states_key, (size.batch, size.floats)),
    )


def make_run(size: Size, *, with_mctx: bool) -> Run:
    """A search that gives what an agent needs: actions and weights."""
    model = make_model(size)
    qtransforms = {
        "gumbel_muzero": mctx.qtransform_completed_by_mix_value,
        "muzero": mctx.qtransform_by_parent_and_siblings,
    }
    qtransform = qtransforms[size.policy]

    def by_mctx(key: PRNGKeyArray, root: Any) -> Any:
        return getattr(mctx, f"{size.policy}_policy")(
            None,
            key,
            root,
            model,
            size.simulations,
            invalid_actions=jnp.zeros_like(root.prior_logits),
            qtransform=qtransform,
        )

    def by_vernal(key: PRNGKeyArray, root: Any) -> Any:
        return search(
            None,
            key,
            root,
            model,
            size.simulations,
            policy=size.policy,
            slice_size=size.slice_size,
            qtransform=qtransform,
        )

    def run(key: PRNGKeyArray, root: Any) -> Any:
        if size.single:
            output = jax.vmap(by_vernal)(jax.random.split(key, size.batch), root)
        else:
            output = (by_mctx if with_mctx else by_vernal)(key, root)
        return output.action, output.action_weights

    return run


def require_equal(size: Size, *runs: Run) -> None:
    """The two searches must say the same, number by number."""
    stock, ours = (jax.jit(run)(jax.random.key(0), make_root(size)) for run in runs)
    for a, b in zip(stock, ours, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def compile_run(run: Run, size: Size, clock: Callable[[], float]) -> tuple[Any, float]:
    """A compiled search, and the seconds that took."""
    began = clock()
    compiled = jax.jit(run).lower(jax.random.key(0), make_root(size)).compile()
    return compiled, clock() - began


def compile_floor(size: Size) -> Any:
    """The model alone, as often as the search calls it."""
    model = make_model(size)

    def run(key: PRNGKeyArray, root: Any) -> Array:
        def step(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            states, total = carry
            actions = jnp.argmax(states[:, : size.actions], axis=1)
            output, states = model(None, key, actions, states)
            return states, total + output.value + output.prior_logits[:, 0]

        return jax.lax.fori_loop(
            0, size.simulations, step, (root.embedding, jnp.zeros(size.batch))
        )[1]

    return compile_run(run, size, time.perf_counter)[0]


def time_in_turn(
    runs: list[Any], size: Size, repeats: int, clock: Callable[[], float]
) -> list[float]:
    """Median seconds of each, all timed in turn."""
    key, root = jax.random.key(0), make_root(size)

    def seconds(run: Any) -> float:
        jax.block_until_ready(run(key, root))
        began, count = clock(), 0
        while clock() - began < 0.05 or count < 2:
            jax.block_until_ready(run(key, root))
            count += 1
        return (clock() - began) / count

    times = [[seconds(run) for run in runs] for _ in range(repeats)]
    return [float(median) for median in np.median(times, axis=0)]


if __name__ == "__main__":
    main()
