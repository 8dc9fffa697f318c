"""Ratios of new over old probabilities."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float


def importance_ratios(log_ratios: Float[Array, " *batch"]) -> Float[Array, " *batch"]:
    """Exponential that stays finite: a clip behind an overflow would turn the gradient to NaN."""
    largest = math.log(jnp.finfo(log_ratios.dtype).max) - 1
    return jnp.exp(jnp.minimum(log_ratios, largest))
