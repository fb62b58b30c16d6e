"""What the trainer adds to a job, in a sandbox model that is there: submitting, the environment, a preemption warning.

`./sandboxctl deploy ./bundle.yaml` and `./sandboxctl run trainer/0 install-environment` come first; SLURM_DDP_MODEL
names a model that is not called `default`. Its clock is this machine's.
"""

# pyright: basic, reportPrivateImportUsage=false
import base64
import collections.abc
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import random
import re
import subprocess
import tarfile
import time
import typing

from bench import row

CTL = pathlib.Path(__file__).resolve().parents[2] / "sandboxctl"
MODEL = os.environ.get("SLURM_DDP_MODEL", "default")
FAR = pathlib.Path(__file__).resolve().parents[1] / "far.py"
AWAY_MS = 0.4  # what the relay adds; with its own work half a millisecond, as within a data centre
CODE = "/mnt/shared/bench"
SMALL = ("nodes=1", "gpus-per-node=0", "cpus-per-task=1", "memory=2G")
LIMIT_S = 120
USER = "ubuntu"
LIMITS_S = {"ddp submit": 0.7, "ddp serve": 1.0, "submit-ddp": 1.0}  # over bare sbatch
READ_CONFIG = "import json, tomllib; print(json.dumps(tomllib.load(open('/etc/slurm-ddp.toml', 'rb'))))"
TURNS = 7  # the first one warms caches and unpacks the environment
# Slurm starts batch jobs at most every three seconds (slurm.conf(5), batch_sched_delay) by a loop of one second: who
# submits within that time of the last job waits for the rest of it.
REST_S = 4.0
UNPACK_S = 1200  # some ten thousand files onto a filesystem that syncs each
# The first step, and when this job's batch script began: the oldest process that has the job's number
FIRST = """
import json, os, pathlib, time, torch
torch.ones(64, 64).sum().item()
first, job, oldest = time.time(), os.environ["SLURM_JOB_ID"], 1 << 62
for place in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        if f"SLURM_JOB_ID={job}".encode() in (place / "environ").read_bytes().split(b"\\0"):
            oldest = min(oldest, int((place / "stat").read_text().rpartition(")")[2].split()[19]))
    except OSError:
        pass
began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + oldest / os.sysconf("SC_CLK_TCK")
partial = pathlib.Path(os.environ["RUN_DIR"], f".first.{job}")
partial.write_text(json.dumps({"began": began, "first": first}))
partial.rename(partial.with_name(f"first.{job}"))
"""
# The script of a user who has the environment and no ddp
BARE = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1 --cpus-per-task=1 --mem=2G --output={folder}/%j.out
export RUN_DIR={folder} CUDA_VISIBLE_DEVICES=
exec srun {python} -m torch.distributed.run --nproc-per-node=1 {code}/first.py
"""
# The script of a user who has the environment and submitit, whose task calls a function instead of torchrun
BY_SUBMITIT = """
import os, pathlib, runpy, sys
import submitit

def first():
    runpy.run_path(str(pathlib.Path(__file__).with_name("first.py")))

if __name__ == "__main__":
    import by_submitit  # the task imports it by that name
    folder, python, node = sys.argv[1:]
    os.environ.update(RUN_DIR=folder, CUDA_VISIBLE_DEVICES="")
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_python=python)
    executor.update_parameters(nodes=1, tasks_per_node=1, cpus_per_task=1, mem_gb=2, timeout_min=10)
    executor.update_parameters(slurm_additional_parameters={"nodelist": node})
    print(executor.submit(by_submitit.first).job_id)
"""
SUBMITIT = ("submitit", "cloudpickle", "typing_extensions")  # all of it, pure Python
# On the login host: time one way of submitting from its start, as the submit user, to the first step
DRIVER = """
import json, os, pathlib, pwd, subprocess, sys, time
user, folder, request, *argv = sys.argv[1:]
about = pwd.getpwnam(user)
env = {"HOME": about.pw_dir, "USER": user, "LOGNAME": user, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
who = {"user": about.pw_uid, "group": about.pw_gid, "extra_groups": [], "env": env, "cwd": "/", "text": True}
typed = time.time()
with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **who) as process:
    process.stdin.write(request + chr(10))
    process.stdin.flush()
    lines = process.stdout if request else [process.stdout.read()]
    printed = next(line for line in lines if not line.startswith('{"log"'))
    queued = time.time()
    process.stdin.close()
if folder:
    job = printed.strip()
else:
    found = json.loads(printed)
    found = found.get("results", found)
    folder, job = found["run-dir"], found["job-id"]
    queued = os.stat(f"{folder}/job.json").st_mtime  # written again once sbatch has answered
