"""Actor-critics in Equinox: built from an environment's specs, or made for mazes.

Each maps one observation to `(policy outputs, value)`. `jax.vmap` makes a batch.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from jumanji import specs
from jumanji.environments import Maze

from .actions import make_action_codec
from .environments import Environment, read_specs
from .mazes import FixedWallsGenerator

NetworkFactory = Callable[[PRNGKeyArray], eqx.Module]

_ONE_HOT_LIMIT = 32
_BANDED_LIMIT = 16


class GridConv(eqx.Module):
    """Convolution over a grid as one matrix product, without padding.

    On a CPU, XLA's own convolution of few channels takes two to three times as long with its
    gradient, and far longer inside a loop (https://github.com/jax-ml/jax/issues/12868).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> GridConv(3, 16, key=jax.random.key(0))(jnp.zeros((10, 10, 3))).shape
        (8, 8, 16)
    """

    weight: Float[Array, "size size C D"]
    bias: Float[Array, " D"]

    def __init__(
        self, in_channels: int, out_channels: int, size: int = 3, *, key: PRNGKeyArray
    ) -> None:
        """Draw the weights as `eqx.nn.Conv2d` does.

        Args:
            in_channels: of the grid.
            out_channels: of the result.
            size: rows and columns of the window.
            key: consumed.
        """
        weight_key, bias_key = jax.random.split(key)
        bound = 1 / math.sqrt(size * size * in_channels)
        shape = (size, size, in_channels, out_channels)
        self.weight = jax.random.uniform(weight_key, shape, minval=-bound, maxval=bound)
        self.bias = jax.random.uniform(bias_key, (out_channels,), minval=-bound, maxval=bound)

    def __call__(self, grid: Float[Array, "H W C"]) -> Float[Array, "h w D"]:
        """Slide the window over the grid."""
        size, _, _, out_channels = self.weight.shape
        height, width = (n - size + 1 for n in grid.shape[:2])
        is_narrow = grid.shape[1] <= _BANDED_LIMIT
        product = self._by_rows(grid) if is_narrow else self._by_patches(grid)
        return product + jnp.broadcast_to(self.bias, (height, width, out_channels))

    def _by_rows(self, grid: Float[Array, "H W C"]) -> Float[Array, "h w D"]:
        # Along the columns a convolution is a banded matrix. It multiplies many zeros, but its
        # left side, some whole rows, lies in memory as it is: faster than patches if narrow.
        size, _, channels, out_channels = self.weight.shape
        height, width = (n - size + 1 for n in grid.shape[:2])
        offsets = np.arange(grid.shape[1])[None, :] - np.arange(width)[:, None]
        band = jnp.asarray(offsets == np.arange(size)[:, None, None], grid.dtype)
        matrix = jnp.einsum("kjw,akcd->awcjd", band, self.weight)
        rows = [grid[row : row + height].reshape(height, -1) for row in range(size)]
        product = jnp.concatenate(rows, axis=1) @ matrix.reshape(
            size * grid.shape[1] * channels, width * out_channels
        )
        return product.reshape(height, width, out_channels)

    def _by_patches(self, grid: Float[Array, "H W C"]) -> Float[Array, "h w D"]:
        size, _, _, out_channels = self.weight.shape
        height, width = (n - size + 1 for n in grid.shape[:2])
        patches = [
            grid[row : row + height, col : col + width]
            for row in range(size)
            for col in range(size)
        ]
        return jnp.concatenate(patches, axis=-1) @ self.weight.reshape(-1, out_channels)


class Heads(eqx.Module):
    """Policy outputs and a value from features; nearly uniform and nearly 0 at first.

    Orthogonal weights of scale 0.01 for the policy: detail 2 of Huang et al. 2022,
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> outputs, value = Heads(8, (4,), key=jax.random.key(0))(jnp.zeros(8))
        >>> outputs.shape, value.shape
        ((4,), ())
    """

    policy: eqx.nn.Linear
    value: eqx.nn.Linear
    output_shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, in_size: int, output_shape: tuple[int, ...], *, key: PRNGKeyArray) -> None:
        """Draw the weights.

        Args:
            in_size: number of features.
            output_shape: shape of the policy's outputs.
            key: consumed.
        """
        policy_key, value_key = jax.random.split(key)
        self.policy = orthogonal_linear(in_size, math.prod(output_shape), 0.01, key=policy_key)
        self.value = orthogonal_linear(in_size, "scalar", 0.01, key=value_key)
        self.output_shape = output_shape

    def __call__(
        self, features: Float[Array, " F"]
    ) -> tuple[Float[Array, "..."], Float[Array, ""]]:
        """Policy outputs and value."""
        return self.policy(features).reshape(self.output_shape), self.value(features)


def orthogonal_linear(
    in_size: int, out_size: Any, scale: float, *, key: PRNGKeyArray
) -> eqx.nn.Linear:
    """Linear layer with orthogonal weights and zero biases.

    Args:
        in_size: number of inputs.
        out_size: number of outputs, or `"scalar"`.
        scale: factor of the weights.
        key: consumed.

    Returns:
        The layer.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> weight = orthogonal_linear(3, 3, 1.0, key=jax.random.key(0)).weight
        >>> bool(jnp.allclose(weight @ weight.T, jnp.eye(3), atol=1e-5))
        True
    """
    layer_key, weight_key = jax.random.split(key)
    layer = eqx.nn.Linear(in_size, out_size, key=layer_key)
    weight = jax.nn.initializers.orthogonal(scale)(weight_key, layer.weight.shape)
    return eqx.tree_at(
        lambda linear: (linear.weight, linear.bias),
        layer,
        (weight, jnp.zeros_like(_bias(layer))),
    )


class Leaf(NamedTuple):
    """One array of an observation, as its spec describes it.

    Attributes:
        path: names that lead to it, outermost first.
        shape: its shape.
        dtype: its dtype.
        low: smallest value, or `None` if there is no finite bound on either side.
        high: largest value, or `None` likewise.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    low: float | None
    high: float | None

    def read(self, observation: Any) -> Array:
        """The array itself; outside of `jit`, Jumanji leaves some numbers as Python's own."""
        return jnp.asarray(functools.reduce(getattr, self.path, observation))

    def encode(self, observation: Any) -> Float[Array, "..."]:
        """As floats of order 1, in one more axis: small integers one-hot, others scaled."""
        values = self.read(observation)
        if self.low is not None and self.high is not None:
            count = int(self.high - self.low) + 1
            if jnp.issubdtype(self.dtype, jnp.integer) and count <= _ONE_HOT_LIMIT:
                return jax.nn.one_hot(values - int(self.low), count)
            centre, half = (self.high + self.low) / 2, max((self.high - self.low) / 2, 1e-6)
            return ((values.astype(float) - centre) / half)[..., None]
        if self.dtype == bool:
            return values.astype(float)[..., None]
        values = values.astype(float)
        return (jnp.sign(values) * jnp.log1p(jnp.abs(values)))[..., None]


class Cell(NamedTuple):
    """A row and a column that name a cell of a grid; read as a plane with one 1.

    Attributes:
        row: where the row stands.
        col: where the column stands.
    """

    row: Leaf
    col: Leaf

    def encode(self, observation: Any) -> Float[Array, "H W 1"]:
        """The plane."""
        rows, cols = (
            jax.nn.one_hot(leaf.read(observation), int(leaf.high or 0) + 1) for leaf in self
        )
        return jnp.outer(rows, cols)[..., None]


class Layout(NamedTuple):
    """What of an observation is read in which way.

    Attributes:
        grids: for each height and width, the leaves and cells that lie on such a grid.
        vectors: all other leaves.
    """

    grids: tuple[tuple[tuple[int, int], tuple[Leaf | Cell, ...]], ...]
    vectors: tuple[Leaf, ...]

    def see(self, observation: Any) -> tuple[list[Float[Array, "H W C"]], Float[Array, " F"]]:
        """One array of planes for each size of grid, and one vector."""
        grids = [
            jnp.concatenate([p.encode(observation).reshape(*size, -1) for p in parts], axis=-1)
            for size, parts in self.grids
        ]
        vectors = [leaf.encode(observation).ravel() for leaf in self.vectors]
        return grids, jnp.concatenate([jnp.zeros(0), *vectors])


def read_layout(environment: Environment) -> Layout:
    """Decide from an environment's specs alone how its observations are read.

    An array whose first two axes are at least 3 long is a grid. A `row` and a `col` whose
    bounds are those of such a grid are a cell of it. Everything else is a vector. The action
    mask is left to the policy's head.

    Args:
        environment: with Jumanji's `observation_spec`.

    Returns:
        The layout.

    Raises:
        ValueError: a leaf is neither boolean nor a number, or there is nothing to see.

    Example:
        >>> import jumanji
        >>> layout = read_layout(jumanji.make("Maze-v0"))
        >>> [(size, len(parts)) for size, parts in layout.grids]
        [((10, 10), 3)]
        >>> [leaf.path for leaf in layout.vectors]
        [('step_count',)]
    """
    leaves = [leaf for leaf in _leaves(read_specs(environment)[0]) if leaf.path != ("action_mask",)]
    for leaf in leaves:
        if not (leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.number)):
            raise ValueError(
                f"the observation's leaf '{'.'.join(leaf.path)}' has dtype {leaf.dtype}, which no "
                "encoder reads; give a network of your own."
            )
    if not leaves:
        raise ValueError("the observation has no leaf to read besides the action mask.")
    grids: dict[tuple[int, int], list[Leaf | Cell]] = {}
    rest = []
    for leaf in leaves:
        if len(leaf.shape) >= 2 and min(leaf.shape[:2]) >= 3:
            grids.setdefault((leaf.shape[0], leaf.shape[1]), []).append(leaf)
        else:
            rest.append(leaf)
    by_path = {leaf.path: leaf for leaf in rest}
    for leaf in rest:
        other = by_path.get((*leaf.path[:-1], "col"))
        if leaf.path[-1:] != ("row",) or other is None or leaf.shape or other.shape:
            continue
        if leaf.low == 0 == other.low and leaf.high is not None and other.high is not None:
            cells = grids.get((int(leaf.high) + 1, int(other.high) + 1))
            if cells is not None:
                cells.append(Cell(leaf, other))
                del by_path[leaf.path], by_path[other.path]
    return Layout(
        tuple((size, tuple(parts)) for size, parts in grids.items()), tuple(by_path.values())
    )


