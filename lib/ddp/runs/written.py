"""The files of a submission: written to the run's folder, and put back as they were where Slurm refuses the job."""

import dataclasses

from ddp.base import Settings
from ddp.runs import run_files
from ddp.workspace import folders


@dataclasses.dataclass(frozen=True)
class Written:
    """What a submission wrote, and what it replaced."""

    settings: Settings
    run: str
    former: dict[str, str | None] | None  # by name; None: the folder was not there

    def undo(self) -> None:
        """Remove a run that is new; give one that was there its former files."""
        place: dict[str, object] = {"workspace": str(self.settings.folder), "run": self.run}
        if self.former is None:
            folders.call(self.settings, run_files.remove_run, **place)
        else:
            folders.call(self.settings, run_files.restore_run, **place, former=self.former)


def write(settings: Settings, run: str, texts: dict[str, str], *, again: bool) -> Written:
    """Write a run's files by name. Raises WorkspaceError where the folder is there, unless `again`."""
    place: dict[str, object] = {"workspace": str(settings.folder), "run": run}
    return Written(
        settings, run, folders.call(settings, run_files.create_run, **place, texts=texts, again=again)["former"]
    )
