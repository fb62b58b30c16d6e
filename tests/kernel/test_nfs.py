"""NFS with a real kernel's client, against a real kernel's server, in a machine of QEMU's.

The test machine's kernel may have neither, so everything runs in a guest: the charm's code writes
units, systemd there runs them, the keeper's timer repairs what the tests break. The tests have no
deadlines: they wait until a condition holds.
"""

import collections.abc
import threading
import typing

import nodes
import pytest

APP = "client"
MP = "/mnt/shared"
SERVER = "10.9.0.1"
URI = f"nfs://({SERVER})/srv/data"
# nfsd in a separate network namespace: its link can be cut, unlike a local server's
NFS_SERVER = f"""
mkdir -p /srv/data
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


class Rig:
    """A node with an NFS server, and the tools to break and watch its mount."""

    def __init__(self, node: nodes.Node) -> None:
        self.node, self.guest = node, node.guest

    def hook(self, **config: object) -> dict[str, typing.Any]:
        """Run a hook of the charm; return the status."""
        return self.node.ask(do="ensure", app=APP, uri=URI, config={"mountpoint": MP} | config)

    def mounts(self) -> list[str]:
        return self.node.mounts(MP)

    def passed(
        self, wanted: collections.abc.Callable[[nodes.Health], bool] = lambda _: True
    ) -> nodes.Health:
        """Wait for a pass of the keeper that begins from now on and that is as wanted: its result."""
        return self.node.until(APP, wanted, self.node.now())

    def healed(self, script: str) -> nodes.Health:
        """Break the mount between two passes; return the keeper's result after its repair."""
        self.passed()  # a new mount triggers a pass, which may still run
        return self.repaired(script)

    def repaired(self, script: str) -> nodes.Health:
        """Run a script that gives the keeper something to repair; return that pass's result."""
        begin = self.node.now()
        self.guest.sh(script)
        return self.node.until(
            APP, lambda found: nodes.is_right(found) and found["healed_at"] >= begin, begin
        )


@pytest.fixture(scope="module")
def bare(node: nodes.Node) -> Rig:
    """Return the rig, with nothing mounted."""
    node.guest.sh(NFS_SERVER)
    return Rig(node)


@pytest.fixture
def rig(bare: Rig) -> Rig:
    """Return the rig with the export mounted and right, as the charm mounts it without options."""
    if len(bare.mounts()) != 1 or "acregmin=600" in bare.mounts()[0]:
        status = bare.hook()
        assert status["level"] == "active", status
    return bare


def test_the_export_is_mounted_by_our_unit_with_our_options(bare: Rig):
    status = bare.hook()
    assert status["text"] == f"{SERVER}:/srv/data is mounted at {MP}"
    (line,) = bare.mounts()
    for word in (
        "nosuid",
        "nodev",
        "noatime",
        " nfs4 ",
        "vers=4.2",
        "hard",
        "nconnect=8",
        "timeo=600",
    ):
        assert word in line, line
    assert (
        bare.guest.sh("systemctl is-active mnt-shared.mount mount-keeper-client.timer")
        == "active\nactive"
    )
    assert (
        bare.guest.sh("systemctl is-enabled mnt-shared.mount mount-keeper-client.timer")
        == "enabled\nenabled"
    )
    bare.guest.sh(
        f"echo hello >{MP}/greeting; grep hello /srv/data/greeting; test ! -e {MP}/.mount-probe/guest.*"
    )
    assert bare.passed()["state"] == "right"
    again = bare.hook()
    assert again["text"] == status["text"]
    assert len(bare.mounts()) == 1


def test_a_setuid_program_on_the_server_is_just_a_program(rig: Rig):
    rig.guest.sh("cp /usr/bin/id /srv/data/id; chmod 4755 /srv/data/id")
    assert rig.guest.sh(f"setpriv --reuid=1000 --regid=1000 --clear-groups {MP}/id -u") == "1000"


def test_an_export_in_which_others_can_replace_folders_is_reported_and_left_as_it_is(rig: Rig):
    mounted = f"{SERVER}:/srv/data is mounted at {MP}"
    rig.guest.sh(f"chmod 777 {MP}")  # over NFS, so that the client knows it at once
    try:
        status = rig.hook()
        advice = f"chmod +t /srv/data, on {SERVER}: others can replace folders in it (mode 0777)"
        assert (status["level"], status["text"]) == ("active", advice)
        assert rig.passed()["state"] == "right"
        assert rig.guest.sh("stat -c %a /srv/data") == "777"
    finally:
        rig.guest.sh(f"chmod 1777 {MP}")
    assert rig.hook()["text"] == mounted


