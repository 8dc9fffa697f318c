"""The search against full minimax, in every position of tic-tac-toe where a move is to be made."""

import functools
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np

from vernal.adapters.search import search
from vernal.core import make_recurrent_fn, make_root

EXAMPLE = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "examples" / "tic_tac_toe.py"))
LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


def moves(board):
    """Legal moves and where they lead; a square holds 0, or 1 or 2 for a player's stone."""
    if is_won(board):
        return {}
    stone = 1 + board.count(1) - board.count(2)
    return {i: (*board[:i], stone, *board[i + 1 :]) for i in range(9) if board[i] == 0}


def is_won(board):
    return any(board[int(a)] == board[int(b)] == board[int(c)] != 0 for a, b, c in LINES)


@functools.cache
def minimax(board):
    """1 if the player to move wins, 0 if nobody does, -1 if the other one wins."""
    if is_won(board):
        return -1
    return max((-minimax(child) for child in moves(board).values()), default=0)


def reachable():
    boards = new = {(0,) * 9}
    while new:
        new = {child for board in new for child in moves(board).values()}
        boards = boards | new
    return sorted(boards)


BOARDS = reachable()
TO_MOVE = [board for board in BOARDS if moves(board)]


def search_all(predict, params, num_simulations, **knobs):
    """The move that the search finds in each position, without noise."""
    boards = jnp.array(TO_MOVE)
    knobs["gumbel_scale"] = 0.0

    def run(params):
        stones = jnp.stack([boards == 1, boards == 2], axis=1)
        player = jnp.sum(boards > 0, axis=1) % 2
        games = EXAMPLE["Game"](stones, player)
        root = make_root(predict, params, games, player=player)
        recurrent_fn = make_recurrent_fn(predict, EXAMPLE["transition"], gamma=1.0)
        key = jax.random.key(0)
        return search(params, key, root, recurrent_fn, num_simulations, **knobs).action

    return jax.jit(run)(params).tolist()


def predict_exactly(values, game):
    """The value of a position by minimax; `values` has three places for each square."""
    squares = game.stones[0] + 2 * game.stones[1]
    return EXAMPLE["predict"](None, game)._replace(value=values[tuple(squares)])


def share_of(is_good, actions):
    return np.mean([is_good(*pair) for pair in zip(TO_MOVE, actions, strict=True)])


def is_legal(board, action):
    return action in moves(board)


def is_optimal(board, action):
    return is_legal(board, action) and -minimax(moves(board)[action]) == minimax(board)


def test_minimax_reaches_every_position():
    assert (len(BOARDS), len(TO_MOVE)) == (5478, 4520)
    assert minimax((0,) * 9) == 0


def test_one_step_with_exact_values_finds_an_optimal_move_in_every_position():
    values = np.zeros((3,) * 9, np.float32)
    for board in BOARDS:
        values[board] = minimax(board)
    actions = search_all(predict_exactly, jnp.array(values), 9, max_depth=1)
    assert share_of(is_optimal, actions) == 1


def test_128_simulations_without_values_find_optimal_moves_and_legal_ones_only():
    actions = search_all(EXAMPLE["predict"], None, 128)
    assert share_of(is_legal, actions) == 1
    assert share_of(is_optimal, actions) >= 0.97
