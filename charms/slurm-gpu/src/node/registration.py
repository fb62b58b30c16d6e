"""Register a node's GPUs in Slurm without ending a job or an administrator's drain.

A dynamic node's Gres cannot change while its record exists. So: drain the node, wait until it is
free (over later events, never inside a hook), edit `--conf`, delete the record, restart slurmd,
check what it registered, and restore the previous state from a journal (`journals`), since the
machine may reboot between any two steps. `scontrol delete` comes before the restart, since on Slurm
25 a node authenticates through its own running slurmd.
"""

import dataclasses
import enum
import logging
import re
import time

import settings
from gpu.gres import SHARD
from node import journals, kept, orders, resume, slurmd_options, slurmd_unit
from node.journals import NodeSnapshot
from slurm_ddp import files, readiness, systemd
from slurm_ddp.commands import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

REASON = "slurm-gpu: registering GPUs"
_REGISTER_S = 30.0
_SETTLE_S = 10.0
# At a restart or `scontrol reconfigure`, slurmctld keeps answering for a while after it saved the
# state that its successor starts from (_slurmctld_background() to _attempt_reconfig() in
# controller.c of 24.11 and 25.11). Orders in that gap are lost: the former record comes back, and
# slurmd registers to it. Lines of other nodes cause a reconfigure too.
_HANDOVER_S, _FRESH_S = 1.0, 60.0

# The number of GPUs in the record of a refused node; otherwise Slurm shows only the number that
# slurmd reported.
_RECORDED = re.compile(
    r"gres/(?P<name>\w+)\S* count reported lower than configured \(\d+ < (?P<count>\d+)\)"
    rf"|{orders.PREFIX} \d+ of (?P<had>\d+) GPUs found"
)


class Stage(enum.Enum):
    """How far a node is."""

    REGISTERED = "registered"  # the controller has the Gres and accepts it
    UNREGISTERED = "unregistered"  # the options are right; slurmd has not registered yet
    AWAITS_LINES = (
        "awaits-lines"  # the controller does not hand out this node's gres.conf lines yet
    )
    AWAITS_JOBS = "awaits-jobs"  # drained by this charm; jobs hold the node
    RESERVED = "reserved"  # the controller must not forget the node: it is in a reservation
    STOPPED = "stopped"  # the controller has the Gres, but slurmd does not run
    SILENT = "silent"  # no controller answers
    INVALID = "invalid"  # the controller refuses the node's report
    DIFFERS = "differs"  # the controller has another Gres, which the next event changes
    STATIC = "static"  # the node is in slurm.conf, with another Gres
    KEPT_AWAY = "kept-away"  # registered, and drained, down or failing for another reason
    KEPT = "kept"  # registered, and down since it is new or was rebooted and something is not ready yet
    LOST = "lost"  # GPUs that the node had are missing, and jobs are kept away
    FAILED = "failed"  # a command or slurmd failed


@dataclasses.dataclass(frozen=True)
class Progress:
    """The node's stage, and the obstacle."""

    stage: Stage
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Target:
    """The node's name, and the Gres and options to register it with."""

    node: str
    gres: str | None
    options: slurmd_options.Options  # what slurmd starts with
    lines_live: bool = (
        True  # whether slurmd will find the devices of this Gres; until then nothing changes
    )


def advance(target: Target) -> Progress:
    """Register the node as far as possible within a minute, and return its stage.

    It ends no job.
    """
    kept.end(kept.LOSS)
    try:
        return _advance_twice(target)
    except (nodes.NodeError, CommandError, slurmd_options.OptionsError) as e:
        return Progress(Stage.FAILED, str(e))


def _advance_twice(target: Target) -> Progress:
    """Move the node on, and again if slurmd has just started.

    The first orders may be lost in a handover.
    """
    try:
        progress = _advance(target)
        if progress.stage is Stage.REGISTERED and _slurmd_started_recently():
            time.sleep(_HANDOVER_S)
            progress = _advance(target)
        return progress
    except nodes.ControllerSilent as e:
        if target.lines_live and target.options.conf is not None:
            # so that slurmd registers right the first time
            slurmd_options.ensure_gres(target.gres)
            refresh_drained_start()
        return Progress(Stage.SILENT, str(e))


def _slurmd_started_recently() -> bool:
    running_s = systemd.active_for(slurmd_unit.SLURMD)
    return bool(running_s) and running_s < _FRESH_S


