"""From an observation to arrays of floats, as a layout says; nothing is learned here."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vernal.core import Moments

from ..actions import read_path
from .layout import Cell, Cells, Grid, Layout, Leaf, Side

Statistics = dict[str, Moments]

_WINDOW = 5
_CLIP = 10.0


class Features(NamedTuple):
    """What a network sees of one state.

    Attributes:
        grids: planes of each grid.
        vector: all that belongs to no set and lies on no grid.
        rows: one row for each member of each set, `[N, F]`; of cells `[H, W, F]`.
        relations: what is known of pairs within each set, if anything.
        pairs: what is known of the pairs of one member of each of two sets, if anything.
    """

    grids: tuple[Float[Array, "H W C"], ...]
    vector: Float[Array, " F"]
    rows: tuple[Float[Array, "... F"], ...]
    relations: tuple[Float[Array, "N N R"] | None, ...]
    pairs: Float[Array, "N M P"] | None


def unbounded_leaves(layout: Layout) -> dict[str, tuple[Leaf, tuple[int, ...]]]:
    """Leaves without bounds that are read as numbers, with the shape of their statistics.

    The members of a set share theirs.
    """
    rows = [leaf for side in layout.sides for leaf in side.leaves]
    leaves = {leaf.name: (leaf, leaf.shape) for leaf in layout.vectors}
    leaves |= {leaf.name: (leaf, leaf.shape[1:]) for leaf in rows}
    return {n: part for n, part in leaves.items() if part[0].is_scaled_by_statistics}


def see(layout: Layout, statistics: Statistics, observation: Any) -> Features:
    """Read an observation.

    Args:
        layout: what is read in which way.
        statistics: by the names of `unbounded_leaves`.
        observation: of one state.

    Returns:
        Its features, of order 1.
    """

    def encode(leaf: Leaf) -> Array:
        values = leaf.encode(observation)
        moments = statistics.get(leaf.name)
        if moments is None:
            return values
        shape = values.shape[:-1]
        mean, scale = (jnp.broadcast_to(x, shape) for x in (moments.mean, moments.deviation()))
        return jnp.clip((values[..., 0] - mean) / scale, -_CLIP, _CLIP)[..., None]

    mask = None
    if layout.mask is not None:
        mask = read_path(observation, layout.mask).reshape(layout.axes).astype(float)
    planes = [grid.see(observation) for grid in layout.grids]
    vectors = [encode(leaf).ravel() for leaf in layout.vectors]
    for grid, seen in zip(layout.grids, planes, strict=True):
        vectors += [window(seen, cell).ravel() for cell in _lone_cells(grid, observation)]
    if mask is not None and not layout.sides:
        vectors.append(mask.ravel())
    relations = tuple(_relations(side, observation) for side in layout.sides)
    rows = []
    for side, relation in zip(layout.sides, relations, strict=True):
        allowed = None if mask is None else _mask_rows(layout, side, mask)
        if side.kind == "cells":
            rows.append(_cell_planes(layout, side, planes, allowed))
            continue
        parts = [encode(leaf).reshape(side.size, -1) for leaf in side.leaves]
        parts += [allowed] if allowed is not None else []
        if side.kind == "agents":
            parts += _agent_parts(layout, side, planes, observation)
        else:
            parts += _item_parts(layout, side, relation, observation)
        rows.append(jnp.concatenate(parts, axis=-1))
    return Features(
        grids=tuple(planes),
        vector=jnp.concatenate([jnp.zeros(0), *vectors]),
        rows=tuple(rows),
        relations=relations,
        pairs=_pairs(layout, relations, observation),
    )


def window(planes: Float[Array, "H W C"], cell: Int[Array, " 2"]) -> Float[Array, "5 5 C+1"]:
    """The planes around a cell, and what of it is inside the grid; zeros if the cell is not."""
    is_inside = jnp.all((cell >= 0) & (cell < jnp.array(planes.shape[:2])))
    inside = jnp.ones((*planes.shape[:2], 1))
    margin = _WINDOW // 2
    padding = ((margin, margin), (margin, margin), (0, 0))
    padded = jnp.pad(jnp.concatenate([planes, inside], axis=-1), padding)
    around = jax.lax.dynamic_slice(
        padded, (cell[0], cell[1], 0), (_WINDOW, _WINDOW, padded.shape[-1])
    )
    return jnp.where(is_inside, around, 0)


def _lone_cells(grid: Grid, observation: Any) -> list[Int[Array, " 2"]]:
    """Cells that the observation names by themselves, as an agent's place."""
    lone = [c for c in grid.cells if isinstance(c, Cell) or c.leaf.shape == (2,)]
    return [cell.read(observation)[0] for cell in lone]


def _mask_rows(layout: Layout, side: Side, mask: Float[Array, "..."]) -> Float[Array, "N F"]:
    """Which choices are legal with each member: a share, where they are of another set."""
    others = [axis for other in layout.sides if other is not side for axis in other.axes]
    shares = jnp.mean(mask, axis=tuple(others), keepdims=True)
    front = jnp.moveaxis(shares, side.axes, range(len(side.axes)))
    return front.reshape(side.size + side.has_none, -1)[: side.size]


