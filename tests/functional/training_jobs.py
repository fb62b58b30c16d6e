"""Helpers of training jobs' tests: small scripts that run as ranks, and their submission."""

import re
import time

from functional.conftest import Cluster, Json

CODE = "/mnt/shared/drills"
PATIENCE_S = 300  # a deadline for what takes seconds on a machine with nothing else to do
# Counts steps, keeps its count in the run's folder, and leaves when it is asked to, as a script of a user's should. Its
# journal stays open, so that a filesystem's client that is lost shows as an error without a path.
STEPS = """
import json, os, pathlib, sys, time
steps, pause = int(sys.argv[1]), float(sys.argv[2])
run, attempt = pathlib.Path(os.environ["RUN_DIR"]), os.environ["RUN_ATTEMPT_ID"]
saved = run / "steps"
began = int(saved.read_text()) if saved.exists() else 0
journal = (run / f"journal-{os.environ['RANK']}").open("a")
if ".r0" not in attempt:  # queued again: a few more, and that is all
    steps = began + 5
for step in range(began, steps):
    print(f"step={step} attempt={attempt} host={os.environ['SLURMD_NODENAME']}", flush=True)
    time.sleep(pause)
    print(step, attempt, file=journal, flush=True)
    if os.environ["RANK"] == "0":
        (run / "steps.new").write_text(str(step + 1))
        os.replace(run / "steps.new", saved)
        if os.path.exists(os.environ["STOP_FILE"]):
            outcome = run / "control" / f"{attempt}.outcome"
            outcome.write_text(json.dumps({"outcome": "preempted", "step": step + 1}))
            sys.exit()
"""
FAILS = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
if os.environ["RANK"] == "1" and not os.environ["RUN_ATTEMPT_ID"].endswith(sys.argv[1]):
    raise ValueError("boom")
if os.environ["RUN_ATTEMPT_ID"].endswith(sys.argv[1]):
    sys.exit()
time.sleep(600)
"""
BAD_NODE = """
import os, pathlib
first = pathlib.Path(os.environ["RUN_DIR"], "first")
if not first.exists():
    first.write_text(os.environ["SLURMD_NODENAME"])
if first.read_text() == os.environ["SLURMD_NODENAME"]:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""
TOKEN = """
import os, pathlib, stat
path = pathlib.Path(os.environ["HF_TOKEN_PATH"])
modes = [oct(stat.S_IMODE(place.stat().st_mode)) for place in (path, path.parent, path.parent.parent)]
print("token", *modes, path.read_text().strip()[3:], any("hf_" in value for value in os.environ.values()))
"""
GREEDY = """
import os, time
held = [bytearray(b"x" * (64 << 20)) for _ in range(40 if os.environ["RANK"] == "1" else 0)]
time.sleep(600)
"""
STANDS = """
import os, signal, sys, time, torch
from ddptrain import resume
torch.distributed.init_process_group("gloo")
run = resume.Run()
print("begins at", run.step, flush=True)
def load(step):
    if step == 15 and run.rank == 1 and "t" not in run.attempt:
        stand(sys.argv[1])
    return torch.ones(1)
def stand(how):
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "vfork":  # holds us in a call that nothing interrupts, as a driver does: its child waits for a pipe
        os.mkfifo(f"/tmp/{run.attempt}")
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, f"/tmp/{run.attempt}", os.O_RDONLY, 0)])
    time.sleep(3000)
for step in range(run.step + 1, 21):
    torch.distributed.all_reduce(load(step))
    run.log(step, loss=1.0, total_steps=20)
    if step == 10:
        with run.saving(step):
            pass
run.done(step=20)
torch.distributed.destroy_process_group()
"""
# No group: each rank is an independent program.
ALONE = """
import os, sys, time
print("on CPUs:", os.environ.get("ACCELERATE_USE_CPU"), flush=True)
time.sleep(float(sys.argv[1]))
"""
SCRIPTS = {
    "alone.py": ALONE,
    "stands.py": STANDS,
    "greedy.py": GREEDY,
    "hf_token.py": TOKEN,
    "steps.py": STEPS,
    "fails.py": FAILS,
    "bad_node.py": BAD_NODE,
    "options.py": "import sys, time; time.sleep(1); print('options', *sys.argv[1:])\n",
}


def write_scripts(cluster: Cluster) -> None:
    """Put the scripts onto the shared filesystem."""
    for name, text in SCRIPTS.items():
        cluster.on(
            "sackd/0", "sh", "-c", f"mkdir -p {CODE}; cat > {CODE}/{name} <<'END'\n{text}\nEND\n"
        )


def submit(cluster: Cluster, script: str, *more: str, nodes: int = 1) -> Json:
    small = (f"nodes={nodes}", "gpus-per-node=0", "cpus-per-task=1", "memory=1G")
    return cluster.action("submit-ddp", f"workload={CODE}/{script}", *small, *more)


def record(cluster: Cluster, job_id: str) -> dict[str, str]:
    shown = cluster.on("sackd/0", "scontrol", "show", "job", job_id, "-o")
    return dict(re.findall(r"(\w+)=(\S*)", shown))


def log_of(cluster: Cluster, job: Json) -> str:
    return cluster.on("sackd/0", "sh", "-c", f"cat {job['log']} 2>/dev/null || true")


def until(cluster: Cluster, job: Json, words: str, limit_s: float = PATIENCE_S) -> float:
    """Wait until a job's log has these words; return how long it took."""
    began = time.monotonic()
    while words not in (output := log_of(cluster, job)):
        assert time.monotonic() - began < limit_s, f"no {words!r} in:\n{output}"
        time.sleep(0.3)
    return time.monotonic() - began


def until_state(
    cluster: Cluster, job: Json, *states: str, limit_s: float = PATIENCE_S
) -> dict[str, str]:
    began = time.monotonic()
    while (found := record(cluster, job["job-id"]))["JobState"] not in states:
        assert time.monotonic() - began < limit_s, found
        time.sleep(0.5)
    return found


def until_queued_again(cluster: Cluster, job: Json, limit_s: float = PATIENCE_S) -> None:
    """Wait until Slurm has requeued a job, whose log says so only if the reply came in time."""
    began = time.monotonic()
    while (found := record(cluster, job["job-id"]))["Restarts"] == "0":
        assert time.monotonic() - began < limit_s, f"{found}\n{log_of(cluster, job)}"
        time.sleep(0.5)


def until_gone(cluster: Cluster, job: Json) -> None:
    """Wait until no node holds anything of the job any more, nor does anything wait for it."""
    began = time.monotonic()
    while cluster.on(
        "sackd/0", "squeue", "-h", "-t", "all", "-o", "%i %t", "-j", job["job-id"]
    ).endswith((" CG", " R", " PD")):
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.5)


def steps_done(cluster: Cluster, job: Json) -> list[tuple[int, str]]:
    return [
        (int(n), attempt)
        for n, attempt in re.findall(r"step=(\d+) attempt=(\S+)", log_of(cluster, job))
    ]
