"""Runs: the types, their folders, their state, and how they are submitted and followed."""
