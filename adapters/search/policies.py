"""Tree search with mctx's policies, for Equinox modules, single states and many devices.

`search` takes what mctx's policies take, under the same names, and gives what they give. It
takes more, and refuses what would go wrong in silence: see there.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree
from mctx import PolicyOutput

from vernal.core import mask_logits
from vernal.core._arrays import widen
from vernal.core._checks import check_values, describe

from ..modules import is_array, unpack
from .engine import Rules, make_loop, varying_axes
from .models import alternate, guard, hide_keys, show_keys, stop_gradient
from .selection import (
    draw_by_visits,
    gumbel_muzero_rules,
    legal_actions,
    muzero_rules,
    qtransform_completed_by_mix_value,
    stochastic_muzero_rules,
)
from .untyped import mctx

Engine = Literal["vernal", "mctx"]

_RULES: dict[str, Callable[..., Rules]] = {
    "gumbel_muzero": gumbel_muzero_rules,
    "muzero": muzero_rules,
    "stochastic_muzero": stochastic_muzero_rules,
}
_DEFAULTS = {"gumbel_muzero": {"qtransform": qtransform_completed_by_mix_value}}
# Knobs of mctx's policies that are numbers, and may be traced.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "0 or more"),
    "dirichlet_fraction": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "dirichlet_alpha": (lambda x: 0 < x < np.inf, "above 0"),
    "pb_c_init": (lambda x: 0 <= x < np.inf, "0 or more"),
    "pb_c_base": (lambda x: 0 < x < np.inf, "above 0"),
    "gumbel_scale": (lambda x: 0 <= x < np.inf, "0 or more"),
}
# What `search` itself hands to a policy; all else are the policy's own knobs.
_GIVEN = {"params", "rng_key", "root", "num_simulations", "invalid_actions", "max_depth", "loop_fn"}


def search(
    params: Any,
    key: PRNGKeyArray,
    root: Any,
    recurrent_fn: Any,
    num_simulations: int,
    legal: Bool[Array, "*B A"] | None = None,
    *,
    policy: str | Callable[..., PolicyOutput[Any]] = "gumbel_muzero",
    max_depth: int | None = None,
    batched: bool = True,
    engine: Engine = "vernal",
    slice_size: int | None = None,
    same_on_devices: bool = False,
    **knobs: Any,
) -> PolicyOutput[Any]:
    """Search a tree from one state, or from each of a batch of states.

    mctx's policies (https://github.com/google-deepmind/mctx) with these differences:

    - `params` may be an Equinox module, and so may the embedding; a `Packed` module is unpacked.
    - One root works as a batch does, and `vmap` over single roots costs what a batch costs.
    - Illegal actions are avoided at every node. At the root they are those that `legal` or the
      logits mask, elsewhere those that the logits mask (`core.mask_logits`, -inf, -1e9). By
      default Q-values are rescaled over the legal actions only. A root where nothing is legal
      is searched as if everything were, as `core.mask_logits` has it.
    - The tree is float32 at least, whatever precision the network has.
    - Behind an edge of discount 0 what is not finite counts as 0.
    - `muzero` and `stochastic_muzero` draw an action in proportion to
      `visits ** (1 / temperature)`, and so, at any temperature, none that is illegal.
    - Results have no gradient: the search is a target, not a part of the loss.
    - Under `shard_map` and `pmap` a key that is the same on all devices gives each other noise,
      unless `same_on_devices` says that a key gives the same noise wherever it is used.

    With fewer simulations than actions take `gumbel_muzero`: to the other policies what was not
    tried is as bad as the worst that was, and all visits may go to the first action tried, good
    or bad. Their Dirichlet noise is drawn over all actions; those that are illegal lose theirs,
    so where few are legal the share of noise is smaller than `dirichlet_fraction`.

    Args:
        params: first argument of `recurrent_fn`.
        key: consumed.
        root: has `prior_logits` `[B, A]`, `value` `[B]` and `embedding`, a tree of arrays
            `[B, ...]`: a `core.Root` or `mctx.RootFnOutput`. Without the `B` for one state.
        recurrent_fn: `(params, key, actions, embeddings) -> (step, embeddings)`, where the step
            has `reward`, `discount`, `value` `[B]` and `prior_logits` `[B, A]`; see
            `core.make_recurrent_fn`. For `stochastic_muzero` the pair of
            `decision_recurrent_fn` and `chance_recurrent_fn`.
        num_simulations: how many nodes to evaluate, 1 at least.
        legal: true where an action may be taken at the root; by default as the logits say.
        policy: `gumbel_muzero`, `muzero`, `stochastic_muzero`, or whatever else the installed
            mctx has as `..._policy`, or such a function.
        max_depth: greatest number of edges from the root; `num_simulations` by default.
        batched: false if `recurrent_fn` is written for one state, without the `B`; it is then
            mapped, and each row has a key of its own.
        engine: `vernal` grows the same tree faster; `mctx` is mctx's own loop, which knows
            neither masks inside the tree nor NaN. Policies not named here always have that.
        slice_size: how many trees of a batch to grow at a time, all by default. Where states
            are large, 8 or 16 are several times faster on a CPU. `recurrent_fn` is then called
            with so many rows and keys of their own, and the trees hold no embeddings.
        same_on_devices: leave the key as it is under `shard_map` and `pmap`: for keys that are
            each state's own already.
        **knobs: the policy's own, `gumbel_scale` or `qtransform` say.

    Returns:
        mctx's `PolicyOutput`: `action`, `action_weights`, `search_tree`; of one state without
        the `B`. Where the embedding's leaves are no arrays the tree's are `None`.

    Raises:
        TypeError: a shape or dtype is wrong, or the policy has no such knob.
        ValueError: a number is out of range, or a name unknown; or over a mesh of explicit axes
            `recurrent_fn` closes over arrays of that mesh.

    Example:
        A corridor whose right end pays 1, three steps away:

        >>> import jax, jax.numpy as jnp
        >>> from vernal.core import ModelTransition, Prediction, make_recurrent_fn, make_root
        >>> def predict(params, position):
        ...     return Prediction(jnp.zeros(2), jnp.array(0.0), jnp.array([True, True]))
        >>> def transition(params, key, action, position):
        ...     position = jnp.maximum(position + 2 * action - 1, 0)
        ...     at_end = position == 3
        ...     return ModelTransition(position, at_end * 1.0, at_end, jnp.array(0))
        >>> root = make_root(predict, None, jnp.array([0, 1, 2]))
        >>> recurrent_fn = make_recurrent_fn(predict, transition, gamma=0.9)
        >>> search(None, jax.random.key(0), root, recurrent_fn, 16).action.tolist()
        [1, 1, 1]
    """
    name, run = _find_policy(policy)
    check_values("search()", {"key": (key, PRNGKeyArray)})
    if engine not in get_args(Engine):
        raise ValueError(f"search(): engine should be vernal or mctx, but is {engine!r}.")
    _check_counts(
        num_simulations=num_simulations,
        max_depth=max_depth,
        slice_size=slice_size,
        max_num_considered_actions=knobs.get("max_num_considered_actions"),
    )
    _check_knobs(name, run, knobs)
    logits, value, embedding, allowed, is_single = _read_root(root, legal)
    rows = _find_rows((root.prior_logits, root.value, embedding, legal), (params, key))
    if slice_size is not None:
        slice_size = _fit_slices(slice_size, logits, engine, name)
    # A number of NumPy, or another temperature, is no other program.
    num_simulations, max_depth = int(num_simulations), max_depth and int(max_depth)
    knobs = {n: _fit_knob(n, x) for n, x in knobs.items()}
    arrays, static = _split_embedding(embedding, None if is_single else logits.shape[0])
    if is_single:
        logits, value, arrays, allowed = jax.tree.map(
            lambda x: jnp.asarray(x)[None], (logits, value, arrays, allowed)
        )
    if not same_on_devices:
        key = _key_of_this_device(key, (logits, value, arrays))
    output = (_run if _is_part_of_a_program() else _run_eagerly)(
        _Search(name, run, num_simulations, max_depth, batched, engine, slice_size, static, rows),
        unpack(params),
        key,
        mctx.RootFnOutput(prior_logits=logits, value=value, embedding=arrays),
        recurrent_fn,
        allowed,
        knobs,
    )
    return jax.tree.map(lambda x: x[0], output) if is_single else output


class _Search(NamedTuple):
    """What decides the program, and is no array."""

    policy: str
    run: Callable[..., PolicyOutput[Any]]
    num_simulations: int
    max_depth: int | None
    batched: bool
    engine: Engine
    slice_size: int | None
    static_embedding: PyTree
    rows: NamedSharding | None


def _find_policy(policy: str | Callable[..., PolicyOutput[Any]]) -> tuple[str, Any]:
    known = {n.removesuffix("_policy"): f for n, f in vars(mctx).items() if n.endswith("_policy")}
    if isinstance(policy, str):
        if policy not in known:
            raise ValueError(
                f"search(): there is no policy {policy!r} in mctx; choose of {', '.join(known)}."
            )
        return policy, known[policy]
    name = next((name for name, function in known.items() if function is policy), "")
    return name or f"{getattr(policy, '__name__', 'given')}()", policy


def _check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        if count is None and name != "num_simulations":
            continue
        if isinstance(count, Tracer | bool) or not isinstance(count, int | np.integer):
            raise TypeError(
                f"search(): {name} should be a Python int, for the tree's size is fixed when the "
                f"search is compiled, but is {describe(count)}."
            )
        if count < 1:
            raise ValueError(f"search(): {name} should be 1 at least, but is {count}.")


def _fit_slices(slice_size: int, logits: Array, engine: Engine, policy: str) -> int | None:
    """How many trees to grow at a time, unless that is all."""
    if engine == "mctx" or policy not in _RULES:
        raise ValueError(
            f"search(): slice_size is for vernal's own loop, with {', '.join(_RULES)}; leave it "
            "away."
        )
    if logits.ndim == 1:
        raise ValueError("search(): slice_size is for a batch of roots; leave it away for one.")
    size = logits.shape[0]
    if slice_size >= size:
        return None
    if size % slice_size:
        raise ValueError(
            f"search(): slice_size is {slice_size}, which does not divide {size} roots."
        )
    return int(slice_size)


def _recurrent_names(run: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(run).parameters if name.endswith("recurrent_fn")]


def _check_knobs(policy: str, run: Callable[..., Any], knobs: Mapping[str, Any]) -> None:
    given = {*_GIVEN, *_recurrent_names(run)}
    names = [name for name in inspect.signature(run).parameters if name not in given]
    if "invalid_actions" in knobs:
        raise TypeError("search(): in place of invalid_actions give legal, true where it is legal.")
    for name, value in knobs.items():
        if name not in names:
            raise TypeError(
                f"search(): the policy {policy} has no knob {name!r}; it has {', '.join(names)}."
            )
        is_right, wanted = _is_number(value), "a number"
        if name == "qtransform":
            is_right, wanted = callable(value), "a function"
        elif name not in _RANGES:
            is_right |= is_array(value)
        if not is_right:
            raise TypeError(f"search(): {name} should be {wanted}, but is {describe(value)}.")
        is_within, wanted = _RANGES.get(name, (None, ""))
        if is_within and not isinstance(value, Tracer) and not is_within(float(value)):
            raise ValueError(f"search(): {name} should be {wanted}, but is {value}.")


def _is_number(value: Any) -> bool:
    """A real number of Python, NumPy or JAX, traced or not."""
    if isinstance(value, bool | int | float):
        return not isinstance(value, bool)
    return (
        is_array(value)
        and value.ndim == 0
        and any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating))
    )


def _fit_knob(name: str, value: Any) -> Any:
    """Numbers as floats, float32 at least; a count as Python's own; the rest as it is."""
    if name == "max_num_considered_actions":
        return int(value)
    if name in _RANGES and is_array(value) and jnp.issubdtype(value.dtype, jnp.floating):
        return widen(jnp.asarray(value))
    return jnp.float32(value) if name in _RANGES or isinstance(value, float) else value


