"""Drain at most a third of the nodes for one reason; the others only warn.

If all nodes of an application (nodes with the same partitions) begin to report the same problem,
the cause is a driver release, not broken cards. The nodes' reasons in Slurm tell which was first;
every node's health check sees them. Standard library only.
"""

import collections
import collections.abc
import re

from slurm_ddp.slurm import nodes

WINDOW_S = 600.0  # within which a reason on several nodes has one cause
_BUS_ID = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]\b")
_COUNT = re.compile(r"(?<!Xid )(?<!exited )\b\d+\b")


def kinds(reason: str) -> frozenset[str]:
    """Return the complaints in a drain's reason.

    Cards and counts are left out: they differ between nodes.
    """
    found: set[str] = set()
    for complaint in reason.partition(": ")[2].split("; "):
        text = _COUNT.sub("N", _BUS_ID.sub("", complaint))
        found.add(" ".join(text.split()))
    return frozenset(found - {""})


def shared(
    reason: str, name: str, listed: collections.abc.Collection[nodes.Node], now: float
) -> frozenset[str]:
    """Return the kinds in `reason` that would drain too many nodes if this one joined them.

    Args:
        reason: why the node is, or will be, drained; it begins with the health check's prefix.
        name: the node's name.
        listed: all nodes of the cluster.
        now: in seconds since 1970.
    """
    own = next((node for node in listed if node.name == name), None)
    if own is None:
        return frozenset()
    partitions = own.fields.get("Partitions")
    peers = [node for node in listed if node.fields.get("Partitions") == partitions]
    counts = _counts_before(own, peers, reason.partition(": ")[0] + ": ", now)
    most = len(peers) / 3
    return frozenset(kind for kind in kinds(reason) if counts[kind] and counts[kind] + 1 > most)


def _counts_before(
    own: nodes.Node, peers: list[nodes.Node], prefix: str, now: float
) -> collections.Counter[str]:
    """Count what other nodes were drained for in the window, before this node's turn."""
    turn = (now + WINDOW_S, own.name)
    if _is_drained(own, prefix):
        turn = (own.reason_time or now, own.name)
    counts: collections.Counter[str] = collections.Counter()
    for node in peers:
        is_before = node.name != own.name and _is_between(node, now - WINDOW_S, turn)
        if is_before and _is_drained(node, prefix):
            counts.update(kinds(node.reason or ""))
    return counts


def _is_between(node: nodes.Node, since: float, turn: tuple[float, str]) -> bool:
    """Whether the node's reason was set in the window and before our turn.

    Names decide within the same second.
    """
    at = node.reason_time or 0.0
    return since <= at and (at, node.name) < turn


def _is_drained(node: nodes.Node, prefix: str) -> bool:
    return node.is_drained and (node.reason or "").startswith(prefix)
