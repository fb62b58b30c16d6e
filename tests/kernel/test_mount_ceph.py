"""CephFS by the real kernel with two helpers, mount.ceph of Ceph 16 and 18, on a real cluster of Ceph 16 in the same guest.

Debian 12's helper knows the older way to name a filesystem only; the next Debian's (18, as Ubuntu 24.04's 19) the newer one.
"""

import collections.abc
import dataclasses
import typing

import guest as machines
import nodes
import pytest

APP = "ceph"
MP = "/mnt/ceph"
ADDRESS = "10.0.2.15"  # guest.yaml
USER = "client.fs-client"
CREATE = "import sys; sys.path[:0] = ['/opt/ceph', '/opt/charm/lib']; import ceph_cluster; ceph_cluster.create(sys.argv[1])"
# Of the options for users, the ones that are compatible with each other
OPTIONS = (
    "rsize=1048576,wsize=1048576,rasize=1048576,caps_max=1000,caps_wanted_delay_min=5,caps_wanted_delay_max=60,"
    "readdir_max_bytes=524288,readdir_max_entries=1024,nodcache,norbytes,nocopyfrom,wsync,nopoolperm,noacl,"
    "read_from_replica=no,crush_location=host:node1|rack:r1,mount_timeout=120"
)
HELPER = "/usr/sbin/mount.ceph"
LIBRARIES = f"{machines.NEWER}/usr/lib/x86_64-linux-gnu"
NEWER = f"""\
#!/bin/sh
exec {machines.NEWER}/usr/lib64/ld-linux-x86-64.so.2 --library-path {LIBRARIES}:{LIBRARIES}/ceph \\
  {machines.NEWER}/usr/sbin/mount.ceph "$@"
"""
# dpkg tells the charm which helper there is
SWAP = f"""
mount --bind /opt/newer-mount.ceph {HELPER}
awk -v version="$(cat {machines.NEWER}/version)" \\
  '/^Package: /{{ name = $2 }} name == "ceph-common" && /^Version: /{{ $0 = "Version: " version }} 1' \\
  /var/lib/dpkg/status >/opt/status
mount --bind /opt/status /var/lib/dpkg/status
"""


@dataclasses.dataclass
class Client:
    """A node with an old or new mount.ceph, and a cluster."""

    node: nodes.Node
    newer: bool
    fsid: str

    @property
    def key(self) -> str:
        return self.node.guest.sh(f"ceph auth print-key {USER}")

    def hook(
        self, key: str, *, port: int = 6789, path: str = "/", **config: object
    ) -> dict[str, typing.Any]:
        """Run a hook of the charm; return the status."""
        uri = f"cephfs://fs-client@({ADDRESS}%3A{port}){path}?fsid={self.fsid}&name=cephfs&auth=secret%3Aabc"
        wanted = {"mountpoint": MP, "cephfs_client": "kernel"} | config
        return self.node.ask(do="ensure", app=APP, uri=uri, secret={"key": key}, config=wanted)

    def write(self, name: str, *, while_: str = "true") -> None:
        """Write and sync 8 MiB while a script runs; check that the cluster returns them."""
        path = f"{MP}/{name}"
        self.node.guest.sh(
            f"rm -f /run/ended; head -c 8M /dev/urandom >/run/data\n"
            f"(for n in 0 1 2 3 4 5 6 7; do dd if=/run/data of={path} bs=1M count=1 skip=$n seek=$n conv=notrunc,fsync "
            f"2>/dev/null || exit; sleep 1; done; echo 0 >/run/ended) &\nsleep 2; {while_}; wait\n"
            f"grep -qx 0 /run/ended; echo 3 >/proc/sys/vm/drop_caches; cmp /run/data {path}; rm {path}",
            timeout=600,
        )


@pytest.fixture(scope="module")
def fsid(node: nodes.Node) -> str:
    """Start the cluster of the sandbox's stand-in; return what names it."""
    source = machines.REPOSITORY / "sandbox" / "standins" / "ceph" / "src" / "ceph_cluster.py"
    node.guest.put({"/opt/ceph/ceph_cluster.py": source, "/opt/newer-mount.ceph": NEWER.encode()})
    node.guest.run("/usr/bin/python3", "-c", CREATE, ADDRESS, timeout=1200)
    node.guest.until("ceph mds stat | grep -q up:active")
    node.guest.sh(
        "systemctl stop ceph-mgr@a"
    )  # which takes half of an emulated machine, and serves no file
    admin = "name=admin,secret=$(ceph auth print-key client.admin)"
    folder = "mkdir -p /mnt/volumes/team/a; umount /mnt"
    node.guest.sh(f"mount -t ceph {ADDRESS}:/ /mnt -o {admin}; {folder}", timeout=300)
    return node.guest.sh("ceph fsid")


