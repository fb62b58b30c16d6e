"""submit: check everything that can be known, and only then write and submit."""

import dataclasses
import json
import pathlib
import shlex

from ddp.environment import requirements, store
from ddp.options import fabrics, fields, models
from ddp.prediction import round_trips
from ddp.problem import Command, ParameterError
from ddp.project import copies
from ddp.results.progress import Log
from ddp.results.result import Answer, Result
from ddp.settings import Settings
from ddp.slurm import cluster
from ddp.submit import (
    control,
    following,
    own_python,
    payload_arguments,
    preparation,
    resources,
    scripts,
    tokens,
    trainers,
    workloads,
)
from ddp.workspace import checks
from ddp.workspace.folders import Contents, Manifest, Workspace


@dataclasses.dataclass(frozen=True)
class Checked:
    """A training that passed every check, and Slurm's own; nothing is written yet."""

    settings: Settings
    params: models.Training
    request: resources.Request
    workload: workloads.Workload
    run: workloads.RunName
    contents: Contents
    array: scripts.Array | None  # of a sweep
    notes: workloads.Notes
    verdict: str = ""  # Slurm's
    secrets: dict[str, str] = dataclasses.field(
        default_factory=dict[str, str], repr=False
    )  # variables
    notify: str = dataclasses.field(default="", repr=False)  # the URL
    near_nodes: str = ""  # groups of them
    copier: Manifest | None = None  # the environment that copies checkpoints to a bucket

    @property
    def token(self) -> str:
        """Hugging Face's, if the job gets it."""
        return tokens.wanted(self.settings.token, self.params)

    def texts(self, environment: Manifest, kept: copies.Copy | None = None) -> dict[str, str]:
        """Render the run's files by name."""
        job = scripts.TrainingJob(
            self.settings,
            self.request,
            self.params,
            self.run.name,
            self._program(kept),
            array=self.array,
            secrets=self.secrets,
            notifies=bool(self.notify),
            near_nodes=self.near_nodes,
            copier=self.copier,
        )
        return job.texts(environment)

    def _program(self, kept: copies.Copy | None) -> scripts.Program:
        return dataclasses.replace(self.workload, kept=kept).program()

    def facts(self, environment: Manifest, kept: copies.Copy | None) -> dict[str, object]:
        """Describe the run for job.json."""
        params = self.params
        found: dict[str, object] = {}
        if kept is not None:
            found["code"] = kept.facts()
        if start := self._program(kept).start:
            found["workdir"] = start.folder
        found |= self.workload.facts()
        found |= {
            "args": shlex.join(params.words),
            "ranks_per_node": self.request.ranks_per_node,
            "fabric": params.fabric,
            "container": params.container_image,
            "python": params.own_python or None,
            "environment": environment.hash,
            "torch": environment.torch,
            "request": dataclasses.asdict(self.request),
        }
        if params.requirements:
            found["requirements"] = params.requirements
        if params.own_python or (params.container_image and not environment.digest):
            found["environment"] = None
        if params.own_python or params.container_image:
            found["torch"] = None
        return found


def submit_ddp(settings: Settings, params: models.SubmitDdp, log: Log) -> Answer | None:
    """Submit a training. With `wait` follow it to its end; with `dry-run` only show it."""
    text = payload_arguments.help_of(settings.payload, params.workload, params.words)
    if text is not None:
        return Result({"text": text}, {"text": text}, text)
    if params.ranks:
        raise ParameterError("ranks", "counts only with local; use ranks-per-node")
    checked = check(settings, params, run=params.run, resume=params.resume)
    if params.dry_run:
        return dry(checked)

    environment = provide(checked, log)
    submitted = _submit(with_copier(checked, log), environment, log)
    log(f"job {submitted.job_id}: {submitted.run} on {describe(checked.request)}")
    if not params.wait:
        return submitted.as_results()
    return following.follower(settings, submitted, log).follow(timeout_s=params.wait_timeout)


def _submit(checked: Checked, environment: Manifest, log: Log) -> control.Submitted:
    """Copy the project, and submit the run."""
    workspace, run = checked.settings.workspace, checked.run
    with copies.copied(workspace, checked.params, run.name, log) as kept:
        return control.Submission(workspace, run.name).submit(
            checked.texts(environment, kept),
            checked.facts(environment, kept),
            again=run.is_again,
            token=checked.token,
            kept=kept,
            secrets=checked.secrets,
            notify=checked.notify,
            function=checked.params.function or "",
        )


