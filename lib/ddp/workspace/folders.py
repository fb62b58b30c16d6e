"""The workspace: the folders on the shared filesystem, each access with a deadline."""

import collections.abc
import contextlib
import dataclasses
import errno
import functools
import pathlib
import pwd
import subprocess
import typing

import pydantic

from ddp.host import files, locks
from ddp.node import small_files, storage
from ddp.problem import Problem
from ddp.workspace import operations

PYTHON = "/usr/bin/python3"
SECRETS = ".secrets"
FOLDERS = ("runs", "datasets", "environments", "baselines", SECRETS)
T = typing.TypeVar("T")


class WorkspaceError(Problem):
    """A file or folder of the workspace cannot be used."""


class MissingError(WorkspaceError):
    """A file or folder does not exist."""


class HangingError(WorkspaceError):
    """The filesystem did not respond in time."""


Sha256 = typing.Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(pydantic.BaseModel, frozen=True):
    """The manifest file next to an environment's archive.

    Each field is limited to an alphabet, because the file belongs to a user.
    """

    key: typing.Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{16}$")]  # of its inputs
    hash: typing.Annotated[
        str, pydantic.Field(pattern=r"^[0-9a-f]{16}$")
    ]  # of the archive; names it
    sha256: Sha256
    size_bytes: typing.Annotated[int, pydantic.Field(ge=1)]
    parts: tuple[
        tuple[typing.Annotated[int, pydantic.Field(ge=1)], Sha256], ...
    ] = ()  # of the archive; () is one
    unpacked_bytes: typing.Annotated[int, pydantic.Field(ge=1)]
    python: typing.Annotated[str, pydantic.Field(pattern=r"^(3\.[0-9]{1,2})?$")]
    torch: typing.Annotated[str, pydantic.Field(pattern=r"^[0-9A-Za-z.+_-]{1,64}$")]
    build: typing.Literal["cpu", "cuda"]
    created: typing.Annotated[str, pydantic.Field(pattern=r"^[0-9TZ:-]{1,32}$")]
    name: typing.Annotated[str, pydantic.Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")] = (
        ""  # a user's own
    )
    requirements: typing.Annotated[str, pydantic.Field(pattern=r"^([0-9a-f]{64})?$")] = (
        ""  # hash of the user's own
    )
    digest: typing.Annotated[str, pydantic.Field(pattern=r"^(sha256:[0-9a-f]{64})?$")] = (
        ""  # of a container image
    )
    source: typing.Annotated[str, pydantic.Field(pattern=r"^[!-~]{0,512}$")] = (
        ""  # that it was imported from
    )
    base: typing.Annotated[str, pydantic.Field(pattern=r"^([0-9a-f]{16})?$")] = (
        ""  # a layer's: the hash of `below`
    )
    folder: typing.Annotated[str, pydantic.Field(exclude=True)] = (
        ""  # that it lies in; not in its file
    )
    below: typing.Annotated["Manifest | None", pydantic.Field(exclude=True)] = (
        None  # if it is stored
    )

    @property
    def archive(self) -> str:
        """Return the archive's path."""
        return f"{self.folder}/{self.hash}.tar.zst"


NODE_DISK = pathlib.Path("/var/tmp")  # noqa: S108 - owner and mode of files below are checked


@dataclasses.dataclass(frozen=True)
class Contents:
    """Environments and datasets in the workspace, and its free space."""

    environments: tuple[Manifest, ...]  # the newest first
    datasets: dict[str, str]  # the path of each by its name
    is_writable: bool
    free_bytes: int = 0
    free_files: int = 0
    untrusted: str = ""  # the folder whose content others can replace, and what to type
    images: tuple[Manifest, ...] = ()  # the environments that are container images


