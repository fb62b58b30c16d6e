"""Documents out of a file: text in its encoding, JSON lines and arrays, tables, archives of these, databases."""

import collections.abc
import dataclasses
import importlib
import io
import itertools
import pathlib
import tarfile
import typing

from ddptrain import archives, errors, kinds, records, tables

_PIECE_CHARS = 32 << 10
_MARKS = (  # the longest first
    (b"\xff\xfe\0\0", "utf-32-le"),
    (b"\0\0\xfe\xff", "utf-32-be"),
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)

Documents = collections.abc.Iterator[records.Document]


@dataclasses.dataclass(frozen=True)
class Item:
    """A file, or the bytes [begin, end) of one."""

    path: pathlib.Path
    kind: str  # a value of kinds.KINDS
    size_bytes: int
    mtime_ns: int
    begin: int = 0
    end: int | None = None  # None: to the end of the file
    validation: bool = False  # the file or a folder of it is named val, validation, dev ...
    errors: str = "strict"  # or replace: what becomes of bytes that are no text

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


def documents(item: Item, unread: kinds.Unread | None = None) -> Documents:
    """Yield the documents of an item, and count what is not read inside it.

    Raises UserError naming the file (and the line) that cannot be read, or an archive most of which is not text.
    """
    left = kinds.Unread() if unread is None else unread
    try:
        match item.kind:
            case "text":
                yield from _text(item)
            case "lines" | "json":
                with archives.opened(item.path) as file:
                    yield from _json(file, str(item.path), item.errors, whole=item.kind == "json", item=item)
            case "lmdb":
                yield from _database(item, left)
            case "parquet":
                yield from tables.parquet(item.path, item.share)
            case "arrow":
                yield from tables.arrow(item.path, item.begin, item.stop)
            case _:
                yield from _archive(item, left)
    except archives.DAMAGE as e:
        raise errors.UserError(f"{item.path} cannot be read: {e}; repair or remove the file") from e


def pieces(document: records.Document) -> Documents:
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
        yield (records.Segment(text[at:end]),)
        at = end


def _lines(
    file: typing.BinaryIO, begin: int = 0, end: int | None = None
) -> collections.abc.Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that start inside a range."""
    offset = file.tell()
    if begin:
        file.seek(begin - 1)
        offset = begin - 1 + len(file.readline())  # a line that began before belongs to the range before
    for line in file:
        if end is not None and offset >= end:
            return
        yield offset, line
        offset += len(line)


def encoding_of(data: bytes) -> tuple[str, bytes]:
    """Return the encoding and the byte order mark that text begins with."""
    return next(((encoding, mark) for mark, encoding in _MARKS if data.startswith(mark)), ("utf-8", b""))


def _decoded(data: bytes, where: str, how: str, offset: int = 0) -> str:
    """Return the text in a file's bytes from an offset. Raises UserError naming the offset of what is no text."""
    encoding, mark = ("utf-8", b"") if offset else encoding_of(data)
    offset += len(mark)
    try:
        text = data[len(mark) :].decode(encoding, how)
    except UnicodeDecodeError as e:
        at = offset + e.start
    else:
        if how != "strict" or (zero := text.find("\0")) < 0:
            return text
        at = offset + len(text[:zero].encode(encoding))
    what = f"{where} is no text in {encoding} at byte {at}"
    raise errors.UserError(f"{what}; convert it to UTF-8, remove it, or use --errors replace")


def as_utf8(file: typing.Any, where: str, how: str) -> typing.BinaryIO:
    """Return a file, which must be at its begin, as UTF-8 without a byte order mark."""
    encoding, mark = encoding_of(file.peek(4)[:4])
    if encoding == "utf-8":
        file.read(len(mark))
        return file
    return io.BytesIO(_decoded(file.read(), where, how).encode())


def _text(item: Item) -> Documents:
    with archives.opened(item.path) as file:
        if item.end is None:
            return _texts(_decoded(file.read(), str(item.path), item.errors))
        lines = list(_lines(file, item.begin, item.end))
    offset = lines[0][0] if lines else 0
    return _texts(_decoded(b"".join(line for _, line in lines), str(item.path), item.errors, offset))


def _texts(text: str) -> Documents:
    if text.strip():
        yield (records.Segment(text),)


