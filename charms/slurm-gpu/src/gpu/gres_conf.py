"""The block of gres.conf that this charm keeps: one header and the records of each node, between two marker lines.

The block is also the controller seat's memory: which unit speaks for which node, and the digest of what it last said.
So an event about one node reads one databag, not those of all nodes. What stands outside the markers is never
changed.

slurmutils' models cannot keep it: they put keys into lower case, drop the comments that are the block's memory, and
parse no record that begins with `NodeName=`. So the text is made here, and `gres_check` lets slurmd itself read it.
"""

import collections.abc
import dataclasses
import functools
import hashlib
import pathlib
import pwd
import re

from gpu import gres
from slurm_ddp import files
from slurm_ddp.interfaces import slurm_gres

PATH = pathlib.Path("/etc/slurm/gres.conf")
BEGIN = "# BEGIN slurm-gpu: kept by the slurm-gpu charm; edits between these lines are lost"
END = "# END slurm-gpu"
_OWNER = "slurm"  # slurmctld reads it as this account, and upstream's charm writes it so

_BEGIN = re.compile(r"^# BEGIN slurm-gpu\b.*$", re.MULTILINE)
_END = re.compile(r"^# END slurm-gpu[ \t]*$", re.MULTILINE)
_HEADER = re.compile(r"# (?P<unit>\S+/\d+) (?P<node>\S+) (?P<digest>[0-9a-f]{12})(?P<marks>(?: [a-z]+)*)")
_AUTODETECT = re.compile(r"^\s*AutoDetect=(?P<value>\w+)\s*(?:#.*)?$", re.IGNORECASE | re.MULTILINE)
_REFUSED = "refused"
_AWAITED = "awaited"
_CLASH = "clash"
_LEFT = "left"


class GresConfError(Exception):
    """The file cannot be understood. `str()` is one line and names it."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What one compute unit said last."""

    unit: str
    node: str
    digest: str
    lines: tuple[str, ...] = ()  # without NodeName and AutoDetect
    awaited: bool = False  # the node registers only when these lines are live
    refused: bool = False  # what it published could not be used, so it has no lines
    left: bool = False  # the unit is gone, and Slurm still has its node with GPUs by these lines

    @classmethod
    def of(cls, unit: str, said: slurm_gres.NodeGres) -> "Entry":
        """Return the entry for what a unit said; its node must be named."""
        return cls(unit, said.node or "", said.digest, said.lines or (), awaited=bool(said.awaits))


@dataclasses.dataclass(frozen=True)
class Book:
    """The file: what stands around the block, and the block's entries by unit."""

    before: str
    after: str
    entries: dict[str, Entry]

    @property
    def autodetect(self) -> str:
        """What nodes without lines do, by the part of the file that is not ours: "nvidia", "nvml", ... or "off"."""
        values = [match["value"].lower() for match in _AUTODETECT.finditer(f"{self.before}\n{self.after}")]
        return values[-1] if values else "off"

    @functools.cached_property
    def clashes(self) -> dict[str, list[str]]:
        """The units that name the same node, by that node's name."""
        units: dict[str, list[str]] = {}
        for entry in self.entries.values():
            if not entry.refused and not entry.left:
                units.setdefault(entry.node, []).append(entry.unit)
        return {node: sorted(names, key=unit_key) for node, names in units.items() if len(names) > 1}

    def text(self) -> str:
        """Return the whole file."""
        if not self.entries:
            return self.before + self.after
        before = self.before if not self.before or self.before.endswith("\n") else f"{self.before}\n"
        return before + "\n".join((BEGIN, *self._rows, END)) + "\n" + self.after

    @functools.cached_property
    def digest(self) -> str:
        """A fingerprint of what slurmctld reads of the block, which is that of an empty one when there is none."""
        return hashlib.sha256("\n".join(row for row in self._rows if not row.startswith("#")).encode()).hexdigest()

    @functools.cached_property
    def _rows(self) -> list[str]:
        """The block's lines. A node that two units claim gets none: either may be the wrong machine."""
        clashing = self.clashes
        rows: list[str] = []
        for entry in sorted(self.entries.values(), key=lambda entry: unit_key(entry.unit)):
            clash = entry.node in clashing
            marks = ((_AWAITED, entry.awaited), (_REFUSED, entry.refused), (_CLASH, clash), (_LEFT, entry.left))
            rows.append(
                " ".join(("#", entry.unit, entry.node, entry.digest, *(word for word, is_set in marks if is_set)))
            )
            rows += [f"#{line}" if clash else line for line in gres.node_lines(entry.node, entry.lines)]
        return rows

    def with_entries(self, entries: collections.abc.Mapping[str, Entry]) -> "Book":
        """Return the same file with other entries."""
        return dataclasses.replace(self, entries=dict(entries))


def read(path: pathlib.Path | None = None) -> Book | None:
    """Return the file, or None when it is not there.

    Raises:
        GresConfError: its markers do not pair up.
    """
    path = path or PATH
    try:
        return parse(path.read_text())
    except FileNotFoundError:
        return None
    except (UnicodeDecodeError, GresConfError) as e:
        raise GresConfError(f"{path}: {e}") from e


def parse(text: str) -> Book:
    """Return the book in the text of a file. A block that somebody edited is read as far as it can be."""
    begins, ends = list(_BEGIN.finditer(text)), list(_END.finditer(text))
    if not begins and not ends:
        return Book(text, "", {})
    if len(begins) != 1 or len(ends) != 1 or begins[0].start() > ends[0].start():
        raise GresConfError(
            "the lines '# BEGIN slurm-gpu' and '# END slurm-gpu' do not pair up: remove them and what is between"
        )
    after = text[ends[0].end() :]
    block = text[begins[0].end() : ends[0].start()]
    return Book(text[: begins[0].start()], after.removeprefix("\n"), _entries(block.splitlines()))


def write(book: Book, path: pathlib.Path | None = None) -> bool:
    """Make the file hold the book, with the owner and mode it has, or slurm's own; return whether it changed."""
    path = (path or PATH).resolve()
    owner, mode = _OWNER, 0o644
    if path.exists():
        stat = path.stat()
        owner, mode = pwd.getpwuid(stat.st_uid).pw_name, stat.st_mode & 0o7777
    return files.ensure_file(path, book.text(), mode=mode, owner=owner)


def unit_key(unit: str) -> tuple[str, int]:
    """Return a key that sorts `app/10` behind `app/9`."""
    app, _, number = unit.rpartition("/")
    return (app, int(number) if number.isdigit() else -1)


def _entries(rows: list[str]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    header: re.Match[str] | None = None
    records: list[str] = []
    for row in [*rows, ""]:
        match = _HEADER.fullmatch(row)
        if match is None and row:
            records.append(row)
            continue
        if header is not None:
            entry = _entry(header, records)
            if entry is not None:
                entries[entry.unit] = entry
        header, records = match, []
    return entries


def _entry(header: re.Match[str], records: list[str]) -> Entry | None:
    """Return the entry, or None when its records are not those that were written: it is then asked for again."""
    node, marks = header["node"], header["marks"].split()
    records = [record.removeprefix("#").removeprefix(f"NodeName={node} ") for record in records]
    lines = tuple(record.removeprefix("AutoDetect=off ") for record in records)
    refused = _REFUSED in marks
    if not refused and slurm_gres.digest(node, lines) != header["digest"]:
        return None
    return Entry(
        header["unit"],
        node,
        header["digest"],
        () if refused else lines,
        awaited=_AWAITED in marks,
        refused=refused,
        left=_LEFT in marks,
    )
