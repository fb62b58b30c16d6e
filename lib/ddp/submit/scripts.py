"""The texts of a run: the directives for sbatch, the program that runs in the job, and what it is to do, as JSON."""

import collections.abc
import dataclasses
import functools
import pathlib
import shlex

import jinja2

import ddp.node
from ddp.base import Settings
from ddp.environment.environments import Environment
from ddp.node import spec
from ddp.options import fields, models
from ddp.submit import fabrics
from ddp.submit.resources import Request
from ddp.workspace import folders, tokens

_TEMPLATES = pathlib.Path(__file__).with_name("templates")
_PROGRAM = pathlib.Path(ddp.node.__file__).parent


@dataclasses.dataclass(frozen=True)
class Variable:
    """A word of a command that the job itself knows: `RUN_DIR` or `resume`."""

    name: str


Word = str | Variable
RUN_DIR, RESUME = Variable("RUN_DIR"), Variable("resume")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """An array of runs."""

    last: int  # the last task's number
    parallel: int


@dataclasses.dataclass(frozen=True)
class Array:
    """Elements that share work."""

    elements: int
    parallel: int


@dataclasses.dataclass(frozen=True)
class Program:
    """What each rank runs."""

    command: tuple[Word, ...]
    leaves_outcome: bool  # it is the payload, which tells in a file how it ended
    resume: str = "auto"  # what `RESUME` is in a run without a checkpoint of its own
    payload: str = ""  # in a container: the folder that holds the payload's package


