"""What ranks agree on, passed along a binomial tree: messages and waiting grow with the logarithm of their number.

The parent of a rank is that number without its lowest bit, so a rank's children follow it in the ranks' order, and the
ranks below a child are a range. gloo's own sum and gather of small values pass each rank's share around a ring: 8,000
ranks would wait for 16,000 messages in a row.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import pickle
import typing

import torch
import torch.distributed as dist
from torch import Tensor


def parent(rank: int) -> int:
    """Return the rank above; rank 0 has none."""
    return rank & (rank - 1)


def children(rank: int, size: int) -> list[range]:
    """Return the ranks below: one range for each child, which is its first."""
    room = rank & -rank or size
    found: list[range] = []
    step = 1
    while step < room and rank + step < size:
        found.append(range(rank + step, min(rank + 2 * step, size)))
        step *= 2
    return found


class Tree:
    """All ranks of a group whose backend is gloo. Every rank calls the same method in the same order."""

    def __init__(self, rank: int, size: int, control: typing.Any) -> None:
        self.rank, self.size = rank, size
        self.control: typing.Any = control
        self._children = children(rank, size)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum([0.0])

    def sum(self, values: collections.abc.Sequence[float]) -> list[float]:
        """Return the sums over the ranks, in 64 bits, the same on every rank."""
        total = torch.tensor(values, dtype=torch.float64)
        part = torch.empty_like(total)
        for below in self._children:
            dist.recv(part, below[0], group=self.control)
            total += part
        if self.rank:
            dist.send(total, parent(self.rank), group=self.control)
            dist.recv(total, parent(self.rank), group=self.control)
        for below in reversed(self._children):
            dist.send(total, below[0], group=self.control)
        return total.tolist()

    def collect(self, value: object) -> list[typing.Any]:
        """Return every rank's value, in rank order, on rank 0; an empty list elsewhere."""
        found = [value]
        for below in self._children:
            found += self._receive(below[0])
        if not self.rank:
            return found
        self._send(found, parent(self.rank))
        return []

    def broadcast(self, value: object) -> typing.Any:
        """Return rank 0's value on every rank."""
        if self.rank:
            value = self._receive(parent(self.rank))
        for below in reversed(self._children):
            self._send(value, below[0])
        return value

    def _send(self, value: object, to: int) -> None:
        data = pickle.dumps(value)
        dist.send(torch.tensor([len(data)]), to, group=self.control)
        dist.send(_as_tensor(bytearray(data)), to, group=self.control)

    def _receive(self, sender: int) -> typing.Any:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, sender, group=self.control)
        data = bytearray(int(size))
        dist.recv(_as_tensor(data), sender, group=self.control)
        return pickle.loads(data)  # noqa: S301 - of another rank of this job


def _as_tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
