"""Does it learn? The mazes, several seeds each, and the blog post's faults put back one by one.

    python benchmarks/learning.py mazes
    python benchmarks/learning.py faults

`mazes` trains on `maze-easy` (81,920 steps) and `maze-medium` (819,200 steps) with the default
network and with the blog post's. `faults` trains the blog post's network on `maze-medium` with
faults of its program put back into the loss: what each of them costs.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from vernal.adapters.actions import make_action_codec
from vernal.adapters.agents.learner import make_optimiser
from vernal.adapters.agents.ppo import PPOConfig, collect, make_ppo
from vernal.adapters.environments import VectorEnvironment
from vernal.adapters.evaluation import play
from vernal.adapters.mazes import FixedWallsGenerator, make_medium_maze
from vernal.adapters.networks import NETWORKS
from vernal.adapters.registry import make_environment
from vernal.adapters.scan import scan
from vernal.core import Categorical, mask_logits, minibatch_indices, ppo_loss, take

SEEDS = range(5)
STEPS = {"maze-easy": 81_920, "maze-medium": 819_200}

# The blog post's settings, in which neither values nor advantages are scaled.
BLOG = PPOConfig(envs=16, rollout_steps=512, epochs=10, minibatch_size=1024, normalise_values=False)
SETTINGS = {
    "defaults": ("auto", PPOConfig()),
    "blog": ("blog", BLOG),
    "blog, advantages scaled": ("blog", dataclasses.replace(BLOG, normalise_advantages=True)),
}


def main() -> None:
    """Run one of the two studies and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", choices=["mazes", "faults"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--settings", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    options = parser.parse_args()
    is_mazes = options.study == "mazes"
    Console().print(mazes(options.settings, options.seeds) if is_mazes else faults(options.seeds))


def mazes(names: list[str], seeds: list[int]) -> Table:
    """Steps to a mean return of 0.99, the last one, and how many of 512 episodes greed solves."""
    table = Table(
        "maze", "network, settings", "seed", "steps to 0.99", "last return", "greedy", "seconds"
    )
    for name in STEPS:
        for setting in names:
            for seed in seeds:
                table.add_row(name, setting, str(seed), *train(name, *SETTINGS[setting], seed))
    return table


