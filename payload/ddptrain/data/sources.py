"""The sources of text: files and folders become items, in an order of the files alone."""

import collections.abc
import dataclasses
import itertools
import os
import pathlib
import sysconfig
import typing

from ddptrain.data import encodings, jsonlines, members, names, tables, unread
from ddptrain.ground import errors

STDLIB = "python-stdlib"
Specs = collections.abc.Sequence[str]

_NOT_OF_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})


@dataclasses.dataclass(frozen=True)
class Item:
    """A file, or the bytes [begin, end) of one."""

    path: pathlib.Path
    kind: str  # a value of names.KINDS
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
        """Return which of `count` entries the bytes stand for: the first, and the last excluded."""
        size = max(1, self.size_bytes)
        return count * self.begin // size, count * self.stop // size


def find(specs: Specs, how: str, output: pathlib.Path) -> tuple[list[Item], unread.Unread]:
    """Return the files of `python-stdlib`, folders and files, and the folders' unread files.

    Skips `output` if it is inside one of them. `how` is strict or replace. Raises UserError if
    there is no text, or most of it is not read.
    """
    items: list[Item] = []
    counts = unread.Unread()
    for spec in specs:
        path = pathlib.Path(spec)
        if spec == STDLIB:
            items += _standard_library()
        elif path.is_dir():
            found, left = _folder(path, how, output.resolve())
            items += found
            counts.merge(left)
        elif path.is_file():
            items.append(_file(path, how))
        else:
            raise errors.UserError(f"{spec}: no such file or folder; give one, or {STDLIB}")

    if not items:
        left_out = f"; not read: {counts}" if counts else ""
        raise errors.UserError(f"{' '.join(specs)}: no text found{left_out}; I read {names.READS}")
    return items, counts


def cut(item: Item, part_bytes: int) -> list[Item]:
    """Return the parts of a big file that can be read from the middle: lines, or row groups."""
    if item.size_bytes <= 2 * part_bytes or not _can_be_cut(item):
        return [item]
    ends = [*range(0, item.size_bytes - part_bytes // 2, part_bytes), item.size_bytes]
    return [dataclasses.replace(item, begin=b, end=e) for b, e in itertools.pairwise(ends)]


def _can_be_cut(item: Item) -> bool:
    if item.kind in names.TABLES:
        return True
    if item.kind not in ("text", "lines") or names.parse(item.path.name).compression:
        return False

    with item.path.open("rb") as file:
        head = file.read(64)
    encoding, mark = encodings.of(head)
    is_array = item.kind == "lines" and head[len(mark) :].lstrip().startswith(b"[")
    return encoding == "utf-8" and not is_array


def _item(path: pathlib.Path, how: str, split: str = "") -> Item:
    kind = names.parse(path.name).kind or "text"
    about = path.stat()
    is_validation = split == "val"
    return Item(path, kind, about.st_size, about.st_mtime_ns, validation=is_validation, errors=how)


def _standard_library() -> list[Item]:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    items: list[Item] = []
    for path in sorted(root.rglob("*.py")):
        if _NOT_OF_STDLIB.isdisjoint(path.relative_to(root).parts):
            items.append(_item(path, "replace"))  # tests among them are in no encoding
    return items


def _file(path: pathlib.Path, how: str) -> Item:
    """Return a file that was asked for; without a suffix it is text. Raises UserError."""
    name = names.parse(path.name)
    if name.kind is None and name.suffix:
        what = f"{path}: {name.suffixes} is not read"
        remedy = "convert it, or name it .txt if it is plain text"
        raise errors.UserError(f"{what}; {remedy}; I read {names.READS}")
    return _item(path, how, names.split_of(pathlib.PurePath(path.name)))


def _folder(root: pathlib.Path, how: str, output: pathlib.Path) -> tuple[list[Item], unread.Unread]:
    """List the members below a folder that are read, and those that are not. Raises UserError."""
    tally = unread.Tally()
    paths = _walk(root, output, tally)
    linked = {path.resolve() for path in paths if path.is_symlink()}  # as in the hub's cache
    cards_last = sorted(paths, key=lambda path: names.is_card(path.relative_to(root)))

    items: list[Item] = []
    has_records = False
    for path in cards_last:
        relative = path.relative_to(root)
        size_bytes = path.stat().st_size if path.is_file() else 0
        reason = _reason(relative, has_records=has_records)
        if not reason and _is_read(path):
            item = _item(path, how, names.split_of(relative))
            items.append(item)
            has_records |= item.kind in names.RECORDS
            tally.read(relative, size_bytes)
        elif path.is_symlink() or not (linked and path.resolve() in linked):
            is_table = names.parse(path.name).kind in names.TABLES
            tally.leave(relative, size_bytes, reason or (unread.CARD if is_table else ""))

    items.sort(key=lambda item: item.path)
    return items, tally.result(root, "give the files or folders of text")


def _walk(root: pathlib.Path, output: pathlib.Path, tally: unread.Tally) -> list[pathlib.Path]:
    """Return the files below a folder, sorted, and count those in linked folders.

    Raises OSError.
    """

    def refuse(e: OSError) -> typing.NoReturn:
        raise e

    found: list[pathlib.Path] = []
    for name, folders, files in os.walk(root, onerror=refuse):
        folder = pathlib.Path(name)
        folders[:] = [one for one in folders if not _is_same(folder / one, output)]
        found += [folder / one for one in files]
        for one in folders:
            if (folder / one).is_symlink():
                _count_linked(folder / one, root, tally)
    return sorted(found)


def _is_same(path: pathlib.Path, resolved: pathlib.Path) -> bool:
    return path.name == resolved.name and path.resolve() == resolved


def _count_linked(folder: pathlib.Path, root: pathlib.Path, tally: unread.Tally) -> None:
    if root.resolve().is_relative_to(folder.resolve()):
        return  # it leads back to where we come from
    for path in folder.rglob("*"):
        if path.is_file():
            tally.leave(path.relative_to(root), path.stat().st_size, unread.LINKED_FOLDER)


def _reason(relative: pathlib.PurePath, *, has_records: bool) -> str:
    """Return why a file of a folder is not read, regardless of its content, or ""."""
    if how := unread.hidden(relative):
        return how
    if names.split_of(relative) == "test":
        return unread.OTHER_SPLIT
    if names.is_card(relative) and has_records:
        return unread.CARD
    return ""


def _is_read(path: pathlib.Path) -> bool:
    kind = names.parse(path.name).kind
    if kind is None or not path.is_file():
        return False
    if kind in names.TABLES:
        return not _is_of_an_archive(path) or _may_have_texts(path)
    is_doubtful = kind == "json" or (kind == "lines" and names.is_metadata(path))
    return not is_doubtful or _may_have_records(path)


def _is_of_an_archive(path: pathlib.Path) -> bool:
    """Return whether a table describes others by its name, like img2dataset's for `KEY.tar`."""
    return names.is_metadata(path) or path.with_suffix(".tar").is_file()


def _may_have_texts(path: pathlib.Path) -> bool:
    try:
        return tables.has_texts(path)
    except members.DAMAGE:
        return True  # reading it whole will find out


def _may_have_records(path: pathlib.Path) -> bool:
    try:
        with members.opened(path) as file:
            return jsonlines.has_records(file, path)
    except members.DAMAGE:
        return True  # reading it whole will find out
