"""An environment's simulator as a search's model: exact, blind to the future, or refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.adapters.actions import as_one_choice, make_action_codec, one_choice
from vernal.adapters.environment_model import (
    SimulatorState,
    make_environment_model,
    rekey_state,
)
from vernal.adapters.search import search
from vernal.core import make_recurrent_fn, make_root

from .environments_for_tests import (
    SMALL,
    CountingEnvironment,
    NeverStepAgain,
    assert_trees_equal,
    compiled,
    make_once,
    make_small,
    quick_jit,
)

KEY = jax.random.key(0)
GAMMA = 0.9
# One head each, and one team.
SEARCHED = [
    "BinPack-v2",
    "CVRP-v1",
    "FlatPack-v0",
    "Game2048-v1",
    "GraphColoring-v1",
    "Knapsack-v1",
    "LevelBasedForaging-v0",
    "Maze-v0",
    "Minesweeper-v0",
    "PacMan-v1",
    "RubiksCube-v0",
    "SlidingTilePuzzle-v0",
    "Snake-v1",
    "Sokoban-v0",
    "Sudoku-very-easy-v0",
    "TSP-v1",
    "Tetris-v0",
]


def made_up_value(observation):
    """A number that changes with everything that is seen."""
    leaves = [jnp.asarray(x, jnp.float32).ravel() for x in jax.tree.leaves(observation)]
    return jnp.sum(jnp.stack([jnp.mean(jnp.sin(x + jnp.arange(x.size))) for x in leaves]))


def judge(codec, observation):
    return jnp.zeros(codec.output_shape), made_up_value(observation)


def model_of(environment, *, rekey=True):
    evaluate = functools.partial(judge, make_action_codec(environment))
    return make_environment_model(environment, lambda _, seen: evaluate(seen), rekey=rekey)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
@pytest.mark.parametrize("name", SEARCHED)
def test_one_ply_search_gives_reward_plus_discounted_value_of_the_arrival(name):
    environment = make_small(name)
    model = model_of(environment, rekey=False)
    recurrent_fn = make_recurrent_fn(model.predict, model.transition, gamma=GAMMA)
    codec = as_one_choice(make_action_codec(environment))

    @quick_jit
    def search_and_step(key):
        state, timestep = environment.reset(key)
        seen = SimulatorState(state, timestep.observation)
        root = make_root(model.predict, None, jax.tree.map(lambda x: jnp.asarray(x)[None], seen))
        output = search(
            None,
            key,
            root,
            recurrent_fn,
            model.num_actions,
            max_depth=1,
            max_num_considered_actions=model.num_actions,
            gumbel_scale=0.0,
        )

        def q(action):
            _, arrived = environment.step(state, codec.to_environment(action))
            ended = arrived.last() & (arrived.discount.max() == 0)
            value = jnp.where(ended, 0, made_up_value(arrived.observation))
            return arrived.reward.sum() + GAMMA * value

        return output.search_tree.summary(), jax.vmap(q)(jnp.arange(model.num_actions))

    with jax.numpy_rank_promotion("allow"):  # inside some of Jumanji's environments
        summary, wanted = search_and_step(KEY)
    visited = np.asarray(summary.visit_counts[0]) > 0
    assert visited.any()
    np.testing.assert_allclose(summary.qvalues[0][visited], wanted[visited], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
@pytest.mark.parametrize("name", SMALL)
def test_only_the_keys_of_a_state_are_drawn_anew(name):
    environment = make_small(name)
    with jax.numpy_rank_promotion("allow"):
        state, _ = compiled(environment)[0](KEY)
    fresh = rekey_state(environment, state, jax.random.key(1))
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)]
    pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(fresh), is_key, strict=True))
    assert [bool(jnp.all(a == b)) for a, b, _ in pairs] == [not key for *_, key in pairs]


def predicted_boards(*, rekey):
    """Boards of 2048 one move on: as the search sees them, and as they come."""
    game = make_once("Game2048-v1")
    model = make_environment_model(game, lambda _, seen: (jnp.zeros(4), jnp.zeros(())), rekey=rekey)

    def both(key):
        state, timestep = game.reset(key)
        action = jnp.argmax(timestep.observation.action_mask)
        seen = SimulatorState(state, timestep.observation)
        search_key = jax.random.fold_in(key, 1)
        predicted = model.transition(None, search_key, action, seen).embedding.state.board
        return predicted, game.step(state, action)[0].board, jnp.sum(predicted == 0)

    return jax.jit(jax.vmap(both))(jax.random.split(KEY, 1000))


def test_search_foresees_the_next_tile_no_more_often_than_chance():
    predicted, real, empty = predicted_boards(rekey=True)
    hits = np.mean(np.all(np.asarray(predicted == real), axis=(1, 2)))
    # Two draws agree if both choose one of the empty cells, and both a 2 (0.9) or both a 4.
    chance = np.mean((0.9**2 + 0.1**2) / (np.asarray(empty) + 1))
    assert hits < chance + 3 * np.sqrt(chance / 1000)


def test_search_that_keeps_the_key_sees_the_future():
    predicted, real, _ = predicted_boards(rekey=False)
    assert bool(jnp.all(predicted == real))


def test_old_keys_are_recognised_by_their_name():
    state = {"seed_key": jax.random.key_data(KEY), "numbers": jnp.array([1, 2], jnp.uint32)}
    fresh = rekey_state(CountingEnvironment(), state, jax.random.key(1))
    assert fresh["numbers"].tolist() == [1, 2]
    assert fresh["seed_key"].tolist() != state["seed_key"].tolist()


KINDS = ["threefry2x32", "rbg", "unsafe_rbg"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_the_search", KINDS)
def test_keys_of_another_kind_stay_of_that_kind(kind, of_the_search):
    state = {"k": jax.random.key(3, impl=kind)}
    key = jax.random.key(1, impl=of_the_search)
    fresh = rekey_state(CountingEnvironment(), state, key)
    assert fresh["k"].dtype == state["k"].dtype
    assert bool(fresh["k"] != state["k"])


class OldStyle(CountingEnvironment):
    """Keeps a key as plain integers, under some name."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def reset(self, key) -> tuple[Any, Any]:
        state, timestep = super().reset(key)
        return {"state": state, self.name: jax.random.key_data(key)}, timestep

    def step(self, state: Any, action) -> tuple[Any, Any]:
        inner, timestep = super().step(state["state"], action)
        return {**state, "state": inner}, timestep


