"""How submitit meets a preemption, reimplemented from its documentation: the task's signal handler saves and leaves.

Each task gets USR2; the handler of rank 0 calls the user's `checkpoint`, writes down what to submit again, and exits;
the others exit at once. Nobody agrees on a step: what is saved is whatever the interrupted step had come to.
Started as a program: FOLDER, with torchrun's variables set.
"""

# pyright: basic, reportPrivateImportUsage=false
import os
import pathlib
import pickle
import signal
import sys
import typing

import torch
import torch.distributed as dist
from torch.nn import parallel

from bench.peers import nanogpt


def main(folder: pathlib.Path) -> typing.NoReturn:
    """Train until the signal comes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    core = nanogpt.Model(2, 2, 64, 64, 257)
    wrapped = parallel.DistributedDataParallel(core)
    optimizer = torch.optim.AdamW(core.parameters())

    def leave(*_: object) -> None:
        if dist.get_rank() == 0:
            torch.save({"model": core.state_dict(), "optimizer": optimizer.state_dict()}, folder / "ckpt.pt")
            (folder / "requeue.pkl").write_bytes(pickle.dumps({"resume": str(folder / "ckpt.pt")}))
            print("saved", flush=True)
        os._exit(255)

    signal.signal(signal.SIGUSR2, leave)
    tokens = torch.randint(257, (4, 65))
    for step in range(10**9):
        wrapped(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 30 and dist.get_rank() == 0:
            print("ready", flush=True)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
