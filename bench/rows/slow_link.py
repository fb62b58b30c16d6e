"""A GPT over a slow link: DDP, bf16 gradients, and sites that exchange every 10 or 50 steps.

Rates are those of a few steps over each link: two ranks, one in each network namespace, with one
thread. A link changes no loss, so losses are measured once for each way of training, over the
loopback interface, with a smaller model that can see more tokens.
"""

# pyright: basic, reportPrivateImportUsage=false
import bisect
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import threading
import time
import typing

from bench import data, row, slow_link
from ddptrain.data import prepare

TEXT_BYTES = 4 << 20
SEEDS = (1, 2, 3)
STEPS = 1500  # of a training whose loss counts
LAST = 20  # steps for smoothing a training's loss
SIZE = "--layers 6 --heads 4 --width 256 --seq-len 64 --batch 2"  # of rates
LOSS_SIZE = "--layers 3 --heads 4 --width 128 --seq-len 64 --batch 8 --warmup 200"  # of losses
COMMON = "--precision fp32 --log-every 1 --lr 0.001 --resume never"
LINKS = [
    slow_link.Link(0, 0),
    slow_link.Link(100, 20),
    slow_link.Link(100, 40),
    slow_link.Link(100, 80),
    slow_link.Link(1000, 20),
    slow_link.Link(1000, 80),
]
GOAL_LINK = slow_link.Link(100, 40)
LIMIT_S = 600.0
_PORT = 29871


@dataclasses.dataclass(frozen=True)
class Way:
    """How the ranks exchange their updates."""

    name: str
    flags: str
    bytes_per_parameter: int
    every: int  # steps between exchanges
    timed: int  # steps of a measure of the rate: with exchanges, from the second one to the last


WAYS = (
    Way("DDP", "", 4, 1, 6),
    Way("bf16", "--gradients bf16", 2, 1, 7),
    Way("H=10", "--sync-every 10 --sites 2", 2, 10, 41),
    Way("H=50", "--sync-every 50 --sites 2", 2, 50, 151),
)


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds of a step, and the bytes that a rank sends in it."""

    step_s: float
    step_bytes: float


@dataclasses.dataclass(frozen=True)
class Quality:
    """How well a training went."""

    val_loss: float
    curve: list[float]  # the training loss of each step, smoothed

    def steps_to(self, loss: float) -> int | None:
        """Return the first step with a loss that low."""
        return next((at for at, value in enumerate(self.curve, 1) if value <= loss), None)


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure the rates over each link, then the losses, which do not depend on it."""
    dataset = _dataset(scratch)
    paces: dict[tuple[str, slow_link.Link], Pace] = {}
    qualities: dict[str, list[Quality]] = {}
    delays: set[str] = set()
    parameters = 0
    for link in LINKS:
        with slow_link.laid(link) as delay:
            if link.trip_ms:
                delays.add(delay)
            for way in WAYS:
                paces[way.name, link], parameters = _pace(way, dataset, scratch / "run")
                print(f"# {way.name}, {link}: {paces[way.name, link]}", file=sys.stderr)
    for way in WAYS:
        qualities[way.name] = _qualities(way, dataset, scratch / "run")
        print(f"# {way.name}: {qualities[way.name]}"[:100], file=sys.stderr)
    note = f"{parameters / 1e6:.1f}M parameters, delay by {', '.join(sorted(delays))}"
    found: list[row.Row] = []
    for link in LINKS:
        found += [_rate(way, link, paces, note) for way in WAYS[1:]]
    found += [_against_unlimited(paces, link) for link in LINKS[1:]]
    for way in WAYS:
        found.append(_bytes(way, paces, parameters))
    for way in WAYS[1:]:
        found.append(_loss(way, qualities))
        found.append(_time_to_loss(way, qualities, paces))
    return found


def _rate(
    way: Way, link: slow_link.Link, paces: dict[tuple[str, slow_link.Link], Pace], note: str
) -> row.Row:
    goal = None
    if way.name == "bf16" and link.mbit_s == 100:
        goal = 1.8
    if way.name == "H=50" and link == GOAL_LINK:
        goal = 10.0
    ours = _tokens() / paces[way.name, link].step_s
    peer = _tokens() / paces["DDP", link].step_s
    return row.Row(f"{way.name}: {link}", ours, peer, "tok/s", "DDP, fp32", goal=goal, note=note)


def _against_unlimited(
    paces: dict[tuple[str, slow_link.Link], Pace], link: slow_link.Link
) -> row.Row:
    ours = _tokens() / paces["H=50", link].step_s
    peer = _tokens() / paces["H=50", LINKS[0]].step_s
    goal = 0.9 if link.mbit_s >= 1000 else None
    return row.Row(f"H=50: {link}", ours, peer, "tok/s", "the same without a limit", goal=goal)


def _bytes(way: Way, paces: dict[tuple[str, slow_link.Link], Pace], parameters: int) -> row.Row:
    """Compare the bytes on the wire with those that `plan` counts: 2 (n - 1) / n of all, n = 2."""
    sent = [paces[way.name, link].step_bytes for link in LINKS]
    planned = way.bytes_per_parameter * parameters / way.every
    measured = row.median(sent)
    note = row.spread([value / planned for value in sent], "of plan's")
    goal = 1 / 1.05
    return row.Row(
        f"{way.name}: bytes a step",
        measured / 1e6,
        planned / 1e6,
        "MB",
        "what plan says",
        more_is_better=False,
        goal=goal,
        note=note,
    )


