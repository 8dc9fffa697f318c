"""`@checked`: what its sentences say, that it can be switched off, and that it costs nothing."""

import contextlib
import inspect
import json
import logging
import os
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, ScalarLike, Shaped
from jaxtyping import config as jaxtyping_config

import vernal.core
from vernal.core import (
    Categorical,
    ModelTransition,
    Prediction,
    gae,
    make_batch,
    make_recurrent_fn,
    make_root,
    mask_logits,
    n_step_returns,
    normalise,
    ppo_loss,
    two_hot,
    vtrace,
)
from vernal.core._checks import check_values, checked, describe


class Pair(NamedTuple):
    left: Float[Array, " n"]
    right: Float[Array, " n"]

    @checked
    def dot(self) -> Float[Array, ""]:
        """Their inner product."""
        return self.left @ self.right


@checked
def add(x: Float[Array, " n"], y: Float[Array, " n"], *, scale: ScalarLike = 1.0) -> Any:
    """Their sum."""
    return (x + y) * scale


@checked
def doubled(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """Too long a result, on purpose."""
    return jnp.concatenate([x, x])


@checked
def swapped(pair: Pair) -> Pair:
    """Too short a field, on purpose."""
    return Pair(pair.right, pair.left[1:])


@checked
def count(tree: PyTree[Shaped[Array, "n ..."]], x: Float[Array, " n"]) -> int:
    """Number of leaves."""
    return len(jax.tree.leaves(tree))


@checked
def draw(key: PRNGKeyArray) -> Float[Array, ""]:
    """A number."""
    return jax.random.normal(key)


@contextlib.contextmanager
def switched_off():
    jaxtyping_config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping_config.update("jaxtyping_disable", False)


def message_of(function, *arguments, **knobs):
    with pytest.raises(TypeError) as error:
        function(*arguments, **knobs)
    return str(error.value)


# What the sentences say.

ONE, TWO = jnp.ones(1), jnp.ones(2)


def test_sentence_names_function_argument_wanted_given_and_what_came_before():
    assert message_of(add, TWO, ONE) == (
        "add(): argument 'y' should be Float[Array, 'n'], but is float32[1], "
        "where 'x' is float32[2]."
    )


def test_sentence_about_the_first_argument_has_no_context():
    assert message_of(add, jnp.ones((2, 1)), TWO) == (
        "add(): argument 'x' should be Float[Array, 'n'], but is float32[2,1]."
    )


def test_arguments_by_name_are_checked_too():
    assert "argument 'y' should be" in message_of(add, y=ONE, x=TWO)


def test_knob_that_is_no_scalar_is_named():
    message = message_of(add, TWO, TWO, scale=TWO)
    assert message.startswith("add(): argument 'scale' should be ScalarLike, but is float32[2],")


@pytest.mark.parametrize(
    "scale", [2, 2.0, np.float32(2), np.array(2.0), jnp.array(2.0), jnp.array(2)]
)
def test_scalar_of_any_kind_is_a_scalar(scale):
    assert add(TWO, TWO, scale=scale).tolist() == [4.0, 4.0]


def test_wrong_result_is_named():
    assert message_of(doubled, TWO) == (
        "doubled(): the result should be Float[Array, 'n'], but is float32[4], "
        "where 'x' is float32[2]."
    )


def test_wrong_field_of_an_argument_is_named():
    assert message_of(swapped, Pair(TWO, ONE)).startswith(
        "swapped(): argument 'pair', field 'right', should be Float[Array, 'n'], "
        "but is float32[1], where"
    )


def test_wrong_field_of_a_result_is_named():
    message = message_of(swapped, Pair(TWO, TWO))
    assert "the result, field 'right', should be Float[Array, 'n'], but is float32[1]" in message


def test_wrong_field_of_self_is_named_by_the_method():
    message = message_of(Pair(TWO, ONE).dot)
    assert message.startswith("Pair.dot(): argument 'self', field 'right', should be")


def test_odd_leaf_of_a_tree_is_named_by_its_path_though_the_tree_comes_first():
    message = message_of(count, {"good": TWO, "bad": [TWO, ONE], "worse": "text"}, TWO)
    assert message.startswith("count(): argument 'tree' should be PyTree[Shaped[Array, 'n ...']]")
    assert "float32[1] at ['bad'][1]" in message
    assert "the str 'text' at ['worse']" in message
    assert "good" not in message


def test_both_kinds_of_keys_are_keys():
    assert draw(jax.random.key(7)) == draw(jax.random.PRNGKey(7))


def test_batch_of_keys_is_no_key():
    message = message_of(draw, jax.random.split(jax.random.key(0)))
    assert message == "draw(): argument 'key' should be PRNGKeyArray, but is key<fry>[2]."


@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        (jnp.ones((5, 3)), "float32[5,3]"),
        (jnp.array(True), "bool[]"),
        (np.ones(2), "the ndarray float64[2]"),
        (np.float32(1), "the float32 float32[]"),
        (1.5, "the float 1.5"),
        ("a", "the str 'a'"),
        ({"a": 1, "b": 2}, "a dict of 2 leaves"),
        ((), "a tuple of 0 leaves"),
        (None, "a NoneType of 0 leaves"),
    ],
)
def test_value_is_described_in_a_phrase(value, phrase):
    assert describe(value) == phrase


