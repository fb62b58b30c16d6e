"""Find and load runs: their folders, joined with Slurm's records of their jobs."""

import collections
import collections.abc
import contextlib
import dataclasses
import math
import re

from ddp.problem import Command, ParameterError, Problem, Results, Step, one_line
from ddp.results import tables
from ddp.run import folder, metrics, state, untrusted
from ddp.run.model import Run, State
from ddp.slurm import jobs, remedies, submissions
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

LIST = Command("list")
_LIST_NUMBER = Step("list-number", "ddp list")  # the user may have typed 40_3
START = Command("submit")

Queue = tuple[jobs.Job, ...] | jobs.Silence  # Slurm's answer about this user's jobs


def find(workspace: Workspace, named: str | None) -> tuple[str, int]:
    """Find a run and its job by a name or a job's id; None stands for the newest run.

    Raises ParameterError, also for a sweep.
    """
    name, job_id = name_of(workspace, named, is_started=True)
    record = read_record(workspace, name)
    if record.get("kind") == "sweep":
        raise ParameterError("run", f"{name} is a sweep; name one of its runs, such as {name}-0")
    if job_id is not None:
        return name, job_id

    recorded = record.get("job_id")
    if type(recorded) is int and "sweep" not in record:
        return name, recorded
    runs, silence = load(workspace, [name], is_brief=True)
    run = runs[0]
    found = run.job_id or (run.job.job_id if run.job is not None else None)
    if found is not None:
        return name, found
    if silence:
        text = f"no file of {name} has a job's id, and {silence}"
        raise Problem(text, remedy=remedies.START_SLURMCTLD)
    raise ParameterError("run", f"{workspace.runs} has no run {name} with a job", remedy=LIST)


def name_of(
    workspace: Workspace, named: str | None, *, is_started: bool = False
) -> tuple[str, int | None]:
    """Return the run that a name, a job's id or one like 40_3 stands for, and a named job's id.

    None stands for the newest run. Raises ParameterError.
    """
    if named is None:
        newest = workspace.do(folder.newest, runs=workspace.runs, is_started=is_started)
        if newest is None:
            raise Problem(f"there is no run in {workspace.runs} yet", remedy=START)
        return newest, None

    job = re.fullmatch(r"(\d+)(?:_(\d+))?", named, re.ASCII)
    if job is None or read_record(workspace, named):
        return named, None
    job_id = int(job[1])
    element = None if job[2] is None else int(job[2])
    run = workspace.do(folder.find_job, runs=workspace.runs, job_id=job_id, element=element)
    if run is None:
        remedy = _LIST_NUMBER if element is None else LIST
        raise ParameterError("run", f"no run in {workspace.runs} has job {named}", remedy=remedy)
    if element is not None:  # a run of a sweep has its own job
        return run, None
    return run, job_id


def read_record(workspace: Workspace, name: str) -> untrusted.Json:
    """Read a run's job.json, or {}."""
    return workspace.do(folder.read_record, path=workspace.runs / name)


def load(
    workspace: Workspace, names: collections.abc.Sequence[str], *, is_brief: bool = False
) -> tuple[list[Run], str]:
    """Load runs with their states, and return also why Slurm does not answer, or "".

    Without Slurm the states come from the runs' files. Raises Problem.
    """
    found = [read(workspace, name, is_brief=is_brief) for name in names]
    queue = ask_queue(workspace)
    runs = judge(workspace, found, queue)
    return runs, silence_of(runs, queue)


def silence_of(runs: collections.abc.Iterable[Run], queue: Queue) -> str:
    """Return why Slurm did not answer for these runs, or ""."""
    if isinstance(queue, jobs.Silence):
        return str(queue)
    for run in runs:
        if run.silence:
            return run.silence
    return ""


def ask_queue(workspace: Workspace) -> Queue:
    """Ask Slurm for this user's jobs."""
    return jobs.look(lambda: jobs.jobs(user=workspace.user))


def judge(workspace: Workspace, runs: collections.abc.Sequence[Run], queue: Queue) -> list[Run]:
    """Return runs that were read from their folders, each with its state."""
    if isinstance(queue, jobs.Silence):
        return [_judged(workspace, run, queue, queue) for run in runs]

    runs = [_settled(workspace, run) for run in runs]
    known: dict[str, jobs.Job | jobs.Silence | None] = {}
    for run in runs:
        known[run.name] = job_among(run, queue)
    left = [run for run in runs if known[run.name] is None]
    known |= _accounted(workspace, left)
    return [_judged(workspace, run, known[run.name], queue) for run in runs]


def _accounted(
    workspace: Workspace, runs: collections.abc.Sequence[Run]
) -> dict[str, jobs.Job | jobs.Silence | None]:
    """Return the accounting's records, by name, of runs that the controller no longer knows."""
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
        if job.name in (run.name, run.record.get("sweep")):
            found[run.name] = job
        # else a new controller gave its id to another run's job
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
    """Find the run's active job, or else its last one."""
    mine = [job for job in known if _belongs_to(job, run)]
    active = [job for job in mine if job.is_active]
    last = [job for job in mine if job.job_id == run.job_id]
    both = [job for job in active if job in last]
    candidates = both or active or last
    return candidates[0] if candidates else None


