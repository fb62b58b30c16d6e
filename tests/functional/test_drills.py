"""A running job when the cluster fails: the filesystem's client dies, a node loses power."""

import collections.abc
import functools
import json
import pathlib
import re
import time

import pytest

from functional import storage_faults
from functional.conftest import IS_2604, Cluster, Json, eventually
from functional.training_jobs import (
    PATIENCE_S,
    log_of,
    record,
    steps_done,
    submit,
    until,
    until_state,
)
from sandbox.hosts import Host, Hosts
from sandbox.store import Store

pytestmark = [pytest.mark.trains, pytest.mark.timeout(1500)]
STEPS = 60


def batch_host(cluster: Cluster, job: Json) -> str:
    """Return the unit whose host runs the job's script."""
    return record(cluster, job["job-id"])["BatchHost"].replace("-", "/")


def assert_whole(cluster: Cluster, job: Json) -> None:
    """Check that no line was lost: each attempt has all steps, from the saved one to the end."""
    steps: dict[str, list[int]] = {}
    for step, attempt in steps_done(cluster, job):
        steps.setdefault(attempt, []).append(step)
    for done in steps.values():
        assert done == list(range(done[0], done[-1] + 1)), log_of(cluster, job)
    assert {step for done in steps.values() for step in done} == set(range(STEPS)), log_of(
        cluster, job
    )


def kill(cluster: Cluster, host: str, *processes: str) -> None:
    """Kill what these scripts find on a host."""
    cluster.on(host, "bash", "-c", f"kill -9 {' '.join(f'$({process})' for process in processes)}")


def test_a_run_outlives_both_processes_of_its_filesystem_client(drills: Cluster):
    check_run_outlives(
        drills, lambda host: kill(drills, host, storage_faults.CLIENT, storage_faults.SERVER)
    )


@pytest.mark.long
def test_a_run_outlives_the_child_of_its_filesystem_client(drills: Cluster):
    check_run_outlives(drills, lambda host: kill(drills, host, storage_faults.SERVER))


def check_run_outlives(drills: Cluster, fault: collections.abc.Callable[[str], object]) -> None:
    """Check that a script goes on, without a restart, after a fault of storage on its host."""
    storage_faults.until_right(drills)
    job = submit(drills, "steps.py", f"args={STEPS} 0.5", "max-restarts=0")
    until(drills, job, "step=5 ")
    fault(batch_host(drills, job))
    until_state(drills, job, "COMPLETED", "FAILED")
    check_blamed_on_filesystem(drills, job)
    assert_whole(drills, job)


def check_blamed_on_filesystem(drills: Cluster, job: Json, node: str = "") -> None:
    """Check that a run is complete, and that no failure of it is the program's."""
    output = log_of(drills, job)
    assert record(drills, job["job-id"])["JobState"] == "COMPLETED", output
    assert re.findall(r"^\[RESTART\] \d of \d$", output, re.MULTILINE) == [], (
        "no restart of the program's was used"
    )
    faults = re.findall(
        r"^\[FAILED\] attempt=\S+ fault=(\S+) node=(\S+): (.*)", output, re.MULTILINE
    )
    print(*faults, sep="\n")
    assert all(kind == "filesystem" for kind, _, _ in faults), faults
    assert all("[CKPT]" not in words for _, _, words in faults)
    if node:
        assert {where for _, where, _ in faults} <= {node}, faults


# Flags for half a minute on a dedicated core, and the number of steps before the client is killed
BUILT_IN = {
    "gpt": (
        "--layers 1 --heads 1 --width 32 --seq-len 64 --batch 4 --eval-rows 8 --steps 500 --seed 5 --save-minutes 0.1",
        100,
    ),
    "smoke": ("--epochs 15 --samples 20480 --batch 64", 500),
}


def train(cluster: Cluster, workload: str, run: str, nodes: int) -> Json:
    """Start one of the built-in trainings; no failure of its program's is forgiven."""
    small = (f"nodes={nodes}", "gpus-per-node=0", "cpus-per-task=1", "memory=1G", "max-restarts=0")
    return cluster.action(
        "submit-ddp", f"workload={workload}", f"args={BUILT_IN[workload][0]}", f"run={run}", *small
    )


def losses(cluster: Cluster, job: Json) -> dict[int, float]:
    """Return the loss of each step that a run's metrics.jsonl has by now, the last one of each."""
    path = f"{pathlib.PurePath(job['log']).parents[1]}/metrics.jsonl"
    lines = cluster.on("sackd/0", "sh", "-c", f"cat {path} 2>/dev/null || true").splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {one["step"]: one["loss"] for one in records if one.get("kind") == "step"}


