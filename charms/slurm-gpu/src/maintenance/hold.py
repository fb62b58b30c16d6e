"""A node kept free of jobs while something is done to its GPUs: a drain with its own reason (`gpu-driver: ...`).

`node.hold` keeps it up. The state before it is in a journal, written before the first step, so that any later hook can
restore it. `HoldError` is raised if something else holds the node, `NodeError` if the controller did not do as asked.
"""

import dataclasses

from node import hold as node_hold
from node import node_state, registration
from slurm_ddp import readiness
from slurm_ddp.slurm import nodes

DRIVER, RESET, MIG = "gpu-driver", "gpu-reset", "gpu-mig"
_KINDS = tuple(f"{kind}:" for kind in (DRIVER, RESET, MIG))


class HoldError(Exception):
    """The node cannot be held now. `str()` is one line."""


@dataclasses.dataclass(frozen=True)
class Hold(node_state.NodeSnapshot):
    """The node before it was held, and what holds it."""

    kind: str = ""
    boot_id: str = ""  # of the boot that must end before the node is released

    JOURNAL = node_state.HOLD


def take(kind: str, name: str, why: str) -> nodes.Node | None:
    """Keep new jobs away from the node; return it, or None when the controller does not know it, so no job can use it.

    Taking it again changes nothing but the reason's text.
    """
    hold = Hold.load()
    if hold is not None and (hold.kind, hold.node) != (kind, name):
        raise HoldError(f"{hold.node} is held for {hold.kind} already")
    node = nodes.show(name)
    if node is None:
        return None
    found = registration.as_found(node)
    if hold is None:
        is_left = (found.reason or "").startswith(_KINDS)  # by a hold whose journal is lost
        Hold(name, () if is_left else found.states, None if is_left else found.reason, kind).save()
    elif (
        node.is_drained
        and registration.is_anothers(node, hold.reason)
        and not (node.reason or "").startswith(_KINDS)
    ):
        # drained by another meanwhile, which is now what to restore
        dataclasses.replace(hold, states=found.states, reason=found.reason).save()
    reason = f"{kind}: {why}"[: node_hold.MOST_REASON]
    if not node.is_drained or node.reason != reason:
        nodes.drain(name, reason)
    node_hold.begin(kind, name, reason)
    return nodes.show(name)


def is_ours(node: nodes.Node, kind: str) -> bool:
    """Whether the node is still drained for this: an administrator may have resumed it or drained it again."""
    if not node.is_drained and any(hold.kind == kind for hold in node_hold.keep()):
        node = nodes.show(node.name) or node
    return node.is_drained and (node.reason or "").startswith(f"{kind}:")


def jobs_on(node: nodes.Node | None) -> str | None:
    """Count what the node still runs, None when it is free: "2 jobs"."""
    return registration.count_jobs(node.name) if node is not None and node.is_busy else None


def release() -> None:
    """Restore the state in which the node was found, if no job keeps that from being restored.

    What another did to it meanwhile counts: a drain or a state that is not the hold's is left alone.
    """
    hold = Hold.load()
    if hold is None:
        return
    node = nodes.show(hold.node)
    if node is not None and is_ours(node, hold.kind):
        node_hold.end(hold.kind)
        node = nodes.show(hold.node) or node  # is_ours may have drained it again
        if registration.put_back(node, hold).stage is not registration.Stage.REGISTERED:
            return  # to be marked down again, and jobs run
    forget()


def until_reboot() -> None:
    """Keep the hold until the machine was rebooted."""
    hold = Hold.load()
    if hold is not None:
        dataclasses.replace(hold, boot_id=readiness.boot_id()).save()


def forget() -> None:
    """End the hold and leave the node's state as it is."""
    hold = Hold.load()
    if hold is not None:
        node_hold.end(hold.kind)
    node_state.clear(node_state.HOLD)
