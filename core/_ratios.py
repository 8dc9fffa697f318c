"""Ratios of new over old probabilities."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def bound_log_ratios(log_ratios: Float[Array, " *batch"], dtype: Any) -> Float[Array, " *batch"]:
    """Log-ratios whose exponentials fit into a dtype, with room for a factor of e.

    Behind an overflow a clip would turn the gradient to NaN.
    """
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(log_ratios, -largest, math.log(largest) - 1)