def _leaves(spec: Any, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    if not isinstance(spec, specs.Array):
        for name, part in spec._specs.items():
            yield from _leaves(part, (*path, name))
        return
    low = high = None
    if isinstance(spec, specs.BoundedArray):
        low, high = (
            float(f(np.asarray(b))) for f, b in ((np.min, spec.minimum), (np.max, spec.maximum))
        )
    bounded = low is not None and high is not None and np.isfinite([low, high]).all()
    if not bounded or spec.dtype == bool:
        low = high = None
    yield Leaf(path, tuple(spec.shape), spec.dtype, low, high)


class SpecNetwork(eqx.Module):
    """Actor-critic built from an environment's specs.

    Grids pass a convolution; its features and the vectors pass a hidden layer.
    """

    layout: Layout = eqx.field(static=True)
    convs: tuple[GridConv, ...]
    hidden: eqx.nn.Linear
    heads: Heads

    def __init__(
        self,
        environment: Environment,
        *,
        channels: int = 8,
        width: int = 64,
        key: PRNGKeyArray,
    ) -> None:
        """Read the specs and draw the weights.

        Args:
            environment: with Jumanji's specs.
            channels: filters over each grid.
            width: size of the hidden layer.
            key: consumed.

        Raises:
            ValueError: the observation or the action cannot be served.
        """
        self.layout = read_layout(environment)
        conv_key, hidden_key, heads_key = jax.random.split(key, 3)
        _, timestep = jax.eval_shape(environment.reset, jax.random.key(0))
        grids, vector = jax.eval_shape(self.layout.see, timestep.observation)
        keys = jax.random.split(conv_key, max(len(grids), 1))
        self.convs = tuple(
            GridConv(grid.shape[-1], channels, key=k) for grid, k in zip(grids, keys, strict=False)
        )
        size = vector.size + sum(
            (h - 2) * (w - 2) * channels for h, w, _ in (g.shape for g in grids)
        )
        self.hidden = eqx.nn.Linear(size, width, key=hidden_key)
        self.heads = Heads(width, make_action_codec(environment).output_shape, key=heads_key)

    def __call__(self, observation: Any) -> tuple[Array, Array]:
        """Policy outputs and value for one observation."""
        grids, vector = self.layout.see(observation)
        features = [jax.nn.relu(conv(g)).ravel() for conv, g in zip(self.convs, grids, strict=True)]
        return self.heads(jax.nn.relu(self.hidden(jnp.concatenate([*features, vector]))))


class BlogMazeNetwork(eqx.Module):
    """The network of the blog post: one 3 x 3 filter, a hidden layer of 64, two heads."""

    conv: GridConv
    hidden: eqx.nn.Linear
    heads: Heads
    activation: Callable[[Array], Array]

    def __init__(
        self,
        *,
        key: PRNGKeyArray,
        channels: int = 1,
        activation: Callable[[Array], Array] = jax.nn.relu,
    ) -> None:
        """Draw the weights; the key is consumed."""
        conv_key, hidden_key, heads_key = jax.random.split(key, 3)
        self.conv = GridConv(3, channels, key=conv_key)
        self.hidden = eqx.nn.Linear(64 * channels, 64, key=hidden_key)
        self.heads = Heads(64, (4,), key=heads_key)
        self.activation = activation

    def __call__(self, observation: Any) -> tuple[Array, Array]:
        """Logits of the four moves, and the value."""
        features = self.activation(self.conv(maze_planes(observation)))
        return self.heads(jax.nn.relu(self.hidden(features.ravel())))


class PlanningMazeNetwork(eqx.Module):
    """Spreads the goal's worth over the maze, then looks at the cells around the agent.

    Each cell gets a worth of its own `r` and a share `p` that it passes on, both learned from
    what stands there, and then, `plan_steps` times over,

        v = max(r, p * max over the four neighbours of v)

    in logarithms, where the difference between neighbours does not fade with the distance. A
    value propagation network (Nardelli et al. 2019, https://arxiv.org/abs/1805.11199): what it
    learns in one maze holds in another.
    """

    worth: eqx.nn.Linear
    share: eqx.nn.Linear
    hidden: eqx.nn.Linear
    heads: Heads
    plan_steps: int = eqx.field(static=True)

    def __init__(
        self, *, key: PRNGKeyArray, channels: int = 1, width: int = 64, plan_steps: int = 40
    ) -> None:
        """Draw the weights.

        Args:
            key: consumed.
            channels: how many worths to spread side by side.
            width: size of the hidden layer.
            plan_steps: how far, in cells, the worth of a goal reaches.
        """
        worth_key, share_key, hidden_key, heads_key = jax.random.split(key, 4)
        # At first the target alone has a worth, and every cell, walls too, passes most of it
        # on: were all cells worth the same, nothing could be learned from the maze.
        self.worth = _with_prior(eqx.nn.Linear(2, channels, key=worth_key), (0.0, 0.6), -0.6)
        self.share = _with_prior(eqx.nn.Linear(2, channels, key=share_key), (0.0, 0.0), 0.1)
        self.hidden = eqx.nn.Linear(6 * channels, width, key=hidden_key)
        self.heads = Heads(width, (4,), key=heads_key)
        self.plan_steps = plan_steps

    def __call__(self, observation: Any) -> tuple[Array, Array]:
        """Logits of the four moves, and the value."""
        planes = maze_planes(observation)[..., jnp.array([0, 2])]  # walls and target
        # The factor lets a step of Adam, of the learning rate's size, tell on a logit.
        log_worth = jax.nn.log_sigmoid(10 * _everywhere(self.worth, planes))
        log_share = jax.nn.log_sigmoid(10 * _everywhere(self.share, planes))

        def spread(log_values: Array, _: None) -> tuple[Array, None]:
            around = jnp.pad(log_values, ((1, 1), (1, 1), (0, 0)), constant_values=_NOTHING)
            above_below = _larger(around[:-2, 1:-1], around[2:, 1:-1])
            best = _larger(above_below, _larger(around[1:-1, :-2], around[1:-1, 2:]))
            return _larger(log_worth, log_share + best), None

        log_values, _ = jax.lax.scan(spread, log_worth, length=self.plan_steps)
        around = jnp.pad(log_values, ((1, 1), (1, 1), (0, 0)), constant_values=_NOTHING)
        row, col = observation.agent_position
        window = jax.lax.dynamic_slice(around, (row, col, 0), (3, 3, log_values.shape[-1]))
        here = window[1, 1]
        near = jnp.stack([window[0, 1], window[1, 2], window[2, 1], window[1, 0]])
        steps = jnp.clip(near - here[None], -3, 3)
        features = jnp.concatenate([steps.ravel(), jnp.exp(here), here / 10])
        return self.heads(jax.nn.relu(self.hidden(features)))


_NOTHING = -100.0


def _with_prior(linear: eqx.nn.Linear, weights: tuple[float, ...], bias: float) -> eqx.nn.Linear:
    """The same weights in every row, with a tenth of what was drawn as noise."""
    prior = jnp.broadcast_to(jnp.array(weights), linear.weight.shape)
    drawn = (linear.weight / 10 + prior, _bias(linear) / 10 + bias)
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), linear, drawn)


