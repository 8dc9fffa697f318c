"""A run's agents as one compiled program: one agent, or many side by side, on some devices."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..agents.agent import Agent
from ..mesh import Devices, make_mesh
from ..networks import NETWORKS
from ..registry import make_environment
from .checkpoints import array_shapes
from .config import AGENTS, RunConfig


class Program(NamedTuple):
    """What trains a run, compiled when it is first called.

    Attributes:
        environment: what is trained on.
        agent: one agent, as if it were alone on one device: for `act` and its kin.
        members: what sets each agent apart; see `RunConfig.members`.
        init: `() -> state`.
        step: `state -> (state, metrics, healthy)`; the state is used up. Of several agents all
            have a leading axis. `healthy` says of each array of `params` that it is finite.
        shapes: of the state, as `jax.eval_shape` gives them.
        shardings: where each array of the state lies; `None` on one device.
    """

    environment: Any
    agent: Agent
    members: list[dict[str, Any]]
    init: Callable[[], Any]
    step: jax.stages.Wrapped
    shapes: PyTree
    shardings: PyTree


def make_program(config: RunConfig, *, trust: bool = False) -> Program:
    """Build a run's program; nothing compiles or is written yet.

    One agent is spread over the devices by its environments. Of several, each device trains
    its share: agents have nothing to say to each other.

    Args:
        config: the run.
        trust: whether to import code from outside of vernal that it names, and the like (see
            `RunConfig.find_outside`); a configuration that was read from a folder is as
            trustworthy as whoever wrote it.

    Returns:
        The program.

    Raises:
        ValueError: the environment is unknown or not trusted, something does not fit it, there
            are too few devices, or as many as do not divide what is spread over them, or the
            state is larger than their memory.

    Example:
        >>> from ..agents.ppo import PPOConfig
        >>> settings = PPOConfig(envs=2, rollout_steps=8, minibatch_size=8, epochs=1)
        >>> program = make_program(RunConfig("ppo", "maze-easy", "spec", 0, 1, settings, seeds=3))
        >>> state, metrics, healthy = program.step(program.init())
        >>> metrics.gradient_norm.shape
        (3,)
    """
    outside = config.find_outside()
    if outside and not trust:
        raise ValueError(
            f"this run {' and '.join(outside)}, as whoever wrote its folder chose; if you trust "
            "them, allow it with --trust (trust=True from Python)."
        )
    environment = make_environment(config.environment, config.environment_arguments)
    make_agent = functools.partial(
        AGENTS[config.agent].make,
        environment,
        NETWORKS[config.network](environment),
        config.settings,
    )
    agent, members = make_agent(), config.members()
    is_spread = config.devices > 1 or jax.process_count() > 1
    mesh = make_mesh(config.devices) if is_spread else None
    if len(members) == 1:
        run = _one(agent if mesh is None else make_agent(mesh=mesh))
    else:
        devices = Devices(mesh)
        share = devices.share(**{"the number of agents": len(members)})
        # Where each agent has weights of its own a CPU is slower with many at once, convolutions
        # above all; other devices are idle with few.
        at_once = config.at_once or (1 if jax.default_backend() == "cpu" else share)
        run = _several(agent, devices, min(at_once, share))
    seeds = np.array([member["seed"] for member in members], np.uint32)
    numbers = {
        name: np.array([member.get(name, default) for member in members], np.float32)
        for name, default in agent.hyperparameters._asdict().items()
    }
    # Arguments, not constants: a compiler would work out what follows from a constant.
    arguments = seeds, type(agent.hyperparameters)(**numbers)
    if len(members) == 1:
        arguments = jax.tree.map(lambda x: x[0], arguments)
    with memory_faults():
        shapes = jax.eval_shape(run.init, *arguments)
    shardings = None if mesh is None else _shardings(mesh, run.specs, shapes)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in array_shapes(shapes).values())
    _require_memory("the state of this run", size // (1 if mesh is None else mesh.size), shardings)
    return Program(
        environment=environment,
        agent=agent,
        members=members,
        init=functools.partial(jax.jit(run.init), *arguments),
        step=jax.jit(run.step, donate_argnums=0),
        shapes=shapes,
        shardings=shardings,
    )


def compile_step(program: Program, state: Any) -> None:
    """Compile what trains, and refuse what takes more memory than there is.

    Args:
        program: its `step` need not compile again.
        state: what it will be called with.

    Raises:
        ValueError: it takes more.
    """
    with memory_faults():
        needed = program.step.lower(state).compile().memory_analysis()
    if needed is not None:  # Not every backend knows.
        size = needed.argument_size_in_bytes + needed.temp_size_in_bytes
        size += needed.output_size_in_bytes - needed.alias_size_in_bytes
        _require_memory("training", size, program.shardings)


@contextmanager
def memory_faults() -> Iterator[None]:
    """Say in a sentence that something is too large for memory or for JAX's numbers.

    Raises:
        ValueError: it is.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError, OverflowError) as error:
        is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
        if not is_memory and not isinstance(error, OverflowError):
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".")[:200]
        raise ValueError(f"this run is too large ({reason}); {_SMALLER}") from error