@pytest.fixture(scope="module", params=["16", "18"])
def client(
    request: pytest.FixtureRequest, node: nodes.Node, fsid: str
) -> collections.abc.Iterator[Client]:
    """Return a node with mount.ceph of that version of Ceph."""
    newer = request.param == "18"
    if newer:
        node.guest.sh(SWAP)
    assert node.guest.sh("dpkg-query -W -f '${Version}' ceph-common").startswith(
        f"{request.param}."
    )
    yield Client(node, newer, fsid)
    node.ask(do="remove", app=APP)
    if newer:
        node.guest.sh(f"umount {HELPER} /var/lib/dpkg/status")


@pytest.fixture
def mounted(client: Client) -> Client:
    """Return the node with the root of the filesystem mounted."""
    status = client.hook(client.key)
    assert status["level"] == "active", status
    return client


@pytest.mark.parametrize(
    ("port", "options"), [(6789, {}), (3300, {}), (6789, {"mount_options": OPTIONS})]
)
def test_a_folder_is_mounted_written_and_read_back(
    client: Client, port: int, options: dict[str, str]
):
    more = {"subdirectory": "team/a", "profile": "checkpoint"} | options
    status = client.hook(client.key, port=port, path="/volumes", **more)
    assert status["text"].endswith(f"/volumes/team/a is mounted at {MP} by mount.ceph")
    (line,) = client.node.mounts(MP)
    assert f"fs-client@{client.fsid}.cephfs=/volumes/team/a" in status["text"] or not client.newer
    for word in (
        "nosuid",
        "nodev",
        "noatime",
        " ceph ",
        "name=fs-client",
        "secret=<hidden>",
        "recover_session=clean",
    ):
        assert word in line, line
    assert ("ms_mode=prefer-crc" in line) == (port == 3300)
    client.write("data")
    guest, files = client.node.guest, f"/etc/slurm-ddp/{APP}/ceph.secret"
    assert guest.sh(f"stat -c '%a %U' {files}") == "600 root"
    assert (
        guest.sh(
            f"grep -rlF {client.key} /etc/slurm-ddp /etc/systemd /run/systemd /var/log /var/lib/slurm-ddp"
        )
        == files
    )
    client.node.ask(do="remove", app=APP)


def test_a_wrong_key_is_blocked_in_the_helpers_words(client: Client):
    status = client.hook("AQCl3+poAAAAABAAq5cPw7qTB0q1BDtpRk9y3Q==")
    assert (status["level"], client.node.mounts(MP)) == ("blocked", [])
    assert "does not mount: mount error" in status["text"], status


@pytest.mark.parametrize("daemon", ["ceph-mon@a", "ceph-mds@a"])
def test_a_writer_outlives_a_daemon_that_is_away_for_a_while(mounted: Client, daemon: str):
    mounted.write("away", while_=f"systemctl stop {daemon}; sleep 15; systemctl start {daemon}")
    mounted.node.until(APP, nodes.is_right, mounted.node.now())


def test_a_quota_ends_what_exceeds_it(mounted: Client):
    script = f"""
mkdir {MP}/small
setfattr -n ceph.quota.max_bytes -v 4194304 {MP}/small
head -c 64M /dev/zero 2>&1 >{MP}/small/file | grep -q 'Disk quota exceeded'
rm -r {MP}/small"""
    mounted.node.guest.sh(script, timeout=300)


def test_a_new_key_is_taken_over(mounted: Client):
    guest, old = mounted.node.guest, mounted.key
    new = guest.sh("ceph-authtool --gen-print-key")
    guest.sh(
        f"ceph auth get {USER} | sed 's|{old}|{new}|' >/run/new; ceph auth import -i /run/new; rm /run/new"
    )
    status = mounted.hook(new)
    assert status["level"] == "active", status
    mounted.node.until(APP, nodes.is_right, mounted.node.now())
    mounted.write("new-key")
    assert new in guest.sh(f"cat /etc/slurm-ddp/{APP}/ceph.secret")
