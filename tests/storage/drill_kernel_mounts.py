"""NFS and CephFS with a real kernel's client, against real servers, in a machine of QEMU's.

The machine that runs the tests may have neither filesystem in its kernel, so all of it happens in a guest: the charm's
code draws up units, systemd there runs them, the keeper's timer mends them. The machine is emulated, which takes many
minutes beside other work, so the lane does not collect it. Run it by name:

    tox -e storage -- tests/storage/drill_kernel_mounts.py
"""

import collections.abc
import dataclasses
import json
import pathlib
import threading
import time
import typing

import guest as machines
import pytest

HERE = pathlib.Path(__file__).parent
MP = "/mnt/shared"
SERVER = "10.9.0.1"
SLOW = "/etc/systemd/system/mount-keeper-{}.timer.d"
URI = f"nfs://({SERVER})/srv/data"
# nfsd in a network namespace of its own: its link can be cut, which a server on the same machine could not
NFS_SERVER = f"""
mkdir -p /srv/data /srv/other
chmod 1777 /srv/data
modprobe nfsd
ip netns add srv
ip link add veth0 type veth peer name veth1 netns srv
ip addr add 10.9.0.2/24 dev veth0
ip link set veth0 up
ip -n srv addr add {SERVER}/24 dev veth1
ip -n srv link set veth1 up
ip -n srv link set lo up
cat >/usr/local/sbin/serve <<'END'
#!/bin/sh
exec ip netns exec srv sh -ec "
mount -t nfsd nfsd /proc/fs/nfsd
case $1 in
start)
  echo 10 >/proc/fs/nfsd/nfsv4leasetime
  echo 10 >/proc/fs/nfsd/nfsv4gracetime
  test -e /run/fsid || echo 1 >/run/fsid
  exportfs -o rw,no_root_squash,no_subtree_check,fsid=\\$(cat /run/fsid) 10.9.0.0/24:/srv/data
  pidof rpc.mountd >/dev/null || rpc.mountd
  rpc.nfsd -N 3 4 ;;
stop) rpc.nfsd 0 ;;
swap)
  exportfs -ua
  exportfs -f
  echo 2 >/run/fsid
  exportfs -o rw,no_root_squash,no_subtree_check,fsid=2 10.9.0.0/24:/srv/data ;;
esac"
END
chmod 755 /usr/local/sbin/serve
serve start
"""


@dataclasses.dataclass
class Node:
    """A guest with the charm's code in it."""

    guest: machines.Guest

    def hook(self, uri: str = URI, **asked: typing.Any) -> dict[str, typing.Any]:
        """Do what a hook of the charm does; return the status."""
        config = {"mountpoint": MP} | asked.pop("config", {})
        request = json.dumps({"do": "ensure", "uri": uri, "config": config} | asked)
        found = json.loads(self.guest.talk("/opt/mount_driver.py", request, timeout=240))
        assert found["level"] != "error", found["text"]
        return found

    def remove(self, app: str = "client") -> None:
        request = json.dumps({"do": "remove", "app": app})
        assert json.loads(self.guest.talk("/opt/mount_driver.py", request, timeout=240)) == {"kept": ""}

    def tick(self, passes: int = 1, app: str = "client") -> dict[str, typing.Any]:
        """Let the keeper look, as its timer would; return what it found."""
        for _ in range(passes):
            self.guest.run("/usr/bin/systemctl", "start", f"mount-keeper-{app}.service", timeout=120)
        return json.loads(self.guest.run("/bin/cat", f"/var/lib/slurm-ddp/{app}/health.json").out)

    def until_right(self, seconds: float) -> float:
        """Let the keeper look until the mount is right; return how many seconds that took."""
        begin = time.monotonic()
        while (found := self.tick())["state"] != "right":
            assert time.monotonic() - begin < seconds, found
        return time.monotonic() - begin

    def mounts(self, path: str = MP) -> list[str]:
        lines = self.guest.run("/bin/cat", "/proc/self/mountinfo").out.splitlines()
        return [line for line in lines if line.split()[4] == path]


