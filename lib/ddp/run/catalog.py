"""Find and load runs: their folders, joined with Slurm's records of their jobs."""

import collections
import collections.abc
import contextlib
import dataclasses
import pathlib
import re

from ddp.problem import Command, ParameterError, Problem, Results, Step, one_line
from ddp.results import tables
from ddp.run import folder, metrics, reading, state
from ddp.run.model import Run, State
from ddp.slurm import jobs, remedies, submissions
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

LIST = Command("list")
_LIST_NUMBER = Step("list-number", "ddp list")  # what was typed may have been 40_3
START = Command("submit")

Queue = tuple[jobs.Job, ...] | jobs.Silence  # what Slurm says of this user's jobs


def find(workspace: Workspace, named: str | None) -> tuple[str, int]:
    """Find a run and its job by name or a job's id; defaults to the newest. Raises ParameterError, for a sweep, too."""
    name, job_id = name_of(workspace, named, is_started=True)
    record = read_record(workspace, name)
    if record.get("kind") == "sweep":
        raise ParameterError("run", f"{name} is a sweep; name one of its runs, such as {name}-0")
    if job_id is None and type(number := record.get("job_id")) is int and "sweep" not in record:
        job_id = number
    silence = ""
    if job_id is None:
        found, silence = load(workspace, [name], is_brief=True)
        run = found[0]
        job_id = run.job_id or (run.job.job_id if run.job is not None else None)
    if job_id is None and silence:
        raise Problem(
            f"no file of {name} has a job's id, and {silence}", remedy=remedies.START_SLURMCTLD
        )
    if job_id is None:
        raise ParameterError("run", f"{workspace.runs} has no run {name} with a job", remedy=LIST)
    return name, job_id


def name_of(
    workspace: Workspace, named: str | None, *, is_started: bool = False
) -> tuple[str, int | None]:
    """Return the run that a name, a job's id or one like 40_3 stands for, and a named job. Raises ParameterError."""
    if named is None:
        newest = workspace.do(folder.newest, runs=workspace.runs, is_started=is_started)
        if newest is None:
            raise Problem(f"there is no run in {workspace.runs} yet", remedy=START)
        return newest, None
    if not (job := re.fullmatch(r"(\d+)(?:_(\d+))?", named, re.ASCII)) or read_record(
        workspace, named
    ):
        return named, None
    job_id, element = int(job[1]), None if job[2] is None else int(job[2])
    run = workspace.do(folder.find_job, runs=workspace.runs, job_id=job_id, element=element)
    if run is None:
        remedy = LIST if job[2] else _LIST_NUMBER
        raise ParameterError("run", f"no run in {workspace.runs} has job {named}", remedy=remedy)
    return run, job_id if element is None else None  # a run of a sweep has its own job


def read_record(workspace: Workspace, name: str) -> reading.Json:
    """Read a run's job.json; empty if there is none."""
    return workspace.do(folder.read_record, path=workspace.runs / name)


def load(
    workspace: Workspace, names: collections.abc.Sequence[str], *, is_brief: bool = False
) -> tuple[list[Run], str]:
    """Load runs with their states; also a line that says who is silent, if Slurm does not answer. Raises Problem.

    The states are those of the runs' files then.
    """
    found = [read(workspace, name, is_brief=is_brief) for name in names]
    queue = ask_queue(workspace)
    runs = judge(workspace, found, queue)
    return runs, silence_of(runs, queue)


def silence_of(runs: collections.abc.Iterable[Run], queue: Queue) -> str:
    """Return the line for results that Slurm does not answer; "" if it knows or denies each of these runs."""
    if isinstance(queue, jobs.Silence):
        return str(queue)
    return next((run.silence for run in runs if run.silence), "")


def ask_queue(workspace: Workspace) -> Queue:
    """Ask Slurm for this user's jobs."""
    return jobs.look(lambda: jobs.jobs(user=workspace.user))


