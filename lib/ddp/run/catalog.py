"""Find and load runs: their folders, joined with Slurm's records of their jobs."""

import collections
import collections.abc
import contextlib
import dataclasses
import pathlib
import re

from ddp.base import ParameterError, Results, Settings, TrainerError
from ddp.problem import Command, Step, one_line
from ddp.run import folder, metrics, reading, state
from ddp.run.model import Run, State
from ddp.slurm import jobs, submissions
from ddp.view import tables
from ddp.workspace import folders

LIST = Command("list")
_LIST_NUMBER = Step("list-number", "ddp list")  # what was typed may have been 40_3
START = Command("submit")


def find(settings: Settings, named: str | None) -> tuple[str, int]:
    """Find a run and its job by name or a job's id; defaults to the newest. Raises ParameterError, for a sweep, too."""
    name, job_id = name_of(settings, named, is_started=True)
    record = read_record(settings, name)
    if record.get("kind") == "sweep":
        raise ParameterError("run", f"{name} is a sweep; name one of its runs, such as {name}-0")
    if job_id is None and type(number := record.get("job_id")) is int and "sweep" not in record:
        job_id = number
    if job_id is None:
        run = load(settings, [name], is_brief=True)[0][0]
        job_id = run.job_id or (run.job.job_id if run.job is not None else None)
    if job_id is None:
        raise ParameterError("run", f"{settings.runs} has no run {name} with a job", remedy=LIST)
    return name, job_id


def name_of(settings: Settings, named: str | None, *, is_started: bool = False) -> tuple[str, int | None]:
    """Return the run that a name, a job's id or one like 40_3 stands for, and a named job. Raises ParameterError."""
    if named is None:
        newest = folders.call(settings, folder.newest, runs=settings.runs, is_started=is_started)
        if newest is None:
            raise TrainerError(f"there is no run in {settings.runs} yet", remedy=START)
        return newest, None
    if not (job := re.fullmatch(r"(\d+)(?:_(\d+))?", named, re.ASCII)) or read_record(settings, named):
        return named, None
    job_id, element = int(job[1]), None if job[2] is None else int(job[2])
    run = folders.call(settings, folder.find_job, runs=settings.runs, job_id=job_id, element=element)
    if run is None:
        remedy = LIST if job[2] else _LIST_NUMBER
        raise ParameterError("run", f"no run in {settings.runs} has job {named}", remedy=remedy)
    return run, job_id if element is None else None  # a run of a sweep has its own job


def read_record(settings: Settings, name: str) -> reading.Json:
    """Read a run's job.json; empty if there is none."""
    return folders.call(settings, folder.read_record, path=settings.runs / name)


def load(settings: Settings, names: collections.abc.Sequence[str], *, is_brief: bool = False) -> tuple[list[Run], str]:
    """Load runs with their states; also why Slurm could not be asked, if so. Raises TrainerError."""
    found = [read(settings, name, is_brief=is_brief) for name in names]
    try:
        known = jobs.jobs(user=settings.user)
    except jobs.SlurmError as e:
        return found, f"Slurm does not answer, so states are from the runs' files: {e}"
    found = [_settled(settings, run, is_brief=is_brief) for run in found]
    by_name = {run.name: job_among(run, known) for run in found}
    lost = {run.job_id: run for run in found if run.job_id is not None and by_name[run.name] is None}
    if lost:
        for number, job in jobs.accounted(tuple(lost), user=settings.user).items():
            if is_of(job, lost[number].name):
                by_name[lost[number].name] = job
    return [_judged(settings, run, by_name[run.name], known) for run in found], ""


def read(settings: Settings, name: str, *, is_brief: bool = False, reader: metrics.Reader | None = None) -> Run:
    """Read a run's folder without asking Slurm. Raises TrainerError if it does not exist."""
    path = settings.runs / name
    try:
        return folders.call(settings, folder.read, timeout_s=60, path=path, is_brief=is_brief, reader=reader)
    except folders.MissingError as e:
        raise TrainerError(f"there is no run {name!r} in {settings.runs}", remedy=LIST) from e


def names(settings: Settings) -> list[str]:
    """List the runs, the last submitted first."""
    return folders.call(settings, folder.names, timeout_s=60, runs=settings.runs)


def job_among(run: Run, known: collections.abc.Iterable[jobs.Job]) -> jobs.Job | None:
    """Find the run's active job, else its last one. Pending elements of a sweep share one record."""
    number = run.name.rpartition("-")[2]
    mine = [
        job
        for job in known
        if job.run_name == run.name
        or (run.kind == "prepare" and job.name == run.name)
        or (number.isdecimal() and job.name == run.record.get("sweep") and jobs.holds_task(job.task, int(number)))
    ]
    active = [job for job in mine if job.is_active]
    last = [job for job in mine if job.job_id == run.job_id]
    return next(iter([job for job in active if job in last] or active or last), None)