def test_long_value_is_cut_short():
    assert len(describe("x" * 1000)) < 60


def test_check_values_shares_axis_names_between_values():
    hint = Float[Array, " n"]
    message = message_of(check_values, "predict()", {"one": (TWO, hint), "other": (ONE, hint)})
    assert message == (
        "predict(): other should be Float[Array, 'n'], but is float32[1], where one is float32[2]."
    )


def test_checked_function_keeps_its_name_and_its_text():
    assert (add.__name__, add.__doc__) == ("add", "Their sum.")


def test_error_inside_a_function_passes_through():
    @checked
    def divide(x: float) -> float:
        return 1 / x

    with pytest.raises(ZeroDivisionError):
        divide(0.0)


def test_axis_names_of_two_calls_are_not_shared():
    assert add(TWO, TWO).shape == (2,)
    assert add(ONE, ONE).shape == (1,)


def test_axis_names_of_a_call_that_failed_are_forgotten():
    message_of(add, TWO, ONE)
    assert add(ONE, ONE).shape == (1,)


@pytest.mark.parametrize(
    "name", sorted(n for n, f in vars(vernal.core).items() if inspect.isfunction(f))
)
def test_every_public_function_is_checked(name):
    wrapped = getattr(vernal.core, name)
    assert wrapped.__code__ is add.__code__, "it is not wrapped by `checked`"


# Switched off.

X, FLAGS = jnp.ones((5, 3)), jnp.zeros((5, 3), bool)


def test_switch_lets_everything_through():
    with switched_off():
        assert add(TWO, ONE[0][None] * jnp.ones(2)).shape == (2,)
        assert doubled(TWO).shape == (4,)
        check_values("predict()", {"value": (1, Float[Array, ""])})


def test_checks_are_back_after_the_switch():
    with switched_off():
        assert doubled(TWO).shape == (4,)
    assert "the result should be" in message_of(doubled, TWO)


PROGRAM = """
import json
import sys

import jax
import jax.numpy as jnp

from vernal.core import *
from vernal.core import gae, make_recurrent_fn, make_root, take

x, no = jnp.ones((5, 3)), jnp.zeros((5, 3), bool)


def predict(params, position):
    return jnp.zeros(2), position, jnp.ones(2, bool)


def good_predict(params, position):
    return Prediction(*predict(params, position))


def transition(params, key, action, position):
    return position, position, False, 0


root = make_root(good_predict, None, jnp.zeros(1))
step = make_recurrent_fn(good_predict, transition, gamma=0.9)
calls = {
    "wrong shape": lambda: gae(x, x, x[:1], x, no, lambda_=1.0),
    "missing knob": lambda: gae(x, x, x, x, no),
    "missing arrays": lambda: gae(),
    "unknown knob": lambda: gae(x, x, x, x, no, lamda=1.0),
    "plain prediction": lambda: make_root(predict, None, jnp.zeros(1)),
    "plain transition": lambda: step(None, jax.random.key(0), jnp.array([0]), root.embedding),
    "table of indices": lambda: take(jnp.arange(3), jnp.array([[0, 1]])),
}
said = {}
for name, call in calls.items():
    try:
        said[name] = f"none: {jax.tree.map(jnp.shape, call())}"
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
json.dump(said, sys.stdout)
"""


