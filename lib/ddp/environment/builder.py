"""A new environment: the locked packages, torch, a user's requirements and the payload, stored as one archive."""

import dataclasses
import functools
import json
import pathlib
import shutil
import time

from ddp.base import Log, Settings, with_progress
from ddp.environment import archives, uv, wheelhouse
from ddp.workspace import folders

IMPORTS = pathlib.Path(__file__).with_name("imports.py")


@dataclasses.dataclass(frozen=True)
class Request:
    """The inputs of an environment."""

    build: str  # of torch: cpu or cuda
    wheels: str = ""  # a folder or an archive, the only source of packages; empty: the package indexes
    name: str = ""  # of a user's own environment
    requirements: pathlib.Path | None = None  # the user's own, a requirements.txt or pyproject.toml
    sha256: str = ""  # of the content of the requirements


def make(settings: Settings, request: Request, key: str, log: Log) -> folders.Manifest:
    """Make an environment, store its archive and return its manifest. Raises TrainerError."""
    store = str(settings.environments)
    folder = pathlib.Path(folders.call(settings, archives.open_build, base=str(settings.node_cache)))

    call = functools.partial(folders.call, settings, timeout_s=3600, build=str(folder))
    try:
        _install(settings, request, folder, log)
        size = with_progress(log, "compiling it", lambda: call(archives.finish_environment, payload=settings.payload))
        manifest = {
            "torch": with_progress(log, "checking it", lambda: check(settings, folder)),
            "key": key,
            "name": request.name,
            "requirements": request.sha256,
            "unpacked_bytes": size,
            "python": python_version(),
            "build": request.build,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        text = f"storing {size >> 20} MiB in {store}"
        stored = with_progress(log, text, lambda: call(archives.store_environment, folder=store, manifest=manifest))
    finally:
        folders.call(settings, shutil.rmtree, timeout_s=300, path=folder, ignore_errors=True)
    return folders.Manifest.model_validate({**stored, "folder": store})


def _install(settings: Settings, request: Request, folder: pathlib.Path, log: Log) -> None:
    do = functools.partial(with_progress, log)
    python, index = folder / "env" / "bin" / "python", settings.torch_index
    do("making a virtual environment", lambda: uv.call(folders.PYTHON, "-m", "venv", folder / "env"))
    wheels: list[str] = []
    if path := request.wheels:
        unpack = functools.partial(folders.call, settings, wheelhouse.unpack, timeout_s=3600)
        wheels = do(f"opening {path}", lambda: unpack(path=path, target=folder / "wheels"))
    cache = str(folder / "cache")
    installer = do("installing uv", lambda: uv.bootstrap(python, folder / "uv", wheels, UV_CACHE_DIR=cache))
    locked = [settings.payload / extra / "requirements.txt" for extra in ("", *settings.extras)]
    do("installing the locked packages", lambda: installer.install("--require-hashes", *(f"-r{one}" for one in locked)))
    if request.build == "cuda":
        torch = f"torch=={uv.TORCH},!={uv.TORCH}+cpu"
        do(f"installing torch {uv.TORCH} for CUDA", lambda: installer.install(torch, also=index))
    else:
        uv.install_cpu_torch(installer, do, index=index)
    if own := request.requirements:
        pins = folder / "pins.txt"  # what is installed stays
        pins.write_text(uv.call(python, "-m", "pip", "freeze"))
        do(f"installing {own}", lambda: installer.install("-r", own, "-c", pins, also=index))


def check(settings: Settings, build: pathlib.Path) -> str:
    """Import all that the payload imports, and return torch's version. Raises TrainerError."""
    names = ["ddptrain", "torch.distributed.run", *(["transformers"] if settings.transformers else [])]
    printed = uv.call(build / "env" / "bin" / "python", "-I", IMPORTS, *names, timeout=300)
    return json.loads(printed)["torch"]


def python_version() -> str:
    """Return the version of the interpreter that the environment uses, here and on the nodes."""
    return uv.call(folders.PYTHON, "-V").split()[-1].rpartition(".")[0]  # of Python 3.12.3
