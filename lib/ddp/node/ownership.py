"""Check that only trusted accounts can replace a file or a folder above it.

The result holds for an open file, never for a name: each component is opened relative to the one above it and checked.
Where a POSIX ACL grants more, the group's bits of the mode show its mask (acl(5)), so an ACL for others counts as well.
"""

import contextlib
import errno
import os
import stat

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # O_PATH: a folder may be searchable, not readable
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a FIFO would wait for a writer


class UntrustedError(Exception):
    """Another account can replace the file. `str()` is one line: the folder, its owner and mode, and what to type."""


def open_trusted(path: str, trusted_uids: frozenset[int]) -> int:
    """Open a regular file for reading that only trusted accounts can replace or write.

    Use the descriptor from then on: the path may lead elsewhere later. A trusted account must own the file and every
    folder above it; no other account may write the file, nor a folder, unless that is sticky (inode(7): then only its
    owner and an entry's owner may rename or remove the entry). Symbolic links are refused.

    Args:
        path: absolute, without `..`.
        trusted_uids: root's, the trainer's account's and the user's.

    Raises:
        UntrustedError: another account can replace the file or write it.
        OSError: it, or a folder above it, does not exist or cannot be opened.
    """
    folder, name = os.path.split(path)
    parent = _open_folder(folder, trusted_uids)
    try:
        file = _open(name, _FILE, parent, path)
    finally:
        os.close(parent)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise UntrustedError(f"{path} is not a regular file: remove it")
        _check_owner(path, about, trusted_uids)
        if about.st_mode & _WRITABLE_BY_OTHERS:
            mode = stat.S_IMODE(about.st_mode)
            raise UntrustedError(f"{path} has mode {mode:04o}, so others can write it: chmod go-w {path}")
    except BaseException:
        os.close(file)
        raise
    return file


def check_folder(path: str, trusted_uids: frozenset[int]) -> None:
    """Raise `UntrustedError` where other than trusted accounts can replace a folder or its files.

    The rules, arguments and errors are those of `open_trusted`.
    """
    os.close(_open_folder(path, trusted_uids))


def _open_folder(path: str, trusted_uids: frozenset[int]) -> int:
    """Check a folder and every folder above it; return its descriptor (O_PATH)."""
    names = [name for name in path.split("/") if name]
    if not path.startswith("/") or ".." in names or "." in names:
        raise UntrustedError(f"{path} is not an absolute path without `..`: name the folder itself")
    folder, shown = os.open("/", _FOLDER), "/"
    try:
        _check(shown, os.fstat(folder), trusted_uids)
        for name in names:
            shown = os.path.join(shown, name)
            below = _open(name, _FOLDER, folder, shown)
            os.close(folder)
            folder = below
            _check(shown, os.fstat(folder), trusted_uids)
    except BaseException:
        os.close(folder)
        raise
    return folder


def _open(name: str, flags: int, folder: int, shown: str) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENOTDIR):
            is_link = False
            with contextlib.suppress(OSError):
                is_link = stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
            if is_link:
                raise UntrustedError(f"{shown} is a symbolic link: use the path that it leads to, or remove it") from e
        raise OSError(e.errno, e.strerror, shown) from e


def _check(path: str, about: os.stat_result, trusted_uids: frozenset[int]) -> None:
    _check_owner(path, about, trusted_uids)
    if about.st_mode & _WRITABLE_BY_OTHERS and not about.st_mode & stat.S_ISVTX:
        whom = "any account" if about.st_mode & stat.S_IWOTH else f"group {about.st_gid}"
        mode = stat.S_IMODE(about.st_mode)
        raise UntrustedError(
            f"{path} has mode {mode:04o} without the sticky bit, so {whom} can replace what is in it: chmod +t {path}"
        )


def _check_owner(path: str, about: os.stat_result, trusted_uids: frozenset[int]) -> None:
    if about.st_uid not in trusted_uids:
        known = ", ".join(map(str, sorted(trusted_uids)))
        mode = stat.S_IMODE(about.st_mode)
        raise UntrustedError(
            f"{path} belongs to uid {about.st_uid} (mode {mode:04o}), which is none of the trusted {known}: "
            f"chown root {path}, or remove it"
        )
