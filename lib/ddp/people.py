"""Commands that are no actions: watch a run, report on runs as a page, render a run as files to submit elsewhere."""

import collections.abc
import contextlib
import dataclasses
import datetime
import json
import pathlib
import typing

import pydantic
import rich.console

from ddp import kubernetes, watch
from ddp.base import Log, ParameterError, Results, Settings
from ddp.environment import environments
from ddp.options import fields, models
from ddp.report import facts, page
from ddp.runs import control, run_files
from ddp.slurm import jobs
from ddp.submit import checks, code, scripts, training
from ddp.workspace import files, folders

_READ_S = 60.0
_MAX_RUNS = 16  # on one page


def show_live(settings: Settings, named: typing.Any, console: rich.console.Console | None) -> None:
    """Show a run's progress until it has ended or the user presses Ctrl-C. Raises TrainerError.

    Without a console, write each change as a line of JSON on standard output.
    """
    submitted = control.find(settings, named)
    memory = watch.Memory()

    def read() -> watch.Frame:
        try:
            known = jobs.job(submitted.job_id, user=settings.user)
        except jobs.SlurmError:
            known = None  # this view shows only the run's own files
        view = _view(known) if known is not None and control.is_of(known, submitted.run) else None
        folder = pathlib.Path(submitted.run_dir)
        found = folders.call(
            settings, lambda: {"frame": watch.gather(folder, view, control.now(), memory)}, timeout_s=_READ_S
        )
        return found["frame"]

    if console is not None:
        watch.watch(read, console)
        return
    with contextlib.suppress(KeyboardInterrupt):
        watch.changes(read, lambda now: print(json.dumps(_facts(now)), flush=True))


def _facts(now: watch.Frame) -> dict[str, object]:
    """Return a frame for programs; without the curve and the log, which have files and verbs of their own."""
    found = {name: value for name, value in dataclasses.asdict(now).items() if name not in ("losses", "log")}
    found |= {"now": now.now.isoformat(), "failures": [str(failure.reason) for failure in now.failures]}
    return {name.replace("_", "-"): value for name, value in found.items()}


def _view(known: jobs.Job) -> watch.JobView:
    limit = jobs.parse_time(known.time_limit) if known.time_limit not in jobs.NO_LIMIT else None
    elapsed = jobs.parse_time(known.elapsed) if known.state == "RUNNING" else None
    start = None if elapsed is None else control.now() - datetime.timedelta(seconds=elapsed)
    return watch.JobView(known.state, known.reason, start, limit, known.nodes)


def write_report(settings: Settings, runs: collections.abc.Sequence[str], output: pathlib.Path | None) -> Results:
    """Write a page about these runs, or the newest, and return its path. Raises TrainerError."""
    names = list(dict.fromkeys(runs)) or [control.newest(settings)]
    if len(names) > _MAX_RUNS:
        raise ParameterError("runs", f"{len(names)} runs are given; a page holds at most {_MAX_RUNS}")
    for name in names:
        if not (settings.runs / name / "job.json").is_file():
            raise ParameterError("runs", f"there is no run {name!r} in {settings.runs}; see: ddp runs")
    target = output or settings.runs / names[0] / "report.html"

    def write() -> folders.Json:
        files.replace(target, page.page([facts.read_run(settings.runs / name) for name in names], made=control.now()))
        return {}

    folders.call(settings, write, timeout_s=_READ_S * len(names))
    return {"report": str(target), "runs": ", ".join(names)}


def render(settings: Settings, params: models.SubmitDdp) -> Results:
    """Render the `script` of `ddp submit` with the same options, and all beside it. Raises TrainerError."""
    checked = training.check(settings, params, run=params.run, resume=params.resume)
    return training.dry(settings, params, checked, resume=params.resume)


def render_kubernetes(settings: Settings, params: models.SubmitDdp, log: Log, *, claim: str, namespace: str) -> Results:
    """Render the run as Kubernetes `manifests`, and put the code and payload that they name into the workspace.

    The resources are those of the options; Slurm is not asked. Raises ParameterError for options that manifests cannot
    express.
    """
    if params.container_image is None:
        raise ParameterError("container-image", "is required: pods have no other environment")
    kind = params.workload if params.workload in ("gpt", "smoke") else "script"
    if kind == "script" and not params.snapshot:
        checks.check_inside(settings, "workload", params.workload, kinds=("file",))
    folders.ensure_folders(settings)
    run = params.run or control.new_name(settings, "run")
    with code.kept(settings, params, run, log) as kept:
        text = _manifests(settings, params, kind, run, kept, claim=claim, namespace=namespace)
        environments.store_payload(settings)
        if kept is not None:
            folders.call(settings, run_files.create_run, workspace=str(settings.folder), run=run, texts={}, again=True)
            kept.place()
    where = {"code": str(kept.folder)} if kept is not None else {}
    return {"manifests": text, "run": run, "run-dir": str(settings.runs / run), **where}


def _manifests(
    settings: Settings,
    params: models.SubmitDdp,
    kind: str,
    run: str,
    kept: code.Kept | None,
    *,
    claim: str,
    namespace: str,
) -> str:
    nodes = params.nodes or 1
    gpus = params.gpus_per_node or 0
    folder = settings.runs / run
    workload = training.Workload(
        kind=kind,
        label="run",
        dataset=str(settings.datasets / (params.dataset or "python-stdlib")),
        prepare=False,
        run=run,
        is_again=False,
        script=kept.script if kept is not None else "",
    )
    program = workload.program(settings, params, params.resume)
    named = {scripts.RUN_DIR: str(folder), scripts.RESUME: program.resume}
    limit = jobs.parse_time(params.time_limit) if params.time_limit else None
    try:
        wanted = kubernetes.Run(
            name=run,
            image=params.container_image or "",
            command=tuple(word if isinstance(word, str) else named[word] for word in program.command),
            env=dict(fields.variables(params.env)),
            nodes=nodes,
            gpus_per_node=gpus,
            ranks_per_node=max(gpus, 1),
            cpus_per_task=params.cpus_per_task or max(4 * gpus, 1),
            memory_mb=fields.memory_mb(params.memory) if params.memory else max(16384 * gpus, 4096),
            time_limit_s=limit,
            workspace=str(settings.workspace),
            run_dir=str(folder),
            python_path=(program.payload,) if program.payload else (),
            claim=claim,
            namespace=namespace,
            uid=settings.uid,
            gid=settings.gid,
            max_restarts=params.max_restarts,
        )
    except pydantic.ValidationError as e:
        error = e.errors(include_url=False)[0]
        name = str(error["loc"][0]).replace("_", "-") if error["loc"] else "run"
        raise ParameterError(name, str(error.get("ctx", {}).get("error", error["msg"]))) from e
    return kubernetes.render(wanted)
