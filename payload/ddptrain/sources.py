"""Where text comes from: files and folders to items, in an order that depends on the files only.

Big uncompressed files are cut into ranges: of bytes at line ends, or of row groups.
"""

import collections.abc
import dataclasses
import itertools
import json
import os
import pathlib
import re
import sysconfig
import typing

from ddptrain import archives, errors, records

_TEXT = ".txt .text .md .rst .py .tex .c .h .html"
KINDS = {
    **{**dict.fromkeys(_TEXT.split(), "text"), ".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".tar": "tar"},
    **{".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".zip": "zip"},
}
_UNPACKED = {"parquet", "arrow", "zip"}  # they are not read when something compressed them
_RECORDS = {"lines", "json", "parquet", "arrow"}
_PLAIN = {".txt", ".text", ".tar", ".zip", ""}  # of these any word of a name may name a split
READS = "text files, .jsonl, .json and .tar, each also with .gz, .xz, .bz2 or .zst, .parquet, .arrow and .zip"
STDLIB = "python-stdlib"
_FIELDS = {"messages", "conversations", "prompt", "instruction", "text"}
_SPLITS = {
    **dict.fromkeys("val valid validation dev eval evaluation".split(), "val"),
    **dict.fromkeys("test testing holdout heldout".split(), "test"),
    **dict.fromkeys("train training".split(), "train"),
}
# Beside records: what describes them on Hugging Face's hub, and what `save_to_disk`, `map` and `filter` write
_CARDS = re.compile(
    r"(readme|licen[cs]e|citation|notice)([^a-z].*)?|(dataset_infos?|dataset_dict|state)\.json|[^/]+\.py|cache-.*\.arrow"
)
_CARD, OTHER_SPLIT, _GIT, _HIDDEN_FILE = "dataset card", "other split", ".git", "hidden file"
_EXPECTED = {_CARD, OTHER_SPLIT, _GIT, _HIDDEN_FILE}  # nobody misses them

ReadFile = tuple[pathlib.Path, str, str]  # a file, its kind, its split


class Unread(dict[str, list[int]]):
    """What was not read: numbers of files and bytes by suffix, or by the reason."""

    def add(self, what: str, size_bytes: int, count: int = 1) -> None:
        """Count files."""
        self.merge({what: (count, size_bytes)})

    def merge(self, other: collections.abc.Mapping[str, collections.abc.Sequence[int]]) -> None:
        """Count what another has."""
        for what, (count, size_bytes) in other.items():
            files, total = self.get(what, (0, 0))
            self[what] = [files + count, total + size_bytes]

    @property
    def missed_bytes(self) -> int:
        """Return the bytes of what might have been text."""
        return sum(total for what, (_, total) in self.items() if what not in _EXPECTED)

    def __str__(self) -> str:
        most_first = sorted(self.items(), key=lambda one: (-one[1][1], one[0]))
        return ", ".join(f"{what} {count} ({total} bytes)" for what, (count, total) in most_first)


@dataclasses.dataclass(frozen=True)
class Item:
    """A file, or the bytes [begin, end) of one."""

    path: pathlib.Path
    kind: str  # a value of KINDS
    size_bytes: int
    mtime_ns: int
    begin: int = 0
    end: int | None = None  # None: to the end of the file
    validation: bool = False  # the file or a folder of it is named val, validation, dev ...
    errors: str = "strict"  # or replace: how to treat bytes that are not text

    @property
    def num_bytes(self) -> int:
        """Return how many bytes of the file belong to the item."""
        return self.stop - self.begin

    @property
    def stop(self) -> int:
        """Return the end as a number."""
        return self.size_bytes if self.end is None else self.end

    def share(self, count: int) -> tuple[int, int]:
        """Return the first and the last of `count` entries that the bytes stand for, the last excluded."""
        return count * self.begin // max(1, self.size_bytes), count * self.stop // max(1, self.size_bytes)


def find(
    specs: collections.abc.Sequence[str], part_bytes: int, encoding_errors: str, output: pathlib.Path
) -> tuple[list[Item], Unread]:
    """Return the items of `python-stdlib`, folders and files, sorted, and what is left out in the folders.

    `output` may lie in one of them, and is none. Raises UserError when there are no items, or most is left out.
    """
    items: list[Item] = []
    unread = Unread()
    for spec in specs:
        path, left = pathlib.Path(spec), Unread()
        if spec == STDLIB:  # some of its tests are deliberately in no encoding
            root = pathlib.Path(sysconfig.get_paths()["stdlib"])
            skip = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
            found = [(p, "text", "") for p in sorted(root.rglob("*.py")) if not skip & set(p.relative_to(root).parts)]
        elif path.is_dir():
            found = _below(path, left, output)
        elif path.is_file():
            found = [_named(path)]
        else:
            raise errors.UserError(f"{spec}: no such file or folder; give one, or {STDLIB}")
        how = "replace" if spec == STDLIB else encoding_errors
        inside = [part for p, kind, split in found for part in _cut(p, kind, part_bytes, how=how, split=split)]
        if left.missed_bytes > sum(item.num_bytes for item in inside):
            what = "most of it is not read" if inside else "no text found"
            remedy = f"give the files or folders of text; I read {READS}"
            raise errors.UserError(f"{spec}: {what}: {left}; {remedy}")
        items += inside
        unread.merge(left)
    if not items:
        left_out = f"; not read: {unread}" if unread else ""
        raise errors.UserError(f"{' '.join(specs)}: no text found{left_out}; I read {READS}")
    return items, unread


def _named(path: pathlib.Path) -> ReadFile:
    """Return a file that was asked for; one without a suffix is text. Raises UserError if its suffix is not known."""
    kind = kind_of(path.name)
    if kind is None and archives.split_name(path.name)[1]:
        what = f"{path}: {suffix_of(path.name)} is not read"
        raise errors.UserError(f"{what}; convert it, or name it .txt if it is plain text; I read {READS}")
    return path, kind or "text", split_of(pathlib.PurePath(path.name), kind)


def _below(root: pathlib.Path, unread: Unread, output: pathlib.Path) -> list[ReadFile]:
    """Return the files in all folders below one that are read, and count the others."""
    found: list[ReadFile] = []
    files = _files(root, unread, output.resolve())
    targets = {path.resolve() for path in files if path.is_symlink()}  # the hub's cache: links to blobs without names
    for path in sorted(files, key=lambda path: _is_card(path, root)):  # these last
        relative, kind = path.relative_to(root), kind_of(path.name)
        is_file = path.is_file()
        split = split_of(relative, kind)
        why = hidden(relative) or (OTHER_SPLIT if split == "test" else "")
        if not why and _is_card(path, root) and any(kind in _RECORDS for _, kind, _ in found):
            why = _CARD
        if not why and (kind is None or not is_file or (kind == "json" and not _has_records(path))):
            why = suffix_of(path.name)
        if kind and not why:
            found.append((path, kind, split))
        elif not (targets and path.resolve() in targets):
            unread.add(why, path.stat().st_size if is_file else 0)
    return sorted(found)


def _is_card(path: pathlib.Path, root: pathlib.Path) -> bool:
    is_code_of_its_own = path.suffix == ".py" and path.parent != root  # a set's loader lies beside its README
    return not is_code_of_its_own and _CARDS.fullmatch(path.name.lower()) is not None


def _files(root: pathlib.Path, unread: Unread, output: pathlib.Path) -> list[pathlib.Path]:
    """Return the files in all folders below one, and count those in linked folders. Raises OSError."""

    def refuse(e: OSError) -> typing.NoReturn:
        raise e

    found: list[pathlib.Path] = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name != output.name or pathlib.Path(folder, name).resolve() != output]
        found += [pathlib.Path(folder, name) for name in names]
        for link in (pathlib.Path(folder, name) for name in folders):
            if link.is_symlink() and not root.resolve().is_relative_to(link.resolve()):  # that would be a loop
                inside = [path for path in link.rglob("*") if path.is_file()]
                unread.add("linked folder", sum(path.stat().st_size for path in inside), len(inside))
    return sorted(found)


def _has_records(path: pathlib.Path) -> bool:
    """Return whether a JSON file is, or may be, a set of records and not a configuration."""
    try:
        with archives.opened(path) as file:
            head = archives.decoded(file.read(1 << 20), path, "replace")
        value: object = json.JSONDecoder().raw_decode(head.lstrip("[ \t\r\n"))[0]
    except archives.DAMAGE:
        return True  # reading it whole will find out
    return isinstance(value, dict) and not _FIELDS.isdisjoint(typing.cast(records.Record, value))


def _cut(path: pathlib.Path, kind: str, part_bytes: int, *, how: str, split: str = "") -> list[Item]:
    about = path.stat()
    whole = Item(path, kind, about.st_size, about.st_mtime_ns, validation=split == "val", errors=how)
    can_cut = kind not in ("tar", "zip", "json") and not archives.split_name(path.name)[2]
    if can_cut and kind in ("text", "lines") and about.st_size > 2 * part_bytes:
        with path.open("rb") as file:
            head, spaces = file.read(64), b"\xef\xbb\xbf \t\r\n"
        can_cut = archives.encoding_of(head)[0] == "utf-8" and not (
            kind == "lines" and head.lstrip(spaces).startswith(b"[")
        )
    if not can_cut or about.st_size <= 2 * part_bytes:
        return [whole]
    cuts = [*range(0, about.st_size - part_bytes // 2, part_bytes), about.st_size]
    return [dataclasses.replace(whole, begin=b, end=e) for b, e in itertools.pairwise(cuts)]


def kind_of(name: str) -> str | None:
    """Return the kind of a file that is read, by its name."""
    _, suffix, packing = archives.split_name(pathlib.PurePath(name).name)
    kind = KINDS.get(suffix)
    return None if packing and kind in _UNPACKED else kind


def suffix_of(name: str) -> str:
    """Return a file's suffix with that of its compression."""
    return "".join(archives.split_name(name)[1:]) or "no suffix"


def hidden(path: pathlib.PurePath) -> str:
    """Return how a file is hidden, itself (macOS's `._name`) or by a folder, or nothing."""
    folders = [part for part in path.parts[:-1] if part.startswith(".") and part != ".."]
    if folders:
        return _GIT if _GIT in folders else "hidden folder"
    return _HIDDEN_FILE if path.name.startswith(".") else ""


def split_of(path: pathlib.PurePath, kind: str | None) -> str:
    """Return train, val or test where the file or a folder of it is named for that, otherwise nothing.

    The last word that says so counts, as in `train-eval`; of a file with code or markup only the name's last word.
    """
    name, suffix, _ = archives.split_name(path.name.lower())
    words = _words(name)
    parts = [words if kind in _RECORDS or suffix in _PLAIN else words[-1:], *map(_words, reversed(path.parts[:-1]))]
    return next((_SPLITS[word] for part in parts for word in reversed(part) if word in _SPLITS), "")


def _words(name: str) -> list[str]:
    """Return the words of a name; `testset` is `test`."""
    words = re.split(r"[-._= 0-9]+", name.lower())
    return [word.removesuffix("set") for word in words if word not in ("", "of", "set")]
