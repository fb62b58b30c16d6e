"""Checkouts of peers, which are never committed: $SLURM_DDP_PEERS names the folder that holds them."""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib

from bench import row

FOLDER = "SLURM_DDP_PEERS"
_URLS = {"nanoGPT": "https://github.com/karpathy/nanoGPT"}


def find(name: str) -> pathlib.Path:
    """Find a peer's checkout. Raises NotHere, with what to type, when there is none."""
    found = look(name)
    if isinstance(found, row.NotHere):
        raise found
    return found


def look(name: str) -> pathlib.Path | row.NotHere:
    """Return a peer's checkout or, for a row that has other peers too, what to type to get it."""
    folder = os.environ.get(FOLDER, "")
    path = pathlib.Path(folder).absolute() / name
    if folder and path.is_dir():
        return path
    hint = f"git clone {_URLS[name]} ../peers/{name} && {FOLDER}=../peers make bench"
    return row.NotHere(f"no checkout of {name}: {hint}")
