"""A failure of one rank ends all of them within seconds, and the first one that fails reports why.

A thread on each rank reads one key of the rendezvous store. A rank that must give up writes that
key, and all the others leave, even out of a collective. The first one to give up reports why, in
the log and in the run's files, before it alerts the others: their own errors are only a
consequence.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import contextlib
import datetime
import json
import math
import os
import signal
import sys
import threading
import time
import typing

import torch.distributed as dist

from ddptrain.ground import error_file, errors

WATCH_S = 1.0
REPORT_S = 10.0  # how long the first rank that gives up has to report why
STUCK_S = 15.0  # after SIGTERM; launchers and Slurm send SIGKILL after 30 s
EXIT_FAILED = 1
_ABORT, _FIRST = "ddptrain/abort", "ddptrain/first"
_STUCK = "ended from outside, waiting for a rank that is lost or stuck"
_STORE_LOST = "connection closed by the rendezvous store"

Report = collections.abc.Callable[[Exception], None]


class Alarm:
    """Watches for another rank's failure, and raises the alarm for this one's.

    `report` is called with the reason on the first rank that gives up.
    """

    def __init__(self, rank: int, host: str, report: Report) -> None:
        self.rank = rank
        self.host = host
        self.report = report
        self.store: typing.Any = None  # a client of the rendezvous store; None when alone
        self.stop_requested = threading.Event()
        # Gets the numbers of signals, as bytes
        self._arrivals = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ends_at = math.inf  # when an end that a signal asks for is overdue
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Let signals ask to stop, from now to the end of the process."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, lambda *_: self.stop_requested.set())
            signal.set_wakeup_fd(self._arrivals[1], warn_on_full_buffer=False)

    def start(self) -> None:
        """Leave from now on if another rank gives up, the store is lost, or an end is overdue."""
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch: from now on this rank ends by itself."""
        self._over.set()

    def join(self) -> bool:
        """Wait for the watch's end, and return whether there was a watch."""
        if self._thread is None:
            return False
        self._thread.join(timeout=10)
        return True

    def give_up(self, e: Exception) -> None:
        """Report why this rank ends, in the log and to the others.

        Raises PeerError if another one was first.
        """
        self.stop()
        reported = self._reported_by_another()
        if reported is not None:
            raise reported from e
        self.report(e)
        self.alert_others(e)

    def alert_others(self, e: BaseException) -> None:
        """Write the key that makes the other ranks leave."""
        self.stop()
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError, dist.DistError):
            text = f"rank {self.rank} on {self.host}: {type(e).__name__}: {e}"[:500]
            self.store.set(_ABORT, json.dumps([text, self.cause_of(e)]))
            has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if self.rank == 0 and not has_agent:
                time.sleep(2 * WATCH_S)  # this process holds the store: let the others read it

    def cause_of(self, e: BaseException) -> errors.Cause | None:
        """Find the operating system's refusal, on this rank's node or on the reporting one."""
        cause = errors.cause_of(e)
        if cause is None or cause.node:
            return cause
        return cause._replace(node=self.host)

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            self._look_for_signals()
            if time.monotonic() > self._ends_at and not self.stop_requested.is_set():
                # Python's own handler has not run: the main thread stands in a collective, and
                # SIGKILL comes next.
                self._ends_at = math.inf
                self._leave_stuck()
            elif self.store is not None:
                self._leave_if_alerted()

    def _look_for_signals(self) -> None:
        """Note when the end that the first signal asks for is overdue."""
        with contextlib.suppress(BlockingIOError):
            arrived = os.read(self._arrivals[0], 4096)
            if self._ends_at == math.inf and {signal.SIGTERM, signal.SIGINT} & set(arrived):
                self._ends_at = time.monotonic() + STUCK_S

    def _leave_stuck(self) -> None:
        self.report(errors.LostError(f"rank {self.rank} leaves: {_STUCK}", retry=True))
        if self.store is None:
            self._leave(errors.PeerError(_STUCK))

    def _leave_if_alerted(self) -> None:
        try:
            if self.store.check([_ABORT]):
                self._leave(self._read_abort())
        except (RuntimeError, dist.DistError):
            # The store's host is lost, and with it every rank that could have reported why
            reported = errors.PeerError(_STORE_LOST)
            what = f"a rank was lost, killed or with its host: {reported}"
            self._leave(reported, errors.LostError(what, retry=True))

    def _leave(self, reported: errors.PeerError, lost: errors.LostError | None = None) -> None:
        """End this process because of another rank, unless it ends by itself already."""
        if self._over.is_set():
            return
        text = f"rank {self.rank} leaves: {reported}"
        print(text, file=sys.stderr, flush=True)
        if lost is not None:
            self.report(lost)
        else:
            error_file.leave(reported, text)
        leave(EXIT_FAILED)

    def _reported_by_another(self) -> errors.PeerError | None:
        """Return why another rank, the first to give up, does so; None on that rank itself."""
        if self.store is None:
            return None
        own = str(self.rank)
        try:
            if self.store.compare_set(_FIRST, "", own).decode() == own:
                return None
            self.store.wait([_ABORT], datetime.timedelta(seconds=REPORT_S))
            return self._read_abort()
        except (RuntimeError, dist.DistError):  # the store or the first rank ended too early
            return None

    def _read_abort(self) -> errors.PeerError:
        """Read the alert of another rank."""
        text, cause = json.loads(self.store.get(_ABORT))
        return errors.PeerError(text, errors.Cause(*cause) if cause else None)


def leave(code: int) -> typing.NoReturn:
    """End this process at once: with a peer lost, an orderly end could hang for minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
