"""The files of a run as text: the script for sbatch, and the specification of its job."""

import collections.abc
import dataclasses
import os
import pathlib
import shlex

from ddp.node import spec
from ddp.options import declared, fabrics, fields, models
from ddp.problem import Command, Step
from ddp.project import copies
from ddp.settings import Settings
from ddp.slurm import advisories
from ddp.submit import tokens
from ddp.submit.resources import Request
from ddp.workspace import folders, operations

RUN_DIR, RESUME = spec.Word("RUN_DIR", is_variable=True), spec.Word("resume", is_variable=True)


@dataclasses.dataclass(frozen=True)
class Array:
    """A Slurm array: the runs of a sweep, or elements that share work."""

    size: int
    parallel: int

    @property
    def directive(self) -> str:
        """The value of `sbatch --array`."""
        return f"0-{self.size - 1}%{self.parallel}"


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of each rank."""

    command: tuple[str | spec.Word, ...]
    leaves_outcome: bool  # it is the payload, which writes its outcome to a file
    resume: str = "auto"  # the value of `RESUME` in a run that has no checkpoint yet
    payload: str = (
        ""  # in a container or the user's own Python: the folder that holds the payload's package
    )
    start: copies.Start | None = (
        None  # of a user's program; None: the payload starts in the run's folder
    )


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """The job of a training or a sweep; its files are rendered from this."""

    settings: Settings
    request: Request
    params: models.Training
    run: str
    program: Program
    array: Array | None = None  # of a sweep
    secrets: collections.abc.Collection[str] = ()  # names of variables in a separate file
    notifies: bool = False  # there is a file with the URL
    near_nodes: str = ""  # the groups of nodes that ranks take for sites
    copier: folders.Manifest | None = None  # the environment that copies checkpoints to `mirror`

    def texts(self, environment: folders.Manifest) -> dict[str, str]:
        """Render the files by name."""
        job = self.specification(environment)
        return {"job.sbatch": self._script(), "program/job.json": spec.dump(job)}

    @property
    def _folder(self) -> str:
        return str(self.settings.workspace.runs / self.run)

    @property
    def _has_token(self) -> bool:
        return bool(tokens.wanted(self.settings.token, self.params))

    def _script(self) -> str:
        folder = self._folder
        about = (
            f"Written by ddp for run {self.run}. To continue the run: sbatch {folder}/job.sbatch"
        )
        output = f"{folder}/logs/%j.out"
        if self.array is not None:
            about = f"Written by ddp for sweep {self.run}: one task of the array"
            about += f" for each line of {folder}/sweep.jsonl."
            output = f"{folder}-%a/logs/%j.out"
        warning = ("signal", f"B:USR1@{self.request.lead_s}")
        directives = _directives(self.request, self.params, folder, output, self.array, warning)
        return _script(folder, "job", about, directives)

    def specification(self, environment: folders.Manifest) -> spec.JobSpec:
        """Return the job's specification."""
        settings, request, params, program = self.settings, self.request, self.params, self.program
        workspace = settings.workspace
        start = program.start or copies.Start("", "")
        variables = self._variables(start)
        own = params.own_python
        environments = ("VIRTUAL_ENV", "CONDA_PREFIX") if own else ()
        return spec.JobSpec(
            run=self.run,
            job_dir=self._folder,
            workspace=str(workspace.path),
            cache=str(workspace.node_cache),
            command=tuple(map(_as_word, program.command)),
            resume=program.resume,
            leaves_outcome=program.leaves_outcome,
            ranks_per_node=request.ranks_per_node,
            gpus_per_node=request.gpus_per_node,
            variables=(*_login(settings, environments), *variables.items()),
            fabric=params.fabric,
            fabrics=fabrics.FABRICS,
            environment=self._environment(environment),
            container=self._container(variables),
            max_requeues=params.max_requeues,
            max_restarts=params.max_restarts,
            nodelist=tuple(request.nodelist),
            exclude=tuple(request.exclude),
            reservation=params.reservation or "",
            is_sweep=self.array is not None,
            token_path=tokens.path(workspace, self.run) if self._has_token else "",
            metrics=fields.metrics(params.metric),
            workdir=start.folder or self._folder,
            origin=start.origin,
            secrets_path=self._secrets_path(),
            notify_path=self._notify_path(),
            python=own,
            nodes=request.num_nodes if request.spare_nodes else 0,
            payload=program.payload,
            stop_signal=params.stop_signal or "",
            again=tuple(shlex.split(params.again)),
            launcher=params.launcher,
            is_command=params.is_command,
            accelerate=params.accelerate,
            mirror=self._mirror(environment),
        )

    def _variables(self, start: copies.Start) -> dict[str, str]:
        """Return the variables of the ranks: trackers', the token's file, then the user's own."""
        own = dict(self.params.variables)
        found = _tracking(self.settings, own)
        if self._has_token:
            found[tokens.VARIABLE] = tokens.path(self.settings.workspace, self.run)
        if self.near_nodes:
            found["NEAR_NODES"] = self.near_nodes
        if start.python_path:
            own.pop("PYTHONPATH", None)
            own["PYTHONPATH"] = start.python_path
        return found | own

    def _environment(self, environment: folders.Manifest) -> spec.Environment | None:
        """Return the environment that the nodes unpack, if they unpack one."""
        is_elsewhere = bool(self.params.container_image) and not environment.digest
        if self.params.own_python or is_elsewhere:
            return None
        return environment_of(self.settings, environment)

    def _container(self, variables: collections.abc.Iterable[str]) -> spec.Container | None:
        image = self.params.container_image
        if not image:
            return None
        names = ("PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES", *variables, *self.secrets)
        accepts = self.params.accept_risk or self.settings.accept_oci_risk
        fixed = () if accepts else advisories.fix_of(advisories.OCI)
        return spec.Container(image, ",".join(names), fixed)

    def _secrets_path(self) -> str:
        if not self.secrets:
            return ""
        return tokens.path(self.settings.workspace, self.run, operations.ENV_SUFFIX)

    def _mirror(self, environment: folders.Manifest) -> spec.Mirror | None:
        if not self.params.mirror:
            return None
        copier = self.copier or environment
        return spec.Mirror(self.params.mirror, environment_of(self.settings, copier))

    def _notify_path(self) -> str:
        if not self.notifies:
            return ""
        return tokens.path(self.settings.workspace, self.run, operations.NOTIFY_SUFFIX)


