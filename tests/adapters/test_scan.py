"""Control flow over modules: equal to a plain loop, and strict about what may change."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.adapters.scan import cond, run_if, scan, value_and_grad, while_loop
from vernal.core._arrays import where

KEY = jax.random.key(0)
NETWORK = eqx.nn.MLP(2, 2, 4, 1, activation=jax.nn.tanh, key=KEY)
XS = jax.random.normal(jax.random.key(1), (5, 2))


def body(carry, x):
    network, state, step = carry
    state = network(state + x)
    network = eqx.tree_at(lambda n: n.layers[0].bias, network, replace_fn=lambda b: 0.9 * b + 0.1)
    return (network, state, step + 1), state


def loop(carry, xs):
    ys = []
    for x in xs:
        carry, y = body(carry, x)
        ys.append(y)
    return carry, jnp.stack(ys)


def assert_close(tree, other):
    tree, static = eqx.partition(tree, eqx.is_array_like)
    other, other_static = eqx.partition(other, eqx.is_array_like)
    assert eqx.tree_equal(static, other_static)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), tree, other)


def test_scan_over_a_module_equals_a_loop():
    carry = (NETWORK, jnp.zeros(2), jnp.array(0))
    assert_close(scan(body, carry, XS), loop(carry, XS))


def test_scan_over_no_xs_takes_length_steps():
    (_, count), counts = scan(
        lambda c, _: ((c[0], c[1] + 1), c[1]), (NETWORK, jnp.array(0)), None, length=4
    )
    assert (int(count), counts.tolist()) == (4, [0, 1, 2, 3])


def test_scan_gives_the_module_back_with_its_functions():
    (network, _, _), _ = scan(body, (NETWORK, jnp.zeros(2), jnp.array(0)), XS)
    assert network.activation is NETWORK.activation


def test_scan_carries_typed_keys_and_strings():
    def split(carry, _):
        key, word = carry
        key, use = jax.random.split(key)
        return (key, word), jax.random.uniform(use)

    (_, word), draws = scan(split, (KEY, "word"), None, length=3)
    assert word == "word"
    assert len(set(draws.tolist())) == 3


def test_scan_under_jit_equals_a_loop():
    @eqx.filter_jit
    def run(network, xs):
        return scan(body, (network, jnp.zeros(2), jnp.array(0)), xs)

    assert_close(run(NETWORK, XS), loop((NETWORK, jnp.zeros(2), jnp.array(0)), XS))


def test_scan_under_vmap_equals_one_by_one():
    states = jax.random.normal(KEY, (3, 2))
    together = jax.vmap(lambda s: scan(body, (NETWORK, s, jnp.array(0)), XS)[1])(states)
    for n in range(3):
        np.testing.assert_allclose(
            together[n], loop((NETWORK, states[n], jnp.array(0)), XS)[1], rtol=1e-5, atol=1e-7
        )


def test_gradient_through_scan_equals_that_of_a_loop():
    def loss(run):
        return lambda network: jnp.sum(run((network, jnp.zeros(2), jnp.array(0)), XS)[1] ** 2)

    by_scan = eqx.filter_grad(loss(lambda carry, xs: scan(body, carry, xs)))(NETWORK)
    assert_close(by_scan, eqx.filter_grad(loss(loop))(NETWORK))


def test_scan_inside_scan_equals_a_loop():
    def outer(carry, xs):
        return scan(body, carry, xs)

    carry = (NETWORK, jnp.zeros(2), jnp.array(0))
    assert_close(scan(outer, carry, XS.reshape(5, 1, 2))[0], loop(carry, XS)[0])


def change_activation(network):
    return eqx.tree_at(lambda n: n.activation, network, jax.nn.relu)


class Scaled(eqx.Module):
    weight: jax.Array
    power: int = eqx.field(static=True)


def test_scan_refuses_another_function_in_the_carry():
    network = eqx.nn.Lambda(jax.nn.tanh)
    with pytest.raises(TypeError, match=r"scan\(\): a step changed a static part .*tanh.*relu"):
        scan(lambda c, _: (eqx.nn.Lambda(jax.nn.relu), None), network, None, length=2)


def test_scan_refuses_another_static_field_in_the_carry():
    with pytest.raises(TypeError, match="only arrays can change inside a loop"):
        scan(lambda c, _: (Scaled(c.weight, 2), None), Scaled(jnp.ones(2), 1), None, length=2)


def test_while_loop_refuses_another_function_in_the_carry():
    def body(carry):
        return eqx.nn.Lambda(jax.nn.relu), carry[1] + 1

    with pytest.raises(TypeError, match=r"while_loop\(\): a step changed a static part"):
        while_loop(lambda c: c[1] < 3, body, (eqx.nn.Lambda(jax.nn.tanh), jnp.array(0)))


def test_while_loop_over_a_module_equals_a_loop():
    def step(carry):
        return body(carry, XS[0])[0]

    carry = (NETWORK, jnp.zeros(2), jnp.array(0))
    assert_close(
        while_loop(lambda c: c[2] < 4, step, carry), loop(carry, jnp.stack([XS[0]] * 4))[0]
    )


def test_while_loop_that_never_runs_gives_the_first_carry():
    carry = while_loop(lambda c: c[1] < 0, lambda c: (c[0], c[1] + 1), (NETWORK, jnp.array(0)))
    assert_close(carry, (NETWORK, jnp.array(0)))


def test_while_loop_under_vmap_stops_row_by_row():
    def count(limit):
        return while_loop(
            lambda c: c[1] < limit, lambda c: (c[0], c[1] + 1), (NETWORK, jnp.array(0))
        )[1]

    assert jax.vmap(count)(jnp.array([3, 0, 7])).tolist() == [3, 0, 7]


def double(network):
    return eqx.tree_at(lambda n: n.layers[0].bias, network, replace_fn=lambda b: 2 * b)


@pytest.mark.parametrize("condition", [True, False])
def test_cond_calls_the_branch_that_the_condition_names(condition):
    result = cond(condition, double, lambda network: network, NETWORK)
    assert_close(result, double(NETWORK) if condition else NETWORK)


def test_cond_under_jit_and_vmap_chooses_row_by_row():
    @jax.jit
    @jax.vmap
    def choose(condition, x):
        return cond(condition, lambda f, x: f(x), lambda f, x: x, NETWORK, x)

    conditions = jnp.array([True, False, True, False, False])
    expected = jnp.where(conditions[:, None], jax.vmap(NETWORK)(XS), XS)
    np.testing.assert_allclose(choose(conditions, XS), expected, rtol=1e-6)


def test_gradient_of_cond_is_that_of_the_chosen_branch():
    def loss(network, condition):
        return cond(condition, lambda f, x: f(x).sum(), lambda f, x: x.sum(), network, XS[0])

    chosen = eqx.filter_grad(loss)(NETWORK, jnp.array(True))
    assert_close(chosen, eqx.filter_grad(lambda network: network(XS[0]).sum())(NETWORK))
    other = eqx.filter_grad(loss)(NETWORK, jnp.array(False))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(other))


def test_cond_refuses_branches_with_different_functions():
    with pytest.raises(TypeError, match=r"cond\(\): the branches return different static parts"):
        cond(True, change_activation, lambda network: network, NETWORK)


def test_value_and_grad_equals_jax_on_the_arrays_alone():
    arrays, static = eqx.partition(NETWORK, eqx.is_array)

    def loss(network, x):
        return jnp.sum(network(x) ** 2), network(x)

    value = value_and_grad(loss)(NETWORK, XS[0])
    expected = jax.value_and_grad(lambda a, x: loss(eqx.combine(a, static), x), has_aux=True)
    assert_close(value, expected(arrays, XS[0]))


def test_gradient_has_none_where_the_module_has_no_float_array():
    tree = {"weight": jnp.array(2.0), "count": jnp.array(3), "function": jax.nn.relu}
    _, gradient = value_and_grad(lambda t, x: (t["weight"] * t["count"] * x, ()))(tree, 5.0)
    assert gradient == {"weight": 15.0, "count": None, "function": None}


def test_where_takes_rows_of_leaves_of_any_rank_and_dtype():
    condition = jnp.array([True, False, True])
    yes = (jnp.arange(3), jnp.ones((3, 2, 2)), jnp.ones((3, 1), bool))
    no = (-jnp.arange(3), jnp.zeros((3, 2, 2)), jnp.zeros((3, 1), bool))
    chosen = where(condition, yes, no)
    for row, tree in enumerate([yes, no, yes]):
        for a, b in zip(chosen, tree, strict=True):
            np.testing.assert_array_equal(a[row], b[row])
            assert a.dtype == b.dtype


def test_where_takes_rows_of_typed_keys():
    keys, others = jax.random.split(KEY, 3), jax.random.split(jax.random.key(1), 3)
    chosen = where(jnp.array([True, False, False]), keys, others)
    np.testing.assert_array_equal(
        jax.random.key_data(chosen),
        np.concatenate([jax.random.key_data(keys)[:1], jax.random.key_data(others)[1:]]),
    )


def test_where_refuses_trees_of_different_structure():
    with pytest.raises(ValueError, match=r"(?i)mismatch|structure|arity"):
        where(jnp.array([True]), (jnp.ones(1), jnp.ones(1)), (jnp.ones(1),))


@pytest.mark.parametrize("condition", [True, False])
def test_run_if_calls_as_the_condition_says(condition):
    result = run_if(jnp.array(condition), lambda: {"x": jnp.ones(2)}, {"x": jnp.zeros(2)})
    assert result["x"].tolist() == [float(condition)] * 2


def run_rows(conditions, calls):
    def row(condition, x):
        def compute():
            jax.debug.callback(lambda _: calls.append(1), x)
            return x**2

        return run_if(condition, compute, -x)

    rows = jnp.arange(1.0, 1.0 + len(conditions))
    result = jax.block_until_ready(jax.jit(jax.vmap(row))(jnp.array(conditions), rows))
    jax.effects_barrier()
    return result


def test_run_if_under_vmap_equals_where():
    assert run_rows([True, False, True], []).tolist() == [1.0, -2.0, 9.0]


def test_run_if_under_vmap_calls_nothing_where_no_row_needs_it():
    calls = []
    assert run_rows([False, False, False], calls).tolist() == [-1.0, -2.0, -3.0]
    assert calls == []


def test_run_if_under_vmap_calls_once_for_all_rows_where_one_needs_it():
    calls = []
    run_rows([False, True, False], calls)
    assert len(calls) == 3  # the callback itself is mapped: once a row


def test_run_if_inside_scan_equals_a_loop():
    def step(total, x):
        total = run_if(x > 2, lambda: total + x, total)
        return total, total

    total, totals = jax.jit(lambda: scan(step, jnp.array(0), jnp.arange(5)))()
    assert (int(total), totals.tolist()) == (7, [0, 0, 0, 3, 7])
