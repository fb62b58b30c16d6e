"""Write a run as files: the script that `ddp submit` would hand to Slurm, or Kubernetes manifests."""

import dataclasses

from ddp.environment import environments
from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.project import copies
from ddp.results.progress import Log
from ddp.results.result import Answer, Result
from ddp.run import folder
from ddp.settings import Settings
from ddp.submit import control, kubernetes, scripts, training
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
    """Render manifests from the options alone, and store the code and payload that they name. Raises ParameterError."""
    workspace = settings.workspace
    if params.container_image is None:
        raise ParameterError("container-image", "is required: pods have no other environment")
    if params.env_file or params.secrets:
        raise ParameterError(
            "env-file",
            "manifests are for others to read; make a Secret, and name it in the manifest",
        )
    if params.own_python:
        raise ParameterError("python", "pods have the image's own; omit it")
    kind = params.workload if params.workload in ("gpt", "smoke") else "script"
    if kind == "script" and not params.snapshot:
        checks.check_inside(workspace, "workload", params.workload, kinds=("file",))
    workspace.ensure_folders()
    run = params.run or control.new_name(workspace, "run")
    with copies.copied(workspace, params, run, log) as kept:
        if kept is not None and not kept.is_new and (kept.update.copied or kept.update.removed):
            raise ParameterError(
                "run", f"pods of {run} may run its code, which differs by now; choose another name"
            )
        text = _manifests(settings, params, kind, run, kept)
        environments.store_payload(settings)
        if kept is not None:
            workspace.do(folder.create, path=workspace.runs / run, texts={}, again=True)
            kept.place()
    shown = {"manifests": text, "run": run, "run-dir": str(workspace.runs / run)}
    shown |= {"code": str(kept.folder)} if kept is not None else {}
    return Result(shown, dict(shown), text)


def _manifests(
    settings: Settings, params: models.Render, kind: str, run: str, kept: copies.Copy | None
) -> str:
    gpus = params.gpus_per_node or 0
    workspace = settings.workspace
    run_dir = workspace.runs / run
    dataset = str(workspace.datasets / (params.dataset or "python-stdlib"))
    program = training.Workload(kind, run, dataset, resume=params.resume).program(
        settings, params, kept
    )
    named = {scripts.RUN_DIR: str(run_dir), scripts.RESUME: program.resume}
    start = program.start
    variables = dict(fields.variables(params.env))
    if start is not None and start.python_path:
        variables["PYTHONPATH"] = ":".join(filter(None, (program.payload, start.python_path)))
    wanted = kubernetes.Run(
        name=run,
        image=(params.container_image or "").replace("#", "/", 1),  # enroot's notation
        command=tuple(word if isinstance(word, str) else named[word] for word in program.command),
        env=variables,
        workdir=start.folder if start is not None else "",
        nodes=params.nodes or 1,
        gpus_per_node=gpus,
        ranks_per_node=max(gpus, 1),
        cpus_per_task=params.cpus_per_task or max(4 * gpus, 1),
        memory_mb=fields.memory_mb(params.memory or fields.SITE) or max(16384 * gpus, 4096),
        time_limit_s=times.parse_time(params.time_limit) if params.time_limit else None,
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
