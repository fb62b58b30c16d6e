"""Files on a shared filesystem: a name holds the whole content or does not exist.

Close-to-open consistency is what NFS and JuiceFS give, and a rename within one folder is atomic on both, as on CephFS
and Lustre; so everything is written under another name, synced, closed and renamed.
"""

import collections.abc
import contextlib
import errno
import json
import os
import pathlib
import time
import typing
import uuid
import zlib

CHUNK_BYTES = 8 << 20
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR}
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOSYS, errno.EBADF, errno.ENOTSUP, errno.EACCES}
_T = typing.TypeVar("_T")


def sync_directory(path: pathlib.Path) -> None:
    """Make the names in the folder durable, where the filesystem knows how to."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> collections.abc.Generator[typing.BinaryIO, None, None]:
    """Yield a file that takes the place of `path` when the block ends well, and leaves nothing when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with tmp.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: pathlib.Path, value: object, *, indent: int | None = 2) -> None:
    """Replace `path` by `value` as JSON."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=indent).encode() + b"\n")


def read_json(path: pathlib.Path) -> dict[str, typing.Any]:
    """Return the JSON object in `path`. Raises ValueError (naming it) when it holds anything else, and OSError."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return typing.cast(dict[str, typing.Any], value)


def replace_link(link: pathlib.Path, target: str) -> None:
    """Point the symbolic link at `target`: a reader sees the old one or the new one."""
    tmp = link.with_name(f".{link.name}.{uuid.uuid4().hex[:12]}.tmp")
    tmp.symlink_to(target)
    try:
        tmp.replace(link)
    except OSError:
        tmp.unlink(missing_ok=True)
        raise
    sync_directory(link.parent)


def crc32(path: pathlib.Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    value = 0
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(view[:count], value)
    return value


def retried(action: collections.abc.Callable[[], _T], *, attempts: int = 3, pause_s: float = 0.5) -> _T:
    """Return `action()`, tried again after the errors that a network filesystem gets over by itself (EIO, ESTALE)."""
    for attempt in range(1, attempts + 1):
        try:
            return action()
        except OSError as e:
            if e.errno not in _TRANSIENT or attempt == attempts:
                raise
            time.sleep(pause_s * attempt)
    raise AssertionError("unreachable")


def free_bytes(path: pathlib.Path) -> int:
    """Return how much an ordinary user may still write below the nearest existing folder of `path`."""
    while not path.exists():
        path = path.parent
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize
