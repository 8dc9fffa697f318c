"""Environments that are small enough to know by heart, and Jumanji's own, each made once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji import specs
from jumanji.types import TimeStep, restart, termination, transition, truncation

from vernal.adapters.environments import read_specs
from vernal.adapters.registry import environment_names, make_environment

OFFLINE = [name for name in environment_names() if name != "Sokoban-v0"]

make_once = functools.cache(make_environment)

# Each of Jumanji's environments, so small that it compiles fast and its episodes are short.
SMALL: dict[str, dict[str, Any]] = {
    "BinPack-v2": {
        "obs_num_ems": 4,
        "max_num_ems": 6,
        "max_num_items": 4,
        "split_num_same_items": 1,
    },
    "CVRP-v1": {"num_nodes": 4, "max_capacity": 10, "max_demand": 5},
    "Cleaner-v0": {"num_rows": 4, "num_cols": 4, "num_agents": 2, "time_limit": 6},
    "Connector-v3": {"grid_size": 4, "num_agents": 2, "time_limit": 5},
    "FlatPack-v0": {"num_row_blocks": 2, "num_col_blocks": 2},
    "Game2048-v1": {"board_size": 2},
    "GraphColoring-v1": {"num_nodes": 4, "edge_probability": 0.5},
    "JobShop-v0": {"num_jobs": 3, "num_machines": 2, "max_num_ops": 2, "max_op_duration": 2},
    "Knapsack-v1": {"num_items": 6, "total_budget": 2.0},
    "LevelBasedForaging-v0": {"grid_size": 5, "num_food": 1, "fov": 2, "time_limit": 6},
    "MMST-v0": {
        "num_nodes": 12,
        "num_edges": 16,
        "num_agents": 2,
        "num_nodes_per_agent": 3,
        "max_step": 6,
        "time_limit": 6,
    },
    "Maze-v0": {"num_rows": 5, "num_cols": 5, "time_limit": 6},
    "Minesweeper-v0": {"num_rows": 4, "num_cols": 4, "num_mines": 3},
    "MultiCVRP-v0": {"num_customers": 6},
    "PacMan-v1": {"time_limit": 6},
    "RobotWarehouse-v0": {
        "shelf_rows": 1,
        "column_height": 2,
        "num_agents": 2,
        "request_queue_size": 2,
        "time_limit": 6,
    },
    "RubiksCube-v0": {"cube_size": 2, "num_scrambles_on_reset": 3, "time_limit": 6},
    "SearchAndRescue-v0": {"num_targets": 3, "num_vision": 8, "time_limit": 6},
    "SlidingTilePuzzle-v0": {"grid_size": 3, "num_random_moves": 10, "time_limit": 6},
    "Snake-v1": {"num_rows": 4, "num_cols": 4, "time_limit": 6},
    "Sokoban-v0": {"generator": "ToyGenerator", "time_limit": 6},
    "Sudoku-very-easy-v0": {},
    "TSP-v1": {"num_cities": 4},
    "Tetris-v0": {"num_rows": 6, "num_cols": 5, "time_limit": 6},
}


@functools.cache
def make_small(name: str) -> Any:
    """Jumanji's environment of that name with the options in `SMALL`."""
    with (
        jax.numpy_rank_promotion("allow"),  # inside some of Jumanji's environments
        mock.patch("jumanji.environments.routing.sokoban.env.BoxViewer"),  # leaves files open
    ):
        return make_environment(name, SMALL[name])


# Each test so marked takes a `check` to enter: what it traces must be right by JAX's own rules.
under_checks_of_jax = pytest.mark.parametrize(
    "check",
    [
        lambda: jax.debug_key_reuse(True),
        lambda: jax.numpy_dtype_promotion("strict"),
        jax.checking_leaks,
    ],
    ids=["keys", "dtypes", "leaks"],
)


def assert_trees_equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        rows = [
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            for x in (a, b)
        ]
        np.testing.assert_array_equal(rows[0], rows[1])


def assert_trees_close(tree, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), tree, other)


# For what would take longer to compile than to run.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
# For what runs longer than it compiles: as users have it.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})