def check(
    settings: Settings,
    params: models.Training,
    *,
    run: str | None,
    resume: str = "auto",
    array: scripts.Array | None = None,
    choices: payload_arguments.Choices = (),
) -> Checked:
    """Check everything that can be known before anything is written.

    Raises ParameterError that names the option.
    """
    workspace = settings.workspace
    notes = workloads.Notes()
    notes.remark(*params.remarks)
    check_program(settings, params)
    partitions = cluster.partitions(params.reservation)
    request = resources.training(params, partitions)
    notes.add(f"resources: {describe(request)}")
    notes.remark(*resources.remark(params, request, partitions))

    contents = workspace.look()
    python, remark = own_python.choose(workspace, params, is_anywhere=settings.takes_any_script)
    notes.remark(remark)
    params = params.model_copy(update={"python": python or "none"})
    notes.add(*checks.check_room(workspace, contents))

    workload = workloads.of(settings, params, resume=resume)
    case = workloads.Case(request, contents, run, choices, notes)
    workload = workload.resolve(case)
    named = _name(workspace, workload, run)
    notes.remark(named.remark)
    workload.check(case, named)
    workload, params = _choose_stop_signal(workload, notes)
    notes.add(check_environment(settings, params, contents))
    if params.env_file and not settings.takes_any_script:  # an operator's: the submit user reads it
        checks.check_inside(workspace, "env-file", params.env_file, kinds=("file",))
    checked = Checked(
        settings,
        params,
        request,
        workload,
        named,
        contents,
        array,
        notes,
        secrets=tokens.read_variables(workspace, params),
        notify=tokens.read_notify(workspace, params),
    )
    if request.num_nodes > 1:
        checked = dataclasses.replace(checked, near_nodes=round_trips.near_nodes(workspace))
    return dataclasses.replace(checked, verdict=_ask_slurm(checked))


def _choose_stop_signal(
    workload: workloads.Workload, notes: workloads.Notes
) -> tuple[workloads.Workload, models.Training]:
    """Replace the stop-signal `auto` by the one of the program's trainer.

    Raises ParameterError.
    """
    params = workload.params
    signal, remark = trainers.choose(workload.workspace, params)
    notes.remark(remark)
    params = params.model_copy(update={"stop_signal": signal})
    return dataclasses.replace(workload, params=params), params


def _ask_slurm(checked: Checked) -> str:
    """Return Slurm's verdict on the script."""
    # sbatch --test-only finds no start time for a job that waits for another
    params = checked.params.model_copy(update={"dependency": None})
    draft = dataclasses.replace(checked, params=params)
    script = draft.texts(store.NOT_INSTALLED)["job.sbatch"]
    contact = checked.settings.contact
    return cluster.judge(script, checked.request.partition, contact=contact)


def check_program(settings: Settings, params: models.Training) -> None:
    """Check that a user's program can be read, and that its ranks can start in their folder."""
    workload = workloads.of(settings, params)
    if isinstance(workload, workloads.UserProgram):
        workload.check_place(takes_any_script=settings.takes_any_script)


def _name(workspace: Workspace, workload: workloads.Workload, run: str | None) -> workloads.RunName:
    """Name a new run, or claim the one that is named.

    Raises ParameterError if it cannot be used again.
    """
    if run is None:
        return workloads.RunName(control.new_name(workspace, workload.label))
    submission = control.Submission(workspace, run)
    submission.claim()
    if submission.is_new():
        return workloads.RunName(run)
    if submission.is_unfinished():
        submission.refuse_if_active()  # sbatch's answer may have been lost
        remark = f"{run} was left unfinished by an earlier submission, and no job has used it"
        return workloads.RunName(run, is_again=True, remark=f"{remark}: it starts there")

    workload.check_again(run)
    kind = submission.read_kind()
    if kind not in (workload.kind, ""):
        text = f"{submission.path} exists and is not a {workload.kind} run; choose another name"
        raise ParameterError("run", text)
    submission.refuse_if_active()
    remark = ""
    if not kind:
        remark = f"job.json of {run} is missing or damaged"
        remark += ": it goes on with the options of this submission"
    return workloads.RunName(run, is_again=True, remark=remark)


