"""Bindings of the core to Equinox, Jumanji and mctx, up to agents that train."""
