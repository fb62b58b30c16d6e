"""Documents out of a source: a text, records, rows, or the members of an archive."""

import collections.abc
import io
import pathlib
import typing

from ddptrain.data import (
    chats,
    encodings,
    jsonlines,
    lessons,
    members,
    names,
    segments,
    sources,
    tables,
    texts,
    unread,
)
from ddptrain.ground import errors

_PIECE_CHARS = 32 << 10
_IN_ARCHIVES = frozenset({"text", "lines", "json"})
_PLAIN = chats.Plain()

Documents = collections.abc.Iterator[segments.Document]


def documents(item: sources.Item, found: lessons.Lessons, form: chats.Form = _PLAIN) -> Documents:
    """Yield the documents of an item, and count the parts that are not read. Raises UserError.

    `form` is how conversations are written.
    """
    try:
        for document in _of_item(item, found, form):
            if any(segment.text for segment in document):
                yield document
            else:
                found.left_out.add(unread.NO_TEXT, 0)
    except members.DAMAGE as e:
        what = f"{item.path} cannot be read: {e}"
        raise errors.UserError(f"{what}; {members.remedy(e)}") from e


def pieces(document: segments.Document) -> Documents:
    """Yield a long plain text in pieces of some 32 Ki characters, anything else whole.

    Each piece is for training or validation by itself, so that a book is not wholly one of them.
    """
    text = document[0].text
    if len(document) > 1 or len(text) <= 2 * _PIECE_CHARS:
        yield document
        return

    begin = 0
    while begin < len(text):
        line_end = text.find("\n", begin + _PIECE_CHARS)
        is_last = line_end < 0 or len(text) - line_end < _PIECE_CHARS // 2
        end = len(text) if is_last else line_end + 1
        yield (segments.Segment(text[begin:end]),)
        begin = end


def _of_item(item: sources.Item, found: lessons.Lessons, form: chats.Form) -> Documents:
    with members.opened(item.path) as file:
        if item.kind in names.TABLES:
            rows = tables.rows(item.path, item.kind, item.share, item.errors, found.left_out)
            yield from _of_values(rows, found, form)
        elif item.kind in names.ARCHIVES:
            yield from _of_archive(file, item, found, form)
        elif item.kind == "text":
            yield from _of_text(*_bytes(file, item), item.path, item.errors)
        else:
            begin, end = item.begin, item.end
            values = jsonlines.values(file, item.path, item.errors, begin=begin, end=end)
            yield from _of_values(values, found, form)


def _of_values(values: jsonlines.Values, found: lessons.Lessons, form: chats.Form) -> Documents:
    for place, value in values:
        document = texts.document(value, place, form, found)
        if document is not None:
            yield document


def _bytes(file: typing.IO[bytes], item: sources.Item) -> tuple[bytes, int]:
    """Return the bytes of an item, cut at line ends, and the offset of the first."""
    if item.end is None:
        return file.read(), 0
    lines = [*members.lines(file, item.begin, item.end)]
    offset = lines[0][0] if lines else item.end
    return b"".join(line for _, line in lines), offset


def _of_text(data: bytes, offset: int, where: object, how: str) -> Documents:
    text = encodings.decode(data, where, how, offset)
    if text.strip():
        yield (segments.Segment(text),)


def _of_archive(
    file: typing.IO[bytes], item: sources.Item, found: lessons.Lessons, form: chats.Form
) -> Documents:
    """Yield the documents of an archive's members. Raises UserError if most of it is not read."""
    tally = unread.Tally()
    has_split = bool(names.split_of(pathlib.PurePath(item.path.name)))  # val.tar may hold val/1.txt
    inner = members.of_zip(file) if item.kind == "zip" else members.of_tar(file)
    for member in inner:
        where = f"{item.path}:{member.path}"
        reason = _reason(member, has_split=has_split)
        data = None if reason else _text_or_records(member, where)
        if data is None:
            tally.leave(member.path, member.size_bytes, reason)
            continue

        tally.read(member.path, member.size_bytes)
        if names.parse(member.path.name).kind == "text":
            yield from _of_text(data, 0, where, item.errors)
        else:
            values = jsonlines.values(io.BytesIO(data), where, item.errors)
            yield from _of_values(values, found, form)

    found.left_out.merge(
        tally.result(item.path, "extract it, and give the files or folders of text")
    )


def _reason(member: members.Member, *, has_split: bool) -> str:
    """Return why a member is not read, regardless of its content, or ""."""
    if how := unread.hidden(member.path):
        return how
    if not has_split and names.split_of(member.path) in ("val", "test"):
        return unread.OTHER_SPLIT
    return unread.LINK if member.content is None else ""


def _text_or_records(member: members.Member, where: str) -> bytes | None:
    """Return the content of a member, decompressed, or None if it is neither text nor records."""
    name = names.parse(member.path.name)
    if member.content is None or name.kind not in _IN_ARCHIVES:
        return None

    packed = io.BytesIO(member.content.read())
    data = members.decompressed(packed, name.compression, where).read()
    is_metadata = name.kind == "lines" and names.is_metadata(member.path)
    is_doubtful = name.kind == "json" or is_metadata
    if is_doubtful and not jsonlines.has_records(io.BytesIO(data), where):
        return None
    return data
