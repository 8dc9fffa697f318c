"""Laws of the steps that a tree search takes, on models drawn as tables."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vernal.core import (
    ModelTransition,
    Node,
    Prediction,
    make_recurrent_fn,
    make_root,
)

from .strategies import DISCOUNTS, arrays, assert_near, bools, floats, masks, numbers

STATES, ACTIONS, TREES = 5, 3, 4
LOWEST = np.finfo(np.float32).min
SEEDS = st.integers(0, 2**31 - 1)


class Model(NamedTuple):
    """A game of a few states, as tables by state, or by state and action."""

    arrivals: Any
    rewards: Any
    terminal: Any
    players: Any
    prior_logits: Any
    values: Any
    legal: Any


@st.composite
def models(draw: st.DrawFn) -> Model:
    edges = (STATES, ACTIONS)
    return Model(
        arrivals=draw(arrays(edges, st.integers(0, STATES - 1), np.int32)),
        rewards=draw(floats(edges, -100, 100)),
        terminal=draw(bools((STATES,))),
        players=draw(arrays((STATES,), st.integers(0, 1), np.int32)),
        prior_logits=draw(floats(edges, -100, 100)),
        values=draw(floats((STATES,), -100, 100)),
        legal=draw(masks(edges)),
    )


# The embedding is a tree, whose second leaf remembers how the state was reached.
def predict(model, embedding):
    state, _ = embedding
    return Prediction(model.prior_logits[state], model.values[state], model.legal[state])


def transition(model, key, action, embedding):
    state, trail = embedding
    arrival = model.arrivals[state, action]
    trail = jnp.roll(trail, 1).at[0].set(action.astype(jnp.float32))
    return ModelTransition(
        embedding=(arrival, trail),
        reward=model.rewards[state, action],
        terminal=model.terminal[arrival],
        player=model.players[arrival],
    )


def transition_of_rows(model, key, actions, embeddings):
    return jax.vmap(transition, in_axes=(None, None, 0, 0))(model, key, actions, embeddings)


def predict_rows(model, embeddings):
    return jax.vmap(predict, in_axes=(None, 0))(model, embeddings)


@jax.jit
def step(model, seed, actions, nodes, gamma):
    recurrent_fn = make_recurrent_fn(predict, transition, gamma=gamma)
    return recurrent_fn(model, jax.random.key(seed), actions, nodes)


@jax.jit
def batched_step(model, seed, actions, nodes, gamma):
    recurrent_fn = make_recurrent_fn(predict_rows, transition_of_rows, gamma=gamma, batched=True)
    return recurrent_fn(model, jax.random.key(seed), actions, nodes)


@jax.jit
def root(model, embeddings, terminal, player):
    return make_root(predict, model, embeddings, terminal, player)


@jax.jit
def default_root(model, embeddings):
    return make_root(predict, model, embeddings)


@jax.jit
def batched_root(model, embeddings, terminal, player):
    return make_root(predict_rows, model, embeddings, terminal, player, batched=True)


def rows(elements):
    return arrays((TREES,), elements, np.int32)


STATE_ROWS = rows(st.integers(0, STATES - 1))
ACTION_ROWS = rows(st.integers(0, ACTIONS - 1))
NODES = st.tuples(STATE_ROWS, floats((TREES, 2)), bools((TREES,)), rows(st.integers(0, 1))).map(
    lambda drawn: Node._make([drawn[:2], *drawn[2:]])
)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@given(models(), NODES, ACTION_ROWS, DISCOUNTS)
def test_a_step_is_the_models(model, nodes, actions, gamma):
    """Reward, signed discount, prior and value along an edge are those that the model says."""
    (states, trails), behind_end, players = nodes
    arrivals = np.where(behind_end, states, model.arrivals[states, actions])
    terminal = behind_end | model.terminal[arrivals]
    reached = np.where(behind_end, players, model.players[arrivals])
    got, node = step(model, 0, actions, nodes, gamma)

    np.testing.assert_array_equal(node.embedding[0], arrivals)
    kept_trails = np.where(behind_end, trails[:, 0], actions)
    np.testing.assert_array_equal(node.embedding[1][:, 0], kept_trails)
    np.testing.assert_array_equal(node.terminal, terminal)
    np.testing.assert_array_equal(node.player, reached)

    np.testing.assert_array_equal(
        got.reward, np.where(behind_end, 0, model.rewards[states, actions])
    )
    sign = np.where(reached == players, 1, -1)
    np.testing.assert_array_equal(got.discount, np.where(terminal, 0, sign * np.float32(gamma)))
    np.testing.assert_array_equal(got.value, np.where(terminal, 0, model.values[arrivals]))
    masked = np.where(model.legal[arrivals], model.prior_logits[arrivals], LOWEST)
    np.testing.assert_array_equal(got.prior_logits, np.where(terminal[:, None], 0, masked))


@given(models(), NODES, st.lists(ACTION_ROWS, min_size=2, max_size=2), SEEDS)
def test_a_terminal_state_absorbs(model, nodes, later_actions, seed):
    """From a terminal state nothing moves and nothing pays, though the model says NaN."""
    poisoned = model._replace(
        rewards=np.full_like(model.rewards, np.nan),
        values=np.full_like(model.values, np.nan),
        prior_logits=np.full_like(model.prior_logits, np.nan),
        legal=np.zeros_like(model.legal),
    )
    ended = nodes._replace(terminal=np.ones(TREES, bool))
    node = ended
    for actions in later_actions:
        got, node = step(poisoned, seed, actions, node, 0.9)
        assert_same(node, ended)
        for field in got:
            np.testing.assert_array_equal(field, np.zeros_like(field))


@jax.jit
def gradient_of_a_step(model, actions, nodes):
    def total(numbers):
        changed = model._replace(**numbers)
        recurrent_fn = make_recurrent_fn(predict, transition, gamma=0.9)
        got, _ = recurrent_fn(changed, jax.random.key(0), actions, nodes)
        return got.value.sum() + got.reward.sum() + jax.nn.softmax(got.prior_logits)[:, 0].sum()

    names = ("rewards", "values", "prior_logits")
    return jax.grad(total)({name: getattr(model, name) for name in names})


@given(models(), NODES, ACTION_ROWS)
def test_no_gradient_flows_from_behind_an_end(model, nodes, actions):
    """Gradients count what the step used: nothing of terminal states, or of illegal actions."""
    states, behind_end = nodes.embedding[0], nodes.terminal
    gradient = gradient_of_a_step(model, actions, nodes)
    arrivals = model.arrivals[states, actions]
    going_on = ~(behind_end | model.terminal[arrivals])
    rewards, values = np.zeros_like(model.rewards), np.zeros_like(model.values)
    np.add.at(rewards, (states[~behind_end], actions[~behind_end]), 1)
    np.add.at(values, arrivals[going_on], 1)
    np.testing.assert_array_equal(gradient["rewards"], rewards)
    np.testing.assert_array_equal(gradient["values"], values)
    to_priors = np.asarray(gradient["prior_logits"])
    assert np.isfinite(to_priors).all()
    used = np.isin(np.arange(STATES), arrivals[going_on])
    np.testing.assert_array_equal(to_priors[~(model.legal & used[:, None])], 0)


@given(models(), NODES, ACTION_ROWS, SEEDS)
def test_functions_of_rows_do_as_functions_of_one(model, nodes, actions, seed):
    """Written for one state or for a batch of them, a model gives the same steps and roots."""
    assert_same(
        step(model, seed, actions, nodes, 0.9), batched_step(model, seed, actions, nodes, 0.9)
    )
    embeddings, terminal, player = nodes
    assert_same(
        root(model, embeddings, terminal, player), batched_root(model, embeddings, terminal, player)
    )


@given(models(), NODES, ACTION_ROWS, st.permutations(range(TREES)))
def test_trees_are_apart(model, nodes, actions, order):
    """Permuting the trees permutes the steps, bit by bit."""
    order = np.array(order)

    def permuted(tree):
        return jax.tree.map(lambda x: np.asarray(x)[order], tree)

    here = permuted(step(model, 0, actions, nodes, 0.9))
    assert_same(step(model, 0, *permuted((actions, nodes)), 0.9), here)


@given(models(), NODES)
def test_a_root_is_the_prediction(model, nodes):
    """A root has the model's masked prior and value; a terminal root has the value 0."""
    (states, _), terminal, player = nodes
    got = root(model, nodes.embedding, terminal, player)
    assert_same(got.embedding, nodes)
    np.testing.assert_array_equal(got.value, np.where(terminal, 0, model.values[states]))
    masked = np.where(model.legal[states], model.prior_logits[states], LOWEST)
    np.testing.assert_array_equal(got.prior_logits, np.where(terminal[:, None], 0, masked))
    plain = default_root(model, nodes.embedding)
    np.testing.assert_array_equal(plain.embedding.terminal, np.zeros(TREES, bool))
    np.testing.assert_array_equal(plain.embedding.player, np.zeros(TREES))


