"""A user's own environments: the locked packages and the user's requirements, under a name."""

import hashlib
import os
import pathlib
import re

from ddp.base import Log, ParameterError, Results, Settings
from ddp.environment import archives, builder, environments, wheelhouse
from ddp.options import models
from ddp.problem import Command
from ddp.view import tables
from ddp.workspace import folders

_INCLUDED = re.compile(rb"^\s*(?:-[rc]|--requirement|--constraint)[ =]*([^\s:]+)\s*$", re.MULTILINE)


def create(settings: Settings, params: models.CreateEnvironment, log: Log) -> Results:
    """Make an environment and store it, unless one of this name with these requirements is stored."""
    build, path = params.torch or settings.torch_build, pathlib.Path(params.requirements)
    request = builder.Request(build, wheelhouse.find(settings), params.name, path, digest(path))
    made = environments.install(settings, request, log, force=params.force)
    return {"name": params.name, **environments.describe(made)}


def list_all(settings: Settings, _: models.Parsed, __: Log) -> Results:
    """List the environments that this user's jobs can use, the newest first."""
    found = folders.look(settings).environments
    rows = [["NAME", "HASH", "TORCH", "BUILD", "PYTHON", "MIB", "OWNER", "CREATED"]]
    for one in found:
        owner = settings.user if one.folder == str(settings.environments) else settings.account or "-"
        build = one.build if one.build == "cuda" or one.torch.endswith("+cpu") else "cpu (default build)"
        rows.append(
            [one.name or "-", one.hash, one.torch, build, one.python, str(one.size_bytes >> 20), owner, one.created]
        )
    return {"count": str(len(found)), "environments": tables.Table(rows)}


def show(settings: Settings, params: models.OneEnvironment, _: Log) -> Results:
    """Return the figures of an environment."""
    found = _own(settings, params.name)[0]
    return {"name": params.name, **environments.describe(found)}


def remove(settings: Settings, params: models.OneEnvironment, _: Log) -> Results:
    """Remove this user's environments of a name. Raises ParameterError while a job of the user's uses one."""
    hashes = [manifest.hash for manifest in _own(settings, params.name)]
    used = environments.in_use(settings, settings.user)
    if runs := [pathlib.Path(run).name for run, name in used.items() if name in hashes]:
        raise ParameterError("name", f"{params.name} is used by {runs[0]}", remedy=Command("cancel", {}, (runs[0],)))
    folders.call(settings, archives.remove_environments, folder=str(settings.environments), hashes=hashes)
    return {"name": params.name, "removed": " ".join(hashes)}


def _own(settings: Settings, name: str) -> list[folders.Manifest]:
    folder = str(settings.environments)
    mine = [one for one in folders.look(settings).environments if (one.name, one.folder) == (name, folder)]
    if not mine:
        raise ParameterError("name", f"{settings.user} has no environment {name}", remedy=Command("env list"))
    return mine


def digest(path: pathlib.Path) -> str:
    """Hash a requirements.txt with the files that it includes, or a pyproject.toml.

    Raises ParameterError if a file cannot be read.
    """
    texts: dict[pathlib.Path, bytes] = {}
    remaining = {path}
    while remaining:
        one = remaining.pop()
        try:
            texts[one] = one.read_bytes()
        except OSError as e:
            raise ParameterError("requirements", f"{one} cannot be read: {e.strerror}") from e
        remaining |= {one.parent / os.fsdecode(found) for found in _INCLUDED.findall(texts[one])} - texts.keys()
    return hashlib.sha256(b"\0".join(texts[one] for one in sorted(texts))).hexdigest()
