"""What holds in every test, property test and doctest."""

import os

# Of what a test takes, compiling is most: machine code that is made in less time runs long enough.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
# For tests of agents on several devices; a program that does not ask for them has one.
jax.config.update("jax_num_cpu_devices", 4)
