"""A submitted run, followed to the end of its job."""

import contextlib
import dataclasses
import time

from ddp.host import waits
from ddp.problem import Command, Problem, Results, UnfinishedError
from ddp.results import tables
from ddp.results.progress import REPORT_S, Log
from ddp.run import catalog, failure, folder, state, untrusted
from ddp.settings import Settings
from ddp.slurm import jobs, outages
from ddp.submit import control, tokens
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

_OFTEN_S = 120  # how long a job is asked for each second


@dataclasses.dataclass(frozen=True)
class Follower:
    """Follows one job, and reports its progress."""

    workspace: Workspace
    wait: waits.Wait  # of the command, which may have a limit, or be ended by someone
    submitted: control.Submitted
    log: Log

    def follow(self, *, timeout_s: float, to_the_end: bool = False) -> Results:
        """Wait for the job and return its results; after `timeout_s` the command has failed.

        With `to_the_end` the command needs the job's output, so its wait is not ended.

        Raises:
            Problem: the job did not complete, or not in time.
            UnfinishedError: the command's wait is over; the job goes on.
        """
        submitted = self.submitted
        self.wait.begin(submitted.run, str(submitted.job_id))
        began = time.monotonic()
        last_reported, reported = 0.0, ""
        slurm = outages.PatientClient(self.log)
        while True:
            known = self._ask(slurm)
            if known is None or not (isinstance(known, jobs.Silence) or known.is_active):
                return self.conclude(known)

            text = self._describe(known)
            if self.wait.is_over and not to_the_end:
                raise UnfinishedError(submitted.run, self._so_far(known))
            if not isinstance(known, jobs.Silence):
                self._refuse_if_held(known)
                is_due = time.monotonic() - last_reported >= REPORT_S
                if text != reported or is_due:
                    reported = text
                    last_reported = time.monotonic()
                    self.log(self._progress(known, text))
            if time.monotonic() - began >= timeout_s:
                text = f"no end after {timeout_s:g} s: {text}; the job continues"
                show = Command("log", arguments=(submitted.run,))
                raise Problem(text, remedy=show, results=self._so_far(known))
            self.wait.pause(1.0 if time.monotonic() - began < _OFTEN_S else 3.0)

    def conclude(self, known: jobs.Job | None) -> Results:
        """Return the results of a completed job.

        Raises Problem with the reason if it ended otherwise.
        """
        submitted = self.submitted
        tokens.drop(self.workspace, submitted.run)
        run = state.with_job(catalog.read(self.workspace, submitted.run), known)
        results = {**submitted.as_results(), **failure.results_of(run)}
        if run.remark:
            results["remark"] = untrusted.printable(run.remark, 400)
        if drawn := control.draw(run):
            results["curve-text"] = drawn
        if problem := failure.explain(self.workspace, run, submitted.job_id):
            problem.results = {**results, **problem.results}
            raise problem
        return results

    def _ask(self, slurm: outages.PatientClient) -> jobs.Job | jobs.Silence | None:
        """Ask for the job. Raises Problem with its results if Slurm is silent for too long."""
        try:
            return slurm.ask(lambda: jobs.job(self.submitted.job_id, user=self.workspace.user))
        except Problem as e:
            e.results |= self.submitted.as_results()
            raise

    def _so_far(self, known: jobs.Job | jobs.Silence) -> Results:
        """Return the results of a job that has not ended."""
        state_now = "UNKNOWN" if isinstance(known, jobs.Silence) else known.state
        return {**self.submitted.as_results(), "state": state_now}

    def _describe(self, known: jobs.Job | jobs.Silence) -> str:
        """Describe a job that has not ended, in a line."""
        if isinstance(known, jobs.Silence):
            return f"job {self.submitted.job_id}: {known}"
        text = f"job {known.job_id} {known.state}"
        if known.state != "PENDING":
            return text
        text += f" ({known.reason})"
        return f"{text}, requeued {known.restarts} times" if known.restarts else text

    def _refuse_if_held(self, known: jobs.Job) -> None:
        """Raise Problem if the job is held so that its user cannot release it."""
        if problem := control.held(self.workspace, known):
            about = {"state": known.state, "reason": known.reason}
            problem.results |= {**self.submitted.as_results(), **about}
            raise problem

    def _progress(self, known: jobs.Job, text: str) -> tables.Step:
        """Describe how far the run is, from its metrics once it runs."""
        words = ""
        if known.state == "RUNNING":
            with contextlib.suppress(folders.WorkspaceError):
                words = self._read_progress()
        return tables.Step(f"{text}, {words}" if words else text, text)

    def _read_progress(self) -> str:
        path = self.workspace.runs / self.submitted.run
        run = self.workspace.do(folder.read, timeout_s=3, path=path, is_brief=True)
        if run.beginning:
            return run.beginning
        if run.metrics.step is None:
            return ""
        words = f"step {run.metrics.step}"
        if run.total_steps:
            words += f" of {run.total_steps}"
        loss = run.metrics.last("loss")
        return words if loss is None else f"{words}, loss {loss:.4f}"


def follower(settings: Settings, submitted: control.Submitted, log: Log) -> Follower:
    """Return a follower of a job for the command with these settings."""
    return Follower(settings.workspace, settings.wait, submitted, log)
