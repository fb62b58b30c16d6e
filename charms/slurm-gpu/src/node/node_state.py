"""The journals of a node as it was found, each one JSON object in STATE_DIR, written before the first step it covers.

registration.json and hold.json survive a reboot in the middle of what they describe. One that cannot be read counts as
none.
"""

import collections.abc
import contextlib
import dataclasses
import json
import pathlib
import typing

from slurm_ddp import files, records

STATE_DIR = pathlib.Path("/var/lib/slurm-gpu")
REGISTRATION, HOLD, ORDER = "registration.json", "hold.json", "order.json"
CARDS, SERVED = "cards.json", "served.json"

Record = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class NodeSnapshot:
    """A Slurm node before this charm changed it."""

    node: str
    states: tuple[
        str, ...
    ] = ()  # of "drain", "down", "fail": what to restore; empty for a node in service
    reason: str | None = None

    JOURNAL: typing.ClassVar[str] = REGISTRATION

    @classmethod
    def load(cls, journal: str = "") -> typing.Self | None:
        """Read what a journal holds, None without one."""
        try:
            return records.read(cls, STATE_DIR / (journal or cls.JOURNAL))
        except (OSError, ValueError):
            return None

    def save(self, journal: str = "") -> None:
        """Write it to a journal."""
        write(journal or self.JOURNAL, dataclasses.asdict(self))


def cards() -> set[str]:
    """Read the bus ids of the cards that the node was registered with last."""
    return set(read(CARDS) or {})


def read(journal: str | pathlib.Path) -> Record | None:
    """Return the object in a journal of STATE_DIR, or in a file, None if it cannot be read."""
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
    """Remove STATE_DIR, unless something is in it: another role's on the same machine, or what could not be undone."""
    for folder in (STATE_DIR / "holds", STATE_DIR):
        with contextlib.suppress(OSError):
            folder.rmdir()