path, end = pathlib.Path(folder, f"first.{job}"), time.monotonic() + 120
while not path.exists():
    assert time.monotonic() < end, printed
    time.sleep(0.05)
print(json.dumps({"typed": typed, "queued": queued, **json.loads(path.read_text())}))
"""
IMPORT = "import time; b = time.perf_counter(); import torch; print(time.perf_counter() - b)"


def run(scratch: pathlib.Path) -> list[row.Row]:
    """Measure in turns, so that a busy neighbour slows all alike."""
    _ = scratch  # what is written lies in the model
    if os.geteuid() != 0:
        raise row.NotHere("the sandbox needs root")
    if MODEL != "default" and not re.fullmatch(r"[a-z][a-z0-9-]*", MODEL):
        raise row.NotHere(f"SLURM_DDP_MODEL={MODEL!r} is no model's name")
    shown = _ctl("status", "--format", "json", check=False)
    if '"trainer/0"' not in shown:
        raise row.NotHere(f"no sandbox model {MODEL} with the trainer: ./sandboxctl deploy ./bundle.yaml")
    archive = _on("sackd/0", "sh", "-c", "ls -t /mnt/shared/environments/*.tar.zst | head -n 1")
    if not archive:
        raise row.NotHere("no environment in the sandbox: ./sandboxctl run trainer/0 install-environment")
    _on("sackd/0", "sh", "-c", f"mkdir -p {CODE}/code; cat > {CODE}/code/first.py <<'END'\n{FIRST}END\n")
    return [*_submitting(archive), *_importing(archive), *_warning()]


@dataclasses.dataclass(frozen=True)
class Start:
    """A job from the command to its first step; in seconds."""

    typed: float
    queued: float
    began: float
    first: float

    @property
    def without_slurm_s(self) -> float:
        """Return how long it took before the queue, and in the job: Slurm begins jobs in rounds of a second."""
        return self.queued - self.typed + self.first - self.began


def _submitting(archive: str) -> list[row.Row]:
    """Each way in turns with bare sbatch, all on one node, whose environment is unpacked."""
    (node,) = _on("sackd/0", "sh", "-c", "sinfo -h -N -o %N | sort -u | tail -n 1").split()
    name = archive.rsplit("/", 1)[-1].removesuffix(".tar.zst")
    cache = _on("sackd/0", "sh", "-c", f"echo /var/tmp/slurm-ddp-$(id -u {USER})")
    bare = BARE.format(folder=f"{CODE}/bare", python=f"{cache}/{name}/bin/python", code=f"{CODE}/code")
    made = f"mkdir -p {CODE}/bare; chown {USER} {CODE}/bare; cat > {CODE}/bare/job.sbatch <<'END'\n{bare}END\n"
    _on("sackd/0", "sh", "-c", made)
    by_submitit = _submitit(f"{cache}/{name}/bin/python", node)
    small = [*(word.partition("=")[::2] for word in SMALL), ("nodelist", node)]
    script = f"{CODE}/code/first.py"
    flags = [word for option, value in small for word in (f"--{option}", value)]
    values = {option: int(value) if value.isdecimal() else value for option, value in small}
    config = json.loads(_on("sackd/0", "python3", "-c", READ_CONFIG))
    request = {"do": "submit-ddp", "params": {"workload": script, **values}, "config": config, "unit": "trainer/0"}
    ways: dict[str, collections.abc.Callable[[], Start]] = {
        "bare": lambda: _driven(f"{CODE}/bare", "", "sbatch", "--parsable", f"-w{node}", f"{CODE}/bare/job.sbatch"),
        "submitit": lambda: _driven(f"{CODE}/submitit", "", *by_submitit),
        "ddp submit": lambda: _driven("", "", "ddp", "submit", "--json", *flags, script),
        "ddp serve": lambda: _driven("", json.dumps(request), "ddp", "serve"),
        "submit-ddp": lambda: _asked(f"workload={script}", *(f"{option}={value}" for option, value in small)),
    }
    taken: dict[str, list[Start]] = {way: [] for way in ways}
    for turn in range(TURNS):
        for way, start in reversed(ways.items()):  # ours goes first: it unpacks the environment
            _rest()
            found = start()
            if turn:
                taken[way].append(found)
    added = [_added(way, taken[way], taken["bare"]) for way in LIMITS_S]
    return [*added, *(_beside(way, taken[way], taken["submitit"]) for way in LIMITS_S)]


def _submitit(python: str, node: str) -> list[str]:
    """Put submitit beside the scripts on the shared filesystem, and return the command that submits with it."""
    made = f"mkdir -p {CODE}/submitit {CODE}/peers; chown {USER} {CODE}/submitit; base64 -d | tar -xz -C {CODE}/peers"
    _on("sackd/0", "sh", "-c", made, given=_packed(SUBMITIT))
    _on("sackd/0", "sh", "-c", f"cat > {CODE}/code/by_submitit.py", given=BY_SUBMITIT)
    script = ["python3", f"{CODE}/code/by_submitit.py", f"{CODE}/submitit", python, node]
    return ["env", f"PYTHONPATH={CODE}/peers:{CODE}/code", *script]


def _packed(names: collections.abc.Iterable[str]) -> str:
    """Return installed packages of pure Python as a tar file in base64."""

    def chosen(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if info.name.endswith("__pycache__") else info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in names:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise row.NotHere(f"{name} is not installed: make bench installs it")
            path = pathlib.Path(spec.origin)
            path = path.parent if path.name == "__init__.py" else path
            archive.add(path, path.name, filter=chosen)
    return base64.b64encode(buffer.getvalue()).decode()


def _beside(way: str, ours: list[Start], theirs: list[Start]) -> row.Row:
    """Return a way beside submitit, both without Slurm's rounds."""
    seconds = [[one.without_slurm_s for one in side] for side in (ours, theirs)]
    note = f"{row.spread(seconds[0], 's')}, peer {row.spread(seconds[1], 's')}; its task calls a function, no torchrun"
    return row.Row(
        f"{way} to the first step", row.median(seconds[0]), row.median(seconds[1]), "s", "submitit",
        more_is_better=False, note=note,
    )  # fmt: skip


