"""What a tree search needs of a model: a root, and one step along an edge.

The two functions a user writes are about one state: `predict` says how good it is and what
to do there, `transition` says where an action leads. `make_recurrent_fn` and `make_root`
turn them into what mctx's policies take, with the traps closed: terminal states stay
terminal, illegal actions are masked at every node, and signs follow who is to move.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import (
    Array,
    Bool,
    Float,
    Int,
    Integer,
    PRNGKeyArray,
    PyTree,
    ScalarLike,
    Shaped,
)

from ._arrays import where, widen
from ._checks import check_embedding, check_values, checked
from ._masking import mask_logits


class Prediction(NamedTuple):
    """What `predict` says of one state.

    Attributes:
        prior_logits: the policy's logits.
        value: expected return for the player to move.
        legal: true where an action may be taken.
    """

    prior_logits: Float[Array, " *B A"]
    value: Float[Array, " *B"]
    legal: Bool[Array, " *B A"]


class ModelTransition(NamedTuple):
    """Where `transition` says that an action leads.

    Attributes:
        embedding: the state arrived in; same structure, shapes and dtypes as the one left.
        reward: what the step paid the player who moved.
        terminal: true where no step follows, or what follows is not to count.
        player: who is to move there; constant for one player.
        discount: the environment's own, a factor of gamma; 1 if it has none.
    """

    embedding: PyTree
    reward: Float[Array, " *B"]
    terminal: Bool[Array, " *B"]
    player: Integer[Array, " *B"]
    discount: Float[Array, " *B"] | float = 1.0


class Node(NamedTuple):
    """A state inside a tree: mctx's embedding.

    Attributes:
        embedding: the model's own state.
        terminal: true where no step follows.
        player: who is to move.
    """

    embedding: PyTree
    terminal: Bool[Array, " *batch"]
    player: Int[Array, " *batch"]


class ModelStep(NamedTuple):
    """One edge of the tree, with the field names of `mctx.RecurrentFnOutput`.

    Attributes:
        reward: what the step paid the player who moved.
        discount: gamma, minus gamma to another player, 0 into a terminal state; times the
            environment's own.
        prior_logits: the policy in the state arrived in, masked.
        value: expected return for the player to move there; 0 if it is terminal.
    """

    reward: Float[Array, " B"]
    discount: Float[Array, " B"]
    prior_logits: Float[Array, "B A"]
    value: Float[Array, " B"]


class Root(NamedTuple):
    """The root of a tree, with the field names of `mctx.RootFnOutput`.

    Attributes:
        prior_logits: the policy, masked.
        value: expected return for the player to move; 0 if the state is terminal.
        embedding: the state; a `Node`, if `make_root` made it.
    """

    prior_logits: Float[Array, "B A"]
    value: Float[Array, " B"]
    embedding: PyTree


PredictFn = Callable[[Any, Any], Prediction]
TransitionFn = Callable[[Any, PRNGKeyArray, Array, Any], ModelTransition]
RecurrentFn = Callable[[Any, PRNGKeyArray, Array, Node], tuple[ModelStep, Node]]


@checked
def make_recurrent_fn(
    predict: PredictFn, transition: TransitionFn, *, gamma: ScalarLike, batched: bool = False
) -> RecurrentFn:
    """Build the function that takes a search along an edge of its tree.

    The result follows the contract of mctx (https://github.com/google-deepmind/mctx), and
    `ModelStep` has its field names. Along each edge:

    - `discount` is `gamma`, `-gamma` where the next state's player is another one (two
      players, zero sum: what is good for her is bad for him), and 0 into a terminal state;
      an environment's own discount is a factor of it;
    - the prediction is made from the state arrived in; illegal actions get probability 0;
      a terminal state's value is 0;
    - a terminal state is absorbing: from it reward, discount and value are 0 and the
      embedding stays, whatever the model computes there, NaN included.

    Args:
        predict: `(params, embedding) -> Prediction`.
        transition: `(params, key, action, embedding) -> ModelTransition`.
        gamma: discount of one step, in [0, 1].
        batched: false if both functions are written for one state (they are then mapped,
            each row with a key of its own); true if they take leading axes `B` themselves
            (then with one key for all).

    Returns:
        `(params, key, actions[B], nodes[B]) -> (ModelStep, nodes[B])`; the key is consumed.

    Raises:
        TypeError: when first traced, if what either function returns has a wrong field; the
            sentence names it.

    Example:
        A walk on a line of 4 cells whose last one ends the episode and pays 1:

        >>> import jax, jax.numpy as jnp
        >>> def predict(params, position):
        ...     legal = jnp.array([True, True])
        ...     return Prediction(jnp.zeros(2), params * position, legal)
        >>> def transition(params, key, action, position):
        ...     position = position + 2.0 * action - 1
        ...     at_end = position == 3
        ...     return ModelTransition(position, at_end.astype(float), at_end, jnp.array(0))
        >>> recurrent_fn = make_recurrent_fn(predict, transition, gamma=0.9)
        >>> root = make_root(predict, 0.1, jnp.array([1.0, 2.0]))
        >>> step, _ = recurrent_fn(0.1, jax.random.key(0), jnp.array([1, 1]), root.embedding)
        >>> [round(x, 2) for x in step.value.tolist()], step.reward.tolist()
        ([0.2, 0.0], [0.0, 1.0])
        >>> [round(x, 2) for x in step.discount.tolist()]
        [0.9, 0.0]
    """
    predict_rows = predict if batched else jax.vmap(predict, in_axes=(None, 0))
    transition_rows = transition if batched else _map_with_keys(transition)

    def recurrent_fn(
        params: Any, key: PRNGKeyArray, actions: Integer[Array, " B"], nodes: Node
    ) -> tuple[ModelStep, Node]:
        arrived = transition_rows(params, key, actions, nodes.embedding)
        _check_transition(arrived, nodes)
        terminal = nodes.terminal | arrived.terminal
        reached = Node(
            embedding=where(nodes.terminal, nodes.embedding, arrived.embedding),
            terminal=terminal,
            player=jnp.where(nodes.terminal, nodes.player, arrived.player.astype(jnp.int32)),
        )
        prior_logits, value = _evaluate(predict_rows(params, reached.embedding), reached)
        reward = jnp.where(nodes.terminal, 0, widen(arrived.reward))
        sign = jnp.where(reached.player == nodes.player, 1, -1).astype(reward.dtype)
        own = jnp.asarray(arrived.discount, reward.dtype)
        discount = jnp.where(terminal, 0, sign * jnp.asarray(gamma, reward.dtype) * own)
        return ModelStep(reward, discount, prior_logits, value), reached

    return recurrent_fn


@checked
def make_root(
    predict: PredictFn,
    params: Any,
    embeddings: PyTree[Shaped[Array, "B ..."]],
    terminal: Bool[Array, " B"] | None = None,
    player: Integer[Array, " B"] | None = None,
    *,
    batched: bool = False,
) -> Root:
    """Evaluate the states to search from, one tree each.

    Args:
        predict: as given to `make_recurrent_fn`.
        params: its first argument.
        embeddings: the model's states.
        terminal: true where a state is terminal already; none by default.
        player: who is to move; 0 by default.
        batched: as given to `make_recurrent_fn`.

    Returns:
        Root with masked prior logits; its `embedding` is what `recurrent_fn` takes.

    Raises:
        TypeError: shapes disagree, or a field that `predict` returns is wrong.
        ValueError: `embeddings` holds no array.

    Example:
        >>> import jax.numpy as jnp
        >>> def predict(params, position):
        ...     return Prediction(jnp.zeros(2), position, jnp.array([True, False]))
        >>> make_root(predict, None, jnp.array([1.0, 2.0])).value.tolist()
        [1.0, 2.0]
    """
    if not jax.tree.leaves(embeddings):
        raise ValueError("make_root(): embeddings holds no array, so the number of trees is open.")
    size = jax.tree.leaves(embeddings)[0].shape[0]
    terminal = jnp.zeros(size, bool) if terminal is None else terminal
    player = jnp.zeros(size, jnp.int32) if player is None else player.astype(jnp.int32)
    node = Node(embeddings, terminal, player)
    predict_rows = predict if batched else jax.vmap(predict, in_axes=(None, 0))
    prior_logits, value = _evaluate(predict_rows(params, embeddings), node)
    return Root(prior_logits, value, node)


def _map_with_keys(transition: TransitionFn) -> TransitionFn:
    def rows(params: Any, key: PRNGKeyArray, actions: Array, embeddings: Any) -> ModelTransition:
        keys = jax.random.split(key, actions.shape[0])
        return jax.vmap(transition, in_axes=(None, 0, 0, 0))(params, keys, actions, embeddings)

    return rows


def _evaluate(prediction: Prediction, node: Node) -> tuple[Array, Array]:
    rows = (node.terminal, Bool[Array, " *B"])
    check_values("predict()", {"of states": rows, "the result": (prediction, Prediction)})
    at_end = node.terminal[:, None]
    # Whatever a network says behind the end, NaN too, must not reach the tree.
    logits = jnp.where(at_end, 0, widen(prediction.prior_logits))
    value = jnp.where(node.terminal, 0, widen(prediction.value))
    return mask_logits(logits, prediction.legal | at_end), value


def _check_transition(arrived: ModelTransition, left: Node) -> None:
    rows = (left.terminal, Bool[Array, " *B"])
    check_values("transition()", {"of states": rows, "the result": (arrived, ModelTransition)})
    check_embedding("transition()", arrived.embedding, left.embedding)