@pytest.mark.parametrize("kind", KINDS)
def test_old_keys_of_every_kind_are_drawn_anew(kind):
    with jax.default_prng_impl(kind):
        environment = OldStyle("key")
        state, _ = environment.reset(jax.random.key(0))
        fresh = rekey_state(environment, state, jax.random.key(1))
    assert (fresh["key"].shape, fresh["key"].dtype) == (state["key"].shape, jnp.uint32)
    assert (fresh["key"] != state["key"]).all()


def test_an_environment_may_say_how_its_future_is_drawn_anew():
    class Own(CountingEnvironment):
        def rekey(self, state, key):
            return state._replace(instance=jnp.array(7))

    environment = Own()
    state, _ = environment.reset(KEY)
    assert rekey_state(environment, state, KEY).instance == 7


class Discounting(CountingEnvironment):
    """Each action has a discount of its own, wherever it is taken, and the game goes on."""

    discounts = (0.0, 0.5, 1.0)

    def step(self, state: Any, action) -> tuple[Any, Any]:
        arrived: tuple[Any, Any] = super().step(state, action)
        state, timestep = arrived
        return state, timestep.replace(discount=jnp.array(self.discounts)[action])


DISCOUNTING = Discounting(min_length=6)


@quick_jit
def plan_discounting(key):
    """Values of the root's actions, where each step pays its action and states are worth 8."""
    environment = DISCOUNTING
    model = make_environment_model(environment, lambda _, seen: (jnp.zeros(3), jnp.full((), 8.0)))
    state, timestep = environment.reset(key)
    seen = jax.tree.map(lambda x: jnp.asarray(x)[None], SimulatorState(state, timestep.observation))
    recurrent_fn = make_recurrent_fn(model.predict, model.transition, gamma=GAMMA)
    root = make_root(model.predict, None, seen)
    output = search(None, key, root, recurrent_fn, 32, max_depth=3, gumbel_scale=0.0)
    tree: Any = output.search_tree
    return tree.summary().qvalues[0], tree.children_discounts, tree.node_values


def test_nothing_counts_behind_a_discount_of_0_in_the_middle_of_an_episode():
    qvalues, _, node_values = plan_discounting(KEY)
    # Action 0 pays nothing and loses a life; the states behind it would be worth 8.
    assert qvalues[0] == 0
    assert (qvalues[1:] > 1).all()
    assert (node_values == 0).any()


