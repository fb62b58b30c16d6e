"""An accident: rank $SIGNAL_RANK gets SIGUSR1 before step $SIGNAL_AT."""

# pyright: basic, reportPrivateImportUsage=false
import os
import signal

from ddptrain import train

_step = train.Training._step


def step(self, *args, **kwargs):
    if self.progress.step + 1 == int(os.environ["SIGNAL_AT"]) and self.world.rank == int(os.environ["SIGNAL_RANK"]):
        os.kill(os.getpid(), signal.SIGUSR1)
    return _step(self, *args, **kwargs)


train.Training._step = step
