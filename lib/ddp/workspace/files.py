"""Common parts of the operations on the shared filesystem: the error, private folders, atomic writes."""

import os
import pathlib
import stat
import tempfile

MAX_LISTED = 1000


class RefusedError(Exception):
    """The operation is refused; `str()` is one line for the user."""


def private(folder: pathlib.Path) -> pathlib.Path:
    """Return a folder of mode 0700 that belongs to this account. Raises RefusedError."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise RefusedError(f"{folder} is not a folder of this account (uid {os.geteuid()}); as root: remove it")
    if about.st_mode & 0o7777 != 0o700:
        folder.chmod(0o700)
    return folder


def replace(path: pathlib.Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file atomically: a reader sees the old content or the new one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    partial = pathlib.Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
