"""What of an observation is read in which way: decided from an environment's specs alone.

Three questions are asked of the specs, in this order:

- Which axes of the action are *sets*? The agents of a team; the items that an action names by
  their index, as the cities of TSP; the cells of a grid, as in Minesweeper. The policy gets one
  row of features for each member, and the same weights for all of them.
- Which leaves of the observation speak of such a set? A leaf with one row for each member;
  integers that are indices of members; a square of numbers for pairs of members; numbers that
  belong to members in turn.
- Which leaves lie on a grid? All others are one vector.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from jumanji import specs

from ..actions import ActionCodec, make_action_codec, read_path, spec_leaves
from ..environments import Environment, read_specs

_ONE_HOT_LIMIT = 32
_NAMES_LIMIT = 1024  # inputs that a leaf may become
_SATURATION = 16
_OWNED_LIMIT = 4
_BOUND_LIMIT = 1e6
_FEW = 6  # so many rows of two leaves may be chance
_SMALL = 16  # numbers


class Leaf(NamedTuple):
    """One array of an observation, as its spec describes it.

    Attributes:
        path: names that lead to it, outermost first.
        shape: its shape.
        dtype: its dtype.
        low: smallest value, or `None` if there is no finite bound on either side.
        high: largest value, or `None` likewise.
        ranges: smallest and largest value of each number, where they differ from one to the next.
        is_category: whether its integers are names, by which nothing is near to anything else.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    low: float | None
    high: float | None
    ranges: tuple[tuple[float, float], ...] | None = None
    is_category: bool = False

    @property
    def name(self) -> str:
        """The names that lead to it, as one."""
        return ".".join(self.path)

    @property
    def num_values(self) -> int | None:
        """Number of values of a bounded integer; `None` of anything else."""
        if self.low is None or self.high is None or not jnp.issubdtype(self.dtype, jnp.integer):
            return None
        return int(self.high - self.low) + 1

    @property
    def is_scaled_by_statistics(self) -> bool:
        """Whether there are no bounds to scale it by."""
        return self.low is None and self.dtype != bool

    @property
    def is_square(self) -> bool:
        """Whether its first two axes are equally long, and no mere pair or triple."""
        return len(self.shape) >= 2 and self.shape[0] == self.shape[1] > 3

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of squares, as the faces of a cube."""
        return len(self.shape) == 3 and self.shape[0] != self.shape[1] == self.shape[2] >= 3

    @property
    def is_grid(self) -> bool:
        """Whether it may lie on a grid: it has two axes of 3 or more."""
        return len(self.shape) >= 2 and min(self.shape[:2]) >= 3 and not self.is_stack

    def read(self, observation: Any) -> Array:
        """The array itself; outside of `jit`, Jumanji leaves some numbers as Python's own."""
        return jnp.asarray(read_path(observation, self.path))

    def encode(self, observation: Any) -> Float[Array, "..."]:
        """As floats of order 1, in one more axis: small integers one-hot, others scaled.

        Numbers without bounds are taken to a logarithmic scale, with their sign.
        """
        values = self.read(observation)
        if self.dtype == bool:
            return values.astype(float)[..., None]
        if self.low is None or self.high is None:
            limits = jnp.finfo(jnp.float32)
            values = jnp.clip(values.astype(float), limits.min, limits.max)
            return (jnp.sign(values) * jnp.log1p(jnp.abs(values)))[..., None]
        if self.num_values is not None and self.num_values <= _ONE_HOT_LIMIT:
            return jax.nn.one_hot(values - int(self.low), self.num_values)
        lows, highs = np.array(self.low), np.array(self.high)
        if self.ranges is not None:
            lows, highs = np.moveaxis(np.reshape(self.ranges, (*self.shape, 2)), -1, 0)
        centres, halves = (highs + lows) / 2, np.maximum((highs - lows) / 2, 1e-6)
        scaled = ((values.astype(float) - centres) / halves)[..., None]
        counts = np.vectorize(self._one_hot_size)(highs - lows + 1)
        if not counts.any():
            return scaled
        one_hot = jax.nn.one_hot(values.astype(int) - lows.astype(int), counts.max())
        has_one = np.broadcast_to(counts > 0, self.shape)[..., None]
        return jnp.concatenate([scaled, jnp.where(has_one, one_hot, 0)], axis=-1)

    def _one_hot_size(self, num_values: float) -> int:
        """How many inputs a number becomes besides a scaled one: names may have many values."""
        if self.num_values is None:
            return 0
        is_few = num_values <= _ONE_HOT_LIMIT
        is_few |= self.is_category and num_values * math.prod(self.shape) <= _NAMES_LIMIT
        return int(num_values) if is_few else 0

    def encode_on_grid(self, observation: Any) -> Float[Array, "..."]:
        """As `encode`, but integers without bounds are one-hot as well, up to a limit."""
        encoded = self.encode(observation)
        if self.low is None and jnp.issubdtype(self.dtype, jnp.integer):
            values = jnp.clip(self.read(observation), 0, _SATURATION - 1)
            encoded = jnp.concatenate([encoded, jax.nn.one_hot(values, _SATURATION)], axis=-1)
        return encoded

    def kinds_for(self, owners: int) -> int | None:
        """How many kinds of values each of some owners has, if the values belong to them in turn.

        Such values are one for nobody, then `kinds` of the first owner, `kinds` of the second and
        so on. Where there are several, an upper bound that is one too large is forgiven.
        """
        if self.num_values is None or self.ranges is not None or not self.shape:
            return None
        kinds, rest = divmod(self.num_values - 1, owners)
        return kinds if 1 <= kinds <= _OWNED_LIMIT and rest <= (kinds > 1) else None

    def owners_and_kinds(self, observation: Any, kinds: int) -> tuple[Array, Array]:
        """Index of each value's owner (-1 for nobody's), and which of its kinds it is."""
        offset = self.read(observation).astype(int) - int(self.low or 0) - 1
        return jnp.where(offset < 0, -1, offset // kinds), offset % kinds

    def points_to(self, size: int, has_none: bool = False) -> bool:
        """Whether its values are indices of `size` members, or a value beside them for none.

        With `has_none`, one more than the last index is a choice of its own. Without, a list as
        long as there are members that has no -1 for none is taken for numbers.
        """
        if len(self.shape) > 1 or self.num_values is None or self.ranges is not None:
            return False
        if has_none:
            return self.low == 0 and self.num_values == size + 1
        if self.low == 0 and self.shape != (size,):
            return self.num_values in (size, size + 1)
        return self.low == -1 and self.num_values == size + 1

    def point(self, observation: Any, size: int) -> Float[Array, "... size"]:
        """One-hot over the members; zeros for none."""
        return jax.nn.one_hot(self.read(observation), size)


class Cell(NamedTuple):
    """A row and a column that name a cell of a grid.

    Attributes:
        row: where the row stands.
        col: where the column stands.
    """

    row: Leaf
    col: Leaf

    def read(self, observation: Any) -> Int[Array, "1 2"]:
        """Row and column."""
        return jnp.stack([leaf.read(observation).astype(int) for leaf in self])[None]


class Cells(NamedTuple):
    """An array of pairs that name cells of a grid.

    Attributes:
        leaf: where the pairs stand.
        is_swapped: whether the column is read first.
    """

    leaf: Leaf
    is_swapped: bool = False

    def read(self, observation: Any) -> Int[Array, "n 2"]:
        """Rows and columns."""
        pairs = self.leaf.read(observation).astype(int).reshape(-1, 2)
        return pairs[:, ::-1] if self.is_swapped else pairs


class Owned(NamedTuple):
    """A leaf whose values belong to the members of a set in turn.

    Attributes:
        leaf: the leaf.
        kinds: number of values that each member has.
    """

    leaf: Leaf
    kinds: int

    def own(self, observation: Any, members: int) -> Float[Array, "members ... kinds"]:
        """For each member, where its own values lie."""
        owners, kinds = self.leaf.owners_and_kinds(observation, self.kinds)
        mine = jnp.moveaxis(jax.nn.one_hot(owners, members), -1, 0)
        return mine[..., None] * jax.nn.one_hot(kinds, self.kinds)[None]

    def anyones(self, observation: Any) -> Float[Array, "... kinds"]:
        """Where values of each kind lie, whosever they are."""
        owners, kinds = self.leaf.owners_and_kinds(observation, self.kinds)
        return (owners >= 0)[..., None] * jax.nn.one_hot(kinds, self.kinds)


class Grid(NamedTuple):
    """Leaves that lie on the cells of one grid.

    Attributes:
        size: rows and columns.
        leaves: with a value for each cell.
        owned: with a value for each cell, which belongs to a member of a set.
        cells: places on it.
    """

    size: tuple[int, int]
    leaves: tuple[Leaf, ...]
    owned: tuple[Owned, ...] = ()
    cells: tuple[Cell | Cells, ...] = ()

    def see(self, observation: Any) -> Float[Array, "H W C"]:
        """All as planes."""
        planes = [leaf.encode_on_grid(observation) for leaf in self.leaves]
        planes += [owned.anyones(observation) for owned in self.owned]
        planes += [self.mark(cells.read(observation)) for cells in self.cells]
        return jnp.concatenate([p.reshape(*self.size, -1) for p in planes], axis=-1)

    def mark(self, cells: Int[Array, "n 2"]) -> Float[Array, "H W"]:
        """A plane with 1 at some cells; those outside are left out."""
        height, width = self.size
        is_inside = jnp.all((cells >= 0) & (cells < jnp.array([[height, width]])), axis=1)
        rows = jnp.where(is_inside, cells[:, 0], height)  # beyond the last one, and dropped
        return jnp.zeros(self.size).at[rows, cells[:, 1]].set(1, mode="drop")


class Side(NamedTuple):
    """A set that some of the action's axes go over.

    Attributes:
        kind: `agents`, `items` or `cells`.
        axes: which axes of the action; two for cells, else one.
        size: number of members.
        leaves: with one row for each member.
        pointers: integers that are indices of members.
        relations: with a number for each pair of members, or with a place for each member.
        owned: whose values belong to the members.
        has_none: whether the axis has one more choice, the last, for no member.
        is_numbered: whether a member is told its number, for that may be all it is.
    """

    kind: str
    axes: tuple[int, ...]
    size: int
    leaves: tuple[Leaf, ...] = ()
    pointers: tuple[Leaf, ...] = ()
    relations: tuple[Leaf, ...] = ()
    owned: tuple[Owned, ...] = ()
    has_none: bool = False
    is_numbered: bool = False


class Layout(NamedTuple):
    """How an observation is read, and what the axes of the policy's outputs stand for.

    Attributes:
        axes: lengths of the outputs' axes, before they are brought to the codec's shape.
        sides: the sets among them, at most two.
        grids: all grids.
        vectors: all that is left.
        mask: names that lead to the action mask, if there is one.
    """

    axes: tuple[int, ...]
    sides: tuple[Side, ...]
    grids: tuple[Grid, ...]
    vectors: tuple[Leaf, ...]
    mask: tuple[str, ...] | None = None


def read_layout(environment: Environment) -> Layout:
    """Decide from an environment's specs alone how its observations are read.

    Args:
        environment: with Jumanji's specs.

    Returns:
        The layout.

    Raises:
        ValueError: a leaf is neither boolean nor a number, there is nothing to see, or the
            action cannot be served.

    Example:
        >>> import jumanji
        >>> layout = read_layout(jumanji.make("Maze-v0"))
        >>> [(grid.size, len(grid.leaves), len(grid.cells)) for grid in layout.grids]
        [((10, 10), 1, 2)]
        >>> [leaf.path for leaf in layout.vectors]
        [('step_count',)]
        >>> [(side.kind, side.size) for side in read_layout(jumanji.make("JobShop-v0")).sides]
        [('agents', 10), ('items', 20)]
    """
    codec = make_action_codec(environment)
    leaves = [
        read_leaf(path, spec)
        for path, spec in spec_leaves(read_specs(environment)[0])
        if path != codec.mask and math.prod(spec.shape) > 0
    ]
    for leaf in leaves:
        kinds = (jnp.bool_, jnp.integer, jnp.floating)
        if not any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds):
            raise ValueError(
                f"the observation's leaf '{leaf.name}' has dtype {leaf.dtype}, which no "
                "encoder reads; give a network of your own."
            )
    if not leaves:
        raise ValueError("the observation has no leaf to read besides the action mask.")
    scalars = _pairs_of_scalars(leaves)
    rest = [leaf for leaf in leaves if not any(leaf in cell for cell in scalars)]
    sides = _cells_side(codec, rest)
    certain = _certain_grids(codec, scalars, rest, sides)
    sides += _agents_side(codec, rest, certain)
    for axis, size in enumerate(codec.axes):
        is_taken = any(axis in side.axes for side in sides)
        # Of two axes of one length, nothing tells whose rows are whose.
        if len(sides) < 2 and not is_taken and codec.axes.count(size) == 1:
            sides += _items_side(codec, axis, rest, sides, certain)
    grids = _grids(scalars, rest, sides)
    sides = _without_what_is_not_read(sides, grids)
    return Layout(codec.axes, tuple(sides), grids, _vectors(rest, sides, grids), codec.mask)