def test_an_environments_own_discounts_are_those_of_the_tree():
    _, discounts, _ = plan_discounting(KEY)
    assert set(np.unique(discounts)) == {0.0, np.float32(0.5 * GAMMA), np.float32(GAMMA)}


def test_truncated_state_keeps_its_value_and_a_terminated_one_has_none():
    for terminal_share, wanted in ((0.0, False), (1.0, True)):
        environment = CountingEnvironment(max_length=1, terminal_share=terminal_share)
        state, timestep = environment.reset(KEY)
        model = make_environment_model(environment, lambda _, seen: (jnp.zeros(3), jnp.ones(())))
        arrived = model.transition(
            None, KEY, jnp.array(1), SimulatorState(state, timestep.observation)
        )
        assert bool(arrived.terminal) is wanted
        assert arrived.reward == 1


def test_a_terminated_state_is_never_stepped_and_nothing_else_changes():
    def plan(kind):
        environment = kind(min_length=2, max_length=2, terminal_share=1.0)
        model = model_of(environment)
        recurrent_fn = make_recurrent_fn(model.predict, model.transition, gamma=GAMMA)
        keys = jax.random.split(KEY, 4)
        states, timesteps = jax.vmap(environment.reset)(keys)
        root = make_root(model.predict, None, SimulatorState(states, timesteps.observation))
        return quick_jit(lambda: search(None, KEY, root, recurrent_fn, 24))()

    found: Any = plan(NeverStepAgain)
    assert_trees_equal(found, plan(CountingEnvironment))
    deep = found.search_tree.children_visits[:, 1:].sum((1, 2)) > 9
    assert deep.any(), "no search went on from a finished state"


@pytest.mark.parametrize("kind", KINDS)
def test_what_looks_like_a_key_under_another_name_is_refused(kind):
    with jax.default_prng_impl(kind):
        with pytest.raises(ValueError, match=r"state\['rng'\] looks like a random key"):
            make_environment_model(OldStyle("rng"))
        make_environment_model(OldStyle("rng"), rekey=False)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("SearchAndRescue-v0", "these are continuous; PPO serves them"),
        ("Connector-v3", "5 x 5 x 5 x 5 x 5 x 5 x 5 x 5 x 5 x 5 choices make 9,765,625"),
        ("MMST-v0", "36 x 36 x 36 choices make 46,656, more than 4,096"),
    ],
)
def test_actions_that_fit_no_tree_are_refused_by_their_number(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_environment_model(make_once(name))


def test_several_heads_make_one_choice_whose_probabilities_are_products():
    codec = make_action_codec(make_once("LevelBasedForaging-v0"))
    outputs = jax.random.normal(KEY, (2, 6))
    legal = jnp.ones((2, 6), bool).at[0, 3].set(False).at[1, 0].set(False)
    logits, joint_legal = one_choice(codec, outputs, legal)
    probs = jax.nn.softmax(jnp.where(legal, outputs, -jnp.inf))
    np.testing.assert_allclose(
        jax.nn.softmax(logits), np.outer(probs[0], probs[1]).ravel(), rtol=1e-5, atol=1e-7
    )
    assert joint_legal.tolist() == np.outer(legal[0], legal[1]).ravel().tolist()


def test_one_choice_of_several_heads_names_every_combination_once():
    codec = as_one_choice(make_action_codec(make_once("LevelBasedForaging-v0")))
    actions = jax.vmap(codec.to_environment)(jnp.arange(36))
    assert actions.tolist() == [[i, j] for i in range(6) for j in range(6)]


def test_model_is_the_same_under_jit_and_vmap():
    environment = CountingEnvironment()
    model = make_environment_model(environment, lambda _, seen: (jnp.zeros(3), jnp.ones(())))
    keys, actions = jax.random.split(KEY, 4), jnp.array([0, 1, 1, 0])
    states, timesteps = jax.vmap(environment.reset)(keys)
    seen = SimulatorState(states, timesteps.observation)
    mapped = jax.jit(jax.vmap(lambda k, a, s: model.transition(None, k, a, s)))(keys, actions, seen)
    for row in range(4):
        one = model.transition(
            None, keys[row], actions[row], jax.tree.map(lambda x, row=row: x[row], seen)
        )
        assert_trees_equal(jax.tree.map(lambda x, row=row: x[row], mapped), one)
