"""Layers that the networks share."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

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
    stride: int = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int = 3,
        *,
        stride: int = 1,
        key: PRNGKeyArray,
    ) -> None:
        """Draw the weights as `eqx.nn.Conv2d` does.

        Args:
            in_channels: of the grid.
            out_channels: of the result.
            size: rows and columns of the window.
            stride: cells from one window to the next, along rows and columns.
            key: consumed.
        """
        self.stride = stride
        weight_key, bias_key = jax.random.split(key)
        bound = 1 / math.sqrt(size * size * in_channels)
        shape = (size, size, in_channels, out_channels)
        self.weight = jax.random.uniform(weight_key, shape, minval=-bound, maxval=bound)
        self.bias = jax.random.uniform(bias_key, (out_channels,), minval=-bound, maxval=bound)

    def __call__(self, grid: Float[Array, "H W C"]) -> Float[Array, "h w D"]:
        """Slide the window over the grid."""
        is_narrow = grid.shape[1] <= _BANDED_LIMIT and self.stride == 1
        product = self._by_rows(grid) if is_narrow else self._by_patches(grid)
        return product + jnp.broadcast_to(self.bias, product.shape)

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
            grid[row : row + height : self.stride, col : col + width : self.stride]
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


class SetAttention(eqx.Module):
    """One block of attention among the members of a set, and a hidden layer for each of them.

    No member has a number: permuting them permutes the result. What is known of pairs, as
    distances or edges, is added to the attention's logits with a learned weight for each head
    (as the edges of Graphormer, Ying et al. 2021, https://arxiv.org/abs/2106.05234).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> block = SetAttention(16, relations=1, key=jax.random.key(0))
        >>> block(jnp.zeros((5, 16)), jnp.zeros((5, 5, 1))).shape
        (5, 16)
    """

    queries_keys_values: eqx.nn.Linear
    relations: eqx.nn.Linear | None
    out: eqx.nn.Linear
    expand: eqx.nn.Linear
    contract: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(
        self, width: int, *, relations: int = 0, heads: int = 4, key: PRNGKeyArray
    ) -> None:
        """Draw the weights.

        Args:
            width: features of a member; a multiple of `heads`.
            relations: features of a pair.
            heads: number of attention heads.
            key: consumed.
        """
        keys = jax.random.split(key, 5)
        self.queries_keys_values = eqx.nn.Linear(width, 3 * width, use_bias=False, key=keys[0])
        self.relations = (
            eqx.nn.Linear(relations, heads, use_bias=False, key=keys[1]) if relations else None
        )
        self.out = eqx.nn.Linear(width, width, key=keys[2])
        self.expand = eqx.nn.Linear(width, 2 * width, key=keys[3])
        self.contract = eqx.nn.Linear(2 * width, width, key=keys[4])
        self.heads = heads

    def __call__(
        self, members: Float[Array, "N D"], pairs: Float[Array, "N N R"] | None = None
    ) -> Float[Array, "N D"]:
        """What each member is, having looked at the others."""
        size, width = members.shape
        mixed = everywhere(self.queries_keys_values, members).reshape(size, 3, self.heads, -1)
        queries, keys, values = mixed[:, 0], mixed[:, 1], mixed[:, 2]
        logits = jnp.einsum("ihd,jhd->hij", queries, keys) / math.sqrt(width / self.heads)
        if self.relations is not None and pairs is not None:
            logits = logits + jnp.moveaxis(everywhere(self.relations, pairs), -1, 0)
        looked = jnp.einsum("hij,jhd->ihd", jax.nn.softmax(logits), values)
        members = members + everywhere(self.out, looked.reshape(size, width))
        hidden = jax.nn.relu(everywhere(self.expand, members))
        return members + everywhere(self.contract, hidden)


def everywhere(linear: eqx.nn.Linear, rows: Float[Array, "*n C"]) -> Float[Array, "*n D"]:
    """A linear layer on the last axis of an array.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> everywhere(eqx.nn.Linear(3, 5, key=jax.random.key(0)), jnp.zeros((2, 4, 3))).shape
        (2, 4, 5)
    """
    product = rows @ linear.weight.T
    return (
        product if linear.bias is None else product + jnp.broadcast_to(linear.bias, product.shape)
    )


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
        lambda linear: (linear.weight, linear.bias), layer, (weight, jnp.zeros_like(bias_of(layer)))
    )


def bias_of(linear: eqx.nn.Linear) -> Array:
    """The biases of a layer that has some."""
    assert linear.bias is not None  # Equinox allows layers without them.
    return linear.bias
