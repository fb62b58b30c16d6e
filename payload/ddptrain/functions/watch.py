"""The states of runs, asked of ddp now and then: more rarely the longer they take."""

import time

from ddptrain.functions import command, errors

ACTIVE = frozenset("PENDING REQUEUED CONFIGURING RUNNING COMPLETING SUSPENDED".split())
LEAST_S, MOST_S = 2.0, 15.0
UNKNOWN_S = 120.0  # how long neither Slurm nor the run's files may tell
_FAILURES = 10  # one after the other, of ddp itself
_MOST_RUNS = 1000


class Watch:
    """The states of one submission's runs, whose names a pattern matches."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._states: dict[str, str] = {}
        self._next = 0.0
        self._pause_s = LEAST_S
        self._failures = 0
        self._known_at = time.monotonic()

    def state(self, run: str, *, is_now: bool = False) -> str:
        """Return a run's state by ddp's last answer. Raises FunctionError if ddp fails for long."""
        if is_now or time.monotonic() >= self._next:
            self._look()
        return self._states.get(run, "UNKNOWN")

    def has_ended(self, run: str, *, is_now: bool = False) -> bool:
        """Return whether a run has ended."""
        state = self.state(run, is_now=is_now)
        if state == "UNKNOWN":
            return time.monotonic() - self._known_at > UNKNOWN_S
        return state not in ACTIVE

    def _look(self) -> None:
        try:
            found = command.ask("list", "--name", self._pattern, "--lines", str(_MOST_RUNS))
        except errors.FunctionError:
            self._failures += 1
            if self._failures >= _FAILURES:
                raise
            found = {}
        else:
            self._failures = 0

        now = time.monotonic()
        for about in found.get("runs") or ():
            self._states[about["run"]] = about["state"]
        if found.get("slurm") or "UNKNOWN" not in self._states.values():
            self._known_at = now
        self._next = now + self._pause_s
        self._pause_s = min(MOST_S, self._pause_s * 1.3)
