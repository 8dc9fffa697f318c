"""Packed modules: whole through every border, and copies that can be called."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from vernal.adapters.modules import Packed, pack, unpack


class Layer(eqx.Module):
    """Weights, a function that pickle finds by its name, a number and nothing."""

    weight: Array
    activation: Callable[[Any], Any] = np.tanh
    scale: float = 2.0
    bias: Array | None = None

    def __call__(self, x: Array) -> Array:
        return self.scale * self.activation(np.asarray(self.weight) @ np.asarray(x))


X = jnp.array([0.5, -1.0])
LAYER = Layer(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
# Where a packed module may have been.
COMES_FROM: dict[str, Callable[[Packed[Layer]], Packed[Layer]]] = {
    "pack": lambda packed: packed,
    "jit": jax.jit(lambda packed: packed),
    "vmap": lambda packed: jax.tree.map(
        lambda x: x[0],
        jax.vmap(lambda _, packed: packed, in_axes=(0, None))(jnp.zeros(2), packed),
    ),
    "tree.map": lambda packed: jax.tree.map(jnp.asarray, packed),
    "NumPy": lambda packed: jax.tree.map(np.asarray, packed),
}
COPY: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda packed: pickle.loads(pickle.dumps(packed)),
}


@pytest.mark.parametrize("way", COPY)
@pytest.mark.parametrize("origin", COMES_FROM)
def test_a_copy_of_a_packed_module_is_the_same_module(way, origin):
    packed = COMES_FROM[origin](pack(LAYER))
    other = COPY[way](packed)
    np.testing.assert_array_equal(other(X), LAYER(X))
    # So it may take the first one's place in a compiled function, or in a loop's carry.
    assert jax.tree.structure(other) == jax.tree.structure(packed)
    assert isinstance(unpack(other), Layer)


def test_a_deep_copy_has_arrays_of_its_own_and_the_same_functions():
    network = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    first = jax.tree.map(np.array, pack(network))
    second = copy.deepcopy(first)
    before = np.asarray(second.unpack()(X))
    for leaf in jax.tree.leaves(first):
        leaf[...] = 0
    np.testing.assert_array_equal(second.unpack()(X), before)
    assert jax.tree.structure(second) == jax.tree.structure(first)
    assert unpack(second).activation is network.activation
