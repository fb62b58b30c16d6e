"""Who keeps jobs off a node, by its state and reason, and how its former state is restored.

It is this charm, Slurm for missing GPUs, or others, whose orders stay.
"""

import re

from node import journals, resume
from node.journals import NodeSnapshot
from slurm_ddp.slurm import nodes

PREFIX = "slurm-gpu:"  # of this charm's reasons
_RESTORED = "put back by slurm-gpu"  # of a state that had no reason

# Reasons that Slurm itself sets when GPUs and Gres disagree: src/slurmctld/node_mgr.c and
# src/interfaces/gres.c. The drain they come with stays after the cause is fixed.
_GRES_REASONS = re.compile(
    r"gres/(?:gpu|shard|mps)(:\S+)? count (reported lower than configured|too low|changed and jobs are using them)"
    r"|gres/gpu type \(\S*\) reported but not configured"
    r"|gres/gpu GRES (core specification|autodetected core affinity)"
    r"|Invalid GRES Links value"
)


def is_ours(reason: str | None) -> bool:
    """Whether this charm gave this reason, or Slurm did over GPUs that disagree with Gres."""
    if reason is None:
        return False
    return reason.startswith(PREFIX) or _GRES_REASONS.match(reason) is not None


def is_anothers(node: nodes.Node, known: str | None) -> bool:
    """Whether another party keeps jobs away, for another reason than `known`.

    Neither this charm, which may have restored that half, nor Slurm, for a missing GPU or a slurmd
    that was away.
    """
    not_anothers = {None, known, _RESTORED, resume.REBOOTED, resume.NOT_RESPONDING}
    return is_kept_away(node) and node.reason not in not_anothers and not is_ours(node.reason)


def is_kept_away(node: nodes.Node) -> bool:
    """Whether the node takes no new jobs."""
    return node.is_drained or node.is_down or "FAIL" in node.flags


def describe(node: nodes.Node) -> str:
    """Describe the state and reason that keep jobs away: "drained (bad fan)"."""
    words: list[str] = []
    if node.is_down:
        words.append("down")
    if node.is_drained:
        words.append("drained")
    if "FAIL" in node.flags:
        words.append("failing")
    return f"{' and '.join(words)} ({node.reason or 'no reason given'})"


def note(node: nodes.Node) -> None:
    """Keep in a journal why others keep jobs away, until they stop."""
    if is_anothers(node, None):
        as_found(node).save(journals.ORDER)
    elif not is_kept_away(node):
        journals.clear(journals.ORDER)
        resume.note_service(node)


def noted(name: str) -> NodeSnapshot | None:
    """Read the state that others ordered for this node; None if they keep no jobs away."""
    order = NodeSnapshot.load(journals.ORDER)
    if order is None or order.node != name:
        return None
    return order


def as_found(node: nodes.Node) -> NodeSnapshot:
    """Record the state to restore: the one that an administrator or upstream set.

    One set by this charm, or for a missing GPU, does not count. Slurm's reason for a missing GPU
    replaces all others. A node that is DOWN with it, and was not before, came back from a reboot:
    jobs wait for the checks that follow one.
    """
    if is_ours(node.reason):
        order = noted(node.name)
        if order is not None:
            return order
        if node.is_down:
            return NodeSnapshot(node.name, ("down",), resume.REBOOTED)
        return NodeSnapshot(node.name)
    flags = (("drain", node.is_drained), ("fail", "FAIL" in node.flags), ("down", node.is_down))
    states = tuple(state for state, is_set in flags if is_set)
    return NodeSnapshot(node.name, states, node.reason if states else None)


def restore(node: nodes.Node, snapshot: NodeSnapshot) -> bool:
    """Restore the node's former state and reason; return False while jobs run.

    Marking the node down would end them.
    """
    reason = snapshot.reason or _RESTORED
    if "down" in snapshot.states:
        if node.is_busy:
            return False
        nodes.update(node.name, "down", reason)
        if not {"drain", "fail"} & set(snapshot.states):
            nodes.update(node.name, "undrain")
    if "drain" in snapshot.states:
        nodes.drain(node.name, reason)
    elif "fail" in snapshot.states:  # which replaces a drain
        nodes.update(node.name, "fail", reason)
    elif not snapshot.states and node.is_drained:
        nodes.resume(node.name)
    journals.clear(journals.REGISTRATION)
    return True


def count_jobs(name: str) -> str:
    """Count the jobs of a busy node: "2 jobs"."""
    ids = nodes.job_ids(name)
    if not ids:
        return "a finishing job"
    return "1 job" if len(ids) == 1 else f"{len(ids)} jobs"
