"""Deliberate faults of the shared filesystem, during which no secret leaks; each is undone.

The clients are JuiceFS 1.4.1, on the volume that juicefs-server-proxy serves itself. The drills in
this folder have the tests that take minutes, or another deployment.
"""

import json
import pathlib
import time
import typing

import pytest

from functional.conftest import Cluster, eventually
from functional.storage_faults import (
    APP,
    CLIENT,
    HOSTS,
    MP,
    PATIENCE_S,
    PROXY,
    client_of,
    health,
    mounted,
    until,
    until_right,
    workload_status,
    writable_again,
)
from storage import leaks

pytestmark = pytest.mark.timeout(
    1500
)  # the first test of a run deploys; each command has its own limit


@pytest.fixture
def healthy(cluster: Cluster) -> typing.Iterator[Cluster]:
    """Return the cluster with all mounts right, and see that they are again afterwards."""
    until_right(cluster)
    yield cluster
    until_right(cluster)


def test_a_client_that_dies_and_a_mount_over_the_mount_are_repaired_by_themselves(healthy: Cluster):
    killed, covered = HOSTS[0], HOSTS[1]
    begin, heals = time.time(), health(healthy, covered)["heals"]
    clients = {host: healthy.on(host, "bash", "-c", CLIENT) for host in (killed, covered)}
    healthy.on(covered, "mount", "--bind", MP, MP)
    healthy.on(killed, "kill", "-9", clients[killed])
    healthy.on(killed, "timeout", "100", "bash", "-c", writable_again(CLIENT, clients[killed]))
    print(f"kill -9: writable again after {time.time() - begin:.1f} s")
    until(healthy, covered, lambda found: found["state"] == "right" and found["heals"] > heals)
    print(f"a mount over the mount: right after {time.time() - begin:.1f} s")
    for host in (killed, covered):
        assert mounted(healthy, host) == ["fuse.juicefs"]
        assert healthy.on(host, "bash", "-c", CLIENT) != clients[host]
        healthy.on(host, "touch", f"{MP}/.after-faults")
    healthy.on(killed, "rm", f"{MP}/.after-kill", f"{MP}/.after-faults")


def test_a_wrong_password_on_one_node_fails_there_alone_and_the_next_hook_repairs_it(
    healthy: Cluster,
):
    host, unit = HOSTS[2], client_of(healthy, HOSTS[2])
    path = f"/etc/slurm-ddp/{APP}/environment"
    begin = time.time()
    healthy.on(
        host, "bash", "-c", f"sed -i 's/REDIS_PASSWORD=\"/&wrong/' {path}; kill -9 $({CLIENT})"
    )
    try:
        until(
            healthy,
            host,
            lambda found: found["state"] not in ("", "right") and found["checked"] > begin,
        )
        until_right(healthy, *HOSTS[:2], since=time.time())
        journal = f"journalctl -u juicefs-{APP} --since @{int(begin)} -o cat | grep -q WRONGPASS"
        within = f"timeout {PATIENCE_S:.0f} bash -c 'until {journal}; do sleep 1; done'"
        healthy.on(
            host, "bash", "-c", within
        )  # the mount is missed before the next client asks the engine
    finally:
        healthy.ok("update-status", unit)
    assert workload_status(healthy, unit)["current"] == "active"
    assert "wrong" not in healthy.on(host, "cat", path)

    def is_mounted() -> None:
        assert mounted(healthy, host) == ["fuse.juicefs"]

    eventually(
        is_mounted
    )  # a client that started with the wrong file is restarted once it is unused


@pytest.mark.long
def test_a_full_cache_disk_stops_nobody(healthy: Cluster):
    host, cache = HOSTS[2], f"/var/cache/slurm-ddp/{APP}"
    script = f"""set -e
mount -t tmpfs -o size=24m cache {cache}
trap 'umount -l {cache}; systemctl restart juicefs-{APP}.service' EXIT
dd if=/dev/zero of={cache}/filler bs=1M count=24 status=none || true
systemctl restart juicefs-{APP}.service
dd if=/dev/urandom of=/tmp/first bs=1M count=40 status=none
dd if=/tmp/first of={MP}/.big bs=1M conv=fsync status=none
cmp /tmp/first {MP}/.big
df --output=avail {cache} | tail -1
rm {MP}/.big /tmp/first"""
    assert int(healthy.on(host, "bash", "-c", script)) == 0


