"""Tree search from one state: no batch anywhere, and an Equinox network as it is.

python examples/search_one_state.py
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import mctx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vernal.adapters.modules import pack
from vernal.adapters.search import search
from vernal.core import ModelTransition, Node, Prediction, Root, make_recurrent_fn, mask_logits

SIZE = 4
MOVES = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """Where on the floor a robot is, and where it is to go: row and column."""

    robot: Int[Array, " 2"]
    goal: Int[Array, " 2"]


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


def reached(state: State) -> Int[Array, "4 2"]:
    """Where each of the four moves leads."""
    return state.robot[None] + jnp.array(list(MOVES.values()))


def predict(network: Network, state: State) -> Prediction:
    """What the network thinks of a state; moves off the floor are illegal."""
    logits, value = network(state)
    places = reached(state)
    return Prediction(logits, value, legal=jnp.all((places >= 0) & (places < SIZE), axis=1))


def transition(
    network: Network, key: PRNGKeyArray, action: Int[Array, ""], state: State
) -> ModelTransition:
    """Where a move leads: at the goal it pays 1, and all is over."""
    state = State(reached(state)[action], state.goal)
    arrives = jnp.all(state.robot == state.goal)
    return ModelTransition(state, arrives.astype(float), arrives, player=jnp.array(0))


# Made once: a search is compiled anew for every new function.
recurrent_fn = make_recurrent_fn(predict, transition, gamma=0.9)


def plan(network: Network, key: PRNGKeyArray, state: State) -> mctx.PolicyOutput[Any]:
    """Search from one state."""
    logits, value, legal = predict(network, state)
    node = Node(state, terminal=jnp.array(False), player=jnp.array(0))
    # `prior_logits` has the shape (4,), and `value` is a scalar.
    root = Root(mask_logits(logits, legal), value, node)
    return search(network, key, root, recurrent_fn, num_simulations=64)


def main() -> None:
    """Plan eagerly, and again in a program compiled by JAX's own `jit`."""
    network_key, search_key = jax.random.split(jax.random.key(0))
    network = Network(network_key)
    state = State(robot=jnp.array([1, 1]), goal=jnp.array([1, 3]))
    report("eagerly", plan(network, search_key, state))
    # A network holds functions beside its arrays. Packed, it passes where JAX takes arrays only.
    report("compiled", jax.jit(plan)(pack(network), search_key, state))


def report(how: str, output: mctx.PolicyOutput[Any]) -> None:
    """Print the move to make, and the policy that the search would teach the network."""
    weights = [f"{weight:.2f}" for weight in jnp.asarray(output.action_weights)]
    print(f"{how}: go {list(MOVES)[int(output.action)]}, weights {' '.join(weights)}")


if __name__ == "__main__":
    main()
