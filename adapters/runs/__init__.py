"""Runs: train an agent into a folder, and read it back."""
