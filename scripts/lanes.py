"""Run test lanes (tox environments) side by side on the machine's cores.

    python3 scripts/lanes.py                       every lane of `make test`
    python3 scripts/lanes.py unit lint             some lanes; `unit`, `functional` and `long` stand for several
    python3 scripts/lanes.py functional -- -k gpu  one lane, with arguments for pytest

Installs the lanes' packages first; tox makes their Python environments with uv. The functional lanes mostly wait, so
the others run beside them with a lower priority. A single lane prints its output at once; of several lanes, the output
of those that fail is printed. build/logs/ has all of it. A line every ten seconds lists the running lanes, and the last
lines are those of pytest for each lane.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from scripts import uv

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "logs"
TOX = ROOT / "build" / "venvs" / "tox" / "bin" / "tox"
UNIT = (  # the longest first
    "payload",
    "unit-ddp-trainer",
    "unit-slurm-gpu",
    "sandbox",
    "ddp",
    "unit-shared-filesystem-client",
    "unit-juicefs-server-proxy",
    "bundle",
    "lib",
    "integration-standin",
)
FUNCTIONAL = ("functional-jobs", "functional-nodes")  # a deployment each
FUNCTIONAL_ALL = tuple(f"{name}-all" for name in FUNCTIONAL)
ORDERS = tuple(name.replace("unit-", "orders-") for name in UNIT if name.startswith("unit-"))
LONG = (*FUNCTIONAL_ALL, "docs-walk", "mutants", "kernel", "tracking", *ORDERS)
GROUPS = {"unit": UNIT, "functional": FUNCTIONAL, "long": LONG, "orders": ORDERS}
# The longest first among those that share the machine
ALL = (*FUNCTIONAL, "lint", "docs", "pack", "storage", *UNIT)
WAITING = frozenset(FUNCTIONAL + FUNCTIONAL_ALL)  # they use a fraction of a core
ALONE = frozenset({"functional", "docs-walk", "integration", "bench"})  # they measure, or train as a reader does
NICE = 10  # of what runs beside lanes that wait
# Groups of scripts/setup.sh
PACKAGES = {
    "pack": "pack",
    "sandbox": "demo",
    **dict.fromkeys(("functional", *FUNCTIONAL, *FUNCTIONAL_ALL, "docs-walk"), "demo"),
    "bench": "demo",
    "storage": "storage",
    "kernel": "guest",
}
SILENCE_S = 9.0
CLOSING = re.compile(r"^=+ .*\b(passed|failed|error|errors|skipped|no tests ran)\b.* in [0-9.]+s.* =+$")


@dataclasses.dataclass
class Lane:
    """One tox environment and what became of it."""

    name: str
    arguments: list[str]
    is_live: bool
    nice: int = 0
    started: float = 0.0
    took_s: float = 0.0
    returncode: int | None = None
    last_line: str = ""
    closing: str = ""  # pytest's last line
    notes: list[str] = dataclasses.field(default_factory=list[str])  # skips and expected failures, with their reasons
    process: "subprocess.Popen[str] | None" = None

    @property
    def log(self) -> pathlib.Path:
        """Return the file with all the lane's output."""
        return LOGS / f"{self.name}.log"


