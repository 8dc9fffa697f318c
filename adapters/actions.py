"""From an environment's action spec to a policy's distribution, and back.

A spec and its mask fall into one of four kinds:

- one choice (`DiscreteArray`): a categorical head;
- several choices with a mask over their product, as in Minesweeper, or without a mask and few:
  one categorical head over all joint actions;
- several choices, each with its own mask, as with several agents, or without one and many: as
  many heads;
- bounded floats: a squashed normal per coordinate.
"""

import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped
from jumanji import specs

from vernal.core import Categorical, FactorisedCategorical, SquashedNormal, mask_logits

from .checks import require_members, require_specs
from .environments import Environment, read_specs

# What a mask is called, true where an action is legal, by Jumanji and Gymnasium, pgx, OpenSpiel,
# SMAC and those who follow them.
MASK_NAMES = (
    "action_mask",
    "action_masks",
    "legal_action_mask",
    "legal_actions_mask",
    "legal_actions",
    "legal_moves",
    "valid_action_mask",
    "valid_actions",
    "avail_actions",
    "available_actions",
)
# Without a mask that says which: more joint actions than this are as many heads.
_JOINT_LIMIT = 1024
# Heads whose product makes more edges than these at every node of a search tree are refused.
_MOST_EDGES = 4096


@runtime_checkable
class Distribution(Protocol):
    """What the core's distributions have in common."""

    def sample(self, key: PRNGKeyArray) -> Array:
        """One action; the key is consumed."""
        ...

    def log_prob(self, actions: Any) -> Array:
        """Log-probability of an action, in nats."""
        ...

    def entropy(self) -> Array:
        """Entropy, in nats."""
        ...

    def mode(self) -> Array:
        """The most probable action."""
        ...


class ActionCodec(NamedTuple):
    """How a network's outputs become actions of one environment.

    Attributes:
        kind: `categorical`, `joint`, `factorised` or `normal`.
        output_shape: shape of the policy's outputs for one state.
        choices: number of values of each component of the action (discrete kinds).
        action_shape: shape of the environment's action.
        dtype: its dtype.
        low: lower bounds (continuous kind).
        high: upper bounds (continuous kind).
        mask: names that lead to what says in an observation which actions are legal; `None` if
            nothing does.
    """

    kind: str
    output_shape: tuple[int, ...]
    choices: tuple[int, ...]
    action_shape: tuple[int, ...]
    dtype: Any
    low: Any = None
    high: Any = None
    mask: tuple[str, ...] | None = None

    @property
    def axes(self) -> tuple[int, ...]:
        """What the outputs' axes are before they are flattened: agents, choices, coordinates."""
        if self.kind == "normal":
            return (*self.action_shape, 2)
        return self.output_shape if self.kind == "factorised" else self.choices

    def from_axes(self, outputs: Float[Array, "..."]) -> Float[Array, "..."]:
        """Outputs in `output_shape` from outputs in `axes`."""
        if self.kind == "normal":
            outputs = jnp.moveaxis(outputs, -1, 0)
        return outputs.reshape(self.output_shape)

    def legal(self, observation: Any) -> Bool[Array, "..."] | None:
        """Which outputs are legal in one state; `None` where the environment has no mask."""
        mask = None if self.mask is None else read_path(observation, self.mask)
        if self.kind == "factorised":
            padding = np.arange(self.output_shape[1]) < np.asarray(self.choices)[:, None]
            padding = jnp.asarray(padding)
            return padding if mask is None else mask.reshape(self.output_shape) & padding
        return None if mask is None else mask.reshape(self.output_shape)

    def distribution(
        self, outputs: Float[Array, "..."], legal: Bool[Array, "..."] | None
    ) -> Distribution:
        """Policy in one state, from a network's outputs there.

        Args:
            outputs: shape `output_shape`; logits, or means and pre-softplus deviations.
            legal: from `legal`.

        Returns:
            One of the core's distributions; illegal actions have probability 0.
        """
        if self.kind == "normal":
            return SquashedNormal(outputs[0], jax.nn.softplus(outputs[1]) + 1e-3)
        logits = outputs if legal is None else mask_logits(outputs, legal)
        return FactorisedCategorical(logits) if self.kind == "factorised" else Categorical(logits)

    def to_environment(self, action: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The environment's action for one sampled from the distribution."""
        if self.kind == "normal":
            centre, half = (self.high + self.low) / 2, (self.high - self.low) / 2
            return (centre + half * action.reshape(self.action_shape)).astype(self.dtype)
        if self.kind == "joint":
            action = jnp.stack(jnp.unravel_index(action, self.choices))
        return action.reshape(self.action_shape).astype(self.dtype)


def make_action_codec(environment: Environment) -> ActionCodec:
    """Read an environment's action spec and mask.

    Args:
        environment: with Jumanji's `action_spec` and `observation_spec`.

    Returns:
        The codec.

    Raises:
        ValueError: the action spec is of none of the four kinds, or the mask does not fit it; or
            this is no environment.

    Warns:
        UserWarning: nothing is known by name as the mask, but something has its shape.

    Example:
        >>> import jumanji
        >>> make_action_codec(jumanji.make("Snake-v1")).output_shape
        (4,)
        >>> make_action_codec(jumanji.make("Minesweeper-v0")).output_shape
        (100,)
        >>> make_action_codec(jumanji.make("Connector-v3")).output_shape
        (10, 5)
    """
    require_members(environment)
    observation_spec, spec = read_specs(environment)
    require_specs("the environment", observation_spec=observation_spec, action_spec=spec)
    leaves = dict(spec_leaves(observation_spec))
    mask = _find_mask(leaves)
    codec = _read_action(spec, None if mask is None else tuple(leaves[mask].shape))
    if codec.kind == "normal":
        return codec
    if mask is None:
        _warn_of_unread_masks(leaves, codec)
    return codec._replace(mask=mask)


def spec_leaves(
    spec: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], specs.Array]]:
    """Each array of a spec, with the names that lead to it, outermost first.

    Example:
        >>> import jumanji
        >>> [path for path, _ in spec_leaves(jumanji.make("Snake-v1").observation_spec)]
        [('grid',), ('step_count',), ('action_mask',)]
    """
    if isinstance(spec, specs.Array):
        yield path, spec
        return
    for name, part in spec._specs.items():
        yield from spec_leaves(part, (*path, name))