def read_leaf(path: tuple[str, ...], spec: specs.Array) -> Leaf:
    """What a spec says of an array that has elements.

    Example:
        >>> read_leaf(("board",), specs.BoundedArray((3, 3), np.int32, -1, 8)).num_values
        10
    """
    leaf = Leaf(path, tuple(spec.shape), spec.dtype, None, None)
    if spec.dtype == bool:
        return leaf
    if isinstance(spec, specs.BoundedArray):
        bounds = (spec.minimum, spec.maximum)
        lows, highs = (np.broadcast_to(np.asarray(b, float), spec.shape).ravel() for b in bounds)
        is_one_scale = lows.min() == lows.max() and highs.min() == highs.max()
        is_integer = jnp.issubdtype(spec.dtype, jnp.integer)
        # Floats of several scales are measured: how wide they are says little of how far they go.
        if (is_one_scale or is_integer) and max(*np.abs(lows), *np.abs(highs)) <= _BOUND_LIMIT:
            pairs = tuple(zip(lows.tolist(), highs.tolist(), strict=True))
            return leaf._replace(
                low=float(lows.min()),
                high=float(highs.max()),
                ranges=None if is_one_scale else pairs,
                is_category=_is_category(path, spec),
            )
    if spec.dtype in (np.uint8, np.int8):
        limits = np.iinfo(spec.dtype)
        return leaf._replace(low=float(limits.min), high=float(limits.max))
    return leaf


