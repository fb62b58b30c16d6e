"""Which processes use a folder. Standard library only: the mount keeper uses it."""

import collections.abc
import contextlib
import os
import pathlib


def users(folder: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """Return id and name of each process that has something open below a folder.

    Root sees all accounts' processes. Only /proc is read, which knows paths without asking the
    filesystem.
    """
    prefix = os.path.normpath(folder)
    found: list[tuple[int, str]] = []
    for process in pathlib.Path("/proc").iterdir():
        if process.name.isdecimal() and any(
            f"{path}/".startswith(f"{prefix}/") for path in _open_paths(process)
        ):
            with contextlib.suppress(OSError):  # it ended
                found.append((int(process.name), (process / "comm").read_text().strip()))
    return sorted(found)


def _open_paths(process: pathlib.Path) -> collections.abc.Iterator[str]:
    # Not `maps`: reading it waits for a process that hangs in a page fault
    links = [process / "cwd", process / "root", process / "exe"]
    with contextlib.suppress(OSError):  # it ended, or belongs to another account
        links += (process / "fd").iterdir()
    for link in links:
        with contextlib.suppress(OSError):
            yield str(link.readlink())
