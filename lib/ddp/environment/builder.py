"""Builds an environment: the locked packages, torch and the payload; or a layer on one."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import shutil
import time
import typing

from ddp.environment import archives, compiled_parts, uv, wheelhouse
from ddp.results.progress import Log, with_progress
from ddp.settings import Settings
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

_KEPT_S = 7 * 86400  # systemd-tmpfiles removes files that are older than 30 days, one by one
IMPORTS = pathlib.Path(__file__).with_name("imports.py")


@dataclasses.dataclass(frozen=True)
class Request:
    """The inputs of an environment."""

    build: str  # of torch: cpu or cuda
    wheels: str = (
        ""  # a folder or an archive, the only source of packages; empty: the package indexes
    )
    name: str = ""  # of a user's own environment
    requirements: pathlib.Path | None = None  # the user's own, a requirements.txt or pyproject.toml
    extras: tuple[str, ...] = ()  # of a pyproject.toml
    sha256: str = ""  # of the content of the requirements
    base: folders.Manifest | None = None  # the environment that this is a layer on


def make(settings: Settings, request: Request, key: str, log: Log) -> folders.Manifest:
    """Make an environment, store its archive and return its manifest. Raises Problem."""
    workspace = settings.workspace
    store = str(workspace.environments)
    folder = pathlib.Path(workspace.do(archives.open_build, base=str(workspace.host_cache)))
    try:
        if request.base:
            torch, size = _make_layer(settings, request, request.base, folder, log)
        else:
            torch, size = _make_whole(settings, request, folder, log)
        manifest = {
            "torch": torch,
            "key": key,
            "name": request.name,
            "base": request.base.hash if request.base else "",
            "requirements": request.sha256,
            "unpacked_bytes": size,
            "python": python_version(),
            "build": request.build,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        keep = functools.partial(_operation_on(workspace, folder), archives.store_environment)
        keep = functools.partial(keep, folder=store, manifest=manifest)
        stored = with_progress(log, f"storing {size >> 20} MiB in {store}", keep)
    finally:
        workspace.do(shutil.rmtree, timeout_s=300, path=folder, ignore_errors=True)
    return folders.Manifest.model_validate({**stored, "folder": store, "below": request.base})


def _operation_on(workspace: Workspace, folder: pathlib.Path) -> functools.partial[typing.Any]:
    """Return `do` of the workspace for the folder of a build; an operation may take an hour."""
    return functools.partial(workspace.do, timeout_s=3600, build=str(folder))


def _make_whole(
    settings: Settings, request: Request, folder: pathlib.Path, log: Log
) -> tuple[str, int]:
    """Make an environment with the payload; return torch's version, and the bytes."""
    _install(settings, request, folder, log)
    finish = _operation_on(settings.workspace, folder)
    finish = functools.partial(finish, archives.finish_environment, payload=settings.payload)
    size = with_progress(log, "compiling it", finish)
    torch = with_progress(log, "checking it", lambda: check(settings, folder))
    return torch, size


def _make_layer(
    settings: Settings, request: Request, base: folders.Manifest, folder: pathlib.Path, log: Log
) -> tuple[str, int]:
    """Make a layer on an environment; return its torch's version, and the layer's bytes."""
    names = _install_layer(settings, request, base, folder, log)
    environment = folder / "env"
    finish = _operation_on(settings.workspace, folder)
    size = finish(archives.finish_layer, base=base.hash, names=names)
    if parts := compiled_parts.find(environment):
        unpack = functools.partial(settings.workspace.do, compiled_parts.unpack_base)
        unpack = functools.partial(unpack, timeout_s=1200, archive=base.archive)
        below = str(folder / base.hash)
        with_progress(log, "unpacking torch for a check", lambda: unpack(target=below))
        python = environment / "bin" / "python"
        load = functools.partial(compiled_parts.check, python, parts, base.torch)
        with_progress(log, "checking that its compiled parts load", load)
    return base.torch, size