def _is_category(path: tuple[str, ...], spec: specs.Array) -> bool:
    """Whether integers are names by their spec, and no count by their own name."""
    is_named = isinstance(spec, specs.DiscreteArray | specs.MultiDiscreteArray)
    return is_named and not (path and path[-1].endswith("count"))


def _pairs_of_scalars(leaves: list[Leaf]) -> list[Cell]:
    """Rows and columns that stand beside each other, and name cells of a grid that there is."""
    sizes = {leaf.shape[:2] for leaf in leaves if leaf.is_grid}
    by_path = {leaf.path: leaf for leaf in leaves}
    cells = []
    for first, second in (("row", "col"), ("x", "y")):
        for path, leaf in by_path.items():
            other = by_path.get((*path[:-1], second))
            if path[-1:] != (first,) or other is None or leaf.shape or other.shape:
                continue
            if leaf.low == 0 == other.low and (leaf.num_values, other.num_values) in sizes:
                cells.append(Cell(leaf, other))
                # On a square grid nothing tells whether x is the row or the column.
                if first == "x" and leaf.num_values == other.num_values:
                    cells.append(Cell(other, leaf))
    return cells


def _cells_side(codec: ActionCodec, leaves: list[Leaf]) -> list[Side]:
    """Two neighbouring axes of a masked joint action that go over the only grid, or its windows."""
    sizes = {leaf.shape[:2] for leaf in leaves if leaf.is_grid}
    if codec.kind == "joint" and codec.mask is not None and len(sizes) == 1:
        ((height, width),) = sizes
        for wanted in ((height, width), (height - 2, width - 2)):
            for axis, size in enumerate(zip(codec.axes, codec.axes[1:], strict=False)):
                if size == wanted:
                    return [Side("cells", (axis, axis + 1), math.prod(size))]
    return []


