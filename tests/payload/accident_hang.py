"""An accident: rank 1 hangs before $HANG_AT: a step of a training, or for ever in the first collective of another."""

# pyright: basic, reportPrivateImportUsage=false
import os
import time

from ddptrain import distributed, train

_step, _sum, _connect = train.Training._step, distributed.World.sum, distributed._connect


def hang() -> None:
    time.sleep(1000)


def step(self, *args, **kwargs):
    if self.world.rank == 1 and self.progress.step + 1 == int(os.environ["HANG_AT"]):
        hang()
    return _step(self, *args, **kwargs)


def summed(self, values):
    if self.rank == 1 and os.environ["HANG_AT"] == "0":
        hang()
    return _sum(self, values)


train.Training._step = step
distributed._connect = lambda world, store, timeout: _connect(world, store, timeout / 3)  # so that it takes 2 s
distributed.World.sum = summed