class Screen:
    """The terminal: lines, and the running lanes after a silence."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()

    def write(self, text: str) -> None:
        """Print a line."""
        with self._lock:
            print(text, flush=True)
            self._last = time.monotonic()

    def beat(self, running: list[Lane]) -> None:
        """Print what is running, if nothing was printed for a while."""
        now = time.monotonic()
        if running and now - self._last >= SILENCE_S:
            doing = "; ".join(f"{lane.name} {now - lane.started:.0f} s: {lane.last_line[:70]}" for lane in running)
            self.write(f"[{clock(now - self._start)}] {doing}")


def clock(seconds: float) -> str:
    """Return a duration as minutes:seconds."""
    return f"{int(seconds) // 60:2d}:{int(seconds) % 60:02d}"


def start(lane: Lane, screen: Screen) -> None:
    """Start the lane; a thread follows its output."""
    LOGS.mkdir(parents=True, exist_ok=True)
    command = ["nice", "-n", str(lane.nice), str(TOX), "run", "-e", lane.name]
    command += ["--", *lane.arguments] if lane.arguments else []
    lane.started = time.monotonic()
    lane.process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env=uv.environment() | {"PYTHONUNBUFFERED": "1"},
    )
    if lane.is_live:
        screen.write(f"{lane.name}: started")
    threading.Thread(target=_follow, args=(lane, screen), daemon=True).start()


def _follow(lane: Lane, screen: Screen) -> None:
    assert lane.process is not None and lane.process.stdout is not None
    with lane.log.open("w") as log, lane.process.stdout as output:
        for line in output:
            log.write(line)
            log.flush()
            text = line.rstrip("\n")
            if text.strip():
                lane.last_line = text.strip()
            if CLOSING.match(text):
                lane.closing = text  # shown at the end
            elif text.startswith(("SKIPPED ", "XFAIL ")):
                lane.notes.append(text)
            if lane.is_live and not CLOSING.match(text):
                screen.write(text)
    returncode = lane.process.wait()
    lane.took_s = time.monotonic() - lane.started
    lane.returncode = returncode


def report(lane: Lane, screen: Screen) -> None:
    """Print how a lane ended, and all its output if it failed."""
    if lane.returncode != 0 and not lane.is_live:
        screen.write(f"---- {lane.name}: all its output " + "-" * 40)
        screen.write(lane.log.read_text(errors="replace").rstrip())
        screen.write("-" * 72)
    verdict = "passed" if lane.returncode == 0 else f"FAILED (exit {lane.returncode}, build/logs/{lane.log.name})"
    screen.write(f"{lane.name}: {verdict} in {lane.took_s:.0f} s")
    if not lane.is_live:
        for note in lane.notes:
            screen.write(f"  {note}")


def run(lanes: list[Lane], screen: Screen) -> None:
    """Run the lanes in their order: those that wait at once, beside them as many others as there are cores."""
    queued, running = list(lanes), list[Lane]()
    slots = max(1, min(os.cpu_count() or 1, 4))
    try:
        while queued or running:
            for lane in [lane for lane in running if lane.returncode is not None]:
                running.remove(lane)
                report(lane, screen)
            while queued and _may_start(queued[0], running, slots):
                lane = queued.pop(0)
                if lane.name not in WAITING and any(other.name in WAITING for other in running):
                    lane.nice = NICE
                running.append(lane)
                start(lane, screen)
            screen.beat(running)
            time.sleep(0.1)
    except KeyboardInterrupt:
        _stop(running)
        raise


def _may_start(lane: Lane, running: list[Lane], slots: int) -> bool:
    if lane.name in ALONE or any(other.name in ALONE for other in running):
        return not running
    return lane.name in WAITING or sum(other.name not in WAITING for other in running) < slots


def _stop(lanes: list[Lane]) -> None:
    """Interrupt lanes, so that their tests clean up; kill those that take long."""
    for number, patience_s in ((signal.SIGINT, 150), (signal.SIGKILL, 5)):
        left = [lane.process for lane in lanes if lane.process is not None and lane.process.poll() is None]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + patience_s
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def chosen(words: list[str], *, is_split: bool = True) -> list[str]:
    """Return the lanes of the command line: those that wait first, those that run alone last.

    Without `is_split`, `functional` is one lane with all of its tests, for which arguments of pytest make sense.
    """
    groups = GROUPS if is_split else GROUPS | {"functional": ("functional",)}
    lanes = dict.fromkeys(lane for word in words or ALL for lane in groups.get(word, (word,)))
    return sorted(lanes, key=lambda lane: (lane in ALONE, lane not in WAITING))


def prepare(names: list[str]) -> int:
    """Install the lanes' packages and tox; return an exit status."""
    groups = sorted({"test"} | {PACKAGES[name] for name in names if name in PACKAGES})
    for command in (["scripts/setup.sh", *groups], ["scripts/venv.sh", "tox", "tests/requirements/tox.txt"]):
        if (code := subprocess.run(command, cwd=ROOT, check=False).returncode) != 0:
            return code
    return 0


def missing_checkouts() -> str:
    """Return how to get the checkouts that the lane `upstream` lacks, in one line; empty if it lacks none."""
    facts = (ROOT / "tests" / "bundle" / "upstream.yaml").read_text()
    named = re.findall(r"^  (\S+):\n    repository: (\S+)\n.*\n    commit: (\w{12})", facts, re.MULTILINE)
    folder = pathlib.Path(os.environ.get("SLURM_DDP_UPSTREAM") or "/nonexistent")
    missing = [
        f"git clone https://github.com/{repository} && git -C {name} checkout {commit}"
        for name, repository, commit in named
        if not (folder / name / ".git").exists()
    ]
    where = "set SLURM_DDP_UPSTREAM to a folder with these checkouts"
    return f"{where}: {'; '.join(missing)}" if missing else ""


def missing_python() -> str:
    """Return how to get a Python for the lane `upstream`, in one line; empty if it has one."""
    for name in ("python3.12", "python3.13", "python3.14"):  # pyenv has commands that only fail
        with contextlib.suppress(OSError):
            if subprocess.run([name, "-V"], capture_output=True, check=False).returncode == 0:
                return ""
    return "Python 3.12 is missing: apt install python3.12 (Ubuntu 24.04), uv python install 3.12 or pyenv shell 3.12"


def main(arguments: list[str]) -> int:
    """Set up, run, sum up."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    extra = arguments[split + 1 :]
    names = chosen(arguments[:split], is_split=not extra)
    if "upstream" in names and (text := missing_checkouts() or missing_python()):  # before anything is installed
        print(f"upstream: {text}", file=sys.stderr)
        return 1
    if (code := prepare(names)) != 0:
        return code
    known = subprocess.run([TOX, "list", "--no-desc"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    if unknown := [name for name in names if name not in known.split()]:
        print(f"lanes: no lane `{unknown[0]}`; choose from {', '.join(known.split())}", file=sys.stderr)
        return 2

    # A cancelled CI job: the tests still clean up. SIGINT too, which a job in the background is started without
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    screen, began = Screen(), time.monotonic()
    lanes = [Lane(name, extra, is_live=len(names) == 1 or name in ALONE) for name in names]
    try:
        run(lanes, screen)
    except KeyboardInterrupt:
        screen.write("interrupted")
        return 130
    failed = [lane for lane in lanes if lane.returncode != 0]
    screen.write(f"\n{len(lanes) - len(failed)} of {len(lanes)} lanes passed in {clock(time.monotonic() - began)}")
    for lane in lanes:
        verdict = "FAILED" if lane in failed else "passed"
        screen.write(f"{lane.name}: {verdict} in {lane.took_s:.0f} s" + (f"\n{lane.closing}" if lane.closing else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
