"""submit: check everything that can be known, and only then write and submit."""

import contextlib
import dataclasses
import difflib
import json
import pathlib
import shlex

from ddp.environment import environments, images, named
from ddp.options import fabrics, fields, models
from ddp.problem import Command, ParameterError
from ddp.project import copies
from ddp.results.progress import Log
from ddp.results.result import Answer, Result
from ddp.run import catalog, creation
from ddp.settings import Settings
from ddp.slurm import cluster
from ddp.submit import (
    control,
    precheck,
    preparation,
    programs,
    pythons,
    resources,
    scripts,
    tokens,
    tuning,
)
from ddp.workspace import checks, folders
from ddp.workspace.folders import Workspace

DEFAULT_PROFILED_STEPS = "10-12"  # after the first ones, which compile and allocate


@dataclasses.dataclass(frozen=True)
class Workload:
    """The program of the ranks."""

    kind: str  # gpt, smoke or script
    run: str
    dataset: str | None = None  # path
    prepare: bool = False  # the dataset is the default one and has to be made first
    resume: str = "auto"  # auto, never or a run's name
    is_again: bool = False  # the run's folder exists, and is used again
    remark: str = ""  # on that

    def program(
        self, settings: Settings, params: models.Training, kept: copies.Copy | None = None
    ) -> scripts.Program:
        """Build the command of the ranks."""
        payload = (
            environments.payload_folder(settings)
            if params.container_image or params.own_python
            else ""
        )
        if self.kind == "script":
            program = params.workload if kept is None or params.module else kept.script
            words = (*(("--module",) if params.module else ()), program, *params.words)
            start = copies.in_place(params) if kept is None else kept.start
            return scripts.Program(words, leaves_outcome=False, payload=payload, start=start)
        command, more, resume = "smoke", (), "auto"
        if self.kind == "gpt":
            command = "train"
            more = (
                "--data",
                str(self.dataset),
                "--resume",
                scripts.RESUME,
                *_profile_flags(params),
            )
            resume = (
                self.resume
                if self.resume in ("auto", "never")
                else str(settings.workspace.runs / self.resume)
            )
        words = (
            "--module",
            "ddptrain",
            command,
            "--run-dir",
            scripts.RUN_DIR,
            *more,
            *params.words,
        )
        return scripts.Program(words, leaves_outcome=True, resume=resume, payload=payload)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A training that passed every check, and Slurm's own; nothing is written yet."""

    settings: Settings
    params: models.Training
    request: resources.Request
    workload: Workload
    contents: folders.Contents
    sweep: scripts.Array | None
    passed: tuple[str, ...] = ()  # the checks, in words
    remarks: tuple[str, ...] = ()  # on what may fail
    verdict: str = ""  # Slurm's
    secrets: dict[str, str] = dataclasses.field(
        default_factory=dict[str, str], repr=False
    )  # variables

    def texts(
        self, environment: folders.Manifest, kept: copies.Copy | None = None
    ) -> dict[str, str]:
        """Render the run's files by name."""
        program = self.workload.program(self.settings, self.params, kept)
        about = (self.settings, self.request, self.params, environment)
        return scripts.training(
            *about, run=self.workload.run, program=program, sweep=self.sweep, secrets=self.secrets
        )

    def facts(self, environment: folders.Manifest, kept: copies.Copy | None) -> dict[str, object]:
        """Describe the run for job.json."""
        image, own = self.params.container_image, self.params.own_python
        start = self.workload.program(self.settings, self.params, kept).start
        return {
            **({"code": kept.facts()} if kept is not None else {}),
            **({"workdir": start.folder} if start else {}),
            "kind": self.workload.kind,
            "workload": self.params.workload,
            "dataset": self.workload.dataset,
            "args": shlex.join(self.params.words),
            "ranks_per_node": self.request.ranks_per_node,
            "fabric": self.params.fabric,
            "container": image,
            "python": own or None,
            "environment": None if own or (image and not environment.digest) else environment.hash,
            "torch": None if image or own else environment.torch,
            "request": dataclasses.asdict(self.request),
        }


def submit_ddp(settings: Settings, params: models.SubmitDdp, log: Log) -> Answer:
    """Submit a training; with `wait` follow it to its end, with `dry-run` only show what would be submitted."""
    if text := precheck.help_of(settings.payload, params.workload, params.words):
        return Result({"text": text}, {"text": text}, text)
    checked = check(settings, params, run=params.run, resume=params.resume)
    workload = checked.workload
    if params.dry_run:
        return dry(checked)
    environment = provide(checked, log)
    with copies.copied(settings.workspace, params, workload.run, log) as kept:
        texts, facts = checked.texts(environment, kept), checked.facts(environment, kept)
        token, again = tokens.is_wanted(settings, params), workload.is_again
        submitted = control.submit(
            settings,
            workload.run,
            texts,
            facts,
            again=again,
            token=token,
            kept=kept,
            secrets=checked.secrets,
        )
    log(f"job {submitted.job_id}: {workload.run} on {describe(checked.request)}")
    if not params.wait:
        return submitted.as_results()
    return control.follow(settings, submitted, log, timeout_s=params.wait_timeout)


def check(
    settings: Settings,
    params: models.Training,
    *,
    run: str | None,
    resume: str = "auto",
    sweep: scripts.Array | None = None,
    choices: precheck.Choices = (),
) -> Checked:
    """Check everything that can be known before anything is written. Raises ParameterError that names the option."""
    workspace = settings.workspace
    check_program(settings, params)
    partitions = cluster.partitions(params.reservation)
    request = resources.training(params, partitions)
    remarks = resources.remark(params, request, partitions)
    contents = workspace.look()
    python, remark = pythons.choose(settings, params)
    params = params.model_copy(update={"python": python or "none"})
    remarks = [*remarks, remark] if remark else remarks
    passed = [f"resources: {describe(request)}", *checks.check_room(workspace, contents)]
    tuned = tuning.check(settings, params, choices) if params.workload == "gpt" else ()
    passed += [f"model: {', '.join(tuned)} is readable"] if tuned else []
    workload = _workload(workspace, params, contents, run=run, resume=resume, tunes=bool(tuned))
    remarks += [workload.remark] if workload.remark else []
    if workload.kind == "script":
        saved = f"{workspace.runs / workload.run}/latest"
        goes_on = workload.is_again and not workload.remark
        if goes_on and workspace.locate(saved).kind == "absent":
            remarks.append(
                f"{workload.run} has no checkpoint of ddptrain.resume: its program starts at its beginning"
            )
        remarks += programs.check(workspace, params, contents)
        passed += [
            f"workload: {params.workload} {'is a module' if params.module else 'is readable'}"
        ]
    if workload.dataset:
        passed.append(
            f"dataset: {workload.dataset} {'is prepared first' if workload.prepare else 'exists'}"
        )
    _check_profile(params, workload.kind, request)
    passed += _check_metric(params, workload.kind)
    passed += precheck.check(settings, workload.kind, workload.run, params.words, choices)
    if workload.kind == "gpt" and workload.is_again:
        remarks += precheck.changes(settings, workload.run, params.words)
    passed += _check_environment(settings, params, contents)
    if params.env_file and not settings.takes_any_script:  # an operator's: the submit user reads it
        checks.check_inside(workspace, "env-file", params.env_file, kinds=("file",))
    secrets = tokens.read_variables(workspace, params)
    about = (
        settings,
        params,
        request,
        workload,
        contents,
        sweep,
        (*passed, *remarks),
        tuple(remarks),
    )
    checked = Checked(*about, secrets=secrets)
    # sbatch --test-only finds no start time for a job that waits for another
    draft = dataclasses.replace(checked, params=params.model_copy(update={"dependency": None}))
    verdict = cluster.judge(
        draft.texts(environments.NOT_INSTALLED)["job.sbatch"], request.partition
    )
    return dataclasses.replace(checked, verdict=verdict)


