"""What holds in every test, property test and doctest."""

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
