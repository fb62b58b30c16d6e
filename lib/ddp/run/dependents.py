"""Which runs the jobs in the queue use: their own, and those that they read from."""

import collections.abc
import dataclasses
import re

from ddp.run import catalog, folder, removal
from ddp.run.model import Run
from ddp.slurm import jobs
from ddp.workspace.folders import Workspace


@dataclasses.dataclass(frozen=True)
class Dependents:
    """The jobs in the queue, and the specifications of those jobs."""

    queue: tuple[jobs.Job, ...]
    instructions: collections.abc.Mapping[str, str]  # by the run's name

    def reason(self, run: Run) -> str:
        """Return why a run is in use, "" if nothing uses it."""
        job = self._job_of(run)
        if job is not None:
            return f"job {job.job_id} is {job.state}"
        if folder.is_under_way(run.record, run.written):
            return "another command is submitting it"
        # A name goes on with these letters
        place = re.compile(rf"{re.escape(str(run.folder))}(?![A-Za-z0-9._-])")
        for name, text in self.instructions.items():
            if name != run.name and place.search(text):
                return f"the job of {name} reads from it"
        return ""

    def _job_of(self, run: Run) -> jobs.Job | None:
        """Return the active job of a run, or one of a sweep's."""
        found = catalog.job_among(run, self.queue)
        if found is not None and found.is_active:
            return found
        for job in self.queue:
            if job.is_active and job.name == run.name:
                return job
        return None


def ask(workspace: Workspace) -> Dependents:
    """Ask Slurm for this user's jobs, and read their specifications. Raises Problem."""
    with jobs.asking():
        queue = tuple(jobs.jobs(user=workspace.user))
    names = {job.name for job in queue if job.is_active}
    names |= {job.run_name for job in queue if job.is_active}
    instructions: dict[str, str] = {}
    for name in sorted(names):
        instructions[name] = workspace.do(removal.instructions, path=workspace.runs / name)
    return Dependents(queue, instructions)
