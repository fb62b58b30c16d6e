"""The trainer's overhead for a job, in a sandbox model: submitting, a preemption warning.

Run `./sandboxctl deploy ./bundle.yaml` and `./sandboxctl run trainer/0 install-environment` first;
SLURM_DDP_MODEL names a model that is not called `default`. Its clock is this machine's.
"""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import dataclasses
import json
import pathlib
import random
import time

from bench import cluster, commands, row

CODE = "/mnt/shared/bench"
SMALL = ("nodes=1", "gpus-per-node=0", "cpus-per-task=1", "memory=2G")
USER = "ubuntu"
LIMITS_S = {"ddp submit": 0.7, "submit-ddp": 1.0}  # over bare sbatch
TURNS = 6  # the first one warms caches and unpacks the environment
# Slurm starts batch jobs at most every three seconds (slurm.conf(5), batch_sched_delay) by a loop
# of one second: who submits within that time of the last job waits for the rest of it.
REST_S = 4.0
# The first step, and when this job's batch script began: the oldest process that has the job's
# number
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
# On the login host: the times at which a command was typed and returned, and its output
TIMED = """
import json, shlex, subprocess, sys, time
argv = ["runuser", "-l", sys.argv[1], "-c", shlex.join(sys.argv[2:])]
typed = time.time()
printed = subprocess.run(argv, check=True, capture_output=True, text=True)
print(json.dumps({"typed": typed, "queued": time.time(), "printed": printed.stdout}))
"""


@dataclasses.dataclass(frozen=True)
class Start:
    """A job from the command to its first step; in seconds."""

    typed: float
    queued: float
    began: float
    first: float

    @property
    def without_slurm_s(self) -> float:
        """The time before the queue and in the job; Slurm itself starts jobs once a second."""
        return self.queued - self.typed + self.first - self.began


def run(_: pathlib.Path) -> list[row.Row]:
    """Measure in turns, so that a busy neighbour slows all alike."""
    name = cluster.environment()
    cluster.login(
        f"mkdir -p {CODE}/code {CODE}/bare; chown {USER} {CODE}/bare; cat > {CODE}/code/first.py <<'END'\n{FIRST}END\n"
    )
    node = cluster.login("sinfo -h -N -o %N | sort -u | tail -n 1")
    local = f"{cluster.login(f'echo /var/tmp/slurm-ddp-$(id -u {USER})')}/{name}"
    return [*_submitting(node, local), _warning()]


def _submitting(node: str, local: str) -> list[row.Row]:
    """Return each way against bare sbatch, all on one node with an unpacked environment."""
    bare = BARE.format(folder=f"{CODE}/bare", python=f"{local}/bin/python", code=f"{CODE}/code")
    cluster.login(f"cat > {CODE}/bare/job.sbatch <<'END'\n{bare}END\n")
    small = [*SMALL, f"nodelist={node}"]
    script = f"{CODE}/code/first.py"
    flags = [
        word for pair in small for word in (f"--{pair.partition('=')[0]}", pair.partition("=")[2])
    ]
    ways: dict[str, collections.abc.Callable[[], Start]] = {
        "submit-ddp": lambda: _action_started(f"workload={script}", *small),
        "ddp submit": lambda: _typed("ddp", "submit", "--json", *flags, script),
        "bare": lambda: _typed("sbatch", "--parsable", f"-w{node}", f"{CODE}/bare/job.sbatch"),
    }
    taken: dict[str, list[Start]] = {way: [] for way in ways}
    for turn in range(TURNS):
        for way, start in ways.items():  # ours goes first: it unpacks the environment
            cluster.awaited(
                '[ -z "$(squeue -h -t running,completing,pending -o %i)" ]', "true", "squeue"
            )
            time.sleep(REST_S + random.random())
            found = start()
            if turn:
                taken[way].append(found)
    return [_over_bare(way, taken[way], taken["bare"]) for way in LIMITS_S]


def _over_bare(way: str, ours: list[Start], bare: list[Start]) -> row.Row:
    """Return how much more a way takes than bare sbatch, with its limit."""

    def more(seconds: collections.abc.Callable[[Start], float]) -> float:
        return row.median([seconds(one) for one in ours]) - row.median(
            [seconds(one) for one in bare]
        )

    parts = f"{more(lambda one: one.queued - one.typed):+.2f} s to the queue"
    parts += f", {more(lambda one: one.first - one.began):+.2f} s in the job"
    spreads = [row.spread([one.without_slurm_s for one in side], "s") for side in (ours, bare)]
    return row.Row(
        f"{way} to the first step, over bare sbatch",
        more(lambda one: one.without_slurm_s),
        LIMITS_S[way],
        "s",
        "a limit",
        more_is_better=False,
        goal=1.0,
        note=f"{parts}; {spreads[0]}, bare sbatch {spreads[1]}",
    )


def _typed(*argv: str) -> Start:
    """Time a command of the submit user on the login host."""
    seen = json.loads(cluster.on("sackd/0", "python3", "-c", TIMED, USER, *argv))
    folder, job = f"{CODE}/bare", seen["printed"].strip()
    if argv[0] == "ddp":
        found = json.loads(seen["printed"])
        folder, job = found["run-dir"], str(found["job-id"])
    return Start(seen["typed"], seen["queued"], **_first(folder, job))


def _action_started(*params: str) -> Start:
    """Time the action, without the start of `./sandboxctl`, which stands in for Juju's client."""
    began = time.time()
    cluster.on("sackd/0", "true")
    typed = 2 * time.time() - began
    job = cluster.action("submit-ddp", *params)
    return Start(typed, time.time(), **_first(job["run-dir"], job["job-id"]))


def _warning() -> row.Row:
    """Measure the time from a preemption's signal until the job is saved and queued again."""
    words = f"{commands.TINY} --steps 1000000 --epoch-steps 1000000"
    job = cluster.action("submit-ddp", "nodes=2", *SMALL[1:], f"args={words}")
    log = job["log"]
    cluster.awaited(f"grep -q 'step=30/' {log} 2>/dev/null", "true", f"tail -n 5 {log}")
    began = time.time()
    cluster.on("sackd/0", "scancel", "--signal=USR1", "--batch", job["job-id"])
    cluster.awaited(f"grep -q 'is queued again' {log}", "true", f"tail -n 5 {log}")
    took_s = time.time() - began
    cluster.on("sackd/0", "scancel", job["job-id"])
    measure, peer = "warning to saved and queued again", "Slurm's KillWait (a limit)"
    return row.Row(
        measure, took_s, 30.0, "s", peer, more_is_better=False, goal=3.0, note="two ranks, one turn"
    )


def _first(run_dir: str, job: str) -> dict[str, float]:
    """Return when a job began and when its first step was."""
    path = f"{run_dir}/first.{job}"
    return json.loads(
        cluster.awaited(f"[ -s {path} ]", f"cat {path}", f"tail -n 3 {run_dir}/logs/{job}.out")
    )