def judge(workspace: Workspace, runs: collections.abc.Sequence[Run], queue: Queue) -> list[Run]:
    """Return runs as they were read from their folders, each with its state."""
    if isinstance(queue, jobs.Silence):
        return [_judged(workspace, run, queue, queue) for run in runs]
    runs = [_settled(workspace, run) for run in runs]
    known = {run.name: job_among(run, queue) for run in runs}
    known |= _accounted(workspace, [run for run in runs if known[run.name] is None])
    return [_judged(workspace, run, known[run.name], queue) for run in runs]


def _accounted(
    workspace: Workspace, runs: collections.abc.Sequence[Run]
) -> dict[str, jobs.Job | jobs.Silence | None]:
    """Return the accounting's record of runs, by their names, that the controller no longer knows."""
    by_job = {run.job_id: run for run in runs if run.job_id is not None}
    if not by_job:
        return {}
    try:
        known = jobs.accounted(tuple(by_job), user=workspace.user)
    except jobs.NotAnsweringError as e:
        silence = jobs.Silence(f"Slurm's accounting does not answer: {e}")
        return dict.fromkeys((run.name for run in by_job.values()), silence)
    found: dict[str, jobs.Job | jobs.Silence | None] = {}
    for number, job in known.items():
        run = by_job[number]
        if job.name in (
            run.name,
            run.record.get("sweep"),
        ):  # else a new controller gave its id to another's
            found[run.name] = job
    return found


def read(
    workspace: Workspace, name: str, *, is_brief: bool = False, reader: metrics.Reader | None = None
) -> Run:
    """Read a run's folder without asking Slurm. Raises Problem if it does not exist."""
    path = workspace.runs / name
    try:
        return workspace.do(folder.read, timeout_s=60, path=path, is_brief=is_brief, reader=reader)
    except folders.MissingError as e:
        raise Problem(f"there is no run {name!r} in {workspace.runs}", remedy=LIST) from e


def names(workspace: Workspace) -> list[str]:
    """List the runs, the last submitted first."""
    return workspace.do(folder.names, timeout_s=60, runs=workspace.runs)


def job_among(run: Run, known: collections.abc.Iterable[jobs.Job]) -> jobs.Job | None:
    """Find the run's active job, else its last one. Pending elements of a sweep share one record."""
    number = run.name.rpartition("-")[2]
    mine = [
        job
        for job in known
        if job.run_name == run.name
        or (run.kind == "prepare" and job.name == run.name)
        or (
            number.isdecimal()
            and job.name == run.record.get("sweep")
            and jobs.holds_task(job.task, int(number))
        )
    ]
    active = [job for job in mine if job.is_active]
    last = [job for job in mine if job.job_id == run.job_id]
    return next(iter([job for job in active if job in last] or active or last), None)


def job_of(workspace: Workspace, name: str, job_id: int) -> jobs.Job | None:
    """Ask Slurm for a run's job; None also if a new controller gave its id to another run. Raises SlurmError."""
    known = jobs.job(job_id, user=workspace.user)
    return known if known is not None and is_of(known, name) else None


def is_of(known: jobs.Job, run: str) -> bool:
    """Whether a job is this run's, by its name; the runs of a sweep share the sweep's."""
    return known.name == run or (
        known.array_id is not None and known.name == run.rpartition("-")[0]
    )


def _settled(workspace: Workspace, run: Run) -> Run:
    """Complete a submission whose end was not noted: Slurm has its job, or the run's log does, or there is none."""
    if not folder.is_intent(run.record):
        return run
    mark = str(run.record["submission"])
    with contextlib.suppress(jobs.SlurmError, folders.WorkspaceError):  # the next look tries again
        job_id = submissions.find(mark, user=workspace.user, name=run.name) or run.job_id
        workspace.do(folder.settle, path=run.folder, job_id=job_id)
        now = read(workspace, run.name, is_brief=True)
        return dataclasses.replace(now, metrics=run.metrics, checkpoints=run.checkpoints)
    return run


def _judged(
    workspace: Workspace, run: Run, job: jobs.Job | jobs.Silence | None, queue: Queue
) -> Run:
    if run.kind != "sweep":
        return state.with_job(run, job)
    runs = elements(workspace, run, queue)
    counts = collections.Counter(str(one.state) for one in runs)
    silence = silence_of(runs, queue)
    overall = State(whole(counts, has_answer=not silence))
    return dataclasses.replace(run, state=overall, why=counted(counts), silence=silence)