def _as_word(word: str | spec.Word) -> spec.Word:
    return spec.Word(word) if isinstance(word, str) else word


def preparation(
    settings: Settings,
    request: Request,
    params: models.PrepareDataset,
    environment: folders.Manifest,
    *,
    run: str,
    dataset: str,
    commands: collections.abc.Sequence[collections.abc.Sequence[str]],
    array: Array | None = None,
    follows: bool = False,
) -> dict[str, str]:
    """Render the files of a job that prepares a dataset, by name.

    `commands` are arguments of `python -m`, in turn.
    """
    name = "parts" if array else "job"
    folder = str(settings.workspace.runs / run)
    output = f"{folder}/logs/{'%A_%a' if array else '%j'}.out"
    after = [("dependency", "singleton")] if follows else []
    directives = _directives(request, params, folder, output, array, *after)
    script = _script(
        folder,
        "prepare",
        f"Written by ddp: prepares the dataset {dataset}.",
        directives,
        specified=name,
    )
    job = spec.PrepareSpec(
        run_dir=folder,
        cache=str(settings.workspace.node_cache),
        environment=environment_of(settings, environment),
        commands=tuple(map(tuple, commands)),
        elements=array.size if array else 0,
    )
    return {"job.sbatch": script, f"program/{name}.json": spec.dump(job)}


def session(
    settings: Settings,
    request: Request,
    params: models.Training,
    environment: folders.Manifest,
    *,
    folder: pathlib.Path,
    jupyter: folders.Manifest | None = None,
) -> dict[str, str]:
    """Render the files of a session by name.

    Its script starts the notebook of the environment `jupyter`.
    """
    start = copies.Start(params.typed_in, "")
    nothing = Program((), leaves_outcome=True, start=start)
    job = TrainingJob(settings, request, params, folder.name, nothing).specification(environment)
    job = dataclasses.replace(job, job_dir=str(folder), max_requeues=0)
    if jupyter is not None:
        job = dataclasses.replace(job, jupyter=environment_of(settings, jupyter))

    output = f"{folder}/logs/%j.out"
    warning = ("signal", f"B:USR1@{request.lead_s}")
    directives = _directives(request, params, str(folder), output, None, warning, comes_back=False)
    about = "Written by ddp: a notebook."
    script = _script(str(folder), "notebook", about, directives)
    return {"job.sbatch": script, "program/job.json": spec.dump(job)}


OTHER_DISK = Step(
    "node-cache",
    "set node-cache in /etc/slurm-ddp.toml, or ddp --node-cache FOLDER, to another disk",
)


def environment_of(
    settings: Settings, environment: folders.Manifest, cache: pathlib.Path | None = None
) -> spec.Environment:
    """Return the part of a specification about the environment that nodes unpack."""
    layers: list[spec.Archive] = []
    for one in (environment.below, environment):
        if one is None:
            continue
        remedy = settings.render(_make_again(one))
        layers.append(spec.Archive(one.archive, one.sha256, one.unpacked_bytes, remedy, one.parts))
    return spec.Environment(
        layers=tuple(layers),
        cache=str(cache or settings.workspace.node_cache),
        python=environment.python,
        trusted_uids=tuple(settings.workspace.trusted()),
        cache_remedy=settings.render(OTHER_DISK),
    )


def _make_again(environment: folders.Manifest) -> Command:
    """Return the command that makes a damaged environment again."""
    if environment.digest:
        return Command("image import", {}, (environment.source, environment.name))
    if environment.base:
        options = {"requirements": "FILE", "force": "true"}
        return Command("env create", options, (environment.name or "NAME",))
    return Command("env install")


def _directives(
    request: Request,
    params: models.Place,
    folder: str,
    output: str,
    array: Array | None,
    *more: tuple[str, str],
    comes_back: bool = True,
) -> list[tuple[str, str]]:
    """List a job's directives: the computed, the options' and the fixed ones, and `more`.

    The log is appended to, so that a requeued attempt keeps the first one's. A job whose dependency
    can no longer be satisfied ends. The login host's limits are not propagated: it locks too little
    memory for RDMA. The signal goes only to the batch script, which has become the program by then
    and makes the ranks save.
    """
    about = [("job-name", pathlib.PurePath(folder).name)]
    if array is not None:
        about.append(("array", array.directive))
    fixed = [
        ("chdir", folder),
        ("output", output),
        ("kill-on-invalid-dep", "yes"),
        ("open-mode", "append"),
        ("requeue" if comes_back else "no-requeue", ""),
        ("propagate", "NONE"),
    ]
    return [*about, *allocation(request, params), *fixed, *more]


def allocation(request: Request, params: models.Place) -> list[tuple[str, str]]:
    """List the directives that ask for a job's resources: the computed and the options' ones.

    Memory is given unless the site decides, or the job would take the whole node's. GPUs are
    requested by node, unless --gres asks for them: Slurm would bind GPUs to tasks and cut the
    ranks' paths to each other.
    """
    memory = per_core = None
    if request.memory_per_cpu_mb:
        per_core = f"{request.memory_per_cpu_mb}M"
    elif request.memory_mb:
        memory = f"{request.memory_mb}M"
    gpus = request.gpu_types or request.gpus_per_node or None
    if params.gpus_of_gres:
        gpus = None
    table = (
        ("partition", request.partition),
        ("nodes", request.num_nodes + request.spare_nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", request.cpus_per_task),
        ("mem", memory),
        ("mem-per-cpu", per_core),
        ("gpus-per-node", gpus),
        ("time", request.time_limit),
        *declared.directives(params),
    )
    return [(name, str(value)) for name, value in table if value is not None]


def _tracking(settings: Settings, given: collections.abc.Container[str]) -> dict[str, str]:
    """Return the variables that tell the payload where to track; the user's own go first."""
    wanted = {
        "MLFLOW_TRACKING_URI": settings.mlflow_uri,
        "DDPTRAIN_TENSORBOARD": "1" if settings.tensorboard else "",
        "DDPTRAIN_WANDB": "1" if settings.wandb else "",
    }
    return {name: value for name, value in wanted.items() if value and name not in given}


def _login(settings: Settings, more: tuple[str, ...]) -> list[tuple[str, str]]:
    """List the variables of a login that sbatch would pass on.

    sbatch itself gets a clean environment.
    """
    user = settings.workspace.user
    found = [("USER", user), ("LOGNAME", user)]
    if not settings.takes_any_script:  # the login is not the user's
        return found
    for name in ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", *more):
        if value := os.environ.get(name, ""):
            found.append((name, value))
    return found


def _script(
    folder: str,
    part: str,
    about: str,
    directives: list[tuple[str, str]],
    *,
    specified: str = "job",
) -> str:
    """Render the script that becomes a part of the program, which reads its specification."""
    lines = ["#!/bin/bash", f"# {about}"]
    for name, value in directives:
        # sbatch splits at blanks, and # begins a comment
        quoted = f'"{value}"' if " " in value or "#" in value else value
        lines.append(f"#SBATCH --{name}={quoted}" if value else f"#SBATCH --{name}")
    specification = f"{folder}/program/{specified}.json"
    words = [spec.program_of(specification), part, specification]
    lines.append(f"exec /usr/bin/python3 -I -S -B {shlex.join(words)}")
    return "\n".join([*lines, ""])