@given(models(), NODES, st.lists(ACTION_ROWS, min_size=3, max_size=3), DISCOUNTS)
def test_what_is_good_for_one_is_bad_for_the_other(model, nodes, path, gamma):
    """Along a path, discounts turn each reward's sign to the player's who is to move first."""
    first = nodes.player
    total, weight, node = np.zeros(TREES), np.ones(TREES), nodes
    wanted, scale = np.zeros(TREES), np.zeros(TREES)
    for depth, actions in enumerate(path):
        going_on = ~np.asarray(node.terminal)
        states, mover = np.asarray(node.embedding[0]), np.asarray(node.player)
        pay = gamma**depth * np.where(going_on, model.rewards[states, actions], 0)
        wanted += np.where(mover == first, pay, -pay)
        scale += abs(pay)
        got, node = step(model, 0, actions, node, gamma)
        total += weight * np.asarray(got.reward)
        weight *= np.asarray(got.discount)
    assert_near(total, wanted, scale=scale)


@given(
    st.sampled_from([np.int8, np.uint8, np.int32]),
    st.sampled_from([np.float16, jnp.bfloat16, np.float32]),
    st.sampled_from([(), (1,), (2, 3)]),
)
def test_a_tree_stores_one_kind_of_embedding(dtype, float_dtype, extra):
    """An embedding comes out as it went in; numbers of the search are at least float32."""
    one = jnp.zeros((), float_dtype)

    def predict_half(_, embedding):
        return Prediction(jnp.zeros(ACTIONS, float_dtype), one, jnp.ones(ACTIONS, bool))

    def stay(_, key, action, embedding):
        return ModelTransition(embedding, one, jnp.array(False), jnp.zeros((), dtype))

    embeddings = {"x": jax.ShapeDtypeStruct((TREES, *extra), dtype)}
    start = jax.eval_shape(lambda x: make_root(predict_half, None, x), embeddings)
    actions = jax.ShapeDtypeStruct((TREES,), np.int32)
    recurrent_fn = make_recurrent_fn(predict_half, stay, gamma=0.9)
    got, node = jax.eval_shape(
        lambda *args: recurrent_fn(None, jax.random.key(0), *args), actions, start.embedding
    )
    assert node == start.embedding
    assert {x.dtype for x in (*got, start.value, start.prior_logits)} == {np.dtype(np.float32)}


