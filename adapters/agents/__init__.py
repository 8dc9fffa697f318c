"""Agents: each a `make_*` function that gives `init`, `step` and `act`."""
