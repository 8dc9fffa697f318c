"""Tic-tac-toe written from nothing, and a tree search that plays it without any network.

python examples/tic_tac_toe.py
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from vernal.adapters.search import search
from vernal.core import ModelTransition, Node, Prediction, make_recurrent_fn, make_root

# Squares are numbered row by row.
LINES = np.array(
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
)


class Game(NamedTuple):
    """A position: the stones of both players, and who is to move."""

    stones: Bool[Array, "*B 2 9"]
    player: Int[Array, " *B"]


def predict(params: None, game: Game) -> Prediction:
    """What to think of one position: nothing yet, but that free squares are legal."""
    is_free = ~jnp.any(game.stones, axis=0)
    return Prediction(prior_logits=jnp.zeros(9), value=jnp.array(0.0), legal=is_free)


def transition(
    params: None, key: PRNGKeyArray, square: Int[Array, ""], game: Game
) -> ModelTransition:
    """Put a stone on a square; three in a line win, and pay 1 to the player who put it."""
    stones = game.stones.at[game.player, square].set(True)
    wins = jnp.any(jnp.all(stones[game.player][LINES], axis=1))
    is_full = jnp.all(jnp.any(stones, axis=0))
    other = 1 - game.player
    return ModelTransition(Game(stones, other), wins.astype(float), wins | is_full, other)


# The search needs no more than these two functions. That the players are opponents it sees
# from who moves next: what is good for one of them is bad for the other.
recurrent_fn = make_recurrent_fn(predict, transition, gamma=1.0)


def empty_boards(number: int) -> Node:
    """Games where player 0 is to begin."""
    player = jnp.zeros(number, jnp.int32)
    return Node(Game(jnp.zeros((number, 2, 9), bool), player), jnp.zeros(number, bool), player)


def search_moves(key: PRNGKeyArray, games: Node) -> ArrayLike:
    """The moves that 128 simulations find; the key is consumed."""
    root = make_root(predict, None, *games)
    return search(None, key, root, recurrent_fn, 128, gumbel_scale=0.0).action


def random_moves(key: PRNGKeyArray, games: Node) -> Int[Array, " B"]:
    """Any legal moves; the key is consumed."""
    return jax.random.categorical(key, make_root(predict, None, *games).prior_logits)


def play_against_random(
    choose: Callable[[PRNGKeyArray, Node], ArrayLike], key: PRNGKeyArray, number: int
) -> Float[Array, " B"]:
    """Play games against random moves, as player 0 in every other one; the key is consumed.

    Returns 1 for a game won, 0 for a draw and -1 for a game lost.
    """
    us = jnp.arange(number) % 2

    def move(games: Node, key: PRNGKeyArray) -> tuple[Node, Float[Array, " B"]]:
        our_key, their_key, step_key = jax.random.split(key, 3)
        is_ours = games.player == us
        moves = jnp.where(is_ours, choose(our_key, games), random_moves(their_key, games))
        # A game that has ended stays as it is and pays nothing.
        step, games = recurrent_fn(None, step_key, moves, games)
        return games, jnp.where(is_ours, step.reward, -step.reward)

    _, points = jax.lax.scan(move, empty_boards(number), jax.random.split(key, 9))
    return points.sum(axis=0)


def describe(points: Float[Array, " B"]) -> str:
    """Shares of the games won, drawn and lost."""
    won, drawn, lost = ((points == result).mean() for result in (1, 0, -1))
    return f"won {won:.1%}, drawn {drawn:.1%}, lost {lost:.1%}"


def main(games: int = 1000) -> None:
    """Print how random moves do against random moves, and how the search does."""
    play = jax.jit(play_against_random, static_argnums=(0, 2))
    for name, choose in {"at random": random_moves, "by search": search_moves}.items():
        print(f"{name}: {describe(play(choose, jax.random.key(0), games))}")


if __name__ == "__main__":
    main()
