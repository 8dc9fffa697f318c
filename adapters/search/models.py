"""The model of a search as its user wrote it, checked and made fit for a tree."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray, PyTree, Shaped

from vernal.core import mask_logits
from vernal.core._arrays import where
from vernal.core._checks import check_embedding, check_values, describe

from ..modules import is_array
from .selection import legal_actions
from .untyped import mctx

# Fields of what each function returns first, and their axes.
_FIELDS = {
    "recurrent_fn": (
        mctx.RecurrentFnOutput,
        {"reward": " B", "discount": " B", "prior_logits": "B A", "value": " B"},
    ),
    "decision_recurrent_fn": (
        mctx.DecisionRecurrentFnOutput,
        {"chance_logits": "B C", "afterstate_value": " B"},
    ),
    "chance_recurrent_fn": (
        mctx.ChanceRecurrentFnOutput,
        {"action_logits": "B A", "value": " B", "reward": " B", "discount": " B"},
    ),
}

Model = Callable[[Any, PRNGKeyArray, Array, Any], tuple[Any, Any]]


def guard(
    functions: Sequence[Model],
    names: Sequence[str],
    root: Any,
    static: PyTree,
    *,
    batched: bool,
) -> list[Model]:
    """Wrap a policy's functions, so that what they return is right or refused by name.

    Args:
        functions: the user's.
        names: the policy's names of them.
        root: the roots, arrays only.
        static: what else the roots' embedding holds.
        batched: whether the functions take batches; else they are mapped.

    Returns:
        Functions of arrays alone, in the tree's precision.
    """
    # Embeddings by what they are of: states, and behind a decision the states before chance.
    parts = {"state": _one_row(eqx.combine(root.embedding, static))}

    def guard_one(name: str, function: Model) -> Model:
        output, axes = _FIELDS.get(name, _FIELDS["recurrent_fn"])
        left = "afterstate" if name == "chance_recurrent_fn" else "state"
        arrived = "afterstate" if name == "decision_recurrent_fn" else "state"

        def guarded(params: Any, key: PRNGKeyArray, actions: Array, arrays: Any) -> Any:
            # To JAX's check of reuse a key of its own: mctx asks twice with one key, and draws with
            # it, where only one of the numbers is taken.
            key = jax.random.clone(key)
            _, static = eqx.partition(parts[left], is_array)
            static_arrived: list[PyTree] = []

            def call(key: PRNGKeyArray, actions: Array, arrays: Any) -> Any:
                state = eqx.combine(show_keys(arrays), static)
                fields, embedding = _read(name, function(params, key, actions, state), axes)
                arrays, static_part = eqx.partition(embedding, is_array)
                static_arrived.append(static_part)
                return fields, hide_keys(arrays)

            if batched:
                fields, arrays = call(key, actions, arrays)
            else:
                keys = jax.random.split(key, actions.shape[0])
                fields, arrays = jax.vmap(call)(keys, actions, arrays)
            _check_fields(name, fields, axes, root, actions)
            embedding = eqx.combine(show_keys(arrays), static_arrived[0])
            wanted = _rows(parts.setdefault(arrived, _one_row(embedding)), actions.shape[0])
            check_embedding(f"search(): {name}", _map_arrays(_shape, embedding), wanted)
            fields, arrays = stop_gradient((_fit(fields, root), arrays))
            return output(**fields), arrays

        return guarded

    return [guard_one(name, f) for name, f in zip(names, functions, strict=True)]


def alternate(decide: Model, take_chance: Model, num_actions: int) -> Model:
    """A stochastic model as one function: actions are `0 .. A-1`, outcomes of chance above.

    Both functions are called for every row, as in mctx, and one result is dropped; but each
    with an action or outcome that exists.

    Args:
        decide: the guarded `decision_recurrent_fn`.
        take_chance: the guarded `chance_recurrent_fn`.
        num_actions: number of actions, `A`.

    Returns:
        The `recurrent_fn` over mctx's states of both kinds.
    """

    def recurrent_fn(params: Any, key: PRNGKeyArray, choices: Array, nodes: Any) -> Any:
        deciding = nodes.is_decision_node
        actions = jnp.where(deciding, choices, 0)
        outcomes = jnp.where(deciding, 0, choices - num_actions)
        decision, afterstates = decide(params, key, actions, nodes.state_embedding)
        chance, states = take_chance(params, key, outcomes, nodes.afterstate_embedding)
        nothing = jnp.full_like(chance.action_logits, -jnp.inf)
        no_outcome = jnp.full_like(decision.chance_logits, -jnp.inf)
        if_deciding = mctx.RecurrentFnOutput(
            reward=jnp.zeros_like(decision.afterstate_value),
            discount=jnp.ones_like(decision.afterstate_value),
            prior_logits=jnp.concatenate([nothing, decision.chance_logits], axis=1),
            value=decision.afterstate_value,
        )
        if_not = mctx.RecurrentFnOutput(
            reward=chance.reward,
            discount=chance.discount,
            prior_logits=jnp.concatenate([chance.action_logits, no_outcome], axis=1),
            value=chance.value,
        )
        nodes = nodes.replace(
            state_embedding=states,
            afterstate_embedding=afterstates,
            is_decision_node=~deciding,
        )
        return where(deciding, if_deciding, if_not), nodes

    return recurrent_fn


class _Keys(eqx.Module):
    """Random keys as the integers under them."""

    data: Shaped[Array, "..."]
    kind: Any = eqx.field(static=True)


def hide_keys(tree: PyTree) -> PyTree:
    """Typed keys as integers: to JAX's check of reuse, one that is read from an array is used."""

    def hide(x: Any) -> Any:
        if not (is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
            return x
        return _Keys(jax.random.key_data(x), jax.random.key_impl(x))

    return jax.tree.map(hide, tree)


def show_keys(tree: PyTree) -> PyTree:
    """What `hide_keys` was given."""

    def is_hidden(x: Any) -> bool:
        return isinstance(x, _Keys)

    def show(x: Any) -> Any:
        return jax.random.wrap_key_data(x.data, impl=x.kind) if is_hidden(x) else x

    return jax.tree.map(show, tree, is_leaf=is_hidden)


def _read(name: str, result: Any, axes: dict[str, str]) -> tuple[dict[str, Any], PyTree]:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"search(): {name} should return a step and an embedding, but returns "
            f"{describe(result)}."
        )
    step, embedding = result
    for field in axes:
        if not hasattr(step, field):
            raise TypeError(
                f"search(): {name} should return a step with {', '.join(axes)}, but "
                f"{describe(step)} has no {field}."
            )
    return {field: getattr(step, field) for field in axes}, embedding


