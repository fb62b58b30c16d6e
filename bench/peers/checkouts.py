"""Checkouts of peers, which are never committed: $SLURM_DDP_PEERS names the folder that holds them."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib

from bench import row

FOLDER = "SLURM_DDP_PEERS"
_URLS = {"nanoGPT": "https://github.com/karpathy/nanoGPT"}


def find(name: str) -> pathlib.Path:
    """Find a peer's checkout. Raises NotHere, with what to type, when there is none."""
    folder = os.environ.get(FOLDER, "")
    path = pathlib.Path(folder).absolute() / name
    if not folder or not path.is_dir():
        hint = f"git clone {_URLS[name]} ../peers/{name} && {FOLDER}=../peers make bench"
        raise row.NotHere(f"no checkout of {name}: {hint}")
    return path
