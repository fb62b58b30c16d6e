"""A user's own environments: the locked packages and the user's requirements, under a name."""

import pathlib
import re
import typing

from ddp import backports
from ddp.base import Log, ParameterError, Results, Settings
from ddp.environment import archives, environments
from ddp.options import models
from ddp.submit import checks
from ddp.view import tables
from ddp.workspace import folders

MAX_BYTES = 1 << 20  # of a file with requirements


def create(settings: Settings, params: models.CreateEnvironment, log: Log) -> Results:
    """Build an environment and store it, unless one of this name with these requirements is stored."""
    own = environments.Own(params.name, read(pathlib.Path(params.requirements)))
    made = environments.install(settings, checks.partitions(), log, build=params.torch, force=params.force, own=own)
    return {"name": params.name, **environments.describe(made)}


def list_all(settings: Settings, _: models.ListEnvironments, __: Log) -> Results:
    """List the environments that this user's jobs can use, the newest first."""
    contents = folders.look(settings)
    rows = [["NAME", "HASH", "TORCH", "PYTHON", "SIZE", "OWNER", "CREATED"]]
    for manifest in contents.environments:
        is_own = manifest.folder == str(settings.environments)
        owner = settings.user if is_own else settings.account or "-"
        size = f"{manifest.size_bytes >> 20} MiB"
        cells = [manifest.name or "-", manifest.hash, manifest.torch, manifest.python, size, owner, manifest.created]
        rows.append(cells)
    return {"count": str(len(rows) - 1), "environments": tables.Table(rows)}


def show(settings: Settings, params: models.OneEnvironment, _: Log) -> Results:
    """Return the figures of an environment."""
    found = _own(settings, params.name)[0]
    return {"name": params.name, **environments.describe(environments.Environment(found, found.archive))}


def remove(settings: Settings, params: models.OneEnvironment, log: Log) -> Results:
    """Remove this user's environments of a name. Raises ParameterError while a job of the user's uses one."""
    found = _own(settings, params.name)
    hashes = [manifest.hash for manifest in found]
    if users := environments.used_by(settings, hashes):
        raise ParameterError("name", f"{params.name} is used by {users[0]}; wait for its end, or cancel it")
    folders.call(settings, archives.remove_environments, folder=str(settings.environments), hashes=hashes)
    log(f"{len(hashes)} removed")
    return {"name": params.name, "removed": " ".join(hashes)}


def _own(settings: Settings, name: str) -> list[folders.Manifest]:
    contents = folders.look(settings)
    mine = [
        manifest
        for manifest in contents.environments
        if manifest.name == name and manifest.folder == str(settings.environments)
    ]
    if not mine:
        raise ParameterError("name", f"{settings.user} has no environment {name}; see: ddp env list")
    return mine


def read(path: pathlib.Path) -> tuple[str, ...]:
    """Read the requirements in a requirements.txt, or those of the project in a pyproject.toml.

    Raises ParameterError where the file cannot be read, names none, or names files beside it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ParameterError("requirements", f"{path} has more than {MAX_BYTES} bytes")
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise ParameterError("requirements", f"{path} cannot be read: {reason}") from e
    lines = _of_project(path, text) if path.name == "pyproject.toml" else _of_list(path, text)
    if not lines:
        raise ParameterError("requirements", f"{path} names no package")
    return lines


def _of_project(path: pathlib.Path, text: str) -> tuple[str, ...]:
    try:
        project: object = backports.parse_toml(text).get("project", {})
    except ValueError as e:
        raise ParameterError("requirements", f"{path}: {e}") from e
    found = typing.cast("dict[str, object]", project) if isinstance(project, dict) else {"dependencies": None}
    wanted = found.get("dependencies", [])
    if not isinstance(wanted, list) or not all(isinstance(line, str) for line in typing.cast("list[object]", wanted)):
        raise ParameterError("requirements", f"{path}: project.dependencies is no list of texts")
    return _of_list(path, "\n".join(typing.cast("list[str]", wanted)))


def _of_list(path: pathlib.Path, text: str) -> tuple[str, ...]:
    lines: list[str] = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        wanted = re.sub(r"(^|\s)#.*", "", line).strip()
        if re.match(r"-[rce]|--(requirement|constraint|editable)\b|\.{0,2}/|\.(\[|$)|file:", wanted):
            text = f"{path}: {wanted.split()[0]} is not taken; write the packages themselves into one file"
            raise ParameterError("requirements", text)
        if wanted:
            lines.append(wanted)
    return tuple(lines)
