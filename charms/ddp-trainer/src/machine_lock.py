"""Who holds this machine's lock, and who waits for it, as the agents of its units tell.

A hook runs under the lock, and on a Juju that honours no `parallel` (4.0.15) each action and exec,
too. An agent reports its own unit's part: core/machinelock/machinelock.go in juju/juju, which
internal/worker/introspection serves.
"""

import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import re
import socket
import threading
import typing

import yaml

AGENTS = pathlib.Path("/var/lib/juju/agents")  # a folder for each unit on this machine
_REQUEST = b"GET /machinelock HTTP/1.0\r\nHost: localhost\r\n\r\n"
_ANSWER_S = 5.0
_LOOK_S = 10.0
_PATIENCE_S = 60  # waiters are named after this time
_ENTRY = re.compile(r"(?P<unit>\S+) uniter \((?P<what>.+)\), (?:holding|waiting) (?P<time>\S+)")
_TIME = re.compile(r"(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?P<s>\d+)s")  # Go's, in whole seconds

Log = collections.abc.Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Entry:
    """The task that a unit runs under the lock, or waits to run."""

    unit: str
    what: str  # "run action 7", "run config-changed hook"
    seconds: int

    def __str__(self) -> str:
        return f"{self.unit} ({self.what})"


def is_held_by(unit: str, task: str) -> bool:
    """Return whether this action holds the lock; if the agent is silent, Juju's version decides."""
    report = _report(f"unit-{unit.replace('/', '-')}")
    if report is None:
        version = os.environ.get("JUJU_VERSION", "")
        return version.partition(".")[0] not in ("", "2", "3")
    holder = parse_entry(report.get("holder"))
    return holder is not None and holder.what == f"run action {task}"


def waiting() -> list[Entry]:
    """List what waits for the lock, in all units of this machine."""
    found: list[Entry] = []
    for folder in sorted(AGENTS.glob("unit-*")):
        report = _report(folder.name) or {}
        entries = map(parse_entry, report.get("waiting") or [])
        found += filter(None, entries)
    return found


@contextlib.contextmanager
def named_waiters(log: Log, *, is_held: bool) -> collections.abc.Generator[Log]:
    """Log who waits a minute for the lock that the block holds; the block logs with the result."""
    if not is_held:  # waiters do not wait for this action
        yield log
        return
    one_at_a_time = threading.Lock()
    has_ended = threading.Event()

    def write(text: str) -> None:
        with one_at_a_time:
            log(text)

    def watch() -> None:
        named: set[str] = set()
        while not has_ended.wait(_LOOK_S):
            for entry in waiting():
                if entry.seconds < _PATIENCE_S or str(entry) in named:
                    continue
                named.add(str(entry))
                write(f"{entry} has waited {entry.seconds} s for this action")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield write
    finally:
        has_ended.set()
        watcher.join()


def _report(agent: str) -> dict[str, typing.Any] | None:
    """Return an agent's report of the lock, or None if it gives none."""
    for address in (str(AGENTS / agent / "introspection.socket"), f"\0jujud-{agent}"):
        try:
            report = yaml.safe_load(_get(address))
            return dict(report[agent])
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            continue
    return None


def _get(address: str) -> str:
    """Ask an introspection socket for its report. Raises OSError, ValueError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(address)
        connection.sendall(_REQUEST)
        with connection.makefile("rb") as file:
            head, _, body = file.read().partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0] + b" ":
        raise ValueError(f"no report: {head[:100]!r}")
    return body.decode()


def parse_entry(text: object) -> Entry | None:
    """Parse `trainer/0 uniter (run action 109), holding 1m2s`; None for the report's `none`."""
    match = _ENTRY.fullmatch(str(text))
    time = match and _TIME.fullmatch(match["time"])
    if match is None or time is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in time.groups())
    return Entry(match["unit"], match["what"], hours * 3600 + minutes * 60 + seconds)