# -- sweeps ------------------------------------------------------------------------------------------------------------


def elements(workspace: Workspace, sweep: Run, queue: Queue) -> list[Run]:
    """Load the runs of a sweep; one that never started was cancelled with it, if Slurm knows that it ended."""
    count = min(reading.number(str(sweep.record.get("count")), 0), folder.MAX_LISTED)
    paths = [sweep.folder.with_name(f"{sweep.name}-{number}") for number in range(count)]

    def read_all() -> list[Run]:
        return [folder.read(path, is_brief=True) for path in paths if pathlib.Path(path).is_dir()]

    found = workspace.do(read_all, timeout_s=120)
    if isinstance(queue, jobs.Silence):
        return [state.with_job(run, queue) for run in found]
    known = {run.name: job_among(run, queue) for run in found}
    known |= _accounted(
        workspace, [run for run in found if known[run.name] is None and run.last_attempt is None]
    )
    return [_of_sweep(run, known[run.name]) for run in found]


def _of_sweep(run: Run, job: jobs.Job | jobs.Silence | None) -> Run:
    """Return an element of a sweep with its state, now that Slurm has answered."""
    if job is None and run.job_id is None:
        return dataclasses.replace(
            state.with_job(run, job), state=State.CANCELLED, why="it never started"
        )
    return state.with_job(run, job)


def show_sweep(workspace: Workspace, name: str, queue: Queue) -> tuple[Results, list[Run]]:
    """Return the state of a sweep as results with a table, and its runs."""
    runs = elements(workspace, read(workspace, name, is_brief=True), queue)
    best = best_of(runs)
    table: list[tuple[str, ...]] = [("RUN", "JOB-ID", "STATE", "STEP", "LOSS", "OPTIONS")]
    for run in runs:
        loss = "" if run.score is None else f"{run.score:.6g}" + (" *" if run is best else "")
        cells = (run.name, run.job_id or "", run.state, run.step or "", loss, run.options)
        table.append(tuple(map(str, cells)))
    counts = collections.Counter(str(run.state) for run in runs)
    silence = silence_of(runs, queue)
    results = {
        "sweep": name,
        "state": whole(counts, has_answer=not silence),
        "states": counted(counts),
    }
    results["runs"] = aligned(table)
    if best is not None:
        options = reading.printable(best.options)
        results |= {
            "best-run": best.name,
            "best-loss": f"{best.score:.6g}",
            "best-options": options,
        }
    if silence:
        results["slurm"] = silence
    return results, runs


def best_of(runs: collections.abc.Iterable[Run]) -> Run | None:
    """Return the completed run with the lowest loss: validation's, or without one training's."""
    scored = [
        (run.score, run.name, run)
        for run in runs
        if run.score is not None and run.state == State.COMPLETED
    ]
    return min(scored, default=(0, "", None))[2] if scored else None


def counted(states: collections.Counter[str]) -> str:
    """Return how many runs are in which state, in words."""
    return ", ".join(f"{count} {name}" for name, count in sorted(states.items()))


def whole(states: collections.Counter[str], *, has_answer: bool = True) -> str:
    """Return the state of a sweep: active while one of its runs is, then that of its worst run.

    Unless Slurm has answered, a run of an unknown state may be active.
    """
    if active := {name for name in states if State(name).is_active}:
        return "PENDING" if active == {"PENDING"} and len(states) == 1 else "RUNNING"
    if "UNKNOWN" in states and not has_answer:
        return "UNKNOWN"
    if len(states) < 2:
        return next(iter(states), "UNKNOWN")
    if set(states) - {"COMPLETED", "CANCELLED", "PREEMPTED"}:
        return "FAILED"
    return "PREEMPTED" if "PREEMPTED" in states else "CANCELLED"


def aligned(rows: collections.abc.Sequence[collections.abc.Sequence[str]]) -> str:
    """Make a table of rows; the first row is its head."""
    return tables.Table([[reading.printable(cell) for cell in row] for row in rows])


def cell(value: object) -> str:
    """Format a value for a table; a dash for none."""
    if value is None or value == "":
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else one_line(str(value), 200)
