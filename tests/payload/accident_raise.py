"""An accident: rank $RAISE_RANK meets $RAISE_WHAT, in the training loop or while it opens the data."""

# pyright: basic, reportPrivateImportUsage=false
import os

from ddptrain import shards, train

KINDS = {
    "bug": RuntimeError("something nobody thought of"),
    "memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 999 bytes"),
    "missing": shards.ShardError("--data /data: no such folder"),
}
_step, _open = train.Training._step, shards.open_dataset


def is_victim() -> bool:
    return os.environ.get("RANK", "0") == os.environ["RAISE_RANK"]


def step(self, *args, **kwargs):
    if self.progress.step == 4 and is_victim() and os.environ["RAISE_WHAT"] != "missing":
        raise KINDS[os.environ["RAISE_WHAT"]]
    return _step(self, *args, **kwargs)


def open_dataset(root):
    if is_victim() and os.environ["RAISE_WHAT"] == "missing":
        raise KINDS["missing"]
    return _open(root)


train.Training._step = step
shards.open_dataset = open_dataset
