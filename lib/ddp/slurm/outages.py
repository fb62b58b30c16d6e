"""Questions to Slurm that outlast its outages: a restart of slurmctld takes a minute."""

import collections.abc
import time
import typing

from ddp.problem import Problem
from ddp.slurm import jobs, remedies

LIMIT_S = 600.0
_REPORT_S = 30.0  # between two lines

T = typing.TypeVar("T")


class PatientClient:
    """Asks Slurm for a command that follows a job, and reports each outage."""

    def __init__(self, log: collections.abc.Callable[[str], None]) -> None:
        self._log = log
        self._since: float | None = None  # when the silence began
        self._reported = 0.0

    def ask(self, question: collections.abc.Callable[[], T]) -> T | jobs.Silence:
        """Return Slurm's answer or its silence. Raises Problem after LIMIT_S of silence."""
        found = jobs.look(question)
        if isinstance(found, jobs.Silence):
            self._wait(found)
        else:
            self._end()
        return found

    def _wait(self, silence: jobs.Silence) -> None:
        """Report a silence that goes on. Raises Problem if it is too long."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._reported = now
            self._log(f"{silence}; waiting for it, at most {LIMIT_S / 60:.0f} minutes")
            return
        waited = now - self._since
        if waited >= LIMIT_S:
            text = f"{silence}; no answer for {LIMIT_S / 60:.0f} minutes, and the job may still run"
            raise Problem(text, remedy=remedies.START_SLURMCTLD)
        if now - self._reported >= _REPORT_S:
            self._reported = now
            self._log(f"{silence}; waiting for it, {waited:.0f} s")

    def _end(self) -> None:
        if self._since is not None:
            self._log(f"Slurm answers again, after {time.monotonic() - self._since:.0f} s")
            self._since = None
