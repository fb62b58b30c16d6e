"""submit-ddp: check everything that can be known, and only then write and submit."""

import dataclasses

import trainer_args
import trainer_checks
import trainer_dataset
import trainer_environment
import trainer_fabric
import trainer_jobs
import trainer_params
import trainer_params_runs
import trainer_plan
import trainer_prepare
import trainer_scripts
import trainer_token
import trainer_tuning
import trainer_workspace
from slurm_ddp.slurm import jobs
from trainer_base import Log, ParameterError, Results, Settings

DEFAULT_PROFILED_STEPS = "10-12"  # behind the first ones, which compile and allocate


@dataclasses.dataclass(frozen=True)
class Workload:
    """What torchrun starts."""

    kind: str  # gpt, smoke or script
    label: str  # the first part of a new run's name
    dataset: str | None  # path
    prepare: bool  # the dataset is the default one and has to be made first
    run: str
    is_again: bool  # the run exists and goes on

    def program(self, settings: Settings, params: trainer_params.Training, resume: str) -> trainer_scripts.Program:
        """Return what the ranks run. `resume` is auto, never or a run's name."""
        args = tuple(params.args.split())
        if self.kind == "script":
            return trainer_scripts.Program((params.workload, *args), leaves_outcome=False)
        command = "smoke" if self.kind == "smoke" else "train"
        start = ("--module", "ddptrain", command, "--run-dir", trainer_scripts.RUN_DIR)
        payload = trainer_environment.payload_folder(settings) if params.container_image else ""
        if self.kind == "smoke":
            return trainer_scripts.Program((*start, *args), leaves_outcome=True, payload=payload)
        resume = resume if resume in ("auto", "never") else str(settings.runs / resume)
        more = ("--data", str(self.dataset), "--resume", trainer_scripts.RESUME, *_profile_flags(params))
        return trainer_scripts.Program((*start, *more, *args), leaves_outcome=True, resume=resume, payload=payload)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A training that passed every check, and Slurm's own; nothing is written yet."""

    request: trainer_plan.Request
    workload: Workload
    verdict: str
    contents: trainer_workspace.Contents
    partitions: tuple[jobs.Partition, ...]
    passed: tuple[str, ...]  # the checks, in words


def submit_ddp(settings: Settings, params: trainer_params.SubmitDdp, log: Log) -> Results:
    """Submit a training; with `wait` follow it to its end, with `dry-run` only show what would be submitted."""
    checked = check(settings, params, run=params.run, resume=params.resume)
    workload, request = checked.workload, checked.request
    if params.dry_run:
        return dry(settings, params, checked, resume=params.resume)
    environment = provide(settings, params, checked, log)
    texts = texts_of(settings, params, checked, environment, resume=params.resume)
    facts = facts_of(params, checked, environment)
    submitted = trainer_jobs.submit(
        settings, workload.run, texts, facts, again=workload.is_again, token=trainer_token.is_wanted(settings, params)
    )
    log(f"job {submitted.job_id}: {workload.run} on {describe(request)}")
    if not params.wait:
        return submitted.as_results()
    return trainer_jobs.follow(settings, submitted, log, timeout_s=params.wait_timeout)


def check(
    settings: Settings,
    params: trainer_params.Training,
    *,
    run: str | None,
    resume: str = "auto",
    sweep: trainer_scripts.Sweep | None = None,
    choices: trainer_tuning.Choices = (),
) -> Checked:
    """Check everything that can be known before anything is written. Raises ParameterError naming what fails."""
    partitions = trainer_checks.partitions(settings, params.reservation)
    request = trainer_plan.training(params, partitions)
    contents = trainer_workspace.look(settings)
    partition = trainer_plan.choose_partition(request.partition, partitions)
    passed = [f"resources: {describe(request)}", *trainer_checks.admission(settings, params, partition)]
    passed += trainer_checks.workspace(settings, contents)
    models = trainer_tuning.check(settings, params, choices) if params.workload == "gpt" else ()
    passed += [f"model: {', '.join(models)} can be read by {settings.user}"] if models else []
    workload = _workload(settings, params, contents, run=run, resume=resume, tunes=bool(models))
    if workload.kind == "script":
        passed.append(f"workload: {params.workload} is there and readable by {settings.user}")
    if workload.dataset:
        passed.append(f"dataset: {workload.dataset} {'will be prepared first' if workload.prepare else 'is there'}")
        trainer_dataset.check_model(settings, workload.dataset, models)
        origin = workload.run if workload.is_again else resume
        if origin not in ("auto", "never") and "--resume" not in params.args:
            trainer_dataset.check_origin(settings, workload.dataset, origin, is_same_run=workload.is_again)
    _check_profile(params, workload.kind, request)
    passed += trainer_args.check(settings, workload.kind, workload.run, params.args, choices)
    if params.container_image and params.container_image.startswith("/"):
        trainer_checks.check_inside(settings, "container-image", params.container_image, kinds=("file",))
    checked = Checked(request, workload, "", contents, partitions, ())
    passed += trainer_checks.dependency(settings, params.dependency)
    passed += trainer_checks.mail(settings, params.mail_type, params.mail_user)
    nothing = trainer_environment.NOT_INSTALLED
    draft = texts_of(settings, params, checked, nothing, resume=resume, sweep=sweep, is_draft=True)
    verdict = trainer_checks.judge(settings, draft["job.sbatch"])
    passed.append(f"Slurm: {verdict}")
    return dataclasses.replace(checked, verdict=verdict, passed=tuple(passed))


