"""The workspace on the shared filesystem, reached through children with the submit user's rights and a deadline."""

import collections.abc
import contextlib
import dataclasses
import functools
import json
import pathlib
import threading
import typing

import pydantic

from ddp.node import explain
from slurm_ddp.run import CommandError, CommandTimeout, Dialogue, run
from trainer_base import Settings, TrainerError

PYTHON = "/usr/bin/python3"
FOLDERS = ("runs", "datasets", "environments", "baselines")
_CHILD = ("logs", "base", "runs", "environments")  # each after those that it imports

_LOADER = """
import sys, types
for name, text in texts.items():
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(text, name, "exec"), vars(module))
"""

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


@dataclasses.dataclass(frozen=True)
class Contents:
    """What the workspace holds."""

    environments: tuple[Manifest, ...]  # the newest first
    datasets: tuple[str, ...]
    is_writable: bool
    free_bytes: int = 0
    free_files: int = 0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a path leads."""

    kind: str  # file, folder, absent or other
    real: str
    is_inside: bool  # the workspace
    is_readable: bool


def ask(
    settings: Settings, operation: str, *, timeout_s: float = 30, as_root: bool = False, **arguments: object
) -> Json:
    """Run one of trainer_child's operations as the submit user. Raises WorkspaceError."""
    request = json.dumps({"operation": operation, "arguments": arguments})
    user = None if as_root else settings.user_to_be
    try:
        told = None if as_root else settings.converse(request, timeout_s)
        if told is None:
            told = run(*command(), stdin=request, user=user, cwd="/", timeout=timeout_s).stdout
    except CommandTimeout:
        raise HangingError(
            f"{settings.workspace} gave no answer within {timeout_s:g} s; is the filesystem's server up?"
        ) from None
    except CommandError as e:
        raise WorkspaceError(f"{operation} in {settings.workspace}: {e}") from e
    answer: Json = json.loads(told)
    if "error" in answer:
        raise (MissingError if answer["kind"] in ("ENOENT", "ENOTDIR") else WorkspaceError)(answer["error"])
    return answer["ok"]


@contextlib.contextmanager
def session(settings: Settings) -> collections.abc.Generator[Settings]:
    """Yield settings with which one child answers all requests, where else each starts one of its own.

    It starts now, while the caller still looks whether the filesystem answers; until it is asked it touches nothing.
    """
    child = _Child(settings.user_to_be)
    child.begin()
    try:
        yield dataclasses.replace(settings, converse=child.converse)
    finally:
        child.close()


class _Child:
    """A child, started again with a request that comes after its end."""

    def __init__(self, user: str | None) -> None:
        self._user = user
        self._lock = threading.Lock()
        self._dialogue: Dialogue | None = None

    def begin(self) -> None:
        """Start the child; where that fails, the first request tells."""
        with contextlib.suppress(CommandError):
            self._dialogue = Dialogue(*command(), user=self._user)

    def converse(self, request: str, timeout_s: float) -> str | None:
        """Return the answer; None while another thread asks. Raises CommandError."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._dialogue is None or self._dialogue.is_over:
                self._dialogue = Dialogue(*command(), user=self._user)
            return self._dialogue.ask(request, timeout=timeout_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the child."""
        if self._dialogue is not None:
            self._dialogue.close()


@functools.cache
def command() -> tuple[str, ...]:
    """Return the child's command line: its modules' texts, since their files lie where only root may read."""
    main = pathlib.Path(__file__).with_name("trainer_child.py")
    texts = {"ddp": "", "ddp.node": "", "ddp.node.explain": pathlib.Path(explain.__file__).read_text()}
    texts |= {f"{main.stem}_{part}": main.with_name(f"{main.stem}_{part}.py").read_text() for part in _CHILD}
    return PYTHON, "-I", "-c", f"texts = {texts!r}\n{_LOADER}\n{main.read_text()}"


def ensure_folders(settings: Settings, names: tuple[str, ...] = FOLDERS) -> None:
    """Make the workspace's folders, which belong to the submit user. Raises WorkspaceError with what to do about it."""
    place = str(settings.workspace)
    denied = ask(settings, "make_folders", workspace=place, names=names)["denied"]
    if not denied:
        return
    hint = f"as root, on the filesystem's server or here: chown {settings.user}"
    try:
        ask(settings, "hand_over", as_root=True, workspace=place, names=denied, uid=settings.uid, gid=settings.gid)
    except WorkspaceError as e:
        raise WorkspaceError(
            f"{settings.user} cannot write {place}/{denied[0]}: {e}; {hint} {place}/{denied[0]}"
        ) from e
    still = ask(settings, "make_folders", workspace=place, names=names)["denied"]
    if still:
        raise WorkspaceError(f"{settings.user} cannot write {place}/{still[0]}; {hint} {place}/{still[0]}")


def look(settings: Settings, *, timeout_s: float = 10) -> Contents:
    """Return what the workspace holds. Raises WorkspaceError."""
    answer = ask(settings, "look", timeout_s=timeout_s, workspace=str(settings.workspace))
    manifests: list[Manifest] = []
    for found in answer["environments"]:
        try:
            manifests.append(Manifest.model_validate(found))
        except pydantic.ValidationError:
            continue  # not one of ours
    manifests.sort(key=lambda manifest: manifest.created, reverse=True)
    free = answer["free_bytes"], answer["free_files"]
    return Contents(tuple(manifests), tuple(answer["datasets"]), bool(answer["writable"]), *free)


def locate(settings: Settings, path: str) -> Place:
    """Return where `path` leads, with all links followed. Raises WorkspaceError."""
    answer = ask(settings, "locate", workspace=str(settings.workspace), path=path)
    return Place(answer["kind"], answer["real"], answer["inside"], answer["readable"])
