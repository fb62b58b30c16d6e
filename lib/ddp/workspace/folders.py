"""The user's folders on the shared filesystem, reached with a deadline."""

import collections.abc
import contextlib
import dataclasses
import errno
import pwd
import queue
import subprocess
import threading
import typing

import pydantic

from ddp.base import Settings, TrainerError
from ddp.workspace import files, operations

PYTHON = "/usr/bin/python3"
FOLDERS = ("runs", "datasets", "environments", "baselines")
Json = dict[str, typing.Any]


class WorkspaceError(TrainerError):
    """Something in the workspace is not as it must be."""


class MissingError(WorkspaceError):
    """A file or folder is not there."""


class HangingError(WorkspaceError):
    """The filesystem gave no answer in time."""


class Manifest(pydantic.BaseModel, frozen=True):
    """What is written beside an environment's archive; held to an alphabet, since its file belongs to a user."""

    key: typing.Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{16}$")]  # of what it was made from
    hash: typing.Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{16}$")]  # of the archive; names it
    sha256: typing.Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: typing.Annotated[int, pydantic.Field(ge=1)]
    unpacked_bytes: typing.Annotated[int, pydantic.Field(ge=1)]
    python: typing.Annotated[str, pydantic.Field(pattern=r"^3\.[0-9]{1,2}$")]
    torch: typing.Annotated[str, pydantic.Field(pattern=r"^[0-9A-Za-z.+_-]{1,64}$")]
    build: typing.Literal["cpu", "cuda"]
    driverless: bool = False  # a node with GPUs was asked and has no CUDA driver, so `cpu` is right for it
    wheelhouse: typing.Annotated[str, pydantic.Field(pattern=r"^([0-9a-f]{64})?$")] = ""  # of the wheels it is made of
    created: typing.Annotated[str, pydantic.Field(pattern=r"^[0-9TZ:-]{1,32}$")]
    name: typing.Annotated[str, pydantic.Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")] = ""  # a user's own
    requirements: typing.Annotated[str, pydantic.Field(pattern=r"^([0-9a-f]{64})?$")] = (
        ""  # of what the user wanted in it
    )
    folder: typing.Annotated[str, pydantic.Field(exclude=True)] = ""  # that it lies in; not in its file

    @property
    def archive(self) -> str:
        """Return the archive's path."""
        return f"{self.folder}/{self.hash}.tar.zst"


@dataclasses.dataclass(frozen=True)
class Contents:
    """What the workspace holds."""

    environments: tuple[Manifest, ...]  # the newest first
    datasets: dict[str, str]  # the path of each by its name
    is_writable: bool
    free_bytes: int = 0
    free_files: int = 0
    untrusted: str = ""  # the folder whose content others can replace, and what to type


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a path leads."""

    kind: str  # file, folder, absent or other
    real: str
    is_inside: bool  # the workspace
    is_readable: bool


def call(
    settings: Settings,
    operation: collections.abc.Callable[..., Json],
    *,
    timeout_s: float = 30,
    **arguments: object,
) -> Json:
    """Return what an operation on the shared filesystem returns.

    Args:
        settings: names the workspace, for the error.
        operation: works in a thread of its own, which a filesystem that hangs takes with it.
        timeout_s: in seconds.
        arguments: what the operation gets.

    Raises:
        HangingError: it did not end in time.
        MissingError: a file or folder is not there.
        WorkspaceError: it was refused.
    """
    answers: queue.SimpleQueue[tuple[Json, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((operation(**arguments), None))
        except BaseException as e:  # raised where it is waited for
            answers.put(({}, e))

    threading.Thread(target=work, daemon=True).start()
    try:
        answer, error = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise HangingError(
            f"{settings.workspace} gave no answer within {timeout_s:g} s; is the filesystem's server up?"
        ) from None
    if isinstance(error, OSError):
        kind = MissingError if error.errno in (errno.ENOENT, errno.ENOTDIR) else WorkspaceError
        raise kind(f"{error.filename or 'workspace'}: {error.strerror or error}") from error
    if isinstance(error, files.RefusedError | subprocess.SubprocessError):
        raise WorkspaceError(str(error)) from error
    if error is not None:
        raise error
    return answer


def ensure_folders(settings: Settings, names: tuple[str, ...] = FOLDERS) -> None:
    """Make this user's folders in the workspace. Raises WorkspaceError with what to type."""
    if settings.folder != settings.workspace:
        call(settings, operations.own_folder, path=str(settings.folder))
    elif not settings.unit:  # a charm's is a mount
        call(settings, operations.make_workspace, path=str(settings.workspace))
    place = str(settings.folder)
    made = call(settings, operations.make_folders, workspace=place, names=names, trusted=trusted(settings))
    denied = made["denied"]
    if made["untrusted"]:
        raise WorkspaceError(made["untrusted"])
    if denied:
        folder = settings.folder / denied[0]
        hint = f"as root, on the filesystem's server or here: chown {settings.user} {folder}"
        raise WorkspaceError(f"{settings.user} cannot write {folder}; {hint}")


def look(settings: Settings, *, timeout_s: float = 10) -> Contents:
    """Return what the user's folder holds, and what the workspace offers to everybody. Raises WorkspaceError."""
    manifests: list[Manifest] = []
    datasets: dict[str, str] = {}
    answers = [
        call(
            settings,
            operations.look,
            timeout_s=timeout_s,
            workspace=str(folder),
            names=FOLDERS,
            trusted=trusted(settings),
        )
        for folder in settings.folders
    ]
    for folder, answer in zip(settings.folders, answers, strict=True):
        for found in answer["environments"]:
            with contextlib.suppress(pydantic.ValidationError):  # not one of ours
                manifests.append(Manifest.model_validate({**found, "folder": str(folder / "environments")}))
        for name in answer["datasets"]:
            datasets.setdefault(name, str(folder / "datasets" / name))
    manifests.sort(key=lambda manifest: manifest.created, reverse=True)
    own = answers[0]
    open_to_others = next((str(answer["untrusted"]) for answer in answers if answer["untrusted"]), "")
    room = own["free_bytes"], own["free_files"]
    return Contents(tuple(manifests), datasets, bool(own["writable"]), *room, untrusted=open_to_others)


def trusted(settings: Settings) -> list[int]:
    """Return the accounts that may own what this user's jobs run: root, the user, and the trainer's."""
    uids = {0, settings.uid}
    with contextlib.suppress(KeyError):
        uids.add(pwd.getpwnam(settings.account).pw_uid)
    return sorted(uids)


def locate(settings: Settings, path: str) -> Place:
    """Return where `path` leads, with all links followed. Raises WorkspaceError."""
    answer = call(settings, operations.locate, workspace=str(settings.workspace), path=path)
    return Place(answer["kind"], answer["real"], answer["inside"], answer["readable"])