@pytest.fixture(scope="module")
def node() -> collections.abc.Iterator[Node]:
    missing = machines.missing_tools()
    if missing:
        pytest.fail(f"install {', '.join(missing)}: scripts/setup.sh guest", pytrace=False)
    with machines.booted(memory_mib=1536) as guest:
        guest.put(
            {
                "/opt/charm/src": machines.CHARM / "src",
                "/opt/charm/lib": machines.REPOSITORY / "lib",
                "/opt/mount_driver.py": HERE / "mount_driver.py",
            }
        )
        guest.sh(NFS_SERVER, timeout=120)
        # An emulated machine beside other work is ten times slower than a real one: give each look as much longer
        slower = (
            "s/^_PROBE_S, _SETTLE_S = 5.0, 8.0$/_PROBE_S, _SETTLE_S = 20.0, 30.0/; s/^_PROBE_S = 5.0$/_PROBE_S = 20.0/"
        )
        guest.sh(
            f"cd /opt/charm/src; sed -i '{slower}' mount_keeper.py mounter.py; grep -h '^_PROBE_S.*20.0' *.py | wc -l | grep 2"
        )
        # The tests let the keeper look when they want it to: an emulated machine has no time for more
        for app in ("client", "ceph"):
            slow = b"[Timer]\nOnActiveSec=\nOnUnitInactiveSec=\nOnActiveSec=1d\n"
            guest.put({f"{SLOW.format(app)}/slow.conf": slow})
        yield Node(guest)


@pytest.fixture
def mounted(node: Node) -> Node:
    """Return the node with the export mounted and right."""
    if len(node.mounts()) != 1 or "acregmin=600" in node.mounts()[0]:
        status = node.hook()
        assert status["level"] == "active", status
    return node


def test_the_export_is_mounted_by_our_unit_with_our_options(node: Node):
    status = node.hook()
    assert status["text"] == f"{SERVER}:/srv/data is mounted at {MP}"
    (line,) = node.mounts()
    for word in ("nosuid", "nodev", "noatime", " nfs4 ", "vers=4.2", "hard", "nconnect=8", "timeo=600"):
        assert word in line, line
    assert node.guest.sh("systemctl is-active mnt-shared.mount mount-keeper-client.timer") == "active\nactive"
    node.guest.sh(f"echo hello >{MP}/greeting; grep hello /srv/data/greeting; test ! -e {MP}/.mount-probe/guest.*")
    assert node.tick()["state"] == "right"
    assert node.hook()["text"] == status["text"]
    assert len(node.mounts()) == 1


def test_a_setuid_program_on_the_server_is_just_a_program(mounted: Node):
    mounted.guest.sh("cp /usr/bin/id /srv/data/id; chmod 4755 /srv/data/id")
    assert mounted.guest.sh(f"setpriv --reuid=1000 --regid=1000 --clear-groups {MP}/id -u") == "1000"


def test_a_change_waits_for_users_and_follows_by_itself_when_they_are_gone(mounted: Node):
    mounted.guest.sh(f"systemd-run --quiet --unit=holder -p WorkingDirectory={MP} sleep 600")
    status = mounted.hook(config={"profile": "dataset"})
    assert "restart pending" in status["text"]
    assert mounted.tick()["heals"] == 0
    assert "acregmin=600" not in mounted.mounts()[0]
    mounted.guest.sh("systemctl stop holder")
    assert mounted.tick()["healed"] == "restart: a change was due"
    assert "acregmin=600" in mounted.mounts()[0]
    assert "restart pending" not in mounted.hook(config={"profile": "dataset"})["text"]


def test_nobody_not_even_root_fills_the_folder_while_nothing_is_mounted(mounted: Node):
    mounted.guest.sh("systemctl stop mnt-shared.mount")
    assert not mounted.mounts()
    said = mounted.guest.run("/bin/touch", f"{MP}/lost", check=False)
    assert said.code != 0
    assert "Operation not permitted" in said.err
    assert mounted.tick()["state"] == "right"  # whoever stopped it


def test_what_somebody_unmounted_or_mounted_over_is_put_right(mounted: Node):
    mounted.guest.sh(f"umount {MP}")
    assert mounted.tick()["state"] == "right"
    mounted.guest.sh(f"mount -t nfs4 -o nosharecache {SERVER}:/srv/data {MP}")
    assert len(mounted.mounts()) == 2
    assert mounted.tick()["state"] == "right"
    assert len(mounted.mounts()) == 1
    mounted.guest.sh(f"mount -t tmpfs theirs {MP}")
    assert mounted.hook()["level"] == "blocked"  # not ours to take away
    assert mounted.tick()["detail"] == f"{MP} holds theirs (tmpfs)"
    assert len(mounted.mounts()) == 2
    mounted.guest.sh(f"umount {MP}")
    assert mounted.tick()["state"] == "right"


