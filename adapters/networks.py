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

from .actions import make_action_codec
from .environments import Environment

NetworkFactory = Callable[[PRNGKeyArray], eqx.Module]

_ONE_HOT_LIMIT = 32


class GridConv(eqx.Module):
    """Convolution over a grid as patches and one matrix product, without padding.

    On a CPU, XLA's own convolution of few channels takes two to three times as long with
    its gradient, and far longer inside a loop.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> GridConv(3, 16, key=jax.random.key(0))(jnp.zeros((10, 10, 3))).shape
        (8, 8, 16)
    """

    linear: eqx.nn.Linear
    size: int = eqx.field(static=True)

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
        self.linear = eqx.nn.Linear(size * size * in_channels, out_channels, key=key)
        self.size = size

    def __call__(self, grid: Float[Array, "H W C"]) -> Float[Array, "h w D"]:
        """Slide the window over the grid."""
        height, width = (n - self.size + 1 for n in grid.shape[:2])
        patches = [
            grid[row : row + height, col : col + width]
            for row in range(self.size)
            for col in range(self.size)
        ]
        return jnp.concatenate(patches, axis=-1) @ self.linear.weight.T + jnp.broadcast_to(
            self.linear.bias, (height, width, self.linear.out_features)
        )


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

    def __init__(
        self, in_size: int, output_shape: tuple[int, ...], *, key: PRNGKeyArray
    ) -> None:
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

    def __call__(self, features: Float[Array, " F"]) -> tuple[Float[Array, "..."], Float[Array, ""]]:
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
    layer = eqx.nn.Linear(in_size, out_size, key=key)
    weight = jax.nn.initializers.orthogonal(scale)(key, layer.weight.shape)
    return eqx.tree_at(
        lambda linear: (linear.weight, linear.bias),
        layer,
        (weight, jnp.zeros_like(layer.bias)),
    )


class BlogMazeNetwork(eqx.Module):
    """The network of the blog post: one 3 x 3 filter, a hidden layer of 64, two heads."""

    conv: GridConv
    hidden: eqx.nn.Linear
    heads: Heads
    activation: Callable[[Array], Array]

    def __init__(
        self, *, key: PRNGKeyArray, channels: int = 1, activation: Callable[[Array], Array] = jax.nn.relu
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


def maze_planes(observation: Any) -> Float[Array, "H W 3"]:
    """Walls, agent and target as three binary planes."""
    height, width = observation.walls.shape

    def plane(position: Any) -> Array:
        rows = jax.nn.one_hot(position.row, height)
        return jnp.outer(rows, jax.nn.one_hot(position.col, width))

    walls = observation.walls.astype(float)
    planes = walls, plane(observation.agent_position), plane(observation.target_position)
    return jnp.stack(planes, axis=-1)
