"""What only people use: a live view of a run, a report of runs as a page, and a run as files for others to submit."""

import collections.abc
import datetime
import pathlib

import pydantic
import rich.console

from ddp import kubernetes, report, watch
from ddp.base import ParameterError, Results, Settings
from ddp.options import fields
from ddp.runs import control
from ddp.submit import scripts, training
from ddp.workspace import files, folders
from slurm_ddp.slurm import jobs

_READ_S = 60.0
_MOST_RUNS = 16  # on a page that a person still reads


def show_live(settings: Settings, named: fields.OneJob, console: rich.console.Console) -> None:
    """Show how a run stands, again and again, until it has ended or the user presses Ctrl-C. Raises TrainerError."""
    submitted = control.find(settings, named)
    memory = watch.Memory()

    def read() -> watch.Frame:
        try:
            known = jobs.job(submitted.job_id, user=settings.user)
        except jobs.SlurmError:
            known = None  # asked again with the next view; the run's own files say the rest
        view = _view(known) if known is not None and control.is_of(known, submitted.run) else None
        now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017 - Python 3.10
        found = folders.call(
            settings,
            lambda: {"frame": watch.gather(pathlib.Path(submitted.run_dir), view, now, memory)},
            timeout_s=_READ_S,
        )
        return found["frame"]

    watch.watch(read, console)


def _view(known: jobs.Job) -> watch.JobView:
    limit = jobs.parse_time(known.time_limit) if known.time_limit not in jobs.NO_LIMIT else None
    start = None
    elapsed = jobs.parse_time(known.elapsed)
    if known.state == "RUNNING" and elapsed is not None:
        now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017 - Python 3.10
        start = now - datetime.timedelta(seconds=elapsed)
    return watch.JobView(known.state, known.reason, start, limit, known.nodes)


def write_report(settings: Settings, runs: collections.abc.Sequence[str], output: pathlib.Path | None) -> Results:
    """Write a page about these runs, or about the newest, and return its path. Raises TrainerError."""
    names = list(dict.fromkeys(runs)) or [control.newest(settings)]
    if len(names) > _MOST_RUNS:
        raise ParameterError("runs", f"{len(names)} named; at most {_MOST_RUNS} go on one page")
    for name in names:
        if not (settings.runs / name / "job.json").is_file():
            raise ParameterError("runs", f"there is no run {name!r} in {settings.runs}; see: ddp runs")
    target = output or settings.runs / names[0] / "report.html"

    def write() -> folders.Json:
        facts = [report.read_run(settings.runs / name) for name in names]
        now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017 - Python 3.10
        files.replace(target, report.page(facts, made=now))
        return {}

    folders.call(settings, write, timeout_s=_READ_S * len(names))
    return {"report": str(target), "runs": ", ".join(names)}


def render(settings: Settings, params: fields.SubmitDdp) -> str:
    """Return the script that would be submitted. Raises TrainerError."""
    checked = training.check(settings, params, run=params.run, resume=params.resume)
    return training.dry(settings, params, checked, resume=params.resume)["script"]


def render_kubernetes(settings: Settings, params: fields.SubmitDdp, *, claim: str, namespace: str) -> str:
    """Return the run as Kubernetes manifests. Raises ParameterError for what they cannot say.

    Slurm is not asked: the resources are those of the options.
    """
    if params.container_image is None:
        raise ParameterError("container-image", "must be given: pods have no other environment")
    nodes = params.nodes or 1
    gpus = params.gpus_per_node or 0
    run = params.run or control.new_name(settings, "run")
    folder = settings.runs / run
    workload = training.Workload(
        kind=params.workload if params.workload in ("gpt", "smoke") else "script",
        label="run",
        dataset=str(settings.datasets / (params.dataset or "python-stdlib")),
        prepare=False,
        run=run,
        is_again=False,
    )
    program = workload.program(settings, params, params.resume)
    named = {scripts.RUN_DIR: str(folder), scripts.RESUME: program.resume}
    limit = jobs.parse_time(params.time_limit) if params.time_limit else None
    try:
        wanted = kubernetes.Run(
            name=run,
            image=params.container_image,
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