def _bias(linear: eqx.nn.Linear) -> Array:
    assert linear.bias is not None  # Equinox allows layers without one; ours have it.
    return linear.bias


def _larger(a: Array, b: Array) -> Array:
    # The gradient of `jnp.maximum` shares ties evenly, which takes four times as long here.
    return jnp.where(a > b, a, b)


def _everywhere(linear: eqx.nn.Linear, planes: Float[Array, "H W C"]) -> Float[Array, "H W D"]:
    """A linear layer at every cell of a grid."""
    shape = (*planes.shape[:2], linear.out_features)
    return planes @ linear.weight.T + jnp.broadcast_to(_bias(linear), shape)


def maze_planes(observation: Any) -> Float[Array, "H W 3"]:
    """Walls, agent and target as three binary planes."""
    height, width = observation.walls.shape

    def plane(position: Any) -> Array:
        rows = jax.nn.one_hot(position.row, height)
        return jnp.outer(rows, jax.nn.one_hot(position.col, width))

    walls = observation.walls.astype(float)
    planes = walls, plane(observation.agent_position), plane(observation.target_position)
    return jnp.stack(planes, axis=-1)


def make_spec_network(environment: Environment) -> NetworkFactory:
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
    make_action_codec(environment)
    return lambda key: SpecNetwork(environment, key=key)


