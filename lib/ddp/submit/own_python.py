"""The user's own Python: of a virtual or conda environment, of a module, or named by its path.

Its Python is not started here, since importing torch may take minutes.
"""

import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import re
import shlex
import shutil

from ddp.host import files
from ddp.node import caches
from ddp.options import models
from ddp.problem import ParameterError
from ddp.workspace import checks
from ddp.workspace.folders import Workspace

_PACKAGES = "lib*/python3*/*-packages"  # of venv, conda and Debian
_VERSION = re.compile(r"^__version__(?:: \w+)? = ['\"]([\w.+-]{1,80})['\"]", re.MULTILINE)
_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
_SYSTEM_FOLDERS = ("/usr/bin/", "/bin/", "/usr/local/bin/")
_SYSTEM = re.compile(
    r"^home *= *(.+)/bin *$(?=[^\0]*^include-system-site-packages *= *true)", re.MULTILINE
)  # venv's


def choose(workspace: Workspace, params: models.Training, *, is_anywhere: bool) -> tuple[str, str]:
    """Return the interpreter that `python` means, empty for none, and a remark on the choice.

    With `is_anywhere` it may lie outside the workspace. Raises ParameterError.
    """
    others = params.environment or params.requirements or params.container_image
    is_program = params.workload not in ("gpt", "smoke")
    if params.python == "auto" and not others and is_program:
        return _take_active(workspace, params, is_anywhere=is_anywhere)

    if not params.own_python:
        return "", ""
    if others:
        text = f"{others} brings its own; give one of python, environment, requirements,"
        text += " container-image"
        raise ParameterError("python", text)
    return _take_named(workspace, params, is_anywhere=is_anywhere)


def here(workspace: Workspace, params: models.Training) -> str:
    """Return the Python with torch for ranks on this machine, "" if there is none.

    It is the named one, the active environment's, or the first on PATH. Raises ParameterError if
    the named one is not usable.
    """
    if params.own_python:
        return _take_named(workspace, params, is_anywhere=True)[0]
    if params.python == "none":
        return ""
    on_path = shutil.which("python3") or ""
    for place in filter(None, (params.active, on_path)):
        found = _look(workspace, params, place, shared="/")  # there may be no workspace here
        if not found.trouble:
            return found.path
    return ""


def _take_active(
    workspace: Workspace, params: models.Training, *, is_anywhere: bool
) -> tuple[str, str]:
    """Take the active environment if jobs can use it."""
    if not params.active:
        return "", _remark_on_modules(os.environ) if is_anywhere else ""

    found = _look(workspace, params, params.active)
    why = found.trouble
    if not why and not found.is_shared:
        why = "is not on the shared filesystem"
    if why:
        text = f"the active environment {params.active} is not used, since it {why}"
        return "", f"python: {text}; to choose one: --python PATH"

    _check_place(workspace, found, is_anywhere=is_anywhere)
    return found.path, f"{_describe(found)}, of the active environment"


def _take_named(
    workspace: Workspace, params: models.Training, *, is_anywhere: bool
) -> tuple[str, str]:
    """Take the interpreter of --python. Raises ParameterError if it is not usable."""
    found = _look(workspace, params, params.own_python)
    if found.trouble:
        what = f"{params.own_python} {found.trouble}"
        text = f"{what}; give the path of an environment with torch, or omit it"
        raise ParameterError("python", text)

    _check_place(workspace, found, is_anywhere=is_anywhere)
    if not found.is_shared:
        return found.path, f"{_describe(found)}, which each node needs at this path"
    return found.path, _describe(found)


def _check_place(workspace: Workspace, found: "_Interpreter", *, is_anywhere: bool) -> None:
    """Check that an operator's interpreter, which is for another account, is in the workspace."""
    if not is_anywhere:
        prefix = str(pathlib.Path(found.path).parents[1])
        checks.check_inside(workspace, "python", prefix, kinds=("folder",))


def _describe(found: "_Interpreter") -> str:
    """Name the interpreter and its torch."""
    return f"python: {found.path}, torch {found.torch}"


