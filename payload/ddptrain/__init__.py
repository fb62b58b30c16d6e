"""Distributed training on a Slurm cluster: data, model, training loop, checkpoints and collectives.

Start it with `python -m ddptrain --help`, under torchrun or alone. It knows nothing of Juju or of charms.
`from ddptrain import submit` sends a Python function to the cluster: `job = submit(train, lr=0.1, nodes=2)`.
"""

import typing

if typing.TYPE_CHECKING:
    from ddptrain.functions.submission import submit as submit

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import `submit` on use: the jobs' programs start without it."""
    if name != "submit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ddptrain.functions.submission import submit

    return submit
