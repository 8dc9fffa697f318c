"""Laws of the networks: what has no number must not be told apart by its number."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jumanji import specs

from vernal.adapters.networks import make_spec_network
from vernal.adapters.networks.layout import read_leaf
from vernal.adapters.registry import make_environment

SEEDS = st.integers(0, 2**32 - 1)


@functools.cache
def make(name):
    """An environment's compiled reset, and a compiled network whose outputs are of order 1."""
    environment = make_environment(name)
    network = make_spec_network(environment)(jax.random.key(0))
    network = jax.tree.map(lambda x: 3 * x if eqx.is_inexact_array(x) else x, network)
    arrays, static = eqx.partition(network, eqx.is_array)
    reset = jax.jit(lambda key: environment.reset(key)[1].observation)
    apply = jax.jit(lambda arrays, observation: eqx.combine(arrays, static)(observation))
    return reset, functools.partial(apply, arrays)


def renamed(indices, order):
    """Indices of members after the members were put into another order; none stays none."""
    place = np.argsort(order)
    indices = np.asarray(indices)
    is_member = (indices >= 0) & (indices < len(order))
    return jnp.asarray(np.where(is_member, place[np.clip(indices, 0, len(order) - 1)], indices))


def walk(observation, key):
    """A tour begun: some cities visited, in some order."""
    visits = jax.random.permutation(key, 20)
    count = int(jax.random.randint(key, (), 1, 20))
    trajectory = jnp.where(jnp.arange(20) < count, visits, -1)
    mask = jnp.ones(20, bool).at[visits[:count]].set(False)
    return observation._replace(position=visits[count - 1], trajectory=trajectory, action_mask=mask)


@given(SEEDS)
def test_cities_of_tsp_in_another_order_get_their_logits_in_that_order(seed):
    reset, apply = make("TSP-v1")
    reset_key, walk_key, order_key = jax.random.split(jax.random.key(seed), 3)
    observation = walk(reset(reset_key), walk_key)
    order = np.asarray(jax.random.permutation(order_key, 20))
    other = observation._replace(
        coordinates=observation.coordinates[order],
        action_mask=observation.action_mask[order],
        position=renamed(observation.position, order),
        trajectory=renamed(observation.trajectory, order),
    )
    (logits, value), (other_logits, other_value) = apply(observation), apply(other)
    np.testing.assert_allclose(other_logits, logits[order], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(other_value, value, rtol=1e-3, atol=1e-4)
    assert np.ptp(logits) > 1e-2


@given(SEEDS)
def test_items_of_knapsack_in_another_order_get_their_logits_in_that_order(seed):
    reset, apply = make("Knapsack-v1")
    reset_key, packed_key, order_key = jax.random.split(jax.random.key(seed), 3)
    packed = jax.random.bernoulli(packed_key, 0.3, (50,))
    observation = reset(reset_key)._replace(packed_items=packed)
    order = jax.random.permutation(order_key, 50)
    other = jax.tree.map(lambda leaf: leaf[order], observation)
    (logits, value), (other_logits, other_value) = apply(observation), apply(other)
    np.testing.assert_allclose(other_logits, logits[order], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(other_value, value, rtol=1e-3, atol=1e-4)
    assert np.ptp(logits) > 1e-2


@given(SEEDS)
def test_spaces_and_items_of_bin_pack_in_another_order_get_their_logits_in_that_order(seed):
    reset, apply = make("BinPack-v2")
    reset_key, spaces_key, items_key = jax.random.split(jax.random.key(seed), 3)
    observation = reset(reset_key)
    spaces = jax.random.permutation(spaces_key, 40)
    items = jax.random.permutation(items_key, 20)
    other = observation._replace(
        ems=jax.tree.map(lambda leaf: leaf[spaces], observation.ems),
        ems_mask=observation.ems_mask[spaces],
        items=jax.tree.map(lambda leaf: leaf[items], observation.items),
        items_mask=observation.items_mask[items],
        items_placed=observation.items_placed[items],
        action_mask=observation.action_mask[spaces][:, items],
    )
    logits, other_logits = (apply(o)[0].reshape(40, 20) for o in (observation, other))
    np.testing.assert_allclose(other_logits, logits[spaces][:, items], rtol=1e-3, atol=1e-4)
    assert np.ptp(logits, axis=0).max() > 1e-2
    assert np.ptp(logits, axis=1).max() > 1e-2


@given(SEEDS)
def test_jobs_of_a_job_shop_in_another_order_get_their_logits_in_that_order(seed):
    reset, apply = make("JobShop-v0")
    reset_key, running_key, order_key = jax.random.split(jax.random.key(seed), 3)
    observation = reset(reset_key)
    running = jax.random.permutation(running_key, 21)[:10]
    observation = observation._replace(machines_job_ids=running)
    order = np.asarray(jax.random.permutation(order_key, 20))
    with_none = np.append(order, 20)
    rows = ("ops_machine_ids", "ops_durations", "ops_mask")
    other = observation._replace(
        **{name: getattr(observation, name)[order] for name in rows},
        machines_job_ids=renamed(running, order),
        action_mask=observation.action_mask[:, with_none],
    )
    logits, other_logits = (apply(o)[0] for o in (observation, other))
    np.testing.assert_allclose(other_logits, logits[:, with_none], rtol=1e-3, atol=1e-4)
    assert np.ptp(logits, axis=0).max() > 1e-2
    assert np.ptp(logits, axis=1).max() > 1e-2


@given(SEEDS)
def test_cells_of_minesweeper_with_the_same_surroundings_get_the_same_logits(seed):
    reset, apply = make("Minesweeper-v0")
    key = jax.random.key(seed)
    patch = jax.random.randint(key, (3, 3), -1, 9)
    # Two copies of a patch in the same rows of a board that is else unknown.
    board = jnp.full((10, 10), -1).at[3:6, 2:5].set(patch).at[3:6, 6:9].set(patch)
    observation = reset(key)._replace(board=board, action_mask=board == -1)
    logits = apply(observation)[0].reshape(10, 10)
    np.testing.assert_allclose(logits[3:6, 3], logits[3:6, 7], rtol=1e-3, atol=1e-4)
    assert np.ptp(logits) > 1e-2


COUNTS = st.lists(st.sampled_from([1, 2, 32, 33, 1000]), min_size=3, max_size=3)
SHARES = st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=3)


class Alone:
    """An observation of one leaf."""

    def __init__(self, leaf):
        self.leaf = leaf


@given(COUNTS, st.integers(-5, 5), SHARES, st.integers(0, 2), st.booleans())
def test_each_of_several_integers_is_seen_as_if_it_were_alone(counts, low, shares, changed, names):
    low = 0 if names else low
    counts = np.array(counts)
    spec = (
        specs.MultiDiscreteArray(counts)
        if names
        else specs.BoundedArray((3,), np.int32, low, low + counts - 1)
    )
    leaf = read_leaf(("leaf",), spec)
    values = np.floor(np.array(shares) * counts).astype(int)
    others = values.copy()
    others[changed] = (values[changed] + 1) % counts[changed]
    before, after = (np.asarray(leaf.encode(Alone(low + v))) for v in (values, others))
    assert np.abs(before).max() <= 1
    # What is changed is seen by the size of its own range, wherever it lies; nothing else is.
    step = np.abs(after - before).max(axis=-1)
    assert (step[np.arange(3) != changed] == 0).all()
    count = counts[changed]
    least = 1 if count <= 32 else 2 / (count - 1)
    assert step[changed] >= 0.99 * least * (count > 1)
