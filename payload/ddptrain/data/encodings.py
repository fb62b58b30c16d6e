"""Bytes to text: UTF-8, or UTF-16 that begins with its byte order mark."""

import codecs

from ddptrain.ground import errors

_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


def of(head: bytes) -> tuple[str, bytes]:
    """Return the encoding of a text by its first bytes, and its byte order mark."""
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding, mark
    return "utf-8", b""


def is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file may begin a text."""
    encoding, _ = of(head)
    decoder = codecs.getincrementaldecoder(encoding)()  # the last character may be cut
    try:
        text = decoder.decode(head)
    except UnicodeDecodeError:
        return False
    return "\0" not in text


def decode(data: bytes, where: object, how: str, offset: int = 0) -> str:
    """Return the text in a file's bytes from an offset on; `how` is strict or replace.

    Raises UserError with the offset of the first byte that is not text, such as a NUL.
    """
    encoding, mark = ("utf-8", b"") if offset else of(data)
    body = data[len(mark) :]
    begin = offset + len(mark)
    try:
        text = body.decode(encoding, how)
    except UnicodeDecodeError as e:
        raise _not_text(where, encoding, begin + e.start) from e

    zero = text.find("\0")
    if zero < 0:
        return text
    if how == "replace":
        return text.replace("\0", "\ufffd")
    raise _not_text(where, encoding, begin + len(text[:zero].encode(encoding)))


def _not_text(where: object, encoding: str, at: int) -> errors.UserError:
    remedy = "convert it to UTF-8, remove it, or use --errors replace"
    return errors.UserError(f"{where} is not text in {encoding} at byte {at}; {remedy}")
