"""The Python of a user's own virtual or conda environment: what `python` names, or the one that is active.

It is never started to learn what it has: an import of torch from a shared filesystem may take a minute.
"""

import itertools
import os
import pathlib
import re
import typing

from ddp.base import ParameterError, Settings
from ddp.node import caches
from ddp.options import models
from ddp.submit import checks
from ddp.workspace import folders

_PACKAGES = ("lib*/python3*/*-packages", "local/lib/python3*/*-packages")  # of venv, conda and Debian
_TORCH = re.compile(r"^__version__(?:: \w+)? = ['\"]([\w.+-]{1,80})['\"]", re.MULTILINE)  # of torch/version.py
_Training = typing.TypeVar("_Training", bound=models.Training)


def choose(settings: Settings, params: _Training) -> tuple[_Training, str, str]:
    """Resolve `python` to an interpreter or none; return also its version of torch, and a remark on the choice.

    `auto` is the active environment of a script's user, if it has torch and lies on the shared filesystem.
    Raises ParameterError, and WorkspaceError if the filesystem does not answer.
    """
    others = params.environment or params.container_image
    is_auto = params.python == "auto"
    if params.python == "none" or (is_auto and (others or not params.active or params.workload in ("gpt", "smoke"))):
        return params.model_copy(update={"python": "none"}), "", ""
    if others:
        raise ParameterError("python", f"{others} brings its own; give only one of python, environment, container-image")
    path = pathlib.Path(params.active if is_auto else params.python)
    python, torch, is_shared = folders.call(settings, lambda: _look(settings, path))
    why = "" if python else "has no Python that you can execute"
    why = why or ("" if torch else "has no torch")
    if is_auto and (why or not is_shared):
        why = why or "is not on the shared filesystem"
        remark = f"python: the active environment {path} is not used, since it {why}; to choose one: --python PATH"
        return params.model_copy(update={"python": "none"}), "", remark
    if why:
        raise ParameterError("python", f"{path} {why}; give the path of an environment that has, or omit the option")
    if not settings.takes_any_script:  # an operator names it for another account
        checks.check_inside(settings, "python", str(pathlib.Path(python).parents[1]), kinds=("folder",))
    remark = f"python: {python}, torch {torch}{', of the active environment' if is_auto else ''}"
    remark += "" if is_shared else "; it is not known to be on the shared filesystem: each node needs it at this path"
    return params.model_copy(update={"python": python}), torch, remark


def _look(settings: Settings, path: pathlib.Path) -> tuple[str, str, bool]:
    """Return an environment's interpreter, its version of torch, each empty without one, and whether nodes share it."""
    places = [path / "bin" / name for name in ("python", "python3")] if path.is_dir() else [path]
    python = next((place for place in places if place.is_file() and os.access(place, os.X_OK)), None)
    if python is None:
        return "", "", False
    prefix = python.parent.parent
    roots = [prefix, *_system(prefix)]
    sites = itertools.chain.from_iterable(root.glob(pattern) for root in roots for pattern in _PACKAGES)
    texts = (file.read_text(errors="replace") for site in sites if (file := site / "torch" / "version.py").is_file())
    found = next(filter(None, map(_TORCH.search, texts)), None)
    is_shared = prefix.stat().st_dev == settings.workspace.stat().st_dev or not caches.is_local(str(prefix))
    return str(python), found[1] if found else "", is_shared


def _system(prefix: pathlib.Path) -> list[pathlib.Path]:
    """Return the prefix whose packages a virtual environment takes in, too (PEP 405); none without that."""
    try:
        lines = (prefix / "pyvenv.cfg").read_text(errors="replace").splitlines()
    except OSError:
        return []
    about = {name.strip().lower(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    takes_in = about.get("include-system-site-packages", "").lower() == "true" and about.get("home")
    return [pathlib.Path(about["home"]).parent] if takes_in else []
