"""Submit runs and follow their jobs."""

import collections.abc
import contextlib
import dataclasses
import datetime
import functools
import pathlib
import re
import uuid

from ddp.problem import Command, ParameterError, Problem, Results, Step
from ddp.project import copies
from ddp.run import catalog, creation, curve, folder
from ddp.run.model import UTC, Run
from ddp.slurm import cluster, jobs, remedies, submissions
from ddp.submit import job_program, tokens
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
        found = {
            "job-id": str(self.job_id),
            "run": self.run,
            "run-dir": str(self.folder),
            "log": str(self.folder / "logs" / f"{self.job_id}.out"),
            "script": str(self.folder / "job.sbatch"),
        }
        if self.limit:
            found["waits-for"] = self.limit
        return found


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


def new_mark() -> str:
    """Return a unique text for the job's comment, which identifies the job later."""
    return f"ddp:{uuid.uuid4().hex[:16]}"


def new_record(run: str, facts: dict[str, object]) -> dict[str, object]:
    """Make the job.json of a run before its job is submitted."""
    return {
        "format": 1,
        "job_id": None,
        "run": run,
        "submitted": now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        **facts,
    }


@dataclasses.dataclass(frozen=True)
class Submission:
    """A run on its way to Slurm."""

    workspace: Workspace
    run: str

    @property
    def path(self) -> pathlib.Path:
        """The run's folder."""
        return self.workspace.runs / self.run

    def claim(self) -> None:
        """Keep other commands from submitting this run.

        Raises ParameterError if one is submitting it now.
        """
        if not self.workspace.claims.take(self.run):
            text = f"another command is submitting {self.run}"
            raise ParameterError("run", text, remedy=catalog.LIST)

    def is_new(self) -> bool:
        """Return whether the run's folder does not exist yet."""
        return self.workspace.locate(str(self.path)).kind == "absent"

    def is_unfinished(self, sweep: str = "") -> bool:
        """Return whether an earlier submission left the folder before Slurm had its job."""
        return self.workspace.do(creation.is_unfinished, path=self.path, sweep=sweep)

    def read_kind(self) -> str | None:
        """Return the kind of the run: "" if job.json is damaged, None if this is not a run."""
        return self.workspace.do(creation.kind_of, path=self.path)

    def refuse_if_active(self) -> None:
        """Raise ParameterError if a job of this run is pending or running."""
        names = [self.run, catalog.read_record(self.workspace, self.run).get("sweep")]
        for name in filter(None, names):
            with jobs.asking():
                found = jobs.jobs(user=self.workspace.user, name=str(name))
            for known in found:
                if known.is_active:
                    text = f"{self.run} is active as job {known.job_id} ({known.state})"
                    cancel = Command("cancel", arguments=(known.name,))
                    text += "; wait for its end, or cancel it"
                    raise ParameterError("run", text, remedy=cancel)

    def submit(
        self,
        texts: dict[str, str],
        facts: dict[str, object],
        *,
        again: bool,
        token: str = "",
        kept: copies.Copy | None = None,
        secrets: collections.abc.Mapping[str, str] | None = None,
        notify: str = "",
        function: str = "",
        elements: collections.abc.Sequence[dict[str, str]] = (),
    ) -> Submitted:
        """Write the run's files and submit its script.

        A `token` is delivered, `secrets`, the URL to `notify`, and the file of a `function`.
        Raises Problem.

        job.json is there before Slurm has the job, with the job's mark and the record that it
        replaces. `elements` are the files of a sweep's runs.
        """
        workspace, path = self.workspace, self.path
        mark = new_mark()
        record = new_record(self.run, {"submission": mark, **facts})
        if again:
            record |= self._before()
        texts = {**texts, folder.RECORD: folder.dump(record)}
        program = job_program.archive()
        make = functools.partial(creation.create, program=program, again=again)
        if elements:
            make = functools.partial(creation.create_sweep, program=program, elements=elements)
        timeout_s = 120 if elements else 30
        former = workspace.do(make, timeout_s=timeout_s, path=path, texts=texts)

        undo = functools.partial(creation.undo, path, former, len(elements))
        steps: list[collections.abc.Callable[[], object]] = []
        if kept is not None:
            steps.append(kept.undo)
        steps.append(functools.partial(workspace.do, undo, timeout_s=timeout_s))
        with self.undone(*steps):
            if kept is not None:
                kept.place()
            if function:
                keep = functools.partial(creation.keep_function, path, pathlib.Path(function))
                workspace.do(keep, timeout_s=600)
            tokens.deliver(workspace, self.run, token)
            tokens.deliver_variables(workspace, self.run, secrets or {})
            tokens.deliver_notify(workspace, self.run, notify)
            job_id, limit = self.send("job.sbatch", texts["job.sbatch"], mark)

        full = {**folder.without_previous(record), "job_id": job_id}
        with contextlib.suppress(folders.WorkspaceError):  # the next look at the run does it
            workspace.do(folder.write_record, path=path, record=full)
        workspace.claims.drop(self.run)
        return Submitted(job_id, path, limit)

    def _before(self) -> dict[str, object]:
        """Return the fields of job.json that describe the run's earlier job."""
        summary = self.workspace.do(folder.summarised, path=self.path)
        found: dict[str, object] = {"summary_before": summary}
        if before := catalog.read_record(self.workspace, self.run):
            found["previous"] = folder.without_previous(before)
        return found

    @contextlib.contextmanager
    def undone(
        self, *steps: collections.abc.Callable[[], object]
    ) -> collections.abc.Generator[None]:
        """Do these steps if the submission in the block fails, but not if Slurm may have the job.

        Raises Problem.
        """
        try:
            yield
        except jobs.UncertainError as e:
            raise Problem(f"{self.run}: {e}", remedy=catalog.LIST) from e
        except (jobs.SlurmError, folders.WorkspaceError) as e:
            tokens.drop(self.workspace, self.run)
            for step in steps:
                step()
            if isinstance(e, jobs.SlurmError):
                raise cluster.refused(str(e)) from e
            raise

    def send(self, name: str, text: str, mark: str) -> tuple[int, str]:
        """Submit a script of the run's folder; return the job's id and the limit it waits for.

        Raises SlurmError.
        """
        job_id = self._send(name, text, mark)
        limit, is_final = submissions.explain_wait(job_id, user=self.workspace.user)
        if not is_final:
            return job_id, limit
        what = f"job {job_id} can never start: {limit}"
        try:
            jobs.cancel(job_id)
        except jobs.SlurmError as e:
            raise jobs.UncertainError(f"{what}; it cannot be cancelled: {e}") from e
        raise jobs.SlurmError(f"{what}; it is cancelled")

    def _send(self, name: str, text: str, mark: str) -> int:
        """Submit a script and return the job's id, also if sbatch's answer was lost."""
        theirs = _COMMENT.search(text)
        comment = f"{theirs[1]} {mark}" if theirs else mark
        try:
            return submissions.submit(f"--comment={comment}", str(self.path / name))
        except jobs.SlurmError as e:
            if not isinstance(e, jobs.UncertainError) and not _LOST_ANSWER.search(str(e)):
                raise
            try:
                found = submissions.find(mark, user=self.workspace.user, name=self.run)
            except jobs.SlurmError as silence:
                text = f"{e}; Slurm may have accepted the job"
                raise jobs.UncertainError(text) from silence
            if found is None:
                raise
            return found


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
    text = f"job {known.job_id} is held ({known.reason}): by an administrator,"
    text += " or slurmctld does not know the account "
    values = {"user": workspace.user, "uid": str(workspace.uid), "job": str(known.job_id)}
    add = f"useradd --no-create-home --uid {workspace.uid} {workspace.user}"
    plain = f"on slurmctld's host, as root: {add}; then: scontrol release {known.job_id}"
    return Problem(
        f"{text}{workspace.user} (uid {workspace.uid})",
        remedy=Step("add-account-and-release", plain, values),
    )


def now() -> datetime.datetime:
    """The time in UTC; tests replace it."""
    return datetime.datetime.now(UTC)
