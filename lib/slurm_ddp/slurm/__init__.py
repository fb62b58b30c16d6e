"""Slurm's command line: its output, and changes that it makes."""
