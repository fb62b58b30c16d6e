"""What goes wrong with a shared filesystem, done on purpose, and how long until it is right again.

The sandbox's clients are JuiceFS 0.14.2, on the volume that juicefs-server-proxy serves itself. Run by name, as it takes
minutes and the lane does not collect it:

    tox -e functional -- tests/functional/drill_storage_faults.py
"""

import base64
import json
import time
import typing

import pytest

from functional.conftest import Cluster

pytestmark = pytest.mark.timeout(1500)

MP = "/mnt/shared"
APP = "shared-filesystem-client"
NODE = "slurmd/1"
STATE = f"/var/lib/slurm-ddp/{APP}"
ENGINE = "juicefs-metadata-juicefs-server-proxy.service"
CLIENT = "pgrep -of 'juicefs --no-agent mount'"


def client_of(cluster: Cluster, host: str) -> str:
    """Return the unit of the client on a host."""
    status = json.loads(cluster.ok("status", "--format", "json"))
    units = {name: unit for app in status["applications"].values() for name, unit in app.get("units", {}).items()}
    return next(name for name in units[host]["subordinates"] if name.startswith(f"{APP}/"))


def health(cluster: Cluster, host: str = NODE) -> dict[str, typing.Any]:
    return json.loads(cluster.on(host, "cat", f"{STATE}/health.json"))


def until(cluster: Cluster, seconds: float, host: str = NODE, **wanted: object) -> dict[str, typing.Any]:
    """Wait until the keeper found what is wanted; return all that it found."""
    end = time.monotonic() + seconds
    while True:
        found = health(cluster, host)
        if all(found[key] == value for key, value in wanted.items()):
            return found
        assert time.monotonic() < end, f"not {wanted} within {seconds} s, but {found}"
        time.sleep(0.5)


@pytest.fixture
def healthy(cluster: Cluster) -> Cluster:
    for host in ("sackd/0", "slurmd/0", NODE):
        until(cluster, 60, host, state="right")
    return cluster


def test_a_killed_client_is_back_within_fifteen_seconds(healthy: Cluster):
    script = f"""
old=$({CLIENT}); begin=$(date +%s%N); kill -9 $old
until new=$({CLIENT}) && [ "$new" != "$old" ] && echo x 2>/dev/null >{MP}/.after-kill; do sleep 0.1; done
echo $(( ($(date +%s%N) - begin) / 1000000 ))"""
    times = [int(healthy.on(NODE, "bash", "-c", script)) / 1000 for _ in range(3)]
    print(f"kill -9 of the client: writable again after {', '.join(f'{took:.1f}' for took in times)} s")
    assert max(times) < 15
    assert healthy.on(NODE, "findmnt", "-rno", "FSTYPE", MP).split() == ["fuse.juicefs"]


def test_a_client_that_hangs_while_its_server_answers_is_replaced(healthy: Cluster):
    heals = health(healthy)["heals"]
    healthy.on(NODE, "bash", "-c", f"kill -STOP $({CLIENT})")
    begin = time.monotonic()
    found = until(healthy, 120, state="right", heals=heals + 1)
    print(f"SIGSTOP of the client: right again after {time.monotonic() - begin:.0f} s")
    assert found["healed"].startswith("abort: ")
    healthy.on(NODE, "touch", f"{MP}/.after-stop")


def test_a_mount_over_the_mount_is_taken_off(healthy: Cluster):
    heals = health(healthy)["heals"]
    healthy.on(NODE, "mount", "--bind", MP, MP)
    until(healthy, 45, state="right", heals=heals + 1)
    assert healthy.on(NODE, "findmnt", "-rno", "FSTYPE", MP).split() == ["fuse.juicefs"]


