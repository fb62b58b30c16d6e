"""An accident: rank $DIE_RANK gets SIGKILL, or $DIE_BY, before step $DIE_AT; what was to be saved before is on disk.

Once torchrun has started the ranks again, nothing happens but that rank 1 comes late, so that what the first attempt
left in the store would be taken for it.
"""

# pyright: basic, reportPrivateImportUsage=false
import os
import signal
import sys
import time

import torch.distributed as dist

from ddptrain import cli, train

AGAIN = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
_step, _init = train.Training._step, dist.init_process_group


def step(self, *args, **kwargs):
    if self.progress.step + 1 == int(os.environ["DIE_AT"]) and not AGAIN:
        if self.saver is not None:
            self.saver.wait()
        self.world.barrier()
        if self.world.rank == int(os.environ["DIE_RANK"]):
            os.kill(os.getpid(), signal.Signals[os.environ.get("DIE_BY", "SIGKILL")])
    return _step(self, *args, **kwargs)


def init(*args, **kwargs):
    if AGAIN and os.environ["RANK"] == "1":
        time.sleep(2)
    return _init(*args, **kwargs)


train.Training._step = step
dist.init_process_group = init
if __name__ == "__main__":
    sys.exit(cli.main())
