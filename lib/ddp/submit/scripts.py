"""The texts of a run: what sbatch gets and what runs on the nodes, rendered from templates with every value quoted."""

import collections.abc
import dataclasses
import functools
import pathlib
import shlex

import jinja2

from ddp.base import Settings
from ddp.environment.environments import Environment
from ddp.options import fields, models
from ddp.submit import fabrics
from ddp.submit.resources import Request
from ddp.workspace import tokens

_HERE = pathlib.Path(__file__)
_TEMPLATES = _HERE.with_name("templates")
_EXPLAIN = _HERE.parents[1] / "node" / "explain.py"


@dataclasses.dataclass(frozen=True)
class Variable:
    """A word of a command that the job's script knows: `RUN_DIR` or `resume`."""

    name: str


Word = str | Variable
RUN_DIR, RESUME = Variable("RUN_DIR"), Variable("resume")


@dataclasses.dataclass(frozen=True)
class Profile:
    """What is recorded of which ranks."""

    kind: str  # nsys or torch
    ranks: str  # comma-separated
    has_window: bool  # the program itself starts and stops the recording


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
    by_rank = params.launcher == "srun"
    from_env = fields.variables(params.env)
    has_token = tokens.is_wanted(settings, params)
    token = ((tokens.VARIABLE, tokens.path(settings, run)),) if has_token else ()
    variables = (*_tracking(settings, {name for name, _ in from_env}), *token, *from_env)
    has_window = program.leaves_outcome and params.profile_steps is not None
    common = _common(settings, request, environment, run) | {
        "tasks_per_node": request.ranks_per_node if by_rank else 1,
        "cpus_per_task": max(1, request.cpus_per_task // request.ranks_per_node) if by_rank else request.cpus_per_task,
    }
    script = _render(
        "job.sbatch.j2",
        **common,
        directives=directives,
        reservation=params.reservation,
        command=program.command,
        resume=program.resume,
        payload=program.payload,
        leaves_outcome=program.leaves_outcome,
        variables=variables,
        launcher=params.launcher,
        container=params.container_image,
        container_env=",".join(["PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES", *(name for name, _ in variables)]),
        profile=Profile(params.profile, params.profile_ranks, has_window) if params.profile else None,
        max_requeues=params.max_requeues,
        max_restarts=params.max_restarts,
        workspace=str(settings.folder),
        sweep=sweep,
        has_token=has_token,
    )
    fabric = _render(
        "fabric.sh.j2",
        wanted=params.fabric,
        fabrics=fabrics.FABRICS,
        variables=variables,
        container=params.container_image,
    )
    return {
        "job.sbatch": script,
        "node.sh": _render("node.sh.j2"),
        "rank.sh": _render("rank.sh.j2"),
        "fabric.sh": fabric,
        "environment.sh": _render("environment.sh.j2", install=settings.typed("install-environment")),
        "explain.py": _EXPLAIN.read_text(),
    }


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
    script = _render(
        "prepare.sbatch.j2",
        **_common(settings, request, environment, run),
        directives=_directives(params),
        commands=commands,
        dataset=dataset,
        array=array,
        follows=follows,
    )
    return {
        "job.sbatch": script,
        "environment.sh": _render("environment.sh.j2", install=settings.typed("install-environment")),
    }


def _common(settings: Settings, request: Request, environment: Environment, run: str) -> dict[str, object]:
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
        "nodelist": request.nodelist,
        "exclude": request.exclude,
        "environment": environment.manifest,
        "archive": environment.archive,
        "node_cache": str(settings.node_cache),
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
    engine.filters["word"] = _word
    return engine


def _render(name: str, **values: object) -> str:
    return _engine().get_template(name).render(values)


def _word(word: Word) -> str:
    return f'"${word.name}"' if isinstance(word, Variable) else shlex.quote(word)
