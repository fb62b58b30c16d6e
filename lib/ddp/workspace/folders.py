"""The user's folders on the shared filesystem; each access has a deadline."""

import collections.abc
import contextlib
import dataclasses
import errno
import functools
import pwd
import subprocess
import typing

import pydantic

from ddp.host import files
from ddp.node import storage
from ddp.problem import Problem
from ddp.settings import Settings
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
    """The file beside an environment's archive; each field has an alphabet, since the file belongs to a user."""

    key: typing.Annotated[
        str, pydantic.Field(pattern=r"^[0-9a-f]{16}$")
    ]  # of what it was made from
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


def call(
    settings: Settings,
    operation: collections.abc.Callable[..., T],
    *,
    timeout_s: float = 30,
    **arguments: object,
) -> T:
    """Do an operation on the shared filesystem, in a thread that is abandoned where it hangs. Raises WorkspaceError."""
    try:
        return storage.within(functools.partial(operation, **arguments), timeout_s)
    except TimeoutError as e:
        hint = "is the filesystem's server up?"
        raise HangingError(
            f"{settings.workspace} gave no answer within {timeout_s:g} s; {hint}"
        ) from e
    except OSError as e:
        kind = MissingError if e.errno in (errno.ENOENT, errno.ENOTDIR) else WorkspaceError
        raise kind(f"{e.filename or 'workspace'}: {e.strerror or e}") from e
    except (files.RefusedError, subprocess.SubprocessError) as e:
        raise WorkspaceError(str(e)) from e


def ensure_folders(settings: Settings, names: tuple[str, ...] = FOLDERS) -> None:
    """Make this user's folders in the workspace. Raises WorkspaceError."""
    if settings.folder != settings.workspace:
        call(settings, operations.own_folder, path=str(settings.folder))
    elif not settings.unit:  # a charm's is a mount
        call(settings, operations.make_workspace, path=str(settings.workspace))
    place = str(settings.folder)
    made = call(
        settings, operations.make_folders, workspace=place, names=names, trusted=trusted(settings)
    )
    if made["untrusted"]:
        raise WorkspaceError(made["untrusted"])
    if made["denied"]:
        folder = settings.folder / made["denied"][0]
        hint = f"as root, on the filesystem's server or here: chown {settings.user} {folder}"
        raise WorkspaceError(f"{settings.user} cannot write {folder}; {hint}")


def check_own(settings: Settings) -> None:
    """Raise WorkspaceError if another account made the folder of this user's name."""
    if settings.folder != settings.workspace:
        call(settings, operations.check_own, path=str(settings.folder))


def look(settings: Settings, *, timeout_s: float = 10) -> Contents:
    """List the user's folder and what the workspace holds for all users. Raises WorkspaceError."""
    manifests: list[Manifest] = []
    datasets: dict[str, str] = {}
    ask = functools.partial(call, settings, operations.look, timeout_s=timeout_s, names=FOLDERS)
    listed = [ask(workspace=str(folder), trusted=trusted(settings)) for folder in settings.folders]
    for folder, held in zip(settings.folders, listed, strict=True):
        for found in held["environments"]:
            with contextlib.suppress(pydantic.ValidationError):  # not written by ddp
                about = {**found, "folder": str(folder / "environments"), "below": None}
                manifests.append(Manifest.model_validate(about))
        for name in held["datasets"]:
            datasets.setdefault(name, str(folder / "datasets" / name))
    by_hash = {one.hash: one for one in manifests}
    manifests = [one.model_copy(update={"below": by_hash.get(one.base)}) for one in manifests]
    manifests.sort(key=lambda manifest: manifest.created, reverse=True)
    own = listed[0]
    untrusted = next((str(held["untrusted"]) for held in listed if held["untrusted"]), "")
    room = own["free_bytes"], own["free_files"]
    images = tuple(one for one in manifests if one.digest)
    environments = tuple(one for one in manifests if not one.digest)
    return Contents(
        environments, datasets, bool(own["writable"]), *room, untrusted=untrusted, images=images
    )


def trusted(settings: Settings) -> list[int]:
    """Return the accounts that may own what this user's jobs run: root, the user, and the trainer's."""
    uids = {0, settings.uid}
    with contextlib.suppress(KeyError):
        uids.add(pwd.getpwnam(settings.account).pw_uid)
    return sorted(uids)


def locate(settings: Settings, path: str) -> operations.Place:
    """Resolve all links of `path`. Raises WorkspaceError."""
    return call(settings, operations.locate, workspace=str(settings.workspace), path=path)
