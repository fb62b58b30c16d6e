"""Files that list a user's requirements: found in a project, checked, hashed."""

import contextlib
import hashlib
import os
import pathlib
import re

from ddp.host import files
from ddp.problem import ParameterError, shown
from ddp.run import untrusted
from slurm_ddp import backports

_INCLUDED = re.compile(
    rb"^\s*(?:-[rc]|--requirement|--constraint)[ =]*([^\s:]+)\s*(?:#.*)?$", re.MULTILINE
)
_LOCAL = r"(-e|--editable)[ =]*(?!\s*\w+\+)|\.{0,2}/|\.{1,2}(\[|\s|$)|file:|[^#]*\s@\s*file:"
_REFUSED = {  # lines of pip's "Requirements file format"
    _LOCAL: "is on this host, and a project's code comes with the job; omit the line, or use ddp env create --project",
    "--require-hashes": "cannot hold for the environment below; omit the line: hashes are checked all the same",
}


def find_in_project(folder: pathlib.Path) -> pathlib.Path:
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
    text = f"{folder} has neither a valid pyproject.toml with project.dependencies"
    text += " nor a requirements.txt"
    raise ParameterError(
        "project", f"{text}; give the file that lists its packages with requirements"
    )


def digest(path: pathlib.Path, *extras: str) -> str:
    """Hash a requirements.txt with the files it includes, or a pyproject.toml with extras.

    Raises ParameterError, which names the line.
    """
    texts: dict[pathlib.Path, bytes] = {}
    remaining = {path}
    while remaining:
        one = remaining.pop()
        texts[one] = _read(one)
        if one.suffix == ".toml":
            continue
        _check_lines(one, texts[one])
        for included in _INCLUDED.findall(texts[one]):
            remaining.add(one.parent / os.fsdecode(included))
        remaining -= texts.keys()

    parts = [texts[one] for one in sorted(texts)]
    parts += map(str.encode, extras)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _read(path: pathlib.Path) -> bytes:
    try:
        return files.read_named(path)
    except OSError as e:
        raise ParameterError("requirements", f"{path} cannot be read: {e.strerror}") from e
    except files.RefusedError as e:
        raise ParameterError("requirements", str(e)) from e


def _check_lines(path: pathlib.Path, data: bytes) -> None:
    """Raise ParameterError for a line that cannot hold for a job."""
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        for pattern, why in _REFUSED.items():
            if re.match(rf"\s*(?:{pattern})", line):
                text = f"{path}:{number}: {shown(line.strip())} {why}"
                raise ParameterError("requirements", text)
