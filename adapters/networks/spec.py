"""An actor-critic for any environment, built from its specs."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from vernal.core import init_moments, update_moments
from vernal.core._arrays import widen

from ..actions import ActionCodec, make_action_codec
from ..environments import Environment
from .features import Features, Statistics, see, unbounded_leaves
from .layers import GridConv, SetAttention, bias_of, everywhere, orthogonal_linear
from .layout import Grid, Layout, read_layout

_SMALL_GRID = 25  # cells
_LARGE_GRID = 16  # rows or columns
_STATISTICS_DECAY = 0.99


class SpecNetwork(eqx.Module):
    """Actor-critic built from an environment's specs.

    Each set among the action's axes (agents, items, cells of a grid) becomes rows of features,
    one for each member, which look at each other. Everything else and a summary of the sets
    becomes one vector, the context. A choice of a member is scored from its row and the context,
    with the same weights for all members; a pair of members from both rows; other choices from
    the context. So is the value.
    """

    layout: Layout = eqx.field(static=True)
    codec: ActionCodec = eqx.field(static=True)
    statistics: Statistics
    convs: tuple[GridConv | None, ...]
    encoders: tuple["SetEncoder | CellEncoder", ...]
    hidden: tuple[eqx.nn.Linear, ...]
    policy: "Scores"
    value: eqx.nn.Linear

    def __init__(
        self,
        environment: Environment,
        *,
        channels: int = 8,
        width: int = 64,
        set_width: int = 32,
        key: PRNGKeyArray,
    ) -> None:
        """Read the specs and draw the weights.

        Args:
            environment: with Jumanji's specs.
            channels: filters over each grid.
            width: size of the two hidden layers.
            set_width: features of a member of a set; a multiple of 4.
            key: consumed.

        Raises:
            ValueError: the observation or the action cannot be served, or `set_width` is no
                multiple of 4.
        """
        if set_width % 4:
            raise ValueError(f"set_width is {set_width}; give a multiple of 4.")
        self.layout = read_layout(environment)
        # Bounds are arrays, which do not belong into what is static.
        self.codec = make_action_codec(environment)._replace(low=None, high=None)
        self.statistics = {
            name: init_moments(shape) for name, (_, shape) in unbounded_leaves(self.layout).items()
        }
        _, timestep = jax.eval_shape(environment.reset, jax.random.key(0))
        seen: Features = jax.eval_shape(
            lambda observation: see(self.layout, self.statistics, observation),
            timestep.observation,
        )
        convs_key, sets_key, first_key, second_key, policy_key, value_key = jax.random.split(key, 6)
        keys = jax.random.split(convs_key, len(seen.grids) + 1)
        self.convs = tuple(
            None
            if _is_flat(grid)
            else GridConv(planes.shape[-1], channels, stride=_stride(grid), key=k)
            for grid, planes, k in zip(self.layout.grids, seen.grids, keys, strict=False)
        )
        keys = jax.random.split(sets_key, len(seen.rows) + 1)
        self.encoders = tuple(
            CellEncoder(rows.shape[-1], set_width, math.prod(rows.shape[:2]) == side.size, key=k)
            if side.kind == "cells"
            else SetEncoder(rows.shape[-1], relation, set_width, side.has_none, key=k)
            for side, rows, relation, k in zip(
                self.layout.sides, seen.rows, map(_size, seen.relations), keys, strict=False
            )
        )
        sizes = [
            math.prod(planes.shape) if conv is None else _size_of(conv, planes)
            for conv, planes in zip(self.convs, seen.grids, strict=True)
        ]
        size = sum(sizes) + seen.vector.size + 2 * set_width * len(self.encoders)
        self.hidden = (
            eqx.nn.Linear(size, width, key=first_key),
            eqx.nn.Linear(width, width, key=second_key),
        )
        self.policy = Scores(self.layout, _size(seen.pairs), width, set_width, key=policy_key)
        self.value = orthogonal_linear(width, "scalar", 0.01, key=value_key)

    def __call__(self, observation: Any) -> tuple[Array, Array]:
        """Policy outputs and value for one observation."""
        seen = see(self.layout, jax.lax.stop_gradient(self.statistics), observation)
        members = [
            encoder(rows, relation)
            for encoder, rows, relation in zip(
                self.encoders, seen.rows, seen.relations, strict=True
            )
        ]
        parts = [
            planes.ravel() if conv is None else jax.nn.relu(conv(planes)).ravel()
            for conv, planes in zip(self.convs, seen.grids, strict=True)
        ]
        for rows in members:
            parts += [jnp.mean(rows, axis=0), jnp.max(rows, axis=0)]
        context = jnp.concatenate([*parts, seen.vector])
        for layer in self.hidden:
            context = jax.nn.relu(layer(context))
        outputs = self.policy(members, seen.pairs, context)
        return self.codec.from_axes(outputs), self.value(context)

    def with_statistics_of(self, observations: PyTree[Array]) -> "SpecNetwork":
        """The same network, with a batch of observations in its running statistics."""
        statistics = {}
        for name, (leaf, shape) in unbounded_leaves(self.layout).items():
            samples = leaf.encode(observations).reshape(-1, *shape)
            known = self.statistics[name]
            fresh = update_moments(jax.tree.map(widen, known), samples, decay=_STATISTICS_DECAY)
            statistics[name] = jax.tree.map(lambda f, k: f.astype(k.dtype), fresh, known)
        return eqx.tree_at(lambda network: network.statistics, self, statistics)


def make_spec_network(environment: Environment) -> Callable[[PRNGKeyArray], SpecNetwork]:
    """`SpecNetwork` for an environment; its specs are read at once.

    Args:
        environment: with Jumanji's specs.

    Returns:
        From a key to the network.

    Raises:
        ValueError: the observation or the action cannot be served.

    Example:
        >>> import jax, jumanji
        >>> environment = jumanji.make("Snake-v1")
        >>> network = make_spec_network(environment)(jax.random.key(0))
        >>> _, timestep = environment.reset(jax.random.key(1))
        >>> network(timestep.observation)[0].shape
        (4,)
    """
    read_layout(environment)
    return lambda key: SpecNetwork(environment, key=key)


class SetEncoder(eqx.Module):
    """Rows of features of the members of a set.

    Where something is known of pairs of them they look at each other; else the context, which
    has a summary of all, is enough, and much faster.
    """

    embed: eqx.nn.Linear
    block: SetAttention | eqx.nn.Linear
    none: Float[Array, "1 D"] | None

    def __init__(
        self, in_size: int, relations: int, width: int, has_none: bool, *, key: PRNGKeyArray
    ) -> None:
        """Draw the weights; with `has_none` there is one more row, for no member."""
        embed_key, block_key, none_key = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(in_size, width, key=embed_key)
        self.block = (
            SetAttention(width, relations=relations, key=block_key)
            if relations
            else eqx.nn.Linear(width, width, key=block_key)
        )
        self.none = jax.random.normal(none_key, (1, width)) / 10 if has_none else None

    def __call__(
        self, rows: Float[Array, "N F"], relations: Float[Array, "N N R"] | None
    ) -> Float[Array, "M D"]:
        """One row for each member, and the one for none."""
        members = jax.nn.relu(everywhere(self.embed, rows))
        if isinstance(self.block, SetAttention):
            members = self.block(members, relations)
        else:
            members = jax.nn.relu(everywhere(self.block, members))
        return members if self.none is None else jnp.concatenate([members, self.none])


class CellEncoder(eqx.Module):
    """Rows of features of the cells of a grid, each having looked around it and along its lines."""

    near: GridConv
    far: GridConv
    lines: eqx.nn.Linear
    is_padded: bool = eqx.field(static=True)

    def __init__(self, in_channels: int, width: int, is_padded: bool, *, key: PRNGKeyArray) -> None:
        """Draw the weights; without padding the cells are the grid's 3 x 3 windows."""
        self.is_padded = is_padded
        near_key, far_key, lines_key = jax.random.split(key, 3)
        half = width // 2
        self.near = GridConv(in_channels, half, key=near_key)
        self.far = GridConv(half, half, key=far_key)
        self.lines = eqx.nn.Linear(2 * half, half, use_bias=False, key=lines_key)

    def __call__(
        self, planes: Float[Array, "H W C"], relations: Array | None
    ) -> Float[Array, "N D"]:
        """One row for each cell."""
        del relations
        near = jax.nn.relu(self.near(_pad(planes) if self.is_padded else planes))
        means = (jnp.mean(near, axis=axis, keepdims=True) for axis in (0, 1))
        lines = jnp.concatenate([jnp.broadcast_to(m, near.shape) for m in means], axis=-1)
        far = jax.nn.relu(self.far(_pad(near)) + everywhere(self.lines, lines))
        rows = jnp.concatenate([near, far], axis=-1)
        return rows.reshape(-1, rows.shape[-1])


