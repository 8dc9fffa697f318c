"""The loop of a tree search, written for a whole batch of trees.

mctx grows one tree and maps the program over the batch. Its walk back to the root is then a
mapped `while` loop with the whole tree in its carry, and at every level of every simulation all
arrays `[B, N, A]` are copied to tell the trees that go on from those that are done: what a
simulation costs grows with the tree. Here all trees walk in step, and a level writes one entry
of each tree. The trees are the same as mctx's, number by number.

The loop is handed to mctx's own policies as their `loop_fn`, and works on `mctx.Tree`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, ScalarLike, Shaped

from .untyped import Tree, mctx

ROOT = mctx.Tree.ROOT_INDEX
UNVISITED = mctx.Tree.UNVISITED

# What a walk back to the root changes.
_CHANGING = ("node_values", "node_visits", "children_values", "children_visits")

# `(key, tree, node, depth, knobs) -> action`, of one tree.
Select = Callable[[PRNGKeyArray, Tree, Array, Array, dict[str, Array]], Array]
Loop = Callable[[int, int, Any, tuple[PRNGKeyArray, Tree]], tuple[PRNGKeyArray, Tree]]


class Rules(NamedTuple):
    """How a policy chooses where to go.

    Attributes:
        at_root: choice of an action at the root.
        inside: choice at any other node.
        knobs: numbers that both take, and that may be traced.
    """

    at_root: Select
    inside: Select
    knobs: dict[str, ScalarLike]


def make_loop(
    params: Any,
    recurrent_fn: Callable[..., tuple[Any, Any]],
    rules: Rules,
    roots: PyTree[Shaped[Array, "B ..."]] | None,
    max_depth: int | None,
    slice_size: int | None,
) -> Loop:
    """Build the `loop_fn` of a mctx policy.

    Args:
        params: first argument of `recurrent_fn`.
        recurrent_fn: the one given to the policy.
        rules: how the policy chooses.
        roots: embeddings of the roots; `None` where they are not those given to the policy. In
            slices the store that the policy makes for all states is then in memory too.
        max_depth: the one given to the policy.
        slice_size: how many trees to grow at a time; all if not given. Less memory is in use
            then, and the trees that are returned hold no embeddings.

    Returns:
        A function that ignores the policy's own loop body, and grows the same trees.
    """

    def loop(
        start: int, num_simulations: int, body: Any, carry: tuple[PRNGKeyArray, Tree]
    ) -> tuple[PRNGKeyArray, Tree]:
        del body
        key, trees = _spread_over_devices(carry, params, recurrent_fn)
        size, num_nodes = trees.node_values.shape
        deepest = num_simulations if max_depth is None else max_depth

        def grow(trees: Tree, own_keys: Callable[..., Any] = lambda *keys: keys) -> Tree:
            rows = len(trees.node_values)
            # What may be traced, and mapped, is data of each row.
            knobs = {n: jnp.broadcast_to(x, (rows,)) for n, x in rules.knobs.items()}
            # One tree is kept without its axis, which under `vmap` would stand in the way.
            squeeze, expand, for_all = _ONE_TREE if rows == 1 else _TREES

            def simulate(simulation: Array, carry: tuple[PRNGKeyArray, Tree]) -> Any:
                key, tree = carry
                # The same keys as mctx, and so the same numbers.
                key, select_key, expand_key = jax.random.split(key, 3)
                keys, expand_key = own_keys(jax.random.split(select_key, size), expand_key)
                walk = functools.partial(walk_down, rules, deepest)
                # What is as large as the states stays out of the walks.
                bare = tree.replace(embeddings=None)
                parents, actions, children = for_all(walk)(squeeze(keys), bare, squeeze(knobs))
                # The node first reached in simulation `i` is number `i + 1`; one that was there
                # before is met again only at the greatest depth.
                children = jnp.where(children == UNVISITED, simulation + 1, children)
                left = for_all(read)(tree.embeddings, parents)
                step, arrived = recurrent_fn(params, expand_key, expand(actions), expand(left))
                tree = for_all(write)(
                    tree, squeeze(step), squeeze(arrived), parents, actions, children
                )
                bare = tree.replace(embeddings=None, extra_data=None)
                changed = for_all(walk_up)(bare, children)
                return key, tree.replace(**dict(zip(_CHANGING, changed, strict=True)))

            # Each slice takes other rows of what the same keys give.
            carry = jax.random.clone(key), squeeze(trees)
            return expand(jax.lax.fori_loop(start, num_simulations, simulate, carry)[1])

        if slice_size is None:
            return key, grow(trees)
        part_size = slice_size

        def grow_part(arguments: Any) -> Tree:
            part, trees, roots = arguments

            def own_keys(keys: Shaped[Array, "B ..."], key: PRNGKeyArray) -> tuple[Array, Array]:
                keys = jax.lax.dynamic_slice_in_dim(keys, part * part_size, part_size)
                return keys, jax.random.fold_in(key, part)

            store = jax.tree.map(
                lambda x: jnp.zeros((part_size, num_nodes, *x.shape[1:]), x.dtype), roots
            )
            store = jax.tree.map(lambda x, root: x.at[:, ROOT].set(root), store, roots)
            return grow(trees.replace(embeddings=store), own_keys).replace(embeddings=None)

        parts = jax.tree.map(
            lambda x: x.reshape(-1, part_size, *x.shape[1:]),
            (trees.replace(embeddings=None), read_roots(trees) if roots is None else roots),
        )
        trees = jax.lax.map(grow_part, (jnp.arange(size // part_size), *parts))
        return key, jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), trees)

    return loop


def walk_down(
    rules: Rules,
    deepest: int,
    keys: Shaped[Array, "B ..."],
    tree: Tree,
    knobs: dict[str, Shaped[Array, " B"]],
) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
    """From the root of every tree along selected actions to one that was never taken.

    Args:
        rules: how to choose.
        deepest: number of edges after which a walk ends in any case.
        keys: one for each tree, consumed.
        tree: the trees.
        knobs: the rules' own numbers, for each tree.

    Returns:
        The node where each walk ended, the action to take from it, and where that leads:
        `UNVISITED` as a rule.
    """

    def select(choose: Select, keys: Shaped[Array, "B ..."], nodes: Array, depth: Array) -> Any:
        keys, select_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        of_all = jax.vmap(choose, in_axes=(0, 0, 0, None, 0))
        actions = of_all(select_keys, tree, nodes, depth, knobs)
        return keys, actions, _get(tree.children_index, nodes, actions)

    def step(carry: Any) -> Any:
        keys, nodes, actions, children, going, depth = carry
        keys, next_actions, next_children = select(rules.inside, keys, children, depth)
        nodes = jnp.where(going, children, nodes)
        actions = jnp.where(going, next_actions, actions)
        children = jnp.where(going, next_children, children)
        depth = depth + 1
        going &= (next_children != UNVISITED) & (depth < deepest)
        return keys, nodes, actions, children, going, depth

    roots = _spread(jnp.full(keys.shape[:1], ROOT), varying_axes(tree.parents))
    keys, actions, children = select(rules.at_root, keys, roots, jnp.zeros((), jnp.int32))
    going = (children != UNVISITED) & (deepest > 1)
    carry = (keys, roots, actions, children, going, jnp.ones((), jnp.int32))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[4]), step, carry)[1:4]


def read_roots(tree: Tree) -> PyTree:
    """The state that each tree begins with."""
    return jax.tree.map(lambda x: x[:, ROOT], tree.embeddings)


def read(embeddings: PyTree, nodes: Int[Array, " B"]) -> PyTree:
    """One state of each tree."""
    return jax.tree.map(lambda x: _get(x, nodes), embeddings)


def write(
    tree: Tree,
    step: Any,
    embeddings: PyTree,
    parents: Int[Array, " B"],
    actions: Int[Array, " B"],
    children: Int[Array, " B"],
) -> Tree:
    """Note where the model says that one action in each tree leads.

    Args:
        tree: the trees.
        step: what the model says of the edges and of the states arrived in.
        embeddings: these states.
        parents: the nodes left.
        actions: what was done there.
        children: numbers of the nodes arrived in.

    Returns:
        The trees with these nodes.
    """
    return tree.replace(
        node_visits=_set(tree.node_visits, _get(tree.node_visits, children) + 1, children),
        node_values=_set(tree.node_values, step.value, children),
        raw_values=_set(tree.raw_values, step.value, children),
        parents=_set(tree.parents, parents, children),
        action_from_parent=_set(tree.action_from_parent, actions, children),
        children_index=_set(tree.children_index, children, parents, actions),
        children_rewards=_set(tree.children_rewards, step.reward, parents, actions),
        children_discounts=_set(tree.children_discounts, step.discount, parents, actions),
        children_prior_logits=_set(tree.children_prior_logits, step.prior_logits, children),
        embeddings=jax.tree.map(lambda x, new: _set(x, new, children), tree.embeddings, embeddings),
    )


def walk_up(
    tree: Tree, leaves: Int[Array, " B"]
) -> tuple[Float[Array, "B N"], Int[Array, "B N"], Float[Array, "B N A"], Int[Array, "B N A"]]:
    """From a leaf of every tree back to the root, taking its value into all means on the way.

    Args:
        tree: the trees.
        leaves: the nodes that were just evaluated.

    Returns:
        Values and visits of the nodes, and of their children, up to date.
    """
    # Nothing is written where a tree has no such node: where a walk is over.
    nowhere = tree.node_visits.shape[1]

    def step(carry: Any) -> Any:
        means, visits, children_means, children_visits, nodes, arrived, returns = carry
        going = nodes != ROOT
        parents = jnp.where(going, _get(tree.parents, nodes), ROOT)
        actions = jnp.where(going, _get(tree.action_from_parent, nodes), 0)
        rewards = _get(tree.children_rewards, parents, actions)
        discounts = _get(tree.children_discounts, parents, actions)
        # Where an episode ends nothing behind it counts, neither NaN nor infinity.
        is_end = discounts == 0
        arrived, returns = (jnp.where(is_end & ~jnp.isfinite(x), 0, x) for x in (arrived, returns))
        returns = rewards + discounts * returns
        count = _get(visits, parents)
        mean = (_get(means, parents) * count + returns) / (count + 1.0)
        edge_count = _get(children_visits, parents, actions)
        places = jnp.where(going, parents, nowhere)
        return (
            _set(means, mean, places),
            _set(visits, count + 1, places),
            _set(children_means, arrived, places, actions),
            _set(children_visits, edge_count + 1, places, actions),
            parents,
            mean,
            returns,
        )

    value = _get(tree.node_values, leaves)
    carry = (*(tree[name] for name in _CHANGING), leaves, value, value)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[4] != ROOT), step, carry)[:4]


def _get(x: Shaped[Array, "B N ..."], *places: Int[Array, " B"]) -> Shaped[Array, "B ..."]:
    """One entry of each tree."""
    rows = jnp.arange(x.shape[0])
    return x.at[(rows, *places)].get(mode="promise_in_bounds")


def _set(
    x: Shaped[Array, "B N ..."], values: Shaped[Array, "B ..."], *places: Int[Array, " B"]
) -> Shaped[Array, "B N ..."]:
    """One entry of each tree, in place; none where the place is beyond the tree."""
    rows = jnp.arange(x.shape[0])
    return x.at[(rows, *places)].set(values, mode="drop", unique_indices=True)


def _for_all_trees(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of trees `[B, ...]` that under `vmap` is called once, with all axes as one.

    Mapped as it is, a loop would copy whole trees to tell those that go on from the others.
    """

    def in_standard_types(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # mctx mixes integers and floats.
            return function(*args)

    call = jax.custom_batching.custom_vmap(in_standard_types)

    @call.def_vmap
    def call_with_one_axis(size: int, is_mapped: Any, *args: Any) -> Any:
        args = _map_all(size, is_mapped, args)
        result = call(*jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), args))
        result = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), result)
        return result, jax.tree.map(lambda _: True, result)

    return call


