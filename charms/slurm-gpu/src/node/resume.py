"""Letting a node take jobs that is down for no other reason than that it is new, or was rebooted.

Slurm marks a node down that comes back from a reboot which Slurm did not order, and leaves it so (ReturnToService=0,
which upstream keeps); upstream's slurmd charm registers a new node down. Both wait for somebody who knows that the
machine is fit: that is this charm, once its checks have passed. A node that is down, drained or failing for any other
reason is left alone.
"""

import collections.abc
import dataclasses
import logging
import pathlib
import time

from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

UPTIME = pathlib.Path("/proc/uptime")

# src/slurmctld/node_mgr.c and ping_nodes.c of 24.11 and 25.11. A machine that takes longer than SlurmdTimeout (300 s)
# to boot gets the second first, and keeps it.
REBOOTED = "Node unexpectedly rebooted"
NOT_RESPONDING = "Not responding"
# Upstream's slurmd charm with default-node-state=down and no default-node-reason, quotes included: config.py:48 and
# slurm_ops/slurmd.py:246 of 25.11.
NEW = "'n/a'"
_TIMEOUT_S = 900.0  # between a node's last word and the reason for it: SlurmdTimeout, pings, and clocks that differ
_CLOCKS_S = 60.0
_REGISTER_S = 15.0

Checks = collections.abc.Callable[[], list[str]]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which nodes to let take jobs."""

    rebooted: bool = True
    new: bool = False


@dataclasses.dataclass(frozen=True)
class Held:
    """A node that is still down."""

    why: str  # "was rebooted" or "is new"
    lacks: tuple[str, ...] = ()  # what it waits for, as far as somebody has looked


def held(node: nodes.Node | None, policy: Policy) -> Held | None:
    """Return why the node is down, if that is one of the reasons that `policy` lets us clear."""
    if node is None or not node.is_down or node.is_drained or "FAIL" in node.flags:
        return None
    lacks = ("its former jobs to end",) if node.is_busy else ()  # which may complete for minutes after a reboot
    if policy.rebooted and _was_rebooted(node):
        return Held("was rebooted", lacks)
    if policy.new and node.reason == NEW:
        return Held("is new", lacks)
    return None


def ensure(name: str, policy: Policy, checks: Checks) -> Held | None:
    """Let the node take jobs if only its newness or its reboot keeps them away; return why they still are.

    Waits some seconds for a slurmd that has just been started to register, since the controller learns of a reboot
    only then.

    Args:
        name: the node.
        policy: what may be cleared.
        checks: returns what jobs would miss; asked only when it matters, since it may take a minute.

    Raises:
        nodes.NodeError: Slurm refused, or did not answer.
    """
    if policy.rebooted and is_stale(nodes.show(name)):
        node = nodes.wait(name, lambda node: not is_stale(node), timeout=_REGISTER_S)
        if is_stale(node):
            return Held("was rebooted", ("slurmd to register it",))
    found = held(nodes.show(name), policy)
    if found is None or found.lacks:
        return found
    lacks = checks()
    if lacks:
        return dataclasses.replace(found, lacks=tuple(lacks))
    node = nodes.show(name)  # the checks took their time, and somebody may have said otherwise meanwhile
    if node is None or held(node, policy) != found:
        return held(node, policy)
    if not node.is_valid or "NOT_RESPONDING" in node.flags:
        return dataclasses.replace(found, lacks=("slurmd to register it",))
    nodes.resume(name)
    logger.info("%s takes jobs again: it %s, and all checks passed", name, found.why)
    return None


def _was_rebooted(node: nodes.Node) -> bool:
    if node.reason == REBOOTED:
        return True
    if node.reason != NOT_RESPONDING or node.boot_time is None or node.reason_time is None:
        return False
    return "NOT_RESPONDING" not in node.flags and node.boot_time > node.reason_time - _TIMEOUT_S


def is_stale(node: nodes.Node | None) -> bool:
    """Tell whether what the controller knows of the node is from before this boot."""
    if node is None or node.boot_time is None:
        return False
    words = UPTIME.read_text().split()
    return node.boot_time < time.time() - float(words[0]) - _CLOCKS_S
