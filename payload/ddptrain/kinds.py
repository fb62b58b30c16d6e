"""What a file is by its name, and a count of what is not read."""

import collections.abc
import pathlib
import re

from ddptrain import archives

TEXT = {".txt", ".text", ".md", ".rst", ".py", ".tex", ".c", ".h", ".html"}
LINES = {".jsonl", ".ndjson"}
DATABASES = {".mdb", ".lmdb"}
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
KINDS = {
    **dict.fromkeys(TEXT, "text"),
    **dict.fromkeys(LINES, "lines"),
    **{".json": "json", ".tar": "tar"},
    **{**dict.fromkeys(DATABASES, "lmdb"), **TABLES, ".zip": "zip"},
}
_UNPACKED = {"lmdb", "parquet", "arrow", "zip"}  # they are not read when something compressed them
RECORDS = {"lines", "json", "parquet", "arrow"}
READS = "text files, .jsonl, .json and .tar, each also with .gz, .xz, .bz2 or .zst, .parquet, .arrow, .zip and LMDB"
STDLIB = "python-stdlib"
_SPLITS = dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation"), "val")
_SPLITS |= {**dict.fromkeys(("test", "testing"), "test"), **dict.fromkeys(("train", "training"), "train")}
CARD, OTHER_SPLIT = "dataset card", "other split"
_GIT, _HIDDEN_FILE = ".git", "hidden file"
_EXPECTED = {CARD, OTHER_SPLIT, _GIT, _HIDDEN_FILE}  # nobody misses them


class Unread(dict[str, list[int]]):
    """What was not read: numbers of files and bytes by suffix, or by the reason."""

    def add(self, what: str, size_bytes: int, count: int = 1) -> None:
        """Count files."""
        files, total = self.get(what, (0, 0))
        self[what] = [files + count, total + size_bytes]

    def merge(self, other: collections.abc.Mapping[str, collections.abc.Sequence[int]]) -> None:
        """Count what another has."""
        for what, (count, size_bytes) in other.items():
            self.add(what, size_bytes, count)

    @property
    def missed_bytes(self) -> int:
        """Return the bytes of what might have been text."""
        return sum(total for what, (_, total) in self.items() if what not in _EXPECTED)

    def __str__(self) -> str:
        most_first = sorted(self.items(), key=lambda one: (-one[1][1], one[0]))
        return ", ".join(f"{what} {count} ({total} bytes)" for what, (count, total) in most_first)


def kind_of(name: str) -> str | None:
    """Return the kind of a file that is read, by its name."""
    bare, packing = archives.split_name(name)
    kind = KINDS.get(pathlib.PurePath(bare).suffix.lower())
    return None if packing and kind in _UNPACKED else kind


def suffix_of(name: str) -> str:
    """Return a file's suffix with that of its compression."""
    bare, packing = archives.split_name(name)
    return pathlib.PurePath(bare).suffix.lower() + packing or "no suffix"


def hidden(path: pathlib.PurePath) -> str:
    """Return how a file is hidden, itself (macOS's `._name`, LMDB's lock) or by a folder, or nothing."""
    folders = [part for part in path.parts[:-1] if part.startswith(".")]
    if folders:
        return _GIT if _GIT in folders else "hidden folder"
    return _HIDDEN_FILE if path.name.startswith(".") or path.name == "lock.mdb" else ""


def split_of(path: pathlib.PurePath, kind: str | None) -> str:
    """Return train, val or test where the file or a folder of it is named for that, otherwise nothing.

    In the name of a file of records any word counts, as in Hugging Face's datasets; in another the last one.
    """
    bare = path.name
    while (shorter := archives.split_name(bare)[0]) != bare or KINDS.get(pathlib.PurePath(bare).suffix.lower()):
        bare = shorter if shorter != bare else pathlib.PurePath(bare).stem
    words = [word for word in re.split(r"[-._ 0-9]+", bare.lower()) if word not in ("", "of")]
    named = [_SPLITS[word] for word in (words if kind in RECORDS else words[-1:]) if word in _SPLITS]
    if named:
        return "train" if "train" in named else named[0]
    return next((_SPLITS[part.lower()] for part in reversed(path.parts[:-1]) if part.lower() in _SPLITS), "")