def _for_one_tree(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of trees `[B, ...]` for one tree without the `B`, which `vmap` then brings."""
    of_trees = _for_all_trees(function)
    call = jax.custom_batching.custom_vmap(lambda *args: _without_axis(function(*_with_axis(args))))

    @call.def_vmap
    def call_with_the_axis(size: int, is_mapped: Any, *args: Any) -> Any:
        result = of_trees(*_map_all(size, is_mapped, args))
        return result, jax.tree.map(lambda _: True, result)

    return call


def _map_all(size: int, is_mapped: Any, args: Any) -> Any:
    return jax.tree.map(
        lambda x, mapped: x if mapped else jnp.broadcast_to(x, (size, *x.shape)),
        args,
        tuple(is_mapped),
    )


def _with_axis(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], tree)


def _without_axis(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)


# How trees are kept between two simulations: how to get there from the axis `B`, how to get
# back, and how to call what takes that axis.
_TREES = (lambda trees: trees, lambda trees: trees, _for_all_trees)
_ONE_TREE = (_without_axis, _with_axis, _for_one_tree)


def _spread_over_devices(carry: Any, params: Any, recurrent_fn: Callable[..., Any]) -> Any:
    """Under `shard_map`, mark what goes round the loop as different on each device."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return carry
    key, tree = carry
    roots = read_roots(tree)
    actions = tree.action_from_parent[:, ROOT]
    stepped = jax.eval_shape(functools.partial(recurrent_fn, params), key, actions, roots)
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves((carry, stepped))))
    return jax.tree.map(lambda x: _spread(x, axes), carry)


def _spread(x: Array, axes: frozenset[str]) -> Array:
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def varying_axes(x: Any) -> frozenset[str]:
    """Axes of the mesh along which an array differs, as far as `shard_map` checks it."""
    kind = (jax.typeof(x) if isinstance(x, jax.Array) else x).manual_axis_type
    return frozenset(kind.varying) if kind else frozenset()
