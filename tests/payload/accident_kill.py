"""An accident: rank $DIE_RANK dies by SIGKILL before step $DIE_AT; what was to be saved before is on disk."""

# pyright: basic, reportPrivateImportUsage=false
import os
import signal
import sys

from ddptrain import cli, train

_step = train.Training._step


def step(self, *args, **kwargs):
    if self.progress.step + 1 == int(os.environ["DIE_AT"]):
        if self.saver is not None:
            self.saver.wait()
        self.world.barrier()
        if self.world.rank == int(os.environ["DIE_RANK"]):
            os.kill(os.getpid(), signal.SIGKILL)
    return _step(self, *args, **kwargs)


train.Training._step = step
if __name__ == "__main__":
    sys.exit(cli.main())
