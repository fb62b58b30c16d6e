"""Concurrent actions and hooks under Juju's locks, with the bundle's own charms."""

import subprocess

import pytest

from functional.conftest import MODEL, REPOSITORY, Cluster, eventually

pytestmark = [pytest.mark.trains, pytest.mark.timeout(1800)]

CODE = "/mnt/shared/waits.py"


def begin(*arguments: str) -> subprocess.Popen[str]:
    """Start a command of ./sandboxctl, and do not wait for it."""
    return subprocess.Popen(
        [REPOSITORY / "sandboxctl", "--model", MODEL, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def updates(cluster: Cluster, *units: str) -> int:
    """Return how often units ran update-status that they had not asked for."""
    return sum(
        cluster.ok("debug-log", "--replay", "--include", one).count("ran update-status in ")
        for one in units
    )


def wakes(cluster: Cluster, unit: str) -> int:
    """Return how often a unit ran update-status because it had asked for it."""
    return cluster.ok("debug-log", "--replay", "--include", unit).count(
        "ran update-status (juju-exec) in "
    )


@pytest.mark.long
def test_while_an_action_waits_other_units_of_its_machine_run_hooks_and_its_own_unit_does_not(
    cluster: Cluster,
):
    cluster.action("install-environment", timeout=1500)
    cluster.on("sackd/0", "sh", "-c", f"echo 'import time; time.sleep(900)' > {CODE}")
    mount = next(
        name
        for name in cluster.units()["sackd/0"]["subordinates"]
        if name.startswith("shared-filesystem")
    )
    waiting = begin("run", "trainer/0", "submit-ddp", f"workload={CODE}", "nodes=1", "wait=true")

    def running() -> str:
        jobs = cluster.on("sackd/0", "squeue", "-h", "-t", "R", "-o", "%i").split()
        assert len(jobs) == 1
        return jobs[0]

    try:
        job = eventually(running)
        before = updates(cluster, mount)
        cluster.ok("update-status", "--once", mount, "trainer/0", timeout=120)
        assert updates(cluster, mount) > before
        assert cluster.units()["trainer/0"]["juju-status"]["message"] == "running action submit-ddp"
        listing = begin("run", "trainer/0", "list-runs")
        with pytest.raises(subprocess.TimeoutExpired):
            listing.wait(15)
    finally:
        cluster.on("sackd/0", "scancel", "--user", "ubuntu")
    _, output = waiting.communicate(timeout=300)
    assert (waiting.returncode, f"job {job} CANCELLED" in output) == (1, True), output[-2000:]
    out, output = listing.communicate(timeout=300)
    assert listing.returncode == 0, output
    assert "list-runs waits for the unit: trainer/0 runs action submit-ddp" in output
    assert "CANCELLED" in out


@pytest.mark.long
def test_units_that_wait_for_slurmctld_wake_themselves_when_it_is_there_again(cluster: Cluster):
    gpus = [name for name in cluster.units() if name.startswith("slurm-gpu/")]
    units = ("trainer/0", *gpus)
    cluster.on("slurmctld/0", "systemctl", "stop", "slurmctld")
    try:
        cluster.ok("update-status", "--once", *units)
        assert {cluster.units()[name]["workload-status"]["current"] for name in units} == {
            "waiting"
        }
    finally:
        cluster.on("slurmctld/0", "systemctl", "start", "slurmctld")
    woken = {name: wakes(cluster, name) for name in units}

    def are_active() -> None:
        cluster.action("list-runs")  # hooks run only while a command does
        assert {cluster.units()[name]["workload-status"]["current"] for name in units} == {"active"}

    eventually(are_active)
    assert all(wakes(cluster, name) > woken[name] for name in units)
