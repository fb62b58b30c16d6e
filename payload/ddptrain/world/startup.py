"""Runs first in each Python of an environment (`ddptrain.pth`), and delays its end for gloo.

A thread of gloo releases the tensors of its last collective after the script has its result, and
takes the GIL for it. If the interpreter ends at that moment, the process ends by SIGABRT, and a job
that has done its work as FAILED (seen with torch 2.13; pytorch issue 190489). So the end waits
until those threads are idle.
"""

import atexit
import contextlib
import sys
import time

_THREAD = "pt_gloo_runloop"  # the name that ProcessGroupGloo gives each of its threads
_LOOK_S = 0.01
_LOOKS = 2  # in succession, all of them asleep while no thread holds the GIL
_LIMIT_S = 2.0


def _wait_for_gloo() -> None:
    """Wait until the threads of gloo have nothing to do, or wait for a peer."""
    deadline = time.monotonic() + _LIMIT_S
    idle = 0
    while idle < _LOOKS and time.monotonic() < deadline and (states := _states()):
        are_asleep = set(states) == {"S"}
        idle = idle + 1 if are_asleep else 0
        time.sleep(_LOOK_S)  # gives them the GIL


def _states() -> list[str]:
    """Return the state of each thread of gloo (proc_pid_stat(5), field 3)."""
    found = list[str]()
    if "torch" in sys.modules:
        import pathlib  # which torch has imported, and would delay each other start by 5 ms

        for task in pathlib.Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread ended
                name, _, fields = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
                if name == _THREAD:
                    found.append(fields[0])
    return found


atexit.register(_wait_for_gloo)
