"""The store of past samples: what it keeps, what it draws, what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.core import Replay, add_to_replay, init_replay, replay_indices, take

SAMPLE = {"image": jax.ShapeDtypeStruct((2,), jnp.uint8), "value": jnp.zeros(())}


def batch_of(first, size=3):
    numbers = jnp.arange(first, first + size)
    return {
        "image": jnp.stack([numbers, numbers], 1).astype(jnp.uint8),
        "value": numbers.astype(jnp.float32),
    }


def filled(batches, capacity=6):
    replay = init_replay(SAMPLE, capacity=capacity)
    for number in range(batches):
        replay = add_to_replay(replay, batch_of(3 * number))
    return replay


def test_store_keeps_the_newest_samples():
    kept = filled(5)
    assert sorted(kept.samples["value"].tolist()) == [9, 10, 11, 12, 13, 14]
    assert kept.filled == 6
    assert kept.place == 3


def test_leaves_of_a_sample_stay_together_and_keep_their_dtypes():
    samples = filled(5).samples
    assert samples["image"].dtype == jnp.uint8
    np.testing.assert_array_equal(samples["image"][:, 0], samples["value"])


def test_only_what_was_added_is_drawn():
    replay = filled(1)
    indices = replay_indices(replay, jax.random.key(0), minibatches=8, minibatch_size=64)
    assert set(take(replay.samples, indices.ravel())["value"].tolist()) == {0, 1, 2}


def test_every_sample_of_a_full_store_is_drawn_as_often():
    replay = filled(3)
    indices = replay_indices(replay, jax.random.key(0), minibatches=60, minibatch_size=1000)
    counts = np.bincount(indices.ravel(), minlength=6)
    np.testing.assert_allclose(counts / 60_000, 1 / 6, atol=0.01)


def test_jit_gives_the_same_store_and_the_same_draws():
    added = jax.jit(add_to_replay)(filled(2), batch_of(6))
    assert added.samples["value"].tolist() == filled(3).samples["value"].tolist()
    draw = jax.jit(lambda r, k: replay_indices(r, k, minibatches=2, minibatch_size=4))
    wanted = replay_indices(added, jax.random.key(1), minibatches=2, minibatch_size=4)
    assert draw(added, jax.random.key(1)).tolist() == wanted.tolist()


def test_stores_side_by_side_under_vmap_are_apart():
    stores = jax.tree.map(lambda a, b: jnp.stack([a, b]), filled(1), filled(2))
    added = jax.vmap(add_to_replay)(stores, jax.tree.map(lambda x: jnp.stack([x, x]), batch_of(9)))
    one = add_to_replay(filled(1), batch_of(9))
    other = add_to_replay(filled(2), batch_of(9))
    assert added.samples["value"].tolist() == [
        one.samples["value"].tolist(),
        other.samples["value"].tolist(),
    ]


def test_store_survives_tree_map():
    assert isinstance(jax.tree.map(lambda x: x, filled(1)), Replay)


def test_capacity_below_one_is_refused():
    with pytest.raises(ValueError, match="capacity should be 1 at least, but is 0"):
        init_replay(SAMPLE, capacity=0)


def test_samples_that_do_not_fit_evenly_are_refused():
    with pytest.raises(ValueError, match="a capacity of 6 is no multiple of 4"):
        add_to_replay(filled(1), batch_of(0, size=4))


def test_no_samples_are_refused():
    message = r"add_to_replay\(\): the batch has no sample; give at least one\."
    with pytest.raises(ValueError, match=message):
        add_to_replay(filled(1), batch_of(0, size=0))


def test_a_sample_without_an_array_is_refused():
    with pytest.raises(ValueError, match=r"init_replay\(\): the sample has no array"):
        init_replay({"nothing": None}, capacity=4)


def test_samples_of_another_kind_are_refused_by_name():
    wrong = {**batch_of(0), "value": jnp.zeros((3, 1))}
    with pytest.raises(TypeError, match=r"'value'.*float32\[1\].*'value'.*float32\[\]"):
        add_to_replay(filled(1), wrong)


def test_samples_of_a_class_without_equality_are_accepted():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(eq=False)
    class Seen:
        x: jax.Array

    replay = add_to_replay(init_replay(Seen(jnp.zeros(())), capacity=2), Seen(jnp.ones(2)))
    assert replay.samples.x.tolist() == [1.0, 1.0]
