"""An accident: rank 1 receives one corrupted element, as from a bad link or bad memory."""

# pyright: basic, reportPrivateImportUsage=false
import dataclasses
import os

from ddptrain.world import exchanges


def spoil(call):
    def spoiled(buffers):
        call(buffers)
        if buffers.rank == 1:
            buffers.recv.view(-1)[buffers.recv.numel() // 2] += 1

    return spoiled


name = os.environ["CORRUPT"]
collective = exchanges.COLLECTIVES[name]
exchanges.COLLECTIVES[name] = dataclasses.replace(
    collective, out_of_place=spoil(collective.out_of_place)
)
