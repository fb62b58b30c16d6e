"""What each Python of an environment does first (`ddptrain.pth`): prepare for importing torch and for the end.

Importing torch makes some hundred thousand objects that stay. To look through them for garbage again and again takes a
tenth of the import, in each rank, in torchrun and in a script that knows nothing of us. So the search rests meanwhile,
and what has been imported is left out of it for good (gc.freeze): full searches are shorter then, too.

A thread of gloo releases the tensors of its last collective after the script has its result, and takes the GIL for it.
Where the interpreter ends meanwhile, the process ends by SIGABRT, and a job that has done its work as FAILED (seen with
torch 2.13; pytorch issue 190489). So the end waits until those threads are idle.
"""

import atexit
import contextlib
import gc
import importlib.machinery
import sys
import time
import types
import typing

PACKAGE = "torch"
_THREAD = "pt_gloo_runloop"  # the name that ProcessGroupGloo gives each of its threads
_LOOK_S = 0.01
_LOOKS = 2  # in succession, all of them asleep while nobody holds the GIL
_LIMIT_S = 2.0


class Finder:
    """Finds torch where Python would, once, and has it executed while the search for garbage rests."""

    @classmethod
    def find_spec(cls, name: str, path: typing.Any = None, target: typing.Any = None) -> typing.Any:
        """Return the usual spec of torch, None for all else (importlib.abc.MetaPathFinder)."""
        if name != PACKAGE:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not gc.isenabled():
            return spec
        loader = typing.cast(typing.Any, spec.loader)
        execute = loader.exec_module

        def resting(module: types.ModuleType) -> None:
            del loader.exec_module  # the loader is as Python made it again
            gc.disable()
            try:
                execute(module)
            finally:
                gc.freeze()
                gc.enable()
            atexit.register(_wait_for_gloo)

        loader.exec_module = resting
        return spec


def _wait_for_gloo() -> None:
    """Wait until the threads of gloo have nothing to do, or wait for a peer."""
    deadline = time.monotonic() + _LIMIT_S
    idle = 0
    while idle < _LOOKS and time.monotonic() < deadline and (states := _states()):
        idle = idle + 1 if all(state == "S" for state in states) else 0
        time.sleep(_LOOK_S)  # gives them the GIL


def _states() -> list[str]:
    """Return the state of each thread of gloo (proc_pid_stat(5), field 3)."""
    import pathlib  # which torch has imported, and would take each other start 5 ms

    found = list[str]()
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile
            name, _, fields = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
            if name == _THREAD:
                found.append(fields[0])
    return found


sys.meta_path.insert(0, Finder)
