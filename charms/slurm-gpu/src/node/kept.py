"""Keep this machine's node free of jobs, and know why: the one owner of every hold.

A hold is a drain with its reason, a reservation for maintenance, and a ground in the journal
(`journals.Kept`). Upstream's charm ends drains: it sets `state=idle` on its node if `scontrol show
node` fails (slurmd/src/charm.py:208-215) and after set-node-config (charm.py:309-315), right after
it restarted slurmd. No state change of the node touches the reservation, which expires by itself,
and `node.watch` drains and reserves the node again within seconds. If a drain ends while slurmd has
been running for longer, an administrator ended it, and the charm obeys. Upstream also deletes its
node, which Slurm refuses in a reservation: an administrator who ends only the reservation has ten
minutes, during which the drain stays.

For maintenance of its GPUs (`take`), the journal also has the state before, so that any later hook
can restore it. `KeptError` is raised if something else keeps the node, `NodeError` if the
controller did not do as asked.
"""

import collections.abc
import contextlib
import dataclasses
import logging
import time

from node import journals, orders, resume, slurmd_unit
from node.journals import Ground, Maintenance, Reservation
from slurm_ddp import readiness, systemd
from slurm_ddp.commands import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

LOSS, HEALTH = "slurm-gpu", "gpu-health"
CHECK = "node-check"  # the trainer's check of idle nodes drained it
DRIVER, RESET, MIG = "gpu-driver", "gpu-reset", "gpu-mig"  # the kinds of maintenance
_MAINTENANCE = tuple(f"{kind}:" for kind in (DRIVER, RESET, MIG))

WATCH = "slurm-gpu-node.service"  # which runs node.watch
MOST_REASON = 200  # characters of a drain's reason
LASTS_S = 3600  # the reservation, unless it is prolonged: longer than a boot takes
_SHOWS_S = 30.0  # a node shows its reservation only after some seconds
_OBEYED_S = 600  # an end of the reservation alone: Juju's next update-status comes in five minutes


class KeptError(Exception):
    """The node is kept for something else. `str()` is one line."""


# Any ground


def hold(kind: str, node: str, reason: str) -> None:
    """Hold the node, which the caller has drained with this reason.

    Holding it again changes the reason.
    """
    if not note(kind, node, reason):
        return
    with journals.locked():
        try:
            _reserve(node)
        except nodes.NodeError as e:  # the node is drained, and node.watch tries again
            logger.warning("%s is not reserved yet: %s", node, e)


def note(kind: str, node: str, reason: str) -> bool:
    """Record a hold, for `node.watch` to reserve the node; return whether anything changed."""
    ground = Ground(kind, node, reason)
    with journals.locked():
        kept = journals.read_kept()
        if ground in kept.grounds:
            return False
        others = [one for one in kept.grounds if one.kind != kind]
        journals.write_kept(dataclasses.replace(kept, grounds=(*others, ground)))
    wake()
    return True


def adopt(name: str) -> None:
    """Hold the node if the check of idle nodes drained it. Raises `NodeError`."""
    node = nodes.show(name)
    if node is None or not node.is_drained or is_held(CHECK):
        return
    reason = node.reason or ""
    if reason.startswith(f"{CHECK}:"):
        hold(CHECK, name, reason)


def grounds() -> tuple[Ground, ...]:
    """Read why the node is held, the latest ground last."""
    return journals.read_kept().grounds


def is_held(kind: str) -> bool:
    """Whether the node is held on this ground."""
    return any(ground.kind == kind for ground in grounds())


def end(*kinds: str) -> None:
    """Release the node from these grounds; the drain is the caller's to end."""
    kept = journals.read_kept()
    is_held_for_them = any(ground.kind in kinds for ground in kept.grounds)
    is_only_reserved = kept.reservation is not None and not kept.grounds  # a hook died in between
    if not is_held_for_them and not is_only_reserved:
        return
    with journals.locked():
        _drop(kinds)
        try:
            _end_reservation()
        except nodes.NodeError as e:
            logger.warning("the reservation of this node ends later, within the hour: %s", e)
    wake()


