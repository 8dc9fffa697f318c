"""Batches and minibatches: a bijection, any tree, edges, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.core import Batch, make_batch, minibatch_indices, take

T, B = 5, 3
IDS = jnp.arange(T * B).reshape(T, B)
NUMBERS = IDS.astype("float32")


def make_arguments(**changes):
    arguments = {
        "observations": {
            "grid": jnp.stack([IDS, -IDS], axis=-1).astype("uint8"),
            "seen": IDS % 2 == 0,
            "keys": jax.random.split(jax.random.key(0), (T, B)),
            "nothing": None,
        },
        "actions": (IDS.astype("int8"), jnp.stack([NUMBERS, NUMBERS], axis=-1)),
        "log_probs": NUMBERS,
        "values": 10 * NUMBERS,
        "advantages": 100 * NUMBERS,
        "value_targets": 1000 * NUMBERS,
    }
    return arguments | changes


def test_step_t_of_environment_b_becomes_sample_t_b():
    batch = make_batch(**make_arguments())
    for t, b in [(0, 0), (0, 2), (1, 0), (4, 2)]:
        assert batch.log_probs[t * B + b] == NUMBERS[t, b]


def test_every_field_holds_what_its_argument_held():
    batch = make_batch(**make_arguments())
    np.testing.assert_array_equal(batch.actions[0], np.arange(T * B))
    np.testing.assert_array_equal(batch.observations["grid"][:, 0], np.arange(T * B))
    for scale, field in enumerate(("log_probs", "values", "advantages", "value_targets")):
        np.testing.assert_array_equal(getattr(batch, field), 10**scale * np.arange(T * B))


def test_trees_keep_structure_trailing_shapes_and_dtypes():
    arguments = make_arguments()
    batch = make_batch(**arguments)
    assert jax.tree.structure(batch) == jax.tree.structure(Batch(**arguments))
    for leaf, rows in zip(jax.tree.leaves(batch), jax.tree.leaves(Batch(**arguments)), strict=True):
        assert (leaf.dtype, leaf.shape) == (rows.dtype, (T * B, *rows.shape[2:]))


def test_random_keys_are_batched_like_any_leaf():
    arguments = make_arguments()
    keys = arguments["observations"]["keys"]
    batched = make_batch(**arguments).observations["keys"]
    np.testing.assert_array_equal(
        jax.random.key_data(batched), jax.random.key_data(keys).reshape(T * B, -1)
    )


def test_eager_equals_jitted():
    arguments = make_arguments()
    eager, jitted = make_batch(**arguments), jax.jit(make_batch)(**arguments)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        assert (a == b).all()


def test_rollouts_can_be_mapped_over():
    arguments = {k: jnp.stack([NUMBERS, -NUMBERS]) for k in make_arguments()}
    mapped = jax.vmap(make_batch)(*arguments.values())
    np.testing.assert_array_equal(mapped.values, [np.arange(T * B), -np.arange(T * B)])


def test_gradients_pass_through_unchanged():
    arguments = make_arguments()
    values = arguments.pop("values")
    weights = jnp.arange(T * B) ** 2.0
    gradient = jax.grad(lambda v: make_batch(**arguments, values=v).values @ weights)(values)
    np.testing.assert_array_equal(gradient, weights.reshape(T, B))


def test_a_leaf_without_entries_is_batched():
    batch = make_batch(**make_arguments(observations=jnp.zeros((T, B, 0))))
    assert batch.observations.shape == (T * B, 0)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1)], ids=str)
def test_smallest_rollouts_are_batched(shape):
    batch = make_batch(*[jnp.ones((*shape, 2))] * 2, *[jnp.ones(shape)] * 4)
    assert batch.observations.shape == (np.prod(shape), 2)


@pytest.mark.parametrize("field", ["values", "advantages", "value_targets"])
def test_a_value_head_with_one_more_axis_is_refused_by_name(field):
    with pytest.raises(TypeError, match=rf"make_batch\(\): argument '{field}' .*float32\[5,3,1\]"):
        make_batch(**make_arguments(**{field: NUMBERS[..., None]}))


@pytest.mark.parametrize("field", ["observations", "actions"])
def test_the_leaf_that_does_not_fit_is_named_by_its_path(field):
    tree = {"good": NUMBERS, "bad": NUMBERS[:4], "worse": 3.0}
    with pytest.raises(TypeError) as error:
        make_batch(**make_arguments(**{field: tree}))
    assert f"argument '{field}' should be PyTree[Shaped[Array, 'T B ...']]" in str(error.value)
    assert "float32[4,3] at ['bad'], the float 3.0 at ['worse']" in str(error.value)
    assert "['good']" not in str(error.value)


@pytest.mark.parametrize(("size", "minibatch_size"), [(12, 4), (12, 12), (12, 1), (1, 1)])
def test_every_sample_is_in_exactly_one_minibatch(size, minibatch_size):
    indices = minibatch_indices(jax.random.key(1), size=size, minibatch_size=minibatch_size)
    assert indices.shape == (size // minibatch_size, minibatch_size)
    np.testing.assert_array_equal(np.sort(indices, axis=None), np.arange(size))


def test_minibatches_are_shuffled():
    first, second = (
        minibatch_indices(jax.random.key(seed), size=64, minibatch_size=16) for seed in (0, 1)
    )
    assert (first != jnp.arange(64).reshape(4, 16)).any()
    assert (first != second).any()


def test_same_key_gives_the_same_minibatches_jitted_or_not():
    def indices(key):
        return minibatch_indices(key, size=12, minibatch_size=3)

    key = jax.random.key(3)
    np.testing.assert_array_equal(jax.jit(indices)(key), indices(key))


def test_keys_can_be_mapped_over():
    keys = jax.random.split(jax.random.key(0), 2)
    mapped = jax.vmap(lambda key: minibatch_indices(key, size=6, minibatch_size=2))(keys)
    np.testing.assert_array_equal(mapped[1], minibatch_indices(keys[1], size=6, minibatch_size=2))


def test_old_style_keys_are_accepted():
    indices = minibatch_indices(jax.random.PRNGKey(0), size=4, minibatch_size=2)
    np.testing.assert_array_equal(
        indices, minibatch_indices(jax.random.key(0), size=4, minibatch_size=2)
    )


@pytest.mark.parametrize(
    ("size", "minibatch_size"), [(10, 3), (4, 8), (4, 0), (4, -2), (0, 1), (-4, 2)]
)
def test_a_size_that_does_not_divide_is_refused_with_both_numbers(size, minibatch_size):
    with pytest.raises(ValueError, match=f"{size} samples .* minibatches of {minibatch_size};"):
        minibatch_indices(jax.random.key(0), size=size, minibatch_size=minibatch_size)


def test_a_number_is_no_key():
    with pytest.raises(TypeError, match=r"argument 'key' should be PRNGKeyArray.*the int 0"):
        minibatch_indices(0, size=4, minibatch_size=2)  # pyright: ignore[reportArgumentType]


def test_take_gathers_the_same_samples_of_every_leaf():
    batch = make_batch(**make_arguments())
    minibatch = jax.jit(take)(batch, jnp.array([7, 2, 2]))
    np.testing.assert_array_equal(minibatch.actions[0], [7, 2, 2])
    np.testing.assert_array_equal(minibatch.value_targets, [7000, 2000, 2000])
    np.testing.assert_array_equal(
        jax.random.key_data(minibatch.observations["keys"]),
        jax.random.key_data(batch.observations["keys"])[jnp.array([7, 2, 2])],
    )


def test_gradient_of_take_counts_how_often_a_sample_was_taken():
    gradient = jax.grad(lambda x: take(x, jnp.array([1, 1, 0])).sum())(jnp.zeros(3))
    np.testing.assert_array_equal(gradient, [1, 2, 0])


def test_a_batch_can_be_scanned_in_minibatches():
    batch = make_batch(**make_arguments())
    indices = minibatch_indices(jax.random.key(0), size=T * B, minibatch_size=5)

    def visit(total, chosen):
        return total + take(batch, chosen).values.sum(), None

    total, _ = jax.lax.scan(visit, 0.0, indices)
    assert total == batch.values.sum()


@pytest.mark.parametrize(
    ("indices", "given"),
    [
        (jnp.array([[0, 1]]), r"int32\[1,2\]"),
        (jnp.array([0.0, 1.0]), r"float32\[2\]"),
        (jnp.array([True, False]), r"bool\[2\]"),
        (np.array([0, 1]), r"the ndarray int64\[2\]"),
    ],
    ids=str,
)
def test_indices_that_are_no_vector_of_integers_are_refused_by_name(indices, given):
    with pytest.raises(TypeError, match=rf"take\(\): argument 'indices' should be .*is {given}"):
        take(jnp.arange(3), indices)


def test_a_batch_stays_one_under_tree_map():
    batch = jax.tree.map(lambda x: x[:1], make_batch(**make_arguments()))
    assert isinstance(batch, Batch)
    assert batch.advantages.tolist() == [0.0]


def test_numpy_observations_are_refused_by_name():
    with pytest.raises(TypeError, match=r"'observations' should be .*the ndarray float64\[5,3\]"):
        make_batch(**make_arguments(observations=np.zeros((T, B))))


def test_missing_value_targets_are_named():
    arguments = make_arguments()
    del arguments["value_targets"]
    with pytest.raises(TypeError, match=r"missing .*'value_targets'"):
        make_batch(**arguments)
