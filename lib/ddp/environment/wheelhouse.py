"""A wheelhouse: wheels in a folder or an archive, from which an environment is made without a package index."""

import collections.abc
import dataclasses
import hashlib
import os
import pathlib
import subprocess
import typing

from ddp import backports
from ddp.base import Log, ParameterError, Settings, with_progress
from ddp.node.explain import opened
from ddp.submit import checks
from ddp.workspace import folders
from ddp.workspace.files import RefusedError

T = typing.TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Wheelhouse:
    """The only source of an environment's packages."""

    path: str
    sha256: str


def find(settings: Settings, path: str | None, log: Log) -> Wheelhouse | None:
    """Return the wheelhouse at `path`, else the one that the operator attached, else None. Raises ParameterError."""
    if path is not None:
        checks.check_inside(settings, "wheelhouse", path, kinds=("file", "folder"))
    elif settings.wheelhouse is not None and settings.wheelhouse.stat().st_size:
        path = str(settings.wheelhouse)
    else:
        return None
    return Wheelhouse(path, with_progress(log, f"reading {path}", lambda: call(settings, digest, path=path)))


def call(settings: Settings, operation: collections.abc.Callable[..., T], **arguments: object) -> T:
    """Do an operation on a wheelhouse. Raises ParameterError."""
    try:
        return folders.call(settings, operation, timeout_s=3600, **arguments)
    except folders.HangingError:
        raise
    except folders.WorkspaceError as e:
        raise ParameterError("wheelhouse", str(e)) from e


def digest(path: str) -> str:
    """Hash an archive, or the wheels in a folder by name and content."""
    place = pathlib.Path(path)
    if not place.is_dir():
        with opened(place) as file:
            return backports.sha256(file)
    listed = "".join(f"{wheel.name}\0{digest(str(wheel))}\n" for wheel in sorted(place.glob("*.whl")))
    return hashlib.sha256(listed.encode()).hexdigest()


def unpack(path: str, target: str) -> str:
    """Return the folder of the wheels: `path`, or `target` with those in the archive. Raises RefusedError.

    Neither program writes outside `target`: tar makes links last, zipfile makes none. Only plain files are used.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        folder = pathlib.Path(target)
        folder.mkdir(mode=0o700)
        with opened(pathlib.Path(path)) as file:
            is_zip = os.pread(file.fileno(), 2, 0) == b"PK"
        argv = ["tar", "--force-local", "-x", f"--directory={target}", f"--file={path}"]
        argv = [folders.PYTHON, "-m", "zipfile", "-e", path, target] if is_zip else argv
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.splitlines() or [f"{argv[0]} exited {done.returncode}"])[-1 if is_zip else 0]
            raise RefusedError(f"{path} cannot be unpacked: {why}")
        for wheel in [*folder.rglob("*.whl")]:
            if wheel.is_symlink() or not wheel.is_file():
                wheel.unlink()
            else:
                wheel.rename(folder / wheel.name)
    if not any(folder.glob("*.whl")):
        raise RefusedError(f"{path} contains no .whl file")
    return str(folder)
