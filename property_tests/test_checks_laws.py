"""Laws of the checks: what does not fit is refused in words, and never broadcast."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jaxtyping import Array, Float, Shaped

from vernal.core import (
    Categorical,
    FactorisedCategorical,
    SquashedNormal,
    discounted_returns,
    explained_variance,
    from_two_hot,
    gae,
    lambda_returns,
    make_batch,
    make_root,
    mask_logits,
    n_step_returns,
    normalise,
    ppo_loss,
    two_hot,
    value_loss,
    vtrace,
)
from vernal.core._checks import checked

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=3)
FEW_SHAPES = st.sampled_from([(1,), (3, 2), (2, 1, 3)])  # for whatever is traced to its end
F, B = np.float32, np.bool_

# Functions whose arrays are all of one shape: their dtypes, knobs, and the result's shape.
ESTIMATORS = {
    gae: ([F, F, F, F, B], {"lambda_": 0.9}),
    lambda_returns: ([F, F, F, B], {"lambda_": 0.9}),
    discounted_returns: ([F, F, F, B], {}),
    n_step_returns: ([F, F, F, B], {"n": 2}),
    vtrace: ([F, F, F, F, B, F], {}),
    normalise: ([F, B], {}),
    mask_logits: ([F, B], {}),
}
LOSSES = {
    ppo_loss: ([F] * 7, {"value_clip_epsilon": 0.2}),
    value_loss: ([F] * 3, {"clip_epsilon": 0.2}),
    explained_variance: ([F] * 2, {}),
}
OF_ONE_SHAPE = st.sampled_from(list((ESTIMATORS | LOSSES).items()))


def trace(function, shapes, dtypes, knobs):
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    return jax.eval_shape(lambda *args: function(*args, **knobs), *arrays)


def short(dtype, shape):
    return f"{np.dtype(dtype)}[{','.join(map(str, shape))}]"


@given(OF_ONE_SHAPE, SHAPES, SHAPES, st.integers(0, 20))
def test_shapes_never_broadcast(case, shape, odd_shape, odd):
    """One array of another shape is refused, however well it would broadcast."""
    assume(shape != odd_shape)
    function, (dtypes, knobs) = case
    shapes = [shape] * len(dtypes)
    shapes[odd % len(dtypes)] = odd_shape
    with pytest.raises(TypeError) as caught:
        trace(function, shapes, dtypes, knobs)
    blamed = re.match(
        r"(\w+)\(\): argument '(\w+)' should be .*, but is (\S+), where", str(caught.value)
    )
    assert blamed is not None
    assert blamed[1] == function.__name__
    names = list(inspect.signature(function).parameters)
    at = names.index(blamed[2])
    # Of two arrays that disagree, the later one is blamed.
    assert at == max(odd % len(dtypes), 1 if odd % len(dtypes) == 0 else 0)
    assert blamed[3] == short(dtypes[at], shapes[at])


@given(st.sampled_from(list(ESTIMATORS.items())), FEW_SHAPES)
def test_results_have_the_shape_of_what_came(case, shape):
    """Arrays of one shape are accepted, and what comes back has it too."""
    function, (dtypes, knobs) = case
    results = jax.tree.leaves(trace(function, [shape] * len(dtypes), dtypes, knobs))
    assert {result.shape for result in results} == {shape}


@given(st.sampled_from(list(LOSSES.items())), FEW_SHAPES)
def test_losses_are_scalars(case, shape):
    """Whatever the batch's shape, a loss and its parts have none."""
    function, (dtypes, knobs) = case
    results = jax.tree.leaves(trace(function, [shape] * len(dtypes), dtypes, knobs))
    assert {result.shape for result in results} == {()}


@given(OF_ONE_SHAPE, SHAPES, st.integers(0, 20), st.sampled_from([np.int32, np.uint8, np.bool_, F]))
def test_dtypes_are_never_cast(case, shape, odd, dtype):
    """A whole number, a truth and a real number are three things, in every argument."""
    function, (dtypes, knobs) = case
    odd %= len(dtypes)
    assume(dtypes[odd] is not dtype)
    changed = [dtype if i == odd else d for i, d in enumerate(dtypes)]
    name = list(inspect.signature(function).parameters)[odd]
    given_type = re.escape(short(dtype, shape))
    with pytest.raises(TypeError, match=rf"argument '{name}' should be .* but is {given_type}"):
        trace(function, [shape] * len(dtypes), changed, knobs)


DISTRIBUTIONS = st.sampled_from([Categorical, FactorisedCategorical, SquashedNormal])


