"""PPO on an environment of your own: anything with Jumanji's reset, step and two specs.

python examples/own_environment.py
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray
from jumanji import specs
from jumanji.types import TimeStep, restart, termination, transition, truncation

from vernal.adapters.agents.ppo import PPOConfig, make_ppo
from vernal.adapters.networks import make_default_network


class State(NamedTuple):
    """What the environment knows."""

    place: Array
    steps: Array
    key: PRNGKeyArray


class Observation(NamedTuple):
    """What the agent sees."""

    place: Array


class Corridor:
    """A corridor with a pit at its left end and the goal at its right; one may slip.

    Action 0 walks left and action 1 right, or the other way if one slips.
    """

    def __init__(self, length: int = 9, slip: float = 0.2, time_limit: int = 50) -> None:
        """Choose the number of cells, the chance to slip, and how many steps there are."""
        self.length, self.slip, self.time_limit = length, slip, time_limit
        place = specs.DiscreteArray(length)  # a cell by its number, counted from the pit
        self.observation_spec = specs.Spec(Observation, "ObservationSpec", place=place)
        self.action_spec = specs.DiscreteArray(2)

    def reset(self, key: PRNGKeyArray) -> tuple[State, TimeStep[Observation]]:
        """Begin in the middle; the key is consumed."""
        state = State(jnp.asarray(self.length // 2), jnp.asarray(0), key)
        return state, restart(Observation(state.place))

    def step(self, state: State, action: Any) -> tuple[State, TimeStep[Observation]]:
        """Walk a cell; the pit costs 1 and the goal pays 1, and both end the episode."""
        key, slip_key = jax.random.split(state.key)
        slips = jax.random.bernoulli(slip_key, self.slip)
        place = state.place + jnp.where(slips, 1 - 2 * action, 2 * action - 1)
        state = State(place, state.steps + 1, key)
        reward = jnp.where(place == 0, -1.0, jnp.where(place == self.length - 1, 1.0, 0.0))
        # At the time limit the episode is cut: its last state is still worth something.
        end = jnp.where(reward != 0, 1, jnp.where(state.steps >= self.time_limit, 2, 0))
        ends = [transition, termination, truncation]
        return state, jax.lax.switch(end, ends, reward, Observation(place))


def main(iterations: int = 20) -> None:
    """Train, and print the mean return of the episodes that ended."""
    corridor = Corridor()
    config = PPOConfig(envs=16, rollout_steps=64, minibatch_size=256)
    agent = make_ppo(corridor, make_default_network(corridor), config)
    step = jax.jit(agent.step, donate_argnums=0)
    state = jax.jit(agent.init)(jax.random.key(0), agent.hyperparameters)
    for iteration in range(1, iterations + 1):
        state, metrics = step(state)
        mean_return = metrics.episodes.returns / metrics.episodes.ended
        print(f"{iteration * agent.steps_per_iteration:>7,} steps  mean return {mean_return:.2f}")


if __name__ == "__main__":
    main()
