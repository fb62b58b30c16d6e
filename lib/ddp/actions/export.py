"""export: write a run's model to a folder, as transformers loads it."""

import dataclasses
import json
import os
import pathlib
import platform
import shutil
import subprocess

from ddp.environment import store
from ddp.host import disk_usage
from ddp.node import exit_codes, unpacking
from ddp.options import models
from ddp.problem import Command, ParameterError, Problem, one_line
from ddp.results.progress import Log, with_progress
from ddp.results.result import Result
from ddp.run import catalog, removal, untrusted
from ddp.run.model import Run
from ddp.settings import Settings
from ddp.submit import scripts
from ddp.workspace.folders import Workspace

_EXPORT_S = 3600.0
_LOOK_S = 120.0
_MANIFEST = "manifest.json"
_FATAL = "[FATAL] "


def export(settings: Settings, params: models.Export, log: Log) -> Result:
    """Write the model of a run's checkpoint to a folder, whole or not at all. Raises Problem."""
    workspace = settings.workspace
    target = pathlib.Path(params.to)
    if os.path.lexists(target):
        raise ParameterError("to", f"{target} exists already; give another folder")
    if not target.parent.is_dir():
        raise ParameterError("to", f"{target.parent} does not exist")
    name = catalog.name_of(workspace, params.run)[0]
    run = catalog.read(workspace, name, is_brief=True)
    checkpoint = _choose(workspace, run, params.checkpoint)

    shown = {"run": run.name, "checkpoint": checkpoint.name, "to": str(target)}
    is_ours = run.kind in ("gpt", "smoke") and (checkpoint / _MANIFEST).is_file()
    if is_ours:
        shown |= _convert(settings, checkpoint, target, log)
    else:
        text = f"copying {checkpoint} as it is"
        with_progress(log, text, lambda: _copy(workspace, run, checkpoint, target))
        shown["form"] = "a copy: the program of the run wrote it, and reads it"
    usage = disk_usage.Usage()
    size_bytes = usage.add(target)
    shown["size"] = disk_usage.in_words(size_bytes)
    return Result(shown, {**shown, "bytes": size_bytes})


def _choose(workspace: Workspace, run: Run, wanted: str) -> pathlib.Path:
    """Return the checkpoint that an option names. Raises ParameterError."""
    saved = workspace.do(removal.list_saved, timeout_s=_LOOK_S, path=run.folder)
    if not saved:
        text = f"{run.name} has no checkpoint in {run.folder}"
        raise ParameterError("run", text, remedy=Command("show", {}, (run.name,)))
    if wanted == "latest":
        return saved[-1].path
    for one in reversed(saved):
        is_wanted = one.is_best if wanted == "best" else one.path.name == wanted
        if is_wanted:
            return one.path
    known = ", ".join(one.path.name for one in saved[-5:])
    raise ParameterError("checkpoint", f"{run.name} has no checkpoint {wanted}; it has {known}")


def _copy(workspace: Workspace, run: Run, checkpoint: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a checkpoint as its program wrote it, and add the run's settings."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.exported")

    def copy() -> None:
        try:
            if checkpoint.is_dir():
                shutil.copytree(checkpoint, partial)
            else:
                partial.mkdir()
                shutil.copy2(checkpoint, partial)
            settings = json.dumps(run.settings, indent=1, sort_keys=True)
            (partial / "training.json").write_text(f"{settings}\n")
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    workspace.do(copy, timeout_s=_EXPORT_S)


def _convert(
    settings: Settings, checkpoint: pathlib.Path, target: pathlib.Path, log: Log
) -> dict[str, str]:
    """Let the payload write a checkpoint as a model; return the facts about it. Raises Problem."""
    python = _python(settings, log)
    argv = [python, "-m", "ddptrain", "export", str(checkpoint), "--output", str(target)]
    kept = ("HOME", "PATH", "LANG", "TMPDIR")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env["CUDA_VISIBLE_DEVICES"] = ""

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=env, cwd="/", capture_output=True, text=True, timeout=_EXPORT_S, check=False
        )

    done = with_progress(log, f"writing the model of {checkpoint.name}", run)
    if done.returncode:
        raise Problem(f"{checkpoint} cannot be exported: {_reason(done.stdout + done.stderr)}")
    facts = untrusted.as_object(json.loads(done.stdout.splitlines()[-1]))
    shown = {name: str(facts[name]) for name in ("model", "step", "tokenizer")}
    if facts.get("base"):
        shown["base"] = str(facts["base"])
        terms = ", ".join(map(str, untrusted.as_list(facts.get("terms"))))
        stated = str(facts.get("license") or "")
        shown["license"] = "; ".join(filter(None, (stated, terms))) or "none beside the base model"
    return shown


def _reason(output: str) -> str:
    """Return the payload's line about the failure, or the last one."""
    lines = [line for line in output.splitlines() if line.strip()]
    for line in lines:
        if _FATAL in line:
            return one_line(line.partition(_FATAL)[2])
    return one_line(lines[-1] if lines else "no output")


def _python(settings: Settings, log: Log) -> str:
    """Return the interpreter of the jobs' environment, unpacked here once. Raises Problem."""
    environment = store.Store(settings).ensure(log)
    wanted = scripts.environment_of(settings, environment)
    wanted = dataclasses.replace(wanted, cache=str(settings.workspace.host_cache))
    host = platform.node()

    def unpack() -> tuple[str, tuple[int, ...]]:
        return unpacking.use(wanted, host, log=_ignore)

    try:
        python, _ = with_progress(log, "unpacking the environment on this host", unpack)
    except exit_codes.FatalError as e:
        raise Problem(str(e)) from e
    return python


def _ignore(_: str) -> None:
    """Drop a line that a job would write into its log."""
