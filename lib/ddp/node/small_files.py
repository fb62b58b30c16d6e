"""Read JSON objects and the ends of logs, which programs may write meanwhile or replace by links and pipes."""

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
    """Read the JSON object in a file. Raises ValueError where the file holds no object."""
    with opened(path) as file:
        try:
            value: object = json.loads(file.read(MAX_JSON_BYTES))
        except RecursionError:
            raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return typing.cast(Json, value)


def tail(path: pathlib.Path, limit: int) -> list[str]:
    """Return the lines in the last `limit` bytes of a file, or in more where most of those are of one long line."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            file.seek(max(0, size - limit))
            lines = file.read(limit).decode(errors="replace").splitlines()
            if size <= limit:
                return lines
            if len(lines[0]) < limit // 2 or limit >= MAX_JSON_BYTES:
                return lines[1:] or lines
            limit = min(4 * limit, MAX_JSON_BYTES)


def opened(path: pathlib.Path) -> io.BufferedReader:
    """Open a regular file: never a pipe, which would block, and never through a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
