"""Sites: ranks that share a fast network. The links between sites are slow.

Ranks of a site train as plain DDP among themselves. The first rank of each site leads it: leaders
exchange with each other, and each passes the result on to its site.
"""

# pyright: basic, reportPrivateImportUsage=false
import os
import typing

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ddptrain.ground import errors
from ddptrain.world import agreement

# The variable with groups of nodes whose round trips are short, as measured: a,b c,d
NEAR = "NEAR_NODES"


class Sites:
    """The sites of a world, and this rank's place in them.

    Every rank makes one; rank 0's `place` counts.
    """

    def __init__(self, peers: agreement.Peers, place: list[int]) -> None:
        place = peers.broadcast(place)
        self.count = 1 + max(place)
        self.number = place[peers.rank]  # of this rank's site
        self.ranks = [rank for rank, site in enumerate(place) if site == self.number]
        self.leader = self.ranks[0]
        self.leads = peers.rank == self.leader
        # Of the world's ranks: a site counts in a mean for as many sequences as it trains on
        self.share = len(self.ranks) / peers.size
        self.group: typing.Any = None  # of this site
        self.leaders: typing.Any = None
        if self.count > 1:
            self._connect(place)

    def _connect(self, place: list[int]) -> None:
        """Make the process groups. Every rank takes part in the making of each."""
        leaders: list[int] = []
        for site in range(self.count):
            members = [rank for rank, its in enumerate(place) if its == site]
            leaders.append(members[0])
            group = dist.new_group(members)
            if site == self.number:
                self.group = group
        self.leaders = dist.new_group(leaders)

    @property
    def size(self) -> int:
        """Return the number of this site's ranks."""
        return len(self.ranks)

    def sum(self, value: float) -> float:
        """Return the sum of a number over this site's ranks."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total.item()

    def add_up(self, vector: Tensor) -> tuple[Tensor, int]:
        """Return the sum of the leaders' vectors, shape (N,), and the bytes that each leader sent.

        Every leader calls it. The values travel in bf16. Each leader adds up a part of all vectors,
        in fp32, and sends the sums to all: as many bytes as in a ring, 2 (n - 1) / n of a vector,
        but a slow link delays two messages in place of one for every MiB and leader.
        """
        size = vector.numel()
        padded = functional.pad(vector.bfloat16(), (0, -size % self.count))
        parts = padded.view(self.count, -1)
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=self.leaders)
        sums = arrived.float().sum(0).bfloat16()
        dist.all_to_all_single(arrived, sums.repeat(self.count, 1), group=self.leaders)
        sent_bytes = 2 * (self.count - 1) * sums.nbytes
        return arrived.flatten()[:size].float(), sent_bytes

    def pass_on(self, tensor: Tensor) -> None:
        """Give the leader's values to all ranks of its site."""
        if self.size > 1:
            dist.broadcast(tensor, src=self.leader, group=self.group)


def divide(hosts: list[str], count: int | None = None) -> list[int]:
    """Return each rank's site, by all hosts: the near ones, or so many equal parts of the ranks.

    Raises UserError if the ranks do not make so many.
    """
    if count is None:
        return _divide_by_trips(hosts)
    size = len(hosts)
    if size % count:
        what = f"{size} ranks do not make {count} equal sites"
        raise errors.UserError(f"--sites {count}: {what}; give a number that divides them")
    return [rank * count // size for rank in range(size)]


def _divide_by_trips(hosts: list[str]) -> list[int]:
    """Return each rank's site: near hosts share one, hosts that were not measured do not.

    If all hosts would be one site, each is one: exchanges were requested because links are slow.
    """
    groups: dict[str, str] = {}
    for group in os.environ.get(NEAR, "").split():
        for host in group.split(","):
            groups[host] = group
    names = [groups.get(host, host) for host in hosts]
    if len(set(names)) == 1:
        names = hosts
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]
