"""Errors, results, settings and progress reports that all modules of the program share."""

import collections.abc
import concurrent.futures
import dataclasses
import pathlib
import time
import typing

from ddp.problem import Problem, Remedy, Render, Results, one_line, plain
from ddp.view import tables
from ddp.view.result import Result
from ddp.workspace.locks import Claims
from ddp.workspace.waits import Wait

__all__ = ["Results", "one_line"]  # and all that is defined here

Log = collections.abc.Callable[[str], None]
REPORT_S = 4.0  # between two lines of progress

USERS = "users"  # in the workspace: a folder for each user but the trainer's account

T = typing.TypeVar("T")
TrainerError = Problem


class ParameterError(TrainerError):
    """An option is rejected; the message begins with its name."""

    def __init__(self, name: str, message: str, *, remedy: Remedy | None = None) -> None:
        super().__init__(f"{name}: {message}", remedy=remedy)
        self.name = name


class UnfinishedError(Exception):
    """A command ends before its job does, and has not failed; `results` are the command's."""

    def __init__(self, results: Results) -> None:
        super().__init__("the job goes on")
        self.results = results


Answer = Result | Results


def texts_of(answer: Answer) -> Results:
    """Give the results as an action returns them."""
    return answer.texts() if isinstance(answer, Result) else answer


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of every command."""

    unit: str  # the trainer's unit, for the commands that an operator types; empty on a cluster without charms
    workspace: pathlib.Path  # the folder on the shared filesystem
    user: str  # the account that this process runs as, which owns its runs and submits the jobs
    uid: int
    gid: int
    payload: pathlib.Path  # the program of the jobs: the package ddptrain and its locked requirements
    torch_build: str  # auto, cpu or cuda
    torch_index: str  # an additional package index for torch; may be empty
    mlflow_uri: str = ""  # a server's URI, or a path; empty: no MLflow
    tensorboard: bool = False
    wandb: bool = False
    transformers: bool = False  # whether the environment holds it, for fine-tuning
    account: str = ""  # the trainer's account, whose environments and datasets all users share; empty: none
    wheelhouse: pathlib.Path | None = None  # the wheels that the operator attached to the charm
    token: str = dataclasses.field(default="", repr=False)  # Hugging Face's; empty: jobs get none
    takes_any_script: bool = False  # a user's own command runs scripts from outside the workspace, too
    claims: Claims = dataclasses.field(default_factory=Claims, repr=False, compare=False)
    wait: Wait = dataclasses.field(default_factory=Wait, repr=False, compare=False)
    render: Render = dataclasses.field(default=plain, repr=False, compare=False)  # remedies in the front end's words

    @property
    def extras(self) -> tuple[str, ...]:
        """The payload's folders whose locked packages are installed in addition."""
        wanted = {"tracking": bool(self.mlflow_uri) or self.tensorboard or self.wandb, "tuning": self.transformers}
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def folder(self) -> pathlib.Path:
        """The folder of this user's own runs, datasets and environments."""
        is_shared = self.account in ("", self.user)
        return self.workspace if is_shared else self.workspace / USERS / self.user

    @property
    def folders(self) -> tuple[pathlib.Path, ...]:
        """The folders whose datasets and environments this user uses, the own first."""
        return tuple(dict.fromkeys((self.folder, self.workspace)))

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
        """The folder on each node's own disk to which the user's environments are unpacked."""
        return pathlib.Path(f"/var/tmp/slurm-ddp-{self.uid}")  # noqa: S108 - owner and mode are checked before use


def ahead(work: collections.abc.Callable[[], T]) -> concurrent.futures.Future[T]:
    """Start work now in a thread."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def shown(value: object, limit: int = 60) -> str:
    """Quote a value for a message, printable and short."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[: limit - 8]}...{text[-5:]}"


def with_progress(log: Log, text: str, work: collections.abc.Callable[[], T]) -> T:
    """Return `work()`, done in a thread, and log every few seconds that it goes on."""
    log(tables.Step(text, text))
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while True:
            try:
                return future.result(timeout=REPORT_S)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                log(tables.Step(f"{text}: {time.monotonic() - began:.0f} s", text))