def read_path(observation: Any, path: tuple[str, ...]) -> Any:
    """What the names of `spec_leaves` lead to in an observation."""
    return functools.reduce(getattr, path, observation)


def _find_mask(leaves: dict[tuple[str, ...], specs.Array]) -> tuple[str, ...] | None:
    """Where the action mask stands: the name that comes first in the list, then the outermost."""
    known = [
        path
        for path, leaf in leaves.items()
        # Numbers of another name may mean something else, as a list of the legal actions.
        if path and path[-1] in MASK_NAMES and (leaf.dtype == bool or path[-1] == MASK_NAMES[0])
    ]
    return min(known, key=lambda p: (MASK_NAMES.index(p[-1]), len(p)), default=None)


def _warn_of_unread_masks(leaves: dict[tuple[str, ...], specs.Array], codec: ActionCodec) -> None:
    """Say that something looks like a mask and is not read as one."""
    heads = (len(codec.choices), max(codec.choices))
    for path, leaf in leaves.items():
        is_likely = leaf.dtype == bool or not {*path[-1:]}.isdisjoint(MASK_NAMES)
        if is_likely and tuple(leaf.shape) in (codec.choices, codec.output_shape, heads):
            warnings.warn(
                f"the observation's '{'.'.join(path)}' has the shape of an action mask, but is not "
                "read as one: if it is, call it action_mask and make it boolean, true where an "
                "action is legal.",
                stacklevel=1,  # Once for all who read the same environment.
            )


