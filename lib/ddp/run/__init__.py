"""Runs: their types, folders, states, metrics and failures."""
