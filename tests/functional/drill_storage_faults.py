"""Faults of a shared filesystem that take long, or are timed: what test_storage.py does not do. Run by name:

    tox -e functional -- tests/functional/drill_storage_faults.py

The sandbox's clients are JuiceFS 1.3.1, on the volume that juicefs-server-proxy serves itself.
"""

import json
import re
import time
import typing

import pytest

from functional.conftest import Cluster
from functional.storage_faults import (
    APP,
    CLIENT,
    ENGINE,
    HOSTS,
    MP,
    PROXY,
    SERVER,
    client_of,
    health,
    mounted,
    until,
    until_right,
    workload_status,
    writable_again,
)

pytestmark = pytest.mark.timeout(1500)

NODE = "slurmd/1"
OBJECTS = "juicefs-objects-juicefs-server-proxy.service"


@pytest.fixture
def healthy(cluster: Cluster) -> typing.Iterator[Cluster]:
    until_right(cluster)
    yield cluster
    until_right(cluster)


def hook_s(cluster: Cluster, unit: str) -> float:
    """Deliver update-status to a unit; return how long its hook took, in seconds."""
    cluster.ok("update-status", "--once", unit)
    output = cluster.ok("debug-log", unit, "-n", "50")
    return float(re.findall(r"ran update-status in ([0-9.]+) s", output)[-1])


@pytest.mark.parametrize(("name", "process"), [("client", CLIENT), ("server", SERVER)])
def test_a_killed_client_is_back_within_fifteen_seconds(healthy: Cluster, name: str, process: str):
    script = f"""
old=$({process}); begin=$(date +%s%N); kill -9 $old
{writable_again(process, "$old")}
echo $(( ($(date +%s%N) - begin) / 1000000 ))"""
    times = [int(healthy.on(NODE, "bash", "-c", script)) / 1000 for _ in range(5)]
    print(f"kill -9 of the {name}: writable again after {', '.join(f'{took:.1f}' for took in times)} s")
    assert max(times) < 15
    assert mounted(healthy, NODE) == ["fuse.juicefs"]


def test_a_client_that_hangs_while_its_server_answers_is_replaced(healthy: Cluster):
    heals, begin = health(healthy, NODE)["heals"], time.time()
    healthy.on(NODE, "bash", "-c", f"kill -STOP $({SERVER})")
    until(healthy, NODE, lambda found: found["state"] == "right" and found["heals"] > heals)
    print(f"SIGSTOP of the client: right again after {time.time() - begin:.0f} s")
    output = healthy.on(NODE, "journalctl", "-u", f"mount-keeper-{APP}", "--since", f"@{int(begin)}", "-o", "cat")
    assert f"{MP}: abort: " in output  # it could not be asked to go
    healthy.on(NODE, "touch", f"{MP}/.after-stop")


def test_a_client_whose_store_hangs_is_left_to_finish(healthy: Cluster):
    """The store takes connections and says nothing for a minute, as one does that is overloaded: nothing is lost."""
    proxy, writer = f"{PROXY}/0", "/run/written-to-a-hung-store"
    heals, begin = health(healthy, NODE)["heals"], time.time()
    healthy.on(proxy, "systemctl", "kill", "--signal=STOP", OBJECTS)
    try:
        write = (
            f"(head -c 20M /dev/zero >{MP}/.hung-store && sync {MP}/.hung-store; echo $? >{writer}) >/dev/null 2>&1 &"
        )
        healthy.on(NODE, "bash", "-c", f"rm -f {writer}; {write}")
        until(healthy, NODE, lambda found: found["state"] == "slow")
        time.sleep(60)
        found = health(healthy, NODE)
        assert (found["state"], found["heals"]) == ("slow", heals)
        unit = client_of(healthy, NODE)
        healthy.ok("update-status", "--once", unit)
        assert workload_status(healthy, unit)["message"].endswith("; writes are slow now")
    finally:
        healthy.on(proxy, "systemctl", "kill", "--signal=CONT", OBJECTS)
    until_right(healthy, NODE)
    print(f"the store hung for {time.time() - begin:.0f} s: no client aborted")
    ended = f"for _ in $(seq 1200); do [ -s {writer} ] && break; sleep 0.1; done; grep -qx 0 {writer}"
    healthy.on(NODE, "bash", "-c", ended)
    healthy.on(NODE, "bash", "-c", f"cmp -n 20971520 {MP}/.hung-store /dev/zero; rm {MP}/.hung-store")


def test_a_client_whose_engine_is_frozen_waits_for_it(healthy: Cluster):
    """The engine takes connections and says nothing for a minute, as on a machine that hangs: nothing is lost."""
    proxy, ended = f"{PROXY}/0", "/run/written-to-a-frozen-engine"
    heals, begin = health(healthy, NODE)["heals"], time.time()
    healthy.on(proxy, "systemctl", "kill", "--signal=STOP", ENGINE)
    try:
        write = f"(echo kept >{MP}/.frozen-engine; echo $? >{ended}) >/dev/null 2>&1 &"
        healthy.on(NODE, "bash", "-c", f"rm -f {ended}; {write}")
        until(healthy, NODE, lambda found: "is silent" in found["down"])
        time.sleep(60)
        found = health(healthy, NODE)
        assert (found["heals"], "is silent" in found["down"]) == (heals, True)
    finally:
        healthy.on(proxy, "systemctl", "kill", "--signal=CONT", ENGINE)
    until_right(healthy, NODE)
    assert health(healthy, NODE)["heals"] == heals
    print(f"the engine was frozen for {time.time() - begin:.0f} s: no client aborted")
    healthy.on(NODE, "bash", "-c", f"for _ in $(seq 1200); do [ -s {ended} ] && break; sleep 0.1; done")
    healthy.on(NODE, "bash", "-c", f"grep -qx 0 {ended} && grep -qx kept {MP}/.frozen-engine; rm {MP}/.frozen-engine")