def _certain_grids(
    codec: ActionCodec, scalars: list[Cell], leaves: list[Leaf], sides: list[Side]
) -> set[tuple[int, ...]]:
    """Sizes of grids whose rows are no members of any set: something names their cells."""
    sizes = {leaf.shape[:2] for leaf in leaves if leaf.is_grid}
    pairs = [leaf for leaf in leaves if _is_pair(leaf) and leaf.high is not None]
    certain = {
        size
        for size in sizes
        for leaf in pairs
        if leaf.high in (max(size) - 1, max(size)) and _is_within(leaf, size)
    }
    certain |= {(int(c.row.high or 0) + 1, int(c.col.high or 0) + 1) for c in scalars}
    return certain | (sizes if sides else set())


def _agents_side(
    codec: ActionCodec, leaves: list[Leaf], certain: set[tuple[int, ...]]
) -> list[Side]:
    """The first axis of the actions of a team."""
    is_team = codec.kind == "factorised" or (codec.kind == "normal" and len(codec.axes) == 3)
    if not is_team:
        return []
    size = codec.axes[0]
    rows = tuple(
        leaf
        for leaf in leaves
        if leaf.shape[:1] == (size,) and not leaf.is_square and leaf.shape[:2] not in certain
    )
    owned = ((leaf, leaf.kinds_for(size)) for leaf in leaves if leaf not in rows)
    owned = tuple(Owned(leaf, kinds) for leaf, kinds in owned if kinds and size > 1)
    return [Side("agents", (0,), size, rows, owned=owned)]


