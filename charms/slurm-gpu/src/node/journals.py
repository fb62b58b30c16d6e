"""The journals of this machine's node: JSON files, each written before the step that it covers.

They survive a reboot during that step. An unreadable journal counts as missing.
"""

import collections.abc
import contextlib
import dataclasses
import fcntl
import json
import pathlib
import shutil
import typing

from slurm_ddp import files, records

STATE_DIR = pathlib.Path("/var/lib/slurm-gpu")
KEPT, REGISTRATION, ORDER = "kept.json", "registration.json", "order.json"
CARDS, SERVED = "cards.json", "served.json"
_LOCK = "kept.lock"
# What KEPT replaced. Releases before it left a file for each ground, one for the reservation, and
# one for maintenance.
_FORMER_HOLDS, _FORMER_RESERVATION, _FORMER_MAINTENANCE = "holds", "holds/reserved", "hold.json"

Record = dict[str, typing.Any]
_Part = typing.TypeVar("_Part", "Ground", "Maintenance", "Reservation")


@dataclasses.dataclass(frozen=True)
class NodeSnapshot:
    """A Slurm node before this charm changed it."""

    node: str
    # Of "drain", "down", "fail": what to restore; empty for a node in service
    states: tuple[str, ...] = ()
    reason: str | None = None

    @classmethod
    def load(cls, journal: str = REGISTRATION) -> typing.Self | None:
        """Read a journal; return None without one."""
        try:
            return records.read(cls, STATE_DIR / journal)
        except (OSError, ValueError):
            return None

    def save(self, journal: str = REGISTRATION) -> None:
        """Write it to a journal."""
        write(journal, dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Ground:
    """One ground to keep jobs away."""

    kind: str  # the word before the colon in the reason
    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Maintenance(NodeSnapshot):
    """The node's state before maintenance, and the kind of maintenance."""

    kind: str = ""  # the kind of its ground
    boot_id: str = ""  # of the boot that must end before the node is restored


@dataclasses.dataclass(frozen=True)
class Reservation:
    """This charm's reservation."""

    node: str = ""
    until: float = 0.0  # seconds since 1970; 0 while it is being made
    ended: bool = False  # whether others ended it before


@dataclasses.dataclass(frozen=True)
class Kept:
    """Why the node is kept free of jobs, and by what besides the drain."""

    grounds: tuple[Ground, ...] = ()  # the latest last
    maintenance: Maintenance | None = None
    reservation: Reservation | None = None


def read_kept() -> Kept:
    """Read why the node is kept, as this release or an earlier one wrote it."""
    raw = read(KEPT) or {}
    listed = raw.get("grounds")
    grounds: list[Ground] = []
    for one in typing.cast("list[object]", listed) if isinstance(listed, list) else ():
        ground = _part(Ground, one)
        if ground is not None:
            grounds.append(ground)
    kept = Kept(
        tuple(grounds),
        _part(Maintenance, raw.get("maintenance")),
        _part(Reservation, raw.get("reservation")),
    )
    return _with_former(kept)


def write_kept(kept: Kept) -> bool:
    """Replace the journal of why the node is kept; return whether it changed.

    The caller is within `locked`.
    """
    before = read_kept()
    if kept == Kept():
        clear(KEPT)
    else:
        write(KEPT, dataclasses.asdict(kept))
    shutil.rmtree(STATE_DIR / _FORMER_HOLDS, ignore_errors=True)
    clear(_FORMER_MAINTENANCE)
    return kept != before


def has_former() -> bool:
    """Report whether an earlier release left its journals, which the next `write_kept` replaces."""
    return any((STATE_DIR / name).exists() for name in (_FORMER_HOLDS, _FORMER_MAINTENANCE))


@contextlib.contextmanager
def locked() -> collections.abc.Generator[None]:
    """Lock the journal of why the node is kept.

    Hooks, the health check and the service change it.
    """
    STATE_DIR.mkdir(parents=True, exist_ok=True)
    with (STATE_DIR / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cards() -> set[str]:
    """Read the bus ids of the cards that the node was registered with last."""
    return set(read(CARDS) or {})


def read(journal: str | pathlib.Path) -> Record | None:
    """Read the object in a journal of STATE_DIR, or in a file; return None if it cannot be read."""
    try:
        record = json.loads((STATE_DIR / journal).read_text())
    except (OSError, ValueError):
        return None
    return typing.cast("Record", record) if isinstance(record, dict) else None


def write(journal: str | pathlib.Path, record: collections.abc.Mapping[str, object]) -> bool:
    """Replace a journal atomically, readable by root alone; return whether it changed."""
    return files.ensure_file(STATE_DIR / journal, json.dumps(record) + "\n", mode=0o600)


def clear(journal: str) -> None:
    """Remove a journal."""
    files.ensure_absent(STATE_DIR / journal)


def remove_folder() -> None:
    """Remove STATE_DIR unless another role's files, or what could not be undone, are in it."""
    clear(_LOCK)
    with contextlib.suppress(OSError):
        STATE_DIR.rmdir()


def _part(kind: type[_Part], raw: object) -> _Part | None:
    if not isinstance(raw, dict):
        return None
    try:
        return records.parse(kind, typing.cast("Record", raw), KEPT)
    except ValueError:
        return None


def _with_former(kept: Kept) -> Kept:
    """Add the journals of an earlier release.

    Its programs may write them until the charm's first hook is over.
    """
    if not has_former():
        return kept
    known = {ground.kind for ground in kept.grounds}
    former = [ground for ground in _former_grounds() if ground.kind not in known]
    return Kept(
        (*former, *kept.grounds),
        kept.maintenance or Maintenance.load(_FORMER_MAINTENANCE),
        kept.reservation or _part(Reservation, read(_FORMER_RESERVATION)),
    )


def _former_grounds() -> list[Ground]:
    """Read the grounds that an earlier release left, the latest last."""
    found: list[tuple[float, Ground]] = []
    for path in (STATE_DIR / _FORMER_HOLDS).glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append((path.stat().st_mtime, records.read(Ground, path)))
    return [ground for _, ground in sorted(found, key=lambda one: (one[0], one[1].kind))]