@given(st.sampled_from(["shape", "dtype", "leaf", "structure"]), st.booleans())
def test_an_embedding_that_changes_is_refused(what, batched):
    """A transition into an embedding of another kind is refused, and the leaf is named."""

    def restless(_, key, action, embedding):
        state, trail = embedding
        changed = {
            "shape": (state, jnp.zeros((*trail.shape, 1))),
            "dtype": (state, trail.astype(jnp.int32)),
            "leaf": (state, trail, trail),
            "structure": [state, trail],
        }[what]
        zero = jnp.zeros(action.shape)
        return ModelTransition(changed, zero, zero > 0, jnp.zeros(action.shape, jnp.int32))

    recurrent_fn = make_recurrent_fn(predict, restless, gamma=0.9, batched=batched)
    states = jax.ShapeDtypeStruct((TREES,), np.int32)
    trails = jax.ShapeDtypeStruct((TREES, 2), np.float32)
    node = Node._make([(states, trails), jax.ShapeDtypeStruct((TREES,), np.bool_), states])
    where = {"shape": r"\[1\]", "dtype": r"\[1\]", "leaf": r"\[2\]", "structure": "structure"}
    with pytest.raises(TypeError, match=f"the embedding's .*{where[what]}"):
        jax.eval_shape(lambda *args: recurrent_fn(None, jax.random.key(0), *args), states, node)


