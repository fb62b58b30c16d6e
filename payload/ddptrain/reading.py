"""Documents out of a file: text in its encoding, JSON lines and arrays, tables, archives of these."""

import collections.abc
import io
import pathlib
import tarfile
import typing

from ddptrain import archives, errors, records, sources

_PIECE_CHARS = 32 << 10

Documents = collections.abc.Iterator[records.Document]


def documents(item: sources.Item, unread: sources.Unread) -> Documents:
    """Yield the documents of an item, and count what is not read in it. Raises UserError with file and line."""
    try:
        for document in _documents(item, unread):
            if any(segment.text for segment in document):
                yield document
            else:
                unread.add("record without text", 0)
    except archives.DAMAGE as e:
        raise errors.UserError(f"{item.path} cannot be read: {e}; repair or remove the file") from e


def _documents(item: sources.Item, unread: sources.Unread) -> Documents:
    if item.kind in ("parquet", "arrow"):
        yield from records.from_table(item.path, item.kind, item.share, item.errors)
    else:
        with archives.opened(item.path) as file:
            if item.kind == "text":
                yield from _text(file, item)
            elif item.kind in ("lines", "json"):
                yield from _json(file, item.path, item.errors, item)
            else:
                is_named = bool(sources.split_of(pathlib.PurePath(item.path.name), item.kind))
                members = archives.zip_members(file) if item.kind == "zip" else archives.tar_members(file)
                yield from _inside(members, item.path, item.errors, unread, is_named=is_named)


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
    file: typing.IO[bytes], begin: int = 0, end: int | None = None
) -> collections.abc.Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that start inside a range."""
    offset = begin
    if begin:
        file.seek(begin - 1)
        offset = begin - 1 + len(file.readline())  # a line that began before belongs to the range before
    for line in file:
        if end is not None and offset >= end:
            return
        yield offset, line
        offset += len(line)


def _text(file: typing.IO[bytes], item: sources.Item) -> Documents:
    lines = [(0, file.read())] if item.end is None else [*_lines(file, item.begin, item.end), (item.stop, b"")]
    data = b"".join(line for _, line in lines)
    return _texts(archives.decoded(data, item.path, item.errors, lines[0][0]))


def _texts(text: str) -> Documents:
    if text.strip():
        yield (records.Segment(text),)


def _json(file: io.BufferedReader, where: object, how: str, item: sources.Item | None = None) -> Documents:
    """Yield the documents of JSON lines, of one array, or of one object over several lines."""
    begin, end = (item.begin, item.end) if item else (0, None)
    lines = _lines(file, begin, end)
    if not begin and archives.encoding_of(file.peek(4))[0] != "utf-8":
        lines = _lines(io.BytesIO(archives.decoded(file.read(), where, how).encode()))
    is_first = not begin
    for number, (offset, line) in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{where} at byte {offset}" if begin else f"{where} line {number}"
        is_list = is_first and line.lstrip(b"\xef\xbb\xbf \t\r").startswith(b"[")
        try:
            value = records.parse(line, place, how)
        except errors.UserError:
            if not is_list and not (is_first and end is None):
                raise
            value = records.parse(line + b"".join(more for _, more in lines), place, how)
        found = typing.cast(list[object], value) if is_list else [value]
        for count, value in enumerate(found, start=1):
            yield records.from_object(value, f"{where} record {count}" if is_list else place)
        is_first = False


def _inside(
    members: collections.abc.Iterator[archives.Member],
    where: object,
    how: str,
    unread: sources.Unread,
    *,
    is_named: bool,  # for a split, itself: val.tar may hold val/1.txt
) -> Documents:
    """Yield the documents of an archive's members. Raises UserError if most of it is not read."""
    left, total = sources.Unread(), 0
    for member in members:
        path = pathlib.PurePath(member[0])
        total += member[1]
        why = sources.hidden(path)
        if not why and not is_named and sources.split_of(path, sources.kind_of(path.name)) in ("val", "test"):
            why = sources.OTHER_SPLIT
        if why:
            left.add(why, member[1])
        else:
            yield from _member(member, f"{where}:{path}", how, left)
    if left.missed_bytes > total - sum(size for _, size in left.values()):
        text = f"{where}: most of it is not read: {left}; take the text out of it"
        raise errors.UserError(f"{text}; I read {sources.READS}")
    unread.merge(left)


def _member(member: archives.Member, where: str, how: str, unread: sources.Unread) -> Documents:
    name, size, contents = member
    kind, (_, suffix, packing) = sources.kind_of(name), archives.split_name(name)
    file = io.BytesIO()
    if contents is not None and (kind in ("text", "lines", "json", "tar") or (packing and not suffix)):
        file = io.BytesIO((archives.unpacked(contents, packing, where) if packing else contents).read())
        if not suffix and tarfile.is_tarfile(file):  # OpenWebText: a tar of .xz files, each a tar of texts
            kind = "tar"
            file.seek(0)
    else:
        kind = None
    if kind == "text":
        yield from _texts(archives.decoded(file.getvalue(), where, how))
    elif kind in ("lines", "json"):
        yield from _json(io.BufferedReader(file), where, how)
    elif kind == "tar":
        yield from _inside(archives.tar_members(file), where, how, unread, is_named=False)
    else:
        unread.add("link" if contents is None else sources.suffix_of(name), size)