def run_without_hook(**environment):
    """What a user sees: a process that nothing but the package itself checks."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def sentences():
    return run_without_hook()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            "wrong shape",
            "TypeError: gae(): argument 'values' should be Float[Array, 'T *batch'], but is "
            "float32[1,3], where 'rewards' is float32[5,3], 'discounts' is float32[5,3].",
        ),
        (
            "missing knob",
            "TypeError: gae() missing 1 required keyword-only argument: 'lambda_'",
        ),
        (
            "missing arrays",
            "TypeError: gae() missing 5 required positional arguments: 'rewards', 'discounts', "
            "'values', 'next_values', and 'resets'",
        ),
        ("unknown knob", "TypeError: gae() got an unexpected keyword argument 'lamda'"),
        (
            "plain prediction",
            "TypeError: predict(): the result should be Prediction, but is a tuple of 3 leaves, "
            "where of states is bool[1].",
        ),
        (
            "plain transition",
            "TypeError: transition(): the result should be ModelTransition, but is a tuple of 4 "
            "leaves, where of states is bool[1].",
        ),
        (
            "table of indices",
            "TypeError: take(): argument 'indices' should be Int[Array, 'n'], but is int32[1,2], "
            "where 'batch' is int32[3].",
        ),
    ],
)
def test_user_reads_one_sentence(sentences, call, sentence):
    assert sentences[call].startswith(sentence)


def test_environment_variable_switches_the_checks_off():
    assert run_without_hook(JAXTYPING_DISABLE="1")["table of indices"].startswith("none: ")


# Free of cost once compiled.


def predict(params, position):
    return Prediction(jnp.zeros(2), params * position, jnp.array([True, False]))


def transition(params, key, action, position):
    return ModelTransition(position + action, position, position > 2, jnp.array(0))


def walk(key, positions):
    step_fn = make_recurrent_fn(predict, transition, gamma=0.9)
    root = make_root(predict, 2.0, positions)
    return step_fn(2.0, key, jnp.zeros(3, int), root.embedding)


ROW = jnp.ones(3)
TRACED = {
    "mask_logits": lambda: jax.make_jaxpr(mask_logits)(X, FLAGS),
    "entropy": lambda: jax.make_jaxpr(Categorical.entropy)(Categorical(X)),
    "gae": lambda: jax.make_jaxpr(lambda x, no: gae(x, x, x, x, no, lambda_=0.9))(X, FLAGS),
    "vtrace": lambda: jax.make_jaxpr(lambda x, no: vtrace(x, x, x, x, no, x))(X, FLAGS),
    "normalise": lambda: jax.make_jaxpr(normalise)(X),
    "ppo_loss": lambda: jax.make_jaxpr(ppo_loss)(X, X, X, X, X, X),
    "make_batch": lambda: jax.make_jaxpr(make_batch)({"a": X}, X, X, X, X, X),
    "two_hot": lambda: jax.make_jaxpr(two_hot)(X, jnp.arange(4.0)),
    "search": lambda: jax.make_jaxpr(walk)(jax.random.key(0), ROW),
}


@pytest.mark.parametrize("name", TRACED)
def test_compiled_function_is_the_same_with_checks_and_without(name):
    checked_jaxpr = str(TRACED[name]())
    with switched_off():
        assert str(TRACED[name]()) == checked_jaxpr


def compilations(caplog, function):
    """What JAX compiled during a call, by its own log."""
    caplog.clear()
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        jax.block_until_ready(function())
    return [text for text in caplog.messages if text.startswith("Compiling")]


def test_log_shows_a_compilation(caplog):
    assert compilations(caplog, lambda: jax.jit(lambda x: x * 3.25)(X))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: gae(x, x, x, x, FLAGS, lambda_=0.9),
        lambda x: vtrace(x, x, x, x, FLAGS, x),
        lambda x: n_step_returns(x, x, x, FLAGS, n=3),
        normalise,
        lambda x: Categorical(x).entropy(),
        lambda x: ppo_loss(x, x, x, x, x, x),
    ],
    ids=["gae", "vtrace", "n_step_returns", "normalise", "entropy", "ppo_loss"],
)
def test_second_eager_call_compiles_nothing(caplog, function):
    first, second = X, X + 1
    jax.block_until_ready(function(first))
    assert compilations(caplog, lambda: function(second)) == []
