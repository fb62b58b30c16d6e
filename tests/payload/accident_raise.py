"""An accident: rank $RAISE_RANK meets $RAISE_WHAT: in the training loop, while it opens the data or joins the others."""

# pyright: basic, reportPrivateImportUsage=false
import os

import torch
import torch._dynamo.exc

from ddptrain import shards, train

KINDS = {
    "bug": RuntimeError("something nobody thought of"),
    "memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 999 bytes"),
    "compiler": torch._dynamo.exc.BackendCompilerFailed("inductor", OSError("Python.h"), None),
    "joining": torch.distributed.DistBackendError("NCCL error: unhandled system error"),
    "missing": shards.ShardError("--data /data: no such folder"),
}
_step, _open, _init = train.Training._step, shards.open_dataset, torch.distributed.init_process_group


def is_victim() -> bool:
    return os.environ.get("RANK", "0") == os.environ["RAISE_RANK"]


def step(self, *args, **kwargs):
    if self.progress.step == 4 and is_victim() and os.environ["RAISE_WHAT"] not in ("missing", "joining"):
        raise KINDS[os.environ["RAISE_WHAT"]]
    return _step(self, *args, **kwargs)


def open_dataset(root):
    if is_victim() and os.environ["RAISE_WHAT"] == "missing":
        raise KINDS["missing"]
    return _open(root)


def init_process_group(*args, **kwargs):
    if is_victim() and os.environ["RAISE_WHAT"] == "joining":
        raise KINDS["joining"]
    return _init(*args, **kwargs)


torch.distributed.init_process_group = init_process_group
train.Training._step = step
shards.open_dataset = open_dataset
