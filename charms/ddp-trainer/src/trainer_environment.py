"""The Python environment of all jobs: made once on this host, kept as one archive in the workspace.

What goes in decides its key: the interpreter's version, the machine, the build of torch, the payload and its locked
requirements, and the wheelhouse where one was named. An environment with the right key is used; another one is made as
soon as any of these differs.
"""

import collections.abc
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import time

import trainer_checks
import trainer_params_runs
import trainer_remedies
import trainer_workspace
from slurm_ddp.run import CommandError, CommandTimeout, run
from slurm_ddp.slurm import jobs
from trainer_base import Log, ParameterError, Results, Settings, TrainerError, one_line, with_progress

TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # https://pytorch.org/get-started/locally/
STAGING = pathlib.Path("/var/lib/ddp-trainer/payload")  # root's; the submit user reads the payload there
_EXTRAS = {"tracking": "the packages that track runs", "tuning": "transformers"}  # folders in the payload
_FORMAT = "1"  # goes into the key: raise it when the same inputs shall give another environment
_PIP_TIMEOUT_S = 5400.0
_CLAIM, _STAGING_CLAIM = "environments", "payload"
_BUILD_BYTES = {"cpu": 3 << 30, "cuda": 16 << 30}  # where it is made: packages, and what pip unpacks on its way
_STORE_BYTES = {"cpu": 512 << 20, "cuda": 5 << 30}
_BUILDS = {"auto": ("cuda", "cpu"), "cpu": ("cpu",), "cuda": ("cuda",)}  # by the option torch-build, the better first
_DRIVER = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    version, count = ctypes.c_int(), ctypes.c_int()
    failed = cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version))
    failed = failed or cuda.cuDeviceGetCount(ctypes.byref(count))
    print("driver", version.value if count.value and not failed else 0)
except OSError:
    print("driver", 0)
"""


@dataclasses.dataclass(frozen=True)
class Environment:
    """An installed environment."""

    manifest: trainer_workspace.Manifest
    archive: str  # path in the workspace


NOT_INSTALLED = Environment(
    trainer_workspace.Manifest(
        key="0" * 16, hash="0" * 16, sha256="0" * 64, size_bytes=1, unpacked_bytes=1, python="3.0",
        torch="none", build="cpu", created="-",
    ),
    "/not-installed.tar.zst",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Wheelhouse:
    """Wheels that a person put into the workspace or attached, from which alone an environment is made."""

    path: str  # a folder or an archive, which the submit user can read
    sha256: str
    resource: pathlib.Path | None = None  # what was attached, which root alone can read; is put to `path` for a while


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which build of torch the cluster needs."""

    build: str  # cpu or cuda
    driverless: bool  # a node with GPUs was asked, and it has no CUDA driver
    why: str


def install_environment(settings: Settings, params: trainer_params_runs.InstallEnvironment, log: Log) -> Results:
    """Make the environment, or say that it is there."""
    wheels = _wheelhouse(settings, params.wheelhouse, log) if params.wheelhouse else None
    partitions = trainer_checks.partitions(settings)
    found = install(settings, partitions, log, build=params.torch, force=params.force, wheels=wheels)
    return describe(found)


def find(
    settings: Settings, contents: trainer_workspace.Contents, build: str, *, wheels: Wheelhouse | None = None
) -> Environment | None:
    """Return the newest installed environment that was made from what would go in now, for this build of torch.

    Whether its packages came from an index or a wheelhouse is one, unless these `wheels` are asked for.
    """
    keys: dict[str, str] = {}
    for manifest in contents.environments:
        wheelhouse = manifest.wheelhouse
        if manifest.build != build or (wheels is not None and wheelhouse != wheels.sha256):
            continue
        if wheelhouse not in keys:
            keys[wheelhouse] = _key(settings, build, wheelhouse)
        if manifest.key == keys[wheelhouse]:
            return Environment(manifest, str(settings.environments / f"{manifest.hash}.tar.zst"))
    return None


def installed(settings: Settings, contents: trainer_workspace.Contents) -> Environment | None:
    """Return the environment that jobs would use now, without asking what the nodes' drivers say."""
    return next((found for build in _BUILDS[settings.torch_build] if (found := find(settings, contents, build))), None)


def is_current(settings: Settings, manifest: trainer_workspace.Manifest) -> bool:
    """Return whether an environment was made from what would go in now."""
    return manifest.key == _key(settings, manifest.build, manifest.wheelhouse)


