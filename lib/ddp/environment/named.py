"""A user's own requirements: layers on the cluster's environment, with a name or for a submission."""

import contextlib
import hashlib
import os
import pathlib
import re

from ddp.environment import archives, builder, environments, wheelhouse
from ddp.host import files
from ddp.options import models
from ddp.problem import Command, ParameterError, Results, shown
from ddp.results import tables
from ddp.results.progress import Log
from ddp.run import untrusted
from ddp.settings import Settings
from ddp.workspace import folders
from ddp.workspace.folders import Workspace
from slurm_ddp import backports

_INCLUDED = re.compile(
    rb"^\s*(?:-[rc]|--requirement|--constraint)[ =]*([^\s:]+)\s*(?:#.*)?$", re.MULTILINE
)
_LOCAL = r"(-e|--editable)[ =]*(?!\s*\w+\+)|\.{0,2}/|\.{1,2}(\[|\s|$)|file:|[^#]*\s@\s*file:"
_REFUSED = {  # lines of pip's "Requirements file format"
    _LOCAL: "is on this host, and a project's code comes with the job; omit the line, or use ddp env create --project",
    "--require-hashes": "cannot hold for the environment below; omit the line: hashes are checked all the same",
}


def create(settings: Settings, params: models.CreateEnvironment, log: Log) -> Results:
    """Make an environment and store it, unless one of this name with these requirements is stored."""
    path = pathlib.Path(params.requirements or "")
    if (params.requirements is None) == (params.project is None):
        raise ParameterError("requirements", "give either a file of requirements, or a project")
    if params.project is not None:
        folder = pathlib.Path(params.project)
        path = settings.workspace.do(lambda: _project(folder))
    extras = tuple(re.split("[, ]+", params.extra)) if params.extra else ()
    if extras and path.suffix != ".toml":
        raise ParameterError("extra", f"{path} has none; a pyproject.toml may")
    if any(one.digest for one in environments.own(settings.workspace, params.name)):
        remedy = Command("env remove", arguments=(params.name,))
        raise ParameterError(
            "name", f"{params.name} is an image; choose another name, or remove it", remedy=remedy
        )
    build = params.torch or settings.torch_build
    wanted = request(settings, path, build, params.name, *extras)
    made = environments.layer(settings, wanted, log, force=params.force)
    return {"name": params.name, **environments.describe(made)}


def request(
    settings: Settings, path: pathlib.Path, build: str, name: str = "", *extras: str
) -> builder.Request:
    """Return the inputs of a layer. Raises ParameterError if the file cannot be used."""
    sha256 = settings.workspace.do(lambda: digest(path, *extras))
    return builder.Request(build, wheelhouse.find(settings), name, path, extras, sha256)


def _project(folder: pathlib.Path) -> pathlib.Path:
    """Return the file that lists a project's dependencies. Raises ParameterError."""
    path = folder / "pyproject.toml"
    with contextlib.suppress(OSError, ValueError, files.RefusedError):
        project = untrusted.as_object(
            backports.parse_toml(files.read_named(path).decode()).get("project")
        )
        is_dynamic = "dependencies" in project.get("dynamic", ())
        if "dependencies" in project or ("optional-dependencies" in project and not is_dynamic):
            return path
    if (folder / "requirements.txt").is_file():
        return folder / "requirements.txt"
    text = f"{folder} has neither a valid pyproject.toml with project.dependencies nor a requirements.txt"
    raise ParameterError(
        "project", f"{text}; give the file that lists its packages with requirements"
    )


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
    return {"name": params.name, **environments.describe(found)}


def remove(settings: Settings, params: models.OneEnvironment, _: Log) -> Results:
    """Remove this user's environments of a name. Raises ParameterError while a job of the user's uses one."""
    workspace = settings.workspace
    hashes = [manifest.hash for manifest in _own(workspace, params.name)]
    used = environments.in_use(workspace, workspace.user)
    if runs := [pathlib.Path(run).name for run, name in used.items() if name in hashes]:
        raise ParameterError(
            "name", f"{params.name} is used by {runs[0]}", remedy=Command("cancel", {}, (runs[0],))
        )
    workspace.do(archives.remove_environments, folder=str(workspace.environments), hashes=hashes)
    return {"name": params.name, "removed": " ".join(hashes)}


def _own(workspace: Workspace, name: str) -> list[folders.Manifest]:
    if not (mine := environments.own(workspace, name)):
        raise ParameterError(
            "name", f"{workspace.user} has no environment {name}", remedy=Command("env list")
        )
    return mine


def digest(path: pathlib.Path, *extras: str) -> str:
    """Hash a requirements.txt with what it includes, or a pyproject.toml with extras. Raises ParameterError by line."""
    texts: dict[pathlib.Path, bytes] = {}
    remaining = {path}
    while remaining:
        one = remaining.pop()
        try:
            texts[one] = files.read_named(one)
        except OSError as e:
            raise ParameterError("requirements", f"{one} cannot be read: {e.strerror}") from e
        except files.RefusedError as e:
            raise ParameterError("requirements", str(e)) from e
        if one.suffix == ".toml":
            continue
        for number, line in enumerate(texts[one].decode(errors="replace").splitlines(), 1):
            for pattern, why in _REFUSED.items():
                if re.match(rf"\s*(?:{pattern})", line):
                    raise ParameterError(
                        "requirements", f"{one}:{number}: {shown(line.strip())} {why}"
                    )
        remaining |= {
            one.parent / os.fsdecode(found) for found in _INCLUDED.findall(texts[one])
        } - texts.keys()
    return hashlib.sha256(
        b"\0".join([*(texts[one] for one in sorted(texts)), *map(str.encode, extras)])
    ).hexdigest()
