"""This machine's Slurm node: its registration with its GPUs, what keeps it, when it resumes."""
