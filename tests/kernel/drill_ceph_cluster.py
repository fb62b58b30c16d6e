"""CephFS with a real kernel's client, against a real cluster of one node, in a machine of QEMU's.

Five servers in an emulated machine take minutes, so the lane does not collect this. Run it by name:

    tox -e kernel -- tests/kernel/drill_ceph_cluster.py
"""

import collections.abc
import json
import typing

import guest as machines
import nodes
import pytest

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
URI = "cephfs://fs-client@(127.0.0.1%3A6789)/?fsid=354ca7c4-f10d-11ee-93f8-1f85f87b7845&name=cephfs&auth=secret%3Aabc"
APP = "ceph"
MP = "/mnt/ceph"


class Rig:
    """A node with a Ceph cluster on it, and the key of the cluster's user fs-client."""

    def __init__(self, node: nodes.Node, figures: list[str]) -> None:
        self.node, self.guest, self.figures = node, node.guest, figures
        begin = node.now()
        self.key = self.guest.sh(CEPH, timeout=3600).splitlines()[-1]
        figures.append(f"CephFS: the cluster came up in {node.now() - begin:.0f} s")

    def hook(self, key: str | None = None) -> dict[str, typing.Any]:
        return self.node.hook(APP, URI, {"mountpoint": MP}, secret={"key": key or self.key})


@pytest.fixture(scope="module")
def rig(figures: list[str]) -> collections.abc.Iterator[Rig]:
    with machines.booted(memory_mib=1536, cluster=True) as guest:
        node = nodes.Node(guest)
        node.prepare()
        yield Rig(node, figures)


def test_a_wrong_key_is_said_and_the_right_one_mounts(rig: Rig):
    wrong = "AQDh" + rig.key[4:]
    status = rig.hook(wrong)
    assert status["level"] == "blocked", status
    assert "does not mount: " in status["text"]
    assert "permission denied" in status["text"].lower() or "operation not permitted" in status["text"].lower()
    assert wrong not in status["text"]
    status = rig.hook()
    assert status["level"] == "active", status
    (line,) = rig.node.mounts(MP)
    for word in (
        " - ceph ",
        "nosuid",
        "nodev",
        "noatime",
        "name=fs-client",
        "recover_session=clean",
        "secret=<hidden>",
    ):
        assert word in line, line
    rig.guest.sh(f"echo hello >{MP}/greeting; sync {MP}/greeting; grep hello {MP}/greeting")


def test_the_key_is_nowhere_to_be_read(rig: Rig):
    assert rig.hook()["level"] == "active"
    said = rig.guest.sh("ls -l /etc/slurm-ddp/ceph/ceph.secret; stat -c %a /etc/slurm-ddp/ceph")
    assert said.startswith("-rw------- 1 root root")
    assert said.endswith("700")
    units = "/etc/systemd/system/*.mount /proc/self/mountinfo /var/lib/slurm-ddp/ceph/*.json"
    places = f"cat /proc/[0-9]*/cmdline | tr '\\0' ' '; cat {units}; journalctl --no-pager"
    assert rig.key not in rig.guest.sh(places)


def test_a_client_that_the_cluster_cut_off_comes_back(rig: Rig):
    assert rig.hook()["level"] == "active"
    sessions = json.loads(rig.guest.sh("ceph tell mds.a session ls 2>/dev/null", timeout=600))
    rig.guest.sh(f"ceph tell mds.a client evict id={sessions[0]['id']} 2>/dev/null", timeout=600)
    _, took = rig.node.until(APP, nodes.is_right, rig.node.now())
    rig.figures.append(f"CephFS: a client that was cut off: {took:.1f} s until right")
    rig.guest.sh(f"echo again >{MP}/greeting; sync {MP}/greeting")


def test_removal_takes_the_key_along(rig: Rig):
    assert rig.hook()["level"] == "active"
    rig.node.remove(APP)
    assert not rig.node.mounts(MP)
    assert rig.guest.run("/usr/bin/test", "-e", "/etc/slurm-ddp/ceph", check=False).code != 0
