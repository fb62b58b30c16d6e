"""The controller seat: merges what compute units say into gres.conf and makes slurmctld hand it out.

Cost per event is constant in the number of nodes, except that the file is written whole: an event reads the databag
of the unit that woke it, and looks at others only as long as it finds news there. So a burst of a thousand changes is
one file and one reconfigure, and every later event of the burst finds nothing left to do.
"""

import collections.abc
import dataclasses
import logging
import pathlib
import time

from gpu import gres_conf
from gpu_base import Level, Verdict, count
from slurm_ddp import files, systemd
from slurm_ddp.interfaces import slurm_gres
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

SLURMCTLD = "slurmctld.service"
SLURM_CONF = pathlib.Path("/etc/slurm/slurm.conf")
OWNER = pathlib.Path("/var/lib/slurm-gpu/controller")  # the unit that keeps gres.conf on this machine
LIVE = pathlib.Path("/var/lib/slurm-gpu/live")  # the digest of the block that slurmctld last read
_LOOKAHEAD = 8  # units without news in a row before looking further is given up
_ALL_AT_ONCE = 64
_ROTATE_S = 300  # Juju's interval between two update-status

Read = collections.abc.Callable[[str], slurm_gres.NodeGres | None]


_NOTHING = gres_conf.Book("", "", {})


class UnreadableError(Exception):
    """A unit's databag is not what the interface allows. `str()` says in which way."""


@dataclasses.dataclass(frozen=True)
class View:
    """The controller's side now, for the status and the answer."""

    configured: bool  # slurmctld's charm has set it up
    running: bool = False
    live: bool = False  # slurmctld has read the file as it is
    book: gres_conf.Book | None = None
    problem: str | None = None  # what a person must mend
    damaged: bool = False  # the file cannot be read, so nothing may be written
    silent: str | None = None  # slurmctld did not answer


def sync(units: collections.abc.Collection[str], first: str | None, read: Read, *, owner: str) -> View:
    """Bring gres.conf up to date with the compute units, and slurmctld up to date with gres.conf.

    Args:
        units: names of all compute units that are related now; entries of others go with their nodes' Gres.
        first: the unit to look at first, and beyond which to look only while there is news; None to look at all.
        read: returns what a unit said, None when it has said nothing yet, or raises `UnreadableError`.
        owner: this unit's name.
    """
    now = view()
    if not now.configured or now.damaged:
        return now
    book = now.book or _NOTHING
    entries = {unit: entry for unit, entry in book.entries.items() if unit in units and not entry.left}
    entries |= dict(_news(units, first, entries, read))
    entries |= _left(book, entries, running=now.running)
    book = book.with_entries(entries)
    if entries:
        files.ensure_file(OWNER, owner + "\n")
    if now.book is not None or entries:
        gres_conf.write(book)
    silent = _reload(book) if now.running else now.silent
    return _view(book, running=now.running, silent=silent)


def is_keeper(unit: str) -> bool:
    """Whether this unit wrote the block of gres.conf on this machine."""
    return OWNER.exists() and OWNER.read_text().strip() == unit


def release(*, owner: str, last: bool) -> None:
    """Let go of gres.conf; take the block out when no other unit of the application is there to go on with it."""
    if last:
        try:
            sync((), None, lambda _: None, owner=owner)
        except CommandError as e:
            logger.warning("gres.conf keeps the block of slurm-gpu: %s", e)
    files.ensure_absent(OWNER)
    files.ensure_absent(LIVE)


def summary() -> dict[str, str]:
    """Return what gres.conf holds, for the `show-gres` action."""
    now = view()
    num_nodes, num_devices = counts(now.book)
    return {
        "nodes": str(num_nodes),
        "gpus": str(num_devices),
        "live": str(now.live).lower(),
        "autodetect": _autodetect(now.book),
        "gres-conf": now.book.text() if now.book else "",
        **({"problem": now.problem} if now.problem else {}),
    }


def verdict(now: View | None, *, related: bool) -> Verdict:
    """Return the controller's status.

    Args:
        now: its side, None on a unit that does not lead.
        related: whether there is a slurm-gpu on compute nodes.
    """
    if now is None:
        return Verdict(Level.ACTIVE, "standby: the leader keeps gres.conf")
    if not now.configured:
        return Verdict(Level.WAITING, "waiting for slurmctld to be set up")
    if now.problem:
        return Verdict(Level.BLOCKED, now.problem)
    if not related:
        return Verdict(Level.BLOCKED, "integrate gres with node-gres of the slurm-gpu on slurmd")
    if not now.live:
        why = f" ({now.silent})" if now.silent else ""
        return Verdict(Level.WAITING, f"waiting for slurmctld to read gres.conf{why}")
    num_nodes, num_devices = counts(now.book)
    if not num_nodes:
        return Verdict(Level.ACTIVE, f"no node needs lines in gres.conf (AutoDetect={_autodetect(now.book)})")
    return Verdict(Level.ACTIVE, f"gres.conf has lines of {count(num_devices, 'GPU')} on {count(num_nodes, 'node')}")


