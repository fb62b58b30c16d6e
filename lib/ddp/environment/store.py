"""The store of Python environments: each is made once, and is one archive in the workspace.

Its key is a hash of its inputs: the interpreter's version, the machine, the build of torch, the
payload and its locked requirements, a user's own requirements. An environment is made if none has
the current key.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
import platform
import re

from ddp.environment import archives, builder, requirements, wheelhouse
from ddp.environment.uv import TESTED, TIMEOUT_S, TORCH
from ddp.options import models
from ddp.problem import Command, ParameterError, Problem, Results
from ddp.results.progress import Log, with_progress
from ddp.run import folder
from ddp.settings import Settings
from ddp.slurm import cluster, jobs
from ddp.workspace import checks, operations
from ddp.workspace.folders import Contents, Manifest, Workspace

NOTEBOOK = pathlib.Path(__file__).with_name("notebook") / "requirements.txt"  # JupyterLab, locked
_FORMAT = "4"  # goes into the key: raise it when the same inputs shall give another environment
_CLAIM = "environments"
_EXTRAS = (
    ("tracking", "tuning"),
    ("tracking",),
    ("tuning",),
    (),
)  # what Settings.extras can be, the most first
_MOST_NAMED = 2
_NUM_STORED, _NUM_LAYERS = 3, 16  # of each build and name; of layers without a name
_IDENTITY = {
    "key": "0" * 16,
    "hash": "0" * 16,
    "sha256": "0" * 64,
    "size_bytes": 1,
    "unpacked_bytes": 1,
}
_NOTHING = _IDENTITY | {
    "python": "3.0",
    "torch": "none",
    "build": "cpu",
    "created": "-",
    "folder": "/not-installed",
}
NOT_INSTALLED = Manifest.model_validate(_NOTHING)


def install_environment(settings: Settings, params: models.InstallEnvironment, log: Log) -> Results:
    """Make the environment unless it is stored already, and return its figures."""
    settings = with_torch(settings, params.torch)
    wheels = wheelhouse.find(settings, params.wheelhouse)
    request = builder.Request(settings.torch_build, wheels)
    return describe(Store(settings).install(request, log, force=params.force))


def with_torch(settings: Settings, wanted: str | None) -> Settings:
    """Return the settings with a build of torch, or a version, in place of the configured one."""
    if wanted is None:
        return settings
    if wanted[0].isdigit():
        return dataclasses.replace(settings, torch_version=wanted)
    return dataclasses.replace(settings, torch_build=wanted)


def own(workspace: Workspace, name: str) -> list[Manifest]:
    """List the user's own environments and images of this name, the newest first."""
    stored = (contents := workspace.look()).environments + contents.images
    return [one for one in stored if (one.name, one.folder) == (name, str(workspace.environments))]