def test_a_stale_handle_is_healed(mounted: Node):
    mounted.guest.sh("mv /srv/data /srv/old; mkdir -m 1777 /srv/data; serve swap", timeout=60)
    assert "Stale file handle" in mounted.guest.run("/bin/ls", MP, check=False, timeout=60).err
    begin = time.monotonic()
    found = mounted.tick()
    print(f"NFS: one pass healed a stale handle in {time.monotonic() - begin:.1f} s (emulated machine)")
    assert found["state"] == "right"
    assert "stale file handle" in found["healed"]
    mounted.guest.sh(f"touch {MP}/fresh; test -e /srv/data/fresh")


def test_a_dead_server_is_waited_for_and_nothing_is_lost(mounted: Node):
    heals = mounted.tick()["heals"]
    mounted.guest.sh("serve stop", timeout=60)
    written: list[str] = []

    def write() -> None:
        written.append(mounted.guest.sh(f"echo kept >{MP}/kept; cat {MP}/kept", timeout=240))

    writer = threading.Thread(target=write)
    writer.start()
    found = mounted.tick(2)
    assert found["state"] == "hung", found
    assert found["down"] == f"{SERVER}:2049 does not answer (connection refused)"
    status = mounted.hook()
    assert status["level"] == "waiting", status
    assert status["text"].startswith(f"{SERVER}:2049 does not answer (connection refused) since 20")
    assert status["text"].endswith(" UTC; the mount waits for it")
    print(f"NFS: a hook with a dead server took {status['seconds']:.1f} s (emulated machine)")
    assert len(mounted.mounts()) == 1  # waiting is right: the mount stays
    mounted.guest.sh("serve start", timeout=60)
    writer.join(timeout=180)
    assert written == ["kept"]
    took = mounted.until_right(120)
    assert mounted.tick()["heals"] == heals
    assert mounted.hook()["level"] == "active"
    print(f"NFS: right {took:.1f} s after the writer went on")


def test_a_server_that_is_cut_off_hangs_no_hook(mounted: Node):
    mounted.guest.sh("ip -n srv link set veth1 down")
    begin = time.monotonic()
    status = mounted.hook()
    assert status["level"] == "waiting", status
    assert time.monotonic() - begin < 60
    mounted.guest.sh("ip -n srv link set veth1 up")
    mounted.until_right(180)


def test_removal_leaves_nothing(mounted: Node):
    mounted.remove()
    assert not mounted.mounts()
    named = "-name *slurm-ddp* -o -name *mount-keeper-*"
    left = f"find / -xdev ( -path /proc -o -path /sys -o -path /opt -o -path {SLOW.format('*')} ) -prune -o ( {named} ) -print"
    assert mounted.guest.run(*left.split()).out == ""
    assert mounted.guest.run("/usr/bin/test", "-d", MP, check=False).code != 0


# One monitor, one OSD in memory, one MDS; no manager, which serves statistics only
CEPH = """
cd /root
fsid=354ca7c4-f10d-11ee-93f8-1f85f87b7845
mkdir -p /etc/ceph /var/lib/ceph/mon/ceph-a /var/lib/ceph/mds/ceph-a /var/lib/ceph/osd/ceph-0 /var/run/ceph
cat >/etc/ceph/ceph.conf <<END
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:3300,v1:127.0.0.1:6789]
osd pool default size = 1
osd pool default min size = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 268435456
mon allow pool size one = true
mon data avail crit = 1
auth allow insecure global id reclaim = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
END
ceph-authtool -q --create-keyring mon.key --gen-key -n mon. --cap mon 'allow *'
ceph-authtool -q --create-keyring /etc/ceph/ceph.client.admin.keyring --gen-key -n client.admin \
  --cap mon 'allow *' --cap osd 'allow *' --cap mds 'allow *'
ceph-authtool -q --create-keyring /var/lib/ceph/osd/ceph-0/keyring --gen-key -n osd.0 \
  --cap mon 'allow profile osd' --cap osd 'allow *'
ceph-authtool -q --create-keyring /var/lib/ceph/mds/ceph-a/keyring --gen-key -n mds.a \
  --cap mon 'allow profile mds' --cap osd 'allow *' --cap mds 'allow'
ceph-authtool -q --create-keyring client.key --gen-key -n client.fs-client \
  --cap mon 'allow r' --cap osd 'allow rw' --cap mds 'allow rw'
for key in /etc/ceph/ceph.client.admin.keyring /var/lib/ceph/osd/ceph-0/keyring /var/lib/ceph/mds/ceph-a/keyring client.key
do ceph-authtool -q mon.key --import-keyring $key; done
monmaptool --create --addv a [v2:127.0.0.1:3300,v1:127.0.0.1:6789] --fsid $fsid monmap >/dev/null
ceph-mon --mkfs -i a --monmap monmap --keyring mon.key
ceph-mon -i a
uuid=$(cat /proc/sys/kernel/random/uuid)
ceph osd new $uuid 0 >/dev/null
ceph-osd -i 0 --mkfs --osd-uuid $uuid >/dev/null 2>&1
ceph-osd -i 0 >/dev/null 2>&1
ceph osd pool create meta 4 >/dev/null
ceph osd pool create data 4 >/dev/null
ceph fs new cephfs meta data >/dev/null
ceph-mds -i a >/dev/null 2>&1
until ceph mds stat | grep -q up:active; do sleep 1; done
ceph-authtool -p -n client.fs-client client.key
"""
CEPH_URI = (
    "cephfs://fs-client@(127.0.0.1%3A6789)/?fsid=354ca7c4-f10d-11ee-93f8-1f85f87b7845&name=cephfs&auth=secret%3Aabc"
)
CEPH_MP = "/mnt/ceph"


