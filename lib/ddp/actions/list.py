"""list-runs: the runs with their states, from their folders and Slurm's queue."""

import contextlib
import dataclasses
import datetime
import fnmatch
import re
import typing

from ddp.options import models
from ddp.problem import ParameterError
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog, untrusted
from ddp.run.model import UTC, Run, State
from ddp.settings import Settings
from ddp.slurm import jobs, queued_jobs
from ddp.workspace.folders import Workspace
from slurm_ddp.slurm import times

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_QUEUE_HEAD = "JOB USER ACCOUNT QOS PRIORITY STATE NODES ELAPSED LIMIT RUN NODELIST/REASON".split()
_HEAD = ("RUN", "KIND", "STATE", "NODES", "STEP", "LOSS", "BEST", "RATE", "ELAPSED", "WHERE/REASON")
Positions = dict[int, tuple[int, int]]  # of pending jobs, by id: place in the queue, its length


def list_runs(settings: Settings, params: models.ListRuns, log: Log) -> Result:
    """List the runs, newest first: state, last figures, and nodes or position in the queue."""
    if params.everyone:
        return _list_everyones(params)
    pattern = params.name or "*"
    names = [n for n in catalog.names(settings.workspace) if fnmatch.fnmatchcase(n, pattern)]
    # The newest runs stand first in any case: without another choice no other needs to be read
    is_newest = params.state is None and params.since is None and params.sort == "submitted"
    wanted = names[: params.lines] if is_newest else names
    found = [catalog.read(settings.workspace, name, is_brief=True) for name in wanted]
    queue = catalog.ask_queue(settings.workspace)
    runs = catalog.judge(settings.workspace, found, queue)
    silence = catalog.silence_of(runs, queue)
    runs = _choose(runs, params)
    count = len(names) if is_newest else len(runs)
    others: list[jobs.Job] = []
    if is_newest:
        others = _others(settings.workspace, pattern, queue)
    if not names and not others and params.name is None:
        log(f"no runs yet; start one: {settings.render(catalog.START)}")
    return _listed(runs[: params.lines], others, count, silence)


def _listed(runs: list[Run], others: list[jobs.Job], count: int, silence: str) -> Result:
    """Return the table of runs and other jobs, with the number of all runs."""
    positions = _positions(runs)
    rows = [_job_row(job) for job in others]
    rows += [_row(run, positions) for run in runs]
    shown = {"count": str(count), "runs": catalog.aligned([_HEAD, *rows])}
    values: dict[str, object] = {
        "count": count,
        "runs": [_describe_in_queue(run, positions) for run in runs],
        "jobs": [dataclasses.asdict(job) for job in others],
    }
    if silence:
        shown["slurm"] = silence
        values["slurm"] = silence
    return Result(shown, values)


def _others(workspace: Workspace, pattern: str, queue: catalog.Queue) -> list[jobs.Job]:
    """Return this user's active jobs outside of runs, such as those from plain sbatch."""
    if isinstance(queue, jobs.Silence):
        return []
    names = set(catalog.names(workspace))
    active = [job for job in queue if job.is_active and not names & {job.name, job.run_name}]
    return [job for job in active if fnmatch.fnmatchcase(job.name, pattern)]


def _job_row(job: jobs.Job) -> tuple[str, ...]:
    """Return the row of a job without a run: Slurm knows nothing of its steps."""
    unknown = [None] * 4
    elapsed_s = times.parse_time(job.elapsed)
    elapsed = None if elapsed_s is None else times.format_time(elapsed_s)  # as a run's
    cells = (job.state, job.num_nodes, *unknown, elapsed, (job.nodes or job.reason)[:80])
    return (job.name[:64], "job", *map(catalog.cell, cells))


def _list_everyones(params: models.ListRuns) -> Result:
    """List all accounts' active jobs: those that run, then those that wait, the next one first.

    Raises Problem.
    """
    with jobs.asking():
        found = list(queued_jobs.list_all())
    if params.name is not None:
        pattern = params.name
        found = [job for job in found if fnmatch.fnmatchcase(job.name, pattern)]
    if params.state is not None:
        states = _states(params.state)
        found = [job for job in found if job.state in states]
    shown = found[: params.lines]
    table = catalog.aligned([_QUEUE_HEAD, *(_queue_row(job) for job in shown)])
    values: dict[str, object] = {
        "count": len(found),
        "jobs": [dataclasses.asdict(job) | {"waits_for": job.waits_for} for job in shown],
    }
    return Result({"count": str(len(found)), "jobs": table}, values)


def _queue_row(job: queued_jobs.QueuedJob) -> tuple[str, ...]:
    cells = (job.account, job.qos, job.priority, job.state, job.num_nodes, job.elapsed)
    where = job.waits_for or job.nodes
    row = (job.job_id, job.user, *cells, job.time_limit, job.name[:64], where[:80])
    return tuple(map(catalog.cell, row))


