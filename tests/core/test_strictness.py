"""Each public function under JAX's strictest settings: dtypes, leaks, reuse of keys."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from vernal import core

KEY = jax.random.key(0)
NO = jnp.zeros((3, 2), bool)
ACTIONS = jnp.zeros(3, int)


def predict(params, position):
    return core.Prediction(params * position, position[0], jnp.array([True, False]))


def transition(params, key, action, position):
    noise = jax.random.uniform(key, position.shape, position.dtype)
    return core.ModelTransition(position + noise, position[0], position[1] > 1, jnp.array(0))


def search(x, key=KEY):
    recurrent_fn = core.make_recurrent_fn(predict, transition, gamma=0.9)
    root = core.make_root(predict, x[0, 0], x)
    return recurrent_fn(x[0, 0], key, ACTIONS, root.embedding)


def store(x):
    return core.add_to_replay(core.init_replay(x[0], capacity=6), x)


# One call of each function and of each method of a policy, with Python's numbers as knobs.
CALLS: dict[str, Any] = {
    "gae": lambda x: core.gae(x, x, x, x, NO, lambda_=0.9),
    "lambda_returns": lambda x: core.lambda_returns(x, x, x, NO, lambda_=0.9),
    "discounted_returns": lambda x: core.discounted_returns(x, x, x, NO),
    "n_step_returns": lambda x: core.n_step_returns(x, x, x, NO, n=2),
    "vtrace": lambda x: core.vtrace(x, x, x, x, NO, x, lambda_=0.9, rho_clip=2, c_clip=0.5),
    "normalise": lambda x: (core.normalise(x), core.normalise(x, ~NO, epsilon=0.5)),
    "make_batch": lambda x: core.make_batch(x, NO, x, x, x, x),
    "take": lambda x: core.take((x, NO), ACTIONS),
    "ppo_loss": lambda x: core.ppo_loss(x, x, x, x, x, x, x, value_clip_epsilon=0.2),
    "policy_value_loss": lambda x: core.policy_value_loss(x, x, x[:, 0], x[:, 0]),
    "value_loss": lambda x: core.value_loss(x, x, x, clip_epsilon=0.2),
    "explained_variance": lambda x: core.explained_variance(x, x),
    "mask_logits": lambda x: core.mask_logits(x, NO),
    "init_moments": lambda x: core.init_moments((2,)),
    "update_moments": lambda x: core.update_moments(core.init_moments((2,)), x, decay=0.9),
    "init_replay": store,
    "add_to_replay": store,
    "make_recurrent_fn": search,
    "make_root": search,
    "signed_hyperbolic": lambda x: core.signed_hyperbolic(x, epsilon=0.01),
    "signed_parabolic": lambda x: core.signed_parabolic(x, epsilon=0.01),
    "two_hot": lambda x: core.two_hot(x, x[:, 0]),
    "from_two_hot": lambda x: core.from_two_hot(x, x[0]),
    "minibatch_indices": lambda x: DRAWS["minibatch_indices"](x, KEY),
    "replay_indices": lambda x: DRAWS["replay_indices"](x, KEY),
}
POLICIES: dict[str, Any] = {
    "Categorical": core.Categorical,
    "FactorisedCategorical": core.FactorisedCategorical,
    "SquashedNormal": lambda x: core.SquashedNormal(x, x),
}


def quantities(policy):
    sample = policy.sample(KEY)
    return policy.log_prob(sample), policy.entropy(), policy.kl(policy), policy.mode()


CALLS |= {name: lambda x, make=make: quantities(make(x)) for name, make in POLICIES.items()}
# What takes a key.
DRAWS: dict[str, Any] = {
    **{name: lambda x, key, make=make: make(x).sample(key) for name, make in POLICIES.items()},
    "minibatch_indices": lambda x, key: core.minibatch_indices(key, size=6, minibatch_size=2),
    "replay_indices": lambda x, key: core.replay_indices(
        store(x), key, minibatches=2, minibatch_size=3
    ),
    "make_recurrent_fn": search,
}


def test_every_public_function_is_called():
    functions = {name for name, value in vars(core).items() if inspect.isfunction(value)}
    assert functions | set(POLICIES) == set(CALLS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_function_needs_no_promotion_and_leaks_no_tracer(name, dtype):
    x = jnp.full((3, 2), 0.5, dtype)

    def total(x):
        results = [y for y in jax.tree.leaves(CALLS[name](x)) if y.dtype in (dtype, jnp.float32)]
        return sum((jnp.sum(y.astype(jnp.float32)) for y in results), jnp.zeros(()))

    with jax.numpy_dtype_promotion("strict"), jax.checking_leaks():
        gradient = jax.eval_shape(jax.grad(total), x)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("name", DRAWS)
def test_function_consumes_its_key_and_uses_it_once(name):
    use, x = jax.jit(DRAWS[name]), jnp.full((3, 2), 0.5)
    with jax.debug_key_reuse(True):
        key = jax.random.key(1)
        use(x, key)
        with pytest.raises(jax.errors.KeyReuseError):
            use(x, key)
