"""A run's agents as one compiled program: one agent, or many side by side, on some devices."""

import functools
from collections.abc import Callable
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
    step: Callable[[Any], tuple[Any, Any, Any]]
    shapes: PyTree
    shardings: PyTree


def make_program(config: RunConfig) -> Program:
    """Build a run's program; nothing compiles or is written yet.

    One agent is spread over the devices by its environments. Of several, each device trains
    its share: agents have nothing to say to each other.

    Args:
        config: the run.

    Returns:
        The program.

    Raises:
        ValueError: the environment is unknown, something does not fit it, or there are too few
            devices, or as many as do not divide what is spread over them.

    Example:
        >>> from ..agents.ppo import PPOConfig
        >>> settings = PPOConfig(envs=2, rollout_steps=8, minibatch_size=8, epochs=1)
        >>> program = make_program(RunConfig("ppo", "maze-easy", "spec", 0, 1, settings, seeds=3))
        >>> state, metrics, healthy = program.step(program.init())
        >>> metrics.gradient_norm.shape
        (3,)
    """
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
    shapes = jax.eval_shape(run.init, *arguments)
    return Program(
        environment=environment,
        agent=agent,
        members=members,
        init=functools.partial(jax.jit(run.init), *arguments),
        step=jax.jit(run.step, donate_argnums=0),
        shapes=shapes,
        shardings=None if mesh is None else _shardings(mesh, run.specs, shapes),
    )


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