def ensure(
    settings: Settings,
    partitions: tuple[jobs.Partition, ...],
    log: Log,
    *,
    gpus: bool | None = None,
    contents: trainer_workspace.Contents | None = None,
    reservation: str | None = None,
) -> Environment:
    """Return the environment that fits the cluster, made now where there is none. `gpus`: the job asks for some."""
    contents = contents or trainer_workspace.look(settings)
    trainer_checks.trusted(contents)
    wanted = settings.torch_build
    for build in _BUILDS[wanted]:
        found = find(settings, contents, build)
        unproved = wanted == "auto" and build == "cpu" and gpus and found is not None and not found.manifest.driverless
        if found is not None and not unproved:
            return found
    return install(settings, partitions, log, reservation=reservation)


def install(
    settings: Settings,
    partitions: tuple[jobs.Partition, ...],
    log: Log,
    *,
    build: str | None = None,
    force: bool = False,
    wheels: Wheelhouse | None = None,
    reservation: str | None = None,
) -> Environment:
    """Make the environment and store its archive; with one there already, only where `force`. Raises TrainerError."""
    wanted = build or settings.torch_build
    choice = (
        choose_build(settings, partitions, log, reservation=reservation)
        if wanted == "auto"
        else Choice(wanted, False, "as configured")
    )
    wheels = wheels or _attached(settings, log)
    if not settings.claims.take(_CLAIM):
        text = "waiting for another action that makes an environment"
        if not with_progress(log, text, lambda: settings.claims.wait(_CLAIM, timeout_s=_PIP_TIMEOUT_S)):
            raise TrainerError(f"another action has been making an environment for {_PIP_TIMEOUT_S:g} s; try again")
    try:
        return _install(settings, choice, wheels, log, force=force)
    finally:
        settings.claims.drop(_CLAIM)


def _install(settings: Settings, choice: Choice, wheels: Wheelhouse | None, log: Log, *, force: bool) -> Environment:
    contents = trainer_workspace.look(settings)
    trainer_checks.trusted(contents)
    found = find(settings, contents, choice.build, wheels=wheels)
    if found is not None and not force:
        log(f"environment {found.manifest.hash} with torch {found.manifest.torch} is there already")
        return _noted(settings, found) if choice.driverless and not found.manifest.driverless else found
    log(f"making the environment: torch {TORCH} for {choice.build.upper()} ({choice.why})")
    return _make(settings, choice, wheels, log)


def prune(settings: Settings, log: Log, *, keep: str) -> None:
    """Remove archives that no job uses: of each build the newest three stay, and those of jobs in the queue."""
    try:
        active = [job.name for job in jobs.jobs(user=settings.user) if job.is_active]
    except jobs.SlurmError:
        return  # not knowing what is in use, remove nothing
    removed = trainer_workspace.ask(
        settings, "prune_environments", timeout_s=120, workspace=str(settings.workspace), keep=[keep], runs=active
    )["removed"]
    if removed:
        log(f"{len(removed)} older environments removed: {', '.join(removed[:5])}")


def choose_build(
    settings: Settings, partitions: tuple[jobs.Partition, ...], log: Log, *, reservation: str | None = None
) -> Choice:
    """Return which build of torch the cluster's nodes can use, asking one node with a GPU for its driver."""
    place = next(((p, node) for p in partitions if p.is_up for node in p.usable if node.gpus), None)
    if place is None:
        return Choice("cpu", False, "Slurm knows no node with GPUs")
    partition, node = place
    options = (
        f"--partition={partition.name}", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=256M",
        "--gpus-per-node=1", "--time=2", "--immediate=60", "--chdir=/", "--job-name=trainer-driver",
        *([f"--reservation={reservation}"] if reservation else []),
    )  # fmt: skip
    argv = ("/usr/bin/python3", "-I", "-c", _DRIVER)
    try:
        answer = with_progress(
            log,
            f"asking a node with GPUs ({node.name} has {node.gpus}) for its CUDA driver",
            lambda: jobs.run_step(*argv, options=options, user=settings.user_to_be, timeout_s=150),
        )
    except jobs.SlurmError as e:
        if trainer_remedies.NO_CREDENTIAL in str(e):
            unknown, add = trainer_remedies.unknown_account(settings)
            raise TrainerError(f"{unknown}, so none of its jobs starts: {add}") from e
        raise TrainerError(
            f"no GPU node told its driver: {e}; try again when one is free, or set torch-build to cpu or cuda"
        ) from e
    version = int(answer.split()[-1]) if answer.startswith("driver ") and answer.split()[-1].isdecimal() else 0
    if version:
        return Choice("cuda", False, f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}")
    return Choice("cpu", True, f"{node.name} has no CUDA driver")