def _items_side(
    codec: ActionCodec,
    axis: int,
    leaves: list[Leaf],
    sides: list[Side],
    certain: set[tuple[int, ...]],
) -> list[Side]:
    """An axis whose choices are the rows of some leaves, and perhaps one more: none of them.

    One leaf of the right length may be chance: there must be integers that are indices of its
    rows, or two leaves with many rows. One table with many rows is enough, too, but then its
    rows keep their numbers, and choices that are something else can still be learned.
    """
    choices = codec.axes[axis]
    agents_rows = {leaf for side in sides if side.kind == "agents" for leaf in side.leaves}
    for size in (choices, choices - 1) if codec.kind != "normal" else ():
        has_none = size < choices
        pointers = tuple(leaf for leaf in leaves if leaf.points_to(size, has_none))
        owned = tuple(
            Owned(leaf, 1)
            for leaf in leaves
            if len(leaf.shape) > 1 and leaf.low == 0 and leaf.num_values == size + 1
        )
        owned_leaves = {part.leaf for part in owned}
        # As many agents as items: what has more than one axis is read as both.
        is_free = [leaf not in agents_rows or len(leaf.shape) > 1 for leaf in leaves]
        rows = [
            leaf
            for leaf, free in zip(leaves, is_free, strict=True)
            if leaf.shape[:1] == (size,)
            and free
            and leaf.shape[:2] not in certain
            and not leaf.is_square
            and not (leaf.is_stack and leaf not in owned_leaves)
        ]
        is_likely = bool(pointers or owned) or (len(rows) > 1 and size > _FEW)
        is_table = size > _FEW and any(map(_is_table, rows))
        is_set = bool(pointers) or (not has_none and (is_likely or is_table))
        features = tuple(leaf for leaf in rows if leaf not in (*pointers, *owned_leaves))
        squares = (leaf for leaf in leaves if leaf.is_square and leaf.shape[0] == size)
        relations = (
            *(leaf for leaf in squares if leaf not in owned_leaves),
            *(leaf for leaf in rows if _is_place(leaf)),
        )
        is_described = rows and (features or relations or owned)
        if is_described and is_set and size > 1:
            roles = (features, pointers, relations, owned, has_none)
            return [Side("items", (axis,), size, *roles, is_numbered=not is_likely)]
    return []


def _is_table(leaf: Leaf) -> bool:
    """Whether each row is several measures of one thing, and not of an image or a board."""
    is_measured = jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.ranges is not None
    is_measured |= (leaf.num_values or 0) > _ONE_HOT_LIMIT
    return is_measured and len(leaf.shape) == 2 and leaf.dtype != np.uint8


