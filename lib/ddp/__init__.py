"""The ddp program: distributed PyTorch training on a Slurm cluster, for every user of it."""

__version__ = "0.1.0"