class Scores(eqx.Module):
    """Outputs of the policy: one for each combination of members and other choices."""

    layout: Layout = eqx.field(static=True)
    sides: tuple[eqx.nn.Linear, ...]
    pairs: eqx.nn.Linear | None
    context: eqx.nn.Linear | None
    out: eqx.nn.Linear

    def __init__(
        self, layout: Layout, pairs: int, width: int, set_width: int, *, key: PRNGKeyArray
    ) -> None:
        """Draw the weights; outputs are nearly 0 at first."""
        self.layout = layout
        sides_key, pairs_key, context_key, out_key = jax.random.split(key, 4)
        keys = jax.random.split(sides_key, len(layout.sides) + 1)
        self.sides = tuple(
            eqx.nn.Linear(set_width, set_width, use_bias=False, key=k)
            for k in keys[: len(layout.sides)]
        )
        self.pairs = (
            eqx.nn.Linear(pairs, set_width, use_bias=False, key=pairs_key) if pairs else None
        )
        size = set_width if layout.sides else width
        self.context = eqx.nn.Linear(width, size, key=context_key) if layout.sides else None
        self.out = orthogonal_linear(size, math.prod(_others(layout)), 0.01, key=out_key)

    def __call__(
        self,
        members: list[Array],
        pairs: Float[Array, "N M P"] | None,
        context: Float[Array, " F"],
    ) -> Float[Array, "..."]:
        """Outputs, in the layout's axes."""
        if self.context is None:
            return self.out(context).reshape(self.layout.axes)
        rows = [everywhere(linear, m) for linear, m in zip(self.sides, members, strict=True)]
        first = rows[0] + self.context(context)[None]
        if len(rows) == 1:
            scores = everywhere(self.out, jax.nn.relu(first))
        elif self.pairs is None or pairs is None:
            # Products, where nothing is known of the pairs: there may be thousands of them.
            factors = (1 + rows[1])[:, None] * self.out.weight[None]
            scores = jnp.einsum("nd,mud->nmu", jax.nn.relu(first), factors)
            scores = scores + bias_of(self.out)[None, None]
        else:
            both = first[:, None] + rows[1][None] + everywhere(self.pairs, pairs)
            scores = everywhere(self.out, jax.nn.relu(both))
        order = [axis for side in self.layout.sides for axis in side.axes]
        order += [axis for axis in range(len(self.layout.axes)) if axis not in order]
        scores = scores.reshape([self.layout.axes[axis] for axis in order])
        return jnp.transpose(scores, np.argsort(order).tolist())


def _others(layout: Layout) -> list[int]:
    """Lengths of the axes that go over no set."""
    taken = [axis for side in layout.sides for axis in side.axes]
    return [size for axis, size in enumerate(layout.axes) if axis not in taken]


def _is_flat(grid: Grid) -> bool:
    """Whether a grid is so small that it is read as one vector."""
    return math.prod(grid.size) <= _SMALL_GRID and not grid.cells


def _stride(grid: Grid) -> int:
    """From one window to the next: in a large grid every other one is left out."""
    return 1 if max(grid.size) <= _LARGE_GRID else 2


def _size(features: Any) -> int:
    """Number of features of each pair, if there are any."""
    return 0 if features is None else features.shape[-1]


def _size_of(conv: GridConv, planes: Any) -> int:
    return math.prod(jax.eval_shape(conv, planes).shape)


def _pad(planes: Float[Array, "H W C"]) -> Float[Array, "h w C"]:
    return jnp.pad(planes, ((1, 1), (1, 1), (0, 0)))