def _open(workspace: Workspace, request: Request, folder: pathlib.Path, log: Log) -> uv.Uv:
    """Make an empty environment, and return uv for it.

    Its scripts find their interpreter in their own folder. uv is kept on this host, with a pip that
    reads the site's settings.
    """
    do = functools.partial(with_progress, log)
    wheels: list[str] = []
    if path := request.wheels:
        unpack = functools.partial(workspace.do, wheelhouse.unpack, timeout_s=3600)
        wheels = do(f"opening {path}", lambda: unpack(path=path, target=folder / "wheels"))
    kept = folder.parent / f"uv-{hashlib.sha256(uv.PINNED.read_bytes()).hexdigest()[:16]}"
    if not kept.exists() or time.time() - kept.stat().st_mtime > _KEPT_S:
        python = folder / "tools" / "bin" / "python"
        do(
            "making a virtual environment",
            lambda: uv.call(folders.PYTHON, "-m", "venv", folder / "tools"),
        )
        do("installing uv", lambda: uv.bootstrap(python, folder / "tools" / "uv", wheels))
        shutil.rmtree(kept, ignore_errors=True)
        (folder / "tools").rename(kept)
    environment = folder / "env"
    uv.call(folders.PYTHON, "-m", "venv", "--without-pip", environment)
    with (environment / "pyvenv.cfg").open("a") as file:
        file.write("relocatable = true\n")  # to uv
    installer = uv.bootstrap(
        kept / "bin" / "python", kept / "uv", wheels, UV_CACHE_DIR=str(folder / "cache")
    )
    return dataclasses.replace(installer, python=str(environment / "bin" / "python"))


def _install(settings: Settings, request: Request, folder: pathlib.Path, log: Log) -> None:
    do = functools.partial(with_progress, log)
    installer, index = _open(settings.workspace, request, folder, log), settings.torch_index
    version = settings.torch_version or uv.TORCH
    locked = [settings.payload / extra / "requirements.txt" for extra in ("", *settings.extras)]
    do(
        "installing the locked packages",
        lambda: installer.install("--require-hashes", *(f"-r{one}" for one in locked)),
    )
    if request.build == "cuda":
        torch = f"torch=={version},!={version}+cpu"
        do(f"installing torch {version} for CUDA", lambda: installer.install(torch, also=index))
    else:
        uv.install_cpu_torch(installer, do, version=version, index=index)


def _install_layer(
    settings: Settings, request: Request, base: folders.Manifest, folder: pathlib.Path, log: Log
) -> list[str]:
    """Install the packages that the base lacks; return the names of the base's metadata.

    Only the base's torch is pinned: another version of a package is installed if the requirements
    need it and all packages of the base still fit together.
    """
    installer = _open(settings.workspace, request, folder, log)
    part = {"part": base.parts[1], "skipped": base.parts[0][0]}
    names = settings.workspace.do(
        archives.open_layer, timeout_s=120, build=str(folder), base=base.archive, **part
    )
    below, packages, pins = (
        [name.partition("-")[0] for name in names],
        folder / "packages.txt",
        folder / "pins.txt",
    )
    packages.write_text("".join(f"{name}\n" for name in below))
    if request.requirements and request.requirements.suffix == ".toml":
        # behind a list uv decides of a project last, and takes releases of ten years ago that fit
        # the list as it is
        packages = folder / "pyproject.toml"
        packages.write_text(
            f'[project]\nname = "below"\nversion = "1"\ndependencies = {json.dumps(below)}\n'
        )
    torch = next(name for name in names if name.startswith("torch-")).removesuffix(".dist-info")
    pins.write_text(
        torch.replace("-", "==", 1) + "\n"
    )  # torch.__version__ may name a build that the package does not
    given = ("-r", str(request.requirements), *(f"--extra={name}" for name in request.extras))
    install = functools.partial(
        installer.install, *given, "-r", packages, "-c", pins, also=settings.torch_index
    )
    with_progress(log, f"installing {request.requirements}", install)
    if base.torch.endswith("+cpu") and not request.wheels:
        others = compiled_parts.of_other_builds(folder / "env", "cpu")
        for one in others:
            text = f"replacing it by {one}, for torch {base.torch}"
            do = functools.partial(with_progress, log)
            do(text, functools.partial(_install_build, installer, one, settings.torch_index))
    return names


def _install_build(installer: uv.Uv, package: str, index: str) -> None:
    """Install a build of a package from where torch came from; keep the other one if none has it.

    Whether that one loads is checked later.
    """
    words = ("--no-deps", f"--reinstall-package={package.partition('=')[0]}", package)
    try:
        installer.install(*words, also=index)
    except uv.InstallError:
        if "--no-index" not in installer.options:
            with contextlib.suppress(uv.InstallError):
                installer.install(*words, **uv.only_pytorch())


def check(settings: Settings, build: pathlib.Path) -> str:
    """Import all that the payload imports, and return torch's version. Raises Problem."""
    names = [
        "ddptrain",
        "torch.distributed.run",
        *(["transformers"] if settings.transformers else []),
    ]
    printed = uv.call(build / "env" / "bin" / "python", "-I", IMPORTS, *names, timeout=300)
    return json.loads(printed)["torch"]


def python_version() -> str:
    """Return the version of the interpreter that the environment uses, here and on the nodes."""
    return uv.call(folders.PYTHON, "-V").split()[-1].rpartition(".")[0]  # of Python 3.12.3
