"""What a process does, as the kernel shows it: for a rank that cannot say so itself (proc_pid_stat(5), field 3)."""

import contextlib
import os
import typing

ENDED, STOPPED, TRACED, UNINTERRUPTIBLE = "ZTtD"
_WORDS = {
    "R": "runs",
    "S": "sleeps",
    UNINTERRUPTIBLE: "is in a call of the kernel that nothing interrupts",  # of a driver or a filesystem
    STOPPED: "is stopped",
    TRACED: "is stopped by a debugger",
    ENDED: "has ended",
}


class State(typing.NamedTuple):
    """A state by the kernel's letter, and the kernel's function that the thread waits in; "": not shown."""

    letter: str
    function: str = ""

    def __str__(self) -> str:
        """Return it in words, such as `is stopped (T)`."""
        details = ", ".join(filter(None, (self.letter, self.function)))
        return f"{_WORDS.get(self.letter, 'is in an unknown state')} ({details})"


def state_of(process: int) -> State | None:
    """Return the state of a process: of the first thread that nothing interrupts, else of its main one; None: ended."""
    states: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{process}/task")):
            with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
                states[thread] = (
                    _text(f"/proc/{process}/task/{thread}/stat").rpartition(")")[2].split()[0]
                )
    if process not in states:
        return None
    stuck = [thread for thread in sorted(states) if states[thread] == UNINTERRUPTIBLE]
    shown = next(iter(stuck), process)
    return State(states[shown], _function(process, shown))


def _function(process: int, thread: int) -> str:
    with contextlib.suppress(OSError):
        found = _text(f"/proc/{process}/task/{thread}/wchan").strip()
        return "" if found == "0" else found
    return ""


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