def check_environment(settings: Settings, params: models.Training, contents: Contents) -> str:
    """Check the options on packages; return the check in words. Raises ParameterError."""
    workspace = settings.workspace
    environments = store.Store(settings)
    environments.imported(params.container_image)
    if params.container_image and params.container_image.startswith("/"):
        checks.check_inside(workspace, "container-image", params.container_image, kinds=("file",))
    given = {
        "requirements": params.requirements,
        "environment": params.environment,
        "container-image": params.container_image,
    }
    chosen = [name for name, value in given.items() if value]
    if len(chosen) > 1:
        raise ParameterError(chosen[0], f"{chosen[1]} brings packages, too; omit one of them")

    if params.environment is not None:
        environments.named(contents, params.environment)
        return f"environment: {params.environment} exists"
    if not params.requirements:
        return ""
    if not settings.takes_any_script:
        checks.check_inside(workspace, "requirements", params.requirements, kinds=("file",))
    path = pathlib.Path(params.requirements)
    workspace.do(lambda: requirements.digest(path))
    return f"requirements: {params.requirements} is readable"


def provide(checked: Checked, log: Log) -> Manifest:
    """Provide the environment and the default dataset, made now if missing."""
    for remark in checked.notes.remarks:
        log(remark)
    environment = provide_environment(
        checked.settings,
        checked.params,
        checked.contents,
        log,
        has_gpus=checked.request.gpus_per_node > 0,
    )
    if checked.workload.prepares:
        log(f"the dataset {preparation.DEFAULT_DATASET} does not exist yet")
        place = set(models.Place.model_fields)
        options = checked.params.model_dump(include=place, exclude_none=True)
        wanted = fields.parse(models.PrepareDataset, options)
        preparation.ensure_default(checked.settings, wanted, log)
    return environment


def with_copier(checked: Checked, log: Log) -> Checked:
    """Provide the environment that copies checkpoints, if `mirror` asks for it."""
    if not checked.params.mirror:
        return checked
    return dataclasses.replace(checked, copier=store.Store(checked.settings).ensure(log))


def provide_environment(
    settings: Settings, params: models.Training, contents: Contents, log: Log, *, has_gpus: bool
) -> Manifest:
    """Return the environment that the options ask for; make it if it is missing. Raises Problem."""
    environments = store.Store(settings)
    if params.container_image or params.own_python:
        environments.store_payload()
        return environments.imported(params.container_image) or store.NOT_INSTALLED
    if params.environment:
        return environments.named(contents, params.environment)

    environment = environments.ensure(log, contents)
    if has_gpus and environment.build == "cpu":
        install = settings.render(Command("env install", {"torch": "cuda"}))
        what = "the environment has torch for CPUs, so this job trains on them"
        log(f"{what}; for GPUs: {install}")
    if not params.requirements:
        return environment
    path = pathlib.Path(params.requirements)
    return environments.layer(environments.request(path, environment.build), log)


def dry(checked: Checked) -> Result:
    """Show Slurm's verdict, the checks that passed, and the script that would be submitted."""
    workload, notes = checked.workload, checked.notes
    installed = _installed(checked)
    texts = checked.texts(installed or store.NOT_INSTALLED)
    passed = [*notes.passed, *notes.remarks]
    dataset = workload.dataset or "none"
    if workload.prepares:
        dataset += " (to be prepared)"
    shown = {
        "verdict": checked.verdict,
        "checks": "\n".join(passed),
        "run": checked.run.name,
        "run-dir": str(checked.settings.workspace.runs / checked.run.name),
        "resources": describe(checked.request),
        "environment": _describe_environment(checked.params, installed),
        "dataset": dataset,
        **fabrics.root_scripts(checked.params.fabric),
        "script": texts["job.sbatch"],
        "job": texts["program/job.json"],
    }
    values: dict[str, object] = {**shown, "checks": passed, "job": json.loads(shown["job"])}
    return Result(shown, values)


def _installed(checked: Checked) -> Manifest | None:
    """Return the environment that the job would use, if it is stored."""
    params = checked.params
    environments = store.Store(checked.settings)
    if params.environment:
        return environments.named(checked.contents, params.environment)
    if params.container_image:
        return environments.imported(params.container_image)
    return environments.installed(checked.contents)


def _describe_environment(params: models.Training, installed: Manifest | None) -> str:
    described = "not installed yet; the submission installs it"
    if params.own_python:
        described = params.own_python
    elif params.container_image:
        described = f"the container {params.container_image}"
    elif installed:
        described = installed.archive
    if params.requirements:
        described += f"; on it a layer of {params.requirements}"
    return described


def describe(request: resources.Request) -> str:
    """Describe a request in words."""
    parts: list[str] = []
    if request.gpus_per_node:
        parts.append(_count(request.gpus_per_node, "GPU"))
    parts.append(_count(request.cpus_per_task, "core"))
    parts.append(f"{request.memory_mb} MiB" if request.memory_mb else "the default memory")
    return f"{_count(request.num_nodes, 'node')} of {request.partition}, each {', '.join(parts)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