_SMALLER = (
    "take fewer environments (envs), shorter rollouts (rollout_steps), fewer agents, or more "
    "devices."
)


def _require_memory(what: str, size: int, shardings: PyTree) -> None:
    """Refuse what takes more of a device's memory than it has."""
    device = jax.local_devices()[0]
    room = (device.memory_stats() or {}).get("bytes_limit")
    if device.platform == "cpu":  # Several devices share one memory.
        lies_on = [sharding.addressable_devices for sharding in jax.tree.leaves(shardings)]
        size, room = size * (len(lies_on[0]) if lies_on else 1), _system_memory()
    if room is not None and size > room:
        raise ValueError(
            f"{what} takes {size / 1e9:,.1f} GB of memory, and there are {room / 1e9:,.1f}; "
            f"{_SMALLER}"
        )


def _system_memory() -> int | None:
    """Bytes of memory that this process may have; `None` where the system does not say."""
    known = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = Path("/sys/fs/cgroup/memory.max")  # Of a container; "max" where there is none.
    text = limit.read_text().strip() if limit.is_file() else ""
    return min([*known, *([int(text)] if text.isdecimal() else [])], default=None)


class _Functions(NamedTuple):
    init: Callable[[Any, Any], Any]
    step: Callable[[Any], tuple[Any, Any, Any]]
    specs: Any


def _one(agent: Agent) -> _Functions:
    def init(seed: Any, hyperparameters: Any) -> Any:
        return agent.init(jax.random.key(seed), hyperparameters)

    def step(state: Any) -> tuple[Any, Any, Any]:
        state, metrics = agent.step(state)
        return state, metrics, _is_finite(state.params)

    return _Functions(init, step, agent.specs)


def _several(agent: Agent, devices: Devices, at_once: int) -> _Functions:
    share, everywhere = PartitionSpec(devices.axis), PartitionSpec()
    one = _one(agent)

    def each(function: Callable[..., Any]) -> Callable[..., Any]:
        """Of every agent: `at_once` of them side by side, by `vmap`, and the next ones then."""
        batch_size = None if at_once == 1 else at_once
        return lambda *stacked: jax.lax.map(
            lambda own: function(*own), stacked, batch_size=batch_size
        )

    def step(state: Any) -> tuple[Any, Any, Any]:
        state, metrics, healthy = each(one.step)(state)
        return state, *devices.gather((metrics, healthy))

    return _Functions(
        devices.spread(each(one.init), in_specs=(share, share), out_specs=share),
        devices.spread(step, in_specs=(share,), out_specs=(share, everywhere, everywhere)),
        share,
    )


def _is_finite(params: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: jnp.all(jnp.isfinite(x)), eqx.filter(params, eqx.is_inexact_array)
    )


def _shardings(mesh: Mesh, specs: Any, shapes: PyTree) -> PyTree:
    """One sharding an array, from specs that may stand for whole trees."""

    def spread(spec: PartitionSpec, part: PyTree) -> PyTree:
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), part)

    return jax.tree.map(spread, specs, shapes, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
