"""render: the script that `ddp submit` would hand to Slurm, or Kubernetes manifests of a run."""

import dataclasses
import pathlib

from ddp.environment import store
from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.project import copies
from ddp.results.progress import Log
from ddp.results.result import Answer, Result
from ddp.run import creation
from ddp.settings import Settings
from ddp.submit import control, kubernetes, scripts, training, workloads
from ddp.workspace import checks
from slurm_ddp.slurm import times


def render(settings: Settings, params: models.Render, log: Log) -> Answer:
    """Render the run. Raises Problem."""
    if params.kubernetes:
        return render_kubernetes(settings, params, log)
    checked = training.check(settings, params, run=params.run, resume=params.resume)
    dry = training.dry(checked)
    return dataclasses.replace(dry, text=dry.shown["script"])


def render_kubernetes(settings: Settings, params: models.Render, log: Log) -> Result:
    """Render manifests from the options alone, and store the code and payload that they name.

    Raises ParameterError.
    """
    workspace = settings.workspace
    _check_for_pods(params)
    is_built_in = params.workload in workloads.BUILT_IN
    if not is_built_in and not params.snapshot:
        checks.check_inside(workspace, "workload", params.workload, kinds=("file",))
    workspace.ensure_folders()
    run = params.run or control.new_name(workspace, "run")

    with copies.copied(workspace, params, run, log) as kept:
        if kept is not None and not kept.is_new:
            _check_unchanged(run, kept)
        text = _manifests(settings, params, run, kept)
        store.Store(settings).store_payload()
        if kept is not None:
            workspace.do(creation.create, path=workspace.runs / run, texts={}, again=True)
            kept.place()

    shown = {"manifests": text, "run": run, "run-dir": str(workspace.runs / run)}
    if kept is not None:
        shown["code"] = str(kept.folder)
    return Result(shown, dict(shown), text)


def _check_for_pods(params: models.Render) -> None:
    """Raise ParameterError for options that pods cannot have."""
    if params.container_image is None:
        raise ParameterError("container-image", "is required: pods have no other environment")
    if params.env_file or params.secrets:
        text = "manifests are for others to read; make a Secret, and name it in the manifest"
        raise ParameterError("env-file", text)
    if params.notify:
        text = "pods have no supervisor; let the cluster's own alerts tell you"
        raise ParameterError("notify", text)
    if params.launcher != "torchrun" or params.accelerate or params.is_command:
        text = "pods start torchrun with a script or module; write: ddp render train.py"
        raise ParameterError("launcher", text)
    if params.own_python:
        raise ParameterError("python", "pods have the image's own; omit it")
    if params.again:
        text = "Kubernetes starts a pod again with the same command; let the program look itself"
        raise ParameterError("again", text)


def _check_unchanged(run: str, kept: copies.Copy) -> None:
    """Raise ParameterError if the code that pods of this name may run would change."""
    if kept.update.copied or kept.update.removed:
        text = f"pods of {run} may run its code, which differs by now; choose another name"
        raise ParameterError("run", text)


def _manifests(
    settings: Settings, params: models.Render, run: str, kept: copies.Copy | None
) -> str:
    workspace = settings.workspace
    run_dir = workspace.runs / run
    dataset = str(workspace.datasets / (params.dataset or "python-stdlib"))
    workload = workloads.of(settings, params, resume=params.resume)
    program = dataclasses.replace(workload, dataset=dataset, kept=kept).program()
    gpus = params.num_gpus or 0
    memory_mb = fields.memory_mb(params.memory or fields.SITE)
    wanted = kubernetes.Run(
        name=run,
        image=(params.container_image or "").replace("#", "/", 1),  # enroot's notation
        command=_command(program, run_dir),
        env=_variables(params, program),
        workdir=program.start.folder if program.start is not None else "",
        nodes=params.nodes or 1,
        gpus_per_node=gpus,
        ranks_per_node=params.ranks_per_node or max(gpus, 1),
        cpus_per_task=params.cpus_per_task or max(4 * gpus, 1),
        memory_mb=memory_mb or max(16384 * gpus, 4096),
        time_limit_s=times.parse_time(params.time_limit or ""),
        workspace=str(workspace.path),
        run_dir=str(run_dir),
        python_path=(program.payload,) if program.payload else (),
        claim=params.claim,
        namespace=params.namespace,
        uid=workspace.uid,
        gid=settings.gid,
        max_restarts=params.max_restarts,
    )
    return kubernetes.render(wanted)


def _command(program: scripts.Program, run_dir: pathlib.Path) -> tuple[str, ...]:
    """Return the command of a program, with the run's folder and its checkpoint in place."""
    placeholders = {scripts.RUN_DIR: str(run_dir), scripts.RESUME: program.resume}
    command: list[str] = []
    for word in program.command:
        command.append(word if isinstance(word, str) else placeholders[word])
    return tuple(command)


def _variables(params: models.Render, program: scripts.Program) -> dict[str, str]:
    variables = dict(params.variables)
    if program.start is not None and program.start.python_path:
        paths = filter(None, (program.payload, program.start.python_path))
        variables["PYTHONPATH"] = ":".join(paths)
    return variables