def provide(
    settings: Settings, params: trainer_params.Training, checked: Checked, log: Log
) -> trainer_environment.Environment:
    """Return the environment, made now where it is missing, like the default dataset."""
    if params.container_image:
        environment = trainer_environment.NOT_INSTALLED
        trainer_environment.store_payload(settings)
    else:
        gpus = checked.request.gpus_per_node > 0
        environment = trainer_environment.ensure(
            settings, checked.partitions, log, gpus=gpus, contents=checked.contents, reservation=params.reservation
        )
        if gpus and environment.manifest.build == "cpu":
            log("the environment holds torch for CPUs, so this job trains on them; see install-environment torch=cuda")
    if checked.workload.prepare:
        log(f"the dataset {trainer_prepare.DEFAULT_DATASET} is not there yet")
        trainer_prepare.ensure_default(
            settings, trainer_params.parse(trainer_params_runs.PrepareDataset, _shared(params)), log
        )
    return environment


def texts_of(
    settings: Settings,
    params: trainer_params.Training,
    checked: Checked,
    environment: trainer_environment.Environment,
    *,
    resume: str = "auto",
    sweep: trainer_scripts.Sweep | None = None,
    is_draft: bool = False,
) -> dict[str, str]:
    """Return the run's files by name; a draft is for `sbatch --test-only`."""
    workload = checked.workload
    program = workload.program(settings, params, resume)
    return trainer_scripts.training(
        settings, checked.request, params, environment, run=workload.run, program=program, sweep=sweep,
        is_draft=is_draft,
    )  # fmt: skip


def facts_of(
    params: trainer_params.Training, checked: Checked, environment: trainer_environment.Environment
) -> dict[str, object]:
    """Return what job.json says of a run beside its job."""
    return {
        "kind": checked.workload.kind,
        "workload": params.workload,
        "dataset": checked.workload.dataset,
        "args": params.args,
        "ranks_per_node": checked.request.ranks_per_node,
        "launcher": params.launcher,
        "fabric": params.fabric,
        "container": params.container_image,
        "environment": None if params.container_image else environment.manifest.hash,
        "torch": None if params.container_image else environment.manifest.torch,
        "request": dataclasses.asdict(checked.request),
    }


def _workload(
    settings: Settings,
    params: trainer_params.Training,
    contents: trainer_workspace.Contents,
    *,
    run: str | None,
    resume: str,
    tunes: bool,
) -> Workload:
    """Return what is to run. Raises ParameterError where parameters contradict each other or name what is not there."""
    kind = params.workload if params.workload in ("gpt", "smoke") else "script"
    if kind == "script":
        trainer_checks.check_inside(settings, "workload", params.workload, kinds=("file",))
    if kind != "gpt":
        for name, value in (
            ("dataset", params.dataset),
            ("resume", resume if resume != "auto" else None),
        ):
            if value is not None:
                raise ParameterError(name, "only the workload gpt has it")
    _check_resume(settings, resume, is_awaited=params.dependency is not None)
    dataset, prepare = _dataset(settings, params, contents, tunes=tunes) if kind == "gpt" else (None, False)
    label = kind if kind != "script" else trainer_checks.label(params.workload)
    if run is None:
        return Workload(kind, label, dataset, prepare, trainer_jobs.new_name(settings, label), is_again=False)
    trainer_jobs.claim(settings, run)
    there = trainer_workspace.locate(settings, str(settings.runs / run)).kind != "absent"
    if there and (kind == "smoke" or resume != "auto"):
        raise ParameterError(
            "run", f"{run} exists already; choose another name" + (" or resume=auto" if kind == "gpt" else "")
        )
    if there:
        _check_kind(settings, run, kind)
        trainer_jobs.refuse_if_active(settings, run)
    return Workload(kind, label, dataset, prepare, run, is_again=there)


def _dataset(
    settings: Settings, params: trainer_params.Training, contents: trainer_workspace.Contents, *, tunes: bool
) -> tuple[str, bool]:
    """Return the dataset's path and whether it must be prepared first."""
    if tunes:
        trainer_tuning.dataset(settings, params.dataset)
    wanted = params.dataset or trainer_prepare.DEFAULT_DATASET
    if "/" not in wanted:
        path = str(settings.datasets / wanted)
        if wanted in contents.datasets:
            return path, False
        if wanted == trainer_prepare.DEFAULT_DATASET:
            return path, True
        known = ", ".join(contents.datasets[:10]) or "none yet"
        how = f"juju run {settings.unit} prepare-dataset name={wanted} source=..."
        raise ParameterError(
            "dataset", f"no dataset {wanted!r} in {settings.datasets}; there are: {known}; make it with: {how}"
        )
    if tunes:
        return wanted, False
    trainer_checks.check_inside(settings, "dataset", wanted, kinds=("folder",))
    if trainer_workspace.locate(settings, f"{wanted}/dataset.json").kind != "file":
        raise ParameterError("dataset", f"{wanted} holds no dataset.json; make a dataset with prepare-dataset")
    return wanted, False


