"""Distributed training on a Slurm cluster: data, model, training loop, checkpoints and collectives.

Start it with `python -m ddptrain --help`, under torchrun or alone. It knows nothing of Juju or of charms.
"""

__version__ = "0.1.0"
