"""PPO with a network of your own: any Equinox module that maps one observation to two things.

python examples/own_network.py
"""

import equinox as eqx
import jax
import jumanji
from jaxtyping import Array, PRNGKeyArray
from jumanji.environments.logic.game_2048.types import Observation

from vernal.adapters.agents.ppo import PPOConfig, make_ppo


class BoardNetwork(eqx.Module):
    """Reads the board of the game 2048 as exponents, one-hot."""

    hidden: eqx.nn.Linear
    policy: eqx.nn.Linear
    value: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray) -> None:
        """Draw the weights; the key is consumed."""
        hidden_key, policy_key, value_key = jax.random.split(key, 3)
        self.hidden = eqx.nn.Linear(16 * 18, 64, key=hidden_key)
        self.policy = eqx.nn.Linear(64, 4, key=policy_key)
        self.value = eqx.nn.Linear(64, "scalar", key=value_key)

    def __call__(self, observation: Observation) -> tuple[Array, Array]:
        """Logits of the four moves, and the value of one board: no batch, no mask."""
        exponents = jax.nn.one_hot(observation.board, 18)
        features = jax.nn.relu(self.hidden(exponents.ravel()))
        return self.policy(features), 100 * self.value(features)


def main(iterations: int = 20) -> None:
    """Train, and print the mean return of the games that ended."""
    config = PPOConfig(envs=32, rollout_steps=128, epochs=4, normalise_advantages=True)
    agent = make_ppo(jumanji.make("Game2048-v1"), BoardNetwork, config)
    step = jax.jit(agent.step, donate_argnums=0)
    state = jax.jit(agent.init)(jax.random.key(0), agent.hyperparameters)
    for iteration in range(1, iterations + 1):
        state, metrics = step(state)
        games = metrics.episodes
        ended = int(games.ended)
        points = f"{games.returns / ended:7.1f} points a game" if ended else "no game ended"
        print(f"{iteration * agent.steps_per_iteration:>7,} steps  {points}")


if __name__ == "__main__":
    main()