def payload_folder(settings: Settings) -> str:
    """Return where in the workspace the payload lies for containers, which bring torch and numpy themselves."""
    return str(settings.environments / f"payload-{_payload_digest(settings.payload)[:16]}")


def store_payload(settings: Settings) -> None:
    """Put the payload into the workspace, unless it is there."""
    source = str(stage_payload(settings))
    trainer_workspace.ask(settings, "store_payload", source=source, target=payload_folder(settings))


def describe(environment: Environment) -> dict[str, str]:
    """Return the environment's figures as an action's results."""
    manifest = environment.manifest
    return {
        "environment": environment.archive,
        "torch": manifest.torch,
        "python": manifest.python,
        "size-mb": str(manifest.size_bytes >> 20),
        "unpacked-mb": str(manifest.unpacked_bytes >> 20),
        **({"wheelhouse": manifest.wheelhouse[:16]} if manifest.wheelhouse else {}),
    }


def _make(settings: Settings, choice: Choice, wheels: Wheelhouse | None, log: Log) -> Environment:
    began = time.monotonic()
    payload = stage_payload(settings)
    opened = trainer_workspace.ask(
        settings, "open_cache", base=str(settings.node_cache), store=str(settings.environments)
    )
    build = pathlib.Path(opened["folder"])
    try:
        _require_space(settings.node_cache, opened["free_bytes"], _BUILD_BYTES[choice.build])
        _require_space(settings.environments, opened["store_free_bytes"], _STORE_BYTES[choice.build])
        _install_packages(settings, payload, build, choice.build, log, wheels=wheels)
        size = with_progress(log, "taking out what no run reads", lambda: _finish(settings, build, payload))
        version = with_progress(log, "checking it", lambda: _check(settings, build))
        manifest = {
            "key": _key(settings, choice.build, wheels.sha256 if wheels else ""),
            "wheelhouse": wheels.sha256 if wheels else "",
            "unpacked_bytes": size["size_bytes"],
            "files": size["files"],
            "python": _python_version(),
            "torch": version,
            "build": choice.build,
            "driverless": choice.driverless,
            "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        stored = with_progress(
            log,
            f"storing {size['size_bytes'] >> 20} MiB in {settings.environments}",
            lambda: trainer_workspace.ask(
                settings,
                "store_environment",
                timeout_s=3600,
                build=str(build),
                folder=str(settings.environments),
                manifest=manifest,
            ),
        )
    finally:
        trainer_workspace.ask(settings, "remove_build", timeout_s=300, build=str(build))
    made = trainer_workspace.Manifest.model_validate(stored)
    prune(settings, log, keep=made.hash)
    log(f"environment {made.hash} is stored: {made.size_bytes >> 20} MiB, {time.monotonic() - began:.0f} s in all")
    return Environment(made, str(settings.environments / f"{made.hash}.tar.zst"))


def _noted(settings: Settings, found: Environment) -> Environment:
    """Note in a manifest that the nodes with GPUs have no driver, so that none is asked for each job."""
    manifest = found.manifest.model_copy(update={"driverless": True})
    path = settings.environments / f"{manifest.hash}.json"
    trainer_workspace.ask(settings, "write", path=str(path), text=manifest.model_dump_json(indent=1) + "\n")
    return Environment(manifest, found.archive)


def _wheelhouse(settings: Settings, path: str, log: Log) -> Wheelhouse:
    """Return what a person put there. Raises ParameterError."""
    trainer_checks.check_inside(settings, "wheelhouse", path, kinds=("file", "folder"))
    is_file = trainer_workspace.locate(settings, path).kind == "file"
    if is_file and not path.endswith((".tar", ".tar.zst", ".zip")):
        raise ParameterError("wheelhouse", f"{path} is no folder, and no .tar, .tar.zst or .zip")
    return Wheelhouse(
        path,
        with_progress(log, f"reading {path}", lambda: _of_wheels(settings, "digest_wheelhouse", path=path)["sha256"]),
    )


