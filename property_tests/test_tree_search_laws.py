"""Laws of a whole tree search: one ply, improvement, padding, permutation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vernal.adapters.search import qtransform_completed_by_mix_value, search
from vernal.adapters.search.untyped import mctx
from vernal.core import make_recurrent_fn, make_root

from .strategies import DISCOUNTS, UNIT, assert_near, numbers
from .test_search_laws import ACTIONS, STATES, TREES, Model, models, predict, transition

SEEDS = st.integers(0, 2**31 - 1)
STARTS = np.arange(TREES, dtype=np.int32)
# Compiled with little effort: most of the time here is compilation.
jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


@functools.partial(jit, static_argnames=("num_simulations", "max_depth"))
def plan(model, states, gamma, *, num_simulations, max_depth=None):
    """Search without noise from some states of a model."""
    embeddings = states, jnp.zeros((*states.shape, 2))
    root = make_root(predict, model, embeddings, model.terminal[states], model.players[states])
    return search(
        model,
        jax.random.key(0),
        root,
        make_recurrent_fn(predict, transition, gamma=gamma),
        num_simulations,
        model.legal[states],
        gumbel_scale=0.0,
        max_depth=max_depth,
    )


@given(models(), DISCOUNTS)
def test_one_ply_gives_reward_and_discounted_value_of_the_arrival(model, gamma):
    """With as many simulations as actions, each legal edge holds what the model says of it."""
    going_on = model._replace(terminal=model.terminal & (np.arange(STATES) >= TREES))
    output = plan(going_on, STARTS, gamma, num_simulations=ACTIONS, max_depth=1)
    tree = jax.tree.map(np.asarray, output.search_tree)
    legal, arrivals = going_on.legal[STARTS], going_on.arrivals[STARTS]
    ended = going_on.terminal[arrivals]
    sign = np.where(going_on.players[arrivals] == going_on.players[STARTS, None], 1, -1)
    values = np.where(ended, 0, going_on.values[arrivals])
    discounts = np.where(ended, 0, sign * np.float32(gamma))
    rewards = going_on.rewards[STARTS]
    for given_field, wanted in (
        (tree.children_rewards, rewards),
        (tree.children_discounts, discounts),
        (tree.children_values, values),
    ):
        np.testing.assert_array_equal(given_field[:, 0][legal], wanted[legal])
    q = np.asarray(output.search_tree.summary().qvalues)
    scale = abs(rewards) + abs(discounts * values)
    assert_near(q[legal], (rewards + discounts * values)[legal], scale=scale[legal])
    np.testing.assert_array_equal(tree.children_visits[:, 0].sum(-1), ACTIONS)
    np.testing.assert_array_equal(tree.children_visits[:, 0] > 0, legal)


@functools.partial(jit, static_argnames="policy")
def act(model, seed, temperature, noise, *, policy):
    """One decision in each state, with noise."""
    embeddings = jnp.asarray(STARTS), jnp.zeros((TREES, 2))
    root = make_root(predict, model, embeddings, model.terminal[STARTS], model.players[STARTS])
    recurrent_fn = make_recurrent_fn(predict, transition, gamma=0.9)
    knobs = {"temperature": temperature, "dirichlet_fraction": noise}
    if policy == "gumbel_muzero":
        knobs = {"gumbel_scale": temperature}
    key = jax.random.key(seed)
    return search(model, key, root, recurrent_fn, 5, model.legal[STARTS], policy=policy, **knobs)


@pytest.mark.parametrize("policy", ["gumbel_muzero", "muzero"])
@given(model=models(), seed=SEEDS, temperature=numbers(0, 1e30), noise=UNIT)
def test_no_illegal_action_is_returned_or_weighs(policy, model, seed, temperature, noise):
    """However high the temperature and however strong the noise."""
    output = act(model, seed, temperature, noise, policy=policy)
    # Behind the end everything is as good as legal.
    legal = model.legal[STARTS] | model.terminal[STARTS, None]
    assert np.take_along_axis(legal, np.asarray(output.action)[:, None], axis=1).all()
    weights = np.asarray(output.action_weights)
    np.testing.assert_array_equal(weights[~legal], 0)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


BANDITS, ARMS = 1024, 6


@functools.partial(jit, static_argnames="num_simulations")
def improve(seed, spread, use_mask, *, num_simulations):
    """Bandits whose value is the prior's, and what a search makes of them."""
    keys = jax.random.split(jax.random.key(seed), 5)
    logits = jax.random.normal(keys[0], (BANDITS, ARMS)) * 2
    q = jax.random.normal(keys[1], (BANDITS, ARMS)) * spread
    legal = jax.random.bernoulli(keys[2], 0.6, (BANDITS, ARMS)) | ~use_mask
    legal |= jax.nn.one_hot(jax.random.randint(keys[3], (BANDITS,), 0, ARMS), ARMS) > 0
    prior = jax.nn.softmax(logits, where=legal)

    def pull(q, key, arms, rows):
        nothing = jnp.zeros(rows.shape)
        pay = q[rows, arms]
        return mctx.RecurrentFnOutput(
            reward=pay, discount=nothing, prior_logits=jnp.zeros((*rows.shape, ARMS)), value=nothing
        ), rows

    root = mctx.RootFnOutput(
        prior_logits=logits, value=jnp.sum(prior * q, -1), embedding=jnp.arange(BANDITS)
    )
    # Mixed values stand for arms not pulled, and are only estimates of the exact value.
    transform = functools.partial(
        qtransform_completed_by_mix_value, use_mixed_value=num_simulations >= ARMS
    )
    output = search(q, keys[4], root, pull, num_simulations, legal, qtransform=transform)
    gumbel = output.search_tree.extra_data.root_gumbel
    drawn = jnp.argmax(jnp.where(legal, gumbel + logits, -jnp.inf), -1)

    def q_of(actions):
        return jnp.take_along_axis(q, actions[:, None], -1)[:, 0]

    means = [jnp.sum(weights * q, -1) for weights in (output.action_weights, prior)]
    return means, (q_of(output.action), q_of(drawn))