def _is_place(leaf: Leaf) -> bool:
    """Whether each row is a place in the plane or in space."""
    is_bounded = leaf.low is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    return is_bounded and leaf.shape[1:] in ((2,), (3,))


def _is_pair(leaf: Leaf) -> bool:
    """Whether it is a pair of integers that may name a cell, or a list of such pairs."""
    is_pair = len(leaf.shape) in (1, 2) and leaf.shape[-1] == 2
    return is_pair and jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.low in (None, 0)


def _without_what_is_not_read(sides: list[Side], grids: tuple[Grid, ...]) -> list[Side]:
    """The sides, agents without what says nothing as a number of theirs or is read nowhere."""
    items = [side for side in sides if side.kind == "items"]
    on_grids = {owned for grid in grids for owned in grid.owned}
    cleaned = []
    for side in sides:
        if side.kind == "agents":
            indices = [leaf for i in items for leaf in i.pointers if leaf in side.leaves]
            # Of several that may be indices, nothing tells which are.
            dropped = indices if len(indices) == 1 else []
            owned = tuple(
                part
                for part in side.owned
                if part in on_grids or any(part.leaf.shape[0] == i.size for i in items)
            )
            leaves = tuple(leaf for leaf in side.leaves if leaf not in dropped)
            side = side._replace(leaves=leaves, owned=owned)  # noqa: PLW2901
        cleaned.append(side)
    return cleaned


def _vectors(leaves: list[Leaf], sides: list[Side], grids: tuple[Grid, ...]) -> tuple[Leaf, ...]:
    """Leaves that nothing else reads, and small ones that are read as places only."""
    read = {leaf for side in sides for leaf in (*side.leaves, *side.pointers, *side.relations)}
    read |= {owned.leaf for side in sides for owned in side.owned}
    read |= {leaf for grid in grids for leaf in grid.leaves}
    read |= {
        place.leaf
        for grid in grids
        for place in grid.cells
        if isinstance(place, Cells) and math.prod(place.leaf.shape) > _SMALL
    }
    return tuple(leaf for leaf in leaves if leaf not in read)


def _grids(scalars: list[Cell], leaves: list[Leaf], sides: list[Side]) -> tuple[Grid, ...]:
    """All grids, each with the values that belong to some set, and with the places on it."""
    taken = {leaf for side in sides for leaf in (*side.leaves, *side.relations)}
    free = [leaf for leaf in leaves if leaf not in taken and leaf.is_grid]
    owned = {part.leaf: part for side in sides for part in side.owned}
    sizes = dict.fromkeys((leaf.shape[0], leaf.shape[1]) for leaf in free)
    grids = []
    for size in sizes:
        cells: list[Cell | Cells] = [
            c for c in scalars if (c.row.num_values, c.col.num_values) == size
        ]
        for leaf in leaves if len(sizes) == 1 else ():
            cells += _cells(leaf, size)
        here = [leaf for leaf in free if leaf.shape[:2] == size]
        plain = tuple(
            leaf for leaf in here if leaf not in owned or (leaf.num_values or 0) <= _SATURATION
        )
        parts = tuple(owned[leaf] for leaf in here if leaf in owned)
        grids.append(Grid(size, plain, parts, tuple(cells)))
    return tuple(grids)


def _cells(leaf: Leaf, size: tuple[int, int]) -> list[Cells]:
    """Pairs of integers within a grid; without bounds, nothing tells which of them is the row."""
    if not _is_pair(leaf):
        return []
    if leaf.high is None:
        return [Cells(leaf), Cells(leaf, is_swapped=True)]
    return [Cells(leaf)] if _is_within(leaf, size) else []


def _is_within(leaf: Leaf, size: tuple[int, ...]) -> bool:
    """Whether bounded pairs may all be cells of a grid, as far as their bounds tell."""
    if leaf.ranges is None or leaf.high is None:
        return (leaf.high or 0) <= max(size)
    highs = np.reshape([high for _, high in leaf.ranges], (-1, 2))
    return bool(np.all(highs <= np.array(size)))
