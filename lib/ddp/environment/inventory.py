"""The environments and images that are stored: listed, shown and removed."""

import pathlib

from ddp.environment import archives, store
from ddp.options import models
from ddp.problem import Command, ParameterError, Results
from ddp.results import tables
from ddp.results.progress import Log
from ddp.settings import Settings
from ddp.workspace.folders import Manifest, Workspace


def list_all(settings: Settings, _: models.Parsed, __: Log) -> Results:
    """List the environments that this user's jobs can use, the newest first."""
    workspace = settings.workspace
    found = (contents := workspace.look()).environments + contents.images
    rows = [["NAME", "HASH", "ON", "TORCH", "BUILD", "PYTHON", "MIB", "OWNER", "CREATED"]]
    for one in found:
        owner = (
            workspace.user
            if one.folder == str(workspace.environments)
            else workspace.account or "-"
        )
        build = (
            one.build
            if one.build == "cuda" or one.torch.endswith("+cpu")
            else "cpu (default build)"
        )
        about = [one.name or "-", one.hash, one.base or "-", one.torch, build, one.python]
        about = [one.name, one.hash, "-", "-", "image", "-"] if one.digest else about
        rows.append([*about, str(one.size_bytes >> 20), owner, one.created])
    return {"count": str(len(found)), "environments": tables.Table(rows)}


def show(settings: Settings, params: models.OneEnvironment, _: Log) -> Results:
    """Return the figures of an environment."""
    found = _own(settings.workspace, params.name)[0]
    return {"name": params.name, **store.describe(found)}


def remove(settings: Settings, params: models.OneEnvironment, _: Log) -> Results:
    """Remove this user's environments of a name. Raises ParameterError while a job of the user's uses one."""
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
