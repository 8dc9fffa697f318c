"""Network, search and learner in one compiled program: learning tic-tac-toe.

python examples/search_in_training.py
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import mctx
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from tic_tac_toe import Game, describe, empty_boards, play_against_random, random_moves, transition
from tic_tac_toe import predict as predict_legal

from vernal.adapters.modules import Packed, pack
from vernal.adapters.search import search, search_values
from vernal.core import Node, Prediction, make_recurrent_fn, make_root


class Network(eqx.Module):
    """Which moves look good in a position, and who will win."""

    layers: eqx.nn.MLP

    def __init__(self, key: PRNGKeyArray) -> None:
        """Draw the weights; the key is consumed."""
        self.layers = eqx.nn.MLP(18, 10, width_size=128, depth=2, key=key)

    def __call__(self, game: Game) -> tuple[Float[Array, " 9"], Float[Array, ""]]:
        """Logits of the moves, and the value, for the player to move."""
        own, other = game.stones[game.player], game.stones[1 - game.player]
        outputs = self.layers(jnp.concatenate([own, other]).astype(float))
        return outputs[:9], jnp.tanh(outputs[9])


def predict(network: Network, game: Game) -> Prediction:
    """What the network thinks of one position."""
    logits, value = network(game)
    return Prediction(logits, value, predict_legal(None, game).legal)


recurrent_fn = make_recurrent_fn(predict, transition, gamma=1.0)
optimiser = optax.adam(1e-3)


class Training(NamedTuple):
    """What goes from one update to the next."""

    network: Packed[Network]
    optimiser: optax.OptState
    games: Node


def start(network: PyTree, games: int) -> Training:
    """Nothing learned yet, and games that have not begun."""
    return Training(network, optimiser.init(network), empty_boards(games))


def update(training: Training, key: PRNGKeyArray) -> tuple[Training, Float[Array, ""]]:
    """Search in every game, learn what the search found, and play on."""
    network, optimiser_state, games = training
    search_key, move_key, step_key = jax.random.split(key, 3)
    root = make_root(predict, network, *games)
    found = search(network, search_key, root, recurrent_fn, num_simulations=32)
    loss, gradients = jax.value_and_grad(loss_fn)(network, games, found)
    changes, optimiser_state = optimiser.update(gradients, optimiser_state)
    network = eqx.apply_updates(network, changes)

    # The search teaches what to play but does not play: games go on at random, since from its
    # own best games alone the network would not learn the answers to other moves.
    _, games = recurrent_fn(network, step_key, random_moves(move_key, games), games)
    return Training(network, optimiser_state, begin_anew(games)), loss


def loss_fn(
    network: Packed[Network], games: Node, found: mctx.PolicyOutput[Any]
) -> Float[Array, ""]:
    """How far the network is from the search: from its policy, and from its value."""
    root = make_root(predict, network, *games)
    policy_loss = optax.softmax_cross_entropy(root.prior_logits, found.action_weights)
    value_loss = (root.value - search_values(found).improved) ** 2
    return jnp.mean(policy_loss + value_loss)


def begin_anew(games: Node) -> Node:
    """Empty boards in place of those whose game has ended."""

    def replace(new: Array, old: Array) -> Array:
        has_ended = games.terminal.reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(has_ended, new, old)

    return jax.tree.map(replace, empty_boards(len(games.terminal)), games)


@jax.jit
def play(network: Packed[Network], key: PRNGKeyArray) -> Float[Array, " B"]:
    """Results of the network alone, without a search, against random moves."""

    def choose(key: PRNGKeyArray, games: Node) -> ArrayLike:
        return jnp.argmax(make_root(predict, network, *games).prior_logits, axis=1)

    return play_against_random(choose, key, 1000)


def main(updates: int = 800, games: int = 128) -> None:
    """Train, and print what the network alone can do before and after."""
    network_key, train_key, play_key = jax.random.split(jax.random.key(0), 3)
    network = Network(network_key)
    training = start(pack(network), games)  # A scan carries arrays only; packed, it is that.
    print(f"before: {describe(play(training.network, play_key))}")
    train = jax.jit(lambda *carry_and_keys: jax.lax.scan(update, *carry_and_keys))
    training, _ = train(training, jax.random.split(train_key, updates))
    print(f"after: {describe(play(training.network, play_key))}")


if __name__ == "__main__":
    main()
