"""Actor-critics for mazes: the blog post's, and one that plans."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray
from jumanji.environments import Maze

from ..environments import Environment
from .layers import GridConv, Heads, bias_of, everywhere

NetworkFactory = Callable[[PRNGKeyArray], eqx.Module]


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
        log_worth = jax.nn.log_sigmoid(10 * everywhere(self.worth, planes))
        log_share = jax.nn.log_sigmoid(10 * everywhere(self.share, planes))

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
    drawn = (linear.weight / 10 + prior, bias_of(linear) / 10 + bias)
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), linear, drawn)


def _larger(a: Array, b: Array) -> Array:
    # The gradient of `jnp.maximum` shares ties evenly, which takes four times as long here.
    return jnp.where(a > b, a, b)


def maze_planes(observation: Any) -> Float[Array, "H W 3"]:
    """Walls, agent and target as three binary planes."""
    height, width = observation.walls.shape

    def plane(position: Any) -> Array:
        rows = jax.nn.one_hot(position.row, height)
        return jnp.outer(rows, jax.nn.one_hot(position.col, width))

    walls = observation.walls.astype(float)
    planes = walls, plane(observation.agent_position), plane(observation.target_position)
    return jnp.stack(planes, axis=-1)


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
