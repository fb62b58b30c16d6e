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
        workspace = str(self.settings.folder)
        if self.former is None:
            folders.call(self.settings, run_files.remove_run, workspace=workspace, run=self.run)
        else:
            former = self.former
            folders.call(self.settings, run_files.restore_run, workspace=workspace, run=self.run, former=former)


def write(settings: Settings, run: str, texts: dict[str, str], *, again: bool) -> Written:
    """Write a run's files by name. Raises WorkspaceError where the folder is there, unless `again`."""
    workspace = str(settings.folder)
    made = folders.call(settings, run_files.create_run, workspace=workspace, run=run, texts=texts, again=again)
    return Written(settings, run, made["former"])