def make_default_network(environment: Environment) -> NetworkFactory:
    """What suits an environment: a planner where mazes change, else what the specs ask for.

    Args:
        environment: with Jumanji's specs.

    Returns:
        From a key to the network.

    Raises:
        ValueError: the observation or the action cannot be served.

    Example:
        >>> import jax, jumanji
        >>> type(make_default_network(jumanji.make("Maze-v0"))(jax.random.key(0))).__name__
        'PlanningMazeNetwork'
        >>> type(make_default_network(jumanji.make("Snake-v1"))(jax.random.key(0))).__name__
        'SpecNetwork'
    """
    # Where the walls never change there is nothing to plan, and a plain network is faster.
    if isinstance(environment, Maze) and not isinstance(environment.generator, FixedWallsGenerator):
        return make_planning_network(environment)
    return make_spec_network(environment)


def make_blog_network(environment: Environment) -> NetworkFactory:
    """`BlogMazeNetwork`, for mazes of 10 x 10 cells only.

    Args:
        environment: a maze.

    Returns:
        From a key to the network.

    Raises:
        ValueError: the environment is no maze of 10 x 10 cells.

    Example:
        >>> import jax
        >>> from vernal.adapters.registry import make_environment
        >>> maze = make_environment("maze-easy")
        >>> _, timestep = maze.reset(jax.random.key(0))
        >>> make_blog_network(maze)(jax.random.key(0))(timestep.observation)[0].shape
        (4,)
    """
    if _maze_shape(environment, "blog") != (10, 10):
        raise ValueError("the network 'blog' is for mazes of 10 x 10 cells only.")
    return lambda key: BlogMazeNetwork(key=key)


def make_planning_network(environment: Environment) -> NetworkFactory:
    """`PlanningMazeNetwork`, for mazes of any size.

    Args:
        environment: a maze.

    Returns:
        From a key to the network.

    Raises:
        ValueError: the environment is no maze.

    Example:
        >>> import jax
        >>> from vernal.adapters.registry import make_environment
        >>> maze = make_environment("maze-easy")
        >>> _, timestep = maze.reset(jax.random.key(0))
        >>> make_planning_network(maze)(jax.random.key(0))(timestep.observation)[0].shape
        (4,)
    """
    height, width = _maze_shape(environment, "planning")
    return lambda key: PlanningMazeNetwork(plan_steps=2 * (height + width), key=key)


def _maze_shape(environment: Environment, network: str) -> tuple[int, int]:
    if not isinstance(environment, Maze):
        raise ValueError(f"the network '{network}' is for mazes only; use the network 'auto'.")
    return environment.num_rows, environment.num_cols


NETWORKS: dict[str, Callable[[Environment], NetworkFactory]] = {
    "auto": make_default_network,
    "spec": make_spec_network,
    "planning": make_planning_network,
    "blog": make_blog_network,
}
