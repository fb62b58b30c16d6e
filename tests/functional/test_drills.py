"""What happens to a running job when the cluster fails under it: the filesystem's client dies, a node loses power."""

import collections.abc
import re
import time

import pytest

from functional import storage_faults
from functional.conftest import Cluster, Json, eventually
from functional.training_jobs import PATIENCE_S, log_of, record, steps_done, submit, until, until_state
from sandbox.hosts import Host, Hosts
from sandbox.store import Store

pytestmark = [pytest.mark.trains, pytest.mark.timeout(1500)]
STEPS = 60


def batch_host(cluster: Cluster, job: Json) -> str:
    """Return the unit on whose host the job's script runs."""
    return record(cluster, job["job-id"])["BatchHost"].replace("-", "/")


def assert_whole(cluster: Cluster, job: Json) -> None:
    """Check that no line was lost: of each attempt all steps are there, from the one that was saved to the end."""
    steps: dict[str, list[int]] = {}
    for step, attempt in steps_done(cluster, job):
        steps.setdefault(attempt, []).append(step)
    for done in steps.values():
        assert done == list(range(done[0], done[-1] + 1)), log_of(cluster, job)
    assert {step for done in steps.values() for step in done} == set(range(STEPS)), log_of(cluster, job)


def test_a_run_outlives_both_processes_of_its_filesystem_client(drills: Cluster):
    check_run_outlives(drills, lambda host: kill(drills, host, storage_faults.CLIENT, storage_faults.SERVER))


def kill(cluster: Cluster, host: str, *processes: str) -> None:
    """Kill what these scripts find on a host."""
    cluster.on(host, "bash", "-c", f"kill -9 {' '.join(f'$({process})' for process in processes)}")


def check_run_outlives(drills: Cluster, fault: collections.abc.Callable[[str], object]) -> None:
    """Check that a run goes on, with no restart of its program's, after a fault of storage on its host."""
    storage_faults.until_right(drills)
    job = submit(drills, "steps.py", f"args={STEPS} 0.5", "max-restarts=3")
    until(drills, job, "step=5 ")
    fault(batch_host(drills, job))
    until_state(drills, job, "COMPLETED", "FAILED")
    output = log_of(drills, job)
    assert record(drills, job["job-id"])["JobState"] == "COMPLETED", output
    assert_whole(drills, job)
    assert re.findall(r"^\[RESTART\] \d of 3$", output, re.MULTILINE) == [], "no restart of the program's was used"
    faults = re.findall(r"^\[FAILED\] attempt=\S+ fault=(\S+) node=(\S+): (.*)", output, re.MULTILINE)
    assert all(kind == "filesystem" for kind, _, _ in faults), faults
    assert all("[CKPT]" not in words for _, _, words in faults)
    print(*faults, sep="\n")


NOTICED_S = 60  # the bundle's SlurmdTimeout


def node(cluster: Cluster, name: str) -> dict[str, str]:
    shown = cluster.on("slurmctld/0", "scontrol", "show", "node", name, "-o")
    return dict(re.findall(r"(\w+)=(\S*)", shown))


@pytest.mark.long
def test_a_run_that_stands_still_continues_from_its_checkpoint(drills: Cluster):
    job = submit(drills, "stands.py", nodes=2)
    until_state(drills, job, "COMPLETED", "FAILED", limit_s=600)
    output = log_of(drills, job)
    (words,) = re.findall(r"^\[FAILED\] attempt=\S+ fault=program node=\S+: (.*)", output, re.MULTILINE)
    assert re.fullmatch(r"no step for 1\d\d s, .*; rank 1 on slurmd-\d is behind, in load \(.*stands\.py:9\)", words)
    assert re.findall("begins at (\\d+)", output) == ["0", "0", "10", "10"]
    assert record(drills, job["job-id"])["JobState"] == "COMPLETED"


def lose_a_node(cluster: Cluster, job: Json) -> tuple[str, Host]:
    """Cut the power of a node of a job that is not its first; return its unit and its host."""
    until(cluster, job, "step=5 ")
    batch, names = batch_host(cluster, job), re.findall(r" nodes=(.*?) head=", log_of(cluster, job))[0].split()
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
    name = added.replace("/", "-")  # Slurm keeps it, and would send jobs there
    drills.on("slurmctld/0", "scontrol", "update", f"nodename={name}", "state=down", "reason=removed")
    drills.on("slurmctld/0", "scontrol", "delete", f"nodename={name}")


@pytest.mark.long
@pytest.mark.parametrize("spare", [1, 0])
def test_another_node_takes_the_place_of_a_lost_one(three_nodes: Cluster, spare: int):
    """A spare node of the job within its attempt, else an idle one of the partition after a requeue."""
    drills = three_nodes
    eventually(lambda: assert_states(drills, ["idle"] * 3))
    job = submit(drills, "steps.py", f"args={4 * STEPS} 0.5", f"spare-nodes={spare}", nodes=2)
    _, host = lose_a_node(drills, job)
    try:
        attempt = f"{job['job-id']}.{'r0t1' if spare else 'r1'}"
        print(f"again {until(drills, job, f'attempt={attempt} host', limit_s=60):.0f} s after the power went")
        found = until_state(drills, job, "COMPLETED", limit_s=4 * STEPS)
        assert found["Restarts"] == str(1 - spare), "Slurm, which notices after a minute, ended nothing"
    finally:
        host.start()
        eventually(lambda: assert_states(drills, ["idle"] * 3))


def assert_states(cluster: Cluster, wanted: list[str]) -> None:
    cluster.ok("update-status", "--once")  # which Juju sends after its start hook, too; slurm-gpu checks the node
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
    drills.ok("update-status", "--once")  # which Juju sends after its start hook, too; slurm-gpu checks the node
    assert "DOWN" not in node(drills, name)["State"], "it takes jobs again, though ReturnToService is 0"
    until(drills, job, ".r1 host=", limit_s=30 + PATIENCE_S)  # cred_expire, a pass over the queue, and the start
    until_state(drills, job, "COMPLETED", limit_s=900)
    done = [(step, attempt) for step, attempt in steps_done(drills, job) if attempt.endswith(".r1")]
    assert done, log_of(drills, job)
    assert min(step for step, _ in done) >= 5, "it went on where it was"
