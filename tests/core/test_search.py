"""Roots and edges of a search tree, field by field, and real searches with mctx.

The models are tables: a maze whose values come from value iteration in NumPy, and the game
of Nim, whose values are known.
"""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pytest

from vernal.core import (
    ModelStep,
    ModelTransition,
    Node,
    Prediction,
    Root,
    make_recurrent_fn,
    make_root,
)

GAMMA = 0.9
KEY = jax.random.key(0)

# A maze: `.` free, `#` wall, `+` pays 1 and ends, `-` costs 1 and ends.
MAZE = [
    "...+",
    ".#.-",
    "..#.",
]
MOVES = [(-1, 0), (0, 1), (1, 0), (0, -1)]


class Tables(NamedTuple):
    """A finite decision process: rows are states, columns are actions."""

    arrivals: Any
    rewards: Any
    legal: Any
    terminal: Any


def read_maze(rows):
    cells = [(i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell != "#"]
    kinds = [rows[i][j] for i, j in cells]
    legal = np.array([[(i + di, j + dj) in cells for di, dj in MOVES] for i, j in cells])
    arrivals = np.array(
        [
            [cells.index((i + di, j + dj)) if (i + di, j + dj) in cells else 0 for di, dj in MOVES]
            for i, j in cells
        ]
    )
    pay = np.array([{"+": 1.0, "-": -1.0}.get(kind, -0.02) for kind in kinds])
    return Tables(arrivals, pay[arrivals], legal, np.array([kind in "+-" for kind in kinds]))


TABLES = read_maze(MAZE)
STATES, ACTIONS = TABLES.legal.shape
FREE = np.flatnonzero(~TABLES.terminal)


def q_values(tables, values):
    """r + gamma * V of the state arrived in; minus infinity where illegal."""
    later = np.where(tables.terminal, 0, values)[tables.arrivals]
    return np.where(tables.legal, tables.rewards + GAMMA * later, -np.inf)


def value_iteration(tables):
    values = np.zeros(len(tables.terminal))
    for _ in range(100):
        values = np.where(tables.terminal, 0, q_values(tables, values).max(-1))
    return values


OPTIMAL_Q = q_values(TABLES, value_iteration(TABLES))
DEVICE_TABLES = Tables(*map(jnp.asarray, TABLES))


def predict(values, cell):
    """Uniform over all actions, illegal ones too: that they are masked is core's task."""
    return Prediction(jnp.zeros(ACTIONS), values[cell], DEVICE_TABLES.legal[cell])


def transition(values, key, action, cell):
    arrival = DEVICE_TABLES.arrivals[cell, action]
    return ModelTransition(
        embedding=arrival,
        reward=DEVICE_TABLES.rewards[cell, action],
        terminal=DEVICE_TABLES.terminal[arrival],
        player=jnp.array(0),
    )


recurrent_fn = make_recurrent_fn(predict, transition, gamma=GAMMA)
walk = jax.jit(recurrent_fn)


def maze_root(values, cells):
    cells = jnp.asarray(cells)
    return make_root(predict, values, cells, DEVICE_TABLES.terminal[cells])


@functools.partial(jax.jit, static_argnames=("policy", "knobs"))
def search_maze(values, cells, key, *, policy, knobs):
    root = maze_root(values, cells)
    output = policy(
        params=values,
        rng_key=key,
        root=mctx.RootFnOutput(**root._asdict()),
        recurrent_fn=recurrent_fn,
        invalid_actions=~DEVICE_TABLES.legal[cells],
        **dict(knobs),
    )
    return output.action, output.search_tree.summary().qvalues, output.search_tree


ONE_PLY = (
    ("num_simulations", ACTIONS),
    ("max_depth", 1),
    ("max_num_considered_actions", ACTIONS),
    ("gumbel_scale", 0.0),
)
GUMBEL = (("num_simulations", 64), ("gumbel_scale", 0.0))
MUZERO = (("num_simulations", 100), ("dirichlet_fraction", 0.0), ("temperature", 0.0))


# What mctx finds with it.


def test_one_ply_search_gives_reward_plus_discounted_value_of_the_arrival():
    values = np.random.default_rng(0).normal(size=STATES).astype(np.float32)
    _, given, _ = search_maze(
        jnp.array(values), jnp.array(FREE), KEY, policy=mctx.gumbel_muzero_policy, knobs=ONE_PLY
    )
    legal = TABLES.legal[FREE]
    wanted = q_values(TABLES, values)[FREE]
    np.testing.assert_allclose(np.asarray(given)[legal], wanted[legal], rtol=2e-6)


@pytest.mark.parametrize(
    ("policy", "knobs"),
    [(mctx.gumbel_muzero_policy, GUMBEL), (mctx.muzero_policy, MUZERO)],
    ids=["gumbel", "muzero"],
)
def test_search_without_a_critic_finds_what_value_iteration_finds(policy, knobs):
    actions, _, _ = search_maze(jnp.zeros(STATES), jnp.array(FREE), KEY, policy=policy, knobs=knobs)
    given = OPTIMAL_Q[FREE, np.asarray(actions)]
    np.testing.assert_allclose(given, OPTIMAL_Q[FREE].max(-1))


def test_search_never_visits_an_illegal_action_at_any_node():
    _, _, tree = search_maze(
        jnp.zeros(STATES),
        jnp.array(FREE),
        KEY,
        policy=mctx.gumbel_muzero_policy,
        knobs=GUMBEL,
    )
    cells, visits = np.asarray(tree.embeddings.embedding), np.asarray(tree.children_visits)
    visited = (visits > 0) & ~np.asarray(tree.embeddings.terminal)[..., None]
    assert not (visited & ~TABLES.legal[cells]).any()


def test_nodes_behind_the_end_are_worth_nothing():
    values = jnp.full(STATES, 7.0)
    _, _, tree = search_maze(
        values, jnp.array(FREE), KEY, policy=mctx.gumbel_muzero_policy, knobs=GUMBEL
    )
    ended = np.asarray(tree.embeddings.terminal)
    assert ended.any()
    assert (np.asarray(tree.node_values)[ended] == 0).all()


# Two players: Nim. Take 1, 2 or 3 stones; whoever takes the last one wins.


def nim_predict(scale, state):
    """The player to move loses where the stones are a multiple of 4."""
    stones = state["stones"]
    value = jnp.where(stones % 4 == 0, -1.0, 1.0)
    return Prediction(jnp.zeros(3), scale * value, jnp.arange(1, 4) <= stones)


def nim_transition(scale, key, action, state):
    stones = state["stones"] - action - 1
    won = stones <= 0
    return ModelTransition(
        {"stones": stones, "turn": 1 - state["turn"]},
        jnp.where(won, 1.0, 0.0),
        won,
        1 - state["turn"],
    )


nim_fn = make_recurrent_fn(nim_predict, nim_transition, gamma=1.0)
HEAPS = np.array([1, 2, 3, 5, 6, 7])


@functools.partial(jax.jit, static_argnames="knobs")
def search_nim(scale, heaps, key, *, knobs):
    states = {"stones": heaps, "turn": heaps % 2}
    root = make_root(nim_predict, scale, states, player=states["turn"])
    output = mctx.gumbel_muzero_policy(
        params=scale,
        rng_key=key,
        root=mctx.RootFnOutput(**root._asdict()),
        recurrent_fn=nim_fn,  # pyright: ignore[reportArgumentType]
        invalid_actions=jnp.arange(1, 4)[None] > heaps[:, None],
        gumbel_scale=0.0,
        **dict(knobs),
    )
    return output.action, output.search_tree.summary().qvalues


def test_one_ply_search_of_a_game_sees_the_opponents_loss_as_a_win():
    knobs = (("num_simulations", 3), ("max_depth", 1), ("max_num_considered_actions", 3))
    _, given = search_nim(jnp.float32(1.0), jnp.array(HEAPS), KEY, knobs=knobs)
    left = HEAPS[:, None] - np.arange(1, 4)
    wanted = np.where(left % 4 == 0, 1.0, -1.0)
    np.testing.assert_allclose(np.asarray(given)[left >= 0], wanted[left >= 0])


def test_search_of_a_game_without_a_critic_finds_the_winning_move():
    actions, _ = search_nim(
        jnp.float32(0.0), jnp.array(HEAPS), KEY, knobs=(("num_simulations", 200),)
    )
    assert (np.asarray(actions) + 1).tolist() == (HEAPS % 4).tolist()


# One edge, field by field.


def nodes_of(cells, terminal=None, player=None):
    cells = jnp.asarray(cells)
    return Node(
        cells,
        DEVICE_TABLES.terminal[cells] if terminal is None else jnp.asarray(terminal),
        jnp.zeros(cells.shape, jnp.int32) if player is None else jnp.asarray(player, jnp.int32),
    )


def every_legal_edge():
    cells, actions = np.nonzero(TABLES.legal & ~TABLES.terminal[:, None])
    return cells, actions, TABLES.arrivals[cells, actions]


def test_edge_leads_where_the_model_says_and_pays_what_it_says():
    cells, actions, arrivals = every_legal_edge()
    step, nodes = walk(jnp.arange(STATES) * 1.0, KEY, jnp.array(actions), nodes_of(cells))
    np.testing.assert_array_equal(nodes.embedding, arrivals)
    np.testing.assert_allclose(step.reward, TABLES.rewards[cells, actions], rtol=1e-6)
    np.testing.assert_array_equal(nodes.terminal, TABLES.terminal[arrivals])


def test_discount_is_gamma_and_zero_into_a_terminal_state():
    cells, actions, arrivals = every_legal_edge()
    step, _ = walk(jnp.zeros(STATES), KEY, jnp.array(actions), nodes_of(cells))
    wanted = np.where(TABLES.terminal[arrivals], 0, np.float32(GAMMA))
    np.testing.assert_array_equal(step.discount, wanted)


def test_value_is_that_of_the_arrival_and_zero_at_a_terminal_state():
    cells, actions, arrivals = every_legal_edge()
    step, _ = walk(jnp.arange(STATES) + 1.0, KEY, jnp.array(actions), nodes_of(cells))
    np.testing.assert_array_equal(step.value, np.where(TABLES.terminal[arrivals], 0, arrivals + 1))


def test_priors_are_masked_by_what_is_legal_at_the_arrival():
    cells, actions, arrivals = every_legal_edge()
    step, _ = walk(jnp.zeros(STATES), KEY, jnp.array(actions), nodes_of(cells))
    prior = np.asarray(jax.nn.softmax(step.prior_logits))
    going_on = ~TABLES.terminal[arrivals]
    legal = TABLES.legal[arrivals][going_on]
    np.testing.assert_allclose(prior[going_on], legal / legal.sum(-1, keepdims=True), rtol=1e-6)


def test_priors_at_a_terminal_state_are_uniform():
    cells, actions, arrivals = every_legal_edge()
    step, _ = walk(jnp.zeros(STATES), KEY, jnp.array(actions), nodes_of(cells))
    ended = np.asarray(jax.nn.softmax(step.prior_logits))[TABLES.terminal[arrivals]]
    np.testing.assert_allclose(ended, 1 / ACTIONS)


@pytest.mark.parametrize(
    ("mover", "next_player", "sign"), [(0, 0, 1), (0, 1, -1), (1, 0, -1), (1, 1, 1), (2, 0, -1)]
)
def test_discount_changes_sign_with_the_player_to_move(mover, next_player, sign):
    step, nodes = one_edge(
        Prediction(jnp.zeros(2), jnp.array(3.0), jnp.ones(2, bool)),
        arrived(player=jnp.array(next_player)),
        player=jnp.array([mover], jnp.int32),
    )
    np.testing.assert_allclose(step.discount, [sign * GAMMA], rtol=1e-6)
    assert nodes.player.tolist() == [next_player]


def test_discount_into_a_terminal_state_is_zero_whoever_would_move():
    step, _ = one_edge(sound_prediction(), arrived(player=jnp.array(1), terminal=jnp.array(True)))
    assert step.discount.tolist() == [0.0]


# A terminal state is absorbing.


def nan_predict(params, position):
    bad = jnp.where(position > 2, jnp.nan, 1.0)
    return Prediction(jnp.full(2, bad), bad, jnp.ones(2, bool))


def nan_transition(params, key, action, position):
    bad = jnp.where(position > 2, jnp.nan, 1.0)
    return ModelTransition(position + bad, bad, position + 1 > 2, jnp.array(0))


nan_step = jax.jit(make_recurrent_fn(nan_predict, nan_transition, gamma=GAMMA))


def test_step_into_the_end_hides_what_the_network_says_there():
    root = make_root(nan_predict, None, jnp.array([1.0, 2.0]))
    step, nodes = nan_step(None, KEY, jnp.array([0, 1]), root.embedding)
    assert nodes.terminal.tolist() == [False, True]
    assert (step.value.tolist(), step.reward.tolist()) == ([1.0, 0.0], [1.0, 1.0])
    assert step.discount.tolist() == [np.float32(GAMMA), 0.0]
    assert jnp.isfinite(step.prior_logits).all()


@pytest.mark.parametrize("batched", [False, True])
def test_a_models_own_discount_is_a_factor_of_gamma(batched):
    own = jnp.array([1.0, 0.25, 0.0, 0.5])

    def predict_any(params, position):
        rows = position.shape
        return Prediction(jnp.zeros((*rows, 2)), position, jnp.ones((*rows, 2), bool))

    def turn(params, key, action, position):
        moved = (position + action.astype(float), position * 0, position > 2)
        player = jnp.zeros_like(action) + (position == 1)  # The other's turn, from there.
        return ModelTransition(*moved, player, own[position.astype(int)])

    root = make_root(predict_any, None, jnp.arange(4.0), batched=batched)
    recurrent_fn = make_recurrent_fn(predict_any, turn, gamma=GAMMA, batched=batched)
    step, _ = recurrent_fn(None, KEY, jnp.zeros(4, int), root.embedding)
    # The last one arrives at an end.
    np.testing.assert_allclose(step.discount, GAMMA * np.array([1, -0.25, 0, 0]), rtol=1e-6)


def test_step_from_the_end_stays_there_whatever_the_model_computes():
    ended = Node(jnp.array([2.5, 3.0]), jnp.array([True, True]), jnp.array([0, 1], jnp.int32))
    nodes = ended
    for _ in range(3):
        step, nodes = nan_step(None, KEY, jnp.array([0, 1]), nodes)
        assert [x.tolist() for x in (step.reward, step.discount, step.value)] == [[0.0, 0.0]] * 3
        np.testing.assert_allclose(jax.nn.softmax(step.prior_logits), 0.5)
    jax.tree.map(np.testing.assert_array_equal, nodes, ended)


def test_row_that_goes_on_is_not_touched_by_one_that_ended():
    nodes = Node(jnp.array([2.5, 0.0]), jnp.array([True, False]), jnp.zeros(2, jnp.int32))
    step, nodes = nan_step(None, KEY, jnp.array([0, 0]), nodes)
    assert nodes.embedding.tolist() == [2.5, 1.0]
    assert (step.reward.tolist(), step.value.tolist()) == ([0.0, 1.0], [0.0, 1.0])


def test_state_with_nothing_legal_that_goes_on_has_uniform_finite_priors():
    step, _ = one_edge(Prediction(jnp.array([1.0, 5.0]), jnp.array(3.0), jnp.zeros(2, bool)))
    np.testing.assert_allclose(jax.nn.softmax(step.prior_logits), [[0.5, 0.5]])
    assert step.value.tolist() == [3.0]


# Batched models, keys and transformations.


def batched_predict(values, cells):
    return Prediction(jnp.zeros((*cells.shape, ACTIONS)), values[cells], DEVICE_TABLES.legal[cells])


def batched_transition(values, key, actions, cells):
    arrivals = DEVICE_TABLES.arrivals[cells, actions]
    return ModelTransition(
        arrivals,
        DEVICE_TABLES.rewards[cells, actions],
        DEVICE_TABLES.terminal[arrivals],
        jnp.zeros(cells.shape, jnp.int32),
    )


def test_batched_model_gives_the_same_steps_and_roots():
    cells, actions, _ = every_legal_edge()
    values = jnp.arange(STATES) * 1.0
    batched_fn = make_recurrent_fn(batched_predict, batched_transition, gamma=GAMMA, batched=True)
    arguments = values, KEY, jnp.array(actions), nodes_of(cells)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(batched_fn)(*arguments), walk(*arguments))
    roots = [
        make_root(batched_predict, values, jnp.array(cells), batched=True),
        make_root(predict, values, jnp.array(cells)),
    ]
    jax.tree.map(np.testing.assert_array_equal, *roots)


