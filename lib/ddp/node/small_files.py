"""Read JSON objects and the ends of logs that another program may write or replace."""

import errno
import io
import json
import os
import pathlib
import stat
import typing

Json = dict[str, typing.Any]
MAX_TAIL_BYTES = 256 * 1024
MAX_JSON_BYTES = 4 * 1024 * 1024


def read_object(path: pathlib.Path) -> Json:
    """Read the JSON object in a file. Raises OSError, and ValueError for other content."""
    with opened(path) as file:
        text = file.read(MAX_JSON_BYTES)
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return typing.cast(Json, value)


def tail(path: pathlib.Path, limit: int) -> list[str]:
    """Return the lines in the last `limit` bytes of a file. Raises OSError.

    If one long line fills most of them, more bytes are read.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            file.seek(max(0, size - limit))
            lines = file.read(limit).decode(errors="replace").splitlines()
            if size <= limit:
                return lines
            is_cut_line_short = len(lines[0]) < limit // 2
            if is_cut_line_short or limit >= MAX_JSON_BYTES:
                return lines[1:] or lines
            limit = min(4 * limit, MAX_JSON_BYTES)


def opened(path: pathlib.Path) -> io.BufferedReader:
    """Open a regular file: never a pipe, which would block, and never through a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
