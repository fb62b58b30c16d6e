"""Seconds from a node's loss of power to training again, in a sandbox model of three nodes."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import time

from bench import cluster, row
from sandbox.hosts import Hosts
from sandbox.store import Store

FOLDER = "/mnt/shared/bench-node-lost"
GOAL = 2.0
# Two ranks that wait for each other in each step, as in DDP; the first step of each attempt makes a
# file.
STEPS = """
import datetime, os, pathlib, time, torch, torch.distributed as dist
folder = os.environ.get("RUN_DIR") or os.getcwd()
if os.environ["SLURM_NODEID"] == "1":
    pathlib.Path(folder, "second").write_text(os.environ["SLURMD_NODENAME"])
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
for step in range(2000):
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0 and step == 9:
        attempt = os.environ.get("RUN_ATTEMPT_ID") or os.environ.get("SLURM_RESTART_COUNT") or "0"
        pathlib.Path(folder, f"tenth.{attempt}").touch()
    time.sleep(0.2)
"""
BARE = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --mem=1G --requeue --open-mode=append
#SBATCH --chdir={folder}/bare --output={folder}/bare/log
export CUDA_VISIBLE_DEVICES=
first=$(hostname -I | cut -d' ' -f1)
export first
exec srun sh -c 'exec {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d \\
  --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$first:29400 --local-addr=$(hostname -I | cut -d" " -f1) {folder}/steps.py'
"""


def run(_: pathlib.Path) -> list[row.Row]:
    """Lose a node of a run with a spare node, of one with an idle node, and of a bare script."""
    name = cluster.environment()
    if int(cluster.login("sinfo -h -o %D | head -n 1")) < 3:
        raise row.NotHere(f"three nodes in model {cluster.MODEL}: ./sandboxctl add-unit slurmd")
    python = cluster.login(f"echo /var/tmp/slurm-ddp-$(id -u ubuntu)/{name}/bin/python")
    bare = BARE.format(folder=FOLDER, python=python)
    cluster.login(
        f"rm -rf {FOLDER}; mkdir -p {FOLDER}/bare; cat > {FOLDER}/steps.py <<'END'\n{STEPS}END\n"
    )
    cluster.login(f"cat > {FOLDER}/bare/job <<'END'\n{bare}END\nchown -R ubuntu {FOLDER}")
    ours = [
        f"workload={FOLDER}/steps.py",
        "nodes=2",
        "gpus-per-node=0",
        "cpus-per-task=1",
        "memory=1G",
    ]
    spare = _again_s(*_submitted(*ours, "spare-nodes=1"))
    idle = _again_s(*_submitted(*ours))
    job = cluster.on(
        "sackd/0", "runuser", "-l", "ubuntu", "-c", f"sbatch --parsable {FOLDER}/bare/job"
    )
    peer = _again_s(job, f"{FOLDER}/bare")
    about = (peer, "s", "bare sbatch --requeue", False, GOAL)
    return [
        row.Row("a lost node to training again, with a spare node", spare, *about),
        row.Row("a lost node to training again, with an idle node", idle, *about),
    ]


def _submitted(*params: str) -> tuple[str, str]:
    job = cluster.action("submit-ddp", *params)
    return job["job-id"], job["run-dir"]


def _again_s(job: str, folder: str) -> float:
    """Cut the power of the second node; return the seconds to the next attempt's tenth step."""
    cluster.awaited(
        f"ls {folder}/tenth.* 2>/dev/null", "true", f"tail -n 5 {folder}/log {folder}/logs/*.out"
    )
    unit = cluster.login(f"cat {folder}/second").replace("-", "/")
    host = Hosts(cluster.MODEL).get(Store(cluster.MODEL).load().host_of(unit))
    began = time.monotonic()
    host.kill()
    again = f'[ "$(ls {folder} | grep -c tenth)" = 2 ]'
    for _ in range(4):  # a bare job waits for Slurm for longer than one command
        if cluster.login(
            f"for _ in $(seq 1000); do if {again}; then echo yes; exit; fi; sleep 0.1; done"
        ):
            break
    else:
        raise RuntimeError(f"job {job} did not train again")
    took_s = time.monotonic() - began
    cluster.on("sackd/0", "runuser", "-l", "ubuntu", "-c", f"scancel {job}")
    host.start()
    for _ in range(30):
        cluster.ctl("update-status", "--once")
        if cluster.login("sinfo -h -N -o %T | sort -u") == "idle":
            return took_s
    raise RuntimeError(f"{unit} is not back in Slurm")
