"""Processes as the kernel shows them: children, ranks among them, and what they do now.

A rank that hangs cannot report its state itself (proc_pid_stat(5), field 3).
"""

import collections.abc
import contextlib
import glob
import os
import re
import typing

ENDED, STOPPED, TRACED, UNINTERRUPTIBLE = "ZTtD"
_WORDS = {
    "R": "runs",
    "S": "sleeps",
    # of a driver or a filesystem
    UNINTERRUPTIBLE: "is in a call of the kernel that nothing interrupts",
    STOPPED: "is stopped",
    TRACED: "is stopped by a debugger",
    ENDED: "has ended",
}
_LOCAL_RANK = re.compile(r"(?:^|\0)LOCAL_RANK=(\d+)\0")


class State(typing.NamedTuple):
    """The kernel's letter for a state, and the function that the thread waits in, or ""."""

    letter: str
    function: str = ""

    def __str__(self) -> str:
        """Return it in words, such as `is stopped (T)`."""
        words = _WORDS.get(self.letter, "is in an unknown state")
        details = f"{self.letter}, {self.function}" if self.function else self.letter
        return f"{words} ({details})"


def children(parent: int) -> collections.abc.Iterator[int]:
    """Yield the child processes of a process."""
    for path in glob.iglob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
            about = _text(path)
            if int(_fields(about)[1]) == parent:
                yield int(about.split()[0])


def local_rank(process: int) -> int | None:
    """Return the number that torchrun gave a process; None if it is not a rank or has ended."""
    try:
        found = _LOCAL_RANK.search(_text(f"/proc/{process}/environ"))
    except OSError:
        return None
    return int(found[1]) if found else None


def state_of(process: int) -> State | None:
    """Return the state of a process; None if it has ended.

    It is the state of the first uninterruptible thread, or else of the main thread.
    """
    states = _states(process)
    if process not in states:
        return None
    stuck = [thread for thread in sorted(states) if states[thread] == UNINTERRUPTIBLE]
    shown = stuck[0] if stuck else process
    return State(states[shown], _function(process, shown))


def _states(process: int) -> dict[int, str]:
    """Return the state of each thread of a process."""
    states: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{process}/task")):
            with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
                states[thread] = _fields(_text(f"/proc/{process}/task/{thread}/stat"))[0]
    return states


def _fields(about: str) -> list[str]:
    """Return the fields behind the command's name, which may hold anything: state, parent, ..."""
    return about.rpartition(")")[2].split()


def _function(process: int, thread: int) -> str:
    with contextlib.suppress(OSError):
        found = _text(f"/proc/{process}/task/{thread}/wchan").strip()
        return "" if found == "0" else found
    return ""


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
