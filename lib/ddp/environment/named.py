"""A user's own environments: the locked packages and the user's requirements, under a name."""

import hashlib
import os
import pathlib
import re

from ddp.base import Log, ParameterError, Results, Settings
from ddp.environment import archives, builder, environments
from ddp.options import models
from ddp.problem import Command
from ddp.submit import checks
from ddp.view import tables
from ddp.view.result import Result
from ddp.workspace import folders

MAX_BYTES = 1 << 20  # of a file with requirements
_INCLUDED = re.compile(rb"^\s*(?:-[rc]|--requirement|--constraint)[ =]*([^\s:]+)\s*$", re.MULTILINE)


def create(settings: Settings, params: models.CreateEnvironment, log: Log) -> Results:
    """Make an environment and store it, unless one of this name with these requirements is stored."""
    own = read(params.name, pathlib.Path(params.requirements))
    made = environments.install(settings, checks.partitions(), log, build=params.torch, force=params.force, own=own)
    return {"name": params.name, **environments.describe(made)}


def list_all(settings: Settings, _: models.Parsed, __: Log) -> Result:
    """List the environments that this user's jobs can use, the newest first."""
    found = folders.look(settings).environments
    rows = [["NAME", "HASH", "TORCH", "BUILD", "PYTHON", "SIZE", "OWNER", "CREATED"]]
    for one in found:
        owner = settings.user if one.folder == str(settings.environments) else settings.account or "-"
        build = one.build if one.build == "cuda" or one.torch.endswith("+cpu") else "cpu (default build)"
        size = f"{one.size_bytes >> 20} MiB"
        rows.append([one.name or "-", one.hash, one.torch, build, one.python, size, owner, one.created])
    values: list[object] = [{**one.model_dump(mode="json"), "archive": one.archive} for one in found]
    return Result(
        {"count": str(len(found)), "environments": tables.Table(rows)}, {"count": len(found), "environments": values}
    )


def show(settings: Settings, params: models.OneEnvironment, _: Log) -> Results:
    """Return the figures of an environment."""
    found = _own(settings, params.name)[0]
    return {"name": params.name, **environments.describe(environments.Environment(found, found.archive))}


def remove(settings: Settings, params: models.OneEnvironment, log: Log) -> Results:
    """Remove this user's environments of a name. Raises ParameterError while a job of the user's uses one."""
    hashes = [manifest.hash for manifest in _own(settings, params.name)]
    if users := environments.used_by(settings, hashes):
        remedy = Command("cancel", {}, (users[0],))
        raise ParameterError("name", f"{params.name} is used by {users[0]}", remedy=remedy)
    folders.call(settings, archives.remove_environments, folder=str(settings.environments), hashes=hashes)
    log(f"removed {len(hashes)}")
    return {"name": params.name, "removed": " ".join(hashes)}


def _own(settings: Settings, name: str) -> list[folders.Manifest]:
    folder = str(settings.environments)
    mine = [one for one in folders.look(settings).environments if (one.name, one.folder) == (name, folder)]
    if not mine:
        raise ParameterError("name", f"{settings.user} has no environment {name}", remedy=Command("env list"))
    return mine


def read(name: str, path: pathlib.Path) -> builder.Own:
    """Return the requirements in a requirements.txt, with the files that it includes, or in a pyproject.toml.

    Raises ParameterError if a file cannot be read.
    """
    texts: dict[pathlib.Path, bytes] = {}
    remaining = [path]
    while remaining:
        one = remaining.pop()
        try:
            with one.open("rb") as file:
                texts[one] = file.read(MAX_BYTES + 1)
        except OSError as e:
            raise ParameterError("requirements", f"{one} cannot be read: {e.strerror}") from e
        if sum(map(len, texts.values())) > MAX_BYTES:
            raise ParameterError("requirements", f"{path} and what it includes have more than {MAX_BYTES} bytes")
        included = {one.parent / os.fsdecode(found) for found in _INCLUDED.findall(texts[one])}
        remaining += included - texts.keys()
    content = b"\0".join(texts[one] for one in sorted(texts))
    return builder.Own(name, path, hashlib.sha256(content).hexdigest())
