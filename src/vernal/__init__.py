"""Reinforcement learning for JAX users who use Equinox.

`vernal.core` is a set of typed pure functions, each usable by itself; `vernal.adapters`
binds them to Equinox networks, Jumanji environments and mctx search.
"""

__version__ = "0.1.0"