def _attached(settings: Settings, log: Log) -> Wheelhouse | None:
    """Return the wheels that are the charm's resource; None without one, or where its file is empty."""
    resource = settings.attached()
    if resource is None or not resource.stat().st_size:
        return None

    def digest() -> str:
        with resource.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return Wheelhouse(
        str(STAGING.parent / "wheelhouse"), with_progress(log, "reading the attached wheelhouse", digest), resource
    )


@contextlib.contextmanager
def _staged(wheels: Wheelhouse) -> collections.abc.Generator[None]:
    """Let the submit user read an attached wheelhouse for a while."""
    if wheels.resource is None:
        yield
        return
    path = pathlib.Path(wheels.path)
    try:
        shutil.copyfile(wheels.resource, path)
        path.chmod(0o644)
        yield
    finally:
        path.unlink(missing_ok=True)


def _of_wheels(settings: Settings, operation: str, **arguments: object) -> trainer_workspace.Json:
    """Ask about a wheelhouse. Raises ParameterError where it cannot be."""
    try:
        return trainer_workspace.ask(settings, operation, timeout_s=3600, as_root=False, **arguments)
    except trainer_workspace.HangingError:
        raise
    except trainer_workspace.WorkspaceError as e:
        raise ParameterError("wheelhouse", str(e)) from e


def _install_packages(
    settings: Settings, payload: pathlib.Path, build: pathlib.Path, kind: str, log: Log, *, wheels: Wheelhouse | None
) -> None:
    python = build / "env" / "bin" / "python"
    user = settings.user_to_be
    with_progress(
        log,
        "making a virtual environment",
        lambda: _run(trainer_workspace.PYTHON, "-m", "venv", build / "env", user=user),
    )
    pip_log = build / "pip.log"
    pip = (
        python,
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        f"--log={pip_log}",
    )

    if wheels is not None:
        with _staged(wheels):
            opened = with_progress(
                log,
                f"opening {wheels.path}",
                lambda: _of_wheels(settings, "open_wheelhouse", path=wheels.path, target=str(build / "wheels")),
            )
        log(f"{opened['wheels']} wheels are there; no package index is asked")
        pip = (*pip, "--no-index", f"--find-links={opened['folder']}", "--only-binary=:all:")

    def install(text: str, *arguments: str | pathlib.Path) -> None:
        with_progress(log, text, lambda: _run(*pip, *arguments, user=user), lambda: _last_step(settings, pip_log))

    install("installing the locked packages", "--require-hashes", "-r", payload / "requirements.txt")
    for extra in settings.extras:
        install(f"installing {_EXTRAS[extra]}", "--require-hashes", "-r", payload / extra / "requirements.txt")
    index = (f"--extra-index-url={settings.torch_index}",) if settings.torch_index else ()
    if wheels is not None:
        install(f"installing torch {TORCH} for {kind.upper()}", f"torch=={TORCH}" + ("+cpu" if kind == "cpu" else ""))
        return
    if kind == "cuda":
        install(f"installing torch {TORCH} for CUDA", *index, f"torch=={TORCH}")
        return
    try:
        install(f"installing torch {TORCH}+cpu", *index, f"torch=={TORCH}+cpu")
    except TrainerError as e:
        if "No matching distribution" not in str(e) and "Could not find a version" not in str(e):
            raise
        text = f"installing torch {TORCH}+cpu from PyTorch's own index, as no other offers it"
        try:
            install(text, "--no-deps", f"--index-url={CPU_INDEX}", f"torch=={TORCH}+cpu")
        except TrainerError:
            raise TrainerError(
                f"no index offers torch {TORCH}+cpu, PyTorch's own included: set torch-index to one that does, "
                "or torch-build=cuda for the build that CUDA needs"
            ) from e


def _finish(settings: Settings, build: pathlib.Path, payload: pathlib.Path) -> trainer_workspace.Json:
    return trainer_workspace.ask(settings, "finish_environment", timeout_s=600, build=str(build), payload=str(payload))


def _check(settings: Settings, build: pathlib.Path) -> str:
    """Return torch's version as the environment itself tells it, with all that the payload imports."""
    python = build / "env" / "bin" / "python"
    more = ", transformers" if settings.transformers else ""
    code = f"import ddptrain, numpy, torch, torch.distributed.run{more}; print(torch.__version__)"
    return _run(python, "-c", code, user=settings.user_to_be, timeout=300).strip()


