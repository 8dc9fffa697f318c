"""mctx for a type checker: chex's arrays and dataclasses are not JAX's to it."""

from typing import Any

import mctx as _mctx

mctx: Any = _mctx
Tree = Any
"""`mctx.Tree`, of one state or of a batch."""
