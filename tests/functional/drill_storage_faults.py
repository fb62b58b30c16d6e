"""Long or timed faults of a shared filesystem, which test_storage.py leaves out. Run by name:

    tox -e functional -- tests/functional/drill_storage_faults.py

The sandbox's clients are JuiceFS 1.4.1, on the volume that juicefs-server-proxy serves itself.
"""

import time
import typing

import pytest

from functional.conftest import Cluster
from functional.storage_faults import (
    APP,
    ENGINE,
    HOSTS,
    MP,
    PROXY,
    SERVER,
    client_of,
    health,
    until,
    until_right,
    workload_status,
)

pytestmark = pytest.mark.timeout(1500)

NODE = "slurmd/1"
OBJECTS = "juicefs-objects-juicefs-server-proxy.service"


@pytest.fixture
def healthy(cluster: Cluster) -> typing.Iterator[Cluster]:
    until_right(cluster)
    yield cluster
    until_right(cluster)


def test_a_client_that_hangs_while_its_server_answers_is_replaced(healthy: Cluster):
    heals, begin = health(healthy, NODE)["heals"], time.time()
    healthy.on(NODE, "bash", "-c", f"kill -STOP $({SERVER})")
    until(healthy, NODE, lambda found: found["state"] == "right" and found["heals"] > heals)
    print(f"SIGSTOP of the client: right again after {time.time() - begin:.0f} s")
    output = healthy.on(
        NODE, "journalctl", "-u", f"mount-keeper-{APP}", "--since", f"@{int(begin)}", "-o", "cat"
    )
    assert f"{MP}: abort: " in output  # it could not be asked to go
    healthy.on(NODE, "touch", f"{MP}/.after-stop")


@pytest.mark.parametrize(
    ("service", "key", "words"), [(OBJECTS, "state", "slow"), (ENGINE, "down", "is silent")]
)
def test_a_client_whose_store_or_engine_hangs_is_left_to_finish(
    healthy: Cluster, service: str, key: str, words: str
):
    """It accepts connections but is silent for a minute, like an overloaded machine: no loss."""
    proxy, ended, path = f"{PROXY}/0", "/run/written-to-a-hung-service", f"{MP}/.hung"
    heals, begin, unit = health(healthy, NODE)["heals"], time.time(), client_of(healthy, NODE)
    healthy.on(proxy, "systemctl", "kill", "--signal=STOP", service)
    try:
        write = (
            f"(head -c 20M /dev/zero >{path} && sync {path}; echo $? >{ended}) >/dev/null 2>&1 &"
        )
        healthy.on(NODE, "bash", "-c", f"rm -f {ended}; {write}")
        until(healthy, NODE, lambda found: words in found[key])
        time.sleep(60)
        found = health(healthy, NODE)
        assert (found["heals"], words in found[key]) == (heals, True)
        healthy.ok("update-status", "--once", unit)
        if service == OBJECTS:
            assert workload_status(healthy, unit)["message"].endswith("; writes are slow now")
    finally:
        healthy.on(proxy, "systemctl", "kill", "--signal=CONT", service)
    until_right(healthy, NODE)
    print(f"{service} hung for {time.time() - begin:.0f} s: no client aborted")
    is_written = (
        f"for _ in $(seq 1200); do [ -s {ended} ] && break; sleep 0.1; done; grep -qx 0 {ended}"
    )
    healthy.on(NODE, "bash", "-c", f"{is_written} && cmp -n 20971520 {path} /dev/zero; rm {path}")
    assert health(healthy, NODE)["heals"] == heals


def test_a_dead_engine_drains_the_node_and_both_come_back(healthy: Cluster):
    healthy.ok("config", APP, "drain-on-failure=true")
    try:
        healthy.on(f"{PROXY}/0", "systemctl", "stop", ENGINE)
        try:
            until(healthy, NODE, lambda found: found["drained"])
            shown = healthy.on("sackd/0", "scontrol", "show", "node", "slurmd-1", "-o")
            assert "+DRAIN" in shown
            assert f"Reason=mount-keeper {APP}: " in shown
            assert "does not answer (connection refused)" in shown
        finally:
            healthy.on(f"{PROXY}/0", "systemctl", "start", ENGINE)
        begin = time.monotonic()
        for host in HOSTS:
            until(healthy, host, lambda found: found["state"] == "right" and not found["drained"])
        print(
            f"engine started again: all clients right and resumed after {time.monotonic() - begin:.0f} s"
        )
        assert "DRAIN" not in healthy.on("sackd/0", "scontrol", "show", "node", "slurmd-1", "-o")
    finally:
        healthy.ok("config", APP, "drain-on-failure=false")


def test_an_emptied_engine_is_never_formatted_again(healthy: Cluster):
    """Its folder is moved away: the engine is then empty, as after FLUSHDB, and can be restored."""
    proxy = f"{PROXY}/0"
    folder = healthy.on(
        proxy, "sed", "-n", "s/^dir //p", f"/etc/slurm-ddp/{PROXY}/redis.conf"
    ).strip('"')
    aside = (
        f"systemctl stop {ENGINE}; cp -a {folder} {folder}.kept; find {folder} -mindepth 1 -delete"
    )
    back = f"systemctl stop {ENGINE}; rm -rf {folder}; mv {folder}.kept {folder}; systemctl start {ENGINE}"
    healthy.on(NODE, "sh", "-c", f"echo kept >{MP}/.kept; sync {MP}/.kept")
    healthy.on(proxy, "sh", "-c", f"{aside}; systemctl start {ENGINE}")
    try:
        until(
            healthy, NODE, lambda found: found["state"] == "absent"
        )  # the keeper's: a hook may come before it
        healthy.ok("update-status", "--once", proxy, client_of(healthy, NODE))
        message = workload_status(healthy, proxy)
        assert message["current"] == "blocked"
        assert "the metadata engine lost volume " in message["message"], message
        assert message["message"].startswith("restore a copy of the storage: "), message
        client = workload_status(healthy, client_of(healthy, NODE))
        assert client["message"] == (
            "JuiceFS:shared does not mount: the metadata engine holds no volume: look at the charm that offers it"
        )
    finally:
        healthy.on(proxy, "sh", "-c", back)
    until_right(healthy, since=time.time())
    healthy.ok("update-status")
    assert healthy.on(NODE, "cat", f"{MP}/.kept") == "kept"
    assert workload_status(healthy, proxy)["current"] == "active"
