"""Four seeds at two learning rates, eight agents in one compiled program.

python examples/many_seeds.py
"""

import jax
import jax.numpy as jnp

from vernal.adapters.agents.ppo import PPOConfig, make_ppo
from vernal.adapters.networks import make_default_network
from vernal.adapters.registry import make_environment


def main(iterations: int = 10) -> None:
    """Train all of them and print each one's last mean return."""
    environment = make_environment("maze-easy")
    config = PPOConfig(envs=16, rollout_steps=256)
    agent = make_ppo(environment, make_default_network(environment), config)

    keys = jax.random.split(jax.random.key(0), 4)
    rates = jnp.array([1e-4, 1e-3])
    numbers = [agent.hyperparameters._replace(learning_rate=rate) for rate in rates]
    numbers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(as_arrays, numbers))

    init = jax.vmap(jax.vmap(agent.init, in_axes=(0, None)), in_axes=(None, 0))
    step = jax.jit(jax.vmap(jax.vmap(agent.step)))
    state = jax.jit(init)(keys, numbers)
    for _ in range(iterations - 1):
        state, _ = step(state)
    _, metrics = step(state)
    # In the last iteration every agent ends some episodes; if one did not, it is NaN here.
    means = metrics.episodes.returns / metrics.episodes.ended
    for rate, row in zip(rates, means, strict=True):
        print(f"learning rate {rate:.0e}: mean returns {row.round(2).tolist()}")


def as_arrays(numbers: tuple[float, ...]) -> tuple[jax.Array, ...]:
    """Hyperparameters as arrays, so that they stack."""
    return jax.tree.map(jnp.asarray, numbers)


if __name__ == "__main__":
    main()