def _json(file: typing.BinaryIO, where: str, how: str, *, whole: bool, item: Item | None = None) -> Documents:
    """Yield the documents of JSON lines, of one array, or if `whole` of one object over several lines."""
    begin, end = (item.begin, item.end) if item else (0, None)
    lines = _lines(file if begin else as_utf8(file, where, how), begin, end)
    is_first = not begin
    for number, (offset, line) in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{where} at byte {offset}" if begin else f"{where} line {number}"
        if is_first and (line.lstrip().startswith(b"[") or (whole and not is_json(line))):
            value = records.parse(line + b"".join(more for _, more in lines), where, how)
            values = typing.cast(list[object], value) if isinstance(value, list) else [value]
            found = [(f"{where} record {n}", one) for n, one in enumerate(values, start=1)]
        else:
            found = [(place, records.parse(line, place, how))]
        is_first = False
        for place, value in found:
            document = records.from_object(value, place)
            if any(segment.text for segment in document):
                yield document


def is_json(line: bytes) -> bool:
    """Return whether a line is JSON by itself."""
    try:
        records.parse(line, "")
    except errors.UserError:
        return False
    return True


def _archive(item: Item, unread: kinds.Unread) -> Documents:
    is_named = bool(kinds.split_of(pathlib.PurePath(item.path.name), item.kind))  # a val.tar may hold val/1.txt
    with archives.opened(item.path) as file:
        members = archives.zip_members(file) if item.kind == "zip" else archives.tar_members(file)
        yield from _inside(members, str(item.path), item.errors, unread, is_named=is_named)


def _inside(
    members: collections.abc.Iterator[archives.Member],
    where: str,
    how: str,
    unread: kinds.Unread,
    *,
    is_named: bool = True,
) -> Documents:
    """Yield the documents of an archive's members. Raises UserError if most of it is not read."""
    left, total = kinds.Unread(), 0
    for member in members:
        name, size, _ = member
        path = pathlib.PurePath(name)
        total += size
        if hidden := kinds.hidden(path):
            left.add(hidden, size)
        elif not is_named and kinds.split_of(path, kinds.kind_of(path.name)) in ("val", "test"):
            left.add(kinds.OTHER_SPLIT, size)
        else:
            yield from _member(member, f"{where}:{name}", how, left)
    if left.missed_bytes > total - sum(size for _, size in left.values()):
        text = f"{where}: most of it is not read: {left}; take the text out of it"
        raise errors.UserError(f"{text}; I read {kinds.READS}")
    unread.merge(left)


def _member(member: archives.Member, where: str, how: str, unread: kinds.Unread) -> Documents:
    name, size, contents = member
    bare, packing = archives.split_name(pathlib.PurePath(name).name)
    kind = kinds.kind_of(name)
    may_be_tar = bool(packing) and not pathlib.PurePath(bare).suffix
    if contents is None or not (kind in ("text", "lines", "json", "tar") or may_be_tar):
        unread.add("link" if contents is None else kinds.suffix_of(name), size)
        return
    file = io.BytesIO((archives.unpacked(contents, packing, where) if packing else contents).read())
    if kind == "text":
        yield from _texts(_decoded(file.getvalue(), where, how))
    elif kind in ("lines", "json"):
        yield from _json(io.BufferedReader(file), where, how, whole=kind == "json")
    elif kind == "tar" or tarfile.is_tarfile(file):  # OpenWebText: a tar of .xz files, each a tar of texts
        file.seek(0)
        yield from _inside(archives.tar_members(file), where, how, unread)
    else:
        unread.add(kinds.suffix_of(name), size)


def _database(item: Item, unread: kinds.Unread) -> Documents:
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
            first, last = item.share(int(reading.stat()["entries"]))
            for key, value in itertools.islice(reading.cursor(), first, last):
                name = bytes(key).decode("utf-8", errors="replace")
                yield from _entry(name, bytes(value), f"{item.path} key {name!r}", item.errors, unread)
    except lmdb.Error as e:
        raise errors.UserError(f"{item.path} cannot be read: {e}; repair or remove the file") from e


def _entry(name: str, data: bytes, where: str, how: str, unread: kinds.Unread) -> Documents:
    if name.startswith("__"):  # __len__, __keys__: what common writers of such databases note about them
        return
    if pathlib.PurePath(name).suffix.lower() in {*kinds.TEXT, *kinds.LINES, *archives.PACKED, ".json"}:
        yield from _member((name, len(data), io.BytesIO(data)), where, how, unread)
        return
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise errors.UserError(f"{where} is neither UTF-8 text nor JSON; store the text itself, not a pickle") from e
    if text.startswith("{") and is_json(data):
        yield records.from_object(records.parse(data, where), where)
    else:
        yield from _texts(text)
