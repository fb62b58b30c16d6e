"""What the trainer's modules share: how they fail, how they report, and where they work."""

import collections.abc
import concurrent.futures
import dataclasses
import os
import pathlib
import pwd
import time
import typing

from slurm_ddp.slurm import jobs
from trainer_claims import Claims

Log = collections.abc.Callable[[str], None]
Results = dict[str, str]
REPORT_S = 4.0  # between two lines of progress; what is done in between may take 5 s more

T = typing.TypeVar("T")


class TrainerError(Exception):
    """Something a person can mend; `str()` is one line that says what and how. `results` go with a failed action."""

    def __init__(self, message: str, *, results: Results | None = None) -> None:
        super().__init__(one_line(message))
        self.results: Results = results or {}


class ParameterError(TrainerError):
    """A parameter or option cannot be; the message begins with its name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


def _no_child(request: str, timeout_s: float) -> str | None:
    del request, timeout_s


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every action works with, proved to be usable."""

    unit: str  # this unit's name, for the commands that messages tell to type
    workspace: pathlib.Path  # the shared filesystem's folder for datasets, environments and runs
    user: str  # the account that owns what is in the workspace and runs the jobs
    uid: int
    gid: int
    payload: pathlib.Path  # the payload inside the charm
    torch_build: str  # auto, cpu or cuda
    torch_index: str  # an additional package index for torch; may be empty
    mlflow_uri: str = ""  # a server's URI, or a path; empty: no MLflow
    tensorboard: bool = False
    transformers: bool = False  # whether the environment holds it, for fine-tuning
    attached: collections.abc.Callable[[], pathlib.Path | None] = dataclasses.field(
        default=lambda: None, repr=False, compare=False
    )  # fetches the resource wheelhouse; None where there is none
    token: str = dataclasses.field(default="", repr=False)  # Hugging Face's; empty: jobs get none
    listing: collections.abc.Callable[[], tuple[jobs.Partition, ...]] = dataclasses.field(
        default=jobs.partitions, repr=False, compare=False
    )  # Slurm's partitions with their nodes; raises SlurmError
    converse: collections.abc.Callable[[str, float], str | None] = dataclasses.field(
        default=_no_child, repr=False, compare=False
    )  # answers a request within some seconds; None: start a child for it, see trainer_workspace.session
    task: str = dataclasses.field(default="", compare=False)  # the action's number, which juju cancel-task takes
    claims: Claims = dataclasses.field(default_factory=Claims, repr=False, compare=False)

    @property
    def extras(self) -> tuple[str, ...]:
        """Return the payload's folders whose locked packages the environment gets on top."""
        wanted = {"tracking": bool(self.mlflow_uri) or self.tensorboard, "tuning": self.transformers}
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def user_to_be(self) -> str | None:
        """Return the account to change to for a command; None when this process runs as it already (in tests)."""
        return self.user if os.geteuid() == 0 else None

    @property
    def runs(self) -> pathlib.Path:
        """Return the folder of the runs."""
        return self.workspace / "runs"

    @property
    def datasets(self) -> pathlib.Path:
        """Return the folder of the datasets."""
        return self.workspace / "datasets"

    @property
    def environments(self) -> pathlib.Path:
        """Return the folder of the environments' archives."""
        return self.workspace / "environments"

    @property
    def baselines(self) -> pathlib.Path:
        """Return the folder of what was measured on this cluster."""
        return self.workspace / "baselines"

    @property
    def node_cache(self) -> pathlib.Path:
        """Return the folder on each node's own disk where the user's environments are unpacked."""
        return pathlib.Path(f"/var/tmp/slurm-ddp-{self.uid}")  # noqa: S108 - owner and mode are checked before use


class Ahead(typing.Generic[T]):
    """Work that begins now, in a thread; its result, or its error, is for the first call, later ones do it again."""

    def __init__(self, work: collections.abc.Callable[[], T]) -> None:
        self._work = work
        pool = concurrent.futures.ThreadPoolExecutor(1)
        self._begun: concurrent.futures.Future[T] | None = pool.submit(work)
        pool.shutdown(wait=False)

    def __call__(self) -> T:
        """Return what the work returns."""
        begun, self._begun = self._begun, None
        return begun.result() if begun is not None else self._work()


def account(name: str) -> pwd.struct_passwd:
    """Return the account that jobs run as. Raises ParameterError where there is none or it is root's."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise ParameterError(
            "submit-user",
            f"no account {name!r} on this host; it must exist with the same uid here, on slurmctld's "
            f"machine and on every node: useradd -m -u UID {name} there, or name another one",
        ) from None
    if found.pw_uid == 0:
        raise ParameterError("submit-user", f"{name!r} is root; jobs never run as root: name an ordinary account")
    return found


def one_line(text: str, limit: int = 600) -> str:
    """Return `text` on one line, printable, and not longer than `limit` characters."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def shown(value: object, limit: int = 60) -> str:
    """Return how a value is quoted in a message: printable, short."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[: limit - 8]}...{text[-5:]}"


def with_progress(
    log: Log,
    text: str,
    work: collections.abc.Callable[[], T],
    detail: collections.abc.Callable[[], str] = lambda: "",
) -> T:
    """Return `work()`, done in a thread, while telling every few seconds that it goes on."""
    log(text)
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while True:
            try:
                return future.result(timeout=REPORT_S)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                words = detail()
                log(f"{text}: {time.monotonic() - began:.0f} s" + (f", {words}" if words else ""))
