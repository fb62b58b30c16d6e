"""A wheelhouse: wheels in a folder or an archive, used in place of a package index."""

import pathlib
import subprocess
import zipfile

from ddp.host.files import RefusedError
from ddp.settings import Settings
from ddp.workspace import checks
from ddp.workspace.folders import PYTHON


def find(settings: Settings, path: str | None = None) -> str:
    """Return `path`, or else the wheelhouse that the operator attached, or "".

    Raises ParameterError.
    """
    if path is not None:
        checks.check_inside(settings.workspace, "wheelhouse", path, kinds=("file", "folder"))
        return path
    attached = settings.wheelhouse
    return str(attached) if attached is not None and attached.stat().st_size else ""


def unpack(path: str, target: pathlib.Path) -> list[str]:
    """Return the folders of the wheels in `path`; an archive is unpacked to `target` first.

    The programs write nothing outside `target`: tar makes links last, zipfile makes none. Raises
    RefusedError.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        folder = target
        folder.mkdir(mode=0o700)
        argv = ["tar", "--force-local", "-x", f"--directory={target}", f"--file={path}"]
        if zipfile.is_zipfile(path):
            argv = [PYTHON, "-m", "zipfile", "-e", path, str(target)]
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RefusedError(
                f"{path} cannot be unpacked: {done.stderr.strip() or f'exit {done.returncode}'}"
            )
    houses = sorted({str(wheel.parent) for wheel in folder.rglob("*.whl")})
    if not houses:
        raise RefusedError(f"{path} contains no .whl file")
    return houses