def training(
    settings: Settings,
    request: Request,
    params: fields.Training,
    environment: Environment,
    *,
    run: str,
    program: Program,
    sweep: Sweep | None = None,
    is_draft: bool = False,
) -> dict[str, str]:
    """Return the files of a training run, or of a sweep of them, by name; a draft is for `sbatch --test-only`."""
    given = {
        "constraint": params.constraint, "nodelist": params.nodelist, "exclude": params.exclude,
        "mail-type": params.mail_type, "mail-user": params.mail_user,
    }  # fmt: skip
    directives = [*_directives(params), *((name, value) for name, value in given.items() if value)]
    if params.exclusive:
        directives.append(("exclusive", ""))
    if params.dependency and not is_draft:  # sbatch --test-only finds no time for what waits for others
        directives += [("dependency", params.dependency), ("kill-on-invalid-dep", "yes")]
    words = (word.removeprefix("--").partition("=") for word in params.sbatch.split())
    directives += [(name, value) for name, _, value in words]
    by_rank = params.launcher == "srun"
    from_env = fields.variables(params.env)
    has_token = tokens.is_wanted(settings, params)
    token = ((tokens.VARIABLE, tokens.path(settings, run)),) if has_token else ()
    variables = (*_tracking(settings, {name for name, _ in from_env}), *token, *from_env)
    has_window = program.leaves_outcome and params.profile_steps is not None
    common = _common(settings, request, run) | {
        "tasks_per_node": request.ranks_per_node if by_rank else 1,
        "cpus_per_task": max(1, request.cpus_per_task // request.ranks_per_node) if by_rank else request.cpus_per_task,
    }
    script = _render("job.sbatch.j2", **common, directives=directives, sweep=sweep, spec="job.json")
    names = ["PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES", *(name for name, _ in variables)]
    image = params.container_image
    job = spec.JobSpec(
        run=run,
        job_dir=str(settings.runs / run),
        workspace=str(settings.workspace),
        cache=str(settings.node_cache),
        command=tuple(_word(word) for word in program.command),
        resume=program.resume,
        leaves_outcome=program.leaves_outcome,
        ranks_per_node=request.ranks_per_node,
        gpus_per_node=request.gpus_per_node,
        launcher=params.launcher,
        variables=variables,
        fabric=params.fabric,
        fabrics=_fabrics(),
        environment=None if image else _environment(settings, environment),
        container=spec.Container(image, program.payload, ",".join(names)) if image else None,
        profile=spec.Profile(params.profile, params.profile_ranks, has_window) if params.profile else None,
        max_requeues=params.max_requeues,
        max_restarts=params.max_restarts,
        nodelist=tuple(request.nodelist),
        exclude=tuple(request.exclude),
        reservation=params.reservation or "",
        is_sweep=sweep is not None,
        token_path=tokens.path(settings, run) if has_token else "",
    )
    return {"job.sbatch": script, "program/job.json": spec.dump(job), **_program()}


def preparation(
    settings: Settings,
    request: Request,
    params: models.PrepareDataset,
    environment: Environment,
    *,
    run: str,
    dataset: str,
    commands: collections.abc.Sequence[collections.abc.Sequence[str]],
    array: Array | None = None,
    follows: bool = False,
) -> dict[str, str]:
    """Return the files of a job that prepares a dataset by name. `commands` are what `python -m` does, in turn.

    With `follows` it waits until all earlier jobs of its name have ended.
    """
    name = "parts" if array else "job"
    common = _common(settings, request, run)
    directives = _directives(params)
    script = _render(
        "prepare.sbatch.j2", **common, directives=directives, dataset=dataset, array=array, follows=follows, spec=name
    )
    job = spec.PrepareSpec(
        run_dir=str(settings.runs / run),
        cache=str(settings.node_cache),
        environment=_environment(settings, environment),
        commands=tuple(map(tuple, commands)),
        elements=array.elements if array else 0,
    )
    return {"job.sbatch": script, f"program/{name}.json": spec.dump(job), **_program()}


@functools.cache
def _program() -> dict[str, str]:
    """Return the program's files; a job runs only what lies in its own run's folder, which nobody else can write."""
    texts = {f"program/ddp/node/{path.name}": path.read_text() for path in sorted(_PROGRAM.glob("*.py"))}
    texts["program/ddp/__init__.py"] = (_PROGRAM.parent / "__init__.py").read_text()
    texts["program/__main__.py"] = texts.pop("program/ddp/node/__main__.py")
    return texts


def _fabrics() -> tuple[spec.Fabric, ...]:
    names = [field.name for field in dataclasses.fields(spec.Fabric)]
    return tuple(spec.Fabric(**{name: getattr(fabric, name) for name in names}) for fabric in fabrics.FABRICS)


def _environment(settings: Settings, environment: Environment) -> spec.Environment:
    about = environment.manifest
    return spec.Environment(
        archive=environment.archive,
        cache=str(settings.node_cache),
        sha256=about.sha256,
        unpacked_bytes=about.unpacked_bytes,
        python=about.python,
        trusted_uids=tuple(folders.trusted(settings)),
        remedy=settings.typed("install-environment"),
    )


def _common(settings: Settings, request: Request, run: str) -> dict[str, object]:
    return {
        "run": run,
        "run_dir": str(settings.runs / run),
        "job_dir": str(settings.runs / run),
        "partition": request.partition,
        "num_nodes": request.num_nodes,
        "gpus_per_node": request.gpus_per_node,
        "ranks_per_node": request.ranks_per_node,
        "cpus_per_task": request.cpus_per_task,
        "memory_mb": request.memory_mb,
        "time_limit": request.time_limit,
        "lead_s": request.lead_s,
    }


def _tracking(settings: Settings, given: set[str]) -> list[tuple[str, str]]:
    """Return the variables that tell the payload where to track; what the user gives in `env` counts."""
    wanted = {"MLFLOW_TRACKING_URI": settings.mlflow_uri, "DDPTRAIN_TENSORBOARD": "1" if settings.tensorboard else ""}
    return [(name, value) for name, value in wanted.items() if value and name not in given]


def _directives(params: fields.Resources) -> list[tuple[str, str]]:
    given = {"account": params.account, "qos": params.qos, "reservation": params.reservation}
    return [(name, value) for name, value in given.items() if value]


@functools.cache
def _engine() -> jinja2.Environment:
    engine = jinja2.Environment(  # noqa: S701 - shell scripts: values are quoted or of a strict alphabet
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters["quoted"] = shlex.quote
    return engine


def _render(name: str, **values: object) -> str:
    return _engine().get_template(name).render(values)


def _word(word: Word) -> spec.Word:
    return spec.Word(word.name, is_variable=True) if isinstance(word, Variable) else spec.Word(word)