def _check_fields(
    name: str,
    fields: dict[str, Any],
    axes: dict[str, str],
    root: Any,
    actions: Array,
) -> None:
    """By name: a stray tuple, a wrong rank or dtype, another number of rows or actions."""
    values = {"actions": (actions, Integer[Array, " B"])}
    logits = root.prior_logits[: actions.shape[0]]
    values["root.prior_logits"] = (logits, Float[Array, "B A"])
    for field, shape in axes.items():
        values[f"its {field}"] = (fields[field], Float[Array, shape])
    try:
        check_values(f"search(): {name}", values)
    except TypeError as error:
        raise TypeError(
            f"{error} It is called for a batch of states; if it is written for one, say "
            "batched=False."
        ) from None


def _fit(fields: dict[str, Array], root: Any) -> dict[str, Array]:
    """In the tree's precision; in a state behind an end what is not finite is 0."""

    def fit(name: str, x: Array) -> Array:
        if not name.endswith("logits"):
            return x.astype(root.value.dtype)
        wide = x.astype(root.prior_logits.dtype)
        # The lowest number of half precision is a mask there, and none in the tree.
        return wide if x.dtype == wide.dtype else mask_logits(wide, legal_actions(x))

    fields = {name: fit(name, x) for name, x in fields.items()}
    if "discount" in fields:
        is_end = fields["discount"] == 0
        fields["value"] = jnp.where(is_end & ~jnp.isfinite(fields["value"]), 0, fields["value"])
        for name in fields:
            if name.endswith("logits"):  # Minus infinity is a mask.
                fields[name] = jnp.where(is_end[:, None] & jnp.isnan(fields[name]), 0, fields[name])
    return fields


def _map_arrays(function: Callable[[Any], Any], embedding: PyTree) -> PyTree:
    return jax.tree.map(lambda x: function(x) if is_array(x) else x, embedding)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _one_row(embedding: PyTree) -> PyTree:
    """Shapes of one state, and what is no array."""
    return _map_arrays(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), embedding)


def _rows(one_row: PyTree, size: int) -> PyTree:
    return _map_arrays(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), one_row)


def stop_gradient(tree: PyTree) -> PyTree:
    """The same numbers, constant to any derivative."""
    is_float = eqx.is_inexact_array
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if is_float(x) else x, tree)