def test_hooks_while_the_engine_is_dead_in_one_way_or_another(healthy: Cluster):
    """Stopped (connections are refused), gone (packets are lost), frozen (it takes connections and says nothing)."""
    unit, proxy = client_of(healthy, NODE), f"{PROXY}/0"
    address = healthy.on(proxy, "hostname", "-I").split()[0]
    device = healthy.on(NODE, "sh", "-c", f"ip -o route get {address} | sed 's/.* dev \\([^ ]*\\).*/\\1/'")
    faults = {
        "stopped": (
            lambda: healthy.on(proxy, "systemctl", "stop", ENGINE),
            lambda: healthy.on(proxy, "systemctl", "start", ENGINE),
        ),
        "gone": (
            lambda: healthy.on(
                NODE, *f"ip neigh replace {address} lladdr 02:00:00:00:00:99 dev {device} nud permanent".split()
            ),
            lambda: healthy.on(NODE, *f"ip neigh del {address} dev {device}".split()),
        ),
        "frozen": (
            lambda: healthy.on(proxy, "systemctl", "kill", "-s", "SIGSTOP", ENGINE),
            lambda: healthy.on(proxy, "systemctl", "kill", "-s", "SIGCONT", ENGINE),
        ),
    }
    print(f"client's hook while all is well: {hook_s(healthy, unit):.1f} s")
    for name, (begin, end) in faults.items():
        times: list[float] = []
        for pause in (0, 3, 9):  # the keeper has not looked yet, looks, has looked
            begin()
            try:
                time.sleep(pause)
                times.append(hook_s(healthy, unit))
                message = workload_status(healthy, unit)
            finally:
                end()
            until_right(healthy, NODE, since=time.time())
        print(f"client's hook with the engine {name}: {', '.join(f'{took:.1f}' for took in times)} s: {message}")


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
        print(f"engine started again: all clients right and resumed after {time.monotonic() - begin:.0f} s")
        assert "DRAIN" not in healthy.on("sackd/0", "scontrol", "show", "node", "slurmd-1", "-o")
    finally:
        healthy.ok("config", APP, "drain-on-failure=false")


def test_an_emptied_engine_is_never_formatted_again(healthy: Cluster):
    """Its folder is put aside: the engine then knows nothing, as after FLUSHDB, and what it knew can be put back."""
    proxy = f"{PROXY}/0"
    folder = healthy.on(proxy, "sed", "-n", "s/^dir //p", f"/etc/slurm-ddp/{PROXY}/redis.conf").strip('"')
    aside = f"systemctl stop {ENGINE}; cp -a {folder} {folder}.kept; find {folder} -mindepth 1 -delete"
    back = f"systemctl stop {ENGINE}; rm -rf {folder}; mv {folder}.kept {folder}; systemctl start {ENGINE}"
    healthy.on(NODE, "sh", "-c", f"echo kept >{MP}/.kept; sync {MP}/.kept")
    healthy.on(proxy, "sh", "-c", f"{aside}; systemctl start {ENGINE}")
    try:
        healthy.ok("update-status", "--once", proxy, client_of(healthy, NODE))
        message = workload_status(healthy, proxy)
        assert message["current"] == "blocked"
        assert message["message"].startswith("the metadata engine lost volume "), message
        assert message["message"].endswith("restore a backup: restore-metadata"), message
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


def test_the_actions(healthy: Cluster):
    unit = client_of(healthy, NODE)

    def run(*words: str) -> dict[str, str]:
        answer = healthy.ctl("run", unit, *words, "--format", "json")
        assert answer.code == 0, answer.err[-2000:]
        return json.loads(answer.out)[unit]["results"]

    healthy.on("sackd/0", "sh", "-c", f"mkdir -p {MP}/set; head -c 20000000 /dev/urandom >{MP}/set/a; sync {MP}/set/a")
    assert run("status")["state"] == "right"
    assert float(run("warmup", "path=set")["seconds"]) < 60
    healthy.on(NODE, "systemd-run", "--quiet", "--unit=holder", "-p", f"WorkingDirectory={MP}/set", "sleep", "600")
    refused = healthy.ctl("run", unit, "remount")
    assert refused.code == 1
    assert f"{MP} is in use by sleep (" in refused.err + refused.out
    healthy.on(NODE, "systemctl", "stop", "holder")
    before = healthy.on(NODE, "bash", "-c", CLIENT)
    assert run("remount", "wait=30")["state"] == "right"
    assert healthy.on(NODE, "bash", "-c", CLIENT) != before
    print(f"benchmark: {run('benchmark', 'size=64')}")
    assert health(healthy, NODE)["state"] == "right"
