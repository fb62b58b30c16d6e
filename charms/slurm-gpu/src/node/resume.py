"""Resume a node that is down for no other reason than that it is new, or was rebooted.

Slurm marks a node down that was rebooted without its order, and leaves it so (ReturnToService=0,
which upstream keeps); upstream's slurmd charm registers a new node down. Both wait for someone who
knows that the machine is fit.
"""

import dataclasses
import logging
import pathlib
import time

import settings
from node import journals
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

UPTIME = pathlib.Path("/proc/uptime")

# src/slurmctld/node_mgr.c and ping_nodes.c of 24.11 and 25.11. A machine that takes longer than
# SlurmdTimeout (300 s) to boot gets the second first, and keeps it.
REBOOTED = "Node unexpectedly rebooted"
NOT_RESPONDING = "Not responding"
# Upstream's slurmd charm with default-node-state=down and no default-node-reason, quotes included:
# config.py:48 and slurm_ops/slurmd.py:246 of 25.11.
NEW = "'n/a'"
_TIMEOUT_S = 900.0  # between a node's last response and the reason for it: SlurmdTimeout, pings, clocks that differ
_CLOCKS_S = 60.0
UPSTREAM_S = 120.0  # upstream sets a state right after slurmd came up; scontrol itself may take some timeouts
_TO_REGISTER = ("slurmd to register it",)


@dataclasses.dataclass(frozen=True)
class Held:
    """A node that is still down."""

    why: str  # "was rebooted" or "is new"
    lacks: tuple[str, ...] = ()  # what it waits for, if checked

    def __str__(self) -> str:
        return f"{self.why} and takes no jobs yet{': waiting for ' * bool(self.lacks)}{', '.join(self.lacks)}"


def held(node: nodes.Node | None, config: settings.Config) -> Held | None:
    """Find why the node is down; return None unless the options allow to clear that."""
    # The controller learns of a reboot only when slurmd registers
    if config.resume_after_reboot and is_stale(node):
        return Held("was rebooted", _TO_REGISTER)
    if node is None or not node.is_down or node.is_drained or "FAIL" in node.flags:
        return None
    # Which may complete for minutes after a reboot
    lacks = ("its former jobs to end",) if node.is_busy else ()
    if config.resume_after_reboot and _was_rebooted(node):
        return Held("was rebooted", lacks)
    if config.resume_when_ready and node.reason == NEW and _is_new(node):
        return Held("is new", lacks)
    return None


def ensure(name: str, config: settings.Config, found: Held) -> Held | None:
    """Resume a node for which all checks passed since `found`; return why it is still down.

    Raises `NodeError`.
    """
    node = nodes.show(name)  # its state may have changed during the checks
    now = held(node, config)
    if node is None or now != found:
        return now
    if not node.is_valid or "NOT_RESPONDING" in node.flags:
        return dataclasses.replace(found, lacks=_TO_REGISTER)
    nodes.resume(name)
    journals.write(journals.SERVED, {"node": name})
    logger.info("%s takes jobs again: it %s, and all checks passed", name, found.why)
    return None


def note_service(node: nodes.Node | None) -> None:
    """Record that the node has been in service.

    From then on it is down because someone ordered that.
    """
    if node is not None and node.state in {"IDLE", "MIXED", "ALLOCATED"} and not node.is_drained:
        journals.write(journals.SERVED, {"node": node.name})


def is_stale(node: nodes.Node | None) -> bool:
    """Whether the controller's view of the node is from before this boot."""
    if node is None or node.boot_time is None:
        return False
    uptime_s = float(UPTIME.read_text().split()[0])
    return node.boot_time < time.time() - uptime_s - _CLOCKS_S


def _is_new(node: nodes.Node) -> bool:
    """Whether upstream's slurmd set the reason, as it does right after it started slurmd.

    An order to set the node down leaves the same reason. If slurmd started again later, only the
    record of the node's service shows which it was.
    """
    since = node.slurmd_start_time
    if since is None or node.reason_time is None or node.reason_time < since:
        return (journals.read(journals.SERVED) or {}).get("node") != node.name
    return node.reason_time - since <= UPSTREAM_S


def _was_rebooted(node: nodes.Node) -> bool:
    if node.reason == REBOOTED:
        return True
    if node.reason != NOT_RESPONDING or node.boot_time is None or node.reason_time is None:
        return False
    return "NOT_RESPONDING" not in node.flags and node.boot_time > node.reason_time - _TIMEOUT_S