def train(name: str, network: str, config: PPOConfig, seed: int) -> tuple[str, ...]:
    """One row of the table."""
    environment = make_environment(name)
    agent = make_ppo(environment, NETWORKS[network](environment), config)
    step = jax.jit(agent.step, donate_argnums=0)
    state = jax.jit(agent.init)(jax.random.key(seed), agent.hyperparameters)
    start, reached, last = time.perf_counter(), None, float("nan")
    for iteration in range(STEPS[name] // agent.steps_per_iteration):
        state, metrics = step(state)
        ended = int(metrics.episodes.ended)
        last = float(metrics.episodes.returns) / ended if ended else float("nan")
        if reached is None and last >= 0.99:
            reached = (iteration + 1) * agent.steps_per_iteration
    seconds = time.perf_counter() - start
    outcome = jax.jit(lambda: play(environment, act(agent, state), jax.random.key(99), 512))()
    solved = float(np.mean(outcome.returns > 0))
    to = "never" if reached is None else f"{reached:,}"
    return to, f"{last:.3f}", f"{solved:.1%}", f"{seconds:.1f}"


def act(agent: Any, state: Any) -> Callable[[Any, Any], Any]:
    """The greedy policy."""
    return lambda key, observation: agent.act(state, None, observation)


FAULTS = {
    "none": frozenset(),
    "illegal logits are 1 in the loss": frozenset({"mask"}),
    "values minus targets is (N, N)": frozenset({"broadcast"}),
    "entropy is a mean over moves": frozenset({"entropy"}),
    "all three, and four of nine pairs drawn": frozenset({"mask", "broadcast", "entropy", "pairs"}),
    "the same with the (N, N) alone mended": frozenset({"mask", "entropy", "pairs"}),
}


def faults(seeds: list[int]) -> Table:
    """Mean return of the last iteration, and greedy success over all nine pairs."""
    table = Table("faults put back", "seed", "steps to 0.99", "last return", "greedy, nine pairs")
    for name, chosen in FAULTS.items():
        for seed in seeds:
            table.add_row(name, str(seed), *train_faulty(chosen, seed))
    return table


def train_faulty(chosen: frozenset[str], seed: int) -> tuple[str, ...]:
    """One row: the same rollouts and the same optimiser, a loss with faults."""
    whole = make_medium_maze()
    generator = whole.generator
    assert isinstance(generator, FixedWallsGenerator)
    environment = make_medium_maze()
    if "pairs" in chosen:  # randint(key, (2,), 0, 2) never draws the third.
        starts, goals = (cells[:2].tolist() for cells in (generator.starts, generator.goals))
        environment.generator = FixedWallsGenerator(generator.walls, starts, goals)
    config = BLOG
    agent = make_ppo(environment, NETWORKS["blog"](environment), config)
    codec, envs = make_action_codec(environment), VectorEnvironment(environment, config.envs)
    state = jax.jit(agent.init)(jax.random.key(seed), agent.hyperparameters)
    numbers = state.hyperparameters
    adam = make_optimiser(numbers)
    params, static = eqx.partition(agent.network(state), eqx.is_array)
    loss = functools.partial(faulty_loss, chosen, numbers)

    @jax.jit
    def iterate(params: Any, optimiser: Any, env_state: Any, key: Any) -> Any:
        walk_key, *keys = jax.random.split(key, config.epochs + 1)
        network = eqx.combine(params, static)
        env_state, batch, episodes, _ = collect(
            network, envs, codec, env_state, walk_key, numbers, config.rollout_steps, None
        )
        shuffle = functools.partial(
            minibatch_indices, size=len(batch.values), minibatch_size=config.minibatch_size
        )

        def learn(carry: Any, indices: Any) -> Any:
            network, optimiser = carry
            gradient = eqx.filter_grad(loss)(network, take(batch, indices))
            change, optimiser = adam.update(gradient, optimiser)
            return (eqx.apply_updates(network, change), optimiser), None

        indices = jax.vmap(shuffle)(jnp.stack(keys)).reshape(-1, config.minibatch_size)
        (network, optimiser), _ = scan(learn, (network, optimiser), indices)
        return eqx.filter(network, eqx.is_array), optimiser, env_state, episodes

    carry = (params, state.optimiser, state.envs)
    reached, last = None, float("nan")
    for iteration, key in enumerate(jax.random.split(state.key, 100)):
        *carry, episodes = iterate(*carry, key)
        last = float(episodes.returns) / max(int(episodes.ended), 1)
        if reached is None and last >= 0.99:
            reached = (iteration + 1) * agent.steps_per_iteration
    state = state._replace(params=carry[0])
    outcome = jax.jit(lambda: play(whole, act(agent, state), jax.random.key(99), 512))()
    to = "never" if reached is None else f"{reached:,}"
    return to, f"{last:.3f}", f"{float(np.mean(outcome.returns > 0)):.1%}"


def faulty_loss(chosen: frozenset[str], numbers: Any, network: Any, batch: Any) -> Any:
    """PPO's loss with some of the faults of the blog post's program."""
    logits, values = jax.vmap(network)(batch.observations)
    legal = batch.observations.action_mask
    masked = jnp.where(legal, logits, 1.0) if "mask" in chosen else mask_logits(logits, legal)
    policy = Categorical(masked)
    entropies = policy.entropy() / (4 if "entropy" in chosen else 1)
    loss, parts = ppo_loss(
        policy.log_prob(batch.actions),
        batch.log_probs,
        batch.advantages,
        entropies,
        values,
        batch.value_targets,
        clip_epsilon=numbers.clip_epsilon,
        value_weight=numbers.value_weight,
        entropy_weight=numbers.entropy_weight,
    )
    if "broadcast" in chosen:
        every = jnp.mean(optax.l2_loss(values[:, None] - batch.value_targets[None, :]))
        loss = loss + numbers.value_weight * (every - parts.value)
    return loss


if __name__ == "__main__":
    main()
