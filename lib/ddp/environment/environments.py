"""The Python environment of all jobs: made once on this host, stored as one archive in the workspace.

Its key is a hash of its inputs: the interpreter's version, the machine, the build of torch, the payload and its locked
requirements, a wheelhouse, a user's own requirements. An environment with the current key is used; else one is made.
"""

import dataclasses
import hashlib
import json
import pathlib
import platform
import time

from ddp.base import USERS, Log, ParameterError, Results, Settings, TrainerError, with_progress
from ddp.environment import archives, builder, choice, wheelhouse
from ddp.environment.uv import TIMEOUT_S, TORCH
from ddp.options import models
from ddp.problem import Command
from ddp.slurm import jobs
from ddp.submit import checks
from ddp.workspace import files, folders

IMPORTS = builder.IMPORTS
_FORMAT = "2"  # goes into the key: raise it when the same inputs shall give another environment
_CLAIM = "environments"
_BUILDS = {"auto": ("cuda", "cpu"), "cpu": ("cpu",), "cuda": ("cuda",)}  # by the option torch-build, the better first


@dataclasses.dataclass(frozen=True)
class Environment:
    """An installed environment."""

    manifest: folders.Manifest
    archive: str  # path on the shared filesystem


_IDENTITY = {"key": "0" * 16, "hash": "0" * 16, "sha256": "0" * 64, "size_bytes": 1, "unpacked_bytes": 1}
_NOTHING = _IDENTITY | {"python": "3.0", "torch": "none", "build": "cpu", "created": "-"}
NOT_INSTALLED = Environment(folders.Manifest.model_validate(_NOTHING), "/not-installed.tar.zst")


def install_environment(settings: Settings, params: models.InstallEnvironment, log: Log) -> Results:
    """Make the environment unless it is stored already, and return its figures."""
    wheels = wheelhouse.find(settings, params.wheelhouse, log)
    made = install(settings, checks.partitions(), log, build=params.torch, force=params.force, wheels=wheels)
    return describe(made)


def find(
    settings: Settings,
    contents: folders.Contents,
    build: str,
    *,
    wheels: wheelhouse.Wheelhouse | None = None,
    own: builder.Own | None = None,
) -> Environment | None:
    """Return the newest stored environment with the current key for this build of torch.

    Its packages may come from an index or any wheelhouse, unless `wheels` names one.
    """
    wanted = (build, own.name if own else "", own.sha256 if own else "")
    for manifest in contents.environments:
        is_wanted = (manifest.build, manifest.name, manifest.requirements) == wanted
        is_wanted = is_wanted and (wheels is None or manifest.wheelhouse == wheels.sha256)
        if is_wanted and is_current(settings, manifest):
            return Environment(manifest, manifest.archive)
    return None


def named(settings: Settings, contents: folders.Contents, name: str) -> Environment:
    """Return the newest environment of this name, the user's own before the trainer's. Raises ParameterError."""
    mine = [manifest for manifest in contents.environments if manifest.name == name]
    mine.sort(key=lambda manifest: manifest.folder != str(settings.environments))  # stable: the newest stays first
    remedy = Command("env create", {"requirements": "FILE"}, (name,))
    if not mine:
        known = ", ".join(dict.fromkeys(manifest.name for manifest in contents.environments if manifest.name))
        raise ParameterError("environment", f"{name} does not exist; known: {known or 'none'}", remedy=remedy)
    if not is_current(settings, mine[0]):
        raise ParameterError("environment", f"{name} was made by another release of ddp", remedy=remedy)
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
    """Return the environment that fits the cluster, made now if it is missing. `gpus`: the job requests GPUs."""
    contents = contents or folders.look(settings)
    checks.trusted(contents)
    found = installed(settings, contents)
    asks = settings.torch_build == "auto" and gpus
    if found and not (asks and found.manifest.build == "cpu" and not found.manifest.driverless):
        return found
    return install(settings, partitions, log, reservation=reservation)


def install(
    settings: Settings,
    partitions: tuple[jobs.Partition, ...],
    log: Log,
    *,
    build: str | None = None,
    force: bool = False,
    wheels: wheelhouse.Wheelhouse | None = None,
    reservation: str | None = None,
    own: builder.Own | None = None,
) -> Environment:
    """Make the environment and store its archive; if one is stored, only with `force`. Raises TrainerError."""
    wanted = build or settings.torch_build
    chosen = choice.Choice(wanted, False, "as configured")
    if wanted == "auto":
        chosen = choice.choose(settings, partitions, log, reservation=reservation)
    request = builder.Request(chosen, wheels or wheelhouse.find(settings, None, log), own)
    if not settings.claims.take(_CLAIM):
        text = "waiting for another command that makes an environment"
        if not with_progress(log, text, lambda: settings.claims.wait(_CLAIM, timeout_s=TIMEOUT_S)):
            raise TrainerError(f"another command has been making an environment for {TIMEOUT_S:g} s; try again")
    try:
        return _install(settings, request, log, force=force)
    finally:
        settings.claims.drop(_CLAIM)


