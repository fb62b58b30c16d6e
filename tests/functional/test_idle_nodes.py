"""The check of idle nodes with a real Slurm: passes, holds after two failures, and priority."""

import collections.abc
import json
import time

import pytest

from functional.conftest import Cluster, Json, eventually

pytestmark = [pytest.mark.long, pytest.mark.trains, pytest.mark.timeout(1800)]

LOGIN, CTL, NODE = "sackd/0", "slurmctld/0", "slurmd/1"
NAME = "slurmd-1"
SERVICE = "slurm-ddp-node-check.service"
CHECKS = "/mnt/shared/baselines/node-checks.json"
WAIT_S = 600


def checked(cluster: Cluster) -> Json:
    return json.loads(cluster.on(LOGIN, "cat", CHECKS))


def make_due(cluster: Cluster) -> None:
    """Let a day pass."""
    aged = "import json,sys; known=json.load(open(sys.argv[1]))\n"
    aged += "for one in known.values(): one['checked'] = 0\n"
    aged += "open(sys.argv[1], 'w').write(json.dumps(known))"
    cluster.on(LOGIN, "python3", "-c", aged, CHECKS)


def run_timer(cluster: Cluster) -> None:
    """Start the timer's service on a cluster without jobs, and wait for its end."""
    eventually(lambda: _are_idle(cluster))
    answer = cluster.exec(LOGIN, "systemctl", "start", SERVICE, timeout=WAIT_S)
    log = cluster.exec(LOGIN, "journalctl", "-u", SERVICE, "-o", "cat", "-n", "30").out
    assert answer.code == 0, log


def _are_idle(cluster: Cluster) -> None:
    """Check that no job is left on a node; one that completes is not idle."""
    states = cluster.on(CTL, "sinfo", "--noheader", "--Node", "--format", "%T").split()
    assert states == ["idle", "idle"]


def node(cluster: Cluster) -> str:
    return cluster.on(CTL, "scontrol", "show", "node", NAME, "-o")


@pytest.fixture(scope="module")
def passed(drills: Cluster) -> Json:
    """The result of a check of both nodes by hand; the timer is on, as always."""
    drills.exec(LOGIN, "rm", "-f", CHECKS)
    return drills.action("doctor", "idle=true", timeout=WAIT_S)


def test_two_healthy_idle_nodes_pass_and_leave_nothing(drills: Cluster, passed: Json):
    rows = [line.split() for line in passed["checked"].splitlines()[1:]]
    assert sorted(rows) == [
        ["slurmd-0", "slurmd-1", "passed", "-"],
        ["slurmd-1", "slurmd-0", "passed", "-"],
    ], passed
    assert passed["unfit"] == "none"
    assert "node-check" not in drills.on(LOGIN, "ls", "/mnt/shared/runs")
    assert "no idle node is due" in drills.action("doctor", "idle=true")["verdict"]


def test_the_leader_has_the_timer_and_an_option_removes_it(drills: Cluster, passed: Json):
    timer = "slurm-ddp-node-check.timer"
    assert drills.on(LOGIN, "systemctl", "is-active", timer) == "active"
    drills.ok("config", "trainer", "check-idle-nodes=false")
    eventually(lambda: _is_active(drills, timer, "inactive"))
    drills.ok("config", "trainer", "--reset", "check-idle-nodes")
    eventually(lambda: _is_active(drills, timer, "active"))


def _is_active(cluster: Cluster, unit: str, state: str) -> None:
    assert cluster.exec(LOGIN, "systemctl", "is-active", unit).out.strip() == state


@pytest.fixture
def faulty(drills: Cluster) -> collections.abc.Iterator[Cluster]:
    """A node whose own disk is mounted noexec, so that no environment runs on it."""
    drills.on(NODE, "mount", "-t", "tmpfs", "-o", "noexec,mode=1777", "none", "/var/tmp")
    yield drills
    drills.exec(NODE, "umount", "/var/tmp")


def test_a_node_that_fails_twice_is_drained_held_and_freed_by_its_operator(
    faulty: Cluster, passed: Json
):
    make_due(faulty)
    run_timer(faulty)
    found = checked(faulty)
    assert len(found[NAME]["failures"]) == 1, found
    assert found["slurmd-0"]["failures"] == [], "its neighbour is right"
    assert "DRAIN" not in node(faulty), "once is no proof"

    run_timer(faulty)
    assert "Reason=node-check: " in node(faulty), checked(faulty)
    gpu = faulty.beside(NODE, "slurm-gpu")
    faulty.ok("update-status", gpu)
    reservation = faulty.on(CTL, "scontrol", "show", "reservation", f"slurm-gpu-{NAME}")
    assert f"Nodes={NAME}" in reservation

    faulty.on(NODE, "umount", "/var/tmp")
    faulty.on(CTL, "scontrol", "update", f"nodename={NAME}", "state=resume")
    eventually(lambda: _is_free(faulty))
    run_timer(faulty)
    assert checked(faulty)[NAME]["failures"] == []


def _is_free(cluster: Cluster) -> None:
    shown = node(cluster)
    state = next(word for word in shown.split() if word.startswith("State="))
    flags = set(state.removeprefix("State=").split("+"))
    assert flags <= {"IDLE", "DYNAMIC_NORM"}, shown


def test_a_job_that_comes_goes_first(drills: Cluster, passed: Json):
    make_due(drills)
    eventually(lambda: _are_idle(drills))
    drills.on(LOGIN, "systemctl", "start", "--no-block", SERVICE)
    eventually(lambda: _is_checking(drills))
    script = "cd /tmp && sbatch --parsable -N2 --exclusive -t 5 -o /dev/null --wrap 'sleep 1'"
    began = time.monotonic()
    job = drills.on(LOGIN, "runuser", "-u", "ubuntu", "--", "sh", "-c", script)
    while drills.on(LOGIN, "squeue", "-h", "-t", "all", "-j", job, "-o", "%T") == "PENDING":
        assert time.monotonic() - began < 60
        time.sleep(0.2)
    waited_s = time.monotonic() - began
    print(f"the job waited {waited_s:.1f} s for the check to leave")
    eventually(lambda: _has_stopped(drills, job))
    assert checked(drills)[NAME]["checked"] == 0, "no verdict"


def _is_checking(cluster: Cluster) -> None:
    assert "node-check" in cluster.on(LOGIN, "squeue", "-h", "-t", "RUNNING", "-o", "%j")


def _has_stopped(cluster: Cluster, job: str) -> None:
    log = cluster.on(LOGIN, "journalctl", "-u", SERVICE, "-o", "cat", "-n", "20")
    state = cluster.exec(LOGIN, "systemctl", "is-active", SERVICE).out.strip()
    assert state == "inactive", log