def until_step(cluster: Cluster, job: Json, step: int) -> None:
    began = time.monotonic()
    while max(losses(cluster, job), default=0) < step:
        assert time.monotonic() - began < PATIENCE_S, log_of(cluster, job)
        time.sleep(0.5)


@functools.cache
def undisturbed(cluster: Cluster, workload: str, nodes: int) -> dict[int, float]:
    """Return the losses of one of the built-in trainings without a fault."""
    job = train(cluster, workload, f"{workload}-{time.time():.0f}", nodes)
    assert until_state(cluster, job, "COMPLETED", "FAILED", limit_s=600)["JobState"] == "COMPLETED"
    found = losses(cluster, job)
    assert len(found) > BUILT_IN[workload][1]
    return found


def check_losses_are_the_same(
    cluster: Cluster,
    fault: collections.abc.Callable[[str], object],
    workload: str,
    nodes: int,
    on: str = "",
) -> None:
    """Check that a built-in training survives a fault on a node, and computes the same."""
    storage_faults.until_right(cluster)
    expected = undisturbed(cluster, workload, nodes)
    job = train(cluster, workload, f"{workload}-{time.time():.0f}", nodes)
    until_step(cluster, job, BUILT_IN[workload][1])
    host = on or batch_host(cluster, job)
    fault(host)
    until_state(cluster, job, "COMPLETED", "FAILED", limit_s=600)
    check_blamed_on_filesystem(cluster, job, node=host.replace("/", "-"))
    found = losses(cluster, job)
    assert found == expected, "each loss, bit for bit"
    attempts = len(re.findall(r"^\[FAILED\]", log_of(cluster, job), re.MULTILINE)) + 1
    print(
        f"{workload} on {nodes}: {len(found)} of {len(expected)} losses are the same, in {attempts} attempts"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "processes", "nodes", "on"),
    [
        ("gpt", (storage_faults.CLIENT, storage_faults.SERVER), 1, ""),
        ("gpt", (storage_faults.SERVER,), 1, ""),
        ("gpt", (storage_faults.CLIENT, storage_faults.SERVER), 2, "slurmd/1"),
        ("smoke", (storage_faults.CLIENT, storage_faults.SERVER), 1, ""),
        ("smoke", (storage_faults.SERVER,), 1, ""),
    ],
)
def test_a_built_in_training_outlives_its_filesystem_client_without_a_restart(
    drills: Cluster, workload: str, processes: tuple[str, ...], nodes: int, on: str
):
    check_losses_are_the_same(
        drills, lambda host: kill(drills, host, *processes), workload, nodes, on
    )


@pytest.mark.long
@pytest.mark.parametrize("unit", ["slurmd/0", "slurmd/1"])
def test_a_killed_rank_is_reported_on_its_own_node(drills: Cluster, unit: str):
    job = train(drills, "gpt", f"killed-{time.time():.0f}", 2)
    until_step(drills, job, 5)
    kill(
        drills, unit, "pgrep -nf '[d]dptrain train '"
    )  # the newest is the rank, its torchrun the one before
    until_state(drills, job, "FAILED", "COMPLETED")
    node = unit.replace("/", "-")
    assert f"fault=unknown node={node}: killed by signal 9 (SIGKILL)" in log_of(drills, job)


NOTICED_S = 60  # the bundle's SlurmdTimeout


def node(cluster: Cluster, name: str) -> dict[str, str]:
    shown = cluster.on("slurmctld/0", "scontrol", "show", "node", name, "-o")
    return dict(re.findall(r"(\w+)=(\S*)", shown))


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("sleep", r"rank 1 on SECOND is behind, in stand \(.*stands\.py:\d+\); it sleeps \(S.*\)"),
        (
            "stop",
            r"rank 1 on SECOND is behind, in stand \(.*stands\.py:\d+\); it is stopped \(T.*\)",
        ),
        (
            "vfork",
            r"rank 1 on SECOND is behind and showed no stack; it is in a call of .* nothing interrupts \(D.*\)",
        ),
    ],
    ids=["sleeping", "stopped", "uninterruptible"],
)
def test_a_run_that_stands_still_names_the_rank_and_continues_from_its_checkpoint(
    drills: Cluster, how: str, words: str
):
    job = submit(drills, "stands.py", f"args={how}", "nodelist=slurmd-0,slurmd-1", nodes=2)
    until_state(drills, job, "COMPLETED", "FAILED", limit_s=600)
    output = log_of(drills, job)
    second = re.findall(r" nodes=(.*?) head=", output)[0].split()[1]  # Slurm chooses the order
    (found,) = re.findall(
        rf"^\[FAILED\] attempt=\S+ fault=program node={second}: (.*)", output, re.MULTILINE
    )
    print(found)
    assert re.fullmatch(rf"no step for 1\d\d s, .*; {words.replace('SECOND', second)}", found)
    assert not re.search('File ".*elastic/agent', output), "torchrun's agents print no stack"
    assert re.findall("begins at (\\d+)", output) == ["0", "0", "10", "10"]
    assert record(drills, job["job-id"])["JobState"] == "COMPLETED"