def _read_action(spec: Any, mask_shape: tuple[int, ...] | None) -> ActionCodec:
    # Discrete and multi-discrete specs are bounded ones too: from the narrow to the wide.
    if isinstance(spec, specs.DiscreteArray):
        count = int(spec.num_values)
        _require_mask(mask_shape, (count,))
        return ActionCodec("categorical", (count,), (count,), (), spec.dtype)
    if isinstance(spec, specs.MultiDiscreteArray):
        choices = tuple(int(n) for n in np.asarray(spec.num_values).ravel())
        is_small = mask_shape is None and math.prod(choices) <= _JOINT_LIMIT
        if mask_shape == choices or is_small:
            return ActionCodec("joint", (math.prod(choices),), choices, spec.shape, spec.dtype)
        heads = (len(choices), max(choices))
        _require_mask(mask_shape, heads, choices)
        return ActionCodec("factorised", heads, choices, spec.shape, spec.dtype)
    if isinstance(spec, specs.BoundedArray):
        size = math.prod(spec.shape)
        if jnp.issubdtype(spec.dtype, jnp.floating):
            low, high = (np.broadcast_to(b, spec.shape) for b in (spec.minimum, spec.maximum))
            if np.all(np.isfinite(low)) and np.all(np.isfinite(high)):
                return ActionCodec("normal", (2, size), (), spec.shape, spec.dtype, low, high)
        elif mask_shape and mask_shape[:-1] == spec.shape and not np.asarray(spec.minimum).any():
            # The mask says how many values there are: a bound may say one too many (MultiCVRP).
            choices = (mask_shape[-1],) * size
            return ActionCodec("factorised", (size, choices[0]), choices, spec.shape, spec.dtype)
    raise ValueError(
        f"the action spec {spec} cannot be served: wanted a discrete or multi-discrete action, "
        "bounded integers with a mask per component, or floats with finite bounds."
    )


def as_one_choice(codec: ActionCodec) -> ActionCodec:
    """The same actions as one choice, as a search tree wants it: several heads are multiplied.

    Args:
        codec: of an environment.

    Returns:
        A codec whose `output_shape` is `(A,)`; `one_choice` turns outputs and masks into it.

    Raises:
        ValueError: actions are continuous, or there are too many.

    Example:
        >>> import jumanji
        >>> as_one_choice(make_action_codec(jumanji.make("LevelBasedForaging-v0"))).output_shape
        (36,)
    """
    if codec.kind == "normal":
        raise ValueError(
            "a search tree has an edge for every action, and these are continuous; PPO serves them."
        )
    size = math.prod(codec.choices)
    if codec.kind == "factorised" and size > _MOST_EDGES:
        heads = " x ".join(map(str, codec.choices))
        raise ValueError(
            f"a search tree has an edge for every action, and {heads} choices make {size:,}, "
            f"more than {_MOST_EDGES:,}; PPO serves them."
        )
    kind = "categorical" if codec.kind == "categorical" else "joint"
    return codec._replace(kind=kind, output_shape=(size,))


def one_choice(
    codec: ActionCodec, outputs: Float[Array, "..."], legal: Bool[Array, "..."] | None
) -> tuple[Float[Array, " A"], Bool[Array, " A"]]:
    """Masked logits over all actions at once, from a network's outputs in one state.

    Args:
        codec: of the environment, discrete.
        outputs: shape `output_shape`.
        legal: from `legal`; all where it is `None`.

    Returns:
        Logits and legal actions of `as_one_choice(codec)`. Several heads are independent: an
        action's logit is the sum of its parts' log-probabilities.

    Example:
        >>> import jax.numpy as jnp, jumanji
        >>> codec = make_action_codec(jumanji.make("LevelBasedForaging-v0"))
        >>> logits, legal = one_choice(codec, jnp.zeros((2, 6)), jnp.ones((2, 6), bool))
        >>> round(float(jnp.exp(logits).sum()), 4)
        1.0
    """
    if legal is None:
        legal = jnp.ones(codec.output_shape, bool)
    outputs = mask_logits(outputs, legal)
    if codec.kind != "factorised":
        return outputs, legal
    log_probs = jax.nn.log_softmax(outputs, axis=-1)
    joint_logits, joint_legal = jnp.zeros(1), jnp.ones(1, bool)
    for head, choices in enumerate(codec.choices):
        joint_logits = (joint_logits[:, None] + log_probs[None, head, :choices]).ravel()
        joint_legal = (joint_legal[:, None] & legal[None, head, :choices]).ravel()
    return mask_logits(joint_logits, joint_legal), joint_legal


def _require_mask(shape: tuple[int, ...] | None, *wanted: tuple[int, ...]) -> None:
    if shape is not None and shape not in wanted:
        raise ValueError(
            f"the action mask has shape {shape}, which does not fit the action spec: wanted "
            f"{' or '.join(map(str, wanted))}."
        )