def refresh_drained_start() -> None:
    """Finish the work of an interrupted hook: new options for a node that must return drained."""
    if not slurmd_unit.DRAINED_ENV.exists():
        return
    try:
        if NodeSnapshot.load() is not None:
            slurmd_unit.drain_at_start()
            return
    except (OSError, ValueError, slurmd_options.OptionsError) as e:
        logger.warning("%s: %s", slurmd_unit.DRAINED_ENV, e)
    files.ensure_absent(slurmd_unit.DRAINED_ENV)


def drain_for_loss(name: str, loss: str) -> Progress:
    """Drain a node that lost GPUs, unless another reason keeps jobs away; the loss is the reason.

    After a reboot it is DOWN as well, with Slurm's reason. `advance` ends this drain once the GPUs
    are back.
    """
    reason = f"{orders.PREFIX} {loss}"[: kept.MOST_REASON]
    try:
        kept.keep()  # before an end of the drain that upstream ordered is taken for an administrator's
        node = nodes.show(name)
        if node is not None:
            orders.note(node)
            if (
                node.reason != reason
                and not orders.is_anothers(node, None)
                and orders.noted(name) is None
            ):
                nodes.drain(name, reason)
                kept.hold(kept.LOSS, name, reason)
            if resume.is_stale(node):  # when slurmd registers, Slurm's reason replaces this one
                return Progress(
                    Stage.SILENT, f"slurmd has not registered {name} since this machine booted"
                )
    except nodes.NodeError as e:
        return _failure(e)
    return Progress(Stage.LOST, loss)


def inspect(name: str, gres: str | None, config: settings.Config | None = None) -> Progress:
    """Inspect how far the node is, without changing anything."""
    try:
        return _inspect(name, gres, config)
    except (nodes.NodeError, CommandError) as e:
        return _failure(e)


def leave(target: Target) -> None:
    """Register the node with the Gres if that is possible at once.

    Otherwise it is left as it is: no later event ends a drain.

    slurmd's options change only together with the controller's record: a slurmd that reports less
    is refused for good.
    """
    try:
        _leave(target)
    except (nodes.NodeError, CommandError, slurmd_options.OptionsError) as e:
        logger.warning("the GPUs of %s stay in Slurm: %s", target.node, e)
    journals.clear(journals.REGISTRATION)


def _leave(target: Target) -> None:
    name = target.node
    node = nodes.show(name)
    snapshot = NodeSnapshot.load()
    is_being_registered = snapshot is not None and snapshot.node == name
    if node is None and not is_being_registered:  # others deleted it: the unit is being removed
        slurmd_options.ensure_gres(target.gres)
        return
    if node is not None and (node.is_busy or not node.is_dynamic):
        if snapshot is not None and not orders.is_anothers(node, snapshot.reason):
            orders.restore(node, snapshot)
        logger.warning(
            "%s keeps Gres=%s and its lines: it cannot be registered again now",
            name,
            node.gres or "",
        )
        return
    progress = _advance(target)
    stage = progress.stage
    if stage in {Stage.AWAITS_JOBS, Stage.RESERVED}:  # since `show`; the record is still there
        slurmd_options.ensure_gres(target.options.gres)
    if stage is not Stage.REGISTERED:
        logger.warning("the GPUs of %s stay in Slurm: %s %s", name, stage.value, progress.detail)


def _failure(error: nodes.NodeError | CommandError) -> Progress:
    return Progress(
        Stage.SILENT if isinstance(error, nodes.ControllerSilent) else Stage.FAILED, str(error)
    )


def _inspect(name: str, gres: str | None, config: settings.Config | None) -> Progress:
    node = nodes.show(name)
    if node is None:
        return Progress(Stage.UNREGISTERED)
    if not nodes.same_gres(node.gres, gres):
        if node.is_busy and NodeSnapshot.load() is not None:
            return _awaits_jobs(name)
        return _reserved(node, None) or Progress(Stage.DIFFERS, _or_none(node.gres))
    if not node.is_valid:
        return Progress(Stage.INVALID, node.reason or node.state_text)
    if not systemd.is_active(slurmd_unit.SLURMD):
        return Progress(Stage.STOPPED)
    held = None
    if config is not None:
        held = resume.held(node, config)
    if held is not None:
        lacks = (*held.lacks, *readiness.missing())
        return Progress(Stage.KEPT, str(dataclasses.replace(held, lacks=lacks)))
    if orders.is_kept_away(node):
        return Progress(Stage.KEPT_AWAY, orders.describe(node))
    return Progress(Stage.REGISTERED, node.state_text)


