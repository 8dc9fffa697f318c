"""Environments that are small enough to know by heart, and Jumanji's own, each made once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jumanji import specs
from jumanji.types import TimeStep, restart, termination, transition, truncation

from vernal.adapters.environments import read_specs
from vernal.adapters.registry import environment_names, make_environment

OFFLINE = [name for name in environment_names() if name != "Sokoban-v0"]

make_once = functools.cache(make_environment)


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
            steps=specs.BoundedArray((), jnp.int32, 0, self.max_length),
            instance=specs.Array((), jnp.int32),
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
        steps=specs.Array((), jnp.int32),
        instance=specs.Array((), jnp.int32),
        action_mask=specs.BoundedArray(shape, bool, False, True),
    )
