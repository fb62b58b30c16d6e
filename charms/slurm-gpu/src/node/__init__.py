"""This machine's Slurm node: its registration with its GPUs, what keeps it from jobs, and when it resumes."""
