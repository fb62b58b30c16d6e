"""An accident: rank $RAISE_RANK meets $RAISE_WHAT: in the training loop, while it opens the data or joins the others.

Where the data is missing, that rank is the first one of a node of its own.
"""

# pyright: basic, reportPrivateImportUsage=false
import os

import torch
import torch._dynamo.exc

from ddptrain import distributed, shards, train

KINDS = {
    "bug": RuntimeError("something nobody thought of"),
    "memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 999 bytes"),
    "compiler": torch._dynamo.exc.BackendCompilerFailed("inductor", OSError("Python.h"), None),
    "joining": torch.distributed.DistBackendError("NCCL error: unhandled system error"),
    "missing": shards.ShardError("--data /data: no such folder"),
}
_step, _print, _init = train.Training._step, shards.fingerprint, torch.distributed.init_process_group
_world = distributed.World.__init__


def is_victim() -> bool:
    return os.environ.get("RANK", "0") == os.environ["RAISE_RANK"]


def step(self, *args, **kwargs):
    if self.progress.step == 4 and is_victim() and os.environ["RAISE_WHAT"] not in ("missing", "joining"):
        raise KINDS[os.environ["RAISE_WHAT"]]
    return _step(self, *args, **kwargs)


def fingerprint(root):
    if is_victim() and os.environ["RAISE_WHAT"] == "missing":
        raise KINDS["missing"]
    return _print(root)


def lead_node(self, *args, **kwargs):
    _world(self, *args, **kwargs)
    self.leads_node = True


def init_process_group(*args, **kwargs):
    if is_victim() and os.environ["RAISE_WHAT"] == "joining":
        raise KINDS["joining"]
    return _init(*args, **kwargs)


torch.distributed.init_process_group = init_process_group
train.Training._step = step
shards.fingerprint = fingerprint
if os.environ["RAISE_WHAT"] == "missing":
    distributed.World.__init__ = lead_node
