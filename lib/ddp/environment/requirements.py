"""A user's own requirements: layers on the environment of all jobs, with a name or for one submission."""

import contextlib
import hashlib
import os
import pathlib
import re

from ddp.environment import builder, store, wheelhouse
from ddp.host import files
from ddp.options import models
from ddp.problem import Command, ParameterError, Results, shown
from ddp.results.progress import Log
from ddp.run import untrusted
from ddp.settings import Settings
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
    if any(one.digest for one in store.own(settings.workspace, params.name)):
        remedy = Command("env remove", arguments=(params.name,))
        raise ParameterError(
            "name", f"{params.name} is an image; choose another name, or remove it", remedy=remedy
        )
    build = params.torch or settings.torch_build
    wanted = request(settings, path, build, params.name, *extras)
    made = store.Store(settings).layer(wanted, log, force=params.force)
    return {"name": params.name, **store.describe(made)}


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