def noisy_transition(params, key, action, position):
    return arrived(embedding=position, reward=jax.random.normal(key))


def test_rows_of_a_model_for_one_state_get_keys_of_their_own():
    noisy_fn = make_recurrent_fn(
        lambda params, position: sound_prediction(), noisy_transition, gamma=GAMMA
    )
    nodes = Node(jnp.zeros(4), jnp.zeros(4, bool), jnp.zeros(4, jnp.int32))
    rewards, again, others = (
        noisy_fn(None, jax.random.key(seed), jnp.zeros(4, int), nodes)[0].reward
        for seed in (0, 0, 1)
    )
    assert len(set(rewards.tolist())) == 4
    assert rewards.tolist() == again.tolist()
    assert not set(rewards.tolist()) & set(others.tolist())


def test_batched_model_gets_the_key_as_it_is():
    def transition(params, key, actions, positions):
        noise = jax.random.normal(key, positions.shape)
        still = jnp.zeros(2, bool)
        return ModelTransition(positions, noise, still, jnp.zeros(2, jnp.int32))

    def predict(params, positions):
        return Prediction(jnp.zeros((2, 3)), positions, jnp.ones((2, 3), bool))

    batched_fn = make_recurrent_fn(predict, transition, gamma=GAMMA, batched=True)
    root = make_root(predict, None, jnp.zeros(2), batched=True)
    step, _ = batched_fn(None, KEY, jnp.zeros(2, int), root.embedding)
    np.testing.assert_array_equal(step.reward, jax.random.normal(KEY, (2,)))


