"""A new environment: the locked packages, torch, a user's requirements and the payload, stored as one archive."""

import collections.abc
import dataclasses
import functools
import json
import pathlib
import shutil
import time
import typing

from ddp.base import Log, ParameterError, Settings, TrainerError, with_progress
from ddp.environment import archives, uv, wheelhouse
from ddp.environment.choice import Choice
from ddp.environment.wheelhouse import Wheelhouse
from ddp.workspace import folders

IMPORTS = pathlib.Path(__file__).with_name("imports.py")
EXTRAS = {"tracking": "the packages that track runs", "tuning": "transformers"}  # folders in the payload
_BUILD_BYTES = {"cpu": 3 << 30, "cuda": 16 << 30}  # uv's cache and the environment
_STORE_BYTES = {"cpu": 512 << 20, "cuda": 5 << 30}
T = typing.TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Own:
    """A user's own requirements, which an environment has beside the locked packages."""

    name: str
    path: pathlib.Path  # a requirements.txt or pyproject.toml
    sha256: str  # of its content


@dataclasses.dataclass(frozen=True)
class Request:
    """The inputs of an environment."""

    choice: Choice
    wheels: Wheelhouse | None = None
    own: Own | None = None


def make(settings: Settings, request: Request, key: str, log: Log) -> folders.Manifest:
    """Make an environment, store its archive and return its manifest. Raises TrainerError."""
    store = str(settings.environments)
    folder = pathlib.Path(folders.call(settings, archives.open_build, base=str(settings.node_cache)))

    def do(text: str, operation: collections.abc.Callable[..., T], **arguments: object) -> T:
        return with_progress(log, text, lambda: folders.call(settings, operation, timeout_s=3600, **arguments))

    try:
        _check_room(settings, request.choice.build)
        _install(settings, request, folder, log)
        size = do("compiling it", archives.finish_environment, build=str(folder), payload=str(settings.payload))
        manifest = {
            "torch": with_progress(log, "checking it", lambda: check(settings, folder)),
            "key": key,
            "name": request.own.name if request.own else "",
            "requirements": request.own.sha256 if request.own else "",
            "wheelhouse": request.wheels.sha256 if request.wheels else "",
            "unpacked_bytes": size["size_bytes"],
            "files": size["files"],
            "python": python_version(),
            "build": request.choice.build,
            "driverless": request.choice.driverless,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        text = f"storing {size['size_bytes'] >> 20} MiB in {store}"
        stored = do(text, archives.store_environment, build=str(folder), folder=store, manifest=manifest)
    finally:
        folders.call(settings, shutil.rmtree, timeout_s=300, path=folder, ignore_errors=True)
    return folders.Manifest.model_validate({**stored, "folder": store})


def _check_room(settings: Settings, build: str) -> None:
    needed = {settings.node_cache: _BUILD_BYTES[build], settings.environments: _STORE_BYTES[build]}
    for place, size in needed.items():
        free = folders.call(settings, shutil.disk_usage, path=place).free
        if free < size:
            raise TrainerError(f"{place} has {free >> 20} MiB free, and the environment needs {size >> 20}; make room")


def _install(settings: Settings, request: Request, folder: pathlib.Path, log: Log) -> None:
    do = functools.partial(with_progress, log)
    python, payload = folder / "env" / "bin" / "python", settings.payload
    do("making a virtual environment", lambda: uv.call(folders.PYTHON, "-m", "venv", folder / "env"))
    wheels: tuple[str, ...] = ()
    if house := request.wheels:
        unpack = functools.partial(wheelhouse.call, settings, wheelhouse.unpack)
        wheels = (do(f"opening {house.path}", lambda: unpack(path=house.path, target=str(folder / "wheels"))),)
    try:
        cache = str(folder / "cache")
        installer = do("installing uv", lambda: uv.bootstrap(python, folder / "uv", wheels, UV_CACHE_DIR=cache))
        for extra in ("", *settings.extras):
            locked = ("--require-hashes", "-r", payload / extra / "requirements.txt")
            do(f"installing {EXTRAS.get(extra, 'the locked packages')}", functools.partial(installer.install, *locked))
        index = settings.torch_index
        if request.choice.build == "cuda":
            torch = f"torch=={uv.TORCH},!={uv.TORCH}+cpu"
            do(f"installing torch {uv.TORCH} for CUDA", lambda: installer.install(torch, also=index))
        else:
            uv.install_cpu_torch(installer, do, index=index, check_room=lambda: _check_room(settings, "cuda"))
    except uv.InstallError as e:
        if e.is_unsatisfiable and wheels:
            raise ParameterError("wheelhouse", f"a wheel is missing: {e.what}") from e
        raise
    if request.own is not None:
        install_own(installer, request.own, folder, log, also=settings.torch_index)


def install_own(installer: uv.Uv, own: Own, folder: pathlib.Path, log: Log, *, also: str) -> None:
    """Install a user's requirements beside what is installed, whose versions stay. Raises ParameterError."""
    pins = folder / "pins.txt"
    pins.write_text(installer.freeze())
    text = f"installing the requirements of {own.name}"
    try:
        with_progress(log, text, lambda: installer.install("-r", own.path, "-c", pins, also=also))
    except uv.InstallError as e:
        raise ParameterError("requirements", e.what) from e


def check(settings: Settings, build: pathlib.Path) -> str:
    """Import all that the payload imports, and return torch's version. Raises TrainerError."""
    names = ["ddptrain", "torch.distributed.run", *(["transformers"] if settings.transformers else [])]
    printed = uv.call(build / "env" / "bin" / "python", "-I", IMPORTS, *names, timeout=300)
    return json.loads(printed)["torch"]


def python_version() -> str:
    """Return the version of the interpreter that the environment uses, here and on the nodes."""
    version = uv.call(folders.PYTHON, "-V").split()[-1]  # Python 3.12.3
    return ".".join(version.split(".")[:2])