@pytest.fixture(scope="module")
def ceph_key(node: Node) -> str:
    """Return the key of the user fs-client of a Ceph cluster in the guest."""
    return node.guest.sh(CEPH, timeout=500).splitlines()[-1]


def ceph_hook(node: Node, key: str, **config: object) -> dict[str, typing.Any]:
    return node.hook(CEPH_URI, app="ceph", secret={"key": key}, config={"mountpoint": CEPH_MP} | config)


def test_a_wrong_ceph_key_is_said_and_the_right_one_mounts(node: Node, ceph_key: str):
    wrong = "AQDh" + ceph_key[4:]
    status = ceph_hook(node, wrong)
    assert status["level"] == "blocked", status
    assert "does not mount: " in status["text"]
    assert "permission denied" in status["text"].lower() or "operation not permitted" in status["text"].lower()
    assert wrong not in status["text"]
    status = ceph_hook(node, ceph_key)
    assert status["level"] == "active", status
    (line,) = node.mounts(CEPH_MP)
    assert " - ceph " in line
    for word in ("nosuid", "nodev", "noatime", "name=fs-client", "recover_session=clean", "secret=<hidden>"):
        assert word in line, line
    node.guest.sh(f"echo hello >{CEPH_MP}/greeting; sync {CEPH_MP}/greeting; grep hello {CEPH_MP}/greeting")


def test_the_ceph_key_is_nowhere_to_be_read(node: Node, ceph_key: str):
    assert ceph_hook(node, ceph_key)["level"] == "active"
    said = node.guest.sh("ls -l /etc/slurm-ddp/ceph/ceph.secret; stat -c %a /etc/slurm-ddp/ceph")
    assert said.startswith("-rw------- 1 root root")
    assert said.endswith("700")
    places = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; cat /etc/systemd/system/*.mount /proc/self/mountinfo; journalctl --no-pager; cat /var/lib/slurm-ddp/ceph/*.json"
    assert ceph_key not in node.guest.sh(places, timeout=120)


def test_a_client_that_the_cluster_cut_off_comes_back(node: Node, ceph_key: str):
    assert ceph_hook(node, ceph_key)["level"] == "active"
    sessions = json.loads(node.guest.sh("ceph tell mds.a session ls 2>/dev/null", timeout=120))
    node.guest.sh(f"ceph tell mds.a client evict id={sessions[0]['id']} 2>/dev/null", timeout=120)
    end = time.monotonic() + 180
    while node.tick(app="ceph")["state"] != "right":
        assert time.monotonic() < end
    node.guest.sh(f"echo again >{CEPH_MP}/greeting; sync {CEPH_MP}/greeting")


def test_removal_of_cephfs_takes_the_key_along(node: Node, ceph_key: str):
    assert ceph_hook(node, ceph_key)["level"] == "active"
    node.remove("ceph")
    assert not node.mounts(CEPH_MP)
    assert node.guest.run("/usr/bin/test", "-e", "/etc/slurm-ddp/ceph", check=False).code != 0