def _install(settings: Settings, request: builder.Request, log: Log, *, force: bool) -> Environment:
    contents = folders.look(settings)
    checks.trusted(contents)
    build, wheels, own = request.choice.build, request.wheels, request.own
    found = find(settings, contents, build, wheels=wheels, own=own)
    if found is not None and not force:
        log(f"environment {found.manifest.hash} with torch {found.manifest.torch} exists already")
        return _note_driverless(settings, found) if request.choice.driverless else found
    began = time.monotonic()
    log(f"making the environment: torch {TORCH} for {build.upper()} ({request.choice.why})")
    key = _key(settings, build, wheels.sha256 if wheels else "", own.sha256 if own else "")
    made = builder.make(settings, request, key, log)
    prune(settings, log, keep=made.hash)
    log(f"stored environment {made.hash}: {made.size_bytes >> 20} MiB, {time.monotonic() - began:.0f} s in all")
    return Environment(made, made.archive)


def _note_driverless(settings: Settings, found: Environment) -> Environment:
    """Note in a manifest that the nodes with GPUs have no driver, so that not each job asks one."""
    manifest = found.manifest.model_copy(update={"driverless": True})
    if manifest.folder == str(settings.environments):
        path = settings.environments / f"{manifest.hash}.json"
        folders.call(settings, files.replace, path=path, text=manifest.model_dump_json(indent=1) + "\n")
    return Environment(manifest, manifest.archive)


def used_by(settings: Settings, hashes: list[str]) -> list[str]:
    """Return this user's runs that wait or run with one of these environments. Raises TrainerError."""
    try:
        runs = _queued(settings, settings.user)
    except jobs.SlurmError as e:
        raise TrainerError(f"Slurm: {e}") from e
    found = folders.call(settings, archives.environments_of, runs=runs)
    return [pathlib.Path(run).name for run, used in found.items() if used in hashes]


def prune(settings: Settings, log: Log, *, keep: str) -> None:
    """Remove old archives that no job in the queue uses; those of the trainer's account serve all users' jobs."""
    everybody = settings.folder == settings.workspace and bool(settings.account)
    try:
        runs = _queued(settings, None if everybody else settings.user)
    except jobs.SlurmError:
        return  # the environments in use are not known
    about = {"workspace": str(settings.folder), "keep": [keep], "runs": runs}
    removed = folders.call(settings, archives.prune_environments, timeout_s=120, **about)["removed"]
    if removed:
        log(f"removed {len(removed)} older environments: {', '.join(removed[:5])}")


def _queued(settings: Settings, user: str | None) -> list[str]:
    """Return the folders of the runs in the queue, of a user or of all. Raises SlurmError."""
    homes = {settings.user: settings.folder}
    known = [job for job in jobs.jobs(user=user) if job.is_active]
    return [str(homes.get(job.user, settings.workspace / USERS / job.user) / "runs" / job.name) for job in known]


def payload_folder(settings: Settings) -> str:
    """Return the folder of the payload for containers, whose images have torch and numpy."""
    return str(settings.environments / f"payload-{_payload_digest(settings.payload)[:16]}")


def store_payload(settings: Settings) -> None:
    """Copy the payload to the workspace unless it exists there."""
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


def _key(settings: Settings, build: str, wheelhouse: str = "", requirements: str = "") -> str:
    """Return the hash of all inputs."""
    torch = TORCH if build == "cuda" else f"{TORCH}+cpu"
    inputs = [_FORMAT, builder.python_version(), platform.machine(), torch, _payload_digest(settings.payload)]
    inputs += [*settings.extras, f"wheelhouse {wheelhouse}", f"requirements {requirements}"]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def _payload_digest(payload: pathlib.Path) -> str:
    package = sorted(path for path in payload.glob("ddptrain/**/*") if "__pycache__" not in path.parts)
    locked = [payload / folder / "requirements.txt" for folder in ("", *builder.EXTRAS)]
    if not package or not all(path.is_file() for path in locked):
        raise TrainerError(f"{payload} has no payload; install ddp again")
    digest = hashlib.sha256()
    for path in filter(pathlib.Path.is_file, [*package, *locked]):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(payload)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
