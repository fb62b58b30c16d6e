"""Run a script with an accident: at step $AT rank $AT_RANK does $DO, or dies at a save (torn)."""

# pyright: basic, reportPrivateImportUsage=false
import itertools
import os
import pathlib
import runpy
import signal
import sys

from ddptrain.checkpoint import draft
from ddptrain.world import agreement

DO, AT = os.environ["DO"], int(os.environ["AT"])
HERE = os.environ["RANK"] == os.environ.get("AT_RANK", "0")
_is_due, _write = agreement.Agreement.is_due, draft.write_manifest
_steps, _saves = itertools.count(1), itertools.count(1)


def is_due(self: agreement.Agreement) -> bool:
    if next(_steps) == AT and HERE:
        if DO == "stop":
            pathlib.Path(os.environ["STOP_FILE"]).touch()
        else:
            os.kill(os.getpid(), signal.Signals[f"SIG{DO}"])
    return _is_due(self)


def write_manifest(path: pathlib.Path, meta: draft.State, listed: list[draft.State]) -> None:
    if next(_saves) == AT:
        os.kill(os.getpid(), signal.SIGKILL)
    _write(path, meta, listed)


if DO == "torn":
    draft.write_manifest = write_manifest
else:
    agreement.Agreement.is_due = is_due
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