@functools.cache
def compiled(environment: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Reset and step of the raw environment."""
    return quick_jit(environment.reset), quick_jit(environment.step)


def play_by_hand(environment, key, copy, actions):
    """The trajectory of one copy, by a plain loop over the raw environment.

    Returns what each step brings, what is seen after it, and what is seen at first.
    """
    reset, step = compiled(environment)
    copy_key = jax.random.fold_in(key, copy)
    episode, total, length = 0, np.float32(0), 0
    state, timestep = reset(jax.random.fold_in(copy_key, 0))
    first, rows = timestep.observation, []
    for action in actions:
        state, timestep = step(state, action)
        reward = np.asarray(timestep.reward, np.float32).sum()
        last, discount = bool(timestep.last()), np.asarray(timestep.discount, np.float32).max()
        total, length = total + reward, length + 1
        row = {
            "rewards": reward,
            "discounts": discount,
            "terminated": last and discount == 0,
            "truncated": last and discount != 0,
            "next_observations": timestep.observation,
            "episode_returns": total,
            "episode_lengths": length,
        }
        if last:
            episode, total, length = episode + 1, np.float32(0), 0
            state, timestep = reset(jax.random.fold_in(copy_key, episode))
        rows.append((row, timestep.observation))
    return *jax.tree.map(lambda *leaves: np.stack(leaves), *rows), first


class Observation(NamedTuple):
    steps: Any
    instance: Any
    action_mask: Any


class State(NamedTuple):
    steps: Any
    instance: Any
    length: Any
    is_terminal: Any
    key: Any


class CountingEnvironment:
    """Counts its steps; each episode's length and kind of end are drawn from its reset key.

    Three actions; action `a` pays `a`, and action 2 is legal at even counts only. `instance` is
    a number drawn from the reset key, which names the episode. It goes on paying after its end,
    as Jumanji's environments may. `on_reset` is called with each instance generated.
    """

    def __init__(
        self,
        max_length: int = 6,
        terminal_share: float = 0.5,
        min_length: int = 1,
        on_reset: Callable[[Any], None] | None = None,
    ) -> None:
        self.min_length = min_length
        self.max_length = max_length
        self.terminal_share = terminal_share
        self.on_reset = on_reset
        read_specs(self)  # at once, as Jumanji's environments do

    @functools.cached_property
    def observation_spec(self):
        return specs.Spec(
            Observation,
            "ObservationSpec",
            steps=specs.BoundedArray((), np.int32, 0, self.max_length),
            instance=specs.Array((), np.int32),
            action_mask=specs.BoundedArray((3,), bool, False, True),
        )

    @functools.cached_property
    def action_spec(self):
        return specs.DiscreteArray(3)

    def reset(self, key) -> tuple[State, TimeStep[Observation]]:
        # One draw in place of three, which would take three times as long to compile.
        instance, length, end = jax.random.bits(key, (3,))
        state = State(
            steps=jnp.array(0),
            instance=(instance >> 1).astype(int),
            length=self.min_length + (length % (self.max_length - self.min_length + 1)).astype(int),
            is_terminal=end < self.terminal_share * 2.0**32,
            key=key,
        )
        if self.on_reset is not None:
            jax.debug.callback(self.on_reset, state.instance)
        return state, restart(self._observe(state))

    def step(self, state: State, action) -> tuple[State, TimeStep[Observation]]:
        state = state._replace(steps=state.steps + 1)
        end = (state.steps >= state.length) * jnp.where(state.is_terminal, 1, 2)
        timestep = jax.lax.switch(
            end,
            [transition, termination, truncation],
            jnp.asarray(action, float),
            self._observe(state),
        )
        return state, timestep

    def _observe(self, state: State) -> Observation:
        mask = jnp.array([True, True, False]).at[2].set(state.steps % 2 == 0)
        return Observation(state.steps, state.instance, mask)


class NeverStepAgain(CountingEnvironment):
    """A step from a finished state never returns."""

    def step(self, state, action):
        stuck = state.steps >= state.length
        steps = jax.lax.while_loop(lambda x: stuck, lambda x: x + 1, state.steps)
        return super().step(state._replace(steps=steps), action)


class SpecsOnly:
    """An environment of which only the specs are asked for; each is built when first read."""

    def __init__(
        self, action_spec: Callable[[], Any], observation_spec: Callable[[], Any] | None = None
    ) -> None:
        self._make_action_spec = action_spec
        self._make_observation_spec = observation_spec or (lambda: specs.Array((), float))

    @functools.cached_property
    def observation_spec(self):
        return self._make_observation_spec()

    @functools.cached_property
    def action_spec(self):
        return self._make_action_spec()

    def reset(self, key) -> tuple[Any, Any]:
        raise NotImplementedError

    def step(self, state, action) -> tuple[Any, Any]:
        raise NotImplementedError


def with_mask(shape: tuple[int, ...]) -> Callable[[], Any]:
    """Builds the spec of an observation that is nothing but an action mask."""
    return lambda: specs.Spec(
        Observation,
        "ObservationSpec",
        steps=specs.Array((), np.int32),
        instance=specs.Array((), np.int32),
        action_mask=specs.BoundedArray(shape, bool, False, True),
    )


class WithEmptyLeaf(CountingEnvironment):
    """A part of what is seen has no elements."""

    @functools.cached_property
    def observation_spec(self):
        return super().observation_spec.replace(instance=specs.Array((0, 3), np.float32))

    def _observe(self, state: State) -> Observation:
        return super()._observe(state)._replace(instance=jnp.zeros((0, 3)))
