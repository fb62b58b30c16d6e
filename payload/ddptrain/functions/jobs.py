"""A function's job, as its submitter sees it."""

import asyncio
import collections.abc
import pathlib
import time
import typing

from ddptrain.functions import command, errors, outcomes
from ddptrain.functions.watch import Watch

R = typing.TypeVar("R")
POLL_S = 0.5
_FILES_S = 15.0  # for the ranks' files to be seen here, once their job has ended
_MOST_LINES = 1000


class Job(typing.Generic[R]):
    """One run of a function. Awaiting it gives its result."""

    def __init__(
        self, run: str, folder: pathlib.Path, job_id: str = "", watch: Watch | None = None
    ) -> None:
        self.run = run
        self.folder = folder
        self.job_id = job_id
        self.watch = Watch(run) if watch is None else watch
        self._outcomes: dict[int, outcomes.Outcome] = {}
        self._has_ended = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run={self.run!r}, job_id={self.job_id!r})"

    @property
    def state(self) -> str:
        """Its state in Slurm's words, such as RUNNING."""
        return self.watch.state(self.run)

    def done(self) -> bool:
        """Return whether it has ended: all ranks have returned, or Slurm's job is over."""
        if self._has_ended:
            return True
        self._read()
        self._has_ended = self._is_complete() or self.watch.has_ended(self.run)
        return self._has_ended

    def _read(self) -> None:
        """Read the ranks' outcomes so far."""
        self._outcomes = outcomes.read_all(self.folder)

    def _is_complete(self) -> bool:
        found = self._outcomes.values()
        return bool(found) and all(one.is_ok and one.world == len(found) for one in found)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end. Raises TimeoutError after `timeout` seconds; the job goes on."""
        began = time.monotonic()
        while not self.done():
            if timeout is not None and time.monotonic() - began >= timeout:
                raise TimeoutError(f"{self.run} is {self.state} after {timeout:g} s; it goes on")
            time.sleep(POLL_S)

    def result(self, timeout: float | None = None) -> R:
        """Wait for its end and return what rank 0 returned.

        Raises the exception of the rank that failed first.
        """
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[R]:
        """Wait for its end and return what each rank returned, in their order.

        Raises the exception of the rank that failed first.
        """
        found = self.exception(timeout)
        if found is not None:
            raise found
        return [self._outcomes[rank].value() for rank in sorted(self._outcomes)]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the job's end; return the exception of the first failed rank, or None."""
        self.wait(timeout)
        if self._is_complete():
            return None
        about = self._explain()
        if self._is_complete():  # its last file has arrived since
            return None
        failed = {rank: one for rank, one in self._outcomes.items() if not one.is_ok}
        rank = about.get("failed_rank")
        if rank is None and failed:
            rank = min(failed, key=lambda one: failed[one].at)
        if rank in failed:
            return failed[rank].error()
        reason = about.get("reason") or about.get("why") or "no rank left a result"
        kind = (
            errors.FailedJobError if about.get("state") == "FAILED" else errors.UncompletedJobError
        )
        return kind(f"{self.run} is {about.get('state')}: {reason}")

    def _explain(self) -> command.Json:
        """Return ddp's account of its end, after the ranks' files have had time to arrive."""
        about = command.ask("show", self.run)
        until = time.monotonic() + _FILES_S
        while True:
            self._read()
            has_all = self._is_complete() or about.get("state") != "COMPLETED"
            if has_all or time.monotonic() > until:
                return about
            time.sleep(POLL_S)

    def log(self, rank: int | None = None, lines: int = _MOST_LINES) -> str:
        """Return the last lines of the job's log, or of one rank's output."""
        words = ["log", self.run, f"--lines={lines}"]
        if rank is not None:
            words.append(f"--rank={rank}")
        return "\n".join(command.ask(*words).get("lines") or ())

    def cancel(self) -> None:
        """Cancel it; a program that saves when it is asked to stop saves first."""
        if not self.done():
            command.ask("cancel", self.run)

    def __await__(self) -> collections.abc.Generator[typing.Any, None, R]:
        return self._result().__await__()

    async def _result(self) -> R:
        await self.ended()
        return await asyncio.to_thread(self.result)

    async def ended(self, every_s: float = POLL_S) -> None:
        """Wait for its end without blocking the event loop."""
        while not await asyncio.to_thread(self.done):
            await asyncio.sleep(every_s)


class Jobs(list[Job[R]]):
    """The jobs of a sweep, in the order of their arguments."""

    def results(self, timeout: float | None = None) -> list[R]:
        """Wait for all of them and return what each one's rank 0 returned, in order."""
        self.wait(timeout)
        return [job.result() for job in self]

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of all of them. Raises TimeoutError; they go on."""
        began = time.monotonic()
        for job in self:
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
            job.wait(left)

    def cancel(self) -> None:
        """Cancel those that have not ended."""
        left = [job.run for job in self if not job.done()]
        if left:
            command.ask("cancel", *left)

    def __await__(self) -> collections.abc.Generator[typing.Any, None, list[R]]:
        return self._results().__await__()

    async def _results(self) -> list[R]:
        return [await job for job in self]