def rotating(units: collections.abc.Collection[str]) -> str | None:
    """Return the unit to look at first when none woke this hook: all of a few, and a window that moves over many."""
    if len(units) <= _ALL_AT_ONCE:
        return None
    ordered = sorted(units, key=gres_conf.unit_key)
    return ordered[int(time.time() // _ROTATE_S) * _LOOKAHEAD % len(ordered)]


def view() -> View:
    """Return how things are, without changing anything."""
    silent = None
    try:
        running = systemd.is_active(SLURMCTLD)
    except CommandError as e:  # systemd does not answer
        running, silent = False, str(e)
    try:
        book = gres_conf.read()
    except gres_conf.GresConfError as e:
        return View(configured=True, running=running, problem=str(e), damaged=True)
    return _view(book, running=running, silent=silent)


def _view(book: gres_conf.Book | None, *, running: bool, silent: str | None = None) -> View:
    # Upstream writes gres.conf only where there is none, so a controller that is not set up yet must find none of ours.
    configured = SLURM_CONF.exists() and (book is not None or running)
    clashes = book.clashes if book else {}
    problem = None
    if clashes:
        node, units = min(clashes.items())
        problem = f"{' and '.join(units)} both say they are node {node}: remove one"
    elif book and any(entry.refused for entry in book.entries.values()):
        refused = sorted((entry.unit for entry in book.entries.values() if entry.refused), key=gres_conf.unit_key)
        problem = f"cannot use the lines of {', '.join(refused[:3])}: refresh slurm-gpu to one revision on all machines"
    return View(configured, running, live=running and _is_live(book), book=book, problem=problem, silent=silent)


def answer(
    now: View, units: collections.abc.Collection[str], said: slurm_gres.ControllerGres
) -> slurm_gres.ControllerGres:
    """Return what the nodes of one relation should read, given what they read so far.

    Only nodes that wait for their lines are named. What was live stays named until slurmctld has read something newer.
    """
    if not now.configured or now.book is None:
        return said
    clashing = now.book.clashes
    applied = {
        entry.digest
        for unit, entry in now.book.entries.items()
        if unit in units and entry.awaited and not entry.refused and entry.node not in clashing
    }
    return slurm_gres.ControllerGres(
        autodetect=now.book.autodetect, applied=tuple(sorted(applied)) if now.live else said.applied
    )


def _autodetect(book: gres_conf.Book | None) -> str:
    return (book or _NOTHING).autodetect


def counts(book: gres_conf.Book | None) -> tuple[int, int]:
    """Return how many nodes have lines, and how many devices they describe."""
    sizes = [
        sum("Name=gpu" in line.split() for line in entry.lines)
        for entry in (book.entries.values() if book else ())
        if entry.lines
    ]
    return len(sizes), sum(sizes)


def _news(
    units: collections.abc.Collection[str],
    first: str | None,
    entries: collections.abc.Mapping[str, gres_conf.Entry],
    read: Read,
) -> collections.abc.Iterator[tuple[str, gres_conf.Entry]]:
    """Yield the entries that changed: the waking unit's, and others' as long as there are some to be found."""
    ordered = sorted(units, key=gres_conf.unit_key)
    at = ordered.index(first) if first in ordered else 0
    rotated = ordered[at:] + ordered[:at]
    unknown = [unit for unit in rotated if unit not in entries]
    known = [unit for unit in rotated if unit in entries]
    most = _LOOKAHEAD if first is not None else len(units)
    for group in (unknown, known):
        misses = 0
        for unit in group:
            entry = _entry(unit, read)
            if entry is None or entry == entries.get(unit):
                misses += 1
                if misses > most:
                    break
            else:
                misses = 0
                yield unit, entry


def _left(
    book: gres_conf.Book, entries: collections.abc.Mapping[str, gres_conf.Entry], *, running: bool
) -> dict[str, gres_conf.Entry]:
    """Return the entries of units that are gone whose nodes Slurm still has with GPUs by these lines.

    Without its lines such a node would be refused at slurmd's next start. Upstream leaves a removed unit's node in
    Slurm, and Juju may delete a unit before it could register its node without GPUs.
    """
    present = {entry.node for entry in entries.values()}
    gone = {
        unit: entry
        for unit, entry in book.entries.items()
        if unit not in entries and entry.lines and entry.node not in present
    }
    return {
        unit: dataclasses.replace(entry, awaited=False, left=True)
        for unit, entry in gone.items()
        if not running or _has_gres(entry)
    }


def _has_gres(entry: gres_conf.Entry) -> bool:
    try:
        node = nodes.show(entry.node)
    except nodes.NodeError:
        return True
    names = {word.removeprefix("Name=") for line in entry.lines for word in line.split() if word.startswith("Name=")}
    return node is not None and any(nodes.count_gres(node.gres, name) for name in names)


def _entry(unit: str, read: Read) -> gres_conf.Entry | None:
    try:
        said = read(unit)
    except UnreadableError:
        return gres_conf.Entry(unit, "unknown", slurm_gres.digest(unit, ()), refused=True)
    return gres_conf.Entry.of(unit, said) if said is not None and said.node is not None else None


def _reload(book: gres_conf.Book) -> str | None:
    """Make slurmctld read the file if its block is another than it read last; return why that did not work."""
    if _is_live(book):
        return None
    try:
        nodes.reconfigure()
    except (nodes.NodeError, CommandError) as e:
        return str(e)
    files.ensure_file(LIVE, book.digest + "\n")
    return None


def _is_live(book: gres_conf.Book | None) -> bool:
    try:
        read = LIVE.read_text().strip()
    except FileNotFoundError:
        return book is None or book.digest == _NOTHING.digest  # no line of ours was ever written
    return read == (book or _NOTHING).digest
