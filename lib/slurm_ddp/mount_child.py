"""The child of a probe (mounts.py): touch one mounted filesystem, and print the result as JSON.

    python3 mount_child.py MOUNTPOINT MOUNT_ID read|write [sticky]

It may hang in the kernel for good, so it is a program that imports no module of ours: Python starts
it at once.
"""

import contextlib
import json
import os
import pathlib
import stat
import sys
import time
import typing

PROBE_DIR = ".mount-probe"  # for probes' files, at the top of the mounted filesystem
_LEFTOVER_S = 3600.0  # a probe's file older than this was left by a probe that was killed


def touch(mountpoint: str, mount_id: int, *, write: bool, sticky: bool) -> dict[str, typing.Any]:
    """Touch the filesystem, which may hang, and return what happened.

    That is the step that failed and its errno, or modes as in `mounts.Result`.
    """
    print(flush=True)  # the deadline starts now
    step, found = "open", dict[str, typing.Any]()
    try:
        directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
        if (
            f"mnt_id:\t{mount_id}\n"
            not in pathlib.Path(f"/proc/self/fdinfo/{directory}").read_text()
        ):
            return {"step": "hidden"}
        mode = stat.S_IMODE(os.fstat(directory).st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            found = {"open": mode}
            if sticky:
                # Of a filesystem that fails, the next step reports
                with contextlib.suppress(OSError):
                    os.fchmod(directory, mode | stat.S_ISVTX)
                    found = {"was": mode}
        step = "look up a name"
        # One that was never asked for: no cache knows it, so the server, or JuiceFS's engine, must
        # answer
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.stat(f"{PROBE_DIR}-{os.urandom(8).hex()}", dir_fd=directory)
        if write:
            step = "make a directory"
            folder = pathlib.Path(mountpoint, PROBE_DIR)
            folder.mkdir(mode=0o700, exist_ok=True)
            host = os.uname().nodename
            old = folder / f"{host}.{os.getpid()}"
            new = folder / f"{old.name}.new"
            token = os.urandom(32)
            step = "write"
            with new.open("wb", buffering=0) as file:
                file.write(token)
                step = "sync"
                os.fsync(file.fileno())
            step = "rename"
            new.replace(old)
            step = "read"
            same = old.read_bytes() == token
            step = "remove"
            remove(old)
            for path in folder.glob(f"{host}.*"):
                if path.stat().st_mtime < time.time() - _LEFTOVER_S:
                    remove(path)
            if not same:
                return {"step": "read back"}
    except OSError as e:
        return {"step": step, "errno": e.errno}
    return found


def remove(path: pathlib.Path) -> None:
    """Remove a probe's file for good.

    JuiceFS keeps it as .trash/HOUR/PARENT-INODE-NAME (pkg/meta/base.go, 1.3.1).
    """
    kept = f"{path.parent.stat().st_ino}-{path.stat().st_ino}-{path.name}"
    began = time.time()
    path.unlink()
    for moment in (began, time.time()):  # the hour may have changed since
        hour = time.strftime("%Y-%m-%d-%H", time.gmtime(moment))
        with contextlib.suppress(OSError):
            (path.parent.parent / ".trash" / hour / kept).unlink()


if __name__ == "__main__":
    _mountpoint, _mount_id, _kind, *_rest = sys.argv[1:]
    print(
        json.dumps(
            touch(_mountpoint, int(_mount_id), write=_kind == "write", sticky="sticky" in _rest)
        )
    )