def job_of(settings: Settings, name: str, job_id: int) -> jobs.Job | None:
    """Ask Slurm for a run's job; None also if a new controller gave its id to another run. Raises TrainerError."""
    with jobs.asking():
        known = jobs.job(job_id, user=settings.user)
    return known if known is not None and is_of(known, name) else None


def is_of(known: jobs.Job, run: str) -> bool:
    """Whether a job is this run's, by its name; the runs of a sweep share the sweep's."""
    return known.name == run or (known.array_id is not None and known.name == run.rpartition("-")[0])


def _settled(settings: Settings, run: Run, *, is_brief: bool) -> Run:
    """Complete a submission whose end was not noted: Slurm has its job, or the run's log does, or there is none."""
    if not folder.is_intent(run.record):
        return run
    mark = str(run.record["submission"])
    with contextlib.suppress(jobs.SlurmError, folders.WorkspaceError):  # the next look tries again
        job_id = submissions.find(mark, user=settings.user, name=run.name) or run.job_id
        folders.call(settings, folder.settle, path=run.folder, job_id=job_id)
        return read(settings, run.name, is_brief=is_brief)
    return run


def _judged(settings: Settings, run: Run, job: jobs.Job | None, known: collections.abc.Sequence[jobs.Job]) -> Run:
    if run.kind != "sweep":
        return state.with_job(run, job)
    counts = collections.Counter(str(one.state) for one in elements(settings, run, known))
    return dataclasses.replace(run, state=State(whole(counts)), why=counted(counts))


# -- sweeps ------------------------------------------------------------------------------------------------------------


def elements(settings: Settings, sweep: Run, known: collections.abc.Sequence[jobs.Job] | None = None) -> list[Run]:
    """Load the runs of a sweep; one that never started was cancelled with it, if Slurm knows that it ended."""
    count = min(reading.number(str(sweep.record.get("count")), 0), folder.MAX_LISTED)
    paths = [sweep.folder.with_name(f"{sweep.name}-{number}") for number in range(count)]

    def read_all() -> list[Run]:
        return [folder.read(path, is_brief=True) for path in paths if pathlib.Path(path).is_dir()]

    found = folders.call(settings, read_all, timeout_s=120)
    if known is None:
        with jobs.asking():
            known = jobs.jobs(user=settings.user, name=sweep.name)
    judged = [state.with_job(run, job_among(run, known)) for run in found]
    lost = [run.job_id for run in judged if run.job is None and run.last_attempt is None and run.job_id]
    accounted = jobs.accounted(lost, user=settings.user) if lost else {}
    return [
        dataclasses.replace(run, state=State.CANCELLED, why="it never started")
        if run.job is None and run.job_id is None
        else state.with_job(run, accounted.get(run.job_id or 0, run.job))
        for run in judged
    ]


def show_sweep(settings: Settings, name: str) -> tuple[Results, list[Run]]:
    """Return the state of a sweep as results with a table, and its runs."""
    runs = elements(settings, read(settings, name, is_brief=True))
    best = best_of(runs)
    table: list[tuple[str, ...]] = [("RUN", "JOB-ID", "STATE", "STEP", "LOSS", "OPTIONS")]
    for run in runs:
        loss = "" if run.score is None else f"{run.score:.6g}" + (" *" if run is best else "")
        cells = (run.name, run.job_id or "", run.state, run.step or "", loss, run.options)
        table.append(tuple(map(str, cells)))
    counts = collections.Counter(str(run.state) for run in runs)
    results = {"sweep": name, "state": whole(counts), "states": counted(counts), "runs": aligned(table)}
    if best is not None:
        options = reading.printable(best.options)
        results |= {"best-run": best.name, "best-loss": f"{best.score:.6g}", "best-options": options}
    return results, runs


def best_of(runs: collections.abc.Iterable[Run]) -> Run | None:
    """Return the completed run with the lowest loss: validation's, or without one training's."""
    scored = [(run.score, run.name, run) for run in runs if run.score is not None and run.state == State.COMPLETED]
    return min(scored, default=(0, "", None))[2] if scored else None


def counted(states: collections.Counter[str]) -> str:
    """Return how many runs are in which state, in words."""
    return ", ".join(f"{count} {name}" for name, count in sorted(states.items()))


def whole(states: collections.Counter[str]) -> str:
    """Return the state of a sweep: active while one of its runs is, then that of its worst run."""
    if active := {name for name in states if State(name).is_active}:
        return "PENDING" if active == {"PENDING"} and len(states) == 1 else "RUNNING"
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
