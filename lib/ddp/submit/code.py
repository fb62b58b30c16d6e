"""The code of a script's run: copied into the run's folder when it is submitted, so that later edits change nothing."""

import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import shutil
import time

from ddp import snapshot, tables
from ddp.base import Log, ParameterError, Settings
from ddp.options import models
from ddp.workspace import folders

FOLDER = "code"  # in the run's folder; of later submissions of the run: code-2, code-3 ...
_COPY_S = 600.0
_TELL_S = 1.0  # between two lines of progress


@dataclasses.dataclass(frozen=True)
class Kept:
    """The copy, still beside the run's folder, and where it goes."""

    snapshot: snapshot.Snapshot
    folder: pathlib.Path

    @property
    def script(self) -> str:
        """Return the script's path in the run's folder."""
        return str(self.folder / self.snapshot.script)

    def place(self) -> None:
        """Move the copy into the run's folder, which is there by now."""
        self.snapshot.root.rename(self.folder)

    def remove(self) -> None:
        """Remove the copy from the run's folder: its submission failed."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def facts(self) -> dict[str, object]:
        """Describe the copy for job.json."""
        found = self.snapshot
        return {
            "folder": self.folder.name, "script": found.script, "origin": str(found.origin), "files": found.num_files,
            "bytes": found.size_bytes, "commit": found.commit, "dirty": found.is_dirty, "sha256": found.sha256,
        }  # fmt: skip


@contextlib.contextmanager
def kept(settings: Settings, params: models.Training, run: str, log: Log) -> collections.abc.Generator[Kept | None]:
    """Copy the folder of the script and yield the copy; None for what is no script, or is to run from where it lies.

    Raises ParameterError: the code cannot be kept.
    """
    if params.workload in ("gpt", "smoke") or not params.snapshot:
        yield None
        return
    partial = settings.runs / f".{FOLDER}-{run}-{os.getpid()}"

    def take() -> folders.Json:
        script = pathlib.Path(params.workload)
        others = [settings.runs, settings.datasets, settings.environments, *_beside(settings, script)]
        return {"taken": snapshot.take(script, partial, leave_out=others, copied=_progress(script, log))}

    try:
        taken: snapshot.Snapshot = folders.call(settings, take, timeout_s=_COPY_S)["taken"]
    except snapshot.SnapshotError as e:
        raise ParameterError("workload", str(e)) from e
    try:
        yield Kept(taken, settings.runs / run / _free_name(settings.runs / run))
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # not there any more once it was placed


def _progress(script: pathlib.Path, log: Log) -> collections.abc.Callable[[int, int], None]:
    """Make a function that logs how far the copy is, every few seconds."""
    logged = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal logged
        if time.monotonic() - logged >= _TELL_S:
            logged = time.monotonic()
            text, words = f"keeping the folder of {script.name}", f"{done} of {total} files"
            log(tables.Step(f"{text}: {words}", text, words, done=done, total=total))

    return tell


def _beside(settings: Settings, script: pathlib.Path) -> list[pathlib.Path]:
    """List a script's neighbours in the workspace's own folders, which are no project: the script alone is kept."""
    try:
        script = script.resolve(strict=True)
        if script.parent in [folder.resolve() for folder in settings.folders] or os.path.ismount(script.parent):
            return [path for path in script.parent.iterdir() if path != script]
    except OSError:
        return []  # what is wrong with the script is reported when it is copied
    return []


def _free_name(run: pathlib.Path) -> str:
    number = 1
    while (run / (name := FOLDER if number == 1 else f"{FOLDER}-{number}")).exists():
        number += 1
    return name
