"""An attempt at a run: the variables of its job, and the outcome for its batch script."""

import os
import pathlib

from ddptrain.ground import files

RUN_DIR, STOP_FILE, ATTEMPT = "RUN_DIR", "STOP_FILE", "RUN_ATTEMPT_ID"  # variables of the job
DONE, PREEMPTED, FAILED = "done", "preempted", "failed"  # outcomes


def name() -> str:
    """Return the name of this attempt at the run, `local` outside of a job."""
    return os.environ.get(ATTEMPT) or "local"


def has_outcome(run_dir: pathlib.Path | None) -> bool:
    """Return whether a rank of this attempt has reported how it ended."""
    path = _outcome(run_dir)
    return path is not None and path.exists()


def write_outcome(run_dir: pathlib.Path | None, outcome: str, **facts: object) -> None:
    """Report to the batch script how the attempt ended, in control/<attempt>.outcome. Rank 0 only.

    The exit code cannot: torchrun turns every worker's code into 1.
    """
    if path := _outcome(run_dir):
        files.write_json(path, {"outcome": outcome, **facts}, indent=None)


def _outcome(run_dir: pathlib.Path | None) -> pathlib.Path | None:
    attempt = os.environ.get(ATTEMPT)
    if run_dir is None or not attempt:
        return None
    return run_dir / "control" / f"{attempt}.outcome"
