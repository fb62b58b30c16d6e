"""The unread data, by one rule: each file, member or record without text counts under its reason.

A folder or an archive is refused if most of it is not read.
"""

import collections.abc
import pathlib

from ddptrain.data import names
from ddptrain.ground import errors

CARD = "dataset card"
GIT = ".git"
HIDDEN_FILE = "hidden file"
HIDDEN_FOLDER = "hidden folder"
LINK = "link"
LINKED_FOLDER = "linked folder"
NO_TEXT = "record without text"
OTHER_SPLIT = "other split"

_BESIDE = " beside texts"
_NOT_MISSED = frozenset({CARD, GIT, HIDDEN_FILE, OTHER_SPLIT})


class Unread(dict[str, list[int]]):
    """The numbers of files and of bytes that were not read, by suffix or reason."""

    def add(self, reason: str, size_bytes: int, count: int = 1) -> None:
        """Count files."""
        files, total = self.get(reason, (0, 0))
        self[reason] = [files + count, total + size_bytes]

    def merge(self, other: collections.abc.Mapping[str, collections.abc.Sequence[int]]) -> None:
        """Add the numbers of another."""
        for reason, (count, size_bytes) in other.items():
            self.add(reason, size_bytes, count)

    @property
    def missed_bytes(self) -> int:
        """Return the bytes of files that might have been text."""
        missed = 0
        for reason, (_, size_bytes) in self.items():
            if reason not in _NOT_MISSED and not reason.endswith(_BESIDE):
                missed += size_bytes
        return missed

    def __str__(self) -> str:
        most_first = sorted(self.items(), key=lambda entry: (-entry[1][1], entry[0]))
        listed: list[str] = []
        for reason, (files, total) in most_first:
            size = f" ({total} bytes)" if total else ""
            listed.append(f"{reason} {files}{size}")
        return ", ".join(listed)


class Tally:
    """The files of one folder or archive that are read, and those that are not.

    A file is not missed if it describes the others, or has the name of a text except for the
    suffix, such as WebDataset's `KEY.json` and `KEY.jpg` for `KEY.txt`.
    """

    def __init__(self) -> None:
        self.read_bytes = 0
        self._texts: set[str] = set()
        self._unread: list[tuple[pathlib.PurePath, int]] = []
        self._reasons = Unread()

    def read(self, path: pathlib.PurePath, size_bytes: int) -> None:
        """Count a file that is read."""
        self.read_bytes += size_bytes
        if names.parse(path.name).kind == "text":
            self._texts.add(_key(path))

    def leave(self, path: pathlib.PurePath, size_bytes: int, reason: str = "") -> None:
        """Count a file that is not read; without a reason its kind is the reason."""
        if reason:
            self._reasons.add(reason, size_bytes)
        else:
            self._unread.append((path, size_bytes))

    def result(self, where: object, remedy: str) -> Unread:
        """List the members that are not read. Raises UserError if that is most of `where`."""
        unread = Unread(self._reasons)
        for path, size_bytes in self._unread:
            unread.add(self._reason(path), size_bytes)

        if unread.missed_bytes > self.read_bytes:
            what = "most of it is not read" if self.read_bytes else "no text found"
            raise errors.UserError(f"{where}: {what}: {unread}; {remedy}; I read {names.READS}")
        return unread

    def _reason(self, path: pathlib.PurePath) -> str:
        if names.is_metadata(path):
            return CARD
        suffixes = names.parse(path.name).suffixes
        return suffixes + _BESIDE if _key(path) in self._texts else suffixes


def _key(path: pathlib.PurePath) -> str:
    return f"{path.parent}/{names.parse(path.name).stem}"


def hidden(path: pathlib.PurePath) -> str:
    """Return how a file is hidden, by its own name (macOS's `._name`) or by a folder, or ""."""
    folders = [part for part in path.parts[:-1] if part.startswith(".") and part != ".."]
    if GIT in folders:
        return GIT
    if folders:
        return HIDDEN_FOLDER
    return HIDDEN_FILE if path.name.startswith(".") else ""
