"""nanoGPT's own train.py, out of a checkout that $SLURM_DDP_PEERS holds; it is never committed."""

# pyright: basic, reportPrivateImportUsage=false
import ast
import collections.abc
import os
import pathlib
import pickle
import sys

import numpy as np
import torch

from bench import row
from ddptrain import shapes
from ddptrain.data import shards

FOLDER = "SLURM_DDP_PEERS"
DATASET = "bench"
URL = "https://github.com/karpathy/nanoGPT"


def nanogpt() -> pathlib.Path:
    """Return the checkout. Raises NotHere, with the command that makes one."""
    folder = os.environ.get(FOLDER, "")
    path = pathlib.Path(folder).absolute() / "nanoGPT"
    if not folder or not path.is_dir():
        clone = f"git clone {URL} ../peers/nanoGPT && {FOLDER}=../peers make bench"
        raise row.NotHere(f"no checkout of nanoGPT: {clone}")
    return path


def lay_out(
    folder: pathlib.Path, checkout: pathlib.Path, dataset: shards.Dataset, *, has_vocab: bool = True
) -> None:
    """Write a dataset as train.py reads it: bare 16-bit numbers, and the size of the vocabulary.

    Without the size train.py takes GPT-2's, 50304.
    """
    target = folder / "data" / DATASET
    target.mkdir(parents=True)
    (folder / "configurator.py").symlink_to(
        checkout / "configurator.py"
    )  # read from the working directory
    for split, parts in dataset.splits.items():
        with (target / f"{split}.bin").open("wb") as file:
            for shard in parts:
                np.fromfile(shard.path, dtype="<u2", offset=shards.HEADER_BYTES).tofile(file)
    if has_vocab:
        (target / "meta.pkl").write_bytes(
            pickle.dumps({"vocab_size": shapes.padded(dataset.vocab)})
        )


def command(checkout: pathlib.Path, **settings: object) -> list[str]:
    """Return the command of train.py; its working directory is the folder that was laid out."""
    given = {"device": "cpu", "dtype": "float32", "compile": False, "dataset": DATASET, **settings}
    return [
        sys.executable,
        str(checkout / "train.py"),
        *(f"--{key}={value}" for key, value in given.items()),
    ]


def get_batch(
    checkout: pathlib.Path, folder: pathlib.Path, *, seq_len: int, batch: int
) -> collections.abc.Callable[[], object]:
    """Cut the function get_batch out of train.py, bound to the training split of `folder`."""
    body = ast.parse((checkout / "train.py").read_text(encoding="utf-8")).body
    (function,) = (
        node for node in body if isinstance(node, ast.FunctionDef) and node.name == "get_batch"
    )
    names = {
        "np": np,
        "os": os,
        "torch": torch,
        "data_dir": str(folder / "data" / DATASET),
        "block_size": seq_len,
    }
    names |= {"batch_size": batch, "device": "cpu", "device_type": "cpu"}
    exec(compile(ast.Module([function], []), "train.py", "exec"), names)
    return lambda: names["get_batch"]("train")  # pyright: ignore[reportCallIssue]