@dataclasses.dataclass(frozen=True)
class Store:
    """The environments in the workspace, as the settings of a command ask for them."""

    settings: Settings

    def find(self, contents: Contents, request: builder.Request) -> Manifest | None:
        """Return the newest stored environment with the current key for a request."""
        base = request.base.hash if request.base else ""
        wanted = (request.build, request.name, request.sha256, base)
        for one in contents.environments:
            about = (one.build, one.name, one.requirements, one.base)
            if about == wanted and self.is_current(one):
                return one
        return None

    def named(self, contents: Contents, name: str) -> Manifest:
        """Return the newest environment of this name, the user's own before the trainer's.

        Raises ParameterError.
        """
        mine = [manifest for manifest in contents.environments if manifest.name == name]
        mine.sort(
            key=lambda manifest: manifest.folder != str(self.settings.workspace.environments)
        )  # stable: the newest stays first
        remedy = Command("env create", {"requirements": "FILE"}, (name,))
        if not mine:
            known = ", ".join(
                dict.fromkeys(manifest.name for manifest in contents.environments if manifest.name)
            )
            raise ParameterError(
                "environment", f"{name} does not exist; known: {known or 'none'}", remedy=remedy
            )
        if not self.is_current(mine[0]):
            raise ParameterError(
                "environment", f"{name} was made by another release of ddp", remedy=remedy
            )
        return mine[0]

    def installed(self, contents: Contents) -> Manifest | None:
        """Return the environment that jobs would use now."""
        for build in self._builds:
            if found := self.find(contents, builder.Request(build)):
                return found
        return None

    @property
    def _builds(self) -> tuple[str, ...]:
        """The builds of torch that jobs may use, the preferred one first."""
        chosen = self.settings.torch_build
        return ("cuda", "cpu") if chosen == "auto" else (chosen,)

    def missing(self, contents: Contents) -> str:
        """Explain why jobs cannot use a stored environment."""
        own = {one.key for one in contents.environments if not (one.name or one.requirements)}
        if not own:
            return "no environment yet"
        for extras in _EXTRAS:
            keys = {self.key(build, extras=extras) for build in self._builds}
            if keys & own:
                lacking = self._packages(set(self.settings.extras) - set(extras))
                if lacking:
                    return f"the environment lacks {lacking}"
                return "the environment has packages of options now off"
        return "no environment of this release"

    def _packages(self, extras: set[str]) -> str:
        """Name the packages of some extras as the options that ask for them do."""
        tracking = {
            "mlflow": bool(self.settings.mlflow_uri),
            "tensorboard": self.settings.tensorboard,
            "wandb": self.settings.wandb,
        }
        names = [name for name, is_wanted in tracking.items() if is_wanted and "tracking" in extras]
        if "tuning" in extras:
            names.append("transformers")
        if len(names) > _MOST_NAMED:
            return f"{names[0]} and {len(names) - 1} more"
        return ", ".join(names)

    def is_current(self, manifest: Manifest) -> bool:
        """Return whether an environment has the current key, and a layer's base is stored."""
        has_base = not manifest.base or manifest.below is not None
        if manifest.name:  # a user's own has the torch that it was made with
            version = manifest.torch.partition("+")[0]
            settings = dataclasses.replace(self.settings, torch_version=version)
            key = Store(settings).key(manifest.build, manifest.requirements)
        else:
            key = self.key(manifest.build, manifest.requirements)
        return has_base and manifest.key == key

    def imported(self, name: str | None) -> Manifest | None:
        """Return the imported image that an option names; None for another image, or none.

        Raises ParameterError.
        """
        if not name or re.search("[/:#@]", name):
            return None
        images = self.settings.workspace.look().images
        for one in images:
            if one.name == name:
                return one
        known = ", ".join(dict.fromkeys(one.name for one in images)) or "none"
        remedy = Command("image import", arguments=("docker://IMAGE:TAG", name))
        text = f"{name} is not imported; known: {known}"
        raise ParameterError("container-image", text, remedy=remedy)

    def payload_folder(self) -> str:
        """Return the folder of the payload for containers, whose images have torch and numpy."""
        digest = _payload_digest(self.settings.payload)
        return str(self.settings.workspace.environments / f"payload-{digest[:16]}")

    def store_payload(self) -> None:
        """Copy the payload to the workspace unless it exists there."""
        source, target = self.settings.payload, self.payload_folder()
        self.settings.workspace.do(archives.store_payload, source=source, target=target)

    def request(
        self, path: pathlib.Path, build: str, name: str = "", *extras: str
    ) -> builder.Request:
        """Return the inputs of a layer with a user's requirements.

        Raises ParameterError if the file is unusable.
        """
        sha256 = self.settings.workspace.do(lambda: requirements.digest(path, *extras))
        wheels = wheelhouse.find(self.settings)
        return builder.Request(build, wheels, name, path, extras, sha256)

    def ensure(self, log: Log, contents: Contents | None = None) -> Manifest:
        """Return the environment that jobs use, made now if it is missing. Raises Problem."""
        contents = contents or self.settings.workspace.look()
        checks.trusted(contents)
        request = builder.Request(self.settings.torch_build, wheelhouse.find(self.settings))
        return self.installed(contents) or self.install(request, log)

    def layer(self, request: builder.Request, log: Log, *, force: bool = False) -> Manifest:
        """Return the layer of a request on the jobs' environment, made now if it is missing.

        Raises Problem.
        """
        contents = self.settings.workspace.look()
        below = Store(dataclasses.replace(self.settings, torch_build=request.build))
        base = below.ensure(log, contents)
        request = dataclasses.replace(request, build=base.build, base=base)
        found = None if force else self.find(contents, request)
        return found or self.install(request, log, force=force)

    def notebook(self, log: Log) -> Manifest:
        """Return the layer with JupyterLab on the jobs' environment, made now if it is missing.

        Raises Problem.
        """
        return self.layer(self.request(NOTEBOOK, self.settings.torch_build), log)

    def install(self, request: builder.Request, log: Log, *, force: bool = False) -> Manifest:
        """Make an environment and store its archive; if one is stored, only with `force`.

        Raises Problem.
        """
        if request.build == "auto":
            request = dataclasses.replace(request, build=_build_for_nodes())
        claims = self.settings.workspace.claims
        if not claims.take(_CLAIM):
            text = "waiting for another command that makes an environment"
            if not with_progress(log, text, lambda: claims.wait(_CLAIM, timeout_s=TIMEOUT_S)):
                what = f"another command has been making an environment for {TIMEOUT_S:g} s"
                raise Problem(f"{what}; try again")
        try:
            return self._install(request, log, force=force)
        finally:
            claims.drop(_CLAIM)

    def _install(self, request: builder.Request, log: Log, *, force: bool) -> Manifest:
        contents = self.settings.workspace.look()
        checks.trusted(contents)
        found = self.find(contents, request)
        if found is not None and not force:
            log(f"environment {found.hash} with torch {found.torch} exists already")
            return found
        if not request.base:
            version = self.settings.torch_version or TORCH
            log(f"making the environment: torch {version} for {request.build.upper()}")
            if version not in TESTED:
                tested = ", ".join(TESTED)
                log(f"torch {version} is not one that slurm-ddp is tested with: {tested}")
        made = builder.make(self.settings, request, self.key(request.build, request.sha256), log)
        _prune(self.settings.workspace, log, keep=made.hash)
        on_base = f", on {made.base}" if made.base else ""
        log(f"stored environment {made.hash}: {made.size_bytes >> 20} MiB{on_base}")
        return made

    def key(self, build: str, requirements: str = "", extras: tuple[str, ...] | None = None) -> str:
        """Return the key of an environment: a hash of its inputs."""
        version = self.settings.torch_version or TORCH
        inputs = [
            _FORMAT,
            builder.python_version(),
            platform.machine(),
            version if build == "cuda" else f"{version}+cpu",
            _payload_digest(self.settings.payload),
            *(self.settings.extras if extras is None else extras),
            requirements,
        ]
        return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def _build_for_nodes() -> str:
    """Return the build of torch that the cluster's nodes can use best."""
    for partition in cluster.partitions():
        if any(node.gpus for node in partition.nodes):
            return "cuda"
    return "cpu"


