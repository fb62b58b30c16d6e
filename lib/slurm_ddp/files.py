"""Files that a reader sees whole or not at all."""

import os
import pathlib
import pwd


def ensure_file(
    path: pathlib.Path | str, content: str | bytes, *, mode: int = 0o644, owner: str | None = None
) -> bool:
    """Make `path` hold exactly `content` with `mode` and `owner`; return whether it changed.

    The file is replaced atomically and at no time readable by more than `mode` allows. Missing
    parents are made (0755).
    """
    path = pathlib.Path(path)
    data = content.encode() if isinstance(content, str) else content
    account = pwd.getpwnam(owner) if owner is not None else None
    uid, gid = (account.pw_uid, account.pw_gid) if account else (os.geteuid(), os.getegid())
    if path.is_file() and not path.is_symlink():
        stat = path.stat()
        same = stat.st_mode & 0o7777 == mode and (stat.st_uid, stat.st_gid) == (uid, gid)
        if same and path.read_bytes() == data:
            return False
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.fchown(file.fileno(), uid, gid)
            os.fchmod(file.fileno(), mode)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return True


def ensure_absent(path: pathlib.Path | str) -> bool:
    """Remove the file at `path`; return whether it was there."""
    try:
        pathlib.Path(path).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read(path: pathlib.Path) -> str:
    """Return a text without white space around it; "" if it cannot be read.

    Files of /proc and /sys may disappear.
    """
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