def _belongs_to(job: jobs.Job, run: Run) -> bool:
    if job.run_name == run.name:
        return True
    if run.kind == "prepare" and job.name == run.name:
        return True
    number = run.name.rpartition("-")[2]
    if not number.isdecimal() or job.name != run.record.get("sweep"):
        return False
    return jobs.holds_task(job.task, int(number))  # pending elements of a sweep share one record


def job_of(workspace: Workspace, name: str, job_id: int) -> jobs.Job | None:
    """Ask Slurm for a run's job; None if it knows none. Raises SlurmError.

    A new controller may have given its id to another run's job.
    """
    known = jobs.job(job_id, user=workspace.user)
    if known is None or not is_of(known, name):
        return None
    return known


def is_of(known: jobs.Job, run: str) -> bool:
    """Whether a job is this run's, by its name; jobs of an array have the sweep's name."""
    is_of_sweep = known.array_id is not None and known.name == run.rpartition("-")[0]
    return is_of_sweep or known.name == run


def _settled(workspace: Workspace, run: Run) -> Run:
    """Complete a submission that could not note its job: Slurm, or the run's log, may know it."""
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


# -- sweeps ----------------------------------------------------------------------------------------


def elements(workspace: Workspace, sweep: Run, queue: Queue) -> list[Run]:
    """Load the runs of a sweep; one that never started and is unknown to Slurm was cancelled."""
    count = min(untrusted.number(str(sweep.record.get("count")), 0), folder.MAX_LISTED)
    paths = [sweep.folder.with_name(f"{sweep.name}-{number}") for number in range(count)]

    def read_all() -> list[Run]:
        return [folder.read(path, is_brief=True) for path in paths if path.is_dir()]

    found = workspace.do(read_all, timeout_s=120)
    if isinstance(queue, jobs.Silence):
        return [state.with_job(run, queue) for run in found]
    known: dict[str, jobs.Job | jobs.Silence | None] = {}
    for run in found:
        known[run.name] = job_among(run, queue)
    left = [run for run in found if known[run.name] is None and run.last_attempt is None]
    known |= _accounted(workspace, left)
    return [_of_sweep(run, known[run.name]) for run in found]


def _of_sweep(run: Run, job: jobs.Job | jobs.Silence | None) -> Run:
    """Return an element of a sweep with its state, now that Slurm has answered."""
    judged = state.with_job(run, job)
    if job is None and run.job_id is None:
        return dataclasses.replace(judged, state=State.CANCELLED, why="it never started")
    return judged


def show_sweep(workspace: Workspace, name: str, queue: Queue) -> tuple[Results, list[Run]]:
    """Return the state of a sweep as results with a table, and its runs."""
    runs = elements(workspace, read(workspace, name, is_brief=True), queue)
    best = best_of(runs)
    head = ("RUN", "JOB-ID", "STATE", "STEP", "LOSS", "OPTIONS")
    rows = [_element_row(run, is_best=run is best) for run in runs]
    counts = collections.Counter(str(run.state) for run in runs)
    silence = silence_of(runs, queue)
    results: Results = {
        "sweep": name,
        "state": whole(counts, has_answer=not silence),
        "states": counted(counts),
        "runs": aligned([head, *rows]),
    }
    if best is not None:
        results["best-run"] = best.name
        results["best-loss"] = f"{best.score:.6g}"
        results["best-options"] = untrusted.printable(best.options)
    if silence:
        results["slurm"] = silence
    return results, runs


def _element_row(run: Run, *, is_best: bool) -> tuple[str, ...]:
    """Make the row of a sweep's run; an asterisk marks the best loss."""
    loss = "" if run.score is None else f"{run.score:.6g}"
    if is_best:
        loss += " *"
    cells = (run.name, run.job_id or "", run.state, run.step or "", loss, run.options)
    return tuple(map(str, cells))


def best_of(runs: collections.abc.Iterable[Run]) -> Run | None:
    """Return the completed run with the lowest loss: validation's, or without one training's."""
    completed = [run for run in runs if run.score is not None and run.state == State.COMPLETED]
    return min(completed, key=_score_and_name, default=None)


def _score_and_name(run: Run) -> tuple[float, str]:
    return (math.inf if run.score is None else run.score, run.name)


def counted(states: collections.Counter[str]) -> str:
    """Count the runs of each state in words, such as 2 COMPLETED, 1 FAILED."""
    return ", ".join(f"{count} {name}" for name, count in sorted(states.items()))


def whole(states: collections.Counter[str], *, has_answer: bool = True) -> str:
    """Return the state of a sweep: active while one of its runs is, then its worst run's.

    Unless Slurm has answered, a run of an unknown state may be active.
    """
    if any(State(name).is_active for name in states):
        return "PENDING" if set(states) == {"PENDING"} else "RUNNING"
    if "UNKNOWN" in states and not has_answer:
        return "UNKNOWN"
    if len(states) < 2:
        return next(iter(states), "UNKNOWN")
    if set(states) - {"COMPLETED", "CANCELLED", "PREEMPTED"}:
        return "FAILED"
    return "PREEMPTED" if "PREEMPTED" in states else "CANCELLED"


def aligned(rows: collections.abc.Sequence[collections.abc.Sequence[str]]) -> str:
    """Make a table of rows; the first row is its head."""
    return tables.Table([[untrusted.printable(cell) for cell in row] for row in rows])


def cell(value: object) -> str:
    """Format a value for a table; a dash for none."""
    if value is None or value == "":
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else one_line(str(value), 200)