def provide(checked: Checked, log: Log) -> folders.Manifest:
    """Provide the environment and the default dataset, made now if missing."""
    settings, params = checked.settings, checked.params
    for remark in checked.remarks:
        log(remark)
    if params.container_image or params.own_python:
        environments.store_payload(settings)
        environment = (
            images.find(settings.workspace, params.container_image) or environments.NOT_INSTALLED
        )
    elif params.environment:
        environment = environments.named(settings, checked.contents, params.environment)
    else:
        environment = environments.ensure(settings, log, checked.contents)
        if checked.request.gpus_per_node and environment.build == "cpu":
            install = settings.render(Command("env install", {"torch": "cuda"}))
            log(
                f"the environment has torch for CPUs, so this job trains on them; for GPUs: {install}"
            )
        if params.requirements:
            wanted = named.request(settings, pathlib.Path(params.requirements), environment.build)
            environment = environments.layer(settings, wanted, log)
    if checked.workload.prepare:
        log(f"the dataset {preparation.DEFAULT_DATASET} does not exist yet")
        place = params.model_dump(include=set(models.Place.model_fields), exclude_none=True)
        preparation.ensure_default(settings, fields.parse(models.PrepareDataset, place), log)
    return environment


def dry(checked: Checked) -> Result:
    """Show Slurm's verdict, the checks that passed, and the script that would be submitted."""
    settings, params, workload = checked.settings, checked.params, checked.workload
    if params.environment:
        installed = environments.named(settings, checked.contents, params.environment)
    elif params.container_image:
        installed = images.find(settings.workspace, params.container_image)
    else:
        installed = environments.installed(settings, checked.contents)
    described = installed.archive if installed else "not installed yet; the submission installs it"
    if params.container_image or params.own_python:
        described = params.own_python or f"the container {params.container_image}"
    if params.requirements:
        described += f"; on it a layer of {params.requirements}"
    texts = checked.texts(installed or environments.NOT_INSTALLED)
    dataset = (
        f"{workload.dataset}{' (to be prepared)' if workload.prepare else ''}"
        if workload.dataset
        else "none"
    )
    shown = {
        "verdict": checked.verdict,
        "checks": "\n".join(checked.passed),
        "run": workload.run,
        "run-dir": str(settings.workspace.runs / workload.run),
        "resources": describe(checked.request),
        "environment": described,
        "dataset": dataset,
        **fabrics.root_scripts(params.fabric),
        "script": texts["job.sbatch"],
        "job": texts["program/job.json"],
    }
    values: dict[str, object] = {
        **shown,
        "checks": list(checked.passed),
        "job": json.loads(shown["job"]),
    }
    return Result(shown, values)


def describe(request: resources.Request) -> str:
    """Describe a request in words."""
    nodes = f"{request.num_nodes} node{'s' if request.num_nodes > 1 else ''} of {request.partition}"
    gpus = (
        f"{request.gpus_per_node} GPU{'s' if request.gpus_per_node > 1 else ''}, "
        if request.gpus_per_node
        else ""
    )
    cores = f"{request.cpus_per_task} core{'s' if request.cpus_per_task > 1 else ''}"
    return f"{nodes}, each {gpus}{cores}, {f'{request.memory_mb} MiB' if request.memory_mb else 'the default memory'}"


