"""A user's environments and images: made from requirements, listed, shown and removed."""

import pathlib
import re

from ddp.environment import archives, requirements, store
from ddp.options import models
from ddp.problem import Command, ParameterError, Results
from ddp.results import tables
from ddp.results.progress import Log
from ddp.settings import Settings
from ddp.workspace.folders import Manifest, Workspace


def create(settings: Settings, params: models.CreateEnvironment, log: Log) -> Results:
    """Make an environment, unless one of this name and these requirements is stored."""
    workspace = settings.workspace
    if (params.requirements is None) == (params.project is None):
        raise ParameterError("requirements", "give either a file of requirements, or a project")
    path = pathlib.Path(params.requirements or "")
    if params.project is not None:
        folder = pathlib.Path(params.project)
        path = workspace.do(lambda: requirements.find_in_project(folder))
    extras = tuple(re.split("[, ]+", params.extra)) if params.extra else ()
    if extras and path.suffix != ".toml":
        raise ParameterError("extra", f"{path} has none; a pyproject.toml may")
    if any(one.digest for one in store.own(workspace, params.name)):
        remedy = Command("env remove", arguments=(params.name,))
        text = f"{params.name} is an image; choose another name, or remove it"
        raise ParameterError("name", text, remedy=remedy)

    settings = store.with_torch(settings, params.torch)
    environments = store.Store(settings)
    wanted = environments.request(path, settings.torch_build, params.name, *extras)
    made = environments.layer(wanted, log, force=params.force)
    return {"name": params.name, **store.describe(made)}


def list_all(settings: Settings, _: models.Parsed, __: Log) -> Results:
    """List the environments that this user's jobs can use, the newest first."""
    workspace = settings.workspace
    found = (contents := workspace.look()).environments + contents.images
    rows = [["NAME", "HASH", "ON", "TORCH", "BUILD", "PYTHON", "MIB", "OWNER", "CREATED"]]
    for one in found:
        is_own = one.folder == str(workspace.environments)
        owner = workspace.user if is_own else workspace.account or "-"
        rows.append([*_about(one), str(one.size_bytes >> 20), owner, one.created])
    return {"count": str(len(found)), "environments": tables.Table(rows)}


def _about(one: Manifest) -> list[str]:
    if one.digest:
        return [one.name, one.hash, "-", "-", "image", "-"]
    is_cuda_or_cpu = one.build == "cuda" or one.torch.endswith("+cpu")
    build = one.build if is_cuda_or_cpu else "cpu (default build)"
    return [one.name or "-", one.hash, one.base or "-", one.torch, build, one.python]


def show(settings: Settings, params: models.OneEnvironment, _: Log) -> Results:
    """Return the figures of an environment."""
    found = _own(settings.workspace, params.name)[0]
    return {"name": params.name, **store.describe(found)}


def remove(settings: Settings, params: models.OneEnvironment, _: Log) -> Results:
    """Remove this user's environments of a name.

    Raises ParameterError while a job of the user's uses one.
    """
    workspace = settings.workspace
    hashes = [manifest.hash for manifest in _own(workspace, params.name)]
    used = store.in_use(workspace, workspace.user)
    if runs := [pathlib.Path(run).name for run, name in used.items() if name in hashes]:
        raise ParameterError(
            "name", f"{params.name} is used by {runs[0]}", remedy=Command("cancel", {}, (runs[0],))
        )
    workspace.do(archives.remove_environments, folder=str(workspace.environments), hashes=hashes)
    return {"name": params.name, "removed": " ".join(hashes)}


def _own(workspace: Workspace, name: str) -> list[Manifest]:
    if not (mine := store.own(workspace, name)):
        raise ParameterError(
            "name", f"{workspace.user} has no environment {name}", remedy=Command("env list")
        )
    return mine
