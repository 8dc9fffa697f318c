"""What holds in every test, property test and doctest."""

import os
from pathlib import Path

# Of what a test takes, compiling is most: machine code that is made in less time runs long enough,
# and what was compiled once is kept, for processes that a test starts too.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
_COMPILED = Path(__file__).parent / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax  # noqa: E402 (reads them)

jax.config.update("jax_numpy_rank_promotion", "raise")
# For tests of agents on several devices; a program that does not ask for them has one.
jax.config.update("jax_num_cpu_devices", 4)