@pytest.mark.parametrize("num_simulations", [4, 16])
@given(seed=SEEDS, spread=numbers(0.01, 100), use_mask=st.booleans())
def test_search_improves_on_the_prior(num_simulations, seed, spread, use_mask):
    """With exact values no bandit loses: neither by the weights, nor by the action drawn."""
    means, drawn = improve(seed, spread, use_mask, num_simulations=num_simulations)
    for better, worse in (means, drawn):
        assert (np.asarray(better - worse) >= -1e-5 * spread).all()
    assert (np.asarray(means[0] - means[1]) > 0).mean() > 0.5


PLACES = [(0, 1, 2), (1, 2, 4), (2, 3, 4), (0, 2, 4)]


def pad(model, places):
    """The model with two illegal actions more, which would pay best."""

    def spread_out(x, filling):
        if x.ndim == 1:
            return x
        wide = np.full((STATES, ACTIONS + 2), filling, x.dtype)
        wide[:, places] = x
        return wide

    fillings = Model(0, 1e3, 0, 0, 100.0, 0, False)
    return Model._make(spread_out(x, filling) for x, filling in zip(model, fillings, strict=True))


@given(models(), st.sampled_from(PLACES))
def test_illegal_actions_change_nothing(model, places):
    """With illegal actions added at every state, legal ones have the same visits and weights."""
    plain, padded = (
        plan(each, STARTS, 0.9, num_simulations=12) for each in (model, pad(model, list(places)))
    )
    illegal = np.setdiff1d(np.arange(ACTIONS + 2), places)
    weights = np.asarray(padded.action_weights)
    np.testing.assert_allclose(weights[:, places], plain.action_weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(weights[:, illegal], 0)
    # A state behind the end has no illegal actions: there nothing is left to compare.
    going_on = ~np.asarray(plain.search_tree.embeddings.terminal)
    visits = np.asarray(padded.search_tree.children_visits)[going_on]
    wanted = np.asarray(plain.search_tree.children_visits)[going_on]
    np.testing.assert_array_equal(visits[:, places], wanted)
    np.testing.assert_array_equal(visits[:, illegal], 0)
    np.testing.assert_array_equal(padded.action, np.array(places)[np.asarray(plain.action)])


@given(models(), st.permutations(range(TREES)))
def test_trees_are_apart(model, order):
    """Permuting the rows permutes the results, bit by bit."""
    order = np.array(order)
    straight, permuted = (
        plan(model, states, 0.9, num_simulations=12) for states in (STARTS, STARTS[order])
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x)[order], y), straight, permuted
    )