def _check_kind(settings: Settings, run: str, kind: str) -> None:
    """Raise ParameterError unless a run that exists is of the kind that is to go on."""
    about = trainer_jobs.about(settings, run)
    if not about:
        raise ParameterError("run", f"{settings.runs / run} holds no job.json, so it is no run; choose another name")
    if (found := about.get("kind")) != kind:
        what = trainer_jobs.printable(str(found))[:40]
        raise ParameterError("run", f"{run} is of the kind {what}, which {kind} cannot go on with; choose another name")


def _check_resume(settings: Settings, resume: str, *, is_awaited: bool) -> None:
    """Raise ParameterError unless this run can be begun from; one whose job is waited for need not have saved yet."""
    if resume in ("auto", "never"):
        return
    if trainer_workspace.locate(settings, str(settings.runs / resume)).kind != "folder":
        raise ParameterError(
            "resume", f"there is no run {resume!r} in {settings.runs}; auto, never or the name of a run"
        )
    if (kind := trainer_jobs.about(settings, resume).get("kind")) != "gpt":
        what = trainer_jobs.printable(str(kind or "unknown"))[:40]
        text = f"{resume} is of the kind {what}; only a run of the workload gpt can be begun from"
        raise ParameterError("resume", text)
    if not is_awaited and trainer_workspace.locate(settings, str(settings.runs / resume / "latest")).kind != "folder":
        raise ParameterError(
            "resume", f"{resume} has no checkpoint to begin from; see: juju run {settings.unit} show-run run={resume}"
        )


def _profile_flags(params: trainer_params.Training) -> tuple[str, ...]:
    """Return what the payload must know to record some ranks and steps."""
    if params.profile is None or (params.profile == "nsys" and params.profile_steps is None):
        return ()
    steps = params.profile_steps or DEFAULT_PROFILED_STEPS
    return ("--profile", params.profile, "--profile-ranks", params.profile_ranks, "--profile-steps", steps)


def _check_profile(params: trainer_params.Training, kind: str, request: trainer_plan.Request) -> None:
    if params.profile is None:
        for name, given in (("profile-ranks", params.profile_ranks != "0"), ("profile-steps", params.profile_steps)):
            if given:
                raise ParameterError(name, "is for profile=nsys or profile=torch")
        return
    if kind != "gpt" and params.profile == "torch":
        raise ParameterError("profile", "torch records the workload gpt only; give profile=nsys")
    if kind != "gpt" and params.profile_steps:
        raise ParameterError("profile-steps", "only the workload gpt has it; a script starts its own recording")
    most = request.num_nodes * request.ranks_per_node
    if beyond := [rank for rank in params.profile_ranks.split(",") if int(rank) >= most]:
        raise ParameterError("profile-ranks", f"there is no rank {beyond[0]}; the job has {most}, from 0")


def dry(
    settings: Settings,
    params: trainer_params.Training,
    checked: Checked,
    *,
    resume: str = "auto",
    sweep: trainer_scripts.Sweep | None = None,
) -> Results:
    """Return what would be submitted, and every check that it passed."""
    installed = trainer_environment.installed(settings, checked.contents)
    environment = installed or trainer_environment.NOT_INSTALLED
    workload = checked.workload
    told = installed.archive if installed else "not installed yet: submit-ddp installs it"
    texts = texts_of(settings, params, checked, environment, resume=resume, sweep=sweep)
    return {
        "script": texts["job.sbatch"],
        "job": texts["program/job.json"],
        "verdict": checked.verdict,
        "checks": "\n".join(checked.passed),
        "run": workload.run,
        "run-dir": str(settings.runs / workload.run),
        "resources": describe(checked.request),
        "environment": f"the container {params.container_image}" if params.container_image else told,
        "dataset": f"{workload.dataset}{' (to be prepared)' if workload.prepare else ''}"
        if workload.dataset
        else "none",
        **trainer_fabric.root_scripts(params.fabric),
    }


def _shared(params: trainer_params.Training) -> dict[str, str]:
    """Return the parameters that the default dataset's job shares with the training."""
    names = ("partition", "account", "qos", "reservation")
    return {name: value for name in names if (value := getattr(params, name)) is not None}


def describe(request: trainer_plan.Request) -> str:
    """Return a request in words."""
    nodes = f"{request.num_nodes} node{'s' if request.num_nodes > 1 else ''} of {request.partition}"
    gpus = f"{request.gpus_per_node} GPU{'s' if request.gpus_per_node > 1 else ''}, " if request.gpus_per_node else ""
    return f"{nodes}, each {gpus}{request.cpus_per_task} cores, {request.memory_mb} MiB"
