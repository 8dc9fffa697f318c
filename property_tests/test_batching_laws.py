"""Laws of batches and minibatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vernal.core import Batch, make_batch, minibatch_indices, take

SIZES = st.sampled_from([(1, 1), (5, 1), (1, 4), (3, 2)])
DTYPES = [np.float32, np.int8, np.uint16, np.bool_, jnp.bfloat16, "key"]
SEEDS = st.integers(0, 2**31 - 1)

jit_indices = jax.jit(minibatch_indices, static_argnames=("size", "minibatch_size"))


def numbered(shape, dtype, extra):
    """An array whose every entry tells its step and environment, as far as its dtype can."""
    identity = np.arange(np.prod(shape)).reshape(shape)
    entries = np.broadcast_to(identity.reshape(*shape, *(1,) * len(extra)), (*shape, *extra))
    if isinstance(dtype, str):
        flat = jax.vmap(jax.random.key)(jnp.asarray(entries.reshape(-1)))
        return flat.reshape(entries.shape)
    return jnp.asarray(entries % 2 if dtype is np.bool_ else entries, dtype)


LEAVES = st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (1,), (2, 3)]))
TREES = st.recursive(
    LEAVES,
    lambda children: (
        st.dictionaries(st.sampled_from("abc"), children, max_size=3)
        | st.lists(children, max_size=2)
    ),
    max_leaves=4,
)


def build(tree, shape):
    """A tree of arrays from a tree of dtypes and trailing shapes."""
    return jax.tree.map(
        lambda leaf: numbered(shape, *leaf), tree, is_leaf=lambda node: isinstance(node, tuple)
    )


def plain(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def batch_of(shape, observations, actions):
    floats = numbered(shape, np.float32, ())
    return make_batch(
        build(observations, shape), build(actions, shape), floats, floats + 100, -floats, 2 * floats
    )


@given(SIZES, TREES, TREES)
def test_a_batch_holds_every_step_once_in_order(shape, observations, actions):
    """Sample t * B + b of every leaf is step t of environment b; dtype and tree stay."""
    steps, environments = shape
    batch = batch_of(shape, observations, actions)
    for tree, drawn in [(batch.observations, observations), (batch.actions, actions)]:
        rollout = build(drawn, shape)
        assert jax.tree.structure(tree) == jax.tree.structure(rollout)
        for flat, stacked in zip(jax.tree.leaves(tree), jax.tree.leaves(rollout), strict=True):
            assert flat.dtype == stacked.dtype
            assert flat.shape == (steps * environments, *stacked.shape[2:])
            for t in range(steps):
                for b in range(environments):
                    sample = plain(flat)[t * environments + b]
                    np.testing.assert_array_equal(sample, plain(stacked)[t, b])


@given(SIZES)
def test_a_batch_keeps_its_fields_apart(shape):
    """Each array arrives in the field of its own name."""
    identity = np.arange(np.prod(shape), dtype=np.float32)
    batch = batch_of(shape, (np.float32, ()), (np.int8, ()))
    np.testing.assert_array_equal(batch.observations, identity)
    np.testing.assert_array_equal(batch.actions, identity.astype(np.int8))
    np.testing.assert_array_equal(batch.log_probs, identity)
    np.testing.assert_array_equal(batch.values, identity + 100)
    np.testing.assert_array_equal(batch.advantages, -identity)
    np.testing.assert_array_equal(batch.value_targets, 2 * identity)


CUTS = st.sampled_from([(1, 1), (6, 1), (6, 6), (12, 4)])


@given(CUTS, SEEDS)
def test_minibatches_are_a_partition(cut, seed):
    """Every sample is in exactly one minibatch, exactly once; all are of one size."""
    size, minibatch_size = cut
    indices = jit_indices(jax.random.key(seed), size=size, minibatch_size=minibatch_size)
    assert indices.shape == (size // minibatch_size, minibatch_size)
    np.testing.assert_array_equal(np.sort(indices, axis=None), np.arange(size))


@given(SEEDS)
def test_a_key_decides_the_minibatches(seed):
    """The same key cuts in the same way; eight keys never all in one."""
    keys = jax.random.split(jax.random.key(seed), 8)
    cuts = [np.asarray(jit_indices(key, size=12, minibatch_size=4)) for key in keys]
    np.testing.assert_array_equal(jit_indices(keys[0], size=12, minibatch_size=4), cuts[0])
    assert any((cut != cuts[0]).any() for cut in cuts)
    assert any((cut.reshape(-1) != np.arange(12)).any() for cut in cuts)


@given(st.integers(-20, 20), st.integers(-20, 20))
def test_no_sample_is_ever_dropped(size, minibatch_size):
    """Sizes that do not divide, or are no sizes, are refused: nothing is left over."""
    if size > 0 and minibatch_size > 0 and size % minibatch_size == 0:
        size += 1 if minibatch_size > 1 else -size
    with pytest.raises(ValueError, match=f"{size} samples cannot be cut into .* {minibatch_size};"):
        minibatch_indices(jax.random.key(0), size=size, minibatch_size=minibatch_size)


@given(TREES, SEEDS)
def test_minibatches_keep_a_sample_together(tree, seed):
    """All leaves of a minibatch are at the same samples, and together they are all."""
    batch = batch_of((3, 2), tree, tree)
    indices = jit_indices(jax.random.key(seed), size=6, minibatch_size=2)
    for rows in indices:
        minibatch = take(batch, rows)
        assert isinstance(minibatch, Batch)
        for part, whole in zip(jax.tree.leaves(minibatch), jax.tree.leaves(batch), strict=True):
            assert part.dtype == whole.dtype
            np.testing.assert_array_equal(plain(part), plain(whole)[np.asarray(rows)])


take_gradient = jax.jit(jax.grad(lambda x, rows: take({"x": x}, rows)["x"].sum()))


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_the_gradient_of_taking_counts(rows):
    """A sample gets one unit of gradient for each time that it was taken."""
    gradient = take_gradient(np.zeros((5, 2), np.float32), np.array(rows, np.int32))
    counts = np.bincount(rows, minlength=5).astype(np.float32)
    np.testing.assert_array_equal(gradient, np.stack([counts, counts], axis=1))
