"""Files on a shared filesystem: a name holds the whole content or does not exist.

NFS and JuiceFS give close-to-open consistency, and a rename within one folder is atomic on both and
on CephFS and Lustre; so everything is written under another name, synced, closed and renamed.
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

from ddptrain.ground import errors

CHUNK_BYTES = 8 << 20
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR}
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOSYS, errno.EBADF, errno.ENOTSUP, errno.EACCES}
FULL = {errno.ENOSPC, errno.EDQUOT}
MAKE_ROOM = (
    "make room: remove runs and checkpoints that are not needed "
    "(JuiceFS frees their space after its trash-days)"
)
_REMEDIES = {
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: f"the quota is used up (quota -s, lfs quota or juicefs quota show it): {MAKE_ROOM}",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "give user {user} the right to it, or another path"
    ),
    errno.EROFS: "it is mounted read-only: mount it for writing, or give another path",
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
        "a file stands for a folder, or the reverse: move it",
    ),
    errno.ENOENT: "something removed it, or the path is wrong",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit on open files (ulimit -n)"),
    errno.ENAMETOOLONG: "give a shorter path",
}
_COMES_AGAIN = FULL | {errno.EMFILE}  # not ENOENT, which a lost mount gives, too
_T = typing.TypeVar("_T")


def explain(e: OSError, where: pathlib.Path | None = None) -> str:
    """Describe the failed operation, its path and the remedy in one line."""
    path = str(where or e.filename or "")
    remedy = _REMEDIES.get(e.errno or 0, "look at the filesystem and its server, then run it again")
    what = e.strerror or str(e)
    if path:
        what = f"{path}: {what}"
    return f"{what}; {remedy.format(user=os.geteuid())}"


def describe(e: Exception) -> tuple[str, bool]:
    """Return an error in one line, and whether the same again may work, later or elsewhere."""
    if isinstance(e, errors.UserError):
        cause = errors.cause_of(e)
        return str(e), e.retry or (cause is not None and cause.is_of_filesystem)
    if isinstance(e, OSError) and e.errno is not None:
        return explain(e), e.errno not in _COMES_AGAIN
    return f"{type(e).__name__}: {e}", isinstance(e, OSError)


def need_folder(folder: pathlib.Path, flag: str) -> None:
    """Make a folder, and check with a file that this process can write there.

    Raises UserError, which names the flag.
    """
    probe = folder / f".{uuid.uuid4().hex[:12]}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise errors.UserError(f"{flag} {folder} cannot be written: {explain(e, folder)}") from e


def need_outputs(run_dir: pathlib.Path | None, by_flag: dict[str, pathlib.Path | None]) -> None:
    """Check that all outputs can be written later.

    Raises UserError, which names the flag of the first that cannot.
    """
    if run_dir is not None:
        need_folder(run_dir, "--run-dir")
    for flag, path in by_flag.items():
        if path is not None:
            if path.is_dir():
                raise errors.UserError(f"{flag} {path} is a folder; give the name of a file")
            need_folder(path.parent, flag)


@contextlib.contextmanager
def naming(path: pathlib.Path) -> collections.abc.Generator[None, None, None]:
    """Add the path to an OSError of the block: a failed write does not name its file."""
    try:
        yield
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


def sync_directory(path: pathlib.Path) -> None:
    """Make the names in the folder durable, if the filesystem supports it."""
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
    """Yield a file that replaces `path` if the block succeeds, and is removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with naming(path), tmp.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_records(path: pathlib.Path) -> list[dict[str, typing.Any]]:
    """Return the objects of a metrics.jsonl, [] without a file, except a line cut by a crash."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    records: list[dict[str, typing.Any]] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(typing.cast(dict[str, typing.Any], record))
    return records


def write_json(path: pathlib.Path, value: object, *, indent: int | None = 2) -> None:
    """Replace `path` by `value` as JSON."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=indent).encode() + b"\n")


def read_json(path: pathlib.Path) -> dict[str, typing.Any]:
    """Return the JSON object in `path`.

    Raises OSError, and ValueError, which names the file, if it holds anything else.
    """
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
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def retried(
    action: collections.abc.Callable[[], _T], *, attempts: int = 3, pause_s: float = 0.5
) -> _T:
    """Return `action()`, repeated after errors that pass on a network filesystem (EIO, ESTALE)."""
    for attempt in range(1, attempts + 1):
        try:
            return action()
        except OSError as e:
            if e.errno not in _TRANSIENT or attempt == attempts:
                raise
            time.sleep(pause_s * attempt)
    raise AssertionError("unreachable")


def free_bytes(path: pathlib.Path) -> int:
    """Return the bytes that a user may still write below `path`, or its nearest existing folder."""
    stats = os.statvfs(
        next(found for found in (path, *path.absolute().parents) if os.path.lexists(found))
    )
    return stats.f_bavail * stats.f_frsize
