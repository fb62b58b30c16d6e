"""The controller role: merge the compute units' data into gres.conf, for slurmctld to hand out.

An event reads the databag of the unit that triggered it, and others only as long as it finds
changes there. So its cost does not grow with the number of nodes, and a burst of a thousand changes
is one file and one reconfigure.
"""

import base64
import collections.abc
import dataclasses
import hmac
import json
import logging
import os
import pathlib
import time

from gpu import gres, gres_conf
from node import kept
from slurm_ddp import files, systemd
from slurm_ddp.charm import Level, Status
from slurm_ddp.commands import CommandError
from slurm_ddp.interfaces import slurm_gres
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

SLURMCTLD = "slurmctld.service"
SLURM_CONF = pathlib.Path("/etc/slurm/slurm.conf")
# The unit that writes gres.conf on this machine
OWNER = pathlib.Path("/var/lib/slurm-gpu/controller")
LIVE = pathlib.Path("/var/lib/slurm-gpu/live")  # the digest of the block that slurmctld last read
# Where upstream's charm writes it; controllers share it
KEY = pathlib.Path("/etc/slurm/jwt_hs256.key")
_TOKEN_S = 600  # how long a token is valid
_LOOKAHEAD = 8  # units without changes in a row before no more are read
_ALL_AT_ONCE = 64
_ROTATE_S = 300  # Juju's interval between two update-status

Read = collections.abc.Callable[[str], slurm_gres.NodeGres | None]


@dataclasses.dataclass(frozen=True)
class View:
    """The controller's state, for the status and the answer."""

    configured: bool  # slurmctld's charm has set it up
    running: bool = False  # slurmctld, here or on another machine
    live: bool = False  # slurmctld has read the file as it is
    conf: gres_conf.GresConf = dataclasses.field(default_factory=gres_conf.GresConf)
    problem: str | None = None  # a problem that the operator must fix
    damaged: bool = False  # the file cannot be read, so nothing may be written
    silent: str | None = None  # why slurmctld has not read the file


def sync(
    units: collections.abc.Collection[str], first: str | None, read: Read, *, owner: str
) -> View:
    """Bring gres.conf up to date with the compute units, and slurmctld up to date with gres.conf.

    Args:
        units: names of all compute units that are related now; entries of others are removed with
            their nodes' Gres.
        first: the unit to read first, with others only while there are changes; None to read all.
        read: returns a unit's published data, None for nothing yet, or raises `ValueError`.
        owner: this unit's name.
    """
    now = view()
    if not now.configured or now.damaged:
        return now
    conf = now.conf
    entries = {
        unit: entry for unit, entry in conf.entries.items() if unit in units and not entry.left
    }
    entries |= dict(_changes(units, first, entries, read))
    entries |= _left(conf, entries, running=now.running, is_last=not units)
    conf = dataclasses.replace(conf, entries=entries)
    if entries:
        files.ensure_file(OWNER, owner + "\n")
    gres_conf.write(conf)
    return _view(conf, running=now.running, silent=_reload(conf) if now.running else now.silent)


def release(*, owner: str, last: bool) -> None:
    """Leave gres.conf to the application's other units.

    The last one that writes it removes the block.
    """
    if files.read(OWNER) != owner:
        return
    if last:
        try:
            sync((), None, lambda _: None, owner=owner)
        except CommandError as e:
            logger.warning("gres.conf keeps the block of slurm-gpu: %s", e)
    files.ensure_absent(OWNER)
    files.ensure_absent(LIVE)


def summary() -> dict[str, str]:
    """Return the contents of gres.conf, for the `show-gres` action."""
    now = view()
    num_nodes, num_devices = counts(now.conf)
    return {
        "nodes": str(num_nodes),
        "gpus": str(num_devices),
        "live": str(now.live).lower(),
        "autodetect": now.conf.autodetect,
        "gres-conf": now.conf.text(),
        **({"problem": now.problem} if now.problem else {}),
    }


