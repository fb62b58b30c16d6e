"""Run test lanes (tox environments) side by side on the machine's cores.

    python3 scripts/lanes.py                       every lane of `make test`
    python3 scripts/lanes.py unit lint             some lanes; `unit`, `functional` and `long` stand for several
    python3 scripts/lanes.py functional -- -k gpu  one lane, with arguments for pytest

Installs the lanes' packages first; tox makes their Python environments with uv, and runs as many
lanes at a time as there are cores. The functional lanes mostly wait, so they run in parallel with
the others, which have a lower priority. A single lane prints its output live, others when they end;
it includes skipped tests with their reasons.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from scripts import uv

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOX = ROOT / "build" / "venvs" / "tox" / "bin" / "tox"
UNIT = (  # the longest first
    "ddp",
    "payload",
    "sandbox",
    "unit-slurm-gpu",
    "unit-ddp-trainer",
    "unit-shared-filesystem-client",
    "unit-juicefs-server-proxy",
    "bundle",
    "lib",
    "integration-standin",
)
FUNCTIONAL = ("functional-jobs", "functional-nodes")  # a deployment each
FUNCTIONAL_ALL = tuple(f"{name}-all" for name in FUNCTIONAL)
ORDERS = tuple(name.replace("unit-", "orders-") for name in UNIT if name.startswith("unit-"))
# With the Python of Ubuntu 26.04, which uv brings: what runs on the machines of a cluster
NEWER_PYTHON = (
    *(f"{name}-py314" for name in UNIT if name.startswith("unit-")),
    "lib-py314",
)
LONG = (
    *FUNCTIONAL_ALL,
    "functional-2604",
    "docs-walk",
    "programs",
    "kernel",
    "tracking",
    "payload-long",
    "payload-newest",
    "ddp-long",
    "storage-long",
    "pack",
    *ORDERS,
    *NEWER_PYTHON,
)
UPSTREAM = ("upstream", "upstream-main")  # of Ubuntu 24.04 and of 26.04
GROUPS = {
    "upstream": UPSTREAM,
    "unit": UNIT,
    "functional": FUNCTIONAL,
    "long": LONG,
    "orders": ORDERS,
}
ALL = (
    *FUNCTIONAL,
    "lint",
    "ddp",
    "payload",
    "storage",
    "pack-short",
    "docs",
    *UNIT,
)  # the longest first
WAITING = frozenset(FUNCTIONAL + FUNCTIONAL_ALL)  # they use a fraction of a core
ALONE = frozenset(
    {"functional", "functional-2604", "docs-walk", "programs", "integration", "bench"}
)  # they measure, or train as a reader does
NICE = "10"  # priority of lanes that run next to waiting ones
# Groups of scripts/setup.sh
PACKAGES = {
    **dict.fromkeys(("pack", "pack-short"), "pack"),
    "sandbox": "demo",
    **dict.fromkeys(("functional", "functional-2604", *WAITING, "docs-walk", "programs"), "demo"),
    "bench": "demo",
    **dict.fromkeys(("storage", "storage-long"), "storage"),
    "kernel": "guest",
}
SILENCE_S = 30.0


def commands(names: list[str], extra: list[str]) -> list[list[list[str]]]:
    """Return tox's commands for these lanes, in steps of what runs at the same time."""
    more = ["--", *extra] if extra else []
    together = [name for name in names if name not in ALONE]
    steps = [[[str(TOX), "run", "-e", name, *more]] for name in names if name in ALONE]
    if len(together) < 2:
        return steps + [[[str(TOX), "run", "-e", name, *more]] for name in together]
    parallel = [str(TOX), "run-parallel", "--parallel-no-spinner", "-p"]
    waiting = [one for one in together if one in WAITING]
    others = [one for one in together if one not in WAITING]
    step: list[list[str]] = []
    if waiting:
        step.append([*parallel, "all", "-e", ",".join(waiting), *more])
    if others:
        cores = str(max(1, min(os.cpu_count() or 1, 4)))
        command = [*parallel, cores, "-e", ",".join(others), *more]
        if waiting:
            command = ["nice", "-n", NICE, *command]
        step.append(command)
    return [*steps, step]


def run(steps: list[list[list[str]]]) -> int:
    """Run commands step by step, each step's in parallel; return an exit status."""
    code, began = 0, time.monotonic()
    for step in steps:
        running = [
            subprocess.Popen(one, cwd=ROOT, stdin=subprocess.DEVNULL, env=uv.environment())
            for one in step
        ]
        try:
            while any(one.poll() is None for one in running):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    next(one for one in running if one.poll() is None).wait(SILENCE_S)
                print(f"[{time.monotonic() - began:5.0f} s]", flush=True)
        except KeyboardInterrupt:
            for one in running:  # tox has its tests clean up, and ends what takes too long
                one.send_signal(signal.SIGINT)
            for one in running:
                one.wait()
            raise
        code = code or next((one.returncode for one in running if one.returncode), 0)
    return code


def chosen(words: list[str], *, is_split: bool = True) -> list[str]:
    """Return the lanes of the command line: those that run alone first, then those that wait.

    Without `is_split`, `functional` is one lane with all of its tests, as pytest's arguments need.
    """
    groups = GROUPS if is_split else GROUPS | {"functional": ("functional",)}
    lanes = dict.fromkeys(lane for word in words or ALL for lane in groups.get(word, (word,)))
    return sorted(lanes, key=lambda lane: (lane not in ALONE, lane not in WAITING))


def prepare(names: list[str]) -> int:
    """Install the lanes' packages and tox; return an exit status."""
    groups = sorted({"test"} | {PACKAGES[name] for name in names if name in PACKAGES})
    for command in (
        ["scripts/setup.sh", *groups],
        ["scripts/venv.sh", "tox", "tests/requirements/tox.txt"],
    ):
        if (code := subprocess.run(command, cwd=ROOT, check=False).returncode) != 0:
            return code
    return 0


def missing_checkouts() -> str:
    """Return how to get the checkouts missing for the lane `upstream`, in one line, or ""."""
    facts = (ROOT / "tests" / "bundle" / "upstream.yaml").read_text()
    named = re.findall(
        r"^  (\S+):\n    repository: (\S+)\n.*\n    commit: (\w{12})", facts, re.MULTILINE
    )
    folder = pathlib.Path(os.environ.get("SLURM_DDP_UPSTREAM") or "/nonexistent")
    missing = [
        f"git clone https://github.com/{repository} {name} && git -C {name} checkout {commit}"
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
    """Set up and run."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    extra = arguments[split + 1 :]
    names = chosen(arguments[:split], is_split=not extra)
    if "upstream" in names and (
        text := missing_checkouts() or missing_python()
    ):  # before anything is installed
        print(f"upstream: {text}", file=sys.stderr)
        return 1
    if (code := prepare(names)) != 0:
        return code
    listed = subprocess.run(
        [TOX, "list", "--no-desc"], cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True
    )
    if listed.returncode != 0:
        return listed.returncode  # tox has printed why
    known = listed.stdout.split()
    if unknown := [name for name in names if name not in known]:
        print(f"lanes: no lane `{unknown[0]}`; choose from {', '.join(known)}", file=sys.stderr)
        return 2

    # A cancelled CI job: the tests still clean up. SIGINT too, which a job in the background is
    # started without
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return run(commands(names, extra))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