def _loss(way: Way, qualities: dict[str, list[Quality]]) -> row.Row:
    ours = [one.val_loss for one in qualities[way.name]]
    peer = [one.val_loss for one in qualities["DDP"]]
    return row.Row(
        f"{way.name}: validation loss",
        statistics.fmean(ours),
        statistics.fmean(peer),
        "nats",
        "DDP, equal tokens",
        more_is_better=False,
        goal=1 / 1.01,
        note=f"{row.spread(ours, 'nats')}, peer {row.spread(peer, 'nats')}; {STEPS} steps",
    )


def _time_to_loss(
    way: Way,
    qualities: dict[str, list[Quality]],
    paces: dict[tuple[str, slow_link.Link], Pace],
) -> row.Row:
    """Compare the seconds to a loss that both reach, over the slow link.

    The steps are those of the small model's first seed, at the pace of the large one.
    """
    loss = max(qualities[name][0].curve[-1] for name in (way.name, "DDP"))
    seconds: list[float] = []
    for name in (way.name, "DDP"):
        steps = qualities[name][0].steps_to(loss) or STEPS
        seconds.append(steps * paces[name, GOAL_LINK].step_s)
    what = f"{way.name}: time to loss {loss:.2f}, {GOAL_LINK}"
    ours, ddp = seconds
    return row.Row(what, ours, ddp, "s", "DDP, fp32", more_is_better=False)


def _tokens() -> int:
    return 2 * 2 * 64  # of a step: ranks, sequences, tokens


def _dataset(scratch: pathlib.Path) -> pathlib.Path:
    text = scratch / "text"
    text.mkdir()
    for number, document in enumerate(data.corpus(TEXT_BYTES)):
        (text / f"{number:06d}.txt").write_text(document, encoding="utf-8")
    prepare.run(prepare.Options((str(text),), scratch / "data", tokenizer="byte", workers=1))
    return scratch / "data"


def _qualities(way: Way, dataset: pathlib.Path, run_dir: pathlib.Path) -> list[Quality]:
    found: list[Quality] = []
    for seed in SEEDS:
        steps = f"--steps {STEPS} --epoch-steps {STEPS} --eval-rows 512 --seed {seed}"
        _train(f"{LOSS_SIZE} {way.flags} {steps}", dataset, run_dir, namespaces=())
        losses = [line["loss"] for line in _records(run_dir, "step")]
        last_eval = _records(run_dir, "eval")[-1]
        found.append(Quality(last_eval["val_loss"], _smoothed(losses)))
    return found


def _smoothed(losses: list[float]) -> list[float]:
    """Return the mean of each loss and the LAST ones before it."""
    windows = [losses[max(0, at - LAST) : at + 1] for at in range(len(losses))]
    return [statistics.fmean(window) for window in windows]


def _pace(way: Way, dataset: pathlib.Path, run_dir: pathlib.Path) -> tuple[Pace, int]:
    """Train some steps, and return the pace between two exchanges, and the number of parameters.

    The first exchange meets TCP's slow start, so it does not count.
    """
    steps = f"--steps {way.timed} --epoch-steps {way.timed} --eval-rows 0 --warmup 1"
    with _Meter() as meter:
        _train(f"{SIZE} {way.flags} {steps}", dataset, run_dir)
    times = {line["step"]: line["time"] for line in _records(run_dir, "step")}
    if way.every > 1:
        first, last = way.every + 1, way.timed
    else:
        first, last = 3, way.timed - 1
    num_steps = last - first
    seconds = times[last] - times[first]
    sent = meter.at(times[last]) - meter.at(times[first])
    parameters = json.loads((run_dir / "summary.json").read_text())["parameters"]
    return Pace(seconds / num_steps, sent / num_steps), parameters


def _records(run_dir: pathlib.Path, kind: str) -> list[dict[str, typing.Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def _train(
    flags: str,
    dataset: pathlib.Path,
    run_dir: pathlib.Path,
    namespaces: tuple[str, ...] = slow_link.NAMESPACES,
) -> None:
    """Train two ranks, each in its namespace if there are any. Raises RuntimeError if one fails."""
    shutil.rmtree(run_dir, ignore_errors=True)
    words = f"{COMMON} {flags}".split()
    places = ["--data", str(dataset), "--run-dir", str(run_dir)]
    argv = [sys.executable, "-m", "ddptrain", "train", *places, *words]
    meeting = {"MASTER_PORT": str(_PORT), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    if namespaces:
        meeting |= {"MASTER_ADDR": slow_link.ADDRESSES[0], "GLOO_SOCKET_IFNAME": slow_link.DEVICE}
    else:
        meeting |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}

    started: list[subprocess.Popen[str]] = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        inside: list[str] = []
        if namespaces:
            inside = ["ip", "netns", "exec", namespaces[rank]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        env = {**os.environ, **meeting, **place}
        started.append(subprocess.Popen([*inside, *argv], env=env, **pipes))
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    for process, output in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{flags}: {output[-1500:]}")


class _Meter:
    """Reads the counters of the link again and again."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._sent: list[int] = []
        self._counters = slow_link.Counters()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "_Meter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._counters.close()

    def _read(self) -> None:
        while not self._end.wait(0.1):
            sent = self._counters.read()
            self._times.append(time.time())
            self._sent.append(sum(sent) // 2)

    def at(self, when: float) -> float:
        """Return the bytes that an end had sent at a time, in proportion between two readings."""
        after = bisect.bisect(self._times, when)
        if after in (0, len(self._times)):
            return float(self._sent[-1 if after else 0])
        earlier = self._times[after - 1]
        share = (when - earlier) / (self._times[after] - earlier)
        return self._sent[after - 1] + share * (self._sent[after] - self._sent[after - 1])
