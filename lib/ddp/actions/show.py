"""show-run: one run in full, or all runs of a sweep."""

import textwrap

from ddp.actions import list as listing
from ddp.options import models
from ddp.problem import Command, ParameterError, Results
from ddp.results.progress import Log
from ddp.results.result import Result
from ddp.run import catalog, failure, reading
from ddp.run.model import WITHOUT_LOSS, Run, State, change_text
from ddp.settings import Settings
from ddp.submit import control
from slurm_ddp.slurm import times


def show_run(settings: Settings, params: models.OneRun, _: Log) -> Result:
    """Show a run's state, settings, figures, checkpoints, attempts and curve, or why it failed."""
    workspace = settings.workspace
    name = catalog.name_of(workspace, params.run)[0]
    queue = catalog.ask_queue(workspace)
    run = catalog.judge(workspace, [catalog.read(workspace, name)], queue)[0]
    if not (run.record or run.summary or run.job_id or run.metrics.num_records or run.notes):
        text = f"{workspace.runs / name} is a folder without a run's files"
        raise ParameterError("run", text, remedy=catalog.LIST)
    if run.kind == "sweep":
        table, elements = catalog.show_sweep(workspace, name, queue)
        values = {**listing.describe(run), "runs": [listing.describe(one) for one in elements]}
        return Result(table | {"run-dir": str(run.folder)}, values)
    job_id = run.job_id or (run.job.job_id if run.job is not None else None)
    held = control.held(workspace, run.job)
    results: Results = {
        "run": name,
        "run-dir": str(run.folder),
        "workdir": str(run.record.get("workdir") or ""),
        "state": str(run.state),
        "reason": held.text(settings.render) if held else run.why,
        "remark": reading.printable(run.remark, 400),
        "kind": run.kind,
        "job-id": catalog.cell(job_id),
        "submitted": str(run.record.get("submitted") or ""),
        "log": str(run.log_path) if run.job_id is not None else "",
        "script": str(run.folder / "job.sbatch") if run.record else "",
    }
    if run.state.is_active and run.job is not None:
        elapsed = times.format_time(times.parse_time(run.job.elapsed) or 0)
        results |= {
            "elapsed": elapsed,
            "nodes": run.job.nodes,
            "requeued": str(run.job.restarts or ""),
        }
        results |= {
            "step": catalog.cell(run.metrics.step),
            "loss": catalog.cell(run.metrics.last("loss")),
        }
    else:
        problem = failure.explain(workspace, run, job_id) if run.state != State.UNKNOWN else None
        results |= failure.results_of(run) | (problem.results if problem else {})
        results["reason"] = problem.text(settings.render) if problem else results["reason"]
    pairs = (f"{key}={catalog.cell(value)}" for key, value in sorted(run.settings.items()))
    results["settings"] = textwrap.fill(
        "  ".join(pairs), 84, break_long_words=False, break_on_hyphens=False
    )
    results["changed"] = "\n".join(map(change_text, run.changes))
    results["metrics"] = _metrics(settings, run)
    if best := run.metrics.best:
        results["best"] = f"validation loss {best[1]:.4f} at step {best[0]:.0f}"
    results["checkpoints"] = "\n".join(
        f"{one.name}  step {catalog.cell(one.step)}{' (latest)' * one.is_latest}{' (best)' * one.is_best}"
        for one in run.checkpoints
    )
    results["attempts"] = "\n".join(
        f"{reading.printable(one.name, 80)}: {catalog.cell(one.outcome[:40])}, step {catalog.cell(one.step)}"
        for one in run.attempts[-20:]
    )
    results |= {
        "curve-text": control.draw(run),
        "curve": run.curve_png,
        "tracking": catalog.cell(run.tracking_url),
    }
    results["slurm"] = run.silence
    values: dict[str, object] = {
        **listing.describe(run),
        "reason": results["reason"] or None,
        "settings": run.settings,
        "changes": run.changes,
        "figures": run.figures,
        "attempts": [
            {"attempt": one.name, "outcome": one.outcome, "step": one.step} for one in run.attempts
        ],
        "checkpoints": [{"name": one.name, "step": one.step} for one in run.checkpoints],
        "curve": run.curve_png or None,
        "tracking": run.tracking_url or None,
        "slurm": run.silence or None,
    }
    return Result(
        {name: value for name, value in results.items() if value not in ("", "-")}, values
    )


def _metrics(settings: Settings, run: Run) -> str:
    metrics = run.metrics
    if not metrics.num_records:
        if what := WITHOUT_LOSS.get(run.kind):
            return f"none: it is {what}; its output: {settings.render(Command('log', arguments=(run.name,)))}"
        return "none: the script wrote no metrics.jsonl" if run.kind == "script" else "none yet"
    parts = [f"{metrics.num_records} records"]
    for step, loss in metrics.points("loss", 3)[-1:]:
        parts.append(f"loss {loss:.4f} at step {step:.0f}")
    if (val_loss := metrics.last("val_loss")) is not None:
        parts.append(f"validation loss {val_loss:.4f}")
    if metrics.lost_step is not None:
        parts.append(f"the loss is not finite from step {metrics.lost_step:.0f} on")
    return ", ".join(parts)