def _advance(target: Target) -> Progress:
    node = nodes.show(target.node)
    if node is not None:
        orders.note(node)
    snapshot = _snapshot(target.node, node)
    if node is not None or snapshot is None:  # no start of slurmd is to register a drained node
        files.ensure_absent(slurmd_unit.DRAINED_ENV)

    if node is not None and _has_gres(node, target.gres):
        return _settle(target, node, snapshot)
    if not target.lines_live:
        return Progress(Stage.AWAITS_LINES)
    if node is None:
        return _register(target, snapshot)
    if not node.is_dynamic or target.options.conf is None:
        return Progress(Stage.STATIC, f"Gres={_or_none(node.gres)}")
    return _reserved(node, snapshot) or _register_again(target, node, snapshot)


def _snapshot(name: str, node: nodes.Node | None) -> NodeSnapshot | None:
    """Return the journal's snapshot of this node, updated with orders of others since."""
    snapshot = NodeSnapshot.load()
    if snapshot is not None and snapshot.node != name:
        journals.clear(journals.REGISTRATION)
        return None
    if snapshot is not None and node is not None:
        was_resumed = (
            bool(snapshot.states) and not orders.is_kept_away(node) and kept.is_administrators()
        )
        if was_resumed or orders.is_anothers(node, snapshot.reason):
            snapshot = orders.as_found(node)
            snapshot.save()
    return snapshot


def _register_again(target: Target, node: nodes.Node, snapshot: NodeSnapshot | None) -> Progress:
    """Delete the record of a node with another Gres once the node is free, and register it."""
    name = node.name
    if snapshot is None:
        snapshot = orders.as_found(node)
        snapshot.save()
    if not node.is_drained and not (node.is_down and not node.is_busy):
        nodes.drain(name, REASON)
        node = nodes.show(name) or node
    if node.is_busy:
        return _awaits_jobs(name)
    if jobs := _shard_jobs(node, target.gres):
        return Progress(
            Stage.AWAITS_JOBS, f"Slurm to forget job {jobs[0]}, which asked for shards (MinJobAge),"
        )
    slurmd_options.ensure_gres(target.gres)
    if snapshot.states:  # first, since after a reboot right behind the deletion slurmd registers before any hook runs
        slurmd_unit.drain_at_start()
    try:
        with kept.lifted(name):
            nodes.delete(name)
    except nodes.NodeBusy:
        files.ensure_absent(slurmd_unit.DRAINED_ENV)
        return _reserved(node, snapshot) or _awaits_jobs(name)
    return _register(target, snapshot)


def _register(target: Target, snapshot: NodeSnapshot | None) -> Progress:
    """Make slurmd register a node that the controller does not know."""
    name = target.node
    changed = target.options.conf is not None and slurmd_options.ensure_gres(target.gres)
    may_start = snapshot is not None and target.options.conf_server is not None
    if not may_start and not systemd.is_active(slurmd_unit.SLURMD):
        # its charm starts it, and stops it when slurmctld is removed
        return Progress(Stage.UNREGISTERED)
    if changed or snapshot is not None:
        _restart(snapshot)
    timeout_s = _SETTLE_S if snapshot is None else _REGISTER_S
    node = nodes.wait(name, lambda n: n is not None, timeout=timeout_s)
    files.ensure_absent(slurmd_unit.DRAINED_ENV)
    if node is None:
        if snapshot is None:
            return Progress(Stage.UNREGISTERED)
        problem = f"slurmd did not register {name} again within {_REGISTER_S:.0f} s"
        return Progress(Stage.FAILED, problem)
    if not _has_gres(node, target.gres):
        problem = f"{name} registered with Gres={_or_none(node.gres)}, not {_or_none(target.gres)}"
        return Progress(Stage.FAILED, problem)
    return _settle(target, node, snapshot, is_fresh=True)


def _settle(
    target: Target, node: nodes.Node, snapshot: NodeSnapshot | None, *, is_fresh: bool = False
) -> Progress:
    """Check a node whose Gres is right, clear what the check or this charm did, restore the rest.

    `is_fresh`: its record was made just now.
    """
    has_conf = target.options.conf is not None
    if has_conf and target.lines_live:
        slurmd_options.ensure_gres(target.gres)  # the next registration must not undo this one
    is_stale = not is_fresh and node.is_dynamic and has_conf and _is_stale(node, target.gres)
    if not node.is_valid and not is_stale:
        node = _retry(target, node, snapshot)
    if not node.is_valid:
        return _refused(target, node, snapshot, is_stale=is_stale)
    if snapshot is None and orders.is_kept_away(node) and orders.is_ours(node.reason):
        snapshot = orders.as_found(node)
    if snapshot is not None and not orders.restore(node, snapshot):
        return _awaits_jobs(node.name)
    return Progress(Stage.REGISTERED)


