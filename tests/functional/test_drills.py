"""What happens to a running job when the cluster fails under it: the filesystem's client dies, a node loses power."""

import re
import time

import pytest

from functional import storage_faults
from functional.conftest import Cluster, Json
from functional.test_trainer import drills, log_of, record, steps_done, submit, until, until_state
from sandbox.hosts import Hosts
from sandbox.store import Store

__all__ = ["drills"]  # a fixture

pytestmark = pytest.mark.timeout(1500)
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
    storage_faults.until_right(drills)
    job = submit(drills, "steps.py", f"args={STEPS} 0.5", "max-restarts=3")
    until(drills, job, "step=5 ")
    host = batch_host(drills, job)
    both = f"kill -9 $({storage_faults.CLIENT}) $({storage_faults.SERVER})"
    drills.on(host, "bash", "-c", both)
    until_state(drills, job, "COMPLETED", "FAILED")
    said = log_of(drills, job)
    assert record(drills, job["job-id"])["JobState"] == "COMPLETED", said
    assert_whole(drills, job)
    assert re.findall(r"^\[RESTART\] \d of 3$", said, re.MULTILINE) == [], "no restart of the program's was used"
    faults = re.findall(r"^\[FAILED\] attempt=\S+ fault=(\S+) node=(\S+): (.*)", said, re.MULTILINE)
    assert all(kind == "filesystem" for kind, _, _ in faults), faults
    assert all("[CKPT]" not in words for _, _, words in faults)
    print(*faults, sep="\n")


def test_a_log_goes_on_when_the_clients_child_alone_is_killed(drills: Cluster):
    storage_faults.until_right(drills)
    job = submit(drills, "steps.py", f"args={STEPS} 0.5")
    until(drills, job, "step=5 ")
    drills.on(batch_host(drills, job), "bash", "-c", f"kill -9 $({storage_faults.SERVER})")
    until_state(drills, job, "COMPLETED", "FAILED")
    said = log_of(drills, job)
    assert record(drills, job["job-id"])["JobState"] == "COMPLETED", said
    assert_whole(drills, job)


def test_a_run_goes_on_when_a_node_that_lost_power_is_there_again(drills: Cluster):
    storage_faults.until_right(drills)
    job = submit(drills, "steps.py", f"args={STEPS} 0.5", nodes=2)
    until(drills, job, "step=5 ")
    (other,) = {"slurmd/0", "slurmd/1"} - {batch_host(drills, job)}
    name, host = other.replace("/", "-"), Hosts(drills.model).get(Store(drills.model).load().host_of(other))
    host.kill()
    # what slurmctld does by itself when SlurmdTimeout, five minutes, is over
    drills.on("slurmctld/0", "scontrol", "update", f"nodename={name}", "state=down", "reason=drill")
    found = until_state(drills, job, "PENDING")
    assert found["Restarts"] == "1", found
    host.start()
    storage_faults.until_right(drills, other, since=time.time())
    drills.on("slurmctld/0", "scontrol", "update", f"nodename={name}", "state=resume")
    began = time.monotonic()
    until_state(drills, job, "COMPLETED", limit_s=900)
    print(f"completed {time.monotonic() - began:.0f} s after the node was back")
    done = [(step, attempt) for step, attempt in steps_done(drills, job) if attempt.endswith(".r1")]
    assert done, log_of(drills, job)
    assert min(step for step, _ in done) >= 5, "it went on where it was"