def _added(way: str, ours: list[Start], bare: list[Start]) -> row.Row:
    """Return how much more a way takes than bare sbatch, beside what it may."""

    def more(seconds: collections.abc.Callable[[Start], float]) -> float:
        return row.median([seconds(one) for one in ours]) - row.median([seconds(one) for one in bare])

    parts = f"{more(lambda one: one.queued - one.typed):+.2f} s to the queue"
    parts += f", {more(lambda one: one.first - one.began):+.2f} s in the job"
    whole = f"{more(lambda one: one.first - one.typed):+.2f} s with Slurm's rounds"
    bare_s = row.median([one.without_slurm_s for one in bare])
    ours_s = row.spread([one.without_slurm_s for one in ours], "s")
    return row.Row(
        f"{way} to the first step, over bare sbatch", more(lambda one: one.without_slurm_s), LIMITS_S[way], "s",
        "a limit", more_is_better=False, goal=1.0, note=f"{parts}; {whole}; {ours_s}, bare sbatch {bare_s:.2f} s",
    )  # fmt: skip


def _driven(folder: str, request: str, *argv: str) -> Start:
    return Start(**json.loads(_on("sackd/0", "python3", "-c", DRIVER, USER, folder, request, *argv)))


def _asked(*params: str) -> Start:
    """Time the action, from ./sandboxctl on this machine, which is on the same clock.

    What ./sandboxctl takes to do nothing on that host, in place of Juju's client and controller, is taken off.
    """
    began = time.time()
    _on("sackd/0", "true")
    typed = 2 * time.time() - began
    job = _action("submit-ddp", *params)
    found = _first(job["run-dir"], job["job-id"])
    return Start(typed, float(_on("sackd/0", "stat", "-c", "%.Y", f"{job['run-dir']}/job.json")), **found)


def _importing(archive: str) -> list[row.Row]:
    """`import torch` from where jobs find it, beside the same files on the shared filesystem.

    The engine that a file's lookups ask is a process of this same machine here, which it is nowhere else: so there is a
    second peer, whose engine answers as late as across a network (bench/far.py).
    """
    name = archive.rsplit("/", 1)[-1].removesuffix(".tar.zst")
    shared = f"{CODE}/{name}"
    (node,) = _on("sackd/0", "sh", "-c", "sinfo -h -N -o %N | sort -u | tail -n 1").split()
    unit = "/".join(node.rsplit("-", 1))
    local = f"/var/tmp/slurm-ddp-$(id -u ubuntu)/{name}"
    parts = f"zstd -dc {archive} | tar -xi -C {shared}"  # each part is a tar of its own
    unpack = f"[ -e {shared}.done ] || (mkdir -p {shared} && {parts} && touch {shared}.done)"
    _on("sackd/0", "sh", "-c", f"{unpack}; chmod -R a+rX {CODE}", limit_s=UNPACK_S)
    job = _action("submit-ddp", f"workload={CODE}/code/first.py", "nodes=2", *SMALL[1:])  # unpacks it on both nodes
    _first(job["run-dir"], job["job-id"])
    _drained()
    ours: list[float] = []
    peer: list[float] = []
    far: list[float] = []
    away_s: list[float] = []
    for turn in range(4):
        for home, taken in ((local, ours), (shared, peer)):
            took_s = float(_on(unit, "sh", "-c", f"cd /; runuser -u ubuntu -- {home}/bin/python -c '{IMPORT}'"))
            if turn:
                taken.append(took_s)
        python = f"{shared.removeprefix('/mnt/shared/')}/bin/python"
        there = json.loads(_on(unit, "python3", "-c", FAR.read_text(), str(AWAY_MS), python, "3"))
        far += there["seconds"][1:]  # a new client's first turn fills its cache
        away_s.append(there["round_trip_s"])
    away = f"its engine {row.median(away_s) * 1000:.1f} ms away"
    return [
        row.Row(
            "import torch, as jobs do", row.median(ours), row.median(far), "s", f"a venv on JuiceFS, warm, {away}",
            more_is_better=False, goal=5.0, note=f"{min(far) / min(ours):.2f} by the quickest turns",
        ),
        row.Row(
            "import torch, as jobs do", row.median(ours), row.median(peer), "s", "the same, its engine on this machine",
            more_is_better=False, note=f"{min(peer) / min(ours):.2f} by the quickest turns",
        ),
    ]  # fmt: skip