def test_a_dead_engine_is_named_drains_the_node_and_both_come_back(healthy: Cluster):
    healthy.ok("config", APP, "drain-on-failure=true")
    try:
        healthy.on("juicefs-server-proxy/0", "systemctl", "stop", ENGINE)
        try:
            until(healthy, 90, drained=True)
            shown = healthy.on("sackd/0", "scontrol", "show", "node", "slurmd-1", "-o")
            assert "+DRAIN" in shown
            assert f"Reason=mount-keeper {APP}: " in shown
            assert "does not answer (connection refused)" in shown
            healthy.ok("config", APP, "buffer-size=320")  # a hook, in the middle of it
            client = healthy.units()[client_of(healthy, NODE)]["workload-status"]
            assert client["current"] == "waiting"
            assert ":6379 does not answer (connection refused) since 20" in client["message"]
        finally:
            healthy.on("juicefs-server-proxy/0", "systemctl", "start", ENGINE)
        begin = time.monotonic()
        for host in ("sackd/0", "slurmd/0", NODE):
            until(healthy, 90, host, state="right", drained=False)
        print(f"engine started again: all clients right and resumed after {time.monotonic() - begin:.0f} s")
        assert "DRAIN" not in healthy.on("sackd/0", "scontrol", "show", "node", "slurmd-1", "-o")
    finally:
        healthy.ok("config", APP, "drain-on-failure=false", "buffer-size=0")


def test_wrong_keys_on_one_node_fail_there_alone_and_the_next_hook_mends_them(healthy: Cluster):
    path = f"/etc/slurm-ddp/{APP}/environment"
    healthy.on(NODE, "bash", "-c", f"sed -i 's/REDIS_PASSWORD=\"/&wrong/' {path}; kill -9 $({CLIENT})")
    end = time.monotonic() + 30
    while health(healthy)["state"] == "right" and time.monotonic() < end:
        time.sleep(0.5)
    assert health(healthy)["state"] != "right"
    for host in ("sackd/0", "slurmd/0"):
        assert health(healthy, host)["state"] == "right"
    healthy.ok("config", APP, "buffer-size=321")
    try:
        until(healthy, 60, state="right")
        assert healthy.units()[client_of(healthy, NODE)]["workload-status"]["current"] == "active"
    finally:
        healthy.ok("config", APP, "buffer-size=0")


def test_a_full_cache_disk_stops_nobody(healthy: Cluster):
    script = """set -e
mkdir -p /small; mount -t tmpfs -o size=24m cache /small; dd if=/dev/zero of=/small/filler bs=1M count=23 status=none
"""
    healthy.on(NODE, "bash", "-c", script)
    # tmpfs is refused by name, as it would cost memory; the folder that the charm made is covered instead
    refused = healthy.ctl("config", APP, "cache-directories=/small")
    try:
        assert refused.code == 0
        message = healthy.units()[client_of(healthy, NODE)]["workload-status"]["message"]
        assert message == "cache-directories: /small lies on tmpfs: name folders of a local disk"
    finally:
        healthy.ok("config", APP, "cache-directories=")
    cache = f"/var/cache/slurm-ddp/{APP}"
    script = f"""set -e
umount /small; rmdir /small
mount -t tmpfs -o size=24m cache {cache}; dd if=/dev/zero of={cache}/filler bs=1M count=24 status=none || true
systemctl restart juicefs-{APP}.service
until mountpoint -q {MP}; do sleep 0.2; done
dd if=/dev/urandom of={MP}/.big bs=1M count=40 conv=fsync status=none
sha256sum <{MP}/.big >/tmp/first; echo 3 >/proc/sys/vm/drop_caches || true; sha256sum <{MP}/.big | cmp - /tmp/first
rm {MP}/.big; umount -l {cache}; systemctl restart juicefs-{APP}.service"""
    healthy.on(NODE, "bash", "-c", script)
    until(healthy, 60, state="right")


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


def test_no_secret_is_shown_while_it_fails(healthy: Cluster):
    """After all of the above: no secret, raw or encoded, in any process, journal, unit, state file or status."""
    environment = healthy.on(NODE, "cat", f"/etc/slurm-ddp/{APP}/environment")
    secret = environment.partition('REDIS_PASSWORD="')[2].partition('"')[0]
    assert len(secret) >= 8
    forms = {secret, base64.b64encode(secret.encode()).decode().rstrip("=")}
    script = f"""
cat /proc/[0-9]*/cmdline | tr '\\0' ' '
for p in /proc/[0-9]*; do [ "$(stat -c %u $p)" = 0 ] || cat $p/environ 2>/dev/null | tr '\\0' ' '; done
find /etc -type f -perm /044 -exec cat {{}} + | tr -d '\\0'
cat {STATE}/*.json
journalctl --no-pager -o cat"""
    said = healthy.on(NODE, "bash", "-c", script) + healthy.ok("status", "--format", "json")
    said += healthy.ok("debug-log", "-n", "100000")
    assert "mount-keeper" in said
    assert [form for form in forms if form in said] == []