def _cell_planes(
    layout: Layout, side: Side, planes: list[Array], allowed: Float[Array, "N A"] | None
) -> Float[Array, "H W F"]:
    """The planes of the grid that the cells lie on, and what is legal in each cell."""
    size = tuple(layout.axes[axis] for axis in side.axes)
    windows = size[0] + 2, size[1] + 2
    exact = [p for p in planes if p.shape[:2] == size]
    grid = (exact or [p for p in planes if p.shape[:2] == windows])[0]
    if allowed is None:
        return grid
    margin = (grid.shape[0] - size[0]) // 2
    padding = ((margin, margin), (margin, margin), (0, 0))
    return jnp.concatenate([grid, jnp.pad(allowed.reshape(*size, -1), padding)], axis=-1)


def _relations(side: Side, observation: Any) -> Float[Array, "N N R"] | None:
    """What is known of pairs: edges, or distances between places."""
    parts = []
    for leaf in side.relations:
        values = leaf.encode(observation)
        if leaf.is_square:
            parts.append(values.reshape(side.size, side.size, -1))
        else:
            places = values.reshape(side.size, -1)
            parts.append(distances(places, places)[..., None])
    return jnp.concatenate(parts, axis=-1) if parts else None


def distances(a: Float[Array, "N D"], b: Float[Array, "M D"]) -> Float[Array, "N M"]:
    """Euclidean distances."""
    return jnp.sqrt(jnp.sum(jnp.square(a[:, None] - b[None]), axis=-1))


def _agent_parts(layout: Layout, side: Side, planes: list[Array], observation: Any) -> list[Array]:
    """Who the agent is, what stands around it, and where its own values lie."""
    parts = [jnp.eye(side.size)]
    for grid, seen in zip(layout.grids, planes, strict=True):
        for cells in grid.cells:
            if isinstance(cells, Cells) and cells.leaf.shape == (side.size, 2):
                windows = jax.vmap(lambda cell, seen=seen: window(seen, cell))
                parts.append(windows(cells.read(observation)).reshape(side.size, -1))
        parts += [
            part.own(observation, side.size).reshape(side.size, -1)
            for part in side.owned
            if part in grid.owned
        ]
    return parts


def _item_parts(
    layout: Layout, side: Side, relations: Array | None, observation: Any
) -> list[Array]:
    """Which items are pointed to, and how each stands to these."""
    parts = [jnp.eye(side.size)] if side.is_numbered else []
    for leaf in side.pointers:
        pointed = leaf.point(observation, side.size).reshape(-1, side.size)
        parts.append(jnp.sum(pointed, axis=0))
        if _is_of_agents(layout, leaf):
            continue
        # Of a list, as of the cities in the order of their visits, the first is singled out.
        parts += [pointed[0]] if leaf.shape else []
        parts += [] if relations is None else [jnp.einsum("i,ijr->jr", pointed[0], relations)]
    for part in side.owned:
        own = part.own(observation, side.size)
        if part.leaf.shape[0] == side.size:
            members = jnp.arange(side.size)
            parts += [own[members, members], part.anyones(observation)]
        else:
            parts.append(jnp.any(own.reshape(side.size, -1) > 0, axis=-1))
    return [part.reshape(side.size, -1).astype(float) for part in parts]


def _is_of_agents(layout: Layout, leaf: Leaf) -> bool:
    """Whether a leaf has one value for each agent."""
    return any(s.kind == "agents" and leaf.shape == (s.size,) for s in layout.sides)


def _pairs(
    layout: Layout, relations: tuple[Array | None, ...], observation: Any
) -> Float[Array, "N M P"] | None:
    """How each agent stands to each item."""
    if [side.kind for side in layout.sides] != ["agents", "items"]:
        return None
    agents, items = layout.sides
    parts = []
    for leaf in items.pointers:
        if _is_of_agents(layout, leaf):
            pointed = leaf.point(observation, items.size)
            parts.append(pointed)
            if relations[1] is not None:
                parts.append(jnp.einsum("hi,ijr->hjr", pointed, relations[1]))
    for part in agents.owned:
        if part.leaf.shape[0] == items.size:
            parts.append(part.own(observation, agents.size))
    for place in items.relations:
        for leaf in agents.leaves if not place.is_square else ():
            if (leaf.shape[1:], leaf.low, leaf.high) == (place.shape[1:], place.low, place.high):
                here, there = leaf.encode(observation)[..., 0], place.encode(observation)[..., 0]
                parts.append(distances(here, there))
    if not parts:
        return None
    shape = (agents.size, items.size, -1)
    pairs = jnp.concatenate([part.reshape(shape) for part in parts], axis=-1)
    return jnp.pad(pairs, ((0, 0), (0, int(items.has_none)), (0, 0)))
