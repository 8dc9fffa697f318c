"""Tree search over several devices, from states that are a dataclass of arrays.

python examples/search_many_devices.py
"""

import dataclasses
import os

# Where there is no accelerator the processor passes for four devices. JAX reads this when it
# first computes something, which may be while a package is imported.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vernal.adapters.modules import pack
from vernal.adapters.search import search
from vernal.core import ModelTransition, Prediction, make_recurrent_fn, make_root

SIZE = 8
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """Where on the floor a robot is, and where it is to go: row and column."""

    robot: Int[Array, "*B 2"]
    goal: Int[Array, "*B 2"]


class Network(eqx.Module):
    """Which moves look good in a state, and how good the state is."""

    layers: eqx.nn.MLP

    def __init__(self, key: PRNGKeyArray) -> None:
        """Draw the weights; the key is consumed."""
        self.layers = eqx.nn.MLP(4, len(MOVES) + 1, width_size=32, depth=1, key=key)

    def __call__(self, state: State) -> tuple[Float[Array, " 4"], Float[Array, ""]]:
        """Logits of the moves, and the value."""
        outputs = self.layers(jnp.concatenate([state.robot, state.goal]) / SIZE)
        return outputs[:-1], outputs[-1]


def predict(network: Network, state: State) -> Prediction:
    """What the network thinks of a state; every move is legal."""
    logits, value = network(state)
    return Prediction(logits, value, legal=jnp.ones(len(MOVES), bool))


def transition(
    network: Network, key: PRNGKeyArray, action: Int[Array, ""], state: State
) -> ModelTransition:
    """Where a move leads, or nowhere at a wall; each step nearer to the goal pays 1."""
    robot = jnp.clip(state.robot + jnp.array(MOVES)[action], 0, SIZE - 1)
    before, after = (jnp.sum(jnp.abs(state.goal - place)) for place in (state.robot, robot))
    reward = (before - after).astype(float)
    return ModelTransition(State(robot, state.goal), reward, after == 0, player=jnp.array(0))


# Made once: a search is compiled anew for every new function.
recurrent_fn = make_recurrent_fn(predict, transition, gamma=0.9)


def plan(network: Network, key: PRNGKeyArray, states: State) -> ArrayLike:
    """Network and search together, in one program; the best move of each state."""
    root = make_root(predict, network, states)
    return search(network, key, root, recurrent_fn, num_simulations=32).action


def random_states(key: PRNGKeyArray, number: int) -> State:
    """Robots anywhere but where they are to go; the key is consumed."""
    robot_key, goal_key = jax.random.split(key)
    robot = jax.random.randint(robot_key, (number, 2), 0, SIZE)
    return State(robot, (robot + jax.random.randint(goal_key, (number, 2), 1, SIZE)) % SIZE)


def main(states_per_device: int = 64) -> None:
    """Search on all devices in both of JAX's ways, and print how well it went."""
    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    network_key, state_key, search_key = jax.random.split(jax.random.key(0), 3)
    network = pack(Network(network_key))  # Its arrays alone, as JAX wants its arguments.
    states = random_states(state_key, states_per_device * jax.device_count())
    states = jax.device_put(states, NamedSharding(mesh, P("devices")))

    # One program for all devices, which JAX divides as the states are laid out.
    report("jit", states, jax.jit(plan)(network, search_key, states))

    # Each device runs a program of its own on its share of the states. The key is the same
    # on all of them; the search makes another one of it on each.
    on_each_device = jax.shard_map(
        plan, mesh=mesh, in_specs=(P(), P(), P("devices")), out_specs=P("devices")
    )
    report("shard_map", states, jax.jit(on_each_device)(network, search_key, states))


def report(how: str, states: State, moves: Array) -> None:
    """Print where the moves were found, and how many of them lead nearer to the goal."""
    robot, goal = np.asarray(states.robot), np.asarray(states.goal)
    arrived = robot + np.array(MOVES)[np.asarray(moves)]
    nearer = np.abs(arrived - goal).sum(axis=1) < np.abs(robot - goal).sum(axis=1)
    devices = len(moves.sharding.device_set)
    print(f"{how}: {len(moves)} searches on {devices} devices, {nearer.mean():.0%} go nearer")


if __name__ == "__main__":
    main()