def lose_a_node(cluster: Cluster, job: Json) -> tuple[str, Host]:
    """Cut the power of a node of a job that is not its first; return its unit and its host."""
    until(cluster, job, "step=5 ")
    batch, names = (
        batch_host(cluster, job),
        re.findall(r" nodes=(.*?) head=", log_of(cluster, job))[0].split(),
    )
    other = next(unit for name in names if (unit := name.replace("-", "/")) != batch)
    host = Hosts(cluster.model).get(Store(cluster.model).load().host_of(other))
    host.kill()
    return other, host


@pytest.fixture(scope="module")
def three_nodes(drills: Cluster) -> collections.abc.Iterator[Cluster]:
    before = set(drills.units())
    drills.ok("add-unit", "slurmd")
    (added,) = (unit for unit in set(drills.units()) - before if unit.startswith("slurmd/"))
    yield drills
    drills.ok("remove-unit", added)
    if IS_2604:
        return  # slurmctld has deleted its node
    name = added.replace("/", "-")  # Slurm keeps it, and would send jobs there
    drills.on(
        "slurmctld/0", "scontrol", "update", f"nodename={name}", "state=down", "reason=removed"
    )
    drills.on("slurmctld/0", "scontrol", "delete", f"nodename={name}")


@pytest.mark.long
@pytest.mark.parametrize("spare", [1, 0])
def test_another_node_takes_the_place_of_a_lost_one(three_nodes: Cluster, spare: int):
    """The job's spare node within its attempt, or an idle one of the partition after a requeue."""
    drills = three_nodes
    eventually(lambda: assert_states(drills, ["idle"] * 3))
    job = submit(drills, "steps.py", f"args={4 * STEPS} 0.5", f"spare-nodes={spare}", nodes=2)
    _, host = lose_a_node(drills, job)
    try:
        attempt = f"{job['job-id']}.{'r0t1' if spare else 'r1'}"
        print(
            f"again {until(drills, job, f'attempt={attempt} host', limit_s=60):.0f} s after the power went"
        )
        found = until_state(drills, job, "COMPLETED", limit_s=4 * STEPS)
        assert found["Restarts"] == str(1 - spare), (
            "Slurm, which notices after a minute, ended nothing"
        )
    finally:
        host.start()
        eventually(lambda: assert_states(drills, ["idle"] * 3))


def assert_states(cluster: Cluster, wanted: list[str]) -> None:
    cluster.ok(
        "update-status", "--once"
    )  # which Juju sends after its start hook, too; slurm-gpu checks the node
    assert cluster.on("slurmctld/0", "sinfo", "-hN", "-o", "%T").split() == wanted


@pytest.mark.long
def test_a_run_goes_on_by_itself_when_a_node_that_lost_power_is_there_again(drills: Cluster):
    storage_faults.until_right(drills)
    job = submit(drills, "steps.py", f"args={2 * STEPS} 0.5", "nodelist=slurmd-0,slurmd-1", nodes=2)
    other, host = lose_a_node(drills, job)
    name, killed = other.replace("/", "-"), time.monotonic()
    try:
        found = until_state(drills, job, "PENDING", limit_s=NOTICED_S + PATIENCE_S)
        print(f"queued again {time.monotonic() - killed:.0f} s after the power went")
        assert found["Restarts"] == "1", found
        assert "DOWN" in node(drills, name)["State"], "Slurm noticed it by itself"
    finally:
        host.start()
    storage_faults.until_right(drills, other, since=time.time())
    drills.ok(
        "update-status", "--once"
    )  # which Juju sends after its start hook, too; slurm-gpu checks the node
    assert "DOWN" not in node(drills, name)["State"], (
        "it takes jobs again, though ReturnToService is 0"
    )
    until(
        drills, job, ".r1 host=", limit_s=30 + PATIENCE_S
    )  # cred_expire, a pass over the queue, and the start
    until_state(drills, job, "COMPLETED", limit_s=900)
    done = [(step, attempt) for step, attempt in steps_done(drills, job) if attempt.endswith(".r1")]
    assert done, log_of(drills, job)
    assert min(step for step, _ in done) >= 5, "it went on where it was"