def test_old_style_keys_give_the_same_step():
    cells, actions, _ = every_legal_edge()
    arguments = jnp.array(actions), nodes_of(cells)
    values = jnp.zeros(STATES)
    old = recurrent_fn(values, jax.random.PRNGKey(0), *arguments)
    jax.tree.map(np.testing.assert_array_equal, old, walk(values, KEY, *arguments))


def test_one_root_alone_equals_its_row_of_a_batch():
    cells, actions, _ = every_legal_edge()
    values, actions = jnp.arange(STATES) * 1.0, jnp.array(actions)
    together = walk(values, KEY, actions, nodes_of(cells))
    row = walk(values, KEY, actions[3:4], nodes_of(cells[3:4]))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[3:4], y), together, row)


def test_vmap_over_single_roots_equals_the_batch():
    cells, actions, _ = every_legal_edge()
    values, actions = jnp.arange(STATES) * 1.0, jnp.array(actions)
    rows = jax.tree.map(lambda x: x[:, None], (actions, nodes_of(cells)))
    mapped = jax.vmap(recurrent_fn, in_axes=(None, None, 0, 0))(values, KEY, *rows)
    together = walk(values, KEY, actions, nodes_of(cells))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:, 0], y), mapped, together)


def test_gamma_may_be_traced():
    def discount(gamma):
        step_fn = make_recurrent_fn(predict, transition, gamma=gamma)
        return step_fn(jnp.zeros(STATES), KEY, jnp.array([1]), nodes_of([0]))[0].discount[0]

    value, slope = jax.jit(jax.value_and_grad(discount))(0.7)
    np.testing.assert_allclose([value, slope], [0.7, 1.0], rtol=1e-6)