def _choose(runs: list[Run], params: models.ListRuns) -> list[Run]:
    """Keep the runs that the options ask for, in their order. Raises ParameterError."""
    if params.state is not None:
        states = _states(params.state)
        runs = [run for run in runs if str(run.state) in states]
    if params.since is not None:
        begin = begin_of(params.since)
        runs = [run for run in runs if run.written >= begin]
    if params.sort != "submitted":
        runs = sorted(runs, key=lambda run: _key(run, params.sort))
    return runs


def _states(text: str) -> set[str]:
    """Parse the names of states. Raises ParameterError."""
    wanted = set(text.upper().replace(",", " ").split())
    known = [str(state) for state in State]
    unknown = sorted(wanted.difference(known))
    if unknown:
        text = f"unknown state {unknown[0]}; known: {', '.join(known)}"
        raise ParameterError("state", text)
    return wanted


def begin_of(since: str, option: str = "since") -> float:
    """Return the time that an option's text means, in seconds since 1970. Raises ParameterError."""
    ago = re.fullmatch(r"(\d{1,6})([mhdw])", since)
    if ago is not None:
        now = datetime.datetime.now(UTC).timestamp()
        return now - int(ago[1]) * _UNITS[ago[2]]
    try:
        return datetime.datetime.fromisoformat(since).astimezone(UTC).timestamp()
    except ValueError:
        text = f"{since!r} is neither a duration such as 2d nor a date"
        raise ParameterError(option, text) from None


def _key(run: Run, sort: str) -> tuple[object, ...]:
    """Return the key to sort a run by: runs without the figure come last."""
    if sort == "name":
        return (run.name,)
    if sort == "state":
        return (str(run.state), run.name)
    figures = {
        "loss": run.loss,
        "best": run.best_loss,
        "step": -(run.step or 0),
        "rate": -run.rate[0] if run.rate else None,
    }
    figure = figures[sort]
    return (figure is None, figure or 0, run.name)


def _positions(runs: list[Run]) -> Positions:
    """Return the positions in the queue, if a run waits and Slurm tells them."""
    if any(run.state == State.PENDING for run in runs):
        with contextlib.suppress(jobs.SlurmError):  # they are a detail
            return jobs.positions()
    return {}


def describe(run: Run) -> dict[str, object]:
    """Return a run for programs; unknown values are None."""
    found: dict[str, object] = {
        "run": run.name,
        "kind": run.kind,
        "state": str(run.state),
        "why": run.why,
        "remark": untrusted.printable(run.remark, 400),
        "job_id": None,
        "submitted": run.record.get("submitted"),
        "run_dir": str(run.folder),
        "nodes": run.summary.get("nodes"),
        "where": None,
        "elapsed_s": run.figure("elapsed_s"),
        "step": run.step,
        "step_unit": None if run.step is None else run.step_unit,
        "total_steps": run.total_steps,
        "loss": run.loss,
        "val_loss": run.metrics.last("val_loss"),
        "best_loss": run.best_loss,
        "rate": None,
        "rate_unit": None,
        "straggler": None,
    }
    if run.job is not None:
        found["job_id"] = run.job.job_id
        found["nodes"] = run.job.num_nodes
        found["where"] = run.job.nodes
        found["elapsed_s"] = times.parse_time(run.job.elapsed)
    if run.job_id is not None:
        found["job_id"] = run.job_id
    if run.rate is not None:
        rate, unit = run.rate
        found["rate"] = rate
        found["rate_unit"] = f"{unit}/s"
    if run.state.is_active:
        found["straggler"] = run.metrics.straggler
    return {name: None if value == "" else value for name, value in found.items()}


def _describe_in_queue(run: Run, positions: Positions) -> dict[str, object]:
    found = describe(run)
    if run.job is not None and run.job.job_id in positions:
        found["position"] = positions[run.job.job_id][0]
    return found


def _row(run: Run, positions: Positions) -> tuple[str, ...]:
    found = describe(run)
    rate = f"{run.rate[0]:.6g} {run.rate[1]}/s" if run.rate else None
    elapsed = None
    if found["elapsed_s"] is not None:
        elapsed = times.format_time(int(typing.cast(float, found["elapsed_s"])))
    if run.step is not None and run.metrics.is_counted:
        found["step"] = f"{run.step} lines"
    names = ("kind", "state", "nodes", "step", "loss", "best_loss")
    cells = [*(found[name] for name in names), rate, elapsed, _where(run, positions)[:80]]
    return (run.name[:64], *map(catalog.cell, cells))


def _where(run: Run, positions: Positions) -> str:
    """Return the nodes of a run, or why it is in its state, with its remark."""
    job = run.job
    where = run.why
    if job is not None:
        if run.state.is_active and job.nodes:
            where = job.nodes
        if run.state == State.PENDING and job.job_id in positions:
            position, length = positions[job.job_id]
            where = f"{where} (position {position} of {length})"
    remark = run.remark.partition(",")[0]
    return "; ".join(filter(None, (where, remark)))
