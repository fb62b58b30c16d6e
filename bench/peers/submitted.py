"""Jobs that submitit itself submits: its batch script, its srun flags, its handler of a preemption's signal."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import itertools
import os
import pathlib
import typing

import submitit  # pyright: ignore[reportMissingImports] - the peer; make bench installs it
import torch
import torch.distributed as dist
from torch.nn import parallel

from ddptrain import model, shapes

READY = 30  # steps before the warning
SHAPE = shapes.Shape(2, 2, 64, 64, 256)  # of commands.tiny
BATCH = 4


def submit(env: dict[str, str], folder: pathlib.Path, job: collections.abc.Callable[[], object]) -> typing.Any:
    """Submit two tasks on two nodes of bench/slurm.py's Slurm and return submitit's job; logs lie in the folder."""
    with _environment(env):
        executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
        executor.update_parameters(nodes=2, tasks_per_node=1, cpus_per_task=1, timeout_min=60, name="peer")
        return executor.submit(job)


class Training(submitit.helpers.Checkpointable):
    """A training of two ranks as submitit's documentation writes one: the handler of rank 0 calls `checkpoint`.

    The ranks meet in a file: the nodes' names, by which they would, are no hosts here.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.core, self.optimizer = folder, None, None

    def __call__(self) -> None:
        """Train until the warning."""
        torch.set_num_threads(1)
        job = submitit.JobEnvironment()
        meeting = self.folder / f"ranks.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=job.global_rank, world_size=job.num_tasks)
        self.core = model.GPT(SHAPE)
        wrapped = parallel.DistributedDataParallel(self.core)
        self.optimizer = torch.optim.AdamW(self.core.parameters(), fused=True)
        if (self.folder / "ckpt.pt").exists():
            saved = torch.load(self.folder / "ckpt.pt")
            self.core.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        tokens = torch.randint(SHAPE.vocab, (BATCH, SHAPE.seq_len + 1))
        for step in itertools.count(1):
            wrapped(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if step == READY and job.global_rank == 0:
                (self.folder / "ready").touch()

    def checkpoint(self) -> typing.Any:
        """Save what the interrupted step had come to, and return what is to run after the requeueing."""
        assert self.core is not None and self.optimizer is not None
        torch.save({"model": self.core.state_dict(), "optimizer": self.optimizer.state_dict()}, self.folder / "ckpt.pt")
        (self.folder / "saved").touch()
        return submitit.helpers.DelayedSubmission(Training(self.folder))


@contextlib.contextmanager
def _environment(env: dict[str, str]) -> collections.abc.Generator[None, None, None]:
    """Let submitit, which passes its own environment on, find the cluster."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
