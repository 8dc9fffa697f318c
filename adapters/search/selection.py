"""How a search chooses where to go: mctx's rules, kept from illegal actions at every node."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, ScalarLike
from mctx import PolicyOutput

from vernal.core._arrays import widen

from .engine import Rules
from .untyped import Tree, mctx

# A logit this far below the largest of its node is a mask: `mask_logits` gives the lowest finite
# number, others write -inf or -1e9. As a probability it is 0 in any precision.
_MASKED = 1e8

QTransform = Callable[[Tree, Any], Array]
Knobs = dict[str, Array]


def legal_actions(prior_logits: Float[Array, "*B A"]) -> Bool[Array, "*B A"]:
    """Which actions a policy's logits leave possible.

    Args:
        prior_logits: masked logits; by `core.mask_logits`, or with -inf or -1e9.

    Returns:
        True where the logit is no mask. All true where all are equal, whatever they are.

    Example:
        >>> import jax.numpy as jnp
        >>> legal_actions(jnp.array([1.0, -jnp.inf, -1e9, -50.0])).tolist()
        [True, False, False, True]
    """
    wide = widen(prior_logits)
    largest = jnp.max(wide, axis=-1, keepdims=True)
    lowest = jnp.finfo(prior_logits.dtype).min  # which is not low in half precision
    is_mask = (wide <= largest - _MASKED) | (prior_logits <= lowest)
    return ~is_mask | (wide == largest)


def qtransform_completed_by_mix_value(
    tree: Tree,
    node_index: Int[Array, ""] | int,
    *,
    value_scale: ScalarLike = 0.1,
    maxvisit_init: ScalarLike = 50.0,
    rescale_values: bool = True,
    use_mixed_value: bool = True,
    epsilon: ScalarLike = 1e-8,
) -> Float[Array, " A"]:
    """Completed Q-values as in mctx, over the legal actions only.

    Appendix D of Danihelka et al. 2022, https://openreview.net/forum?id=bERaNdoegnO. mctx takes
    illegal actions into the smallest and the largest Q-value, so that one illegal action more
    can change the weights of all others. Where all actions are legal the two are equal.

    Args:
        tree: one tree, not a batch.
        node_index: the node.
        value_scale: factor of the Q-values.
        maxvisit_init: added to the largest number of visits, the other factor.
        rescale_values: whether to bring the legal actions' values to [0, 1] first.
        use_mixed_value: whether what was not visited counts as the mixed value, or as the
            network's value of the node.
        epsilon: least range of values to divide by.

    Returns:
        What to add to the logits; 0 where an action is illegal, if values are rescaled.
    """
    most_visits = jnp.max(tree.children_visits[node_index])
    completed = completed_qvalues(tree, node_index, use_mixed_value=use_mixed_value)
    if rescale_values:
        legal = legal_actions(tree.children_prior_logits[node_index])
        smallest = jnp.min(completed, where=legal, initial=jnp.inf)
        largest = jnp.max(completed, where=legal, initial=-jnp.inf)
        rescaled = (completed - smallest) / jnp.maximum(largest - smallest, epsilon)
        completed = jnp.where(legal, rescaled, 0.0)
    weight = jnp.asarray(maxvisit_init, completed.dtype) + most_visits.astype(completed.dtype)
    return weight * value_scale * completed


def completed_qvalues(
    tree: Tree, node_index: Int[Array, ""] | int, *, use_mixed_value: bool = True
) -> Float[Array, " A"]:
    """Q-values of all actions, in units of the rewards, also of those that were not visited.

    Args:
        tree: one tree, not a batch.
        node_index: the node.
        use_mixed_value: whether what was not visited counts as the mixed value, or as the
            network's value of the node.

    Returns:
        Equation 10 of Danihelka et al. 2022, https://openreview.net/forum?id=bERaNdoegnO.
    """
    with jax.numpy_dtype_promotion("standard"):  # mctx mixes integers and floats.
        # With these scales, whose product is 1, mctx's function gives the plain values.
        return mctx.qtransform_completed_by_mix_value(
            tree,
            node_index,
            value_scale=1.0,
            maxvisit_init=1.0 - jnp.max(tree.children_visits[node_index]),
            rescale_values=False,
            use_mixed_value=use_mixed_value,
        )


def gumbel_muzero_rules(
    num_simulations: int,
    num_actions: int,
    *,
    qtransform: QTransform,
    max_num_considered_actions: int = 16,
    **unused: Any,
) -> Rules:
    """Sequential halving at the root, deterministic selection inside.

    Inside, an illegal action cannot be the best one: it has probability 0 and so a score of 0
    or less, while the scores of all actions add up to more than 0.
    """
    del num_actions, unused

    def at_root(key: PRNGKeyArray, tree: Tree, node: Array, depth: Array, knobs: Knobs) -> Array:
        del depth, knobs
        return mctx.gumbel_muzero_root_action_selection(
            key,
            tree,
            node,
            num_simulations=num_simulations,
            max_num_considered_actions=max_num_considered_actions,
            qtransform=qtransform,
        )

    def inside(key: PRNGKeyArray, tree: Tree, node: Array, depth: Array, knobs: Knobs) -> Array:
        del knobs
        return mctx.gumbel_muzero_interior_action_selection(
            key, tree, node, depth, qtransform=qtransform
        )

    return Rules(at_root, inside, {})


def muzero_rules(
    num_simulations: int,
    num_actions: int,
    *,
    qtransform: QTransform = mctx.qtransform_by_parent_and_siblings,
    pb_c_init: ScalarLike = 1.25,
    pb_c_base: ScalarLike = 19652,
    **unused: Any,
) -> Rules:
    """PUCT at every node, over the legal actions."""
    del num_simulations, num_actions, unused

    def at_root(key: PRNGKeyArray, tree: Tree, node: Array, depth: Array, knobs: Knobs) -> Array:
        return mctx.muzero_action_selection(
            key,
            tree,
            node,
            jnp.zeros_like(depth),  # From depth 0 on mctx looks at the root's mask.
            qtransform=qtransform,
            **knobs,
        )

    def inside(key: PRNGKeyArray, tree: Tree, node: Array, depth: Array, knobs: Knobs) -> Array:
        illegal = ~legal_actions(tree.children_prior_logits[node])
        return at_root(key, tree.replace(root_invalid_actions=illegal), node, depth, knobs)

    return Rules(at_root, inside, {"pb_c_init": pb_c_init, "pb_c_base": pb_c_base})


def stochastic_muzero_rules(num_simulations: int, num_actions: int, **knobs: Any) -> Rules:
    """PUCT where the agent decides, at even depths; the most due outcome where chance does."""
    decide_at_root, decide_inside, numbers = muzero_rules(num_simulations, num_actions, **knobs)

    def of_actions(tree: Tree, *, outcomes: bool) -> Tree:
        """The tree as it is for the actions alone, or for the outcomes of chance."""
        part = slice(num_actions, None) if outcomes else slice(num_actions)
        names = [name for name in tree if name.startswith("children_")]
        names.append("root_invalid_actions")
        return tree.replace(**{name: tree[name][..., part] for name in names})

    def at_root(key: PRNGKeyArray, tree: Tree, node: Array, depth: Array, knobs: Knobs) -> Array:
        return decide_at_root(key, of_actions(tree, outcomes=False), node, depth, knobs)

    def inside(key: PRNGKeyArray, tree: Tree, node: Array, depth: Array, knobs: Knobs) -> Array:
        def decide() -> Array:
            return decide_inside(key, of_actions(tree, outcomes=False), node, depth, knobs)

        def wait() -> Array:
            chances = of_actions(tree, outcomes=True)
            probs = jax.nn.softmax(chances.children_prior_logits[node])
            due = jnp.argmax(probs / (chances.children_visits[node] + 1))
            return due.astype(jnp.int32) + num_actions

        return jax.lax.cond(depth % 2 == 0, decide, wait)

    return Rules(at_root, inside, numbers)


def draw_by_visits(
    key: PRNGKeyArray, visit_probs: Float[Array, "B A"], temperature: ScalarLike
) -> Int[Array, " B"]:
    """An action with probability proportional to `visits ** (1 / temperature)`.

    mctx takes an action without visits for one of a very small share, which a high temperature
    makes likely, be it legal or not. Otherwise the draw is mctx's, number by number.

    Args:
        key: the one given to mctx's policy.
        visit_probs: shares of the visits at the root.
        temperature: 0 for the most visited; at infinity all that were visited are alike.
    """
    tiny = jnp.finfo(visit_probs.dtype).tiny
    logits = jnp.log(jnp.maximum(visit_probs, tiny))
    logits -= jnp.max(logits, axis=-1, keepdims=True)
    logits /= jnp.maximum(tiny, temperature)
    logits = jnp.where(visit_probs > 0, logits, -jnp.inf)
    draw_key, *_ = jax.random.split(key, 3)
    return jax.random.categorical(draw_key, logits)


class SearchValues(NamedTuple):
    """What a search says its roots are worth, in three ways.

    Attributes:
        root: mean over all simulations, the network's own value among them: as MuZero, for a
            critic of the policy that explores. Pessimistic where few simulations try bad actions.
        selected: Q-value of the action taken: for a critic of exactly what is done.
        improved: mean of the Q-values under `action_weights`: for a critic of the policy that is
            being learned, and so the target to bootstrap from. Of `gumbel_muzero` an action that
            was not tried counts as its mixed value; the other policies give it no weight.
    """

    root: Float[Array, " *B"]
    selected: Float[Array, " *B"]
    improved: Float[Array, " *B"]


def search_values(output: PolicyOutput[Any]) -> SearchValues:
    """Value targets from a finished search.

    Args:
        output: of `search`, of one state or of a batch.

    Returns:
        Three estimates of each root's value, in units of the rewards.

    Example:
        >>> import jax, jax.numpy as jnp, mctx
        >>> from vernal.adapters.search import search
        >>> def bandit(params, key, actions, embeddings):
        ...     reward = jnp.array([1.0, 3.0])[actions]
        ...     zero = jnp.zeros_like(reward)
        ...     logits = jnp.zeros((*reward.shape, 2))
        ...     step = mctx.RecurrentFnOutput(
        ...         reward=reward, discount=zero, prior_logits=logits, value=zero
        ...     )
        ...     return step, embeddings
        >>> root = mctx.RootFnOutput(
        ...     prior_logits=jnp.zeros(2), value=jnp.array(2.0), embedding=jnp.zeros(1)
        ... )
        >>> output = search(None, jax.random.key(0), root, bandit, 8)
        >>> search_values(output).selected.item()
        3.0
    """
    if jnp.ndim(output.action):
        return jax.vmap(search_values)(output)
    tree: Any = output.search_tree
    qvalues = completed_qvalues(tree, tree.ROOT_INDEX)
    legal = ~jnp.asarray(tree.root_invalid_actions, bool)
    weights = jnp.asarray(output.action_weights).astype(qvalues.dtype)
    return SearchValues(
        root=tree.node_values[tree.ROOT_INDEX],
        selected=qvalues[jnp.asarray(output.action)],
        improved=jnp.sum(jnp.where(legal, weights * qvalues, 0)),
    )
