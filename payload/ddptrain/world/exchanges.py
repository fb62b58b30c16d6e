"""The collectives that are measured: their calls, their values, and the expected results.

Values are integers that every dtype holds exactly, so a check compares bits. torch reduces and
broadcasts in place only: out of place, all_reduce and broadcast include the copy before it.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from ddptrain.ground import errors

PERIOD = 61  # of the values that are reduced
# The integers from 0 up that the dtype holds without gaps are below 2 to the power of:
EXACT_BITS = {
    "float": 24,
    "double": 53,
    "half": 11,
    "bfloat16": 8,
    "int8": 7,
    "uint8": 8,
    "int32": 31,
    "int64": 62,
}
_TORCH = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
}  # of the others the name is torch's
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, _TORCH.get(name, name)) for name in EXACT_BITS
}


@dataclasses.dataclass
class Buffers:
    """Memory for one size.

    `count` is the table's column; `send` and `recv` are as long as the collective needs.
    """

    send: Tensor
    recv: Tensor
    count: int
    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective: its calls out of place and in place, buffers' sizes, expected result."""

    out_of_place: collections.abc.Callable[[Buffers], object]
    expected: collections.abc.Callable[["Coder", Buffers], Tensor]
    bus_factor: collections.abc.Callable[[int], float] = lambda _: 1.0
    in_place: collections.abc.Callable[[Buffers], object] | None = None
    total: bool = False  # the size column counts all ranks' parts
    sends: int = 1  # parts in the send buffer: 1 or the number of ranks (0 stands for it)
    receives: int = 1
    reduces: bool = False
    rooted: bool = False


class Coder:
    """Makes values; those to reduce repeat after PERIOD, so that a table has all sums."""

    def __init__(self, datatype: str, size: int, device: torch.device) -> None:
        self.dtype = DTYPES[datatype]
        self.device = device
        self.size = size
        limit = 1 << EXACT_BITS[datatype]
        if size >= limit:
            what = f"a sum over {size} ranks is not exact"
            raise errors.UserError(f"--datatype {datatype}: {what}; use float or int32")
        self.top = min(PERIOD, limit // size)  # values are 0 .. top - 1
        self.modulus = min(limit, 1 << 20) - 1
        own = torch.stack([self._value(torch.arange(PERIOD), rank) for rank in range(size)])
        self._table = own.sum(0).to(self.dtype).to(device)

    def _value(self, index: Tensor, rank: int) -> Tensor:
        return (index * 5 + rank * 3) % PERIOD % self.top

    def reducible(self, rank: int, count: int) -> Tensor:
        """Make a rank's input of a reduction, shape (count,)."""
        period = self._value(torch.arange(PERIOD), rank).to(self.dtype).to(self.device)
        return _repeated(period, 0, count)

    def reduced(self, start: int, count: int) -> Tensor:
        """Compute the expected result of a reduction for elements [start, start + count)."""
        return _repeated(self._table, start, count)

    def coded(self, source: int, target: int, count: int) -> Tensor:
        """Return values that are unlike at any other source, target or place."""
        # While the sums below stay in 32 bits: half the memory, which buffers of gigabytes need
        dtype = torch.int32 if count < 1 << 30 else torch.int64
        index = torch.arange(count, device=self.device, dtype=dtype)
        return ((index + 7919 * source + 104_729 * target) % self.modulus).to(self.dtype)


def _repeated(period: Tensor, start: int, count: int) -> Tensor:
    shifted = period.roll(-(start % PERIOD))
    return shifted.repeat(count // PERIOD + 1)[:count]


def part(tensor: Tensor, b: Buffers) -> Tensor:
    """Return this rank's part of a buffer that has one for each rank."""
    return tensor[b.rank * b.count : (b.rank + 1) * b.count]


def _all_reduce(b: Buffers) -> None:
    b.recv.copy_(b.send)
    dist.all_reduce(b.recv)


def _broadcast(b: Buffers) -> None:
    if b.rank == 0:
        b.recv.copy_(b.send)
    dist.broadcast(b.recv, src=0)


# By their names since torch 2.13, or by those before
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _ring(n: int) -> float:
    return (n - 1) / n


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(
        reduces=True,
        bus_factor=lambda n: 2 * _ring(n),
        out_of_place=_all_reduce,
        in_place=lambda b: dist.all_reduce(b.recv),
        expected=lambda c, b: c.reduced(0, b.count),
    ),
    "all_gather": Collective(
        total=True,
        receives=0,
        bus_factor=_ring,
        out_of_place=lambda b: _gather(b.recv, b.send),
        in_place=lambda b: _gather(b.recv, part(b.recv, b)),
        expected=lambda c, b: torch.cat([c.coded(rank, 0, b.count) for rank in range(b.size)]),
    ),
    "reduce_scatter": Collective(
        total=True,
        sends=0,
        reduces=True,
        bus_factor=_ring,
        out_of_place=lambda b: _scatter(b.recv, b.send),
        in_place=lambda b: _scatter(part(b.send, b), b.send),
        expected=lambda c, b: c.reduced(b.rank * b.count, b.count),
    ),
    "broadcast": Collective(
        rooted=True,
        out_of_place=_broadcast,
        in_place=lambda b: dist.broadcast(b.recv, src=0),
        expected=lambda c, b: c.coded(0, 0, b.count),
    ),
    "alltoall": Collective(
        total=True,
        sends=0,
        receives=0,
        bus_factor=_ring,
        out_of_place=lambda b: dist.all_to_all_single(b.recv, b.send),
        expected=lambda c, b: torch.cat([c.coded(rank, b.rank, b.count) for rank in range(b.size)]),
    ),
}
