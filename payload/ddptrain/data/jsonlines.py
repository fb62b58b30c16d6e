"""Values of JSON: one a line, in one array, or one alone over several lines."""

import collections.abc
import io
import json
import typing

from ddptrain.data import encodings, members, texts
from ddptrain.ground import errors

_BLANK = b"\xef\xbb\xbf \t\r"  # what may stand before an array, a byte order mark included
_HEAD_BYTES = 1 << 20

Lines = collections.abc.Iterator[bytes]
Numbered = collections.abc.Iterator[tuple[int, bytes]]  # a line's number, and its bytes
Values = collections.abc.Iterator[
    tuple[str, object]
]  # a value's place, for messages, and the value


def values(
    file: typing.IO[bytes], where: object, how: str, *, begin: int = 0, end: int | None = None
) -> Values:
    """Yield the values in a file, or in the lines that start in a range of it. Raises UserError."""
    if not begin:
        yield from _from_start(file, where, how, end)
        return

    for offset, line in members.lines(file, begin, end):
        if line.strip():
            place = f"{where} at byte {offset}"
            yield place, _parse(line, place, how)


def has_records(file: typing.IO[bytes], where: object) -> bool:
    """Return whether the first value in a file is a record, or may be one."""
    head = encodings.decode(file.read(_HEAD_BYTES), where, "replace")
    try:
        value, _ = json.JSONDecoder().raw_decode(head.lstrip("[ \t\r\n"))
    except (ValueError, RecursionError):
        return True
    return texts.has_shape(value)


def _from_start(file: typing.IO[bytes], where: object, how: str, end: int | None) -> Values:
    lines = _numbered(_in_utf8(file, where, how, end))
    first = next(lines, None)
    if first is None:
        return

    number, line = first
    place = f"{where} line {number}"
    if line.lstrip(_BLANK).startswith(b"["):
        yield from _array(_joined(line, lines), place, where, how)
        return

    try:
        value = _parse(line, place, how)
    except errors.UserError:
        if end is not None:
            raise  # a file that is cut has a value a line
        value = _parse(_joined(line, lines), place, how)
    yield place, value

    for number, line in lines:
        place = f"{where} line {number}"
        yield place, _parse(line, place, how)


def _array(data: bytes, place: str, where: object, how: str) -> Values:
    found = _parse(data, place, how)
    for number, value in enumerate(typing.cast(list[object], found), start=1):
        yield f"{where} record {number}", value


def _in_utf8(file: typing.IO[bytes], where: object, how: str, end: int | None) -> Lines:
    """Yield the lines of a file in UTF-8, even if its byte order mark is UTF-16's."""
    is_first = True
    for _, line in members.lines(file, 0, end):
        if is_first and encodings.of(line)[0] != "utf-8":
            text = encodings.decode(line + file.read(), where, how)
            yield from io.BytesIO(text.encode())
            return
        is_first = False
        yield line


def _numbered(lines: Lines) -> Numbered:
    """Yield the lines that are not blank, with their numbers."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, line


def _joined(first: bytes, lines: Numbered) -> bytes:
    rest = [line for _, line in lines]
    return b"".join([first, *rest])


def _parse(data: bytes, place: str, how: str) -> object:
    try:
        return json.loads(data.decode("utf-8-sig", how))
    except (ValueError, RecursionError) as e:
        hint = "; use --errors replace" if isinstance(e, UnicodeDecodeError) else ""
        raise errors.UserError(f"{place} is not JSON: {e}{hint}") from e