def _workload(
    workspace: Workspace,
    params: models.Training,
    contents: folders.Contents,
    *,
    run: str | None,
    resume: str,
    tunes: bool,
) -> Workload:
    """Resolve the workload. Raises ParameterError if options contradict each other or name something missing."""
    kind = params.workload if params.workload in ("gpt", "smoke") else "script"
    if kind != "gpt":
        for name, is_given in (
            ("dataset", params.dataset is not None),
            ("resume", resume != "auto"),
        ):
            if is_given:
                how = "; a script goes on in its own run: --run NAME" if name == "resume" else ""
                raise ParameterError(name, f"only the workload gpt has it{how}")
    _check_resume(workspace, resume, is_awaited=params.dependency is not None)
    dataset, prepare = None, False
    if kind == "gpt":
        own = catalog.read_record(workspace, run).get("dataset") if run is not None else None
        if own and params.dataset is None:
            dataset = _recorded(workspace, str(own))
        else:
            dataset, prepare = _dataset(workspace, params, contents, tunes=tunes)
    if run is None:
        label = checks.label(params.workload) if kind == "script" else kind
        return Workload(kind, control.new_name(workspace, label), dataset, prepare, resume)
    control.claim(workspace, run)
    path = workspace.runs / run
    if workspace.locate(str(path)).kind == "absent":
        return Workload(kind, run, dataset, prepare, resume)
    again = Workload(kind, run, dataset, prepare, resume, is_again=True)
    if workspace.do(creation.is_unfinished, path=path):
        control.refuse_if_active(workspace, run)  # sbatch's answer may have been lost
        remark = f"{run} was left unfinished by an earlier submission, and no job has used it: it starts there"
        return dataclasses.replace(again, remark=remark)
    if kind == "smoke" or resume != "auto":
        other = ", or resume auto" if kind == "gpt" else ""
        raise ParameterError("run", f"{run} exists already; choose another name{other}")
    found = workspace.do(creation.kind_of, path=path)
    if found not in (kind, ""):
        raise ParameterError("run", f"{path} exists and is not a {kind} run; choose another name")
    control.refuse_if_active(workspace, run)
    if not found:
        remark = f"job.json of {run} is missing or damaged: it goes on with the options of this submission"
        return dataclasses.replace(again, remark=remark)
    return again


def check_program(settings: Settings, params: models.Training) -> None:
    """Check that the nodes, or this host, can read a script, and that the ranks can start where it is wanted."""
    workspace = settings.workspace
    if params.workload in ("gpt", "smoke"):
        return
    shared = str(workspace.path)
    for path in (
        ()
        if params.snapshot
        else (*(() if params.module else (params.workload,)), copies.in_place(params).folder)
    ):
        if path != shared and not workspace.locate(path).is_inside:
            text = f"{path} is outside the workspace {shared}, and only that is known to be shared by the nodes"
            raise ParameterError(
                "snapshot", f"{text}; work in a folder below it, or omit --no-snapshot"
            )
    if params.module:
        return
    located = workspace.locate(params.workload)
    if located.kind == "absent" and (close := workspace.do(_close_to, path=params.workload)):
        raise ParameterError(
            "workload", f"{params.workload} does not exist; did you mean {close[0]}?"
        )
    if params.snapshot and settings.takes_any_script:
        checks.check_readable("workload", params.workload, located, ("file",))
    else:  # it runs where it lies, or an operator names another account's file
        checks.check_inside(workspace, "workload", params.workload, kinds=("file",))


def _close_to(path: str) -> list[str]:
    """Return the name that is most like a mistyped path's, of a file beside it or a workload of ours."""
    wanted = pathlib.Path(path)
    with contextlib.suppress(OSError):
        names = [*(one.name for one in wanted.parent.iterdir()), "gpt", "smoke"]
        return difflib.get_close_matches(wanted.name, names, 1)
    return []


def _dataset(
    workspace: Workspace, params: models.Training, contents: folders.Contents, *, tunes: bool
) -> tuple[str, bool]:
    """Find the dataset's path, and whether it must be prepared first."""
    if tunes:
        tuning.dataset(workspace, params.dataset)
    wanted = params.dataset or preparation.DEFAULT_DATASET
    if "/" not in wanted:
        if wanted in contents.datasets:
            return contents.datasets[wanted], False
        if wanted == preparation.DEFAULT_DATASET:
            return str(workspace.datasets / wanted), True
        known = ", ".join(sorted(contents.datasets)[:10]) or "none yet"
        text = f"no dataset {wanted!r} in {workspace.datasets}; there are: {known}; make it"
        raise ParameterError(
            "dataset", text, remedy=Command("prepare", {"name": wanted}, ("PATH",))
        )
    if tunes:
        return wanted, False
    checks.check_inside(workspace, "dataset", wanted, kinds=("folder",))
    if workspace.locate(f"{wanted}/dataset.json").kind != "file":
        raise ParameterError(
            "dataset", f"{wanted} has no dataset.json", remedy=Command("prepare", {}, (wanted,))
        )
    return wanted, False