def _read_root(
    root: Any, legal: Any
) -> tuple[Float[Array, "*B A"], Float[Array, " *B"], PyTree, Bool[Array, "*B A"], bool]:
    """Logits, value, embedding, legal actions, and whether it is one state."""
    for field in ("prior_logits", "value", "embedding"):
        if not hasattr(root, field):
            raise TypeError(
                f"search(): root should have prior_logits, value and embedding, but "
                f"{describe(root)} has no {field}."
            )
    logits, value = (
        jnp.asarray(x) if isinstance(x, np.ndarray | np.generic | float) else x
        for x in (root.prior_logits, root.value)
    )
    is_single = getattr(logits, "ndim", None) == 1
    hints = (Float[Array, " A"], Float[Array, ""], Bool[Array, " A"])
    if not is_single:
        hints = (Float[Array, "B A"], Float[Array, " B"], Bool[Array, "B A"])
    values = {"root.prior_logits": (logits, hints[0]), "root.value": (value, hints[1])}
    if legal is not None:
        values["legal"] = (jnp.asarray(legal), hints[2])
    check_values("search()", values)
    possible = legal_actions(logits)
    legal = possible if legal is None else jnp.asarray(legal) & _not_opposite(legal, possible)
    legal |= ~jnp.any(legal, axis=-1, keepdims=True)
    # -inf everywhere would be NaN once the largest is taken off.
    logits = jnp.maximum(widen(logits), jnp.finfo(widen(logits).dtype).min)
    return mask_logits(logits, legal), widen(value), root.embedding, legal, is_single


