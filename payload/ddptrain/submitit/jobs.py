"""Jobs with submitit's methods: runs of ddp, and processes of this host."""

import asyncio
import collections.abc
import dataclasses
import pathlib
import subprocess
import sys
import traceback
import typing

from ddptrain.functions import calls, errors, jobs

R = typing.TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Paths:
    """The files of a job."""

    folder: pathlib.Path
    stdout: pathlib.Path
    stderr: pathlib.Path
    submitted_pickle: pathlib.Path


class Job(jobs.Job[R]):
    """A job of an executor; `result()` raises FailedJobError, caused by the rank's exception."""

    num_tasks = 1

    def result(self, timeout: float | None = None) -> R:
        """Wait for the job's end and return rank 0's result.

        Raises FailedJobError or UncompletedJobError.
        """
        return self.results(timeout)[0]

    def exception(self, timeout: float | None = None) -> errors.UncompletedJobError | None:
        """Wait for the job's end; return its failure with the first failed rank's trace.

        None if it succeeded.
        """
        found = super().exception(timeout)
        if found is None or isinstance(found, errors.UncompletedJobError):
            return found
        wrapped = errors.FailedJobError(f"{self.run} failed with trace:\n{found.__cause__}")
        wrapped.__cause__ = found
        return wrapped

    @property
    def paths(self) -> Paths:
        """The files of the job."""
        log = self.folder / "logs" / f"{self.job_id.partition('_')[0]}.out"
        return Paths(self.folder, log, log, self.folder / calls.FILE)

    def stdout(self) -> str | None:
        """Return the last lines of the log, with all ranks' outputs, or None before it exists."""
        try:
            return self.log()
        except errors.FunctionError:
            return None

    def stderr(self) -> str | None:
        """Return the same as `stdout`: a job of ddp has one log."""
        return self.stdout()

    def task(self, task_id: int) -> "Task[R]":
        """Return one rank of the job."""
        if not 0 <= task_id < self.num_tasks:
            raise ValueError(f"task_id {task_id} must be between 0 and {self.num_tasks - 1}")
        return Task(self, task_id)

    def done(self, force_check: bool = False) -> bool:
        """Return whether it has ended; with `force_check`, Slurm is asked now."""
        if force_check:
            self.watch.state(self.run, is_now=True)
        return super().done()

    def cancel(self, check: bool = True) -> None:
        """Cancel it; without `check`, a failure to do so is not raised."""
        try:
            super().cancel()
        except errors.FunctionError:
            if check:
                raise

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return the job's state."""
        del mode
        return {"JobID": self.job_id, "State": self.state}

    def awaitable(self) -> "Awaitable[R]":
        """Return the job with methods to await."""
        return Awaitable(self)

    def cancel_at_deletion(self, value: bool = True) -> "Job[R]":
        """Cancel the job when this object is deleted, as when its program ends."""
        self._cancels = value
        return self

    _cancels = False

    def __del__(self) -> None:
        if self._cancels:
            self.cancel()


class SlurmJob(Job[R]):
    """A run of ddp."""


@dataclasses.dataclass(frozen=True)
class Task(typing.Generic[R]):
    """One rank of a job."""

    job: Job[R]
    task_id: int

    def result(self) -> R:
        """Wait for the job's end and return this rank's result. Raises FailedJobError."""
        return self.job.results()[self.task_id]

    def done(self, force_check: bool = False) -> bool:
        """Return whether the job has ended."""
        return self.job.done(force_check)

    def stdout(self) -> str | None:
        """Return the last lines of this rank's output; None before it exists."""
        try:
            return self.job.log(rank=self.task_id)
        except errors.FunctionError:
            return None

    stderr = stdout


@dataclasses.dataclass(frozen=True)
class Awaitable(typing.Generic[R]):
    """A job's methods for asyncio."""

    job: Job[R]

    async def wait(self, poll_interval: float = 1) -> None:
        """Wait for the job's end."""
        await self.job.ended(poll_interval)

    async def result(self, poll_interval: float = 1) -> R:
        """Return rank 0's result. Raises FailedJobError."""
        await self.wait(poll_interval)
        return await asyncio.to_thread(self.job.result)

    async def results(self, poll_interval: float = 1) -> list[R]:
        """Return the results of all ranks. Raises FailedJobError."""
        await self.wait(poll_interval)
        return await asyncio.to_thread(self.job.results)


