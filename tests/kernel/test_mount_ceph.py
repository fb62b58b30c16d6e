"""What the real mount.ceph makes of our units, and the real kernel of that: two helpers, both ways to name a filesystem.

Debian 12's helper (Ceph 16) knows the older way only; the next Debian's (18, as Ubuntu 24.04's 19) the newer one. mount(8)
is watched by strace: what reaches the kernel is compared, not what should. The monitors are sockets that write down how
they are greeted and answer nothing, so every mount fails; a kernel that did not like an option fails before it greets.
"""

import base64
import collections.abc
import dataclasses
import re
import shlex

import guest as machines
import nodes
import pytest

APP = "ceph"
MP = "/mnt/ceph"
KEY = "AQCl3+poAAAAABAAq5cPw7qTB0q1BDtpRk9y3Q=="
SECRET = base64.b64decode(KEY)[12:]  # after type, time and length
FSID = "354ca7c4-f10d-11ee-93f8-1f85f87b7845"
GREETINGS = {6789: b"ceph v027", 3300: b"ceph v2\n"}  # doc/dev/msgr2 of Ceph
RECEIVED = "/run/monitors"
# Of the table in kinds/presets.py those that stand beside each other
OPTIONS = (
    "rsize=1048576,wsize=1048576,rasize=1048576,caps_max=1000,caps_wanted_delay_min=5,caps_wanted_delay_max=60,"
    "readdir_max_bytes=524288,readdir_max_entries=1024,nodcache,norbytes,nocopyfrom,wsync,noquotadf,nopoolperm,noacl,"
    "read_from_replica=no,crush_location=host:node1|rack:r1"
)
HELPER = "/usr/sbin/mount.ceph"
MONITORS = f"""\
import socketserver, threading


class Monitor(socketserver.BaseRequestHandler):
    def handle(self):
        data = self.request.recv(64)
        with open("{RECEIVED}", "a") as file:
            print(self.request.getsockname()[1], data.hex(), file=file, flush=True)
        while self.request.recv(4096):
            pass


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


for port in {list(GREETINGS)}:
    for address in ("127.0.0.1", "127.0.0.2"):
        threading.Thread(target=Server((address, port), Monitor).serve_forever).start()
"""
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


@dataclasses.dataclass(frozen=True)
class Seen:
    """What went from mount(8) to the kernel, and what came of it."""

    device: str
    flags: frozenset[str]
    options: dict[str, str]
    errors: list[str]  # of each attempt
    keyed: tuple[str, bytes] | None  # name and secret, as they went into the kernel's keyring
    greetings: set[tuple[int, bytes]]


@dataclasses.dataclass
class Client:
    """A node whose mount.ceph is of a certain age."""

    node: nodes.Node
    newer: bool

    def drawn(self, hosts: str, **config: object) -> tuple[str, str]:
        """Have the charm write a unit; return its source and options as systemd reads them."""
        uri = f"cephfs://fs-client@({hosts})/volumes?fsid={FSID}&name=cephfs&auth=secret%3Aabc"
        unit = self.node.ask(do="draw", app=APP, uri=uri, secret={"key": KEY}, config={"mountpoint": MP} | config)[
            "unit"
        ]
        # A short time-out of the kernel's own: the monitors never answer
        what, options = self.node.guest.sh(f"systemctl show -P What -P Options {shlex.quote(unit)}").splitlines()
        return what, f"{options},mount_timeout=1"

    def mounted(self, what: str, options: str) -> Seen:
        """Call mount(8) as systemd does; return what happened."""
        trace = "strace -f -qq -xx -s 4096 -e trace=mount,add_key -e signal=none -o /run/trace"
        mount = f"mount -t ceph {shlex.quote(what)} {MP} -o {shlex.quote(options)}"
        received = self.node.guest.sh(
            f"rm -f {RECEIVED}; mkdir -p {MP}; {trace} {mount} 2>&1 || true; touch {RECEIVED}"
        )
        assert KEY not in received
        calls = self.node.guest.sh(f"cat /run/trace; echo; cat {RECEIVED}")
        # The newer helper tries the older way when the kernel refuses the newer one
        attempts = re.findall(r"mount\((.*), \"(.*?)\"\) = -?\d+(?: (\w+))?", calls)
        mounts = attempts[0]
        strings = [bytes.fromhex(text.replace("\\x", "")).decode() for text in re.findall(r'"(.*?)"', mounts[0])]
        keys = [
            [bytes.fromhex(text.replace("\\x", "")) for text in re.findall(r'"(.*?)"', call)]
            for call in re.findall(r"add_key\((.*)\)", calls)
        ]
        assert strings[1:] == [MP, "ceph"]
        passed = bytes.fromhex(mounts[1].replace("\\x", "")).decode()
        return Seen(
            device=strings[0],
            flags=frozenset(re.findall(r"MS_\w+", mounts[0])),
            options={word.partition("=")[0]: word.partition("=")[2] for word in passed.split(",")},
            errors=[error for _, _, error in attempts],
            keyed=(keys[0][1].decode(), keys[0][2]) if keys else None,
            greetings={
                (int(port), bytes.fromhex(received)[: len(GREETINGS[int(port)])])
                for port, received in re.findall(r"^(\d+) ([0-9a-f]+)$", calls, re.MULTILINE)
            },
        )


