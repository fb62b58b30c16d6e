"""What keeps a drained node free of jobs although upstream's slurmd ends drains.

Upstream's charm sets `state=idle` on its node in hooks of its own: when `scontrol show node` fails, which it takes for
a new node (slurmd/src/charm.py:208-215), and after set-node-config (charm.py:309-315). That ends any drain. So a hold
is three things: the drain with its reason, which people and other programs see; a reservation of the node for
maintenance, which no change of the node's state touches, so that no job starts in between; and a record on this
machine, from which `node_watch` drains the node again within seconds and prolongs the reservation. A machine that
vanishes leaves a reservation that ends by itself.

Slurm deletes no node that is in a reservation, and upstream's charm deletes its node in set-node-config and when it is
disconnected from slurmctld. Who ends the reservation alone (`scontrol delete reservationname=slurm-gpu-NODE`) has ten
minutes for that, in which the drain stays.

An administrator who resumes the node is obeyed. Upstream's orders come right after it restarted slurmd, so a drain that
went while slurmd had been running for longer was an administrator's to end.
"""

import collections.abc
import contextlib
import dataclasses
import fcntl
import json
import logging
import pathlib
import shutil
import time

from slurm_ddp import files, systemd
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

DIRECTORY = pathlib.Path("/var/lib/slurm-gpu/holds")
SLURMD = "slurmd.service"
WATCH = "slurm-gpu-node.service"  # which runs node_watch
UPSTREAMS = "'n/a'"  # the reason that upstream's slurmd gives a node that it marks down, quotes included
LASTS_S = 3600  # the reservation, unless it is prolonged: longer than a boot takes
_SHOWS_S = 30.0  # a node shows its reservation only after some seconds
_OBEYED_S = 600  # an end of the reservation alone: Juju's next update-status comes within five minutes
_UPSTREAM_S = 120.0  # upstream sets a state right after slurmd came up; scontrol itself may take some timeouts


@dataclasses.dataclass(frozen=True)
class Hold:
    """One ground to keep jobs away."""

    kind: str  # the word before the colon in the reason
    node: str
    reason: str


def begin(kind: str, node: str, reason: str) -> None:
    """Hold the node, which the caller has drained with this reason. Beginning again changes the reason."""
    with lock():
        text = json.dumps({"node": node, "reason": reason}) + "\n"
        if not files.ensure_file(_record(kind), text, mode=0o600):
            return
        try:
            _reserve(node)
        except nodes.NodeError as e:  # the drain is there, and node_watch tries again
            logger.warning("%s is not reserved yet: %s", node, e)
    _wake()


def end(kind: str) -> None:
    """Let go of the node, as far as this ground goes; the drain is the caller's to end."""
    if not _record(kind).exists():
        return
    with lock():
        files.ensure_absent(_record(kind))
        try:
            _end_reservation()
        except nodes.NodeError as e:
            logger.warning("the reservation of this node ends a little later: %s", e)
    _wake()


def held() -> list[Hold]:
    """Return the holds, the latest last. A record that cannot be read holds nothing."""
    found: list[tuple[float, Hold]] = []
    for path in DIRECTORY.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads(path.read_text())
            found.append((path.stat().st_mtime, Hold(path.stem, str(raw["node"]), str(raw["reason"]))))
    return [hold for _, hold in sorted(found, key=lambda pair: (pair[0], pair[1].kind))]


def keep() -> list[Hold]:
    """Drain and reserve the node again where somebody else than an administrator ended that; return the holds.

    Raises:
        NodeError: the controller did not do as asked.
    """
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
    """End every hold, for a charm that goes; the drains are the caller's to end."""
    if not DIRECTORY.is_dir():
        return
    with lock():
        for hold in held():
            files.ensure_absent(_record(hold.kind))
        try:
            _end_reservation()
        except nodes.NodeError as e:
            logger.warning("the reservation of this node ends by itself within the hour: %s", e)
            files.ensure_absent(_reserved())
    shutil.rmtree(DIRECTORY, ignore_errors=True)


@contextlib.contextmanager
def lock() -> collections.abc.Generator[None]:
    """Have the holds to oneself: hooks, the health check and the watching service change them."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (DIRECTORY / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _keep(hold: Hold) -> None:
    node = nodes.show(hold.node)
    if node is None:
        return  # it is being registered anew
    if not node.is_drained and not node.is_down:
        running = systemd.active_for(SLURMD)
        if running is not None and running > _UPSTREAM_S:
            logger.info("%s was resumed by an administrator: it is held no longer for: %s", hold.node, hold.reason)
            for one in held():
                files.ensure_absent(_record(one.kind))
            _end_reservation()
            return
    if not node.is_drained or node.reason in {None, UPSTREAMS}:  # none: as slurmd registers a node that was held
        nodes.drain(hold.node, hold.reason)
        logger.info("%s is drained again: %s", hold.node, hold.reason)
    until, was_ended = _last()
    left = until - time.time()
    if node.is_drained and 0 < left <= LASTS_S - _SHOWS_S and not was_ended and not _is_reserved(node):
        logger.info("the reservation of %s was ended: it is made again in %d s", hold.node, _OBEYED_S)
        _write(hold.node, time.time() + LASTS_S / 2 + _OBEYED_S, was_ended=True)
    elif not (node.is_drained and LASTS_S / 2 <= left <= LASTS_S):
        _reserve(hold.node)


def _is_reserved(node: nodes.Node) -> bool:
    """Whether the node is in the reservation that we made; the flag alone comes and goes some seconds late."""
    return "MAINTENANCE" in node.flags or reservation(node.name) in nodes.reservations(node.name)


def _reserve(node: str) -> None:
    _write(node, 0)  # so that an interrupted one is ended
    nodes.reserve(reservation(node), node, LASTS_S)
    _write(node, time.time() + LASTS_S)


def _write(node: str, until: float, *, was_ended: bool = False) -> None:
    record = {"node": node, "until": until, "ended": was_ended}
    files.ensure_file(_reserved(), json.dumps(record) + "\n")


def _last() -> tuple[float, bool]:
    """Return when the reservation ends that we made, 0 for none, and whether somebody ended it before."""
    try:
        raw = json.loads(_reserved().read_text())
        return float(raw["until"]), bool(raw.get("ended"))
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, False


def _end_reservation() -> None:
    """End the reservation that no hold asks for any more."""
    if held() or not _reserved().is_file():
        return
    with contextlib.suppress(ValueError, KeyError, TypeError):
        nodes.unreserve(reservation(json.loads(_reserved().read_text())["node"]))
    files.ensure_absent(_reserved())


def _wake() -> None:
    with contextlib.suppress(CommandError):  # where the unit is not set up yet, the hook does that at its end
        systemd.start_later(WATCH)


def _record(kind: str) -> pathlib.Path:
    return DIRECTORY / f"{kind}.json"


def _reserved() -> pathlib.Path:
    return DIRECTORY / "reserved"  # the node that has a reservation of ours, and until when
