"""Keep a drained node free of jobs although upstream's slurmd ends drains.

Upstream's charm sets `state=idle` on its node if `scontrol show node` fails (slurmd/src/charm.py:208-215) and after
set-node-config (charm.py:309-315), right after it restarted slurmd. So a hold is the drain with its reason; a
reservation for maintenance, which no change of the node's state touches and which ends by itself; and a record, from
which `node.watch` drains and reserves the node again within seconds. A drain that ended while slurmd had been running
for longer was ended by an administrator, who is obeyed. Upstream deletes its node, which Slurm refuses in a
reservation: whoever ends that alone has ten minutes, in which the drain stays.
"""

import collections.abc
import contextlib
import dataclasses
import fcntl
import logging
import pathlib
import shutil
import time

from node import node_state, resume, slurmd_unit
from slurm_ddp import files, records, systemd
from slurm_ddp.commands import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

DIRECTORY = node_state.STATE_DIR / "holds"
WATCH = "slurm-gpu-node.service"  # which runs node.watch
MOST_REASON = 200  # characters of a drain's reason
LASTS_S = 3600  # the reservation, unless it is prolonged: longer than a boot takes
_SHOWS_S = 30.0  # a node shows its reservation only after some seconds
_OBEYED_S = (
    600  # an end of the reservation alone: Juju's next update-status comes within five minutes
)


@dataclasses.dataclass(frozen=True)
class Hold:
    """One ground to keep jobs away."""

    kind: str  # the word before the colon in the reason
    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class _Reservation:
    """This charm's reservation."""

    node: str = ""
    until: float = 0.0  # seconds since 1970; 0 for none
    ended: bool = False  # whether others ended it before


def begin(kind: str, node: str, reason: str) -> None:
    """Hold the node, which the caller has drained with this reason. Beginning again changes the reason."""
    if not note(kind, node, reason):
        return
    with lock():
        try:
            _reserve(node)
        except nodes.NodeError as e:  # the node is drained, and node.watch tries again
            logger.warning("%s is not reserved yet: %s", node, e)


def note(kind: str, node: str, reason: str) -> bool:
    """Record a hold, for `node.watch` to reserve the node; return whether anything changed."""
    with lock():
        changed = files.ensure_file(
            _record(kind), records.text(Hold(kind, node, reason)), mode=0o600
        )
    if changed:
        wake()
    return changed


def is_held(kind: str) -> bool:
    """Whether the node is held on this ground."""
    return _record(kind).exists()


def end(*kinds: str) -> None:
    """Release the node from these grounds; the drain is the caller's to end."""
    if not any(map(is_held, kinds)) and (held() or not _reserved().is_file()):
        return  # a reservation without a hold: a hook died in between
    with lock():
        for kind in kinds:
            files.ensure_absent(_record(kind))
        try:
            _end_reservation()
        except nodes.NodeError as e:
            logger.warning("the reservation of this node ends later, within the hour: %s", e)
    wake()


def held() -> list[Hold]:
    """Return the holds, the latest last. A record that cannot be read holds nothing."""
    found: dict[Hold, float] = {}
    for path in DIRECTORY.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            found[records.read(Hold, path)] = path.stat().st_mtime
    return sorted(found, key=lambda hold: (found[hold], hold.kind))


def keep() -> list[Hold]:
    """Drain and reserve the node again unless an administrator ended that; return the holds. Raises `NodeError`."""
    if not DIRECTORY.is_dir():
        return []
    with lock():
        holds = held()
        _end_reservation()
        if holds:
            _keep(holds[-1])
        return held()


@contextlib.contextmanager
def lifted(node: str) -> collections.abc.Generator[None]:
    """End the node's reservation meanwhile, since Slurm deletes no node that is in one; `keep` makes it again."""
    if not DIRECTORY.is_dir():
        yield
        return
    with lock():
        if _reserved().is_file():
            nodes.unreserve(reservation(node))
            _write(node, 0)
        yield


def reservation(node: str) -> str:
    """Return the name of the reservation of a held node."""
    return f"slurm-gpu-{node}"


def release() -> None:
    """End every hold, for a charm that is removed; the drains are the caller's to end."""
    end(*(hold.kind for hold in held()))
    shutil.rmtree(DIRECTORY, ignore_errors=True)


@contextlib.contextmanager
def lock() -> collections.abc.Generator[None]:
    """Have the holds to oneself: hooks, the health check and the watching service change them."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (DIRECTORY / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wake() -> None:
    """Have the service look now at the holds, and whether the node may take jobs."""
    with contextlib.suppress(
        CommandError
    ):  # where the unit is not set up yet, the hook does that at its end
        systemd.start_later(WATCH)


def is_administrators() -> bool:
    """Report whether a drain that has ended was ended by an administrator, and not by upstream's slurmd."""
    running = systemd.active_for(slurmd_unit.SLURMD)
    return running is not None and running > resume.UPSTREAM_S


def _keep(hold: Hold) -> None:
    node = nodes.show(hold.node)
    if node is None:
        return  # it is being registered again
    if not node.is_drained and not node.is_down and is_administrators():
        logger.info(
            "%s was resumed by an administrator: it is held no longer for: %s",
            hold.node,
            hold.reason,
        )
        for one in held():
            files.ensure_absent(_record(one.kind))
        _end_reservation()
        return
    if not node.is_drained or node.reason in {
        None,
        resume.NEW,
    }:  # none: as slurmd registers a node that was held
        nodes.drain(hold.node, hold.reason)
        logger.info("%s is drained again: %s", hold.node, hold.reason)
    last = _last()
    left = last.until - time.time()
    if (
        node.is_drained
        and 0 < left <= LASTS_S - _SHOWS_S
        and not last.ended
        and not _is_reserved(node)
    ):
        logger.info(
            "the reservation of %s was ended: it is made again in %d s", hold.node, _OBEYED_S
        )
        _write(hold.node, time.time() + LASTS_S / 2 + _OBEYED_S, was_ended=True)
    elif not (node.is_drained and LASTS_S / 2 <= left <= LASTS_S):
        _reserve(hold.node)


def _is_reserved(node: nodes.Node) -> bool:
    """Whether the node is in this charm's reservation; the flag alone comes and goes some seconds late."""
    return "MAINTENANCE" in node.flags or reservation(node.name) in nodes.reservations(node.name)


def _reserve(node: str) -> None:
    _write(node, 0)  # so that an interrupted one is ended
    nodes.reserve(reservation(node), node, LASTS_S)
    _write(node, time.time() + LASTS_S)


def _write(node: str, until: float, *, was_ended: bool = False) -> None:
    node_state.write(_reserved(), {"node": node, "until": until, "ended": was_ended})


def _last() -> _Reservation:
    return records.load(_Reservation(), _reserved())


def _end_reservation() -> None:
    """End the reservation when no hold needs it any more."""
    if held() or not _reserved().is_file():
        return
    if node := _last().node:
        nodes.unreserve(reservation(node))
    files.ensure_absent(_reserved())


def _record(kind: str) -> pathlib.Path:
    return DIRECTORY / f"{kind}.json"


def _reserved() -> pathlib.Path:
    return DIRECTORY / "reserved"  # the node that this charm reserved, and until when