def _look(
    workspace: Workspace, params: models.Training, place: str, shared: str = ""
) -> "_Interpreter":
    """Find the interpreter in a place, and its torch, which PYTHONPATH may have, too.

    `shared` is a folder that all nodes see, by default the workspace.
    """
    here = pathlib.Path(params.typed_in or "/")
    folders = params.variables.get("PYTHONPATH", "").split(":")
    imported = tuple(here / folder for folder in folders if folder)
    return workspace.do(
        _Place(pathlib.Path(place), imported).look, shared=pathlib.Path(shared or workspace.path)
    )


@dataclasses.dataclass(frozen=True)
class _Interpreter:
    """The Python of an environment."""

    path: str = ""  # empty: there is none
    torch: str = ""  # its version; empty: there is none
    is_shared: bool = False  # nodes see it

    @property
    def trouble(self) -> str:
        """Why the ranks cannot use it, "" if they can."""
        if not self.path:
            return "does not exist, or has no Python that you can execute"
        return "" if self.torch else "has no torch"


@dataclasses.dataclass(frozen=True)
class _Place:
    """An environment's folder, or an interpreter."""

    path: pathlib.Path
    imported: tuple[pathlib.Path, ...] = ()  # folders of PYTHONPATH

    def look(self, shared: pathlib.Path) -> _Interpreter:
        """Find the interpreter and its torch; `shared` is a folder that all nodes see."""
        places = [self.path]
        if self.path.is_dir():
            places = [self.path / "bin" / name for name in ("python", "python3")]
        for place in places:
            if place.is_file() and os.access(place, os.X_OK):
                prefix = place.parent.parent
                is_beside = prefix.stat().st_dev == shared.stat().st_dev
                is_shared = is_beside or not caches.is_local(str(prefix))
                torch = _torch_in(self.imported) or _torch_of(prefix)
                return _Interpreter(str(place), torch, is_shared)
        return _Interpreter()


def typed(workload: object) -> str:
    """Return the Python that is typed with its path in front of a program, or ""."""
    text = workload if isinstance(workload, str) else ""
    name = pathlib.PurePath(text).name
    return text if "/" in text and _PYTHON.fullmatch(name) else ""


def _remark_on_modules(env: collections.abc.Mapping[str, str]) -> str:
    """Return why the Python with torch of loaded modules is not used; "" if there is none."""
    loaded = env.get("LOADEDMODULES")
    search = env.get("PATH")
    python = shutil.which("python", path=search) or shutil.which("python3", path=search)
    if not loaded or python is None:
        return ""
    folders = [pathlib.Path(folder) for folder in env.get("PYTHONPATH", "").split(":") if folder]
    torch = _torch_in(folders)
    if not torch and not python.startswith(_SYSTEM_FOLDERS):
        torch = _torch_of(pathlib.Path(python).parent.parent)
    if not torch:
        return ""
    words = ["--python", python]
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        if env.get(name):
            words += ["--env", name]
    text = f"python: {python} with torch {torch} of the modules that are loaded is not used"
    return f"{text}, since a job loads none; to choose it: {shlex.join(words)}"


def _torch_in(folders: collections.abc.Iterable[pathlib.Path]) -> str:
    """Return the version of torch that one of these folders holds, or ""."""
    for folder in folders:
        with contextlib.suppress(OSError, files.RefusedError):
            if found := _VERSION.search(_text(folder / "torch" / "version.py")):
                return found[1]
    return ""


def _torch_of(prefix: pathlib.Path) -> str:
    """Return the version of torch that an environment imports, or ""."""
    config = prefix / "pyvenv.cfg"
    others = [f"{prefix}/local", f"{pathlib.Path.home()}/.local"]
    if config.is_file():
        others = _SYSTEM.findall(_text(config))
    for root in (prefix, *map(pathlib.Path, others)):
        for packages in root.glob(_PACKAGES):
            if found := _torch_in([packages, *_named_by_pth(packages)]):
                return found
    return ""


def _named_by_pth(packages: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders that .pth files add, such as a torch built from source (site module)."""
    found: list[pathlib.Path] = []
    for file in sorted(packages.glob("*.pth")):
        with contextlib.suppress(OSError, files.RefusedError):
            for line in _text(file).splitlines():
                if line.strip() and not line.startswith(("#", "import ", "import\t")):
                    found.append(packages / line.strip())
    return found


def _text(path: pathlib.Path) -> str:
    return files.read_named(path).decode(errors="replace")
