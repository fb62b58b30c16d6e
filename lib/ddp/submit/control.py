"""Submit runs and follow their jobs."""

import collections.abc
import contextlib
import dataclasses
import datetime
import functools
import pathlib
import re
import time
import uuid

from ddp.problem import Command, ParameterError, Problem, Results, Step, UnfinishedError
from ddp.project import copies
from ddp.results import tables
from ddp.results.progress import REPORT_S, Log
from ddp.run import catalog, creation, curve, failure, folder, state, untrusted
from ddp.run.model import UTC, Run
from ddp.settings import Settings
from ddp.slurm import cluster, jobs, outages, remedies, submissions
from ddp.submit import tokens
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
LEAVE_S = 60.0  # how long a cancelled or requeued job may take to leave its nodes
_LOST_ANSWER = re.compile(r"timed out|no answer|zero bytes|connect", re.IGNORECASE)
_COMMENT = re.compile(r"^#SBATCH --comment=(.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A run that Slurm has accepted."""

    job_id: int
    folder: pathlib.Path
    limit: str = ""  # that it waits for

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.folder.name

    def as_results(self) -> Results:
        """Results that every submission reports."""
        return {
            "job-id": str(self.job_id),
            "run": self.run,
            "run-dir": str(self.folder),
            "log": str(self.folder / "logs" / f"{self.job_id}.out"),
            "script": str(self.folder / "job.sbatch"),
            **({"waits-for": self.limit} if self.limit else {}),
        }


def new_name(workspace: Workspace, kind: str) -> str:
    """Name a run after its kind and the time."""
    first = f"{kind}-{now():%Y%m%d-%H%M%S}"
    for name in (first, *(f"{first}-{number}" for number in range(2, 100))):
        if not workspace.claims.take(name):
            continue  # another action took it in the same second
        if workspace.locate(str(workspace.runs / name)).kind == "absent":
            return name
        workspace.claims.drop(name)
    raise Problem(f"{workspace.runs} holds 99 runs of this second; try again")


def claim(workspace: Workspace, run: str) -> None:
    """Keep other commands from submitting this run. Raises ParameterError if one is submitting it now."""
    if not workspace.claims.take(run):
        raise ParameterError("run", f"another command is submitting {run}", remedy=catalog.LIST)


def refuse_if_active(workspace: Workspace, run: str) -> None:
    """Raise ParameterError if a job of this run is pending or running."""
    names = [run, catalog.read_record(workspace, run).get("sweep")]
    with jobs.asking():
        found = [
            job for name in names if name for job in jobs.jobs(user=workspace.user, name=str(name))
        ]
    for known in found:
        if known.is_active:
            text = f"{run} is active as job {known.job_id} ({known.state}); wait for its end, or cancel it"
            raise ParameterError("run", text, remedy=Command("cancel", arguments=(known.name,)))


def new_mark() -> str:
    """Return a unique text that a submission's job carries in its comment, so that a later look finds the job."""
    return f"ddp:{uuid.uuid4().hex[:16]}"


def new_record(run: str, facts: dict[str, object]) -> dict[str, object]:
    """Make the job.json of a run that has no job yet."""
    return {
        "format": 1,
        "job_id": None,
        "run": run,
        "submitted": now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        **facts,
    }


def submit(
    settings: Settings,
    run: str,
    texts: dict[str, str],
    facts: dict[str, object],
    *,
    again: bool,
    token: bool = False,
    kept: copies.Copy | None = None,
    secrets: collections.abc.Mapping[str, str] | None = None,
    elements: collections.abc.Sequence[dict[str, str]] = (),
) -> Submitted:
    """Write a run's files and submit its script; with `token`, deliver Hugging Face's. Raises Problem.

    The run's job.json is there before Slurm has the job, with the job's mark and the record that it replaces.
    `elements` are the files of a sweep's runs.
    """
    workspace = settings.workspace
    path, mark = workspace.runs / run, new_mark()
    record = new_record(run, {"submission": mark, **facts})
    if again:  # the summary of an earlier job is not this one's
        record["summary_before"] = workspace.do(folder.summarised, path=path)
        if before := catalog.read_record(workspace, run):
            record["previous"] = folder.without_previous(before)
    texts = {**texts, folder.RECORD: folder.dump(record)}
    make = functools.partial(creation.create, again=again)
    if elements:
        make = functools.partial(creation.create_sweep, elements=elements)
    timeout_s = 120 if elements else 30
    former = workspace.do(make, timeout_s=timeout_s, path=path, texts=texts)
    undo = functools.partial(creation.undo, path, former, len(elements))
    undo_copy = () if kept is None else (kept.undo,)
    with undone(
        workspace,
        run,
        *undo_copy,
        lambda: workspace.do(undo, timeout_s=timeout_s),
    ):
        if kept is not None:
            kept.place()
        if token:
            tokens.deliver(settings, run)
        tokens.deliver_variables(workspace, run, secrets or {})
        job_id, limit = send(workspace, run, "job.sbatch", texts["job.sbatch"], mark)
    full = {**folder.without_previous(record), "job_id": job_id}
    with contextlib.suppress(folders.WorkspaceError):  # the next look at the run does it
        workspace.do(folder.write_record, path=path, record=full)
    workspace.claims.drop(run)
    return Submitted(job_id, path, limit)


@contextlib.contextmanager
def undone(
    workspace: Workspace, run: str, *steps: collections.abc.Callable[[], object]
) -> collections.abc.Generator[None]:
    """Do these steps if the submission in the block fails, but not if Slurm may have the job. Raises Problem."""
    try:
        yield
    except jobs.UncertainError as e:
        raise Problem(f"{run}: {e}", remedy=catalog.LIST) from e
    except (jobs.SlurmError, folders.WorkspaceError) as e:
        tokens.drop(workspace, run)
        for step in steps:
            step()
        raise cluster.refused(str(e)) if isinstance(e, jobs.SlurmError) else e from e


def send(workspace: Workspace, run: str, name: str, text: str, mark: str) -> tuple[int, str]:
    """Submit a script of a run's folder; return its job's id, and the limit that it waits for. Raises SlurmError."""
    job_id = _send(workspace, run, name, text, mark)
    limit, is_final = submissions.explain_wait(job_id, user=workspace.user)
    if not is_final:
        return job_id, limit
    what = f"job {job_id} would wait for ever: {limit}"
    try:
        jobs.cancel(job_id)
    except jobs.SlurmError as e:
        raise jobs.UncertainError(f"{what}; it cannot be cancelled: {e}") from e
    raise jobs.SlurmError(f"{what}; it is cancelled")


def _send(workspace: Workspace, run: str, name: str, text: str, mark: str) -> int:
    """Submit a script and return its job's id; if sbatch's answer was lost, look for the job."""
    theirs = _COMMENT.search(text)
    comment = f"{theirs[1]} {mark}" if theirs else mark
    try:
        return submissions.submit(f"--comment={comment}", str(workspace.runs / run / name))
    except jobs.SlurmError as e:
        if not isinstance(e, jobs.UncertainError) and not _LOST_ANSWER.search(str(e)):
            raise
        try:
            found = submissions.find(mark, user=workspace.user, name=run)
        except jobs.SlurmError as silence:
            raise jobs.UncertainError(f"{e}; Slurm may have accepted the job") from silence
        if found is None:
            raise
        return found


def follow(
    settings: Settings,
    submitted: Submitted,
    log: Log,
    *,
    timeout_s: float,
    to_the_end: bool = False,
) -> Results:
    """Wait for a job, report its progress, return its results.

    Args:
        settings: of the command, whose wait may have a limit, or be ended by someone.
        submitted: the job.
        log: gets the progress.
        timeout_s: in seconds; then the command has failed.
        to_the_end: the command goes on with what the job makes, so its wait is not ended.

    Raises:
        Problem: the job did not complete, or not in time.
        UnfinishedError: the command's wait is over; the job goes on.
    """
    workspace = settings.workspace
    settings.wait.begin(submitted.run, str(submitted.job_id))
    began = time.monotonic()
    last_reported, reported = 0.0, ""
    slurm = outages.PatientClient(log)
    while True:
        known = _ask(workspace, submitted, slurm)
        if known is None or not (isinstance(known, jobs.Silence) or known.is_active):
            return conclude(workspace, submitted, known)
        text = _describe(known, submitted)
        if settings.wait.is_over and not to_the_end:
            raise unfinished(settings, submitted.run, _so_far(submitted, known), log)
        if not isinstance(known, jobs.Silence):
            _refuse_if_held(workspace, submitted, known)
            if text != reported or time.monotonic() - last_reported >= REPORT_S:
                reported, last_reported = text, time.monotonic()
                is_running = known.state == "RUNNING"
                log(
                    _progress(workspace, submitted.run, text)
                    if is_running
                    else tables.Step(text, text)
                )
        if time.monotonic() - began >= timeout_s:
            results = _so_far(submitted, known)
            text = f"no end after {timeout_s:g} s: {text}; the job continues"
            raise Problem(text, remedy=Command("log", arguments=(submitted.run,)), results=results)
        pause(1.0 if time.monotonic() - began < 120 else 3.0)


def _ask(
    workspace: Workspace, submitted: Submitted, slurm: outages.PatientClient
) -> jobs.Job | jobs.Silence | None:
    """Ask for a submission's job. Raises Problem with its results if Slurm is silent for too long."""
    try:
        return slurm.ask(lambda: jobs.job(submitted.job_id, user=workspace.user))
    except Problem as e:
        e.results |= submitted.as_results()
        raise


def _so_far(submitted: Submitted, known: jobs.Job | jobs.Silence) -> Results:
    """Results of a job that has not ended."""
    state_now = "UNKNOWN" if isinstance(known, jobs.Silence) else known.state
    return {**submitted.as_results(), "state": state_now}


def _describe(known: jobs.Job | jobs.Silence, submitted: Submitted) -> str:
    """Describe a job that has not ended, in a line."""
    if isinstance(known, jobs.Silence):
        return f"job {submitted.job_id}: {known}"
    text = f"job {known.job_id} {known.state}"
    if known.state != "PENDING":
        return text
    return f"{text} ({known.reason})" + (
        f", requeued {known.restarts} times" if known.restarts else ""
    )


def _refuse_if_held(workspace: Workspace, submitted: Submitted, known: jobs.Job) -> None:
    """Raise Problem if a job is held so that its user cannot release it."""
    if problem := held(workspace, known):
        problem.results |= {**submitted.as_results(), "state": known.state, "reason": known.reason}
        raise problem


def unfinished(settings: Settings, run: str, results: Results, log: Log) -> UnfinishedError:
    """End a command's wait for a run: say how to go on, and return what is raised."""
    go_on = settings.render(Step("follow-run", f"ddp watch {run}", {"run": run}))
    log(f"no longer waiting for {run}, which goes on; to follow it: {go_on}")
    return UnfinishedError({**results, "to-follow": go_on})


def conclude(workspace: Workspace, submitted: Submitted, known: jobs.Job | None) -> Results:
    """Return the results of a completed job. Raises Problem with the reason if another ended otherwise."""
    tokens.drop(workspace, submitted.run)
    run = state.with_job(catalog.read(workspace, submitted.run), known)
    results = {**submitted.as_results(), **failure.results_of(run)}
    if run.remark:
        results["remark"] = untrusted.printable(run.remark, 400)
    if drawn := draw(run):
        results["curve-text"] = drawn
    if problem := failure.explain(workspace, run, submitted.job_id):
        problem.results = {**results, **problem.results}
        raise problem
    return results


def draw(run: Run) -> str:
    """Draw a run's losses as text; empty if it measured none."""
    return curve.draw(run.metrics.points("loss", 1000), run.metrics.points("val_loss", 1000))


def held(workspace: Workspace, known: jobs.Job | None) -> Problem | None:
    """Return why a job is held so that its user cannot release it; None if it is not."""
    if not (
        known is not None
        and known.state in WAITING
        and known.is_held
        and known.reason.startswith(remedies.HELD)
    ):
        return None
    text = f"job {known.job_id} is held ({known.reason}): by an administrator, or slurmctld does not know the account "
    values = {"user": workspace.user, "uid": str(workspace.uid), "job": str(known.job_id)}
    add = f"useradd --no-create-home --uid {workspace.uid} {workspace.user}"
    plain = f"on slurmctld's host, as root: {add}; then: scontrol release {known.job_id}"
    return Problem(
        f"{text}{workspace.user} (uid {workspace.uid})",
        remedy=Step("add-account-and-release", plain, values),
    )


def pause(seconds: float) -> None:
    """Sleep; tests replace it."""
    time.sleep(seconds)


def now() -> datetime.datetime:
    """The time in UTC; tests replace it."""
    return datetime.datetime.now(UTC)


def _progress(workspace: Workspace, name: str, text: str) -> tables.Step:
    """Describe how far a run is, from its metrics."""
    run = None
    with contextlib.suppress(folders.WorkspaceError):
        run = workspace.do(folder.read, timeout_s=3, path=workspace.runs / name, is_brief=True)
    if run is not None and run.beginning:
        return tables.Step(f"{text}, {run.beginning}", text)
    if run is None or run.metrics.step is None:
        return tables.Step(text, text)
    loss, total = run.metrics.last("loss"), f" of {run.total_steps}" if run.total_steps else ""
    words = f"step {run.metrics.step}{total}" + (f", loss {loss:.4f}" if loss is not None else "")
    return tables.Step(f"{text}, {words}", text)
