"""A run that stands still: no line of metrics.jsonl for ten times its median step.

Its ranks are ended by SIGABRT, so that Python prints their stacks (PYTHONFAULTHANDLER): they show
which one is behind.
"""

import collections.abc
import contextlib
import itertools
import json
import pathlib
import re
import statistics
import threading
import time
import typing

from ddp.node import checkpoints, processes, small_files, storage
from ddp.node.diagnosis import attempt_files

LEAST_S = 120.0
STEPS = 10  # times the median step
SILENCES = 2  # times the longest silence so far, such as an evaluation
APART_S = 3600.0  # between two restarts
_FEWEST = 5  # steps of an attempt that is judged: torch compiles in the first ones
_EVERY_S = 10.0
_TAIL_BYTES = 65536
# Where a rank waits for others: torch's collectives, and DDP's in the engine of autograd
_WAITING = re.compile(r"/torch/(?:distributed/|nn/parallel/|autograd/graph\.py)")
# The main thread comes last, as the oldest; a stopped process gets a signal in any of its threads
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[\da-f]+ ")
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (\S+)')
# Printed by task.py for each rank before it is asked for its stack
_STATE = re.compile(
    r"(?:\d+: )?\[ENV\] (?P<node>\S+): rank (?P<rank>\d+) "
    r"(?P<words>.*\((?P<letter>\w)(?:, \S+)?\))$"
)
_HALTED = (processes.STOPPED, processes.TRACED, processes.ENDED)


class Watch:
    """Reads the metrics of an attempt that begins now; reports once that it stands still."""

    def __init__(
        self,
        run_dir: str,
        on_stalled: collections.abc.Callable[[str], None],
        has_saved: collections.abc.Callable[[], bool] = bool,
    ) -> None:
        """`has_saved` returns whether a program with `--again` can continue from a checkpoint."""
        self._run_dir = run_dir
        self._has_saved = has_saved
        self._on_stalled = on_stalled
        self._began = time.time()
        self._over = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def close(self) -> None:
        """Stop reading."""
        self._over.set()

    def _work(self) -> None:
        while not self._over.wait(_EVERY_S):
            words = ""
            # A filesystem that hangs shows nothing
            with contextlib.suppress(OSError, ValueError, KeyError):
                words = storage.within(self._look, storage.CALL_S)
            if words and not self._over.is_set():
                self._on_stalled(words)

    def _look(self) -> str:
        lines = small_files.tail(pathlib.Path(self._run_dir, "metrics.jsonl"), _TAIL_BYTES)
        words = judge(lines, self._began, time.time())
        if not words:
            return ""
        newest = checkpoints.newest(pathlib.Path(self._run_dir))
        has_checkpoint = newest is not None or self._has_saved()
        return words if has_checkpoint else ""  # without one all progress would be lost


def judge(lines: list[str], began: float, now: float) -> str:
    """Return how long a run has made no step, "" unless it stands still.

    `began` and `now` are seconds since 1970.
    """
    records = _records_since(began, lines)
    steps = [record for record in records if _is_step(record)]
    if len(steps) < _FEWEST or steps[-1]["step"] == steps[-1].get("total_steps"):
        return ""

    times = [record["time"] for record in records]
    silent_s = now - max(times)
    longest_s = max(_differences(times))
    median_s = statistics.median(_differences([step["time"] for step in steps]))
    if silent_s < max(LEAST_S, STEPS * median_s, SILENCES * longest_s):
        return ""
    return f"no step for {silent_s:.0f} s, where the median is {median_s:.2g} s"


def _records_since(began: float, lines: list[str]) -> list[small_files.Json]:
    records: list[small_files.Json] = []
    for line in lines:
        if not (line.startswith("{") and line.endswith("}")):
            continue
        record: small_files.Json = json.loads(line)
        at = record.get("time")
        if isinstance(at, int | float) and at >= began:
            records.append(record)
    return records


def _is_step(record: small_files.Json) -> bool:
    return record.get("kind", "step") == "step" and "step" in record


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def behind(run_dir: str, job_id: str, hosts: list[str]) -> tuple[str, str]:
    """Return the node and the place of the rank that the others wait for; "-" and "" if unknown.

    The ranks' stacks show it, and the states that their nodes printed before: one that is stuck in
    the kernel prints no stack.
    """
    folder = pathlib.Path(run_dir)
    places = _places(attempt_files.attempt_log(folder, int(job_id)))
    stacks = _stacks(folder, int(job_id))
    rank = _find_behind(places, stacks)
    if rank is None:
        return "-", ""

    node = _node_of(rank, places, stacks, hosts)
    words = f"rank {rank} on {node} is behind"
    if rank in stacks.stood:
        words += f", in {stacks.stood[rank]}"
    elif rank not in stacks.waiting:
        words += " and showed no stack"
    if rank in places:
        words += f"; it {places[rank].words}"
    return node, words


class _Place(typing.NamedTuple):
    """The place of a rank's process, before it was asked for its stack."""

    node: str
    words: str
    letter: str  # the kernel's


class _Stacks(typing.NamedTuple):
    """The ranks that printed their stack."""

    stood: dict[int, str]  # the innermost call of those that did not wait for others
    waiting: set[int]
    nodes: dict[int, int]  # the numbers of the nodes


def _find_behind(places: dict[int, _Place], stacks: _Stacks) -> int | None:
    """Return the rank that the others wait for; None if it is unknown.

    It is halted, or its stack shows no waiting, or it alone shows none.
    """
    halted = [rank for rank, place in places.items() if place.letter in _HALTED]
    suspects = sorted(halted) or sorted(stacks.stood)
    if not suspects:
        known = {*places, *stacks.waiting}
        silent = sorted(known - stacks.waiting)
        return silent[0] if len(silent) == 1 else None
    is_ambiguous = len(suspects) > 1 and not stacks.waiting
    return None if is_ambiguous else suspects[0]


def _places(log: list[str]) -> dict[int, _Place]:
    """Return where the ranks' processes were, by rank."""
    places: dict[int, _Place] = {}
    for line in log:
        if found := _STATE.match(line):
            place = _Place(found["node"], found["words"], found["letter"])
            places[int(found["rank"])] = place
    return places


def _stacks(folder: pathlib.Path, job_id: int) -> _Stacks:
    """Return where the ranks were by the stacks in their logs."""
    stacks = _Stacks({}, set(), {})
    for log in attempt_files.rank_logs(folder, job_id):
        frames = _last_stack(small_files.tail(log.path, _TAIL_BYTES))
        if not frames:
            continue
        stacks.nodes[log.rank] = log.node
        if any(_WAITING.search(frame[1]) for frame in frames):
            stacks.waiting.add(log.rank)
        else:
            path, line, call = frames[0].groups()
            stacks.stood[log.rank] = f"{call} ({path}:{line})"
    return stacks


def _last_stack(lines: list[str]) -> list[re.Match[str]]:
    """Return the frames of the last thread in an output, the innermost first."""
    begins = [index for index, line in enumerate(lines) if _THREAD.match(line)]
    if not begins:
        return []
    frames: list[re.Match[str]] = []
    for line in lines[begins[-1] + 1 :]:
        frame = _FRAME.match(line)
        if frame is None:
            break
        frames.append(frame)
    return frames


def _node_of(rank: int, places: dict[int, _Place], stacks: _Stacks, hosts: list[str]) -> str:
    if rank in places:
        return places[rank].node
    number = stacks.nodes[rank]
    return hosts[number] if number < len(hosts) else "-"
