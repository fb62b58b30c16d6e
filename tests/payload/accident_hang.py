"""An accident: rank 1 hangs before step $HANG_AT."""

# pyright: basic, reportPrivateImportUsage=false
import os
import time

from ddptrain import distributed, train

_step, _connect = train.Training._step, distributed._connect


def step(self, *args, **kwargs):
    if self.world.rank == 1 and self.progress.step + 1 == int(os.environ["HANG_AT"]):
        time.sleep(1000)
    return _step(self, *args, **kwargs)


train.Training._step = step
distributed._connect = lambda world, store, timeout: _connect(world, store, timeout / 3)  # so that it takes 2 s