def test_gradient_reaches_the_parameters_through_value_and_reward():
    def outcome(parameter):
        step, _ = one_edge(
            sound_prediction()._replace(value=2 * parameter), arrived(reward=3 * parameter)
        )
        return step.value[0] + step.reward[0]

    np.testing.assert_allclose(jax.grad(outcome)(1.0), 5.0)


def test_gradient_is_zero_from_a_terminal_state():
    def outcome(parameter):
        step, _ = one_edge(
            sound_prediction()._replace(value=2 * parameter),
            arrived(reward=3 * parameter),
            terminal=jnp.array([True]),
        )
        return step.value[0] + step.reward[0]

    assert jax.grad(outcome)(1.0) == 0


def test_embedding_of_keys_masks_and_images_goes_through():
    state = {
        "key": jax.random.split(jax.random.key(1), 2),
        "image": jnp.ones((2, 3, 3), jnp.uint8),
        "seen": jnp.array([[True, False], [False, False]]),
    }

    def transition(params, key, action, state):
        moved = {"key": key, "image": state["image"] + 1, "seen": ~state["seen"]}
        return arrived(embedding=moved)

    step_fn = make_recurrent_fn(lambda params, state: sound_prediction(), transition, gamma=GAMMA)
    root = make_root(
        lambda params, state: sound_prediction(), None, state, jnp.array([True, False])
    )
    _, nodes = step_fn(None, KEY, jnp.zeros(2, int), root.embedding)
    assert nodes.embedding["image"][:, 0, 0].tolist() == [1, 2]
    assert nodes.embedding["seen"].tolist() == [[True, False], [True, True]]
    data = jax.random.key_data
    assert data(nodes.embedding["key"])[0].tolist() == data(state["key"])[0].tolist()
    assert data(nodes.embedding["key"])[1].tolist() != data(state["key"])[1].tolist()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_models_give_float32_trees(dtype):
    prediction = Prediction(jnp.zeros(2, dtype), jnp.array(3, dtype), jnp.array([True, False]))
    step, _ = one_edge(prediction, arrived(reward=jnp.array(1, dtype)))
    assert {x.dtype for x in step} == {jnp.dtype(jnp.float32)}
    np.testing.assert_array_equal(jax.nn.softmax(step.prior_logits), [[1.0, 0.0]])
    root = make_root(lambda params, position: prediction, None, jnp.zeros(1))
    assert (root.value.dtype, root.prior_logits.dtype) == (jnp.float32, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.int32])