@given(st.sampled_from([*Prediction._fields, *ModelTransition._fields[1:]]), st.booleans())
def test_a_wrong_field_of_a_model_is_named(field, batched):
    """What a model returns is checked by name: one axis too many is a fault in every field."""

    def spoil(result):
        if field not in result._fields:
            return result
        return result._replace(**{field: jnp.asarray(getattr(result, field))[..., None]})

    ours, theirs = (predict_rows, transition_of_rows) if batched else (predict, transition)
    recurrent_fn = make_recurrent_fn(
        lambda *args: spoil(ours(*args)),
        lambda *args: spoil(theirs(*args)),
        gamma=0.9,
        batched=batched,
    )
    shapes = {
        "arrivals": (STATES, ACTIONS),
        "rewards": (STATES, ACTIONS),
        "terminal": (STATES,),
        "players": (STATES,),
        "prior_logits": (STATES, ACTIONS),
        "values": (STATES,),
        "legal": (STATES, ACTIONS),
    }
    dtypes = {"arrivals": np.int32, "players": np.int32, "terminal": np.bool_, "legal": np.bool_}
    model = Model(
        **{n: jax.ShapeDtypeStruct(s, dtypes.get(n, np.float32)) for n, s in shapes.items()}
    )
    states = jax.ShapeDtypeStruct((TREES,), np.int32)
    trails = jax.ShapeDtypeStruct((TREES, 2), np.float32)
    node = Node._make([(states, trails), jax.ShapeDtypeStruct((TREES,), np.bool_), states])
    with pytest.raises(TypeError, match=f"field '{field}', should be"):
        jax.eval_shape(
            lambda model, *args: recurrent_fn(model, jax.random.key(0), *args), model, states, node
        )


@jax.jit
def search(model, seed, embeddings, player):
    start = make_root(predict, model, embeddings, None, player)
    recurrent_fn: Any = make_recurrent_fn(predict, transition, gamma=0.9)
    output = mctx.gumbel_muzero_policy(
        params=model,
        rng_key=jax.random.key(seed),
        root=mctx.RootFnOutput(**start._asdict()),
        recurrent_fn=recurrent_fn,
        num_simulations=12,
        invalid_actions=~model.legal[embeddings[0]],
    )
    return output.action, output.action_weights, output.search_tree


@given(models(), STATE_ROWS, SEEDS)
def test_no_search_looks_at_an_illegal_action(model, states, seed):
    """Through mctx, no illegal action is taken, weighed or visited, at any depth."""
    embeddings = (states, np.zeros((TREES, 2), np.float32))
    action, weights, tree = jax.tree.map(
        np.asarray, search(model, seed, embeddings, model.players[states])
    )
    legal = model.legal[states]
    assert legal[np.arange(TREES), action].all()
    assert_near(weights.sum(-1), np.ones(TREES))
    np.testing.assert_array_equal(weights[~legal], 0)
    node = tree.embeddings
    visited = (tree.node_visits > 0) & ~node.terminal
    illegal = ~model.legal[node.embedding[0]] & visited[..., None]
    np.testing.assert_array_equal(tree.children_visits[illegal], 0)
    ended = node.terminal & (tree.node_visits > 0)
    np.testing.assert_array_equal(tree.node_values[ended], 0)


@jax.jit
def noisy_step(seed, actions, nodes, noise):
    def jump(params, key, action, embedding):
        moved = embedding + params * jax.random.normal(key)
        return ModelTransition(moved, moved, moved > 1e9, jnp.array(0))

    def look(params, embedding):
        return Prediction(jnp.zeros(ACTIONS), embedding, jnp.ones(ACTIONS, bool))

    recurrent_fn = make_recurrent_fn(look, jump, gamma=0.9)
    return recurrent_fn(noise, jax.random.key(seed), actions, nodes)


@given(SEEDS, numbers(0.5, 2))
def test_each_tree_has_a_key_of_its_own(seed, noise):
    """A model of one state that draws noise draws another in each row, from the one key."""
    zeros = np.zeros(TREES, np.int32)
    nodes = Node._make([np.zeros(TREES, np.float32), np.zeros(TREES, bool), zeros])
    got, node = noisy_step(seed, zeros, nodes, noise)
    assert len(set(np.asarray(node.embedding).tolist())) == TREES
    assert_same(noisy_step(seed, zeros, nodes, noise), (got, node))