def end_all() -> None:
    """End every hold of a charm that is removed; the drains are the caller's to end."""
    if journals.read_kept() == journals.Kept() and not journals.has_former():
        return
    end(*(ground.kind for ground in grounds()))
    with journals.locked():
        journals.write_kept(journals.Kept())


def keep() -> tuple[Ground, ...]:
    """Drain and reserve the node again unless an administrator ended that; return the grounds.

    Raises `NodeError`.
    """
    if journals.read_kept() == journals.Kept():
        return ()
    with journals.locked():
        held = grounds()
        _end_reservation()
        if held:
            _keep(held[-1])
        return grounds()


@contextlib.contextmanager
def lifted(node: str) -> collections.abc.Generator[None]:
    """End the node's reservation for now: Slurm deletes no node that is in one.

    `keep` makes it again.
    """
    if journals.read_kept() == journals.Kept():
        yield
        return
    with journals.locked():
        if journals.read_kept().reservation is not None:
            nodes.unreserve(reservation(node))
            _note_reservation(Reservation(node))
        yield


def reservation(node: str) -> str:
    """Name the reservation of a held node."""
    return f"slurm-gpu-{node}"


def wake() -> None:
    """Wake the service: it looks at the holds, and whether the node may take jobs."""
    with contextlib.suppress(CommandError):  # the hook sets the unit up at its end
        systemd.start_later(WATCH)


def renew() -> None:
    """Replace the journals and the service of an earlier release, which goes on in memory."""
    if not journals.has_former():
        return
    with journals.locked():
        journals.write_kept(journals.read_kept())
    systemd.stop(WATCH)
    wake()


def is_administrators() -> bool:
    """Return whether an administrator ended the drain, and not upstream's slurmd."""
    running = systemd.active_for(slurmd_unit.SLURMD)
    return running is not None and running > resume.UPSTREAM_S


# Maintenance


def maintenance() -> Maintenance | None:
    """Return the maintenance that the node was taken for, with its former state, or None."""
    return journals.read_kept().maintenance


def take(kind: str, name: str, why: str) -> nodes.Node | None:
    """Drain the node and return it.

    None if the controller does not know it: then no job can use it.

    Taking it again changes nothing but the reason's text.
    """
    taken = maintenance()
    if taken is not None and (taken.kind, taken.node) != (kind, name):
        raise KeptError(f"{taken.node} is held for {taken.kind} already")
    node = nodes.show(name)
    if node is None:
        return None

    _note_taken(kind, node, taken)
    reason = f"{kind}: {why}"[:MOST_REASON]
    if not node.is_drained or node.reason != reason:
        nodes.drain(name, reason)
    hold(kind, name, reason)
    return nodes.show(name)


def _note_taken(kind: str, node: nodes.Node, taken: Maintenance | None) -> None:
    """Record the state to restore: the current one, unless maintenance itself caused it."""
    found = orders.as_found(node)
    if taken is not None:
        is_maintained = (node.reason or "").startswith(_MAINTENANCE)
        if node.is_drained and orders.is_anothers(node, taken.reason) and not is_maintained:
            # someone else drained it since, and that is now the state to restore
            _note_maintenance(dataclasses.replace(taken, states=found.states, reason=found.reason))
        return
    if (found.reason or "").startswith(_MAINTENANCE):  # its journal is lost
        found = journals.NodeSnapshot(node.name)
    _note_maintenance(Maintenance(node.name, found.states, found.reason, kind))


def is_taken(node: nodes.Node, kind: str) -> bool:
    """Whether the node is still drained for this.

    An administrator may have resumed it or drained it again.
    """
    if not node.is_drained and any(ground.kind == kind for ground in keep()):
        node = nodes.show(node.name) or node
    return node.is_drained and (node.reason or "").startswith(f"{kind}:")