def test_a_change_waits_for_users_and_follows_by_itself_when_they_have_ended(rig: Rig):
    rig.guest.sh(f"systemd-run --quiet --unit=holder -p WorkingDirectory={MP} sleep 86400")
    heals = rig.node.health(APP).get("heals", 0)
    status = rig.hook(profile="dataset")
    assert "restart pending" in status["text"]
    assert rig.passed()["heals"] == heals
    assert "acregmin=600" not in rig.mounts()[0]
    found = rig.healed("systemctl stop holder")
    assert found["healed"] == "restart: a change was due"
    assert "acregmin=600" in rig.mounts()[0]
    assert "restart pending" not in rig.hook(profile="dataset")["text"]


def test_nobody_not_even_root_fills_the_folder_while_nothing_is_mounted(rig: Rig):
    rig.passed()
    services = "mount-keeper-client.service mount-keeper-client-up.service"
    rig.guest.sh(
        f"systemctl stop mount-keeper-client.timer {services}; systemctl stop mnt-shared.mount"
    )
    assert not rig.mounts()
    touched = rig.guest.run("/bin/touch", f"{MP}/lost", check=False)
    assert touched.code != 0
    assert "Operation not permitted" in touched.err
    rig.repaired("systemctl start mount-keeper-client.timer")


def test_who_uses_the_first_mount_keeps_it_when_the_second_goes(rig: Rig):
    writes = f"systemd-run --quiet --unit=holder -p WorkingDirectory={MP} sh -c 'exec >>log; while date; do sleep 1; done'"
    rig.guest.sh(writes)
    first = rig.mounts()[0].split()[0]
    found = rig.healed(f"mount -t nfs4 -o nosharecache {SERVER}:/srv/data {MP}")
    assert found["healed"] == f"peel: 2 mounts lie at {MP}"
    assert [line.split()[0] for line in rig.mounts()] == [first]
    rig.guest.sh(
        "before=$(wc -l </srv/data/log); until test $(wc -l </srv/data/log) -gt $before; do sleep 1; done"
    )
    assert rig.guest.sh("systemctl is-active holder; systemctl stop holder") == "active"


def test_a_stale_handle_is_healed(rig: Rig):
    rig.guest.sh("mv /srv/data /srv/old; mkdir -m 1777 /srv/data")
    found = rig.healed("serve swap")
    assert "stale file handle" in found["healed"]
    rig.guest.sh(f"touch {MP}/fresh; test -e /srv/data/fresh")


def test_a_dead_server_is_waited_for_and_nothing_is_lost(rig: Rig):
    heals = rig.passed()["heals"]
    begin = rig.node.now()
    rig.guest.sh("serve stop")
    written: list[str] = []

    def write() -> None:
        written.append(rig.guest.sh(f"echo kept >{MP}/kept; cat {MP}/kept", timeout=3600))

    writer = threading.Thread(target=write)
    writer.start()
    found = rig.node.until(APP, lambda found: found["state"] == "hung", begin)
    assert found["down"] == f"{SERVER}:2049 does not answer (connection refused)"
    status = rig.hook()
    assert status["level"] == "waiting", status
    assert status["text"].startswith(f"{SERVER}:2049 does not answer (connection refused) since 20")
    assert status["text"].endswith(" UTC; the mount waits for it")
    assert len(rig.mounts()) == 1  # waiting is right: the mount stays
    assert written == []
    begin = rig.node.now()
    rig.guest.sh("serve start")
    found = rig.node.until(APP, nodes.is_right, begin)
    writer.join()
    assert written == ["kept"]
    assert found["heals"] == heals
    assert rig.hook()["level"] == "active"


def test_a_server_that_is_cut_off_hangs_no_hook(rig: Rig):
    begin = rig.node.now()
    rig.guest.sh("ip -n srv link set veth1 down")
    status = rig.hook()
    assert status["level"] == "waiting", status
    rig.node.until(APP, lambda found: found["state"] == "hung", begin)
    begin = rig.node.now()
    rig.guest.sh("ip -n srv link set veth1 up")
    rig.node.until(APP, nodes.is_right, begin)
    assert rig.hook()["level"] == "active"


def test_removal_leaves_nothing(rig: Rig):
    assert rig.node.ask(do="remove", app=APP) == {}
    assert not rig.mounts()
    named = "-name *slurm-ddp* -o -name *mount-keeper-* -o -name mnt-shared.mount"
    left = f"find / -xdev ( -path /proc -o -path /sys -o -path /opt -o -path /run/systemd ) -prune -o ( {named} ) -print"
    assert rig.guest.run(*left.split()).out == ""
    assert rig.guest.run("/usr/bin/test", "-d", MP, check=False).code != 0
