"""Files that are read and written with care: a user's texts, private folders, atomic writes."""

import os
import pathlib
import stat
import tempfile

from ddp.node import small_files

MAX_LISTED = 1000
MAX_NAMED_BYTES = 4 << 20  # of a text that the user names
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class RefusedError(Exception):
    """The operation is refused; `str()` is one line for the user."""


def special(mode: int) -> str:
    """Name the type of a path, such as a pipe; "" for a regular file or a link."""
    return _KINDS.get(stat.S_IFMT(mode), "")


def read_named(
    path: pathlib.Path, limit_bytes: int = MAX_NAMED_BYTES, *, is_private: bool = False
) -> bytes:
    """Read a file that the user named; links are followed, and `is_private` demands mode 0600.

    A pipe would block, and a device may be endless. Raises OSError or RefusedError.
    """
    real = pathlib.Path(os.path.realpath(path))
    kind = special(real.stat().st_mode)
    if kind:
        raise RefusedError(f"{path} is {kind}, not a file")
    with small_files.opened(real) as file:
        if is_private and os.fstat(file.fileno()).st_mode & 0o077:
            raise RefusedError(f"{path} can be read by others; type: chmod 600 {path}")
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise RefusedError(f"{path} has more than {limit_bytes >> 10} KiB")
    return data


def private(folder: pathlib.Path) -> pathlib.Path:
    """Check that a folder belongs to this account, and give it mode 0700. Raises RefusedError."""
    about = folder.lstat()
    uid = os.geteuid()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != uid:
        text = f"{folder} is not a folder of this account (uid {uid}); as root: remove it"
        raise RefusedError(text)
    if about.st_mode & 0o7777 != 0o700:
        folder.chmod(0o700)
    return folder


def replace(path: pathlib.Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write a file atomically: a reader sees the old content or the new one."""
    data = content.encode() if isinstance(content, str) else content
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    partial = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