@dataclasses.dataclass(frozen=True)
class Workspace:
    """The folder on the shared filesystem as one account uses it.

    Its methods raise WorkspaceError.
    """

    path: pathlib.Path
    user: str  # the account of this process, which owns its runs and submits the jobs
    uid: int
    account: str = ""  # the trainer's, whose environments and datasets all share; empty: none
    unit: str = ""  # the trainer's, which mounts the path on its machine; empty without charms
    deadline_s: float = 30  # of an operation that names no other
    node_disk: pathlib.Path = NODE_DISK  # a folder on each node's own disk, open to all accounts
    claims: locks.Claims = dataclasses.field(
        default_factory=locks.Claims, repr=False, compare=False
    )

    @property
    def folder(self) -> pathlib.Path:
        """The folder of this user's own runs, datasets and environments."""
        is_shared = self.account in ("", self.user)
        return self.path if is_shared else self.path / operations.USERS / self.user

    @property
    def folders(self) -> tuple[pathlib.Path, ...]:
        """The folders whose datasets and environments this user uses, the own first."""
        return tuple(dict.fromkeys((self.folder, self.path)))

    @property
    def runs(self) -> pathlib.Path:
        """The folder of the runs."""
        return self.folder / "runs"

    @property
    def datasets(self) -> pathlib.Path:
        """The folder of the user's own datasets."""
        return self.folder / "datasets"

    @property
    def environments(self) -> pathlib.Path:
        """The folder of the user's own environments' archives."""
        return self.folder / "environments"

    @property
    def baselines(self) -> pathlib.Path:
        """The folder of this user's measurements of the cluster."""
        return self.folder / "baselines"

    @property
    def node_cache(self) -> pathlib.Path:
        """The folder on each node's own disk that the user's environments are unpacked to."""
        return self.node_disk / f"slurm-ddp-{self.uid}"

    @property
    def host_cache(self) -> pathlib.Path:
        """The folder on this host's own disk that environments are built in.

        A login host may lack the nodes' disk.
        """
        if self.node_cache.parent.is_dir():
            return self.node_cache
        return NODE_DISK / f"slurm-ddp-{self.uid}"

    def do(
        self,
        operation: collections.abc.Callable[..., T],
        *,
        timeout_s: float | None = None,
        **arguments: object,
    ) -> T:
        """Do an operation in a thread, which is abandoned if the filesystem hangs."""
        limit_s = self.deadline_s if timeout_s is None else timeout_s
        try:
            return storage.within(functools.partial(operation, **arguments), limit_s)
        except TimeoutError as e:
            hint = "is the filesystem's server up?"
            raise HangingError(f"{self.path} gave no answer within {limit_s:g} s; {hint}") from e
        except OSError as e:
            kind = MissingError if e.errno in (errno.ENOENT, errno.ENOTDIR) else WorkspaceError
            raise kind(f"{e.filename or 'workspace'}: {e.strerror or e}") from e
        except (files.RefusedError, subprocess.SubprocessError) as e:
            raise WorkspaceError(str(e)) from e

    def trusted(self) -> list[int]:
        """Return the accounts whose files this user's jobs may run."""
        uids = {0, self.uid}
        with contextlib.suppress(KeyError):
            uids.add(pwd.getpwnam(self.account).pw_uid)
        return sorted(uids)

    def ensure_folders(self, names: tuple[str, ...] = FOLDERS) -> None:
        """Make this user's folders."""
        if self.folder != self.path:
            self.do(operations.own_folder, path=str(self.folder))
        elif not self.unit:
            self.do(operations.make_workspace, path=str(self.path))

        place = str(self.folder)
        made = self.do(
            operations.make_folders, workspace=place, names=names, trusted=self.trusted()
        )
        if made.untrusted:
            raise WorkspaceError(made.untrusted)
        if made.denied:
            folder = self.folder / made.denied[0]
            hint = f"as root, on the filesystem's server or here: chown {self.user} {folder}"
            raise WorkspaceError(f"{self.user} cannot write {folder}; {hint}")

    def ensure_shared_folders(self) -> operations.Obstacles:
        """Make the folders that all users share; return the obstacles."""
        place = str(self.path)
        self.do(operations.make_users, workspace=place)
        return self.do(
            operations.make_folders, workspace=place, names=FOLDERS, trusted=self.trusted()
        )

    def check_own(self) -> None:
        """Raise WorkspaceError if another account made the folder of this user's name."""
        if self.folder != self.path:
            self.do(operations.check_own, path=str(self.folder))

    def look(self, *, timeout_s: float = 10) -> Contents:
        """List the environments, images and datasets of the user and of all users."""
        listed = [self._look_at(folder, timeout_s) for folder in self.folders]
        manifests: list[Manifest] = []
        datasets: dict[str, str] = {}
        for folder, held in zip(self.folders, listed, strict=True):
            manifests += _manifests(folder, held.environments)
            for name in held.datasets:
                datasets.setdefault(name, str(folder / "datasets" / name))

        by_hash = {one.hash: one for one in manifests}
        manifests = [one.model_copy(update={"below": by_hash.get(one.base)}) for one in manifests]
        manifests.sort(key=lambda manifest: manifest.created, reverse=True)
        own = listed[0]
        return Contents(
            environments=tuple(one for one in manifests if not one.digest),
            datasets=datasets,
            is_writable=own.is_writable,
            free_bytes=own.free_bytes,
            free_files=own.free_files,
            untrusted=next((held.untrusted for held in listed if held.untrusted), ""),
            images=tuple(one for one in manifests if one.digest),
        )

    def _look_at(self, folder: pathlib.Path, timeout_s: float) -> operations.Held:
        return self.do(
            operations.look,
            timeout_s=timeout_s,
            workspace=str(folder),
            names=FOLDERS,
            trusted=self.trusted(),
        )

    def locate(self, path: str) -> operations.Place:
        """Resolve all links of `path`."""
        return self.do(operations.locate, workspace=str(self.path), path=path)

    def has_checkpoint(self, run: str) -> bool:
        """Return whether a run has a checkpoint to go on from."""
        return self.do(operations.has_checkpoint, run_dir=str(self.runs / run))

    def read_json(self, path: str) -> small_files.Json:
        """Return the object in a file."""
        return self.do(operations.read_json, path=path)


def _manifests(
    folder: pathlib.Path, found: collections.abc.Iterable[small_files.Json]
) -> collections.abc.Iterator[Manifest]:
    """Parse the manifests of a folder; skip files that ddp did not write."""
    for held in found:
        about = {**held, "folder": str(folder / "environments"), "below": None}
        with contextlib.suppress(pydantic.ValidationError):
            yield Manifest.model_validate(about)
