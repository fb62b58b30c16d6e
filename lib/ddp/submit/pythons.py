"""The user's own virtual or conda environment; its Python is not started here: importing torch may take minutes."""

import os
import pathlib
import re

from ddp.host import files
from ddp.node import caches
from ddp.options import models
from ddp.problem import ParameterError
from ddp.settings import Settings
from ddp.workspace import checks
from ddp.workspace.folders import Workspace

_TORCH = "lib*/python3*/*-packages/torch/version.py"  # of venv, conda and Debian
_VERSION = re.compile(r"^__version__(?:: \w+)? = ['\"]([\w.+-]{1,80})['\"]", re.MULTILINE)
_SYSTEM = re.compile(
    r"^home *= *(.+)/bin *$(?=[^\0]*^include-system-site-packages *= *true)", re.MULTILINE
)  # venv's


def choose(settings: Settings, params: models.Training) -> tuple[str, str]:
    """Return the interpreter that `python` means, empty for none, and a remark on the choice. Raises Problem."""
    workspace = settings.workspace
    others = params.environment or params.requirements or params.container_image
    is_auto = params.python == "auto" and not others and params.workload not in ("gpt", "smoke")
    place = params.active if is_auto else params.own_python
    if not place:
        return "", ""
    if others:
        text = f"{others} brings its own; give one of python, environment, requirements, container-image"
        raise ParameterError("python", text)
    python, torch, is_shared = workspace.do(lambda: _look(workspace, pathlib.Path(place)))
    why = (
        ""
        if torch
        else "has no torch"
        if python
        else "does not exist, or has no Python that you can execute"
    )
    if is_auto and (why or not is_shared):
        why = why or "is not on the shared filesystem"
        return (
            "",
            f"python: the active environment {place} is not used, since it {why}; to choose one: --python PATH",
        )
    if why:
        raise ParameterError(
            "python", f"{place} {why}; give the path of an environment with torch, or omit it"
        )
    if not settings.takes_any_script:  # an operator names it for another account
        checks.check_inside(
            workspace, "python", str(pathlib.Path(python).parents[1]), kinds=("folder",)
        )
    about = (
        "of the active environment"
        if is_auto
        else ""
        if is_shared
        else "which each node needs at this path"
    )
    return python, f"python: {python}, torch {torch}{about and ', '}{about}"


def _look(workspace: Workspace, path: pathlib.Path) -> tuple[str, str, bool]:
    """Return an environment's interpreter, its version of torch, each empty without one, and whether nodes share it."""
    places = [path / "bin" / name for name in ("python", "python3")] if path.is_dir() else [path]
    python = next(
        (place for place in places if place.is_file() and os.access(place, os.X_OK)), None
    )
    if python is None:
        return "", "", False
    prefix, config = python.parent.parent, python.parent.parent / "pyvenv.cfg"
    about = _text(config) if config.is_file() else None
    others = (
        [f"{prefix}/local", f"{pathlib.Path.home()}/.local"]
        if about is None
        else _SYSTEM.findall(about)
    )
    found_in = (file for root in (prefix, *map(pathlib.Path, others)) for file in root.glob(_TORCH))
    found = next(filter(None, (_VERSION.search(_text(file)) for file in found_in)), None)
    is_shared = prefix.stat().st_dev == workspace.path.stat().st_dev or not caches.is_local(
        str(prefix)
    )
    return str(python), found[1] if found else "", is_shared


def _text(path: pathlib.Path) -> str:
    return files.read_named(path).decode(errors="replace")
