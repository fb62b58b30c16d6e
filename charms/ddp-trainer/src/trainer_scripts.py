"""The texts of a run: what sbatch gets and what runs on the nodes, rendered from templates with every value quoted."""

import collections.abc
import functools
import pathlib
import shlex

import jinja2

import trainer_params
from trainer_base import Settings
from trainer_environment import Environment
from trainer_plan import Request

_TEMPLATES = pathlib.Path(__file__).with_name("templates")


def training(
    settings: Settings,
    request: Request,
    params: trainer_params.SubmitDdp,
    environment: Environment,
    *,
    run: str,
    command: collections.abc.Sequence[str],
    leaves_outcome: bool,
) -> dict[str, str]:
    """Return the files of a training run by name. `command` is what torchrun starts."""
    directives = _directives(params)
    if params.constraint:
        directives.append(("constraint", params.constraint))
    script = _render(
        "job.sbatch.j2",
        **_common(settings, request, environment, run),
        directives=directives,
        command=command,
        variables=trainer_params.variables(params.env),
        leaves_outcome=leaves_outcome,
        max_requeues=params.max_requeues,
    )
    helper = _render("environment.sh.j2", unit=settings.unit)
    return {"job.sbatch": script, "node.sh": _render("node.sh.j2"), "environment.sh": helper}


def preparation(
    settings: Settings,
    request: Request,
    params: trainer_params.PrepareDataset,
    environment: Environment,
    *,
    run: str,
    dataset: str,
    command: collections.abc.Sequence[str],
) -> dict[str, str]:
    """Return the files of a job that prepares a dataset by name. `command` is what `python -m` starts."""
    script = _render(
        "prepare.sbatch.j2",
        **_common(settings, request, environment, run),
        directives=_directives(params),
        command=command,
        dataset=dataset,
    )
    return {"job.sbatch": script, "environment.sh": _render("environment.sh.j2", unit=settings.unit)}


def _common(settings: Settings, request: Request, environment: Environment, run: str) -> dict[str, object]:
    return {
        "run": run,
        "run_dir": str(settings.runs / run),
        "partition": request.partition,
        "num_nodes": request.num_nodes,
        "gpus_per_node": request.gpus_per_node,
        "ranks_per_node": request.ranks_per_node,
        "cpus_per_task": request.cpus_per_task,
        "memory_mb": request.memory_mb,
        "time_limit": request.time_limit,
        "lead_s": request.lead_s,
        "environment": environment.manifest,
        "archive": environment.archive,
        "node_cache": str(settings.node_cache),
    }


def _directives(params: trainer_params.Resources) -> list[tuple[str, str]]:
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