def _recorded(workspace: Workspace, path: str) -> str:
    """Return the dataset that a run goes on with. Raises ParameterError if it does not exist."""
    if workspace.locate(path).kind == "absent":
        raise ParameterError(
            "dataset", f"{path}, which the run was trained on, does not exist any more"
        )
    return path


def _check_resume(workspace: Workspace, resume: str, *, is_awaited: bool) -> None:
    """Raise ParameterError unless this run can be resumed from; one whose job is awaited need not have saved yet."""
    if resume in ("auto", "never"):
        return
    if (kind := catalog.read_record(workspace, resume).get("kind")) != "gpt":
        text = f"no run {resume!r} of the workload gpt in {workspace.runs}; use auto, never or the name of one"
        text = (
            f"{resume} is a run of a {kind}; it goes on in its own folder: --run {resume}"
            if kind
            else text
        )
        raise ParameterError("resume", text, remedy=Command("list"))
    if (
        not is_awaited
        and workspace.locate(str(workspace.runs / resume / "latest")).kind != "folder"
    ):
        text = f"{resume} has no checkpoint to start from"
        raise ParameterError("resume", text, remedy=Command("show", arguments=(resume,)))


def _check_environment(
    settings: Settings, params: models.Training, contents: folders.Contents
) -> list[str]:
    given = params.model_dump(by_alias=True)
    workspace = settings.workspace
    images.find(workspace, params.container_image)
    if params.container_image and params.container_image.startswith("/"):
        checks.check_inside(workspace, "container-image", params.container_image, kinds=("file",))
    chosen = [name for name in ("requirements", "environment", "container-image") if given[name]]
    if len(chosen) > 1:
        raise ParameterError(chosen[0], f"{chosen[1]} brings packages, too; omit one of them")
    if params.requirements:
        if not settings.takes_any_script:
            checks.check_inside(workspace, "requirements", params.requirements, kinds=("file",))
        path = pathlib.Path(params.requirements)
        workspace.do(lambda: named.digest(path))
    if params.environment is None:
        return [f"requirements: {params.requirements} is readable"] if params.requirements else []
    environments.named(settings, contents, params.environment)
    return [f"environment: {params.environment} exists"]


def _check_metric(params: models.Training, kind: str) -> list[str]:
    """Raise ParameterError if the workload measures by itself."""
    if not params.metric:
        return []
    if kind != "script":
        raise ParameterError(
            "metric", f"only a script has it; the workload {kind} measures by itself"
        )
    names = [name for name, _ in fields.metrics(params.metric)]
    return [f"metric: {', '.join(names)} in the output of rank 0"]


def _profile_flags(params: models.Training) -> tuple[str, ...]:
    if not params.profile:
        return ()
    steps = params.profile_steps or DEFAULT_PROFILED_STEPS
    return ("--profile", "--profile-ranks", params.profile_ranks, "--profile-steps", steps)


def _check_profile(params: models.Training, kind: str, request: resources.Request) -> None:
    if not params.profile:
        for name, given in (
            ("profile-ranks", params.profile_ranks != "0"),
            ("profile-steps", params.profile_steps),
        ):
            if given:
                raise ParameterError(name, "needs profile=torch")
        return
    if kind != "gpt":
        raise ParameterError(
            "profile", "only the workload gpt has it; a script starts torch.profiler itself"
        )
    most = request.num_nodes * request.ranks_per_node
    if beyond := [rank for rank in params.profile_ranks.split(",") if int(rank) >= most]:
        raise ParameterError("profile-ranks", f"no rank {beyond[0]}; the job has {most}, from 0")