def jobs_on(node: nodes.Node | None) -> str | None:
    """Return the number of jobs on the node as "2 jobs"; None if it is free."""
    if node is None or not node.is_busy:
        return None
    return orders.count_jobs(node.name)


def restore() -> None:
    """Restore the state in which the node was taken, unless a job prevents it.

    A drain or a state that someone else set since then stays.
    """
    taken = maintenance()
    if taken is None:
        return
    node = nodes.show(taken.node)
    if node is not None and is_taken(node, taken.kind):
        end(taken.kind)
        node = nodes.show(taken.node) or node  # is_taken may have drained it again
        if not orders.restore(node, taken):
            return  # to be marked down again, and jobs run
    forget()


def keep_until_reboot() -> None:
    """Keep the node until the machine was rebooted."""
    taken = maintenance()
    if taken is not None:
        _note_maintenance(dataclasses.replace(taken, boot_id=readiness.boot_id()))


def forget() -> None:
    """End the maintenance and leave the node's state as it is."""
    taken = maintenance()
    if taken is not None:
        end(taken.kind)
        _note_maintenance(None)


# The journal's owner alone


def _keep(ground: Ground) -> None:
    node = nodes.show(ground.node)
    if node is None:
        return  # it is being registered again
    if not node.is_drained and not node.is_down and is_administrators():
        logger.info(
            "%s was resumed by an administrator: it is held no longer for: %s",
            ground.node,
            ground.reason,
        )
        _drop([one.kind for one in grounds()])
        _end_reservation()
        return
    has_lost_reason = node.reason in {None, resume.NEW}  # None: as slurmd registers a held node
    if not node.is_drained or has_lost_reason:
        nodes.drain(ground.node, ground.reason)
        logger.info("%s is drained again: %s", ground.node, ground.reason)
    _keep_reserved(node)


def _keep_reserved(node: nodes.Node) -> None:
    """Prolong the node's reservation, or make it again; leave one that another just ended."""
    last = journals.read_kept().reservation or Reservation()
    left_s = last.until - time.time()
    should_be_seen = node.is_drained and 0 < left_s <= LASTS_S - _SHOWS_S
    if should_be_seen and not last.ended and not _is_reserved(node):
        logger.info(
            "the reservation of %s was ended: it is made again in %d s", node.name, _OBEYED_S
        )
        _note_reservation(Reservation(node.name, time.time() + LASTS_S / 2 + _OBEYED_S, ended=True))
        return
    if not node.is_drained or not LASTS_S / 2 <= left_s <= LASTS_S:
        _reserve(node.name)


def _is_reserved(node: nodes.Node) -> bool:
    """Whether the node is in this charm's reservation.

    The flag alone comes and goes some seconds late.
    """
    return "MAINTENANCE" in node.flags or reservation(node.name) in nodes.reservations(node.name)


def _reserve(node: str) -> None:
    _note_reservation(Reservation(node))  # so that an interrupted one is ended
    nodes.reserve(reservation(node), node, LASTS_S)
    _note_reservation(Reservation(node, time.time() + LASTS_S))


def _end_reservation() -> None:
    """End the reservation when no hold needs it any more."""
    kept = journals.read_kept()
    if kept.grounds or kept.reservation is None:
        return
    if kept.reservation.node:
        nodes.unreserve(reservation(kept.reservation.node))
    _note_reservation(None)


def _drop(kinds: collections.abc.Collection[str]) -> None:
    kept = journals.read_kept()
    left = tuple(ground for ground in kept.grounds if ground.kind not in kinds)
    journals.write_kept(dataclasses.replace(kept, grounds=left))


def _note_reservation(made: Reservation | None) -> None:
    journals.write_kept(dataclasses.replace(journals.read_kept(), reservation=made))


def _note_maintenance(taken: Maintenance | None) -> None:
    with journals.locked():
        journals.write_kept(dataclasses.replace(journals.read_kept(), maintenance=taken))
