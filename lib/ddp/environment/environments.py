"""The Python environment of all jobs: built once on this host, stored as one archive in the workspace.

Its key is a hash of its inputs: the interpreter's version, the machine, the build of torch, the payload and its locked
requirements, and the wheelhouse where one is named. An environment with the current key is used; else one is built.
"""

import collections.abc
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import time
import typing

from ddp import backports, remedies
from ddp.base import USERS, Log, ParameterError, Results, Settings, TrainerError, one_line, with_progress
from ddp.environment import archives, question
from ddp.options import models
from ddp.slurm import jobs
from ddp.submit import checks
from ddp.workspace import folders, operations
from slurm_ddp.run import CommandError, CommandTimeout, run

TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # https://pytorch.org/get-started/locally/
_EXTRAS = {"tracking": "the packages that track runs", "tuning": "transformers"}  # folders in the payload
_FORMAT = "1"  # goes into the key: raise it when the same inputs shall give another environment
_PIP_TIMEOUT_S = 5400.0
_CLAIM = "environments"
_BUILD_BYTES = {"cpu": 3 << 30, "cuda": 16 << 30}  # where it is made: packages, and what pip unpacks on its way
_STORE_BYTES = {"cpu": 512 << 20, "cuda": 5 << 30}
_DRIVER = pathlib.Path(__file__).with_name("driver.py")
IMPORTS = pathlib.Path(__file__).with_name("imports.py")
_BUILDS = {"auto": ("cuda", "cpu"), "cpu": ("cpu",), "cuda": ("cuda",)}  # by the option torch-build, the better first
_PIP_VARIABLES = (
    "PIP_CONFIG_FILE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST", "PIP_PROXY",
    "PIP_CERT", "PIP_CLIENT_CERT", "PIP_TIMEOUT", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES", "PIP_CACHE_DIR",
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Environment:
    """An installed environment."""

    manifest: folders.Manifest
    archive: str  # path on the shared filesystem


@dataclasses.dataclass(frozen=True)
class Own:
    """A user's own requirements, which an environment holds beside the locked packages."""

    name: str
    requirements: tuple[str, ...]  # lines of a requirements.txt

    @property
    def sha256(self) -> str:
        """Return the hash of the requirements."""
        return hashlib.sha256("\n".join(self.requirements).encode()).hexdigest()


T = typing.TypeVar("T")
NOT_INSTALLED = Environment(
    folders.Manifest(
        key="0" * 16, hash="0" * 16, sha256="0" * 64, size_bytes=1, unpacked_bytes=1, python="3.0",
        torch="none", build="cpu", created="-",
    ),
    "/not-installed.tar.zst",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Wheelhouse:
    """Wheels from which alone an environment is made."""

    path: str  # a folder or an archive
    sha256: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which build of torch the cluster needs."""

    build: str  # cpu or cuda
    driverless: bool  # a node with GPUs was asked, and it has no CUDA driver
    why: str


def install_environment(settings: Settings, params: models.InstallEnvironment, log: Log) -> Results:
    """Build the environment unless it is stored already, and return its figures."""
    wheels = _wheelhouse(settings, params.wheelhouse, log) if params.wheelhouse else None
    partitions = checks.partitions()
    found = install(settings, partitions, log, build=params.torch, force=params.force, wheels=wheels)
    return describe(found)


def find(
    settings: Settings, contents: folders.Contents, build: str, *, wheels: Wheelhouse | None = None
) -> Environment | None:
    """Return the newest stored environment with the current key for this build of torch.

    Its packages may come from an index or any wheelhouse, unless `wheels` names one.
    """
    keys: dict[str, str] = {}
    for manifest in contents.environments:
        wheelhouse = manifest.wheelhouse
        if manifest.name or manifest.build != build or (wheels is not None and wheelhouse != wheels.sha256):
            continue
        if wheelhouse not in keys:
            keys[wheelhouse] = _key(settings, build, wheelhouse)
        if manifest.key == keys[wheelhouse]:
            return Environment(manifest, manifest.archive)
    return None


def named(settings: Settings, contents: folders.Contents, name: str) -> Environment:
    """Return the newest environment of this name, the user's own before the trainer's. Raises ParameterError."""
    mine = [manifest for manifest in contents.environments if manifest.name == name]
    mine.sort(key=lambda manifest: manifest.folder != str(settings.environments))  # stable: the newest stays first
    if not mine:
        known = ", ".join(dict.fromkeys(manifest.name for manifest in contents.environments if manifest.name))
        hint = f"ddp env create {name} --requirements FILE"
        raise ParameterError("environment", f"there is none called {name}; there are: {known or 'none yet'}; {hint}")
    if not is_current(settings, mine[0]):
        hint = f"ddp env create {name} --requirements FILE"
        raise ParameterError("environment", f"{name} was made by another release of ddp; make it again: {hint}")
    return Environment(mine[0], mine[0].archive)


def installed(settings: Settings, contents: folders.Contents) -> Environment | None:
    """Return the environment that jobs would use now, without a query of the nodes' drivers."""
    return next((found for build in _BUILDS[settings.torch_build] if (found := find(settings, contents, build))), None)


def is_current(settings: Settings, manifest: folders.Manifest) -> bool:
    """Return whether an environment has the current key."""
    return manifest.key == _key(settings, manifest.build, manifest.wheelhouse, manifest.requirements)


def ensure(
    settings: Settings,
    partitions: tuple[jobs.Partition, ...],
    log: Log,
    *,
    gpus: bool | None = None,
    contents: folders.Contents | None = None,
    reservation: str | None = None,
) -> Environment:
    """Return the environment that fits the cluster, built now where there is none. `gpus`: the job requests GPUs."""
    contents = contents or folders.look(settings)
    checks.trusted(contents)
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
    own: Own | None = None,
) -> Environment:
    """Build the environment and store its archive; where one is stored, only with `force`. Raises TrainerError."""
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
        return _install(settings, choice, wheels, log, force=force, own=own)
    finally:
        settings.claims.drop(_CLAIM)


def _install(
    settings: Settings, choice: Choice, wheels: Wheelhouse | None, log: Log, *, force: bool, own: Own | None
) -> Environment:
    contents = folders.look(settings)
    checks.trusted(contents)
    if own is None:
        found = find(settings, contents, choice.build, wheels=wheels)
    else:
        key = _key(settings, choice.build, wheels.sha256 if wheels else "", own.sha256)
        same = (one for one in contents.environments if (one.name, one.key) == (own.name, key))
        found = next((Environment(one, one.archive) for one in same), None)
    if found is not None and not force:
        log(f"environment {found.manifest.hash} with torch {found.manifest.torch} is there already")
        return _noted(settings, found) if choice.driverless and not found.manifest.driverless else found
    log(f"making the environment: torch {TORCH} for {choice.build.upper()} ({choice.why})")
    return _make(settings, choice, wheels, log, own=own)


def used_by(settings: Settings, hashes: list[str]) -> list[str]:
    """Return this user's runs that wait or run with one of these environments. Raises TrainerError."""
    try:
        known = [job.name for job in jobs.jobs(user=settings.user) if job.is_active]
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e
    runs = {str(settings.runs / name): name for name in known}
    found = folders.call(settings, archives.environments_of, runs=list(runs))
    return [runs[folder] for folder, used in found.items() if used in hashes]


def prune(settings: Settings, log: Log, *, keep: str) -> None:
    """Remove archives that no job in the queue uses; of each build and name the newest three stay.

    The trainer's are used by the jobs of all users.
    """
    everybody = settings.folder == settings.workspace and bool(settings.account)
    try:
        known = jobs.jobs(user=None if everybody else settings.user)
    except jobs.SlurmError:
        return  # what is in use is not known: remove nothing
    users = settings.workspace / USERS
    homes = ((settings.folder if job.user == settings.user else users / job.user, job) for job in known)
    runs = [str(home / "runs" / job.name) for home, job in homes if job.is_active]
    removed = folders.call(
        settings, archives.prune_environments, timeout_s=120, workspace=str(settings.folder), keep=[keep], runs=runs
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
    directives = [
        f"--partition={partition.name}", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=256M",
        "--gpus-per-node=1", "--time=2", *([f"--reservation={reservation}"] if reservation else []),
    ]  # fmt: skip
    program = _DRIVER.read_text()  # sent: what lies on this host need not lie on the node
    try:
        answer = with_progress(
            log,
            f"asking a node with GPUs ({node.name} has {node.gpus}) for its CUDA driver",
            lambda: question.ask(settings, "trainer-driver", program, directives=directives),
        )
    except jobs.SlurmError as e:
        if remedies.NO_CREDENTIAL in str(e):
            unknown, add = remedies.unknown_account(settings)
            raise TrainerError(f"{unknown}, so none of its jobs starts", remedy=add) from e
        raise TrainerError(
            f"no GPU node reported its driver: {e}; try again when one is free, or set torch-build to cpu or cuda"
        ) from e
    found = re.search(r"^driver (\d+)$", answer, re.MULTILINE)
    version = int(found[1]) if found else 0
    if version:
        return Choice("cuda", False, f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}")
    return Choice("cpu", True, f"{node.name} has no CUDA driver")


def payload_folder(settings: Settings) -> str:
    """Return the folder of the payload for containers, whose images hold torch and numpy."""
    return str(settings.environments / f"payload-{_payload_digest(settings.payload)[:16]}")


def store_payload(settings: Settings) -> None:
    """Copy the payload to the workspace, unless it is there."""
    folders.call(settings, archives.store_payload, source=str(settings.payload), target=payload_folder(settings))


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


def _make(settings: Settings, choice: Choice, wheels: Wheelhouse | None, log: Log, *, own: Own | None) -> Environment:
    began = time.monotonic()
    store = str(settings.environments)
    opened = folders.call(settings, archives.open_cache, base=str(settings.node_cache), store=store)
    builder = _Builder(settings, pathlib.Path(opened["folder"]), choice.build, wheels, log)
    folder = opened["folder"]
    try:
        _require_space(settings.node_cache, opened["free_bytes"], _BUILD_BYTES[choice.build])
        _require_space(settings.environments, opened["store_free_bytes"], _STORE_BYTES[choice.build])
        builder.install_packages()
        if own is not None:
            builder.install_own(own)
        finish = functools.partial(
            folders.call, settings, archives.finish_environment, timeout_s=1800,
            build=folder, payload=str(settings.payload),
        )  # fmt: skip
        size = with_progress(log, "removing what no run reads, compiling the rest", finish)
        manifest = {
            "torch": with_progress(log, "checking it", lambda: _check(settings, pathlib.Path(folder))),
            "key": _key(settings, choice.build, wheels.sha256 if wheels else "", own.sha256 if own else ""),
            "name": own.name if own else "",
            "requirements": own.sha256 if own else "",
            "wheelhouse": wheels.sha256 if wheels else "",
            "unpacked_bytes": size["size_bytes"],
            "files": size["files"],
            "python": _python_version(),
            "build": choice.build,
            "driverless": choice.driverless,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        keep = functools.partial(
            folders.call, settings, archives.store_environment, timeout_s=3600,
            build=folder, folder=store, manifest=manifest,
        )  # fmt: skip
        stored = with_progress(log, f"storing {size['size_bytes'] >> 20} MiB in {store}", keep)
    finally:
        folders.call(settings, archives.remove_build, timeout_s=300, build=folder)
    made = folders.Manifest.model_validate({**stored, "folder": store})
    prune(settings, log, keep=made.hash)
    log(f"environment {made.hash} is stored: {made.size_bytes >> 20} MiB, {time.monotonic() - began:.0f} s in all")
    return Environment(made, made.archive)


def _noted(settings: Settings, found: Environment) -> Environment:
    """Note in a manifest that the nodes with GPUs have no driver, so that none is asked for each job."""
    manifest = found.manifest.model_copy(update={"driverless": True})
    if manifest.folder == str(settings.environments):
        path = settings.environments / f"{manifest.hash}.json"
        text = manifest.model_dump_json(indent=1) + "\n"
        folders.call(settings, operations.write, path=str(path), text=text)
    return Environment(manifest, manifest.archive)


def _wheelhouse(settings: Settings, path: str, log: Log) -> Wheelhouse:
    """Return the wheelhouse at a path. Raises ParameterError."""
    checks.check_inside(settings, "wheelhouse", path, kinds=("file", "folder"))
    is_file = folders.locate(settings, path).kind == "file"
    if is_file and not path.endswith((".tar", ".tar.zst", ".zip")):
        raise ParameterError("wheelhouse", f"{path} is no folder, and no .tar, .tar.zst or .zip")
    digest = functools.partial(_of_wheels, settings, archives.digest_wheelhouse, path=path)
    return Wheelhouse(path, with_progress(log, f"reading {path}", digest))


def _attached(settings: Settings, log: Log) -> Wheelhouse | None:
    """Return the wheels that the operator attached to the charm; None where there are none."""
    attached = settings.wheelhouse
    if attached is None or not attached.stat().st_size:
        return None

    def digest() -> str:
        with attached.open("rb") as file:
            return backports.sha256(file)

    return Wheelhouse(str(attached), with_progress(log, "reading the attached wheelhouse", digest))


def _of_wheels(settings: Settings, operation: collections.abc.Callable[..., T], **arguments: object) -> T:
    """Do an operation on a wheelhouse. Raises ParameterError where it is refused."""
    try:
        return folders.call(settings, operation, timeout_s=3600, **arguments)
    except folders.HangingError:
        raise
    except folders.WorkspaceError as e:
        raise ParameterError("wheelhouse", str(e)) from e


class _Builder:
    """A folder in which an environment is made."""

    def __init__(
        self, settings: Settings, folder: pathlib.Path, kind: str, wheels: Wheelhouse | None, log: Log
    ) -> None:
        self._settings, self._folder, self._wheels, self._log = settings, folder, wheels, log
        self._is_cuda = kind == "cuda"
        self._python = folder / "env" / "bin" / "python"
        self._offline: tuple[str, ...] = ()  # pip's options where all packages come from a wheelhouse
        self._index = (f"--extra-index-url={settings.torch_index}",) if settings.torch_index and not wheels else ()

    def install_packages(self) -> None:
        """Install the locked packages and torch. Raises TrainerError."""
        argv = (folders.PYTHON, "-m", "venv", self._folder / "env")
        with_progress(self._log, "making a virtual environment", lambda: _run(*argv))
        if self._wheels is not None:
            self._open(self._wheels)
        payload = self._settings.payload
        self._pip("installing the locked packages", "--require-hashes", "-r", payload / "requirements.txt")
        for extra in self._settings.extras:
            self._pip(f"installing {_EXTRAS[extra]}", "--require-hashes", "-r", payload / extra / "requirements.txt")
        if self._is_cuda or self._wheels is not None:
            self._pip(f"installing torch {TORCH} for {'CUDA' if self._is_cuda else 'CPU'}", *self._index, self._torch)
            return
        try:
            self._pip(f"installing torch {TORCH}+cpu", *self._index, self._torch)
        except TrainerError as e:
            if "No matching distribution" not in str(e) and "Could not find a version" not in str(e):
                raise
            text = f"installing torch {TORCH}+cpu from PyTorch's own index, as no other offers it"
            try:
                self._pip(text, "--no-deps", f"--index-url={CPU_INDEX}", self._torch)
            except TrainerError:
                raise TrainerError(
                    f"no index offers torch {TORCH}+cpu, PyTorch's own included: set torch-index to one that does, "
                    "or torch-build=cuda for the build that CUDA needs"
                ) from e

    def install_own(self, own: Own) -> None:
        """Install a user's requirements beside the locked packages, whose versions stay. Raises ParameterError."""
        payload = self._settings.payload
        locked = "".join((payload / extra / "requirements.txt").read_text() for extra in ("", *self._settings.extras))
        pins = [*re.findall(r"^[A-Za-z0-9._-]+==[^\s;\\]+", locked, re.MULTILINE), self._torch]
        wanted, constraints = self._folder / "own.txt", self._folder / "constraints.txt"
        constraints.write_text("\n".join(pins) + "\n")
        wanted.write_text("\n".join(own.requirements) + "\n")
        text = f"installing {len(own.requirements)} requirements of {own.name}"
        try:
            self._pip(text, *self._index, "-r", wanted, "-c", constraints)
        except ParameterError:
            raise
        except TrainerError as e:
            raise ParameterError("requirements", str(e)) from e

    @property
    def _torch(self) -> str:
        return f"torch=={TORCH}" + ("" if self._is_cuda else "+cpu")

    def _open(self, wheels: Wheelhouse) -> None:
        target = str(self._folder / "wheels")
        unpack = functools.partial(
            _of_wheels, self._settings, archives.open_wheelhouse, path=wheels.path, target=target
        )
        opened = with_progress(self._log, f"opening {wheels.path}", unpack)
        self._log(f"{opened['wheels']} wheels are there; no package index is used")
        self._offline = ("--no-index", f"--find-links={opened['folder']}", "--only-binary=:all:")

    def _pip(self, text: str, *arguments: str | pathlib.Path) -> None:
        log = self._folder / "pip.log"
        quiet = ("--no-input", "--disable-pip-version-check", "--progress-bar=off", f"--log={log}", "--no-compile")
        argv = (self._python, "-m", "pip", "install", *quiet, *self._offline, *arguments)
        with_progress(self._log, text, lambda: _run(*argv), lambda: _last_step(self._settings, log))


def _check(settings: Settings, build: pathlib.Path) -> str:
    """Return torch's version as the environment itself tells it, with all that the payload imports."""
    python = build / "env" / "bin" / "python"
    names = ["ddptrain", "torch.distributed.run", *(["transformers"] if settings.transformers else [])]
    return json.loads(_run(python, "-I", IMPORTS, *names, timeout=300))["torch"]


def _key(settings: Settings, build: str, wheelhouse: str = "", requirements: str = "") -> str:
    """Return the key: a hash of all inputs."""
    torch = TORCH if build == "cuda" else f"{TORCH}+cpu"
    inputs = [_FORMAT, _python_version(), platform.machine(), torch, _payload_digest(settings.payload)]
    inputs += settings.extras
    inputs += [f"wheelhouse {wheelhouse}"] if wheelhouse else []
    inputs += [f"requirements {requirements}"] if requirements else []
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def _python_version() -> str:
    """Return the version of the interpreter that the environment uses, here and on the nodes."""
    version = _run(folders.PYTHON, "-V").split()[-1]  # Python 3.12.3
    return ".".join(version.split(".")[:2])


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
        raise TrainerError(f"there is no payload in {payload}; install ddp again")
    return [*package, *locked]


def _require_space(folder: pathlib.Path, free: int, needed: int) -> None:
    if free < needed:
        raise TrainerError(f"{folder} has {free >> 20} MiB free; the environment needs {needed >> 20}: make room")


def _last_step(settings: Settings, path: pathlib.Path) -> str:
    try:
        return one_line(folders.call(settings, archives.last_step, timeout_s=3, path=str(path)), 100)
    except folders.WorkspaceError:
        return ""


def _run(*argv: str | pathlib.Path, timeout: float = _PIP_TIMEOUT_S) -> str:
    try:
        return run(*argv, cwd="/", timeout=timeout, env=_pip_variables()).stdout
    except CommandTimeout as e:
        if "--no-index" in argv:
            raise TrainerError(f"{e}; is the filesystem of the wheelhouse slow?") from e
        raise TrainerError(f"{e}; is the package index reachable from this host?") from e
    except CommandError as e:
        if "--no-index" in argv and (missing := re.search(r"No matching distribution found for (\S+)", e.stderr)):
            what = f"no wheel of {missing[1]} for Python {_python_version()} on {platform.machine()} is in it; add it"
            raise ParameterError("wheelhouse", what) from e
        raise TrainerError(f"{_what(argv)}: {_cause(e)}") from e


def _pip_variables() -> dict[str, str]:
    """Take only the package indexes from the user's environment: pip's other settings, such as a target, are ours."""
    return {name: os.environ[name] for name in _PIP_VARIABLES if name in os.environ}


def _cause(e: CommandError) -> str:
    """Return the command's own reason: pip prints it in lines that begin with ERROR."""
    reasons = [line.removeprefix("ERROR:").strip() for line in e.stderr.splitlines() if line.startswith("ERROR:")]
    return "; ".join(dict.fromkeys(reasons[-2:])) if reasons else str(e)


def _what(argv: tuple[str | pathlib.Path, ...]) -> str:
    return "pip" if "pip" in argv else "python3 -m venv" if "venv" in argv else pathlib.Path(argv[0]).name