def in_use(workspace: Workspace, user: str | None) -> dict[str, str]:
    """Return the environment's hash of each run in the queue, by its folder. Raises Problem."""
    homes = {workspace.user: workspace.folder}
    with jobs.asking():
        active = [job for job in jobs.jobs(user=user) if job.is_active]
    runs = [
        homes.get(job.user, workspace.path / operations.USERS / job.user) / "runs" / job.name
        for job in active
    ]
    records = workspace.do(lambda: list(map(folder.read_record, runs)))
    return {
        str(run): str(record.get("environment")) for run, record in zip(runs, records, strict=True)
    }


def _prune(workspace: Workspace, log: Log, *, keep: str) -> None:
    """Remove old archives that no job in the queue uses.

    The trainer's archives serve the jobs of all users.
    """
    is_shared = workspace.folder == workspace.path and bool(workspace.account)
    try:
        used = in_use(workspace, None if is_shared else workspace.user).values()
    except Problem:
        return  # the environments in use are not known
    folder, contents = str(workspace.environments), workspace.look()
    kept = {keep, *used}
    kept |= {one.base for one in contents.environments if one.hash in kept}
    stored = collections.defaultdict[tuple[str, str, int], list[str]](list)
    for one in contents.environments:  # the newest first
        if one.folder == folder:
            most = _NUM_LAYERS if one.base and not one.name else _NUM_STORED
            stored[one.build, one.name, most].append(one.hash)
    old = [
        name for (*_, most), names in stored.items() for name in names[most:] if name not in kept
    ]
    workspace.do(archives.remove_environments, timeout_s=120, folder=folder, hashes=old)
    if old:
        log(f"removed {len(old)} older environments: {', '.join(old[:5])}")


def describe(environment: Manifest) -> dict[str, str]:
    """Return the environment's figures as an action's results."""
    found = {"environment": environment.archive}
    if environment.below:
        found["base"] = environment.below.archive
    if environment.digest:
        found["digest"] = environment.digest
        found["source"] = environment.source
    else:
        found["torch"] = environment.torch
        found["python"] = environment.python
    found["size-mb"] = str(environment.size_bytes >> 20)
    found["unpacked-mb"] = str(environment.unpacked_bytes >> 20)
    return found


def _payload_digest(payload: pathlib.Path) -> str:
    files = [
        path
        for path in sorted(payload.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    if not {payload / "requirements.txt", payload / "ddptrain" / "__init__.py"} <= {*files}:
        raise Problem(f"{payload} has no payload; install ddp again")
    digest = hashlib.sha256()
    for path in files:
        data = path.read_bytes()
        digest.update(f"{path.relative_to(payload)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
