"""The metrics of the workspace's runs, as the program reports them to the submit user."""

import collections
import collections.abc
import contextlib
import json
import pathlib
import socket
import time
import typing

from prometheus_client import core

import program
from ddp.run import telemetry
from slurm_ddp import exporter, files
from slurm_ddp.exporter import counter, gauge
from slurm_ddp.interfaces import cos_agent

_ANSWER_S = 25.0
_LONGEST_S = 300.0  # the longest time to count between two looks

_VALUES = {
    "step": "Last step of the run.",
    "max_steps": "Steps that the run has in all.",
    "loss": "Loss of the last step.",
    "best_loss": "Lowest validation loss; of a script without one, the lowest loss.",
    "steps_per_second": "Steps per second, evaluations and checkpoints included.",
    "tokens_per_second": "Tokens per second of all ranks.",
    "mfu_ratio": "Share of the GPUs' peak that the model uses.",
    "sync_ratio": "Share of the time that the sites exchanged.",
    "sync_bytes_per_step": "Bytes a step that a site sent to others.",
    "progress_timestamp_seconds": "When the run made its last step.",
    "checkpoint_timestamp_seconds": "When the run's last checkpoint was complete.",
    "checkpoint_stall_seconds": "How long the last checkpoint held up the training.",
}


def ensure(
    unit: str, topology: cos_agent.Topology, user: str, config: collections.abc.Mapping[str, object]
) -> dict[str, str]:
    """Serve the metrics; return the unit's databag of the relation. Raises CommandError."""
    source = pathlib.Path(__file__).resolve()
    port = exporter.ensure(unit, source, {"unit": unit, "user": user, "config": dict(config)})
    return cos_agent.dump(
        topology, [cos_agent.Job("runs", port, socket.gethostname())], source.parent / "cos"
    )


def sources(settings: dict[str, typing.Any]) -> list[exporter.Source]:
    """List the sources of a scrape."""
    totals = Totals(exporter.memory(settings["unit"]))
    return [exporter.Source("workspace", lambda: read(settings, totals))]


def read(
    settings: dict[str, typing.Any], totals: "Totals"
) -> collections.abc.Iterator[core.Metric]:
    """Ask the program as the submit user. Raises ProgramError."""
    request = {"do": "metrics", "config": settings["config"], "unit": settings["unit"]}
    answer = program.ask(settings["user"], request, lambda _: None, timeout_s=_ANSWER_S)
    if answer.error:
        raise program.ProgramError(answer.error)
    found = answer.results
    totals.add(found["runs"], found["gpus"], time.time())
    yield from _of_runs([run for run in found["runs"] if run["is_shown"]])
    failures = [({"reason": reason}, totals.failures[reason]) for reason in telemetry.KINDS]
    yield counter("run_failures_total", "Failed attempts.", failures)
    seconds = [({"user": user}, n) for user, n in sorted(totals.gpu_seconds.items())]
    yield counter("gpu_seconds_total", "Seconds that jobs held a GPU.", seconds)
    if found["doctor"]:
        yield from _of_doctor(found["doctor"])


def _of_runs(shown: list[dict[str, typing.Any]]) -> collections.abc.Iterator[core.Metric]:
    """Report the state and the figures of each run."""
    states = collections.Counter(run["state"] for run in shown)
    by_state = [({"state": state}, states[state]) for state in telemetry.STATES]
    yield gauge("runs", "Runs by state.", by_state)
    running = [(_labels(run), float(run["state"] == "running")) for run in shown]
    yield gauge("run_running", "Whether a job of the run is running now.", running)
    for name, text in (
        ("requeues", "Times that Slurm requeued"),
        ("restarts", "Restarts in place of"),
    ):
        samples = [(_labels(run), float(run[name])) for run in shown]
        yield counter(f"run_{name}_total", f"{text} the run's jobs.", samples)
    for name, text in _VALUES.items():
        having = [run for run in shown if name in run["values"]]
        yield gauge(f"run_{name}", text, [(_labels(run), run["values"][name]) for run in having])
    yield from _of_hosts(shown)


def _of_hosts(shown: list[dict[str, typing.Any]]) -> collections.abc.Iterator[core.Metric]:
    """Report each run's slowest rank, and the site of each of its hosts."""
    slowest: list[tuple[dict[str, str], float]] = []
    for run in shown:
        if run["slowest"]:
            rank, host, times = run["slowest"]
            slowest.append((_labels(run) | {"rank": str(rank), "host": host}, times))
    text = "Data and forward pass of the slowest rank, times the median's."
    yield gauge("run_slowest_rank_ratio", text, slowest)

    sites: list[tuple[dict[str, str], float]] = []
    for run in shown:
        for host, number in run["sites"].items():
            sites.append((_labels(run) | {"host": host}, float(number)))
    yield gauge("run_site", "Site of the host in a training over slow links.", sites)


def _of_doctor(last: dict[str, typing.Any]) -> collections.abc.Iterator[core.Metric]:
    """Report the findings of the last `ddp doctor`, and its time."""
    levels = [({"severity": level}, float(last.get(level, 0))) for level in ("error", "warning")]
    yield gauge("doctor_findings", "Findings of the last ddp doctor.", levels)
    text = "When ddp doctor ran last."
    yield gauge("doctor_timestamp_seconds", text, [({}, float(last["time"]))])


class Totals:
    """Counters over runs that may be removed; kept over a restart of the service."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._at = 0.0  # of the last look
        kept: dict[str, typing.Any] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):
            kept = dict(json.loads(path.read_text()))
        self.failures: collections.Counter[str] = collections.Counter(kept.get("failures"))
        self.gpu_seconds = collections.defaultdict[str, float](float, kept.get("gpu_seconds", {}))
        self.seen: dict[str, dict[str, int]] = kept.get("seen", {})  # failures by run

    def add(
        self, runs: list[dict[str, typing.Any]], gpus: collections.abc.Mapping[str, int], now: float
    ) -> None:
        """Count the changes since the last look, and save them."""
        by_name = {f"{run['user']}/{run['run']}": run for run in runs}
        for name, run in by_name.items():
            before = self.seen.get(name, {})
            for reason, count in run["failures"].items():
                self.failures[reason] += max(0, count - before.get(reason, 0))
        self.seen = {name: run["failures"] for name, run in by_name.items()}
        passed = min(max(0.0, now - self._at), _LONGEST_S) if self._at else 0.0
        for user, count in gpus.items():
            self.gpu_seconds[user] += count * passed
        self._at = now
        kept = {"failures": self.failures, "gpu_seconds": self.gpu_seconds, "seen": self.seen}
        files.ensure_file(self.path, json.dumps(kept) + "\n", mode=0o600)


def _labels(run: dict[str, typing.Any]) -> dict[str, str]:
    return {"run": run["run"], "user": run["user"]}


if __name__ == "__main__":  # pragma: no cover
    exporter.serve(sources)
