"""An environment's own simulator as the model of a search, without knowledge of its future."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Shaped

from vernal.core import ModelTransition, Prediction
from vernal.core._arrays import where

from .actions import as_one_choice, make_action_codec, one_choice
from .environments import Environment, read_outcome

Evaluate = Callable[[Any, Any], tuple[Float[Array, "..."], Float[Array, ""]]]


class SimulatorState(NamedTuple):
    """One state inside a search: its embedding.

    Attributes:
        state: the environment's own; where an episode has terminated, the one before its end.
        observation: what the agent sees there.
    """

    state: PyTree[Shaped[Array, "..."]]
    observation: PyTree[Shaped[Array, "..."]]


class EnvironmentModel(NamedTuple):
    """What `core.make_recurrent_fn` and `core.make_root` take, and how to act.

    Attributes:
        predict: `(params, embedding) -> Prediction`, of one state.
        transition: `(params, key, action, embedding) -> ModelTransition`, of one state.
        to_environment: an action of the tree as the environment takes it.
        num_actions: how many edges a node has.
    """

    predict: Callable[[Any, SimulatorState], Prediction]
    transition: Callable[[Any, PRNGKeyArray, Array, SimulatorState], ModelTransition]
    to_environment: Callable[[Int[Array, ""]], Shaped[Array, "..."]]
    num_actions: int


def make_environment_model(
    environment: Environment,
    evaluate: Evaluate = lambda network, observation: network(observation),
    *,
    rekey: bool = True,
) -> EnvironmentModel:
    """Let a search walk in an environment's own simulator.

    A state of a Jumanji environment carries the random key of what will happen. A search that
    kept it would see the future: which tile appears next, which way a ghost turns. So each step
    in the tree first gets a key of the search's own, see `rekey_state`. What else a state hides
    from the observation is not hidden from the search: the mines of Minesweeper, say.

    Discounts are the environment's own, times gamma, as in a rollout. Behind a discount of 0
    nothing counts, whether the episode ends there or goes on. A terminated state is never stepped:
    its place in the tree holds the state before it. There is no automatic reset inside. Where an
    episode is cut, not terminated, its last state has a value, and the search may step beyond it.
    Several agents act as one, whose actions are all combinations of theirs, and whose reward is
    the sum.

    Args:
        environment: one environment, without automatic reset.
        evaluate: `(params, observation) -> (policy outputs, value)`, with outputs as PPO's
            networks give them; by default `params` is such a network.
        rekey: whether to hide the future; for an environment without randomness the same.

    Returns:
        The model; several heads of a policy become one choice.

    Raises:
        ValueError: the actions are continuous, or too many for a tree; or the state seems to
            hold a random key that is not named so.

    Example:
        >>> import jax, jax.numpy as jnp, jumanji
        >>> from vernal.adapters.search import search
        >>> from vernal.core import make_recurrent_fn, make_root
        >>> game = jumanji.make("Game2048-v1")
        >>> model = make_environment_model(game, lambda _, seen: (jnp.zeros(4), jnp.zeros(())))
        >>> recurrent_fn = make_recurrent_fn(model.predict, model.transition, gamma=0.99)
        >>> states, timesteps = jax.vmap(game.reset)(jax.random.split(jax.random.key(0), 2))
        >>> root = make_root(model.predict, None, SimulatorState(states, timesteps.observation))
        >>> search(None, jax.random.key(1), root, recurrent_fn, 8).action.shape
        (2,)
    """
    codec = make_action_codec(environment)
    tree_codec = as_one_choice(codec)
    if rekey:
        _require_names_of_keys(environment)

    def predict(params: Any, embedding: SimulatorState) -> Prediction:
        outputs, value = evaluate(params, embedding.observation)
        logits, legal = one_choice(codec, outputs, codec.legal(embedding.observation))
        return Prediction(logits, value, legal)

    def transition(
        params: Any, key: PRNGKeyArray, action: Int[Array, ""], embedding: SimulatorState
    ) -> ModelTransition:
        del params
        before = rekey_state(environment, embedding.state, key) if rekey else embedding.state
        after, timestep = environment.step(before, tree_codec.to_environment(action))
        outcome = read_outcome(timestep)
        terminal = outcome.discount == 0
        # A search may go on from a finished state, where a step may do anything, even never return.
        before, after = jax.tree.map(jnp.asarray, (before, after))
        state = where(timestep.last() & terminal, before, after)
        return ModelTransition(
            embedding=SimulatorState(state, timestep.observation),
            reward=outcome.reward,
            terminal=terminal,
            player=jnp.zeros((), jnp.int32),
            discount=outcome.discount,
        )

    return EnvironmentModel(
        predict, transition, tree_codec.to_environment, tree_codec.output_shape[0]
    )


def rekey_state(environment: Environment, state: PyTree, key: PRNGKeyArray) -> PyTree:
    """A state with another future: what has happened stays, what will happen is drawn anew.

    Random keys in the state are typed ones, or `uint32` of 2 or 4 words in a field whose name
    ends with `key`, as in all of Jumanji. An environment that keeps its randomness elsewhere says
    how, by a method `rekey(state, key) -> state`.

    Args:
        environment: whose state it is.
        state: of one environment.
        key: consumed.

    Returns:
        The same structure, shapes and dtypes.

    Example:
        >>> import jumanji
        >>> game = jumanji.make("Game2048-v1")
        >>> state, _ = game.reset(jax.random.key(0))
        >>> other = rekey_state(game, state, jax.random.key(1))
        >>> bool((other.board == state.board).all()), bool(other.key == state.key)
        (True, False)
    """
    own = getattr(environment, "rekey", None)
    if own is not None:
        return own(state, key)
    leaves, structure = jax.tree.flatten_with_path(state)
    fresh = [
        _draw_like(leaf, jax.random.fold_in(key, place)) if _is_key(path, leaf) else leaf
        for place, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, fresh)


# How many integers an old-style key is: threefry's, and those of rbg and unsafe_rbg.
_KEY_WORDS = ((2,), (4,))


def _require_names_of_keys(environment: Environment) -> None:
    if hasattr(environment, "rekey"):
        return
    state, _ = jax.eval_shape(environment.reset, jax.random.key(0))
    old_key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    for path, leaf in jax.tree.leaves_with_path(state):
        words = leaf.shape[-1:] if getattr(leaf, "dtype", None) == jnp.uint32 else ()
        if words == old_key.shape and not _is_key(path, leaf):
            raise ValueError(
                f"{type(environment).__name__}'s state{jax.tree_util.keystr(path)} looks like a "
                "random key, from which a search would see the future: give its name the ending "
                "key, or the environment a method rekey(state, key), or say rekey=False."
            )


def _is_key(path: Any, leaf: Any) -> bool:
    if not hasattr(leaf, "dtype"):  # Python's own numbers
        return False
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return True
    name = jax.tree_util.keystr(path[-1:], simple=True)
    return name.endswith("key") and leaf.dtype == jnp.uint32 and leaf.shape[-1:] in _KEY_WORDS


def _draw_like(leaf: Array, key: PRNGKeyArray) -> Array:
    """As many keys as there were, typed or not as they were."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.bits(key, leaf.shape, leaf.dtype)
    data = jax.random.bits(key, jax.random.key_data(leaf).shape, "uint32")
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
