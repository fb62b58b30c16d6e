"""Checkpoints: written while training goes on, read and verified, continued from."""