def status(now: View | None, *, related: bool) -> Status:
    """Return the controller's status; `now` is None on a unit that does not lead."""
    if now is None:
        return Status(Level.ACTIVE, "standby: the leader keeps gres.conf")
    if not now.configured:
        return Status(Level.WAITING, "waiting for slurmctld to be set up")
    if now.problem:
        return Status(Level.BLOCKED, now.problem)
    if not related:
        return Status(Level.BLOCKED, "integrate gres with node-gres of the slurm-gpu on slurmd")
    if not now.live:
        why = f" ({now.silent})" if now.silent else ""
        return Status(Level.WAITING, f"waiting for slurmctld to read gres.conf{why}")
    num_nodes, num_devices = counts(now.conf)
    text = f"gres.conf has lines of {_count(num_devices, 'GPU')} on {_count(num_nodes, 'node')}"
    if not num_nodes:
        text = f"no node needs lines in gres.conf (AutoDetect={now.conf.autodetect})"
    gone = [
        entry.node for entry in now.conf.entries.values() if entry.left and _is_silent(entry.node)
    ]
    if gone:
        text += f"; if {gone[0]}, which is silent, was removed: scontrol delete nodename={gone[0]}"
    return Status(Level.ACTIVE, text)


def rotating(units: collections.abc.Collection[str]) -> str | None:
    """Return the unit to read first in a hook that no unit triggered.

    With few units all are read, with many a moving window.
    """
    if len(units) <= _ALL_AT_ONCE:
        return None
    ordered = sorted(units, key=gres_conf.unit_key)
    return ordered[int(time.time() // _ROTATE_S) * _LOOKAHEAD % len(ordered)]


def view() -> View:
    """Return the controller's state without changing anything."""
    silent = None
    try:
        running = systemd.is_active(SLURMCTLD) or _is_controlled()
    except CommandError as e:  # systemd does not respond
        running, silent = False, str(e)
    try:
        conf = gres_conf.read()
    except gres_conf.GresConfError as e:
        return View(configured=True, running=running, problem=str(e), damaged=True)
    return _view(conf, running=running, silent=silent)


def answer(
    now: View, units: collections.abc.Collection[str], published: slurm_gres.ControllerGres
) -> slurm_gres.ControllerGres:
    """Return the data to publish to the nodes of one relation, given what is published so far.

    It names only nodes that wait for their lines. Live lines stay named until slurmctld has read
    something newer.
    """
    if not now.configured or now.damaged:
        return published
    applied = {
        entry.digest
        for unit, entry in now.conf.entries.items()
        if unit in units and entry.awaited and entry.node not in now.conf.clashes
    }
    return slurm_gres.ControllerGres(
        autodetect=now.conf.autodetect,
        applied=tuple(sorted(applied)) if now.live else published.applied,
    )


def counts(conf: gres_conf.GresConf) -> tuple[int, int]:
    """Count the nodes with GPU lines, and the devices in these lines."""
    num_nodes = num_devices = 0
    for entry in conf.entries.values():
        gpu_lines = [line for line in entry.lines if "Name=gpu" in line.split()]
        num_devices += len(gpu_lines)
        if gpu_lines:
            num_nodes += 1
    return num_nodes, num_devices


def _view(conf: gres_conf.GresConf, *, running: bool, silent: str | None = None) -> View:
    # Upstream writes gres.conf only if none exists, so none may be made here before it has set the
    # controller up.
    configured = SLURM_CONF.exists() and (gres_conf.PATH.exists() or running)
    live = running and _is_live(conf)
    clashes = [
        f"{' and '.join(units)} both claim node {node}: remove one"
        for node, units in conf.clashes.items()
    ]
    return View(
        configured, running, live=live, conf=conf, problem=min(clashes, default=None), silent=silent
    )


def _changes(
    units: collections.abc.Collection[str],
    first: str | None,
    entries: collections.abc.Mapping[str, gres_conf.Entry],
    read: Read,
) -> collections.abc.Iterator[tuple[str, gres_conf.Entry]]:
    """Yield the changed entries: the triggering unit's, and others' as long as some are found."""
    ordered = sorted(units, key=gres_conf.unit_key)
    at = ordered.index(first) if first in ordered else 0
    most = _LOOKAHEAD if first is not None else len(units)
    misses = 0
    for unit in ordered[at:] + ordered[:at]:
        entry = _entry(unit, read)
        if entry is not None and entry != entries.get(unit):
            misses = 0
            yield unit, entry
        elif (misses := misses + 1) > most:
            break


def _left(
    conf: gres_conf.GresConf,
    entries: collections.abc.Mapping[str, gres_conf.Entry],
    *,
    running: bool,
    is_last: bool,
) -> dict[str, gres_conf.Entry]:
    """Return the entries of removed units whose nodes Slurm still has.

    Their lines stay as long as they are in use: without its lines a node with GPUs would be refused
    at slurmd's next start. Upstream leaves a removed unit's node in Slurm, and Juju may delete a
    unit before it could register its node without GPUs. `is_last`: no unit is left, so entries
    without lines go.
    """
    present = {entry.node for entry in entries.values()}
    found: dict[str, gres_conf.Entry] = {}
    for unit, entry in conf.entries.items():
        if unit in entries or entry.node in present:
            continue
        if running and not entry.left:
            _end_reservation(entry.node)
        lines = _used_lines(entry) if running else entry.lines
        if lines is not None and (lines or not is_last):
            digest = slurm_gres.digest(entry.node, lines)
            found[unit] = gres_conf.Entry(unit, entry.node, digest, lines, left=True)
    return found


def _used_lines(entry: gres_conf.Entry) -> tuple[str, ...] | None:
    """Return the lines of a node that has the GPUs, () if it lacks them, None without a node."""
    try:
        node = nodes.show(entry.node)
    except nodes.NodeError:
        return entry.lines
    if node is None:
        return None
    names = {gres.fields(line)["Name"] for line in entry.lines}
    is_used = any(nodes.count_gres(node.gres, name) for name in names)
    return entry.lines if is_used else ()


def _end_reservation(node: str) -> None:
    """End the reservation that a removed unit may have left.

    Upstream cannot delete a node that is in one.
    """
    try:
        nodes.unreserve(kept.reservation(node))
    except nodes.NodeError as e:
        logger.warning("the reservation of %s ends within the hour: %s", node, e)


def _is_silent(name: str) -> bool:
    try:
        node = nodes.show(name)
    except nodes.NodeError:
        return False
    return node is not None and "NOT_RESPONDING" in node.flags


def _entry(unit: str, read: Read) -> gres_conf.Entry | None:
    try:
        published = read(unit)
    except ValueError as e:  # not allowed by the interface
        logger.warning("what %s published is ignored: %s", unit, e)
        return None
    return (
        gres_conf.Entry.of(unit, published)
        if published is not None and published.node is not None
        else None
    )


def _reload(conf: gres_conf.GresConf) -> str | None:
    """Make slurmctld read the file if its block changed; return why that failed."""
    if _is_live(conf):
        return None
    try:
        nodes.reconfigure()
    except (nodes.NodeError, CommandError) as e:
        return str(e)
    files.ensure_file(LIVE, conf.digest + "\n")
    return None


def _is_live(conf: gres_conf.GresConf) -> bool:
    # Else no line of this charm was ever written
    last = files.read(LIVE) or gres_conf.GresConf().digest
    return last == conf.digest


def _is_controlled() -> bool:
    """Return whether a slurmctld elsewhere responds.

    If the key exists, this process's Slurm commands carry root's token (auth/jwt) from then on,
    since auth/slurm has no socket on a machine without slurmctld.
    """
    if not KEY.exists():
        return False
    now = int(time.time())
    parts = ({"alg": "HS256", "typ": "JWT"}, {"iat": now, "exp": now + _TOKEN_S, "sun": "root"})
    text = b".".join(_encode(json.dumps(part).encode()) for part in parts)
    signature = hmac.digest(KEY.read_bytes(), text, "sha256")
    os.environ["SLURM_JWT"] = (text + b"." + _encode(signature)).decode()
    return nodes.is_controlled()


def _encode(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
