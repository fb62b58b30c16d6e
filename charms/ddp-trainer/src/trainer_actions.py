"""What the actions do: check everything that can be known, and only then write and submit."""

import dataclasses

import trainer_environment
import trainer_params
import trainer_plan
import trainer_runs
import trainer_scripts
import trainer_workspace
from slurm_ddp.slurm import jobs
from trainer_base import Log, ParameterError, Results, Settings, TrainerError

DEFAULT_DATASET = "python-stdlib"
_NOT_INSTALLED = trainer_environment.Environment(
    trainer_workspace.Manifest(
        key="0" * 16, hash="0" * 16, sha256="0" * 64, size_bytes=1, unpacked_bytes=1, python="3.0",
        torch="none", build="cpu", created="-",
    ),
    "/not-installed.tar.zst",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Workload:
    """What torchrun starts."""

    kind: str  # gpt, smoke or script
    label: str  # the first part of a new run's name
    dataset: str | None  # path
    prepare: bool  # the dataset is the default one and has to be made first
    run: str
    is_again: bool  # the run exists and goes on

    def command(self, settings: Settings, params: trainer_params.SubmitDdp) -> tuple[str, ...]:
        """Return torchrun's arguments behind its own."""
        folder = str(settings.runs / self.run)
        args = tuple(params.args.split())
        if self.kind == "smoke":
            return ("--module", "ddptrain", "smoke", "--run-dir", folder, *args)
        if self.kind == "gpt":
            resume = params.resume if params.resume in ("auto", "never") else str(settings.runs / params.resume)
            return (
                "--module",
                "ddptrain",
                "train",
                "--run-dir",
                folder,
                "--data",
                str(self.dataset),
                "--resume",
                resume,
                *args,
            )
        return (params.workload, *args)


def install_environment(settings: Settings, params: trainer_params.InstallEnvironment, log: Log) -> Results:
    """Make the environment, or say that it is there."""
    found = trainer_environment.install(settings, _partitions(), log, build=params.torch, force=params.force)
    return trainer_environment.describe(found)


def prepare_dataset(settings: Settings, params: trainer_params.PrepareDataset, log: Log) -> Results:
    """Submit the job that turns text into a dataset; parts that are there already are kept."""
    partitions = _partitions()
    name = params.name or _dataset_name(params.source)
    if params.source != DEFAULT_DATASET:
        _check_inside(settings, "source", params.source, kinds=("file", "folder"))
    request = trainer_plan.preparation(params, partitions)
    run = f"prepare-{name}"
    trainer_runs.refuse_if_active(settings, run)
    _judge(settings, _preparation(settings, request, params, _NOT_INSTALLED, run=run, name=name)["job.sbatch"])
    environment = trainer_environment.ensure(settings, partitions, log)
    texts = _preparation(settings, request, params, environment, run=run, name=name)
    again = trainer_workspace.locate(settings, str(settings.runs / run)).kind != "absent"
    facts: dict[str, object] = {
        "kind": "prepare",
        "dataset": name,
        "source": params.source,
        "environment": environment.manifest.hash,
    }
    submitted = trainer_runs.submit(settings, run, texts, facts, again=again)
    results = {**submitted.as_results(), "dataset": str(settings.datasets / name)}
    log(f"job {submitted.job_id} prepares the dataset {name}")
    if not params.wait:
        return results
    return results | trainer_runs.follow(settings, submitted, log, timeout_s=params.wait_timeout)


def submit_ddp(settings: Settings, params: trainer_params.SubmitDdp, log: Log) -> Results:
    """Submit a training; with `wait` follow it to its end, with `dry-run` only show what would be submitted."""
    partitions = _partitions()
    request = trainer_plan.training(params, partitions)
    contents = trainer_workspace.look(settings)
    workload = _workload(settings, params, contents)
    draft = _training(settings, request, params, _NOT_INSTALLED, workload)
    verdict = _judge(settings, draft["job.sbatch"])
    if params.dry_run:
        return _dry(settings, request, params, contents, workload=workload, verdict=verdict)
    environment = trainer_environment.ensure(settings, partitions, log, gpus=request.gpus_per_node > 0)
    if request.gpus_per_node and environment.manifest.build == "cpu":
        log("the environment holds torch for CPUs, so this job trains on them; see install-environment torch=cuda")
    if workload.prepare:
        log(f"the dataset {DEFAULT_DATASET} is not there yet")
        prepare_dataset(settings, trainer_params.parse(trainer_params.PrepareDataset, _shared(params)), log)
    texts = _training(settings, request, params, environment, workload)
    facts: dict[str, object] = {
        "kind": workload.kind,
        "workload": params.workload,
        "dataset": workload.dataset,
        "args": params.args,
        "ranks_per_node": request.ranks_per_node,
        "environment": environment.manifest.hash,
        "torch": environment.manifest.torch,
        "request": dataclasses.asdict(request),
    }
    submitted = trainer_runs.submit(settings, workload.run, texts, facts, again=workload.is_again)
    log(f"job {submitted.job_id}: {workload.run} on {_describe(request)}")
    if not params.wait:
        return submitted.as_results()
    return trainer_runs.follow(settings, submitted, log, timeout_s=params.wait_timeout)


def list_jobs(settings: Settings, params: trainer_params.ListJobs, _: Log) -> Results:
    """Return the table of jobs."""
    try:
        return trainer_runs.table(settings, params.lines)
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def show_job(settings: Settings, params: trainer_params.ShowJob, _: Log) -> Results:
    """Return what is known of a job."""
    return trainer_runs.show(settings, job_id=params.job_id, run=params.run)


def job_log(settings: Settings, params: trainer_params.JobLog, _: Log) -> Results:
    """Return the last lines of a job's log."""
    return trainer_runs.read_log(settings, job_id=params.job_id, run=params.run, rank=params.rank, lines=params.lines)


def cancel_job(settings: Settings, params: trainer_params.CancelJob, log: Log) -> Results:
    """Cancel a job."""
    return trainer_runs.cancel(settings, params.job_id, log)


def _workload(settings: Settings, params: trainer_params.SubmitDdp, contents: trainer_workspace.Contents) -> _Workload:
    """Return what is to run. Raises ParameterError where parameters contradict each other or name what is not there."""
    kind = params.workload if params.workload in ("gpt", "smoke") else "script"
    if kind == "script":
        _check_inside(settings, "workload", params.workload, kinds=("file",))
    if kind != "gpt":
        for name, value in (
            ("dataset", params.dataset),
            ("resume", params.resume if params.resume != "auto" else None),
        ):
            if value is not None:
                raise ParameterError(name, "only the workload gpt has it")
    dataset, prepare = _dataset(settings, params, contents) if kind == "gpt" else (None, False)
    label = kind if kind != "script" else _label(params.workload)
    if params.run is None:
        return _Workload(kind, label, dataset, prepare, trainer_runs.new_name(settings, label), is_again=False)
    there = trainer_workspace.locate(settings, str(settings.runs / params.run)).kind != "absent"
    if there and (kind == "smoke" or params.resume != "auto"):
        raise ParameterError(
            "run", f"{params.run} exists already; choose another name" + (" or resume=auto" if kind == "gpt" else "")
        )
    if there:
        trainer_runs.refuse_if_active(settings, params.run)
    _check_resume(settings, params)
    return _Workload(kind, label, dataset, prepare, params.run, is_again=there)


def _dataset(
    settings: Settings, params: trainer_params.SubmitDdp, contents: trainer_workspace.Contents
) -> tuple[str, bool]:
    """Return the dataset's path and whether it must be prepared first."""
    _check_resume(settings, params)
    wanted = params.dataset or DEFAULT_DATASET
    if "/" not in wanted:
        path = str(settings.datasets / wanted)
        if wanted in contents.datasets:
            return path, False
        if wanted == DEFAULT_DATASET:
            return path, True
        known = ", ".join(contents.datasets[:10]) or "none yet"
        how = f"juju run {settings.unit} prepare-dataset name={wanted} source=..."
        raise ParameterError(
            "dataset", f"no dataset {wanted!r} in {settings.datasets}; there are: {known}; make it with: {how}"
        )
    _check_inside(settings, "dataset", wanted, kinds=("folder",))
    if trainer_workspace.locate(settings, f"{wanted}/dataset.json").kind != "file":
        raise ParameterError("dataset", f"{wanted} holds no dataset.json; make a dataset with prepare-dataset")
    return wanted, False


def _check_resume(settings: Settings, params: trainer_params.SubmitDdp) -> None:
    if params.resume in ("auto", "never"):
        return
    if trainer_workspace.locate(settings, str(settings.runs / params.resume)).kind != "folder":
        raise ParameterError(
            "resume", f"there is no run {params.resume!r} in {settings.runs}; auto, never or the name of a run"
        )


def _check_inside(settings: Settings, name: str, path: str, *, kinds: tuple[str, ...]) -> None:
    """Raise ParameterError unless the path, with all links followed, is one of these kinds in the workspace."""
    if not path.startswith(f"{settings.workspace}/"):
        raise ParameterError(name, f"{path} is outside the workspace {settings.workspace}")
    found = trainer_workspace.locate(settings, path)
    if not found.is_inside:
        raise ParameterError(name, f"{path} leads to {found.real}, outside the workspace {settings.workspace}")
    if found.kind == "absent":
        raise ParameterError(name, f"{path} is not there")
    if found.kind not in kinds:
        raise ParameterError(name, f"{path} is not a {' or '.join(kinds)}")
    if not found.is_readable:
        raise ParameterError(name, f"{path} cannot be read by {settings.user}")


def _training(
    settings: Settings,
    request: trainer_plan.Request,
    params: trainer_params.SubmitDdp,
    environment: trainer_environment.Environment,
    workload: _Workload,
) -> dict[str, str]:
    return trainer_scripts.training(
        settings, request, params, environment, run=workload.run,
        command=workload.command(settings, params), leaves_outcome=workload.kind != "script",
    )  # fmt: skip


def _preparation(
    settings: Settings,
    request: trainer_plan.Request,
    params: trainer_params.PrepareDataset,
    environment: trainer_environment.Environment,
    *,
    run: str,
    name: str,
) -> dict[str, str]:
    output = str(settings.datasets / name)
    command = ("ddptrain", "prepare", "--source", params.source, "--output", output, "--tokenizer", params.tokenizer)
    return trainer_scripts.preparation(settings, request, params, environment, run=run, dataset=name, command=command)


def _dry(
    settings: Settings,
    request: trainer_plan.Request,
    params: trainer_params.SubmitDdp,
    contents: trainer_workspace.Contents,
    *,
    workload: _Workload,
    verdict: str,
) -> Results:
    builds = {"auto": ("cuda", "cpu"), "cpu": ("cpu",), "cuda": ("cuda",)}[settings.torch_build]
    installed = [found for build in builds if (found := trainer_environment.find(settings, contents, build))]
    environment = installed[0] if installed else _NOT_INSTALLED
    return {
        "script": _training(settings, request, params, environment, workload)["job.sbatch"],
        "verdict": verdict,
        "run": workload.run,
        "run-dir": str(settings.runs / workload.run),
        "resources": _describe(request),
        "environment": installed[0].archive if installed else "not installed yet: submit-ddp installs it",
        "dataset": f"{workload.dataset}{' (to be prepared)' if workload.prepare else ''}"
        if workload.dataset
        else "none",
    }


def _judge(settings: Settings, script: str) -> str:
    try:
        return jobs.judge(script, user=settings.user_to_be)
    except jobs.NotAnsweringError as e:
        raise TrainerError(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        raise trainer_runs.refused(str(e)) from e


def _partitions() -> tuple[jobs.Partition, ...]:
    try:
        return jobs.partitions()
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e


def _shared(params: trainer_params.SubmitDdp) -> dict[str, str]:
    """Return the parameters that the default dataset's job shares with the training."""
    names = ("partition", "account", "qos", "reservation")
    return {name: value for name in names if (value := getattr(params, name)) is not None}


def _describe(request: trainer_plan.Request) -> str:
    nodes = f"{request.num_nodes} node{'s' if request.num_nodes > 1 else ''} of {request.partition}"
    gpus = f"{request.gpus_per_node} GPU{'s' if request.gpus_per_node > 1 else ''}, " if request.gpus_per_node else ""
    return f"{nodes}, each {gpus}{request.cpus_per_task} cores, {request.memory_mb} MiB"


def _label(path: str) -> str:
    """Return the first part of a run's name for a script."""
    stem = path.rsplit("/", 1)[-1].removesuffix(".py")
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).strip("._-")[:40] or "script"


def _dataset_name(source: str) -> str:
    """Return the dataset's name for a source that was given none."""
    if source == DEFAULT_DATASET:
        return source
    return _label(source.rstrip("/"))