def _retry(target: Target, node: nodes.Node, snapshot: NodeSnapshot | None) -> nodes.Node:
    """Register a free node again that Slurm refused for its GPUs, and return its new state."""
    is_for_gpus = orders.is_ours(node.reason) or snapshot is not None
    if not is_for_gpus or not target.lines_live or node.is_busy:
        return node
    _restart(snapshot)
    valid = nodes.wait(node.name, lambda n: n is not None and n.is_valid, timeout=_SETTLE_S)
    files.ensure_absent(slurmd_unit.DRAINED_ENV)
    return valid or node


def _refused(
    target: Target, node: nodes.Node, snapshot: NodeSnapshot | None, *, is_stale: bool
) -> Progress:
    """Report a node that Slurm refuses; register it again if its record is out of date."""
    if not target.lines_live:
        return Progress(Stage.AWAITS_LINES)
    if is_stale:
        return _reserved(node, snapshot) or _register_again(target, node, snapshot)
    return Progress(Stage.INVALID, node.reason or node.state_text)


def _shard_jobs(node: nodes.Node, gres: str | None) -> list[str]:
    """Return jobs for which slurmctld (24.11.5) would crash if the node lost its shards.

    It crashes only while GresTypes has shards.
    """
    loses_shards = nodes.count_gres(node.gres, SHARD) and not nodes.count_gres(gres, SHARD)
    if not loses_shards or SHARD not in (nodes.setting("GresTypes") or "").split(","):
        return []
    return nodes.remembered_jobs(node.name, SHARD)


def _has_gres(node: nodes.Node, gres: str | None) -> bool:
    """Whether the node's record has the Gres.

    slurmd may have reported fewer when it registered last.
    """
    return nodes.same_gres(node.gres, gres) or _reports_less(node, gres)


def _is_stale(node: nodes.Node, gres: str | None) -> bool:
    """Whether the controller refuses a node for a Gres of its record that is out of date."""
    count = _recorded(node)
    return count is not None and count[1] != nodes.count_gres(gres, count[0])


def _reports_less(node: nodes.Node, gres: str | None) -> bool:
    """Whether the record has the Gres, and slurmd reported fewer when it registered last."""
    count = _recorded(node)
    one_each = (
        re.sub(r":\d+(?=,|$)", ":1", nodes.plain_gres(text) or "") for text in (node.gres, gres)
    )
    return (
        count is not None
        and count[1] == nodes.count_gres(gres, count[0])
        and nodes.same_gres(*one_each)
    )


def _recorded(node: nodes.Node) -> tuple[str, int] | None:
    """Parse a refused node's Gres that fell short, and its count in the record."""
    match = None if node.is_valid else _RECORDED.match(node.reason or "")
    if match is None:
        return None
    return (match["name"], int(match["count"])) if match["name"] else ("gpu", int(match["had"]))


def _or_none(gres: str | None) -> str:
    return gres or "(none)"


def _awaits_jobs(name: str) -> Progress:
    return Progress(Stage.AWAITS_JOBS, orders.count_jobs(name))


def _reserved(node: nodes.Node, snapshot: NodeSnapshot | None) -> Progress | None:
    """Report a reservation that holds the node, and restore the node's state.

    Jobs may run until it ends.

    Deleting the node would silently take it out of a later reservation.
    """
    reservations = nodes.reservations(node.name)
    reservations.pop(kept.reservation(node.name), None)
    if not reservations:
        return None
    if snapshot is not None:
        orders.restore(node, snapshot)
    name, others = next(iter(reservations.items()))
    typed = f"scontrol delete reservationname={name}"
    if others:
        typed = f"scontrol update reservationname={name} nodes={others}"
    return Progress(Stage.RESERVED, f"{typed}, or wait for the end of {', '.join(reservations)}")


def _restart(snapshot: NodeSnapshot | None) -> None:
    if snapshot is not None and snapshot.states:
        slurmd_unit.drain_at_start()
    systemd.restart(slurmd_unit.SLURMD)