@pytest.fixture(scope="module", params=["16", "18"])
def client(request: pytest.FixtureRequest, node: nodes.Node) -> collections.abc.Iterator[Client]:
    """Return a node with mount.ceph of that version of Ceph."""
    node.guest.put({"/opt/monitors.py": MONITORS.encode(), "/opt/newer-mount.ceph": NEWER.encode()})
    node.guest.sh(
        "systemctl is-active --quiet monitors || systemd-run --quiet --unit=monitors python3 /opt/monitors.py"
    )
    node.guest.until("ss -Hltn | grep -q 127.0.0.2:3300")
    newer = request.param == "18"
    version = f"{HELPER} --help 2>&1 | grep -q 'options:'; dpkg-query -W -f '${{Version}}' ceph-common"
    if newer:
        node.guest.sh(SWAP)
    assert node.guest.sh(version).startswith(f"{request.param}.")
    yield Client(node, newer)
    if newer:
        node.guest.sh(f"umount {HELPER} /var/lib/dpkg/status")
    node.guest.sh(f"rm -rf /etc/slurm-ddp /etc/systemd/system/mnt-ceph.mount; rmdir {MP}; systemctl daemon-reload")


def test_the_kernel_is_asked_for_what_was_meant(client: Client):
    seen = client.mounted(*client.drawn("127.0.0.1%3A6789%2C127.0.0.2%3A6789", subdirectory="team/a"))
    if client.newer:
        assert seen.device == f"fs-client@{FSID}.cephfs=/volumes/team/a"
        which = {"mon_addr": "127.0.0.1:6789/127.0.0.2:6789"}
    else:
        assert seen.device == "127.0.0.1:6789,127.0.0.2:6789:/volumes/team/a"
        which = {"mds_namespace": "cephfs"}
    name, secret = seen.keyed or ("", b"")
    usual = {"name": "fs-client", "key": name, "recover_session": "clean", "mount_timeout": "1"}
    assert seen.options == which | usual
    assert seen.flags == {"MS_NOSUID", "MS_NODEV", "MS_NOATIME"}
    assert name.endswith("fs-client")
    assert secret.endswith(SECRET)
    assert seen.errors == ["EHOSTUNREACH"]  # it liked all that, and no monitor answered
    assert seen.greetings == {(6789, GREETINGS[6789])}


def test_every_option_that_users_may_give_is_known_to_the_kernel(client: Client):
    seen = client.mounted(*client.drawn("127.0.0.1%3A6789", mount_options=OPTIONS, profile="checkpoint"))
    assert {word.partition("=")[0] for word in OPTIONS.split(",")} | {"nodirstat"} <= set(seen.options)
    assert seen.errors == ["EHOSTUNREACH"]


def test_the_key_is_in_its_file_alone(client: Client):
    client.drawn("127.0.0.1%3A6789")
    assert client.node.guest.sh("stat -c '%a %U' /etc/slurm-ddp/ceph/ceph.secret") == "600 root"
    assert (
        client.node.guest.sh(f"grep -rlF {KEY} /etc /run /var/log /var/lib || true")
        == "/etc/slurm-ddp/ceph/ceph.secret"
    )
