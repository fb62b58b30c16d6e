"""How ordinary programs end under Slurm: by limit, preemption, scontrol requeue and scancel.

The programs know nothing of ddp: on a signal they save to a folder that their command names.
"""

import collections.abc
import json
import re

import pytest

from functional.conftest import Cluster, Json, eventually
from functional.training_jobs import (
    CODE,
    log_of,
    record,
    submit,
    until,
    until_gone,
    until_queued_again,
    until_state,
)

pytestmark = [
    pytest.mark.trains,
    pytest.mark.timeout(1800),
]  # the first test of a run deploys; each command has its own limit

SLURMCTLD_LOG = "/var/log/slurm/slurmctld.log"
LIMIT_S = 600  # two minutes for each of two jobs in turn, Slurm's look at the limits every half minute, and the queue's
# Takes a signal to save on, the exit code after that, and a folder. It continues for five steps.
ORDINARY = """
import os, pathlib, signal, sys, time
number, code, folder = signal.Signals["SIG" + sys.argv[1]], int(sys.argv[2]), pathlib.Path(sys.argv[3])
rank = os.environ["RANK"]
place = folder / f"rank-{rank}.pt"
began = int(place.read_text()) if place.exists() else 0
def save(*_):
    folder.mkdir(exist_ok=True)
    place.write_text(str(step))
    print(f"rank {rank} saved step {step} on {number.name} (on {os.environ['SLURMD_NODENAME']})", flush=True)
    os._exit(code)
signal.signal(number, save)
for step in range(began + 1, began + 6 if began else 100000):
    print(f"rank {rank} step {step}", flush=True)
    time.sleep(0.5)
"""
# Saves on SIGTERM as its trainer would, and continues from the folder that --resume names
TRAINS = """
import argparse, os, pathlib, signal, time
try:
    from transformers import Trainer
except ImportError:
    Trainer = None
parser = argparse.ArgumentParser()
parser.add_argument("--resume", type=pathlib.Path)
parser.add_argument("--out", type=pathlib.Path)
options = parser.parse_args()
rank = os.environ["RANK"]
began = int((options.resume / "state.json").read_text()) if options.resume else 0
def save(*_):
    if rank == "0":
        folder = options.out / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(str(step))
        (options.out / f"checkpoint-{step + 1}").mkdir()  # one that was cut off
        print("saved step", step, flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
for step in range(began + 1, began + 6 if began else 100000):
    print(f"rank {rank} step {step} resume {options.resume}", flush=True)
    time.sleep(0.5)
"""
STUBBORN = """
import time
while True:
    print("still here", flush=True)
    time.sleep(5)
"""


@pytest.fixture(scope="module")
def limits(drills: Cluster) -> Cluster:
    """The cluster with the programs."""
    scripts = {"ordinary.py": ORDINARY, "stubborn.py": STUBBORN, "trains.py": TRAINS}
    for name, text in scripts.items():
        drills.on("sackd/0", "sh", "-c", f"cat > {CODE}/{name} <<'END'\n{text}\nEND\n")
    drills.on("sackd/0", "chmod", "1777", CODE)
    return drills


def start(
    cluster: Cluster, name: str, code: int, *more: str, save_on: str = "TERM", nodes: int = 1
) -> Json:
    args = f"args={save_on} {code} {CODE}/saved-{name}"
    cluster.on("sackd/0", "rm", "-rf", f"{CODE}/saved-{name}")
    return submit(cluster, "ordinary.py", f"run=limits-{name}", args, *more, nodes=nodes)


def outcome(cluster: Cluster, job: Json, attempt: str = "r0") -> Json:
    """Wait for an attempt's outcome, and return it."""
    path = f"{job['run-dir']}/control/{job['job-id']}.{attempt}.outcome"

    def read() -> Json:
        text = cluster.on("sackd/0", "sh", "-c", f"cat {path} 2>/dev/null || true")
        assert text, path
        return json.loads(text)

    return eventually(read)


