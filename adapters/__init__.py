"""Bindings of the core to Equinox and Jumanji, up to agents that train."""
