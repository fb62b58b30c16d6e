"""Where text comes from: documents out of files, in an order that depends on the files only.

Plain text (also compressed), JSON lines (`text`, `prompt` + `completion`, or `messages`), tar archives (WebDataset
samples `key.txt`, `key.json`, and OpenWebText's archives of archives), and LMDB databases whose values are text or
JSON. Big uncompressed files are cut into ranges: of bytes at line ends, of a database's entries.
"""

import bz2
import collections.abc
import contextlib
import dataclasses
import gzip
import importlib
import io
import itertools
import json
import lzma
import os
import pathlib
import sysconfig
import tarfile
import typing

from ddptrain import errors

TEXT = {".txt", ".text", ".md", ".rst", ".py", ".tex", ".c", ".h", ".html"}
LINES = {".jsonl", ".ndjson"}
DATABASES = {".mdb", ".lmdb"}
PACKED: dict[str, typing.Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
READS = "text files, .jsonl, .tar, each also with .gz, .xz or .bz2, and LMDB databases"
STDLIB = "python-stdlib"
_PIECE_CHARS = 32 << 10


@dataclasses.dataclass(frozen=True)
class Segment:
    """Text of a document; `learned` is false for what a model reads but need not produce (a prompt)."""

    text: str
    learned: bool = True


Document = tuple[Segment, ...]  # never empty


@dataclasses.dataclass(frozen=True)
class Item:
    """A file, or the bytes [begin, end) of one."""

    path: pathlib.Path
    kind: str  # text, lines, tar or lmdb
    size_bytes: int
    mtime_ns: int
    begin: int = 0
    end: int | None = None  # None: to the end of the file
    validation: bool = False  # the file is named val.* or validation.*

    @property
    def num_bytes(self) -> int:
        """Return how many bytes of the file belong to the item."""
        return (self.size_bytes if self.end is None else self.end) - self.begin


def find(specs: collections.abc.Sequence[str], part_bytes: int) -> list[Item]:
    """Return the items of `python-stdlib`, folders and files, sorted. Raises UserError when there are none."""
    items: list[Item] = []
    for spec in specs:
        if spec == STDLIB:
            root = pathlib.Path(sysconfig.get_paths()["stdlib"])
            skip = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
            found = [p for p in sorted(root.rglob("*.py")) if not skip & set(p.relative_to(root).parts)]
        else:
            path = pathlib.Path(spec)
            if path.is_dir():
                found = [p for p in _files(path) if p.is_file() and _kind(p) and not _hidden(p, path)]
            elif path.is_file():
                found = [path]
            else:
                raise errors.UserError(f"--source {spec}: no such file or folder; give one, or {STDLIB}")
        for path in found:
            items += _cut(path, part_bytes)
    if not items:
        raise errors.UserError(f"--source {' '.join(specs)}: no text found; I read {READS}")
    return items


def documents(item: Item) -> collections.abc.Iterator[Document]:
    """Yield the documents of an item. Raises UserError naming the file (and the line) that cannot be read."""
    try:
        if item.kind == "text":
            yield from _texts(_read_range(item))
        elif item.kind == "lines":
            yield from _json_lines(item)
        elif item.kind == "lmdb":
            yield from _database(item)
        else:
            yield from _tar(item)
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as e:
        raise errors.UserError(f"{item.path} cannot be read: {e}; repair or remove the file") from e


def pieces(document: Document) -> collections.abc.Iterator[Document]:
    """Yield a long plain text in pieces of some 32 Ki characters cut at line ends, anything else whole.

    They are what is assigned to training or validation, so that a book is not wholly one or the other.
    """
    first = next(iter(document))
    if len(document) > 1 or len(first.text) <= 2 * _PIECE_CHARS:
        yield document
        return
    text, at = first.text, 0
    while at < len(text):
        cut = text.find("\n", at + _PIECE_CHARS)
        end = len(text) if cut < 0 or len(text) - cut < _PIECE_CHARS // 2 else cut + 1
        yield (Segment(text[at:end]),)
        at = end


def from_object(value: object, where: str) -> Document:
    """Return the document in one JSON object, in any of the three shapes. Raises UserError with `where`."""
    if isinstance(value, dict):
        record = typing.cast(dict[str, typing.Any], value)
        match record:
            case {"messages": [*messages]}:
                return tuple(segment for message in messages for segment in _message(message, where))
            case {"prompt": str(prompt), "completion": str(completion)}:
                return (Segment(prompt, learned=False), Segment(completion))
            case {"text": str(text)}:
                return (Segment(text),)
            case _:
                pass
    raise errors.UserError(
        f'{where}: expected an object with "text", with "prompt" and "completion", or with "messages"'
    )


def _message(message: object, where: str) -> tuple[Segment, Segment]:
    match message:
        case {"role": str(role), "content": str(content)}:
            return Segment(f"<{role}>\n", learned=False), Segment(f"{content}\n", learned=role == "assistant")
        case _:
            raise errors.UserError(f'{where}: each of "messages" needs "role" and "content" as text')


def _files(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the files in all folders below one. Raises OSError where one cannot be read: its text would be missing."""

    def refuse(e: OSError) -> typing.NoReturn:
        raise e

    return sorted(pathlib.Path(folder, name) for folder, _, names in os.walk(root, onerror=refuse) for name in names)


def _hidden(path: pathlib.Path, root: pathlib.Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _kind(path: pathlib.Path) -> str | None:
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if path.suffix.lower() == ".tgz" or last == ".tar":
        return "tar"
    if last in DATABASES:
        return None if path.name == "lock.mdb" else "lmdb"
    return "lines" if last in LINES else "text" if last in TEXT else None


def _cut(path: pathlib.Path, part_bytes: int) -> list[Item]:
    stat = path.stat()
    kind = _kind(path) or "text"
    named = path.parent.name if path.name == "data.mdb" else path.name
    validation = named.split(".")[0].lower() in {"val", "valid", "validation"}
    whole = Item(path, kind, stat.st_size, stat.st_mtime_ns, validation=validation)
    if kind == "tar" or path.suffix.lower() in PACKED or stat.st_size <= 2 * part_bytes:
        return [whole]
    cuts = [*range(0, stat.st_size - part_bytes // 2, part_bytes), stat.st_size]
    return [dataclasses.replace(whole, begin=b, end=e) for b, e in itertools.pairwise(cuts)]


def _open(path: pathlib.Path) -> typing.BinaryIO:
    opener = PACKED.get(path.suffix.lower())
    return typing.cast(typing.BinaryIO, opener(path, "rb") if opener else path.open("rb"))


def _line_range(item: Item) -> collections.abc.Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that start inside the item's range."""
    with _open(item.path) as file:
        offset = item.begin
        if item.begin:
            file.seek(item.begin - 1)
            offset = item.begin - 1 + len(file.readline())  # a line that began before belongs to the range before
        for line in file:
            if item.end is not None and offset >= item.end:
                return
            yield offset, line
            offset += len(line)


def _read_range(item: Item) -> str:
    if item.end is None:
        with _open(item.path) as file:
            data = file.read()
    else:
        data = b"".join(line for _, line in _line_range(item))
    return data.decode("utf-8", errors="replace")


def _texts(text: str) -> collections.abc.Iterator[Document]:
    if text.strip():
        yield (Segment(text),)


def _json_lines(item: Item) -> collections.abc.Iterator[Document]:
    for number, (offset, line) in enumerate(_line_range(item), start=1):
        where = f"{item.path} line {number}" if not item.begin else f"{item.path} at byte {offset}"
        if line.strip():
            yield from (d for d in [_parsed(line, where)] if any(s.text for s in d))


def _parsed(line: bytes, where: str) -> Document:
    try:
        value = json.loads(line)
    except ValueError as e:
        raise errors.UserError(f"{where} is not JSON: {e}") from e
    return from_object(value, where)


def _tar(item: Item) -> collections.abc.Iterator[Document]:
    with tarfile.open(item.path, "r|*") as archive:
        for member in archive:
            if member.isfile() and (file := archive.extractfile(member)) is not None:
                yield from _member(member.name, file.read(), f"{item.path}:{member.name}")


def _member(name: str, data: bytes, where: str) -> collections.abc.Iterator[Document]:
    path = pathlib.PurePath(name)
    suffix = path.suffix.lower()
    if suffix in PACKED:
        plain = {".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}[suffix](data)
        if tarfile.is_tarfile(io.BytesIO(plain)):  # OpenWebText: a tar of .xz files, each a tar of texts
            with tarfile.open(fileobj=io.BytesIO(plain)) as inner:
                for member in inner:
                    if member.isfile() and (file := inner.extractfile(member)) is not None:
                        yield from _member(member.name, file.read(), f"{where}:{member.name}")
        else:
            yield from _member(path.stem, plain, where)
    elif suffix in LINES:
        for number, line in enumerate(data.splitlines(), start=1):
            if line.strip():
                yield _parsed(line, f"{where} line {number}")
    elif suffix == ".json":
        yield _parsed(data, where)
    elif suffix in TEXT:
        yield from _texts(data.decode("utf-8", errors="replace"))


def _database(item: Item) -> collections.abc.Iterator[Document]:
    """Yield the documents of an LMDB database, or of the share of its entries that the item's bytes stand for."""
    try:
        lmdb: typing.Any = importlib.import_module("lmdb")
    except ImportError as e:
        raise errors.UserError(f"{item.path} needs the package lmdb, which is not installed: pip install lmdb") from e
    try:
        with (
            lmdb.open(str(item.path), subdir=False, readonly=True, lock=False, create=False) as database,
            database.begin(buffers=True) as reading,
        ):
            entries = int(reading.stat()["entries"])
            end = item.size_bytes if item.end is None else item.end
            first, last = (entries * at // item.size_bytes for at in (item.begin, end))
            for key, value in itertools.islice(reading.cursor(), first, last):
                name = bytes(key).decode("utf-8", errors="replace")
                yield from _entry(name, bytes(value), f"{item.path} key {name!r}")
    except lmdb.Error as e:
        raise errors.UserError(f"{item.path} cannot be read: {e}; repair or remove the file") from e


def _entry(name: str, data: bytes, where: str) -> collections.abc.Iterator[Document]:
    if name.startswith("__"):  # __len__, __keys__: what common writers of such databases note about them
        return
    if pathlib.PurePath(name).suffix.lower() in {*TEXT, *LINES, *PACKED, ".json"}:
        yield from _member(name, data, where)
        return
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise errors.UserError(f"{where} is neither UTF-8 text nor JSON; store the text itself, not a pickle") from e
    if text.startswith("{"):
        with contextlib.suppress(ValueError):
            yield from_object(json.loads(text), where)
            return
    yield from _texts(text)
