"""The charm's block in gres.conf: a header and each node's records between two marker lines.

A header records which unit published its node, and a digest of what, so that an event about one
node reads one databag. Text outside the markers never changes. slurmutils' models would drop the
comments, and parse no `NodeName=` records.
"""

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
_UNPAIRED = "the lines '# BEGIN slurm-gpu' and '# END slurm-gpu' do not pair up: remove them and what is between"

_BEGIN = re.compile(r"^# BEGIN slurm-gpu\b.*$", re.MULTILINE)
_END = re.compile(r"^# END slurm-gpu[ \t]*$", re.MULTILINE)
_HEADER = re.compile(
    r"# (?P<unit>\S+/\d+) (?P<node>\S+) (?P<digest>[0-9a-f]{12})(?P<marks>(?: [a-z]+)*)"
)
_AUTODETECT = re.compile(r"^\s*AutoDetect=(?P<value>\w+)\s*(?:#.*)?$", re.IGNORECASE | re.MULTILINE)


class GresConfError(Exception):
    """The file cannot be read. `str()` is one line and names it."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The data that one compute unit published last."""

    unit: str
    node: str
    digest: str
    lines: tuple[str, ...] = ()  # without NodeName and AutoDetect
    awaited: bool = False  # the node registers only when these lines are live
    left: bool = (
        False  # the unit was removed, and Slurm still has its node with GPUs by these lines
    )

    @classmethod
    def of(cls, unit: str, published: slurm_gres.NodeGres) -> "Entry":
        """Return the entry for a unit's published data, which must name its node."""
        return cls(
            unit,
            published.node or "",
            published.digest,
            published.lines or (),
            awaited=bool(published.awaits),
        )


@dataclasses.dataclass(frozen=True)
class GresConf:
    """The file: the text around the block, and the block's entries by unit."""

    before: str = ""
    after: str = ""
    entries: dict[str, Entry] = dataclasses.field(default_factory=dict[str, Entry])

    @property
    def autodetect(self) -> str:
        """The detection for nodes without lines, from the rest of the file: "nvidia" or "off"."""
        values = [
            match["value"].lower() for match in _AUTODETECT.finditer(f"{self.before}\n{self.after}")
        ]
        return values[-1] if values else "off"

    @functools.cached_property
    def clashes(self) -> dict[str, list[str]]:
        """The units that name the same node, by that node's name."""
        units: dict[str, list[str]] = {}
        for entry in self.entries.values():
            if not entry.left:
                units.setdefault(entry.node, []).append(entry.unit)
        return {
            node: sorted(names, key=unit_key) for node, names in units.items() if len(names) > 1
        }

    def text(self) -> str:
        """Return the whole file."""
        if not self.entries:
            return self.before + self.after
        before = (
            self.before if not self.before or self.before.endswith("\n") else f"{self.before}\n"
        )
        return before + "\n".join((BEGIN, *self._rows, END)) + "\n" + self.after

    @functools.cached_property
    def digest(self) -> str:
        """The fingerprint of the block as slurmctld reads it.

        Without a block, it is the fingerprint of an empty one.
        """
        return hashlib.sha256(
            "\n".join(row for row in self._rows if not row.startswith("#")).encode()
        ).hexdigest()

    @functools.cached_property
    def _rows(self) -> list[str]:
        """The block's lines.

        A node that two units claim gets no lines: either may be the wrong machine.
        """
        rows: list[str] = []
        for entry in sorted(self.entries.values(), key=lambda entry: unit_key(entry.unit)):
            clash = entry.node in self.clashes
            marks = {"awaited": entry.awaited, "clash": clash, "left": entry.left}
            is_set = [mark for mark, is_so in marks.items() if is_so]
            rows.append(" ".join(["#", entry.unit, entry.node, entry.digest, *is_set]))
            prefix = "#" if clash else ""
            rows += [f"{prefix}{line}" for line in gres.node_lines(entry.node, entry.lines)]
        return rows


def read(path: pathlib.Path | None = None) -> GresConf:
    """Return the file, an empty one if it does not exist.

    Raises `GresConfError`: its markers do not pair up.
    """
    path = path or PATH
    try:
        return parse(path.read_text())
    except FileNotFoundError:
        return GresConf()
    except (UnicodeDecodeError, GresConfError) as e:
        raise GresConfError(f"{path}: {e}") from e


def parse(text: str) -> GresConf:
    """Return the file with this text.

    In an edited block, only unchanged entries count.
    """
    begins, ends = list(_BEGIN.finditer(text)), list(_END.finditer(text))
    if not begins and not ends:
        return GresConf(text)
    if len(begins) != 1 or len(ends) != 1 or begins[0].start() > ends[0].start():
        raise GresConfError(_UNPAIRED)
    before = text[: begins[0].start()]
    block = text[begins[0].end() : ends[0].start()]
    after = text[ends[0].end() :].removeprefix("\n")
    return GresConf(before, after, _entries(block.splitlines()))


def write(conf: GresConf) -> bool:
    """Write the file, and return whether it changed; an empty one is not made.

    It keeps its owner and mode, or gets slurm's.
    """
    path = PATH.resolve()
    owner, mode = _OWNER, 0o644
    if path.exists():
        stat = path.stat()
        owner, mode = pwd.getpwuid(stat.st_uid).pw_name, stat.st_mode & 0o7777
    elif not conf.text():
        return False
    return files.ensure_file(path, conf.text(), mode=mode, owner=owner)


def unit_key(unit: str) -> tuple[str, int]:
    """Return a key that sorts `app/10` behind `app/9`."""
    app, _, number = unit.rpartition("/")
    return (app, int(number) if number.isdigit() else -1)


def _entries(rows: list[str]) -> dict[str, Entry]:
    """Read the entries of a block's rows: each has a header, and ends at the next one."""
    headers: list[tuple[int, re.Match[str]]] = []
    for number, row in enumerate(rows):
        if match := _HEADER.fullmatch(row):
            headers.append((number, match))
    starts = [number for number, _ in headers]

    entries: dict[str, Entry] = {}
    for (start, header), end in zip(headers, [*starts[1:], len(rows)], strict=False):
        entry = _entry(header, rows[start + 1 : end])
        if entry is not None:
            entries[entry.unit] = entry
    return entries


def _entry(header: re.Match[str], rows: list[str]) -> Entry | None:
    """Return the entry, or None when its records were edited.

    Its unit is then read again.
    """
    unit, node, digest, marks = (
        header["unit"],
        header["node"],
        header["digest"],
        header["marks"].split(),
    )
    records = [row.removeprefix("#").removeprefix(f"NodeName={node} ") for row in rows if row]
    lines = tuple(record.removeprefix("AutoDetect=off ") for record in records)
    if slurm_gres.digest(node, lines) != digest:
        return None
    return Entry(unit, node, digest, lines, awaited="awaited" in marks, left="left" in marks)
