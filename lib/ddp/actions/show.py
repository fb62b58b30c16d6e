"""show-run: one run in full, or all runs of a sweep."""

import textwrap

from ddp.actions import list as listing
from ddp.options import models
from ddp.problem import Command, ParameterError, Results
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog, failure, untrusted
from ddp.run.model import WITHOUT_LOSS, Attempt, Checkpoint, Run, State, change_text
from ddp.settings import Settings
from ddp.slurm import jobs
from ddp.submit import control
from slurm_ddp.slurm import times

_WIDTH = 84  # of the settings
_MAX_ATTEMPTS = 20


def show_run(settings: Settings, params: models.OneRun, _: Log) -> Result:
    """Show a run's state, settings, figures, checkpoints, attempts and curve, or why it failed."""
    workspace = settings.workspace
    name = catalog.name_of(workspace, params.run)[0]
    queue = catalog.ask_queue(workspace)
    run = catalog.judge(workspace, [catalog.read(workspace, name)], queue)[0]
    _check_files(run)
    if run.kind == "sweep":
        return _show_sweep(settings, run, queue)

    results = _identity(settings, run)
    if run.state.is_active and run.job is not None:
        results |= _progress(run, run.job)
    else:
        results |= _outcome(settings, run)
    results |= _record(settings, run)
    shown = {name: value for name, value in results.items() if value not in ("", "-")}
    values = _values(run, reason=results["reason"])
    failed_rank = results.get("failed-rank")
    values["failed_rank"] = None if failed_rank is None else int(failed_rank)
    return Result(shown, values)


def _check_files(run: Run) -> None:
    """Raise ParameterError for a folder that is not a run's."""
    if run.record or run.summary or run.job_id or run.metrics.num_records or run.notes:
        return
    text = f"{run.folder} is a folder without a run's files"
    raise ParameterError("run", text, remedy=catalog.LIST)


def _show_sweep(settings: Settings, run: Run, queue: catalog.Queue) -> Result:
    results, elements = catalog.show_sweep(settings.workspace, run.name, queue)
    results["run-dir"] = str(run.folder)
    values = listing.describe(run)
    values["runs"] = [listing.describe(one) for one in elements]
    return Result(results, values)


def _identity(settings: Settings, run: Run) -> Results:
    """Say which run it is, where its files are, and its state."""
    held = control.held(settings.workspace, run.job)
    return {
        "run": run.name,
        "run-dir": str(run.folder),
        "workdir": str(run.record.get("workdir") or ""),
        "state": str(run.state),
        "reason": held.text(settings.render) if held else run.why,
        "remark": untrusted.printable(run.remark, 400),
        "kind": run.kind,
        "job-id": catalog.cell(_job_id(run)),
        "submitted": str(run.record.get("submitted") or ""),
        "log": str(run.log_path) if run.job_id is not None else "",
        "script": str(run.folder / "job.sbatch") if run.record else "",
    }


def _job_id(run: Run) -> int | None:
    if run.job_id is None and run.job is not None:
        return run.job.job_id
    return run.job_id


def _progress(run: Run, job: jobs.Job) -> Results:
    """Say how far a run is whose job is in the queue."""
    return {
        "elapsed": times.format_time(times.parse_time(job.elapsed) or 0),
        "nodes": job.nodes,
        "requeued": str(job.restarts or ""),
        "step": catalog.cell(run.metrics.step),
        "loss": catalog.cell(run.metrics.last("loss")),
    }


def _outcome(settings: Settings, run: Run) -> Results:
    """Say how a run ended, and if it failed why."""
    results = dict(failure.results_of(run))
    if run.state == State.UNKNOWN:
        return results
    problem = failure.explain(settings.workspace, run, _job_id(run))
    if problem is not None:
        results |= problem.results
        results["reason"] = problem.text(settings.render)
    return results


def _record(settings: Settings, run: Run) -> Results:
    """Show its settings, and the results that it left."""
    best = run.metrics.best
    return {
        "settings": _settings(run),
        "changed": "\n".join(map(change_text, run.changes)),
        "not-learned": "\n".join(run.not_learned),
        "metrics": _metrics(settings, run),
        "sites": run.metrics.sites_text,
        "exchanges": _exchanges(run),
        "best": f"validation loss {best[1]:.4f} at step {best[0]:.0f}" if best else "",
        "checkpoints": "\n".join(map(_checkpoint, run.checkpoints)),
        "mirror": run.mirror,
        "attempts": "\n".join(map(_attempt, run.attempts[-_MAX_ATTEMPTS:])),
        "curve-text": control.draw(run),
        "curve": run.curve_png,
        "tracking": catalog.cell(run.tracking_url),
        "slurm": run.silence,
    }


def _settings(run: Run) -> str:
    pairs = [f"{name}={catalog.cell(value)}" for name, value in sorted(run.settings.items())]
    text = "  ".join(pairs)
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _checkpoint(one: Checkpoint) -> str:
    line = f"{one.name}  step {catalog.cell(one.step)}"
    if one.is_latest:
        line += " (latest)"
    if one.is_best:
        line += " (best)"
    return line


def _attempt(one: Attempt) -> str:
    outcome = catalog.cell(one.outcome[:40])
    return f"{untrusted.printable(one.name, 80)}: {outcome}, step {catalog.cell(one.step)}"


def _metrics(settings: Settings, run: Run) -> str:
    metrics = run.metrics
    if not metrics.num_records:
        return _no_metrics(settings, run)

    parts = [f"{metrics.num_records} records"]
    for step, loss in metrics.points("loss", 3)[-1:]:
        parts.append(f"loss {loss:.4f} at step {step:.0f}")
    val_loss = metrics.last("val_loss")
    if val_loss is not None:
        parts.append(f"validation loss {val_loss:.4f}")
    if metrics.lost_step is not None:
        parts.append(f"the loss is not finite from step {metrics.lost_step:.0f} on")
    return ", ".join(parts)


def _exchanges(run: Run) -> str:
    """Return the cost of the exchanges between sites, or "" without them."""
    share = run.metrics.last("sync_share")
    sent = run.metrics.last("sync_bytes_per_step")
    if share is None or sent is None:
        return ""
    return f"{share:.1%} of the time, {sent / 1e6:.4g} MB a step"


def _no_metrics(settings: Settings, run: Run) -> str:
    if run.kind in WITHOUT_LOSS:
        log = settings.render(Command("log", arguments=(run.name,)))
        return f"none: it is {WITHOUT_LOSS[run.kind]}; its output: {log}"
    if run.kind == "script":
        return "none: the script wrote no metrics.jsonl"
    return "none yet"


def _values(run: Run, *, reason: str) -> dict[str, object]:
    """Return the run for programs."""
    values = listing.describe(run)
    values["reason"] = reason or None
    values["settings"] = run.settings
    values["changes"] = run.changes
    values["figures"] = run.figures
    values["not_learned"] = run.not_learned
    values["attempts"] = [
        {"attempt": one.name, "outcome": one.outcome, "step": one.step} for one in run.attempts
    ]
    values["checkpoints"] = [{"name": one.name, "step": one.step} for one in run.checkpoints]
    values["curve"] = run.curve_png or None
    values["tracking"] = run.tracking_url or None
    values["slurm"] = run.silence or None
    return values