@given(DISTRIBUTIONS, st.sampled_from([(1, 1), (3, 2), (2, 1, 3)]), SHAPES)
def test_distributions_take_actions_of_their_batch(distribution, shape, odd_shape):
    """Log-probabilities are given for exactly one action per row, and no other number."""
    fields = {name: jax.ShapeDtypeStruct(shape, F) for name in distribution._fields}
    ours = shape if distribution is SquashedNormal else shape[:-1]
    dtype = F if distribution is SquashedNormal else np.int32
    rows = shape[:-2] if distribution is FactorisedCategorical else shape[:-1]

    def ask(fields, actions):
        return distribution(**fields).log_prob(actions)

    got = jax.eval_shape(ask, fields, jax.ShapeDtypeStruct(ours, dtype))
    assert (got.shape, got.dtype) == (rows, F)
    assume(odd_shape != ours)
    with pytest.raises(
        TypeError, match=rf"{distribution.__name__}.log_prob\(\): argument 'actions'"
    ):
        jax.eval_shape(ask, fields, jax.ShapeDtypeStruct(odd_shape, dtype))


@given(SHAPES, SHAPES)
def test_divergence_is_between_equal_shapes(shape, odd_shape):
    """KL is never broadcast over another policy's rows or actions."""
    assume(shape != odd_shape)
    one, other = (Categorical(jax.ShapeDtypeStruct(s, F)) for s in (shape, odd_shape))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"kl\(\): argument 'other', field 'logits', should be"):
        jax.eval_shape(lambda p, q: p.kl(q), one, other)


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4, unique=True)


@given(PATHS, st.integers(0, 9), SHAPES, st.sampled_from(["observations", "actions"]))
def test_the_odd_leaf_of_a_tree_is_named(names, odd, odd_shape, argument):
    """A leaf whose leading axes differ is blamed by its path, and no other leaf is."""
    assume(odd_shape[:2] != (5, 4))
    odd = names[odd % len(names)]
    tree = {name: jax.ShapeDtypeStruct((5, 4, 2), F) for name in names}
    tree[odd] = jax.ShapeDtypeStruct(odd_shape, F)
    row = jax.ShapeDtypeStruct((5, 4), F)
    trees = {"observations": row, "actions": row} | {argument: tree}
    blamed = re.escape(f"is {short(F, odd_shape)} at ['{odd}'], where")
    with pytest.raises(TypeError, match=rf"make_batch\(\): argument '{argument}' .*{blamed}"):
        jax.eval_shape(make_batch, *trees.values(), row, row, row, row)


@given(st.sampled_from([(), (2,), (3, 1)]), st.sampled_from([2, 4]), st.integers(1, 4))
def test_supports_have_the_length_of_their_probabilities(shape, size, odd_size):
    """As many probabilities as numbers: a support of another length is refused."""
    values, support = jax.ShapeDtypeStruct(shape, F), jax.ShapeDtypeStruct((size,), F)
    probs = jax.eval_shape(two_hot, values, support)
    assert probs.shape == (*shape, size)
    assert jax.eval_shape(from_two_hot, probs, support).shape == shape
    assume(size != odd_size)
    with pytest.raises(TypeError, match="argument 'support'"):
        jax.eval_shape(from_two_hot, probs, jax.ShapeDtypeStruct((odd_size,), F))


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(["terminal", "player"]))
def test_roots_have_one_row_per_tree(trees, odd, argument):
    """Ends and players are given for exactly as many trees as there are embeddings."""
    assume(trees != odd)
    marks = {argument: jnp.zeros(odd, bool if argument == "terminal" else jnp.int32)}
    sentence = rf"make_root\(\): argument 'embeddings' .* float32\[{trees}\] at its root"
    with pytest.raises(TypeError, match=rf"{sentence}, where .*'{argument}' is \w+\[{odd}\]"):
        make_root(lambda *_: None, None, jnp.zeros(trees), **marks)  # pyright: ignore[reportArgumentType]


@checked
def reshaped(x: Shaped[Array, " *shape"], y: Shaped[Array, "..."]) -> Float[Array, " *shape"]:
    return y


@given(SHAPES, SHAPES, st.sampled_from([F, np.int32]))
def test_results_are_held_to_their_promise(shape, result_shape, dtype):
    """A result of another shape or dtype than was promised is refused, and no other is."""
    x, result = jax.ShapeDtypeStruct(shape, F), jax.ShapeDtypeStruct(result_shape, dtype)
    if shape == result_shape and dtype is F:
        assert jax.eval_shape(reshaped, x, result) == result
        return
    given_type = re.escape(short(dtype, result_shape))
    with pytest.raises(TypeError, match=rf"reshaped\(\): the result should be .* is {given_type}"):
        jax.eval_shape(reshaped, x, result)
