"""Check that only trusted accounts can replace a file or a folder above it.

The result holds for an open file, never for a name: each component is opened relative to the one
above it and checked. If a POSIX ACL grants more, the group's bits of the mode show its mask
(acl(5)), so an ACL for others counts as well.
"""

import contextlib
import os
import stat

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# O_PATH: a folder may be searchable, not readable
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO would wait for a writer
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class UntrustedError(Exception):
    """Another account can replace the file. `str()` is one line with the remedy."""


def open_trusted(path: str, trusted_uids: frozenset[int]) -> int:
    """Open a regular file, absolute and without `..`, for reading. Raises UntrustedError, OSError.

    Use the descriptor from then on: the path may lead elsewhere later. A trusted account must own
    the file and every folder above it; no other account may write the file, nor a folder, unless
    that is sticky (inode(7): then only its owner and an entry's owner may rename or remove the
    entry). Symbolic links are refused.
    """
    return _open(path, trusted_uids, _FILE)


def check_folder(path: str, trusted_uids: frozenset[int]) -> None:
    """Check that only trusted accounts can replace a folder or its files.

    The rules are those of `open_trusted`. Raises UntrustedError, OSError.
    """
    os.close(_open(path, trusted_uids, _FOLDER))


def _open(path: str, trusted_uids: frozenset[int], flags: int) -> int:
    """Check all components of a path, each opened relative to the one above it; open the last."""
    names = [name for name in path.split("/") if name]
    if not path.startswith("/") or ".." in names or "." in names:
        raise UntrustedError(f"{path} is not an absolute path without `..`: name the folder itself")
    at = "/"
    descriptor = os.open(at, _FOLDER)
    try:
        _check(at, os.fstat(descriptor), trusted_uids)
        for number, name in enumerate(names, 1):
            is_last = number == len(names)
            at = os.path.join(at, name)
            below = _open_below(descriptor, name, flags if is_last else _FOLDER, at)
            os.close(descriptor)
            descriptor = below
            about = os.fstat(descriptor)
            if is_last and flags == _FILE and not stat.S_ISREG(about.st_mode):
                raise UntrustedError(f"{path} is not a regular file: remove it")
            _check(at, about, trusted_uids)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_below(folder: int, name: str, flags: int, path: str) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.readlink(name, dir_fd=folder)
            remedy = "use the path that it leads to, or remove it"
            raise UntrustedError(f"{path} is a symbolic link: {remedy}") from e
        raise OSError(e.errno, e.strerror, path) from e


def _check(path: str, about: os.stat_result, trusted_uids: frozenset[int]) -> None:
    mode = stat.S_IMODE(about.st_mode)
    if about.st_uid not in trusted_uids:
        known = ", ".join(map(str, sorted(trusted_uids)))
        why = f"belongs to uid {about.st_uid} (mode {mode:04o})"
        why += f", which is none of the trusted {known}"
        raise UntrustedError(f"{path} {why}: chown root {path}, or remove it")
    if not mode & _WRITABLE_BY_OTHERS:
        return
    if not stat.S_ISDIR(about.st_mode):
        why = f"has mode {mode:04o}, so others can write it"
        raise UntrustedError(f"{path} {why}: chmod go-w {path}")
    if not mode & stat.S_ISVTX:
        whom = "any account" if mode & stat.S_IWOTH else f"group {about.st_gid}"
        why = f"without the sticky bit, so {whom} can replace what is in it: chmod +t {path}"
        raise UntrustedError(f"{path} has mode {mode:04o} {why}")
