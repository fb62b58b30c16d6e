"""An accident to run under torchrun: rank 1 of the first attempt dies by SIGKILL before step 13.

In the second attempt it comes late, so that what the first one left in the store would be taken for it.
"""

# pyright: basic, reportPrivateImportUsage=false
import os
import signal
import sys
import time

import torch.distributed as dist

from ddptrain import cli, train

_step = train.Training._step
_init = dist.init_process_group


def step(self, *args, **kwargs):
    if self.progress.step + 1 == 13 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if self.saver is not None:
            self.saver.wait()
        self.world.barrier()
        if self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return _step(self, *args, **kwargs)


def init(*args, **kwargs):
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("1", "1"):
        time.sleep(2)
    return _init(*args, **kwargs)


train.Training._step = step
dist.init_process_group = init
if __name__ == "__main__":
    sys.exit(cli.main())