def test_player_of_any_integer_dtype_becomes_int32(dtype):
    _, nodes = one_edge(sound_prediction(), arrived(player=jnp.array(1, dtype)))
    assert (nodes.player.dtype, nodes.player.tolist()) == (jnp.int32, [1])
    root = make_root(
        lambda params, position: sound_prediction(),
        None,
        jnp.zeros(1),
        player=jnp.ones(1, dtype),
    )
    assert root.embedding.player.dtype == jnp.int32


# Roots.


def test_root_holds_masked_priors_values_and_the_states():
    values = jnp.arange(STATES) * 1.0
    root = maze_root(values, FREE)
    prior = jax.nn.softmax(root.prior_logits)
    legal = TABLES.legal[FREE]
    np.testing.assert_allclose(prior, legal / legal.sum(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(root.value, FREE)
    np.testing.assert_array_equal(root.embedding.embedding, FREE)


def test_root_goes_on_and_is_player_zeros_unless_told_otherwise():
    root = make_root(predict, jnp.zeros(STATES), jnp.array(FREE))
    assert not root.embedding.terminal.any()
    assert not root.embedding.player.any()


def test_terminal_root_is_worth_nothing_and_uniform():
    root = make_root(nan_predict, None, jnp.array([3.0, 1.0]), jnp.array([True, False]))
    assert root.value.tolist() == [0.0, 1.0]
    np.testing.assert_allclose(jax.nn.softmax(root.prior_logits), 0.5)


def test_field_names_are_those_of_mctx():
    assert set(Root._fields) == set(inspect.get_annotations(mctx.RootFnOutput))
    assert set(ModelStep._fields) == set(inspect.get_annotations(mctx.RecurrentFnOutput))


def test_nodes_survive_tree_map():
    node = jax.tree.map(lambda x: x[:1], nodes_of([0, 1]))
    assert isinstance(node, Node)
    assert node.embedding.tolist() == [0]


def test_root_without_an_array_is_refused():
    with pytest.raises(ValueError, match=r"make_root\(\): embeddings holds no array"):
        make_root(predict, None, {"nothing": None})


@pytest.mark.parametrize(
    ("embeddings", "blamed"),
    [
        ({"a": jnp.zeros(2), "b": jnp.zeros(3)}, r"float32\[3\] at \['b'\]"),
        ({"a": jnp.zeros(2), "b": jnp.array(1.0)}, r"float32\[\] at \['b'\]"),
        ({"a": jnp.zeros(2), "b": 1.0}, r"the float 1\.0 at \['b'\]"),
        ({"a": np.zeros(2)}, r"the ndarray float64\[2\] at \['a'\]"),
    ],
)
def test_root_embedding_that_is_no_batch_is_refused_by_its_path(embeddings, blamed):
    message = r"make_root\(\): argument 'embeddings' should be PyTree.*'B \.\.\.'.*but is "
    with pytest.raises(TypeError, match=message + blamed):
        make_root(lambda params, state: sound_prediction(), None, embeddings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terminal": jnp.zeros(3, bool)}, r"'terminal' should be .*|'embeddings' should be .*"),
        ({"terminal": jnp.zeros(2)}, r"'terminal' should be .* but is float32\[2\]"),
        ({"player": jnp.zeros(2)}, r"'player' should be .* but is float32\[2\]"),
        ({"player": jnp.zeros((2, 1), int)}, r"'player' should be .* but is int32\[2,1\]"),
    ],
)
def test_wrong_argument_of_a_root_is_refused_by_name(changes, message):
    with pytest.raises(TypeError, match=r"make_root\(\): argument (" + message + ")"):
        make_root(lambda params, state: sound_prediction(), None, jnp.zeros(2), **changes)


def test_predict_that_is_no_function_is_refused_by_name():
    with pytest.raises(TypeError, match=r"make_recurrent_fn\(\): argument 'predict' should be"):
        make_recurrent_fn(None, transition, gamma=0.9)  # pyright: ignore[reportArgumentType]


def test_missing_gamma_is_named():
    with pytest.raises(TypeError, match=r"missing .* 'gamma'"):
        make_recurrent_fn(predict, transition)  # pyright: ignore[reportCallIssue]


# What a user's functions return, checked by name.


def sound_prediction():
    return Prediction(jnp.zeros(2), jnp.array(3.0), jnp.ones(2, bool))


def arrived(**changes) -> ModelTransition:
    """Where a sound model arrives: at position 1."""
    sound = ModelTransition(jnp.array(1.0), jnp.array(1.0), jnp.array(False), jnp.array(0))
    return sound._replace(**changes)


def one_edge(
    prediction: Any, arrival: Any = None, terminal: Any = None, player: Any = None
) -> tuple[ModelStep, Node]:
    """Step from position 0 in a model that always says the same."""
    step_fn = make_recurrent_fn(
        lambda params, position: prediction,
        lambda params, key, action, position: arrived() if arrival is None else arrival,
        gamma=GAMMA,
    )
    terminal = jnp.zeros(1, bool) if terminal is None else terminal
    player = jnp.zeros(1, jnp.int32) if player is None else player
    return step_fn(None, KEY, jnp.zeros(1, int), Node(jnp.zeros(1), terminal, player))


WRONG_PREDICTIONS = [
    ({"prior_logits": jnp.zeros((1, 2))}, r"'prior_logits', should be .*float32\[1,1,2\]"),
    ({"prior_logits": jnp.zeros(2, int)}, r"'prior_logits', should be Float.*int32\[1,2\]"),
    ({"value": jnp.zeros(1)}, r"'value', should be Float.*float32\[1,1\]"),
    ({"value": jnp.array(1)}, r"'value', should be Float.*int32\[1\]"),
    ({"legal": jnp.ones(3, bool)}, r"'legal', should be Bool.*bool\[1,3\]"),
    ({"legal": jnp.ones(2)}, r"'legal', should be Bool.*float32\[1,2\]"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_PREDICTIONS)
def test_wrong_field_of_a_prediction_is_named_along_an_edge(changes, message):
    with pytest.raises(TypeError, match=r"predict\(\): the result, field " + message):
        one_edge(sound_prediction()._replace(**changes))


@pytest.mark.parametrize(("changes", "message"), WRONG_PREDICTIONS)
def test_wrong_field_of_a_prediction_is_named_at_the_root(changes, message):
    prediction = sound_prediction()._replace(**changes)
    with pytest.raises(TypeError, match=r"predict\(\): the result, field " + message):
        make_root(lambda params, position: prediction, None, jnp.zeros(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": jnp.zeros(1)}, r"'reward', should be Float.*float32\[1,1\]"),
        ({"reward": jnp.array(1)}, r"'reward', should be Float.*int32\[1\]"),
        ({"terminal": jnp.array(0.0)}, r"'terminal', should be Bool.*float32\[1\]"),
        ({"terminal": jnp.zeros(2, bool)}, r"'terminal', should be Bool.*bool\[1,2\]"),
        ({"player": jnp.array(0.0)}, r"'player', should be Integer.*float32\[1\]"),
        ({"player": jnp.array(False)}, r"'player', should be Integer.*bool\[1\]"),
    ],
)
def test_wrong_field_of_a_transition_is_named(changes, message):
    with pytest.raises(TypeError, match=r"transition\(\): the result, field " + message):
        one_edge(sound_prediction(), arrived(**changes))


@pytest.mark.parametrize(
    ("embedding", "part", "given", "wanted"),
    [
        (jnp.array(1), "leaf at its root", r"int32\[1\]", r"float32\[1\]"),
        (jnp.array(1, jnp.bfloat16), "leaf at its root", r"bfloat16\[1\]", r"float32\[1\]"),
        (jnp.zeros(2), "leaf at its root", r"float32\[1,2\]", r"float32\[1\]"),
        ({"x": jnp.array(1.0)}, r"leaf at \['x'\]", r"float32\[1\]", "missing"),
    ],
)
def test_drift_of_the_embedding_is_refused_by_name(embedding, part, given, wanted):
    message = rf"transition\(\): the embedding's {part} is {given}, but that of the state left is"
    with pytest.raises(TypeError, match=rf"{message} {wanted}"):
        one_edge(sound_prediction(), arrived(embedding=embedding))


def step_of_tree(left, arrival):
    step_fn = make_recurrent_fn(
        lambda params, state: sound_prediction(),
        lambda params, key, action, state: arrived(embedding=arrival),
        gamma=GAMMA,
    )
    node = Node(left, jnp.zeros(1, bool), jnp.zeros(1, jnp.int32))
    return step_fn(None, KEY, jnp.zeros(1, int), node)


def test_leaf_that_drifts_is_named_by_its_path():
    left = {"board": jnp.zeros((1, 3)), "turn": jnp.zeros(1, int)}
    with pytest.raises(TypeError, match=r"leaf at \['turn'\] is float32\[1\], .* int32\[1\]"):
        step_of_tree(left, {"board": jnp.zeros(3), "turn": jnp.array(0.0)})


def test_leaf_too_many_is_named_by_its_path():
    with pytest.raises(TypeError, match=r"leaf at \['b'\] is float32\[1\], .* is missing"):
        step_of_tree({"a": jnp.zeros(1)}, {"a": jnp.array(0.0), "b": jnp.array(0.0)})


def test_list_in_place_of_a_tuple_is_refused_as_another_structure():
    message = r"the embedding's structure is PyTreeDef\(\[\*\]\), .* is PyTreeDef\(\(\*,\)\)"
    with pytest.raises(TypeError, match=message):
        step_of_tree((jnp.zeros(1),), [jnp.array(0.0)])


def test_fault_of_a_model_is_named_inside_a_search_too():
    bad_fn = make_recurrent_fn(
        lambda values, cell: predict(values, cell)._replace(value=jnp.zeros(1)),
        transition,
        gamma=GAMMA,
    )
    root = maze_root(jnp.zeros(STATES), FREE)
    with pytest.raises(TypeError, match=r"predict\(\): the result, field 'value', should be"):
        mctx.gumbel_muzero_policy(
            params=jnp.zeros(STATES),
            rng_key=KEY,
            root=mctx.RootFnOutput(**root._asdict()),
            recurrent_fn=bad_fn,  # pyright: ignore[reportArgumentType]
            num_simulations=2,
        )
