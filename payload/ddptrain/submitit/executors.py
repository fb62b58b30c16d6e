"""submitit's executors, with ddp, here, or in this process: `submit`, `map_array` and so on."""

import abc
import collections.abc
import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import typing
import warnings

from ddptrain.functions import calls, submission
from ddptrain.functions import jobs as runs
from ddptrain.functions import options as named
from ddptrain.submitit import jobs, parameters

R = typing.TypeVar("R")


class Executor(abc.ABC):
    """The base of executors. `folder` is submitit's, for its files; a run of ddp has its own."""

    def __init__(self, folder: str | pathlib.Path = ".", **given: typing.Any) -> None:
        self.folder = pathlib.Path(folder).expanduser().absolute()
        self.parameters: parameters.Parameters = {}
        self._batch: list[tuple[jobs.Job[typing.Any], calls.Call]] | None = None
        self.update_parameters(**given)

    def update_parameters(self, **given: typing.Any) -> None:
        """Set parameters of later jobs. Raises ValueError for one that is unknown."""
        if self._batch is not None:
            raise RuntimeError('parameters cannot change within "with executor.batch()"')
        parameters.check(given)
        self.parameters.update(given)

    def submit(
        self, fn: "collections.abc.Callable[..., R]", *args: typing.Any, **kwargs: typing.Any
    ) -> jobs.Job[R]:
        """Submit a call; within `batch()` it is submitted at the end."""
        call = calls.Call(fn, args, kwargs)
        if self._batch is None:
            return self._submit([call])[0]
        job: jobs.Job[R] = _Delayed()
        self._batch.append((job, call))
        return job

    def map_array(
        self,
        fn: "collections.abc.Callable[..., R]",
        *iterable: collections.abc.Iterable[typing.Any],
    ) -> list[jobs.Job[R]]:
        """Submit a function for arguments that are walked side by side, as an array of jobs."""
        return self._submit_some([calls.Call(fn, args) for args in zip(*iterable)])  # noqa: B905

    def submit_array(
        self, fns: collections.abc.Iterable["collections.abc.Callable[[], R]"]
    ) -> list[jobs.Job[R]]:
        """Submit functions without arguments, as an array of jobs."""
        return self._submit_some([calls.Call(fn) for fn in fns])

    @contextlib.contextmanager
    def batch(self, allow_implicit_submissions: bool = False) -> collections.abc.Generator[None]:
        """Submit the block's functions as an array of jobs, when it ends without an error."""
        del allow_implicit_submissions  # a job is known once the block has ended
        if self._batch is not None:
            raise RuntimeError('"with executor.batch()" cannot be nested')
        self._batch = []
        try:
            yield
            delayed = self._batch
        finally:
            self._batch = None
        if not delayed:
            warnings.warn(
                'no submission within "with executor.batch()"', RuntimeWarning, stacklevel=3
            )
            return
        submitted = self._submit([call for _, call in delayed])
        for (job, _), real in zip(delayed, submitted, strict=True):
            job.__class__ = real.__class__
            job.__dict__.update(real.__dict__)

    def _submit_some(self, many: list[calls.Call]) -> list[jobs.Job[typing.Any]]:
        if not many:
            warnings.warn("an empty array of jobs", stacklevel=3)
            return []
        return self._submit(many)

    @abc.abstractmethod
    def _submit(self, many: list[calls.Call]) -> list[jobs.Job[typing.Any]]:
        """Submit calls as one array of jobs."""


class _Delayed(jobs.Job[typing.Any]):
    """A job of a batch that has not been submitted."""

    def __init__(self) -> None:  # it becomes another job
        pass

    def __getattr__(self, name: str) -> typing.NoReturn:
        raise AttributeError(f'{name} is known after the block "with executor.batch()"')


class SlurmExecutor(Executor):
    """Submits runs of ddp."""

    def __init__(
        self, folder: str | pathlib.Path = ".", python: str | None = None, **given: typing.Any
    ) -> None:
        self.python = python
        super().__init__(folder, **given)

    def _submit(self, many: list[calls.Call]) -> list[jobs.Job[typing.Any]]:
        options = self._options()
        label = parameters.label(self.parameters)
        if len(many) == 1:
            found = [submission.submit_one(many[0], options, label)]
        else:
            found = submission.submit_many(many, options, label)
        return [_with_methods(job, options) for job in found]

    def _options(self) -> named.Options:
        options = parameters.options(self.parameters)
        if self.python:
            options["python"] = self.python
        return options


class LocalExecutor(Executor):
    """Starts processes on this host: `tasks_per_node` ranks for each call."""

    def _submit(self, many: list[calls.Call]) -> list[jobs.Job[typing.Any]]:
        return [self._start(call) for call in many]

    def _start(self, call: calls.Call) -> jobs.LocalJob[typing.Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{call.name}-", dir=self.folder))
        calls.write(folder / calls.FILE, [call])
        world = parameters.options(self.parameters)["ranks_per_node"]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(world):
            ranks.append(_start_rank(folder, rank, world, port))
        return jobs.LocalJob(folder, ranks, folder.name)


class DebugExecutor(Executor):
    """Calls functions in this process, once their results are asked for."""

    def _submit(self, many: list[calls.Call]) -> list[jobs.Job[typing.Any]]:
        return [jobs.DebugJob(call, self.folder) for call in many]


class AutoExecutor(Executor):
    """Submits with ddp if it is installed, or starts processes here.

    `cluster` is slurm, local or debug.
    """

    def __init__(
        self, folder: str | pathlib.Path = ".", cluster: str | None = None, **given: typing.Any
    ) -> None:
        kinds: dict[str, type[Executor]] = {
            "slurm": SlurmExecutor,
            "local": LocalExecutor,
            "debug": DebugExecutor,
        }
        self.cluster = cluster or self.which()
        if self.cluster not in kinds:
            raise ValueError(f"no executor {self.cluster!r}; there are: {', '.join(kinds)}")
        python = given.pop("slurm_python", None)
        self._inner = kinds[self.cluster](folder)
        if isinstance(self._inner, SlurmExecutor):
            self._inner.python = python
        super().__init__(folder, **given)

    @staticmethod
    def which() -> str:
        """Return the executor for this host."""
        has_slurm = shutil.which("ddp") is not None and shutil.which("sbatch") is not None
        return "slurm" if has_slurm else "local"

    def _submit(self, many: list[calls.Call]) -> list[jobs.Job[typing.Any]]:
        self._inner.parameters = self.parameters
        return self._inner._submit(many)


def _with_methods(job: runs.Job[typing.Any], options: named.Options) -> jobs.SlurmJob[typing.Any]:
    """Return a run as a job with submitit's methods."""
    found: jobs.SlurmJob[typing.Any] = jobs.SlurmJob(job.run, job.folder, job.job_id, job.watch)
    found.num_tasks = int(options["nodes"]) * int(options["ranks_per_node"])
    return found


def _start_rank(
    folder: pathlib.Path, rank: int, world: int, port: int
) -> "subprocess.Popen[bytes]":
    """Start a rank with torchrun's variables, and its output in a file."""
    payload = str(pathlib.Path(__file__).parents[2])
    given = os.environ.get("PYTHONPATH")
    env = {
        **os.environ,
        "RUN_DIR": str(folder),
        "JOB_DIR": str(folder),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": f"{given}:{payload}" if given else payload,
    }
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", submission.MODULE],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
        )