def _warning() -> list[row.Row]:
    """From the signal of a preemption or a time limit to a job that waits again, two ranks of the payload."""
    more = (
        "--layers 2 --heads 2 --width 64 --seq-len 64 --batch 4 --steps 1000000 --epoch-steps 1000000 --log-every 1",
    )
    job = _action("submit-ddp", "nodes=2", *SMALL[1:], f"args={more[0]}", "env=OMP_NUM_THREADS=1")
    _until(job["log"], "step=30/")
    began = time.time()
    _on("sackd/0", "scancel", "--signal=USR1", "--batch", job["job-id"])
    output = _until(job["log"], "is queued again")
    _action("cancel-run", f"run={job['run']}")
    found = re.findall(r"^\[(PREEMPT|REQUEUE)\] \d+-\d+-\d+T(\S+)Z", output, re.MULTILINE)
    stamps = dict(reversed(found))  # the first of each: a job that was queued again is ended, which warns it once more
    day = began - began % 86400

    def seconds(stamp: str) -> float:
        hours, minutes, rest = stamp.split(":")
        return (day + int(hours) * 3600 + int(minutes) * 60 + float(rest) - began) % 86400

    note = f"the job's shell had it after {seconds(stamps['PREEMPT']):.2f} s"
    return [
        row.Row(
            "warning to saved and queued again", seconds(stamps["REQUEUE"]), 30.0, "s", "Slurm's KillWait (a limit)",
            more_is_better=False, goal=3.0, note=note,
        )
    ]  # fmt: skip


def _action(name: str, *params: str) -> dict[str, str]:
    answer = json.loads(_ctl("run", "trainer/0", name, *params, "--format", "json"))
    return typing.cast(dict[str, str], answer["trainer/0"]["results"])


def _first(run_dir: str, job: str) -> dict[str, float]:
    """Return when a job began and when its first step was."""
    path = f"{run_dir}/first.{job}"
    return json.loads(_awaited(f"[ -s {path} ]", f"cat {path}", f"tail -n 3 {run_dir}/logs/{job}.out"))


def _until(log: str, words: str) -> str:
    """Return a log once it has these words."""
    return _awaited(f"grep -q '{words}' {log} 2>/dev/null", f"cat {log}", f"tail -n 5 {log}")


def _rest() -> None:
    """Wait until no job is at work and Slurm would start one at once, but for its loop, met at any time of it."""
    _drained()
    time.sleep(REST_S + random.random())


def _drained() -> None:
    """Wait until no job is at work."""
    waiting = "squeue -h -t running,completing,pending -o %i"
    _awaited(f'[ -z "$({waiting})" ]', "true", waiting)


def _awaited(condition: str, then: str, trouble: str) -> str:
    """Wait on the login host, so that one command of the sandbox's does it; return what `then` prints."""
    once = f"if {condition}; then {then}; exit; fi; sleep 0.1"
    return _on("sackd/0", "sh", "-c", f"for _ in $(seq {LIMIT_S * 10}); do {once}; done; {trouble} >&2; exit 1")


def _on(unit: str, *command: str, given: str = "", limit_s: float = LIMIT_S * 2) -> str:
    """Return a command's output on a unit's host; `given` is its standard input."""
    return _ctl("exec", unit, "--", *command, given=given, limit_s=limit_s).strip()


def _ctl(*words: str, check: bool = True, given: str = "", limit_s: float = LIMIT_S * 2) -> str:
    argv = [str(CTL), "--model", MODEL, *words]
    done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=limit_s, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)[:200]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout
