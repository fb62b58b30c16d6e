"""The files of a run: the script with the directives for sbatch, the program of the job, and its specification."""

import collections.abc
import dataclasses
import functools
import os
import pathlib
import shlex

import ddp.node
from ddp.node import spec
from ddp.options import declared, fabrics, fields, models
from ddp.problem import Command
from ddp.project import copies
from ddp.settings import Settings
from ddp.submit import tokens
from ddp.submit.resources import Request
from ddp.workspace import folders, operations

_PROGRAM = pathlib.Path(ddp.node.__file__).parent
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
    resume: str = "auto"  # what `RESUME` is in a run without a checkpoint of its own
    payload: str = (
        ""  # in a container or the user's own Python: the folder that holds the payload's package
    )
    start: copies.Start | None = (
        None  # of a user's program; None: the payload starts in the run's folder
    )


def training(
    settings: Settings,
    request: Request,
    params: models.Training,
    environment: folders.Manifest,
    *,
    run: str,
    program: Program,
    sweep: Array | None = None,
    secrets: collections.abc.Collection[str] = (),
) -> dict[str, str]:
    """Render the files of a training run or a sweep, by name; `secrets` are the names of variables in its own file."""
    workspace = settings.workspace
    from_env = fields.variables(params.env)
    has_token = tokens.is_wanted(settings, params)
    token = ((tokens.VARIABLE, tokens.path(workspace, run)),) if has_token else ()
    start = program.start or copies.Start("", "")
    if start.python_path:
        from_env = (
            *(pair for pair in from_env if pair[0] != "PYTHONPATH"),
            ("PYTHONPATH", start.python_path),
        )
    variables = (*_tracking(settings, {name for name, _ in from_env}), *token, *from_env)
    folder = str(workspace.runs / run)
    about = f"Written by ddp for run {run}. To continue the run: sbatch {folder}/job.sbatch"
    if sweep is not None:
        about = f"Written by ddp for sweep {run}: one task of the array for each line of {folder}/sweep.jsonl."
    output = f"{folder}{'-%a' if sweep else ''}/logs/%j.out"
    directives = _directives(
        request, params, folder, output, sweep, ("signal", f"B:USR1@{request.lead_s}")
    )
    script = _script(folder, "job job.json", about, directives)
    names = ["PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES", *(name for name, _ in variables), *secrets]
    image, own = params.container_image, params.own_python
    job = spec.JobSpec(
        run=run,
        job_dir=folder,
        workspace=str(workspace.path),
        cache=str(workspace.node_cache),
        command=tuple(
            word if isinstance(word, spec.Word) else spec.Word(word) for word in program.command
        ),
        resume=program.resume,
        leaves_outcome=program.leaves_outcome,
        ranks_per_node=request.ranks_per_node,
        gpus_per_node=request.gpus_per_node,
        variables=(*_login(settings, ("VIRTUAL_ENV", "CONDA_PREFIX") if own else ()), *variables),
        fabric=params.fabric,
        fabrics=fabrics.FABRICS,
        environment=None
        if own or (image and not environment.digest)
        else _environment(settings, environment),
        container=spec.Container(image, ",".join(names)) if image else None,
        max_requeues=params.max_requeues,
        max_restarts=params.max_restarts,
        nodelist=tuple(request.nodelist),
        exclude=tuple(request.exclude),
        reservation=params.reservation or "",
        is_sweep=sweep is not None,
        token_path=tokens.path(workspace, run) if has_token else "",
        metrics=fields.metrics(params.metric),
        workdir=start.folder or folder,
        origin=start.origin,
        secrets_path=tokens.path(workspace, run, operations.ENV_SUFFIX) if secrets else "",
        python=own,
        nodes=request.num_nodes if request.spare_nodes else 0,
        payload=program.payload,
        stop_signal=params.stop_signal or "",
    )
    return {"job.sbatch": script, "program/job.json": spec.dump(job), **_program()}


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
    """Render the files of a job that prepares a dataset, by name. `commands` are arguments of `python -m`, in turn."""
    name = "parts" if array else "job"
    folder = str(settings.workspace.runs / run)
    output = f"{folder}/logs/{'%A_%a' if array else '%j'}.out"
    after = [("dependency", "singleton")] if follows else []
    directives = _directives(request, params, folder, output, array, *after)
    script = _script(
        folder,
        f"prepare {name}.json",
        f"Written by ddp: prepares the dataset {dataset}.",
        directives,
    )
    job = spec.PrepareSpec(
        run_dir=folder,
        cache=str(settings.workspace.node_cache),
        environment=_environment(settings, environment),
        commands=tuple(map(tuple, commands)),
        elements=array.size if array else 0,
    )
    return {"job.sbatch": script, f"program/{name}.json": spec.dump(job), **_program()}


@functools.cache
def _program() -> dict[str, str]:
    """Read the program's files; a job runs only files in its own run's folder, which nobody else can write."""
    texts: dict[str, str] = {}
    for path in sorted(_PROGRAM.rglob("*.py")):
        texts[f"program/ddp/node/{path.relative_to(_PROGRAM)}"] = path.read_text()
    texts["program/ddp/__init__.py"] = (_PROGRAM.parent / "__init__.py").read_text()
    texts["program/__main__.py"] = texts.pop("program/ddp/node/__main__.py")
    return texts


def _environment(settings: Settings, environment: folders.Manifest) -> spec.Environment:
    layers: list[spec.Archive] = []
    for one in filter(None, (environment.below, environment)):
        make = Command(
            "env create", {"requirements": "FILE", "force": "true"}, (one.name or "NAME",)
        )
        make = make if one.base else Command("env install")
        remedy = settings.render(
            Command("image import", {}, (one.source, one.name)) if one.digest else make
        )
        layers.append(spec.Archive(one.archive, one.sha256, one.unpacked_bytes, remedy, one.parts))
    cache, uids = str(settings.workspace.node_cache), tuple(settings.workspace.trusted())
    return spec.Environment(
        layers=tuple(layers), cache=cache, python=environment.python, trusted_uids=uids
    )


def _directives(
    request: Request,
    params: fields.Parsed,
    folder: str,
    output: str,
    array: Array | None,
    *more: tuple[str, str],
) -> list[tuple[str, str]]:
    """List a job's directives: the computed ones, those of options, the fixed ones, and `more`.

    Memory is given unless the site decides, or the job would take the whole node's. GPUs are by node: Slurm would
    bind those of tasks and cut the ranks' paths to each other. The log is appended to, so that a requeued attempt
    keeps the first one's.
    A job whose dependency can no longer come true ends. The login host's limits are not propagated: it locks too
    little memory for RDMA. The signal goes to the batch script alone, which is the program from then on and makes the
    ranks save.
    """
    table = (
        ("job-name", pathlib.PurePath(folder).name),
        ("partition", request.partition),
        ("array", array.directive if array else None),
        ("nodes", request.num_nodes + request.spare_nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", request.cpus_per_task),
        (
            "mem",
            f"{request.memory_mb}M"
            if request.memory_mb and not request.memory_per_cpu_mb
            else None,
        ),
        ("mem-per-cpu", f"{request.memory_per_cpu_mb}M" if request.memory_per_cpu_mb else None),
        ("gpus-per-node", request.gpus_per_node or None),
        ("time", request.time_limit),
        *declared.directives(params),
        ("chdir", folder),
        ("output", output),
        ("kill-on-invalid-dep", "yes"),
        ("open-mode", "append"),
        ("requeue", ""),
        ("propagate", "NONE"),
        *more,
    )
    return [(name, str(value)) for name, value in table if value is not None]


def _tracking(settings: Settings, given: set[str]) -> list[tuple[str, str]]:
    """List the variables that tell the payload where to track, without those that the user gives in `env`."""
    flags = {"DDPTRAIN_TENSORBOARD": settings.tensorboard, "DDPTRAIN_WANDB": settings.wandb}
    wanted = {"MLFLOW_TRACKING_URI": settings.mlflow_uri} | {
        name: "1" for name, is_on in flags.items() if is_on
    }
    return [(name, value) for name, value in wanted.items() if value and name not in given]


def _login(settings: Settings, more: tuple[str, ...]) -> list[tuple[str, str]]:
    """List the variables of a login that sbatch would pass on; sbatch itself gets a clean environment."""
    names = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", *more) if settings.takes_any_script else ()
    kept = ((name, os.environ.get(name, "")) for name in names)
    return [
        ("USER", settings.workspace.user),
        ("LOGNAME", settings.workspace.user),
        *((name, value) for name, value in kept if value),
    ]


def _script(folder: str, command: str, about: str, directives: list[tuple[str, str]]) -> str:
    words = (
        (name, f'"{value}"' if " " in value else value) for name, value in directives
    )  # sbatch splits at blanks
    options = (f"--{name}={value}" if value else f"--{name}" for name, value in words)
    program = f"exec /usr/bin/python3 -I -S -B {shlex.quote(f'{folder}/program')} {command}"
    return "\n".join(
        ["#!/bin/bash", f"# {about}", *(f"#SBATCH {option}" for option in options), program, ""]
    )
