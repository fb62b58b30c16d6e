"""Slurm's requests to stop a job: the ranks save, and the job is requeued if it can get further.

Slurm sends USR1 before the time limit or before another job takes the nodes, and TERM as it ends
the job.
"""

import dataclasses
import signal
import threading
import time

from ddp.node import exit_codes, slurm_calls, spool, time_limit
from ddp.node.control_files import ControlFiles
from ddp.node.ranks import Ranks
from ddp.node.started_job import StartedJob

LEAVING_S = 30.0  # Slurm's KillWait
# A warning this long before the end of the time limit is Slurm's (_LEAD_S and up to 60 s)
WARNED_S = 300.0
# For ranks to save before the supervisor looks whether they did, within Slurm's KillWait
SAVING_S = 10.0
SLICE_S = 0.1  # of a pause that a signal ends
CAUSES = {
    "limit": "it has reached its time limit",
    "preemption": "another job takes its place",
    "requeue": "it was requeued",
    "failure": "a node has failed",
    "cancelled": "it was cancelled",
}


class StopRequests:
    """Takes Slurm's signals, passes them on to the ranks, and requeues the job."""

    def __init__(self, job: StartedJob, files: ControlFiles) -> None:
        self._job = job
        self._files = files
        self._began = time.time()
        self._ranks: Ranks | None = None
        self._words: list[str] = []
        self.first = ""  # the name of the first signal
        self.is_ending = False  # TERM was received, even after another signal: Slurm ends this job
        self._ending_at = 0.0
        self.cause = ""  # a key of CAUSES
        self.is_stuck = False  # it reached its limit again without progress
        self.may_come_back = False  # the job may be requeued and then needs its secrets
        self.is_requeued = False
        self.is_requeued_by_slurm = False
        self._is_signalled = False  # the ranks got a signal: their end does not show a fault
        self._settling = threading.Lock()
        self._is_settled = False

    def listen(self) -> None:
        """Take the signals from now on."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def pass_on_to(self, ranks: Ranks, words: list[str]) -> None:
        """Pass the requests on to these ranks, whose command has these words."""
        self._ranks = ranks
        self._words = words

    def is_asked(self) -> bool:
        """Return whether Slurm has asked the job to stop."""
        return bool(self.first)

    def ending_s(self) -> float:
        """Return the time since Slurm's TERM."""
        return time.monotonic() - self._ending_at

    def _on_signal(self, number: int, _: object) -> None:
        name = "TERM" if number == signal.SIGTERM else "USR1"
        self.first = self.first or name
        if name == "TERM" and not self.is_ending:
            self._ending_at = time.monotonic()
            self.is_ending = True
            self._is_signalled = True  # Slurm sends TERM to the ranks, too
            threading.Thread(target=self.settle, daemon=True).start()
        spool.write(
            f"[PREEMPT] {slurm_calls.stamp()} {name}: $STOP_FILE asks the ranks to save and leave"
        )
        threading.Thread(target=self._pass_on, args=(name,), daemon=True).start()

    def _pass_on(self, name: str) -> None:
        ranks = self._ranks
        if ranks is None:
            return
        if name == "USR1" and self._job.spec.stop_signal:
            self._signal(ranks, self._job.spec.stop_signal)
        if name == "TERM" and ranks.is_running() and not slurm_calls.signals_every_process():
            self._signal(ranks, name)
        ranks.ask_to_stop(self._stop_by(name))

    def _stop_by(self, name: str) -> float | None:
        """Return the end of the time limit if the signal warns of it."""
        if name == "TERM" or self._is_by_operator():
            return None
        if slurm_calls.is_preempted(self._job.slurm_id):
            return None
        return self._job.end

    def _is_by_operator(self) -> bool:
        return time.time() < self._job.end - WARNED_S

    def _signal(self, ranks: Ranks, name: str) -> None:
        if ranks.signal(name):
            self._is_signalled = True

    def explains_end(self, ranks: Ranks) -> bool:
        """Return whether an attempt ended because it was asked to stop.

        One that only $STOP_FILE asked, and that ended with 0 without an outcome, has come to its
        own end.
        """
        if ranks.outcome == "preempted" or self.is_ending:
            return True
        if not self.first:  # at the start of its grace time Slurm sends TERM to the ranks alone
            return slurm_calls.is_preempted(self._job.slurm_id)
        if ranks.lost or ranks.stalled or ranks.code == exit_codes.FATAL:
            return False
        return self._is_signalled or ranks.code != 0

    def settle(self) -> None:
        """Find out why the job is to stop, and requeue it if Slurm does not.

        At once after TERM: Slurm takes a requeue until the job's last process has ended.
        """
        with self._settling:
            if self._is_settled:
                return
            is_ending = self.is_ending
            found = self._find_cause(is_ending=is_ending)
            self.cause = found.cause
            self.is_requeued_by_slurm = found.is_requeued
            if found.cause in ("limit", "preemption") and not found.is_requeued:
                self._come_back()
            self._is_settled = is_ending or self.is_requeued or not self.is_ending

    def _find_cause(self, *, is_ending: bool) -> slurm_calls.Ending:
        if is_ending:
            job = self._job
            found = slurm_calls.ending_of(job.slurm_id, job.restarts, job.end)
            why = CAUSES[found.cause]
            spool.write(f"[PREEMPT] {slurm_calls.stamp()} Slurm ends this job: {why}")
            return found
        if slurm_calls.is_preempted(self._job.slurm_id):
            why = CAUSES["preemption"]
            spool.write(f"[PREEMPT] {slurm_calls.stamp()} Slurm asks this job to leave: {why}")
            return slurm_calls.Ending("preemption")
        return slurm_calls.Ending("limit")  # Slurm's warning is for the time limit

    def _come_back(self) -> None:
        """Requeue the job, unless it has come back often enough or makes no progress."""
        limit = self._job.spec.max_requeues
        if self._job.restarts >= limit:
            spool.write(f"[REQUEUE] not again: max-requeues is {limit}")
            return
        if self.cause == "preemption" or self._makes_progress():
            self.requeue()

    def _makes_progress(self) -> bool:
        """Return whether another attempt may get further; note where this one began."""
        if self._is_by_operator():
            return True
        places = time_limit.folders(self._job.run_dir, self._job.spec.workdir, self._words)
        before = self._files.read_mark()
        mark = self._mark()
        if before is not None and not self._is_further(before, mark, places):
            mark = dataclasses.replace(before, attempts=before.attempts + 1)
        if mark.attempts < time_limit.ATTEMPTS:
            self._files.write_mark(mark)
            return True

        self.is_stuck = True
        where = " or ".join(places)
        why = f"{mark.attempts} attempts reached the time limit without progress"
        why += f" (no file below {where}); save checkpoints there and start from them"
        why += ", or submit it with a longer time-limit"
        spool.write(f"[REQUEUE] not again: {why}")
        attempt = self._ranks.attempt_id if self._ranks is not None else ""
        self._files.record_failure(attempt or self._job.attempt_id(0), "program", "-", why)
        return False

    def _mark(self) -> time_limit.Mark:
        """Return where this attempt's ranks began; until they have, where the job began."""
        if self._ranks is None:
            return time_limit.Mark(self._began, -1, 1)
        return dataclasses.replace(self._ranks.mark, step=self._ranks.first_step())

    def _is_further(
        self, before: time_limit.Mark, mark: time_limit.Mark, places: list[str]
    ) -> bool:
        """Return whether this attempt began further than the one before, or either left a file."""
        if mark.step > before.step >= 0:
            return True
        if self._ranks is not None and self.is_ending:  # the ranks may save now
            self._ranks.wait(SAVING_S)
        return time_limit.has_saved(self._job.run_dir, places, before.since)

    def requeue(self) -> bool:
        """Requeue the job; return whether Slurm has queued it again."""
        self.may_come_back = True
        is_ending = self.is_ending

        def is_interrupted() -> bool:
            return self.is_ending and not is_ending

        self.is_requeued = slurm_calls.requeue(
            self._job.slurm_id, self._job.restarts, is_interrupted, is_ending=is_ending
        )
        return self.is_requeued

    def make_way(self, output: spool.Output) -> None:
        """Wait for Slurm's TERM, so that the job can wait in the queue."""
        output.flush()
        for _ in range(int(LEAVING_S / SLICE_S)):
            if not self.is_ending:
                slurm_calls.pause(SLICE_S)
