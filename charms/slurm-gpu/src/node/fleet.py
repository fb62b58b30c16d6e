"""Keep most of a fleet when all of its nodes begin to report the same: that is a driver's release, not broken cards.

The first third of an application's nodes (those of the same partitions) is drained for a reason as ever; on the others
it is a warning for as long as they report it. Who was first is read from the nodes' reasons in Slurm, which every
node's health check sees. Standard library only.
"""

import collections.abc
import re

from slurm_ddp.slurm import nodes

WINDOW_S = 600.0  # within which a reason on several nodes has one cause
_BUS_ID = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]\b")
_COUNT = re.compile(r"(?<!Xid )(?<!exited )\b\d+\b")


def kinds(reason: str) -> frozenset[str]:
    """Return the complaints in a drain's reason, without the cards and counts, which differ between nodes."""
    complaints = (
        _COUNT.sub("N", _BUS_ID.sub("", part)) for part in reason.partition(": ")[2].split("; ")
    )
    return frozenset(" ".join(complaint.split()) for complaint in complaints) - {""}


def shared(
    reason: str, name: str, listed: collections.abc.Collection[nodes.Node], now: float
) -> frozenset[str]:
    """Return the kinds of a reason that other nodes were drained for just before, if with this one they are too many.

    Args:
        reason: what the node is, or is to be, drained for; it begins with the health check's prefix.
        name: the node's name.
        listed: all nodes of the cluster.
        now: in seconds since 1970.
    """
    own = next((node for node in listed if node.name == name), None)
    if own is None:
        return frozenset()
    peers = [
        node for node in listed if node.fields.get("Partitions") == own.fields.get("Partitions")
    ]
    prefix = reason.partition(": ")[0] + ": "
    is_drained = own.is_drained and (own.reason or "").startswith(prefix)
    turn = (own.reason_time or now, name) if is_drained else (now + WINDOW_S, name)
    found: list[str] = []
    for node in peers:
        at = node.reason_time or 0.0
        is_before = node.name != name and now - WINDOW_S <= at and (at, node.name) < turn
        if is_before and node.is_drained and (node.reason or "").startswith(prefix):
            found += kinds(node.reason or "")
    return frozenset(
        kind for kind in kinds(reason) if kind in found and 3 * (found.count(kind) + 1) > len(peers)
    )
