"""list-runs: the runs with their states, from their folders and Slurm's queue."""

import contextlib
import datetime
import fnmatch
import re
import typing

from ddp.options import models
from ddp.problem import ParameterError
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog, reading
from ddp.run.model import UTC, Run, State
from ddp.settings import Settings
from ddp.slurm import jobs
from slurm_ddp.slurm import times

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_HEAD = ("RUN", "KIND", "STATE", "NODES", "STEP", "LOSS", "BEST", "RATE", "ELAPSED", "WHERE/REASON")
Order = dict[int, tuple[int, int]]


def list_runs(settings: Settings, params: models.ListRuns, log: Log) -> Result:
    """List the runs, the newest first, each with its state, last figures, and nodes or position in the queue."""
    names = [
        name
        for name in catalog.names(settings.workspace)
        if fnmatch.fnmatchcase(name, params.name or "*")
    ]
    is_filtered = params.state is not None or params.since is not None or params.sort != "submitted"
    runs, silence = catalog.load(
        settings.workspace, names if is_filtered else names[: params.lines], is_brief=True
    )
    if params.state is not None:
        wanted = set(params.state.upper().replace(",", " ").split())
        if unknown := sorted(wanted - set(map(str, State))):
            raise ParameterError(
                "state", f"unknown state {unknown[0]}; known: {', '.join(map(str, State))}"
            )
        runs = [run for run in runs if str(run.state) in wanted]
    if params.since is not None:
        runs = [run for run in runs if run.written >= _begin(params.since)]
    if params.sort != "submitted":
        runs.sort(key=lambda run: _key(run, params.sort))
    count, runs = (len(runs) if is_filtered else len(names)), runs[: params.lines]
    order: Order = {}
    if any(run.state == State.PENDING for run in runs):
        with contextlib.suppress(jobs.SlurmError):  # the places in the queue are a detail
            order = jobs.positions()
    listed = [
        describe(run)
        | ({"position": order[run.job.job_id][0]} if run.job and run.job.job_id in order else {})
        for run in runs
    ]
    notes = {"slurm": silence} if silence else {}
    if not names and params.name is None:
        log(f"no runs yet; start one: {settings.render(catalog.START)}")
    return Result(
        {
            "count": str(count),
            "runs": catalog.aligned([_HEAD, *(_row(run, order) for run in runs)]),
            **notes,
        },
        {"count": count, "runs": listed, **notes},
    )


def describe(run: Run) -> dict[str, object]:
    """Return a run for programs; unknown values are None."""
    rate, job = run.rate, run.job
    return {
        "run": run.name,
        "kind": run.kind or None,
        "state": str(run.state),
        "why": run.why or None,
        "remark": reading.printable(run.remark, 400) or None,
        "job_id": run.job_id or (job.job_id if job else None),
        "submitted": run.record.get("submitted"),
        "run_dir": str(run.folder),
        "nodes": job.num_nodes if job else run.summary.get("nodes"),
        "where": (job.nodes or None) if job else None,
        "elapsed_s": times.parse_time(job.elapsed) if job else run.figure("elapsed_s"),
        "step": run.step,
        "total_steps": run.total_steps,
        "loss": run.loss,
        "val_loss": run.metrics.last("val_loss"),
        "best_loss": run.best_loss,
        "rate": rate[0] if rate else None,
        "rate_unit": f"{rate[1]}/s" if rate else None,
        "straggler": (run.metrics.straggler or None) if run.state.is_active else None,
    }


def _row(run: Run, order: Order) -> tuple[str, ...]:
    rate, job = run.rate, run.job
    where = run.why if not run.state.is_active or job is None or not job.nodes else job.nodes
    if job is not None and job.job_id in order and run.state == State.PENDING:
        position, length = order[job.job_id]
        where = f"{where} (position {position} of {length})"
    remark = run.remark.partition(",")[0]
    where = "; ".join(filter(None, (where, remark)))
    found = describe(run)
    cells = [found[name] for name in ("kind", "state", "nodes", "step", "loss", "best_loss")]
    cells += [f"{rate[0]:.6g} {rate[1]}/s" if rate else None, None]
    if (elapsed_s := found["elapsed_s"]) is not None:
        cells[-1] = times.format_time(int(typing.cast(float, elapsed_s)))
    return (run.name[:64], *map(catalog.cell, [*cells, where[:80]]))


def _key(run: Run, sort: str) -> tuple[object, ...]:
    if sort in ("name", "state"):
        return (run.name if sort == "name" else str(run.state), run.name)
    rate = -run.rate[0] if run.rate else None
    value = {"loss": run.loss, "best": run.best_loss, "step": -(run.step or 0), "rate": rate}[sort]
    return (value is None, value or 0, run.name)


def _begin(since: str) -> float:
    """Return the time that `since` means, in seconds since 1970. Raises ParameterError."""
    if found := re.fullmatch(r"(\d{1,6})([mhdw])", since):
        return datetime.datetime.now(UTC).timestamp() - int(found[1]) * _UNITS[found[2]]
    try:
        return datetime.datetime.fromisoformat(since).astimezone(UTC).timestamp()
    except ValueError:
        raise ParameterError(
            "since", f"{since!r} is neither a duration such as 2d nor a date"
        ) from None
