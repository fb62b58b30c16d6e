"""A run that stands still: no line of metrics.jsonl for ten times its median step.

Its ranks are ended by SIGABRT, at which Python prints their stacks (PYTHONFAULTHANDLER): they show which one is behind.
"""

import collections.abc
import contextlib
import itertools
import json
import os
import pathlib
import re
import statistics
import threading
import time

from ddp.node import explain, storage

LEAST_S = 120.0
STEPS, SILENCES = 10, 2  # times the median step, and the longest silence so far, as of an evaluation
APART_S = 3600.0  # between two restarts
_FEWEST = 5  # steps of an attempt without which it is not judged: torch compiles in the first ones
_EVERY_S = 10.0
_TAIL_BYTES = 65536
# Where a rank waits for others: torch's collectives, and DDP's in the engine of autograd
_WAITING = re.compile(r"/torch/(?:distributed/|nn/parallel/|autograd/graph\.py)")
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (\S+)')


class Watch:
    """Reads what an attempt that began now writes, until `close`; reports once that it stands still."""

    def __init__(self, run_dir: str, on_stalled: collections.abc.Callable[[str], None]) -> None:
        self._run_dir, self._on_stalled, self._began = run_dir, on_stalled, time.time()
        self._over = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def close(self) -> None:
        """Stop reading."""
        self._over.set()

    def _work(self) -> None:
        while not self._over.wait(_EVERY_S):
            words = ""
            with contextlib.suppress(OSError, ValueError, KeyError):  # a filesystem that hangs shows nothing
                words = storage.within(self._look, storage.CALL_S)
            if words and not self._over.is_set():
                self._on_stalled(words)

    def _look(self) -> str:
        lines = explain.tail(pathlib.Path(self._run_dir, "metrics.jsonl"), _TAIL_BYTES)
        words = judge(lines, self._began, time.time())
        return words if os.path.exists(f"{self._run_dir}/latest") else ""  # else all that it did would be lost


def judge(lines: list[str], began: float, now: float) -> str:
    """Return how long a run has made no step, "" unless it stands still. `began` and `now` are seconds since 1970."""
    records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    records = [record for record in records if isinstance(at := record.get("time"), int | float) and at >= began]
    steps = [record for record in records if record.get("kind", "step") == "step" and "step" in record]
    if len(steps) < _FEWEST or steps[-1]["step"] == steps[-1].get("total_steps"):
        return ""
    times = [record["time"] for record in records]
    median_s = statistics.median(after["time"] - before["time"] for before, after in itertools.pairwise(steps))
    longest_s = max(after - before for before, after in itertools.pairwise(times))
    silent_s = now - max(times)
    if silent_s < max(LEAST_S, STEPS * median_s, SILENCES * longest_s):
        return ""
    return f"no step for {silent_s:.0f} s, where the median is {median_s:.2g} s"


def behind(run_dir: str, job_id: str, hosts: list[str]) -> tuple[str, str]:
    """Return the node of the rank that the others wait for, and where it is, by the ranks' stacks; "-", "": unknown."""
    found: dict[int, tuple[int, re.Match[str]]] = {}
    waiting: set[int] = set()
    for log in explain.rank_logs(pathlib.Path(run_dir), int(job_id)):
        lines = explain.tail(pathlib.Path(log["path"]), _TAIL_BYTES)
        begin = next((index for index, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
        frames = list(itertools.takewhile(bool, map(_FRAME.match, lines[begin + 1 :])))
        if any(frame and _WAITING.search(frame[1]) for frame in frames):
            waiting.add(log["rank"])
        elif frames and frames[0]:
            found[log["rank"]] = log["node"], frames[0]
    if not found or (len(found) > 1 and not waiting):
        return "-", ""
    rank, (number, frame) = min(found.items())
    node = hosts[number] if number < len(hosts) else "-"
    return node, f"rank {rank} on {node} is behind, in {frame[3]} ({frame[1]}:{frame[2]})"