def resume(cluster: Cluster, job: Json) -> Json:
    """Let a requeued job start without its delay, and wait for its end."""
    until_state(cluster, job, "PENDING", "RUNNING", "COMPLETED")
    cluster.ctl("run", "trainer/0", "resume-run", f"run={job['run']}")
    return until_state(cluster, job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


@pytest.mark.long
def test_a_cancelled_run_stays_cancelled_and_a_requeued_one_comes_back(limits: Cluster):
    cancelled = start(limits, "cancelled", 0)
    requeued = start(limits, "requeued", 3)
    for job in (cancelled, requeued):
        until(limits, job, "step 2")
    limits.on("sackd/0", "scancel", cancelled["job-id"])
    limits.on("sackd/0", "scontrol", "requeue", requeued["job-id"])

    until_gone(limits, cancelled)
    found = record(limits, cancelled["job-id"])
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")
    assert outcome(limits, cancelled) == {
        "outcome": "cancelled",
        "exit_code": 0,
        "cause": "cancelled",
    }
    assert "Slurm ends this job: it was cancelled" in log_of(limits, cancelled)

    assert resume(limits, requeued)["Restarts"] == "1"
    assert outcome(limits, requeued)["outcome"] == "preempted"
    assert outcome(limits, requeued)["cause"] == "requeue"
    assert outcome(limits, requeued, "r1")["outcome"] == "done"


@pytest.mark.long
def test_the_stop_signal_reaches_every_rank_of_every_node(limits: Cluster):
    job = start(limits, "warned", 1, "stop-signal=USR1", save_on="USR1", nodes=2)
    until(limits, job, "rank 0 step 2")
    until(limits, job, "rank 1 step 2")
    limits.on("sackd/0", "scancel", "--signal=USR1", "--batch", job["job-id"])
    assert resume(limits, job)["Restarts"] == "1"
    log = log_of(limits, job)
    assert "USR1 was sent to the ranks on slurmd-" in log
    for rank in (0, 1):
        assert log.count(f"rank {rank} saved step") == 1
        assert log.count(f"rank {rank} step 1\n") == 1, "it went on where it was"


@pytest.mark.parametrize("how", [pytest.param("requeue", marks=pytest.mark.long), "limit"])
def test_a_program_continues_from_its_newest_checkpoint_by_an_argument(limits: Cluster, how: str):
    out = f"{CODE}/again-{how}"
    limits.on("sackd/0", "rm", "-rf", out)
    again = f"again=--resume {{latest:{out}/checkpoint-*:state.json}}"
    options = [f"run=limits-again-{how}", f"args=--out {out}", again]
    if how == "limit":
        options += ["stop-signal=auto", "time-limit=0:02:00"]
    job = submit(limits, "trains.py", *options, nodes=2)
    until(limits, job, "rank 1 step 3 resume None")
    if how == "requeue":
        limits.on("sackd/0", "scontrol", "requeue", job["job-id"])
    else:
        until_queued_again(limits, job, limit_s=LIMIT_S)
    assert resume(limits, job)["Restarts"] == "1"
    log = log_of(limits, job)
    (step,) = re.findall(r"saved step (\d+)", log)
    assert f"[RESTART] it continues with: --resume {out}/checkpoint-{step}\n" in log
    for rank in (0, 1):
        assert f"rank {rank} step {int(step) + 1} resume {out}/checkpoint-{step}" in log
        assert log.count(f"rank {rank} step 1 ") == 1, "it went on where it was"


@pytest.mark.long
def test_programs_that_save_on_a_signal_survive_their_time_limit(limits: Cluster):
    limit = "time-limit=0:02:00"
    jobs = [
        start(limits, "term-0", 0, limit),
        start(limits, "term-3", 3, limit),
        start(limits, "usr1-1", 1, limit, "stop-signal=USR1", save_on="USR1"),
    ]
    for job in jobs:
        until_queued_again(limits, job, limit_s=LIMIT_S)
    for job in jobs:
        found = until_state(
            limits, job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", limit_s=LIMIT_S
        )
        assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1")
        first, last = outcome(limits, job), outcome(limits, job, "r1")
        assert (first["outcome"], first["cause"], last["outcome"]) == ("preempted", "limit", "done")
        log = log_of(limits, job)
        assert log.count("saved step") == 1
        assert log.count("rank 0 step 1\n") == 1, "it went on where it was"


@pytest.mark.long
def test_a_program_that_saves_nothing_is_stopped_after_two_limits(limits: Cluster):
    job = submit(limits, "stubborn.py", "time-limit=0:02:00", "run=limits-stubborn")
    until(
        limits,
        job,
        "[REQUEUE] not again: 2 attempts reached the time limit without progress",
        limit_s=2 * LIMIT_S,
    )
    found = until_state(limits, job, "TIMEOUT", "FAILED", "CANCELLED", "PENDING", "COMPLETED")
    assert (found["JobState"], found["Restarts"]) == ("TIMEOUT", "1")
    assert outcome(limits, job, "r1")["outcome"] == "failed"


@pytest.fixture
def preempting(limits: Cluster) -> collections.abc.Iterator[Cluster]:
    """Slurm with a partition whose jobs preempt others, as in docs/howto/resume.md."""
    site = (
        "PreemptType=preempt/partition_prio\\nPreemptMode=REQUEUE\\n"
        "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP\\n"
    )
    conf = "/etc/slurm/slurm.conf"
    lines = f"printf '{site}' > {conf}.site; echo 'include slurm.conf.site' >> {conf}"
    limits.on(
        "slurmctld/0", "sh", "-c", f"cp -p {conf} {conf}.before; {lines}; scontrol reconfigure"
    )
    yield limits
    limits.on(
        "slurmctld/0", "sh", "-c", f"mv {conf}.before {conf}; rm {conf}.site; scontrol reconfigure"
    )


@pytest.mark.long
def test_a_preempted_run_comes_back_without_the_delay(preempting: Cluster):
    job = start(preempting, "preempted", 5, nodes=2)
    until(preempting, job, "step 2")
    urgent = "sbatch --parsable -p urgent -N2 --exclusive -t 1 -o /dev/null --wrap 'sleep 5'"
    preempting.on("sackd/0", "sh", "-c", f'cd /tmp; su ubuntu -c "{urgent}"')
    until(preempting, job, "Slurm ends this job: another job takes its place")
    preempting.ok("update-status", "slurmctld/0")  # its charm reads slurm.conf
    found = until_state(preempting, job, "COMPLETED", "FAILED", "CANCELLED")
    assert found["Restarts"] == "1"
    left = outcome(preempting, job)
    assert (left["outcome"], left["cause"]) == ("preempted", "preemption")
    assert "saved step" in log_of(preempting, job)
    asked = preempting.on(
        "slurmctld/0", "grep", "-c", f"setting begin to .* JobId={job['job-id']}$", SLURMCTLD_LOG
    )
    assert asked == "1", "without Slurm's delay"