def _not_opposite(legal: Any, possible: Bool[Array, "*B A"]) -> Bool[Array, "*B A"]:
    """What the logits leave possible, unless `legal` says the opposite; seen eagerly alone."""
    contradicts = jnp.any(legal, axis=-1) & ~jnp.any(legal & possible, axis=-1)
    if not isinstance(contradicts, Tracer) and bool(jnp.any(contradicts)):
        raise ValueError(
            "search(): legal leaves only actions that the logits of the root mask; true should "
            "mean legal."
        )
    return possible


def _split_embedding(embedding: PyTree, size: int | None) -> tuple[PyTree, PyTree]:
    """Arrays, and the rest: functions and other constants of the states' classes."""
    for path, leaf in jax.tree.leaves_with_path(embedding):
        place = f"root.embedding{jax.tree_util.keystr(path)}"
        if is_array(leaf):
            if size is not None and (leaf.ndim == 0 or leaf.shape[0] != size):
                raise TypeError(
                    f"search(): {place} should have {size} rows, as many as root.value, but is "
                    f"{describe(leaf)}."
                )
        elif not (callable(leaf) or isinstance(leaf, str | bytes | int | float | complex)):
            raise TypeError(
                f"search(): {place} is a {type(leaf).__name__}, whose arrays JAX cannot see; make "
                "its class an eqx.Module, or register it with jax.tree_util.register_dataclass."
            )
    return eqx.partition(embedding, is_array)


def _key_of_this_device(key: PRNGKeyArray, states: PyTree) -> PRNGKeyArray:
    """Other noise on each device that searches from other states, if the key is the same."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if _is_checked_by_shard_map():
        axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(states)))
        axes = tuple(sorted(axes - varying_axes(key)))
    for axis in axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key


def _is_checked_by_shard_map() -> bool:
    """Whether this is inside `shard_map`, and it knows what differs between devices."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return bool(axes) and bool(varying_axes(jax.lax.axis_index(axes)))


def _run(task: _Search, *data: Any) -> PolicyOutput[Any]:
    """Search, wherever on a mesh the arrays are; takes what `_run_policy` takes."""
    arrays, static = eqx.partition(data, is_array)

    def body(arrays: Any) -> PolicyOutput[Any]:
        with jax.numpy_dtype_promotion("standard"):  # mctx mixes integers and floats.
            return _run_policy(task, *eqx.combine(arrays, static))

    if task.rows is None:
        return body(arrays)
    # Neither mctx nor `vmap` say how to place what they make beside the roots.
    auto: Any = jax.sharding.auto_axes(body, out_sharding=task.rows.spec)
    try:
        with jax.sharding.use_abstract_mesh(task.rows.mesh.abstract_mesh):
            return auto(arrays)
    except ValueError as error:
        if "context mesh" not in str(error):
            raise
        raise ValueError(
            "search(): over a mesh of explicit axes recurrent_fn can use only arrays that it is "
            "given; hand it those that it closes over as params."
        ) from error


# Eagerly too a search is compiled once for each model and size.
_run_eagerly = eqx.filter_jit(_run)


def _is_part_of_a_program() -> bool:
    """Whether what is computed here is compiled anyway.

    Then nothing of a search may be kept for the next one: `recurrent_fn` may know numbers that
    are this program's own.
    """
    false = _make_false()
    try:
        return isinstance(false, Tracer) and bool(false)
    except jax.errors.ConcretizationTypeError:
        return True  # What a tracer stands for is unknown, but for eager `shard_map`.


# Compiled, for eagerly that is the cheapest way to make an array.
_make_false = jax.jit(lambda: jnp.zeros((), bool))


def _find_rows(roots: PyTree, others: PyTree) -> NamedSharding | None:
    """How to spread the trees, if anything is placed on a mesh of explicit axes."""

    def shardings(tree: PyTree) -> list[Any]:
        found = [jax.typeof(x).sharding for x in jax.tree.leaves(tree) if eqx.is_array(x)]
        return [s for s in found if AxisType.Explicit in s.mesh.axis_types]

    of_roots = shardings(roots)
    split = [s.spec[0] for s in of_roots if s.spec and s.spec[0]]
    placed = of_roots + shardings(others)
    return NamedSharding(placed[0].mesh, PartitionSpec(*split[:1])) if placed else None


def _run_policy(
    task: _Search,
    params: Any,
    key: PRNGKeyArray,
    root: Any,
    recurrent_fn: Any,
    legal: Bool[Array, "B A"],
    knobs: Mapping[str, Any],
) -> PolicyOutput[Any]:
    names = _recurrent_names(task.run)
    functions = recurrent_fn if len(names) > 1 else (recurrent_fn,)
    is_right = isinstance(functions, tuple | list) and len(functions) == len(names)
    if not is_right or not all(map(callable, functions)):
        wanted = "a function" if len(names) == 1 else f"{len(names)} functions"
        raise TypeError(
            f"search(): the policy {task.policy} wants {wanted}, {', '.join(names)}, but "
            f"recurrent_fn is {describe(recurrent_fn)}."
        )
    root, knobs = stop_gradient((root, knobs))
    guarded = guard(functions, names, root, task.static_embedding, batched=task.batched)
    root = root.replace(embedding=hide_keys(root.embedding))
    knobs = {**_DEFAULTS.get(task.policy, {}), **knobs}
    loop = {}
    if (task.engine == "mctx" or task.policy not in _RULES) and _is_checked_by_shard_map():
        raise ValueError(
            "search(): mctx's own loop does not work under shard_map with its default checks; "
            "let it have check_vma=False, or use vernal's loop."
        )
    if task.engine == "vernal" and task.policy in _RULES:
        num_actions = root.prior_logits.shape[1]
        rules = _RULES[task.policy](task.num_simulations, num_actions, **knobs)
        model = guarded[0] if len(guarded) == 1 else alternate(guarded[0], guarded[1], num_actions)
        loop["loop_fn"] = make_loop(
            params,
            model,
            rules,
            root.embedding if len(guarded) == 1 else None,
            task.max_depth,
            task.slice_size,
        )
    output: Any = task.run(
        params=params,
        rng_key=key,
        root=root,
        num_simulations=task.num_simulations,
        invalid_actions=~legal,
        max_depth=task.max_depth,
        **dict(zip(names, guarded, strict=True)),
        **knobs,
        **loop,
    )
    if task.policy in _RULES and "temperature" in inspect.signature(task.run).parameters:
        temperature = knobs.get("temperature", 1.0)
        # Drawn once more with the key that mctx drew with, and instead of it.
        drawn = draw_by_visits(jax.random.clone(key), output.action_weights, temperature)
        output = output.replace(action=drawn)
    return show_keys(output)