class LocalJob(Job[R]):
    """Processes of this host, one for each rank."""

    def __init__(
        self, folder: pathlib.Path, ranks: list["subprocess.Popen[bytes]"], run: str
    ) -> None:
        super().__init__(run, folder, str(ranks[0].pid))
        self._ranks = ranks

    @property
    def state(self) -> str:
        """Its state in Slurm's words."""
        codes = [rank.poll() for rank in self._ranks]
        if None in codes:
            return "RUNNING"
        return "COMPLETED" if not any(codes) else "FAILED"

    def done(self, force_check: bool = False) -> bool:
        """Return whether all processes have ended."""
        del force_check
        self._read()
        return self.state != "RUNNING"

    def _explain(self) -> dict[str, typing.Any]:
        self._read()
        codes = [rank.wait() for rank in self._ranks]
        killed = next((number for number, code in enumerate(codes) if code < 0), None)
        reason = "" if killed is None else f"rank {killed} was ended by signal {-codes[killed]}"
        return {"state": self.state, "failed_rank": killed, "reason": reason}

    def log(self, rank: int | None = None, lines: int = 1000) -> str:
        """Return the last lines of the processes' output."""
        chosen = range(len(self._ranks)) if rank is None else [rank]
        found: list[str] = []
        for number in chosen:
            found += (self.folder / f"{number}.log").read_text(errors="replace").splitlines()
        return "\n".join(found[-lines:])

    def cancel(self, check: bool = True) -> None:
        """End the processes."""
        del check
        for rank in self._ranks:
            rank.terminate()


class DebugJob(Job[R]):
    """A call in this process, made when its result is asked for; a failure starts the debugger."""

    def __init__(self, call: calls.Call, folder: pathlib.Path) -> None:
        super().__init__(f"DEBUG_{id(call)}", folder, f"DEBUG_{id(call)}")
        self._call = call
        self._found: list[R] = []
        self._is_cancelled = False

    @property
    def state(self) -> str:
        """Its state, in submitit's words."""
        if self._found:
            return "DONE"
        return "CANCELLED" if self._is_cancelled else "QUEUED"

    def done(self, force_check: bool = False) -> bool:
        """Call the function, so that it has ended."""
        del force_check
        self.results()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Call the function."""
        del timeout  # the call runs here
        self.results()

    def results(self, timeout: float | None = None) -> list[R]:
        """Call the function and return its result; its exception is raised as it is."""
        del timeout
        if self._is_cancelled:
            raise errors.UncompletedJobError(f"{self.run} was cancelled")
        if not self._found:
            try:
                self._found.append(self._call())
            except Exception:
                traceback.print_exc()
                if sys.stdin.isatty():
                    import pdb

                    pdb.post_mortem()
                raise
        return self._found

    def exception(self, timeout: float | None = None) -> typing.Any:
        """Call the function and return its exception; None if it has none."""
        try:
            self.results(timeout)
        except Exception as e:  # the function's
            return e
        return None

    def log(self, rank: int | None = None, lines: int = 1000) -> str:
        """Return "": the output is on this terminal."""
        del rank, lines
        return ""

    def cancel(self, check: bool = True) -> None:
        """Never call the function."""
        del check
        self._is_cancelled = True


def as_completed(
    given: collections.abc.Iterable[jobs.Job[R]],
    timeout: float | None = None,
    poll_frequency: float = 1,
) -> collections.abc.Iterator[jobs.Job[R]]:
    """Yield jobs as they end. Raises TimeoutError after `timeout` seconds."""
    import time

    began = time.monotonic()
    left = list(given)
    while left:
        ended = [job for job in left if job.done()]
        yield from ended
        left = [job for job in left if job not in ended]
        if timeout is not None and time.monotonic() - began > timeout:
            raise TimeoutError(f"{len(left)} jobs have not ended after {timeout:g} s")
        if left:
            time.sleep(poll_frequency)