@pytest.mark.long
def test_a_root_that_was_opened_by_hand_is_repaired_and_a_stricter_one_stays(cluster: Cluster):
    output = "the root had mode 0777, so others could replace what is in it: it has 1777 now"
    since = time.strftime("@%s")
    cluster.on("sackd/0", "chmod", "777", MP)

    def mode() -> str:
        return cluster.on("sackd/0", "stat", "-c", "%a %u", MP)

    def repaired() -> None:
        assert mode() == "1777 0"

    eventually(repaired)  # by the first host whose keeper writes
    keepers = f"mount-keeper-{APP}*"
    for (
        host
    ) in HOSTS:  # a client keeps attributes for 1 s: no keeper may see the open root any more
        cluster.on(
            host, "systemctl", "start", f"mount-keeper-{APP}.service"
        )  # returns when its pass has ended
    logs = [
        cluster.on(host, "journalctl", "--since", since, "-o", "cat", "-u", keepers)
        for host in HOSTS
    ]
    assert 1 <= sum(text.count(f"{MP}: {output}") for text in logs) <= len(HOSTS)
    cluster.on("sackd/0", "chmod", "755", MP)
    try:
        for unit in (client_of(cluster, "slurmd/0"), f"{PROXY}/0", "trainer/0"):
            cluster.ok("update-status", "--once", unit)
            assert workload_status(cluster, unit)["current"] == "active"
        assert mode() == "755 0"
    finally:
        cluster.on("sackd/0", "chmod", "1777", MP)


def test_the_proxy_needs_no_mount_to_make_the_root_so(cluster: Cluster):
    logged = cluster.ok("debug-log", "--replay", "--include", PROXY)
    assert "/ had mode 0777, so others could replace what is in it: it has 1777 now" in logged
    assert "fuse" not in cluster.on(f"{PROXY}/0", "cat", "/proc/self/mountinfo")


# Everything that other accounts on a host can see, each part after a line with its name. `files`
# are those that every account can read, except the distribution's
VISIBLE = r"""
echo '==== argv'
cat /proc/[0-9]*/cmdline | tr '\0' ' '
echo '==== environ'
for p in /proc/[0-9]*; do [ "$(stat -c %u $p)" = 0 ] || cat $p/environ; done 2>/dev/null | tr '\0' ' '
echo '==== units'
systemctl show -p Environment -p ExecStart -p ExecStartPre -p ExecStop '*'
systemctl cat '*' 2>/dev/null
echo '==== journal'
journalctl --no-pager -o cat
cat /var/log/*.log 2>/dev/null
echo '==== files'
folders="/etc /run /var /tmp /srv /home /root /usr/local"
[ -d /mnt/shared ] && folders="$folders /mnt/shared"
setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all sh -c '
find "$@" -xdev \( -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/cache/apt \) -prune -o \
    -type f -readable -size -8192k -print0 2>/dev/null | xargs -0r cat 2>/dev/null' sh $folders
true
"""


def test_no_secret_lies_where_it_can_be_read(healthy: Cluster):
    """Every value of every secret, raw and encoded, in all places that other users can see."""
    secrets = healthy.secrets()
    assert len(secrets) >= 2
    model = json.loads(
        (pathlib.Path("/var/lib/slurm-ddp") / healthy.model / "model.json").read_text()
    )
    client = client_of(healthy, "sackd/0")
    places = {"action results": ""}
    with leaks.watched(
        *secrets.values(), every_s=0.05
    ) as watch:  # of the whole machine, so of all hosts
        for unit, action in (
            (client, "status"),
            *(
                (f"{PROXY}/0", name)
                for name in ("status", "list-quotas", "gc", "backup-metadata", "export-kubernetes")
            ),
        ):
            answer = healthy.ctl("run", unit, action, "--format", "json")
            places["action results"] += answer.out + answer.err
        healthy.ok("update-status", client, f"{PROXY}/0")
    assert "juicefs" in watch.programs
    places |= {
        "databags": json.dumps(
            [[one["app_data"], one["unit_data"]] for one in model["relations"].values()]
        ),
        "status": healthy.ok("status", "--format", "json"),
        "debug-log": healthy.ok("debug-log", "-n", "100000"),
    }
    for host in (*HOSTS, f"{PROXY}/0", "slurmctld/0"):
        for part in healthy.on(host, "sh", "-c", VISIBLE).split("==== ")[1:]:
            place, _, text = part.partition("\n")
            places[f"{host} {place[:20]}"] = places.get(f"{host} {place[:20]}", "") + text
    for host in HOSTS:
        assert {
            f"{host} {place}" for place in ("argv", "environ", "units", "journal", "files")
        } <= set(places)
    assert [place for place, text in places.items() if not text.strip()] == [], (
        "an empty place proves nothing"
    )
    assert "slurm-ddp" in places["sackd/0 files"]
    assert list(leaks.found_in(places, secrets)) == []
    password = next(value for name, value in secrets.items() if name.endswith(" meta-password"))
    kept = healthy.on("sackd/0", "cat", f"/etc/slurm-ddp/{APP}/environment")
    assert list(leaks.found_in({"its own file": kept}, {"password": password})) == [
        "password in its own file"
    ]
