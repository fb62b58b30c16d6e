"""An accident before step $AT: $DO hits rank $OF, or all ranks (gradient, weights, stuck).

kill: it gets SIGKILL, or $BY; everything to be saved before is on disk. power: SIGKILL, and the
lines of metrics.jsonl that were not synced are lost, as with the machine's power. stuck: rank 1
stops; rank 0, which waits for it, gets SIGTERM, then both SIGKILL, when rank 0 has written its
outcome, or after a minute. slow: it waits 0.1 s for the data of each step. joining, missing: it fails before
the first step; with missing data, that rank is the first one of another node. Once torchrun has
restarted the ranks, only one thing happens: rank 1 comes late, so that leftovers of the first
attempt in the store would be taken for it.
"""

# pyright: basic, reportPrivateImportUsage=false
import math
import os
import pathlib
import signal
import sys
import time

import torch.distributed as dist
from torch import nn

from ddptrain import cli, train
from ddptrain.data import batches, shards
from ddptrain.world import alarm, distributed, stragglers

DO, AT = os.environ["DO"], int(os.environ.get("AT", "5"))
IS_IT = os.environ.get("RANK", "0") == os.environ.get("OF", "1")
AGAIN = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
ERRORS = {
    "bug": RuntimeError("something nobody thought of"),
    "memory": RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 999 bytes"
    ),
}
_step, _next, _clip = train.Training.step, batches.Reader.next, nn.utils.clip_grad_norm_
_init, _make_groups = dist.init_process_group, distributed.make_groups
_world, _print = distributed.World.__init__, shards.fingerprint
_fsync = os.fsync
_spoilt: list[bool] = []
_synced: dict[int, int] = {}  # the bytes of each inode that a power failure leaves


def step(self, *args, **kwargs):
    is_now = self.progress.step + 1 == AT and not AGAIN
    if is_now:
        before(self)
    done = _step(self, *args, **kwargs)
    if is_now and DO == "weights":
        next(self.core.parameters()).data.fill_(math.nan)
    return done


def before(training):
    if DO in ("kill", "power"):
        if training.saver is not None:
            training.saver.wait()
        training.world.barrier()
        if IS_IT and DO == "power":
            lose_unsynced(training.run_dir / "metrics.jsonl")
        if IS_IT:
            os.kill(os.getpid(), signal.Signals[os.environ.get("BY", "SIGKILL")])
    elif DO == "stuck":
        stand_still(training)
    elif DO == "gradient":
        _spoilt.append(True)
    elif DO == "hang" and IS_IT:
        time.sleep(1000)
    elif DO in ERRORS and IS_IT:
        raise ERRORS[DO]
    elif DO == "compiler" and IS_IT:
        from torch._dynamo import exc

        raise exc.BackendCompilerFailed("inductor", OSError("Python.h"), None)


def fsync(fd):
    _fsync(fd)
    about = os.fstat(fd)
    _synced[about.st_ino] = about.st_size


def lose_unsynced(path):
    os.truncate(path, _synced.get(path.stat().st_ino, 0))


def stand_still(training):
    peers = training.world.broadcast(training.world.collect(os.getpid()))
    if not IS_IT:
        return
    asleep = 0
    while (
        asleep < 10
    ):  # its main thread has slept for a while: it waits for this rank in its backward pass
        state = (
            pathlib.Path(f"/proc/{peers[0]}/task/{peers[0]}/stat")
            .read_text()
            .rpartition(")")[2]
            .split()[0]
        )
        asleep = asleep + 1 if state == "S" else 0
        time.sleep(0.05)
    os.kill(peers[0], signal.SIGTERM)
    outcome = pathlib.Path(training.run_dir, "control", f"{os.environ['RUN_ATTEMPT_ID']}.outcome")
    deadline = time.monotonic() + 60
    while not outcome.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for peer in peers:
        os.kill(peer, signal.SIGKILL)


def clip_grad_norm_(parameters, *args, **kwargs):
    parameters = list(parameters)
    if _spoilt:
        parameters[0].grad.view(-1)[0] = math.inf
    return _clip(parameters, *args, **kwargs)


def wait_and_take(self):
    if IS_IT:
        time.sleep(0.1)
    return _next(self)


def init(*args, **kwargs):
    if DO == "joining" and IS_IT:
        raise dist.DistBackendError("NCCL error: unhandled system error")
    if AGAIN and os.environ["RANK"] == "1":
        time.sleep(2)
    return _init(*args, **kwargs)


def fingerprint(root):
    if IS_IT:
        raise shards.ShardError("--data /data: no such folder")
    return _print(root)


def lead_node(self, *args, **kwargs):
    _world(self, *args, **kwargs)
    self.leads_node = True


train.Training.step = step
nn.utils.clip_grad_norm_ = clip_grad_norm_
dist.init_process_group = init
if DO == "power":
    os.fsync = fsync
elif DO == "stuck":
    alarm.STUCK_S = 1.0
elif DO == "hang":
    distributed.make_groups = lambda world, store, timeout: _make_groups(
        world, store, timeout / 3
    )  # so that it takes 2 s
elif DO == "slow":
    batches.Reader.next = wait_and_take
    stragglers.WINDOW_S = 0.5  # so that a short training has several
elif DO == "missing":
    shards.fingerprint = fingerprint
    distributed.World.__init__ = lead_node
if __name__ == "__main__":
    sys.exit(cli.main())
