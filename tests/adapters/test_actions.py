"""Action codecs: which kind serves which spec, and the way from a sample to an action."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji import specs

from vernal.adapters.actions import MASK_NAMES, make_action_codec

from .environments_for_tests import OFFLINE, Observation, SpecsOnly, make_once, with_mask

KEY = jax.random.key(0)

# Kind and shape of the policy's outputs, from the tables of Jumanji's documentation.
EXPECTED = {
    "maze-easy": ("categorical", (4,)),
    "maze-medium": ("categorical", (4,)),
    "BinPack-v2": ("joint", (40 * 20,)),
    "CVRP-v1": ("categorical", (21,)),
    "Cleaner-v0": ("factorised", (3, 4)),
    "Connector-v3": ("factorised", (10, 5)),
    "FlatPack-v0": ("joint", (25 * 4 * 9 * 9,)),
    "Game2048-v1": ("categorical", (4,)),
    "GraphColoring-v1": ("categorical", (20,)),
    "JobShop-v0": ("factorised", (10, 21)),
    "Knapsack-v1": ("categorical", (50,)),
    "LevelBasedForaging-v0": ("factorised", (2, 6)),
    "MMST-v0": ("factorised", (3, 36)),
    "Maze-v0": ("categorical", (4,)),
    "Minesweeper-v0": ("joint", (10 * 10,)),
    "MultiCVRP-v0": ("factorised", (2, 21)),
    "PacMan-v1": ("categorical", (5,)),
    "RobotWarehouse-v0": ("factorised", (4, 5)),
    "RubiksCube-partly-scrambled-v0": ("joint", (18,)),
    "RubiksCube-v0": ("joint", (18,)),
    "SearchAndRescue-v0": ("normal", (2, 2 * 2)),
    "SlidingTilePuzzle-v0": ("categorical", (4,)),
    "Snake-v1": ("categorical", (4,)),
    "Sudoku-v0": ("joint", (9 * 9 * 9,)),
    "Sudoku-very-easy-v0": ("joint", (9 * 9 * 9,)),
    "TSP-v1": ("categorical", (20,)),
    "Tetris-v0": ("joint", (4 * 10,)),
}


def test_every_registered_environment_is_in_the_table():
    assert sorted(EXPECTED) == sorted(OFFLINE)


@pytest.mark.parametrize("name", OFFLINE)
def test_kind_and_output_shape(name):
    codec = make_action_codec(make_once(name))
    assert (codec.kind, codec.output_shape) == EXPECTED[name]


@pytest.mark.parametrize("name", OFFLINE)
def test_a_sample_has_the_shape_and_dtype_of_the_action_spec(name):
    environment = make_once(name)
    codec = make_action_codec(environment)

    def act(key):
        return codec.to_environment(
            codec.distribution(jnp.zeros(codec.output_shape), None).sample(key)
        )

    action = jax.eval_shape(act, KEY)
    assert (action.shape, action.dtype) == (
        environment.action_spec.shape,
        environment.action_spec.dtype,
    )


def observe(mask):
    return Observation(0, 0, jnp.asarray(mask))


@pytest.mark.parametrize("name", ["Minesweeper-v0", "Tetris-v0", "Sudoku-v0"])
def test_joint_actions_count_as_numpy_does(name):
    codec = make_action_codec(make_once(name))
    indices = np.arange(codec.output_shape[0])
    actions = jax.vmap(codec.to_environment)(jnp.asarray(indices))
    np.testing.assert_array_equal(np.ravel_multi_index(tuple(actions.T), codec.choices), indices)


@pytest.mark.parametrize("name", ["Minesweeper-v0", "Tetris-v0", "Sudoku-v0"])
def test_joint_action_is_legal_where_the_mask_says_so(name):
    codec = make_action_codec(make_once(name))
    mask = np.asarray(jax.random.bernoulli(KEY, 0.3, codec.choices))
    legal = codec.legal(observe(mask))
    assert legal is not None
    for index in range(0, len(legal), 7):
        assert legal[index] == mask[tuple(codec.to_environment(jnp.array(index)))]


@pytest.mark.parametrize("name", ["Connector-v3", "MultiCVRP-v0", "Snake-v1"])
def test_illegal_actions_have_probability_exactly_0(name):
    codec = make_action_codec(make_once(name))
    mask = jax.random.bernoulli(KEY, 0.5, codec.output_shape).at[..., 0].set(True)
    logits = jax.random.normal(jax.random.key(1), codec.output_shape)
    policy = codec.distribution(logits, codec.legal(observe(mask)))
    probabilities = jax.nn.softmax(policy.logits)  # pyright: ignore[reportAttributeAccessIssue]
    assert (probabilities[~mask] == 0).all()
    assert (probabilities[mask] > 0).all()


UNEVEN = SpecsOnly(lambda: specs.MultiDiscreteArray(jnp.array([600, 1, 3])))


def make_uneven_policy(key=None):
    codec = make_action_codec(UNEVEN)
    logits = jnp.zeros((3, 600)) if key is None else jax.random.normal(key, (3, 600))
    return codec, codec.distribution(logits, codec.legal(object()))


def test_padding_of_short_heads_has_probability_exactly_0():
    _, policy = make_uneven_policy(KEY)
    probabilities = jax.nn.softmax(policy.logits)  # pyright: ignore[reportAttributeAccessIssue]
    is_choice = np.arange(600) < np.array([[600], [1], [3]])
    np.testing.assert_array_equal(probabilities > 0, is_choice)
    assert (probabilities[~is_choice] == 0).all()


def test_padding_is_never_sampled():
    codec, policy = make_uneven_policy()
    actions = jax.jit(jax.vmap(policy.sample))(jax.random.split(KEY, 500))
    assert (actions.max(axis=0) < np.array(codec.choices)).all()
    assert actions[:, 2].max() == 2


def test_a_head_of_one_choice_adds_nothing_to_log_probability_and_entropy():
    _, policy = make_uneven_policy()
    assert policy.log_prob(jnp.array([5, 0, 2])) == pytest.approx(-np.log(600 * 3), rel=1e-6)
    assert policy.entropy() == pytest.approx(np.log(600 * 3), rel=1e-6)


def test_an_environment_without_mask_has_no_illegal_action():
    legal = make_action_codec(UNEVEN).legal(object())
    np.testing.assert_array_equal(legal, np.arange(600) < np.array([[600], [1], [3]]))
    for spec in (specs.DiscreteArray(3), specs.MultiDiscreteArray(jnp.array([6, 1, 3]))):
        assert make_action_codec(SpecsOnly(lambda spec=spec: spec)).legal(object()) is None


def test_few_choices_without_a_mask_are_one_joint_choice():
    codec = make_action_codec(make_once("RubiksCube-v0"))
    actions = jax.vmap(codec.to_environment)(jnp.arange(18))
    assert {tuple(action) for action in actions.tolist()} == {
        (face, 0, turn) for face in range(6) for turn in range(3)
    }


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("Snake-v1", (4,)),
        ("BinPack-v2", (40, 20)),
        ("Connector-v3", (10, 5)),
        ("SearchAndRescue-v0", (2, 2, 2)),
    ],
)
def test_outputs_in_axes_hold_the_same_numbers(name, axes):
    codec = make_action_codec(make_once(name))
    outputs = codec.from_axes(jnp.arange(float(np.prod(axes))).reshape(axes))
    assert codec.axes == axes
    assert outputs.shape == codec.output_shape
    assert sorted(outputs.ravel().tolist()) == list(range(int(np.prod(axes))))


def test_means_and_deviations_of_an_agents_coordinates_stay_together():
    codec = make_action_codec(make_once("SearchAndRescue-v0"))
    axes = jax.random.normal(KEY, (2, 2, 2))
    means, deviations = codec.from_axes(axes)
    np.testing.assert_array_equal(means.reshape(2, 2), axes[..., 0])
    np.testing.assert_array_equal(deviations.reshape(2, 2), axes[..., 1])


def test_a_mask_per_head_is_cut_to_the_heads_own_choices():
    environment = SpecsOnly(
        lambda: specs.MultiDiscreteArray(jnp.array([2, 4, 3])), with_mask((3, 4))
    )
    codec = make_action_codec(environment)
    assert codec.kind == "factorised"
    legal = codec.legal(observe(np.ones((3, 4), bool)))
    np.testing.assert_array_equal(legal, np.arange(4) < np.array([[2], [4], [3]]))


def test_a_mask_per_component_of_a_table_of_integers_is_flattened():
    spec = specs.BoundedArray((2, 2), np.int32, 0, 4)
    codec = make_action_codec(SpecsOnly(lambda: spec, with_mask((2, 2, 5))))
    legal = codec.legal(observe(np.arange(20).reshape(2, 2, 5) % 2 == 0))
    assert codec.output_shape == (4, 5)
    np.testing.assert_array_equal(legal, np.arange(20).reshape(4, 5) % 2 == 0)


def test_the_mask_counts_choices_where_the_bound_is_one_too_high():
    environment = make_once("MultiCVRP-v0")
    assert int(environment.action_spec.maximum) == 21
    assert make_action_codec(environment).choices == (21, 21)


LOW, HIGH = np.array([[-3.0, 0.0], [1.0, -1.0]]), np.array([[-1.0, 10.0], [1.5, 1.0]])


def make_bounded_codec():
    return make_action_codec(SpecsOnly(lambda: specs.BoundedArray((2, 2), np.float32, LOW, HIGH)))


@pytest.mark.parametrize(
    ("squashed", "expected"), [(-1.0, LOW), (1.0, HIGH), (0.0, (LOW + HIGH) / 2)]
)
def test_floats_from_minus_1_to_1_become_low_to_high(squashed, expected):
    action = make_bounded_codec().to_environment(jnp.full(4, squashed))
    np.testing.assert_allclose(action, expected, rtol=1e-6)


def test_one_bound_for_all_coordinates_holds_for_each():
    codec = make_action_codec(SpecsOnly(lambda: specs.BoundedArray((3,), float, -2.0, 4.0)))
    np.testing.assert_allclose(codec.to_environment(jnp.array([-1.0, 0.0, 1.0])), [-2, 1, 4])


def test_a_single_bounded_float_needs_no_axis():
    codec = make_action_codec(SpecsOnly(lambda: specs.BoundedArray((), float, 0.0, 8.0)))
    assert codec.output_shape == (2, 1)
    np.testing.assert_allclose(codec.to_environment(jnp.array([0.5])), 6.0)


def test_continuous_samples_stay_within_the_bounds():
    codec = make_bounded_codec()
    policy = codec.distribution(jax.random.normal(KEY, codec.output_shape) * 3, None)
    draw = jax.jit(jax.vmap(lambda key: codec.to_environment(policy.sample(key))))
    actions = np.asarray(draw(jax.random.split(KEY, 200)))
    assert (actions >= LOW - 1e-5).all()
    assert (actions <= HIGH + 1e-5).all()


@pytest.mark.parametrize(
    "name", ["Snake-v1", "Minesweeper-v0", "Connector-v3", "SearchAndRescue-v0"]
)
def test_a_batch_under_jit_and_vmap_equals_state_by_state(name):
    codec = make_action_codec(make_once(name))
    outputs = jax.random.normal(KEY, (2, *codec.output_shape))
    keys = jax.random.split(KEY, 2)
    shape = codec.choices if codec.kind == "joint" else codec.output_shape
    masks = jax.random.bernoulli(KEY, 0.7, (2, *shape))

    def act(outputs, mask, key):
        policy = codec.distribution(outputs, codec.legal(observe(mask)))
        action = policy.sample(key)
        return codec.to_environment(action), policy.log_prob(action), policy.entropy()

    together, alone = jax.jit(jax.vmap(act))(outputs, masks, keys), jax.jit(act)
    for n in range(2):
        for whole, row in zip(together, alone(outputs[n], masks[n], keys[n]), strict=True):
            np.testing.assert_allclose(whole[n], row, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["Snake-v1", "Minesweeper-v0", "Connector-v3", "SearchAndRescue-v0"]
)
def test_gradients_of_log_probability_and_entropy_are_finite(name):
    codec = make_action_codec(make_once(name))
    shape = codec.choices if codec.kind == "joint" else codec.output_shape
    mask = jnp.zeros(shape, bool).at[..., 0].set(True)
    legal = codec.legal(observe(mask))

    def total(outputs):
        policy = codec.distribution(outputs, legal)
        return policy.log_prob(policy.mode()) + policy.entropy()

    gradient = jax.jit(jax.grad(total))(jax.random.normal(KEY, codec.output_shape))
    assert jnp.isfinite(gradient).all()


def test_a_codec_made_under_a_trace_works_outside_of_it():
    environment, codecs = make_once("SearchAndRescue-v0"), []

    def trace(x):
        codecs.append(make_action_codec(environment))
        return x

    jax.eval_shape(trace, 1)
    np.testing.assert_array_equal(codecs[0].to_environment(jnp.ones(4)), np.ones((2, 2)))


class Seen(dict[str, Any]):
    """An observation whose parts are read as attributes."""

    __getattr__ = dict.__getitem__


def seeing(spec, **parts):
    """An environment with that action and those parts of an observation, by shape and dtype."""
    leaves = {name: specs.Array(*part) for name, part in parts.items()}
    return SpecsOnly(lambda: spec, lambda: specs.Spec(Seen, "SeenSpec", **leaves))


ACTIONS = [
    (specs.DiscreteArray(4), (4,)),
    (specs.MultiDiscreteArray(jnp.array([3, 4])), (3, 4)),
    (specs.MultiDiscreteArray(jnp.array([4, 4, 4])), (3, 4)),
    (specs.BoundedArray((3,), np.int32, 0, 3), (3, 4)),
]


@pytest.mark.parametrize(("spec", "shape"), ACTIONS)
@pytest.mark.parametrize("name", MASK_NAMES)
def test_a_mask_is_found_by_its_known_names(name, spec, shape):
    codec = make_action_codec(seeing(spec, **{"x": ((), float), name: (shape, bool)}))
    mask = np.asarray(jax.random.bernoulli(KEY, 0.5, shape))
    legal = codec.legal(Seen({"x": 0.0, name: jnp.asarray(mask)}))
    np.testing.assert_array_equal(legal, mask.reshape(codec.output_shape))


def test_a_mask_is_found_deeper_in_the_observation():
    inner = specs.Spec(Seen, "Inner", legal_actions=specs.Array((3,), bool))
    environment = SpecsOnly(
        lambda: specs.DiscreteArray(3), lambda: specs.Spec(Seen, "SeenSpec", inner=inner)
    )
    mask = jnp.array([True, False, True])
    legal = make_action_codec(environment).legal(Seen(inner=Seen(legal_actions=mask)))
    np.testing.assert_array_equal(legal, mask)


def test_of_several_masks_the_first_known_name_counts():
    parts = dict.fromkeys(("legal_actions", "action_mask", "avail_actions"), ((3,), bool))
    assert make_action_codec(seeing(specs.DiscreteArray(3), **parts)).mask == ("action_mask",)


@pytest.mark.parametrize(("spec", "shape"), [*ACTIONS[:3], (ACTIONS[2][0], (4, 4, 4))])
@pytest.mark.parametrize(
    ("name", "dtype"), [("can_do", bool), ("invalid_actions", bool), ("legal_actions", np.int32)]
)
def test_what_has_the_shape_of_a_mask_and_is_not_read_as_one_is_told(name, dtype, spec, shape):
    environment = seeing(spec, **{name: (shape, dtype)})
    with pytest.warns(UserWarning, match=f"'{name}' has the shape of an action mask, but is not"):
        assert make_action_codec(environment).mask is None


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (specs.DiscreteArray(4), {"action_mask": ((4,), bool), "packed": ((4,), bool)}),
        (specs.DiscreteArray(4), {"lamps": ((5,), bool), "numbers": ((4,), float)}),
        (specs.DiscreteArray(4), {"legal_actions": ((7,), np.int32)}),
        (specs.BoundedArray((4,), float, 0.0, 1.0), {"touches": ((4,), bool)}),
    ],
)
def test_what_is_no_mask_is_not_told(spec, parts):
    make_action_codec(seeing(spec, **parts))  # a warning would be an error


def test_the_mask_of_a_continuous_action_is_not_read():
    environment = seeing(specs.BoundedArray((4,), float, 0.0, 1.0), action_mask=((4,), bool))
    assert make_action_codec(environment).legal(object()) is None


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_actions_of_half_precision_are_served(dtype):
    codec = make_action_codec(SpecsOnly(lambda: specs.BoundedArray((2,), dtype, -1.0, 3.0)))
    action = codec.to_environment(jnp.array([-1.0, 0.5]))
    assert action.dtype == dtype
    assert action.tolist() == [-1, 2]


REFUSED = {
    "floats without bounds": lambda: SpecsOnly(lambda: specs.Array((2,), float)),
    "floats with an infinite bound": lambda: SpecsOnly(
        lambda: specs.BoundedArray((2,), float, 0.0, jnp.inf)
    ),
    "bounded integers without mask": lambda: SpecsOnly(
        lambda: specs.BoundedArray((2,), np.int32, 0, 3)
    ),
    "bounded integers that do not begin at 0": lambda: SpecsOnly(
        lambda: specs.BoundedArray((2,), np.int32, 1, 3), with_mask((2, 3))
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_action_of_no_kind_is_refused_with_what_was_wanted(name):
    with pytest.raises(
        ValueError, match="cannot be served: wanted a discrete or multi-discrete"
    ) as e:
        make_action_codec(REFUSED[name]())
    assert "Array(shape=(2,)" in str(e.value)


@pytest.mark.parametrize(
    ("spec", "mask"),
    [
        (lambda: specs.DiscreteArray(3), (4,)),
        (lambda: specs.MultiDiscreteArray(jnp.array([3, 3])), (3,)),
        (lambda: specs.MultiDiscreteArray(jnp.array([3, 4])), (4, 3)),
    ],
)
def test_a_mask_that_fits_no_kind_is_refused_with_its_shape(spec, mask):
    with pytest.raises(ValueError, match=r"mask has shape .* does not fit the action") as error:
        make_action_codec(SpecsOnly(spec, with_mask(mask)))
    assert str(mask) in str(error.value)