def _key(settings: Settings, build: str, wheelhouse: str = "") -> str:
    """Return what the environment that would be made now is known by."""
    torch = TORCH if build == "cuda" else f"{TORCH}+cpu"
    inputs = [_FORMAT, _python_version(), platform.machine(), torch, _payload_digest(settings.payload)]
    inputs += settings.extras
    inputs += [f"wheelhouse {wheelhouse}"] if wheelhouse else []
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def _python_version() -> str:
    """Return the version of the interpreter that the environment uses, here and on the nodes."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return _run(trainer_workspace.PYTHON, "-I", "-c", code).strip()


def _payload_digest(payload: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in _payload_files(payload):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(payload)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _payload_files(payload: pathlib.Path) -> list[pathlib.Path]:
    package = sorted(
        path for path in (payload / "ddptrain").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    locked = [payload / folder / "requirements.txt" for folder in ("", *_EXTRAS)]
    if not package or not all(path.is_file() for path in locked):
        raise TrainerError(f"this charm carries no payload in {payload}; pack it with: make pack")
    return [*package, *locked]


def stage_payload(settings: Settings) -> pathlib.Path:
    """Return a copy of the payload that the submit user can read and only root can change."""
    settings.claims.wait(_STAGING_CLAIM, timeout_s=60)
    try:
        return _stage_payload(settings)
    finally:
        settings.claims.drop(_STAGING_CLAIM)


def _stage_payload(settings: Settings) -> pathlib.Path:
    target = STAGING / _payload_digest(settings.payload)[:16]
    if target.is_dir():
        return target
    partial = STAGING / f".{target.name}.{os.getpid()}"
    shutil.rmtree(STAGING, ignore_errors=True)
    for path in _payload_files(settings.payload):
        copy = partial / path.relative_to(settings.payload)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for path in (STAGING.parent, STAGING, partial, *partial.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    partial.rename(target)
    return target


def _require_space(folder: pathlib.Path, free: int, needed: int) -> None:
    if free < needed:
        raise TrainerError(f"{folder} has {free >> 20} MiB free; the environment needs {needed >> 20}: make room")


def _last_step(settings: Settings, path: pathlib.Path) -> str:
    try:
        return one_line(trainer_workspace.ask(settings, "last_step", timeout_s=3, path=str(path))["step"], 100)
    except trainer_workspace.WorkspaceError:
        return ""


def _run(*argv: str | pathlib.Path, user: str | None = None, timeout: float = _PIP_TIMEOUT_S) -> str:
    try:
        return run(*argv, user=user, cwd="/", timeout=timeout, env=_proxies()).stdout
    except CommandTimeout as e:
        if "--no-index" in argv:
            raise TrainerError(f"{e}; is the filesystem of the wheelhouse slow?") from e
        raise TrainerError(f"{e}; is the package index reachable from this host?") from e
    except CommandError as e:
        if "--no-index" in argv and (missing := re.search(r"No matching distribution found for (\S+)", e.stderr)):
            what = f"no wheel of {missing[1]} for Python {_python_version()} on {platform.machine()} is in it; add it"
            raise ParameterError("wheelhouse", what) from e
        raise TrainerError(f"{_what(argv)}: {_cause(e)}") from e


def _cause(e: CommandError) -> str:
    """Return the command's own reason: pip names it in lines that begin with ERROR."""
    told = [line.removeprefix("ERROR:").strip() for line in e.stderr.splitlines() if line.startswith("ERROR:")]
    return "; ".join(dict.fromkeys(told[-2:])) if told else str(e)


def _what(argv: tuple[str | pathlib.Path, ...]) -> str:
    return "pip" if "pip" in argv else "python3 -m venv" if "venv" in argv else pathlib.Path(argv[0]).name


def _proxies() -> dict[str, str]:
    """Return the model's proxy settings under the names that pip reads."""
    names = {
        "http_proxy": "JUJU_CHARM_HTTP_PROXY",
        "https_proxy": "JUJU_CHARM_HTTPS_PROXY",
        "no_proxy": "JUJU_CHARM_NO_PROXY",
    }
    return {name: os.environ[given] for name, given in names.items() if os.environ.get(given)}
