"""Where text comes from: files and folders to items, in an order that depends on the files only.

Big uncompressed files are cut into ranges: of bytes at line ends, of a database's entries, of row groups.
"""

import collections.abc
import dataclasses
import itertools
import json
import os
import pathlib
import sysconfig
import typing

from ddptrain import archives, errors, kinds, reading, records

# Beside tables: what Hugging Face's hub and `save_to_disk` write to describe them
_CARDS = {"readme.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_DATABASE = "data.mdb"  # in its folder
_HEAD_BYTES = 1 << 20
_FIELDS = {"messages", "conversations", "prompt", "instruction", "text"}

Found = tuple[pathlib.Path, str, str]  # a file, its kind, its split


def find(
    specs: collections.abc.Sequence[str], part_bytes: int, encoding_errors: str = "strict"
) -> tuple[list[reading.Item], kinds.Unread]:
    """Return the items of `python-stdlib`, folders and files, sorted, and what is left out in the folders.

    Raises UserError when there are none, or most is left out.
    """
    items: list[reading.Item] = []
    unread = kinds.Unread()
    for spec in specs:
        path, left = pathlib.Path(spec), kinds.Unread()
        path = path / _DATABASE if (path / _DATABASE).is_file() else path
        if spec == kinds.STDLIB:  # some of its tests are deliberately in no encoding
            root = pathlib.Path(sysconfig.get_paths()["stdlib"])
            skip = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
            found = [(p, "text", "") for p in sorted(root.rglob("*.py")) if not skip & set(p.relative_to(root).parts)]
        elif path.is_dir():
            found = _below(path, left)
        elif path.is_file():
            found = [_named(path)]
        else:
            raise errors.UserError(f"--source {spec}: no such file or folder; give one, or {kinds.STDLIB}")
        how = "replace" if spec == kinds.STDLIB else encoding_errors
        inside = [part for p, kind, split in found for part in _cut(p, kind, part_bytes, how=how, split=split)]
        if left.missed_bytes > sum(item.num_bytes for item in inside):
            what = "most of it is not read" if inside else "no text found"
            remedy = f"give the files or folders of text; I read {kinds.READS}"
            raise errors.UserError(f"--source {spec}: {what}: {left}; {remedy}")
        items += inside
        unread.merge(left)
    if not items:
        left_out = f"; not read: {unread}" if unread else ""
        raise errors.UserError(f"--source {' '.join(specs)}: no text found{left_out}; I read {kinds.READS}")
    return items, unread


def _named(path: pathlib.Path) -> Found:
    """Return a file that was asked for; one without a suffix is text. Raises UserError if its suffix is not known."""
    kind = kinds.kind_of(path.name)
    if kind is None and pathlib.PurePath(archives.split_name(path.name)[0]).suffix:
        what = f"--source {path}: {kinds.suffix_of(path.name)} is not read"
        raise errors.UserError(f"{what}; convert it, or name it .txt if it is plain text; I read {kinds.READS}")
    named = path.parent if path.name == _DATABASE else path
    return path, kind or "text", kinds.split_of(pathlib.PurePath(named.name), kind)


def _below(root: pathlib.Path, unread: kinds.Unread) -> list[Found]:
    """Return the files in all folders below one that are read, and count the others."""
    found: list[Found] = []
    files = _files(root, unread)
    targets = {path.resolve() for path in files if path.is_symlink()}  # the hub's cache: links to blobs without names
    for path in files:
        relative, kind = path.relative_to(root), kinds.kind_of(path.name)
        is_file = path.is_file()
        split = kinds.split_of(relative.parent if path.name == _DATABASE else relative, kind)
        if hidden := kinds.hidden(relative):
            why = hidden
        elif kind is None or not is_file or (kind == "json" and not _has_records(path)):
            why = kinds.suffix_of(path.name)
        elif split != "test":
            found.append((path, kind, split))
            continue
        else:
            why = kinds.OTHER_SPLIT
        if not (targets and path.resolve() in targets):
            unread.add(why, path.stat().st_size if is_file else 0)
    if kinds.RECORDS.isdisjoint(kind for _, kind, _ in found):
        return found
    for path in [path for path, _, _ in found if path.name.lower() in _CARDS]:
        unread.add(kinds.CARD, path.stat().st_size)
    return [one for one in found if one[0].name.lower() not in _CARDS]


def _files(root: pathlib.Path, unread: kinds.Unread) -> list[pathlib.Path]:
    """Return the files in all folders below one, and count those in linked folders.

    Raises OSError where a folder cannot be read: its text would be missing.
    """

    def refuse(e: OSError) -> typing.NoReturn:
        raise e

    found: list[pathlib.Path] = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        found += [pathlib.Path(folder, name) for name in names]
        for link in (path for path in (pathlib.Path(folder, name) for name in folders) if path.is_symlink()):
            if root.resolve().is_relative_to(link.resolve()):  # a loop
                continue
            inside = [pathlib.Path(top, name) for top, _, names in os.walk(link) for name in names]
            unread.add("linked folder", sum(path.stat().st_size for path in inside if path.is_file()), len(inside))
    return sorted(found)


def _has_records(path: pathlib.Path) -> bool:
    """Return whether a JSON file is, or may be, a set of records and not a configuration."""
    try:
        with archives.opened(path) as file:
            head = reading.as_utf8(file, str(path), "replace").read(_HEAD_BYTES).decode("utf-8", "replace")
        value: object = json.JSONDecoder().raw_decode(head.lstrip("[ \t\r\n"))[0]
    except (*archives.DAMAGE, errors.UserError):
        return True  # reading it whole will find out
    return isinstance(value, dict) and not _FIELDS.isdisjoint(typing.cast(records.Record, value))


def _cut(path: pathlib.Path, kind: str, part_bytes: int, *, how: str, split: str = "") -> list[reading.Item]:
    about = path.stat()
    whole = reading.Item(path, kind, about.st_size, about.st_mtime_ns, validation=split == "val", errors=how)
    is_packed = kind in ("tar", "zip") or bool(archives.split_name(path.name)[1])
    if is_packed or about.st_size <= 2 * part_bytes or not _has_lines(path, kind):
        return [whole]
    cuts = [*range(0, about.st_size - part_bytes // 2, part_bytes), about.st_size]
    return [dataclasses.replace(whole, begin=b, end=e) for b, e in itertools.pairwise(cuts)]


def _has_lines(path: pathlib.Path, kind: str) -> bool:
    """Return whether a file may be cut at line ends, if it has any."""
    if kind not in ("text", "lines", "json"):
        return True
    with path.open("rb") as file:
        head = file.readline(_HEAD_BYTES)
    encoding, mark = reading.encoding_of(head)
    is_array = kind == "lines" and head[len(mark) :].lstrip().startswith(b"[")
    return encoding == "utf-8" and not is_array and (kind != "json" or reading.is_json(head[len(mark) :]))
