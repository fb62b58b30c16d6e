"""Slurm's command line: what it prints, and what it does when asked."""
