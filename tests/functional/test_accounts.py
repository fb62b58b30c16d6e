"""Folders of the workspace that another account opened or took first are never used. Attacks: test_people.py."""

import time
import typing

import pytest

from functional.accounts import account
from functional.conftest import Cluster, eventually
from functional.storage_faults import APP, HOSTS, MP, PROXY, client_of, workload_status

pytestmark = pytest.mark.timeout(1500)  # the first test of a run deploys; each command has a limit of its own

WHO, UID = "mallory", "2099"


@pytest.fixture
def mallory(cluster: Cluster) -> typing.Iterator[Cluster]:
    """Return the cluster with a second account on every host, which has a folder of its own on the volume."""
    with account(cluster, WHO, UID, HOSTS):
        cluster.on("sackd/0", "install", "-d", "-o", WHO, f"{MP}/{WHO}")
        yield cluster
        cluster.on("sackd/0", "rm", "-rf", f"{MP}/{WHO}")


def as_mallory(cluster: Cluster, host: str, script: str) -> str:
    return cluster.on(host, "runuser", "-u", WHO, "--", "sh", "-c", script)


def mode(cluster: Cluster, path: str = MP, host: str = "sackd/0") -> str:
    return cluster.on(host, "stat", "-c", "%a %u", path)


def test_a_name_that_was_taken_first_is_neither_used_nor_handed_over(mallory: Cluster):
    fresh = f"{MP}/fresh"
    mallory.on("sackd/0", "install", "-d", "-m", "1777", fresh)
    as_mallory(mallory, "slurmd/0", f"mkdir -m 777 {fresh}/environments && mkdir -m 777 {fresh}/theirs")
    try:
        mallory.ok("config", "trainer", f"workspace={fresh}")
        taken = (
            f"{fresh}/environments belongs to uid {UID} (mode 0777), which is none of the trusted 0, 1000: "
            f"chown root {fresh}/environments, or remove it"
        )
        assert workload_status(mallory, "trainer/0") | {"since": ""} == {
            "current": "blocked",
            "message": taken,
            "since": "",
        }
        assert mallory.ctl("run", "trainer/0", "submit-ddp", "workload=smoke").error == f"submit-ddp: {taken}"
        mallory.on("sackd/0", "rm", "-rf", f"{fresh}/environments")
        as_mallory(mallory, "slurmd/0", f"ln -s {fresh}/theirs {fresh}/environments")
        answer = mallory.ctl("run", "trainer/0", "submit-ddp", "workload=smoke")
        assert answer.error.startswith(f"submit-ddp: {fresh}/environments is a symbolic link")
        assert mallory.on("sackd/0", "ls", f"{fresh}/theirs") == ""
        mallory.on("sackd/0", "rm", f"{fresh}/environments")
        assert mallory.action("submit-ddp", "workload=smoke", "dry-run=true")["script"]
    finally:
        mallory.ok("config", "trainer", f"workspace={MP}")
        mallory.on("sackd/0", "rm", "-rf", fresh)
    assert workload_status(mallory, "trainer/0")["current"] == "active"


def test_nothing_is_submitted_while_a_folder_of_the_workspace_is_open(cluster: Cluster):
    folder = f"{MP}/environments"
    was = cluster.on("sackd/0", "stat", "-c", "%a", folder)
    cluster.on("sackd/0", "chmod", "777", folder)
    try:
        answer = cluster.ctl("run", "trainer/0", "submit-ddp", "workload=smoke")
        assert answer.error == (
            f"submit-ddp: {folder} has mode 0777 without the sticky bit, so any account can replace what is in it: "
            f"chmod +t {folder}"
        )
    finally:
        cluster.on("sackd/0", "chmod", was, folder)


def test_a_root_that_was_opened_by_hand_is_repaired_and_a_stricter_one_stays(cluster: Cluster):
    output = "the root had mode 0777, so others could replace what is in it: it has 1777 now"
    since = time.strftime("@%s")
    cluster.on("sackd/0", "chmod", "777", MP)

    def repaired() -> None:
        assert mode(cluster) == "1777 0"

    eventually(repaired)  # by whichever host's keeper writes next
    keepers = f"mount-keeper-{APP}*"
    for host in HOSTS:  # a client keeps attributes for 1 s: no keeper may see the open root any more
        cluster.on(host, "systemctl", "start", f"mount-keeper-{APP}.service")  # returns when its pass has ended
    logs = [cluster.on(host, "journalctl", "--since", since, "-o", "cat", "-u", keepers) for host in HOSTS]
    assert 1 <= sum(text.count(f"{MP}: {output}") for text in logs) <= len(HOSTS)
    cluster.on("sackd/0", "chmod", "755", MP)
    try:
        for unit in (client_of(cluster, "slurmd/0"), f"{PROXY}/0", "trainer/0"):
            cluster.ok("update-status", "--once", unit)
            assert workload_status(cluster, unit)["current"] == "active"
        assert mode(cluster) == "755 0"
    finally:
        cluster.on("sackd/0", "chmod", "1777", MP)


def test_the_proxy_needs_no_mount_to_make_the_root_so(cluster: Cluster):
    logged = cluster.ok("debug-log", "--replay", "--include", PROXY)
    assert "/ had mode 0777, so others could replace what is in it: it has 1777 now" in logged
    assert "fuse" not in cluster.on(f"{PROXY}/0", "cat", "/proc/self/mountinfo")
