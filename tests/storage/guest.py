"""A machine of its own in QEMU, with Debian's kernel, for filesystems that the kernel mounts.

The guest's disk is made once from Debian's packages, and cached as the sandbox's image is, under the hash of its recipe.
Each guest works on a throwaway copy, has no way out to any network, and answers a tiny agent on a port of the loopback.
"""

import base64
import collections.abc
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import typing

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path("/var/cache/slurm-ddp/guests")
CHARM = REPOSITORY / "charms" / "shared-filesystem-client"
QEMU = "/usr/bin/qemu-system-x86_64"
TOOLS = (QEMU, "/usr/sbin/debootstrap", "/usr/sbin/mkfs.ext4", "/usr/bin/systemd-nspawn")
SUITE = "bookworm"
_REVISION = 1
_DISK_MIB = 2560
_PACKAGES = (
    "systemd", "systemd-sysv", "udev", "dbus", "kmod", "python3", "iproute2", "procps", "netbase", "e2fsprogs",
    "nfs-kernel-server", "nfs-common", "linux-image-cloud-amd64", "initramfs-tools",
)  # fmt: skip
_CEPH = (
    "ceph-common",
    "ceph-mon",
    "ceph-osd",
    "ceph-mds",
)  # debootstrap stumbles over what they depend on; apt does not
_MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer",
    "systemd-timesyncd.service", "rbdmap.service", "blk-availability.service", "lvm2-monitor.service",
    "dm-event.socket", "systemd-udev-settle.service", "rpc-statd-notify.service", "nfs-server.service", "nfs-blkmap.service", "rpc-gssd.service", "ceph.target",
)  # fmt: skip
# Reads one JSON object a line, runs it, answers with one line; each connection in a thread of its own
_AGENT = """\
import base64, io, json, socketserver, subprocess, tarfile, threading

programs, turn = {}, threading.Lock()


def talk(program, line):
    # To a program that stays: starting Python costs an emulated machine seconds
    with turn:
        if program not in programs or programs[program].poll() is not None:
            programs[program] = subprocess.Popen(
                ["/usr/bin/python3", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        running = programs[program]
        running.stdin.write(line + "\\n")
        running.stdin.flush()
        said = running.stdout.readline()
        return {"code": 0 if said else 1, "out": said, "err": ""}


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            wanted = json.loads(line)
            if "talk" in wanted:
                answer = talk(wanted["talk"], wanted["line"])
            elif "tar" in wanted:
                with tarfile.open(fileobj=io.BytesIO(base64.b64decode(wanted["tar"]))) as archive:
                    archive.extractall("/")
                answer = {"code": 0, "out": "", "err": ""}
            else:
                try:
                    done = subprocess.run(
                        wanted["argv"], input=wanted.get("stdin", ""), capture_output=True, text=True,
                        errors="replace", timeout=wanted["timeout"],
                    )
                    answer = {"code": done.returncode, "out": done.stdout, "err": done.stderr}
                except (OSError, subprocess.TimeoutExpired) as e:
                    answer = {"code": 124, "out": "", "err": str(e)}
            self.wfile.write(json.dumps(answer).encode() + b"\\n")


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


Server(("0.0.0.0", 4000), Handler).serve_forever()
"""
_FILES = {
    "etc/fstab": "",
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 guest\n",
    "etc/systemd/network/50-all.network": "[Match]\nName=en* eth*\n[Network]\nDHCP=ipv4\n",
    "etc/systemd/system.conf.d/90-guest.conf": "[Manager]\nDefaultTimeoutStopSec=15s\n",
    "etc/systemd/system/agent.service": (
        "[Unit]\nDescription=The tests' agent\nDefaultDependencies=no\nAfter=local-fs.target\n"
        "[Service]\nExecStart=/usr/bin/python3 -B /opt/agent.py\nRestart=always\n[Install]\nWantedBy=multi-user.target\n"
    ),
    "opt/agent.py": _AGENT,
}


class GuestError(Exception):
    """The guest cannot be made or does not answer. `str()` is one line."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command in the guest said."""

    code: int
    out: str
    err: str


@dataclasses.dataclass
class Guest:
    """A running machine."""

    port: int
    process: subprocess.Popen[bytes]
    console: pathlib.Path

    def run(self, *argv: str, timeout: float = 60, stdin: str = "", check: bool = True) -> Answer:
        """Run a command in the guest."""
        said = self._ask({"argv": argv, "timeout": timeout, "stdin": stdin}, timeout + 30)
        answer = Answer(said["code"], said["out"], said["err"])
        if check and answer.code != 0:
            raise GuestError(f"{' '.join(argv)[:200]} exited {answer.code}: {answer.err[-2000:]}{answer.out[-500:]}")
        return answer

    def talk(self, program: str, line: str, *, timeout: float) -> str:
        """Say a line to a Python program of the guest's, which keeps running; return the line that it answers."""
        said = self._ask({"talk": program, "line": line}, timeout)
        if said["code"] != 0:
            raise GuestError(f"{program} ended: {self._last_words()}")
        return said["out"]

    def sh(self, script: str, *, timeout: float = 60, check: bool = True) -> str:
        """Run a shell script in the guest; return what it printed."""
        return self.run("/bin/sh", "-ec", script, timeout=timeout, check=check).out.strip()

    def put(self, tree: collections.abc.Mapping[str, pathlib.Path | bytes]) -> None:
        """Copy files and folders into the guest, by where they shall lie."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for target, source in tree.items():
                if isinstance(source, bytes):
                    member = tarfile.TarInfo(target.lstrip("/"))
                    member.size, member.mode = len(source), 0o755
                    archive.addfile(member, io.BytesIO(source))
                else:
                    archive.add(source, target.lstrip("/"), filter=_without_caches)
        self._ask({"tar": base64.b64encode(buffer.getvalue()).decode()}, 120)

    def until(self, script: str, *, timeout: float, every: float = 0.5) -> float:
        """Wait until a shell script succeeds; return how many seconds that took."""
        begin = time.monotonic()
        while self.run("/bin/sh", "-c", script, check=False, timeout=30).code != 0:
            if time.monotonic() - begin > timeout:
                raise GuestError(f"not within {timeout:g} s: {script}")
            time.sleep(every)
        return time.monotonic() - begin

    def _ask(self, request: dict[str, object], timeout: float) -> dict[str, typing.Any]:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as link:
                link.sendall(json.dumps(request).encode() + b"\n")
                with link.makefile("rb") as answers:
                    line = answers.readline()
        except OSError as e:
            raise GuestError(f"the guest does not answer: {e}; {self._last_words()}") from e
        if not line:
            raise GuestError(f"the guest hung up; {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        if not self.console.exists():
            return "it has said nothing"
        return " | ".join(self.console.read_text(errors="replace").splitlines()[-5:])


@contextlib.contextmanager
def booted(*, memory_mib: int = 1024) -> collections.abc.Generator[Guest]:
    """Boot a fresh guest, and switch it off at the end."""
    image = ensure_image()
    with tempfile.TemporaryDirectory(prefix="guest-") as folder:
        console = pathlib.Path(folder) / "console"
        port = _free_port()
        # Emulated always: where a machine is itself a guest, /dev/kvm may be there and boot nothing
        argv = [QEMU, "-nodefaults", "-no-reboot", "-display", "none", "-machine", "q35", "-smp", "2"]
        argv += ["-accel", "tcg,thread=multi"]
        argv += ["-cpu", "Nehalem", "-m", str(memory_mib), "-serial", f"file:{console}"]
        argv += ["-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd")]
        argv += ["-append", "root=/dev/vda rw console=ttyS0 panic=-1 quiet net.ifnames=0"]
        argv += ["-drive", f"file={image / 'disk'},format=raw,if=virtio,snapshot=on"]
        argv += ["-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:4000"]
        argv += ["-device", "virtio-net-pci,netdev=net", "-device", "virtio-rng-pci"]
        environment = os.environ | {"TMPDIR": folder}  # where the copy of the disk grows
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as process:
            guest = Guest(port, process, console)
            try:
                _await(guest)
                yield guest
            finally:
                process.kill()


def missing_tools() -> list[str]:
    """Return which programs are not installed."""
    return [tool for tool in TOOLS if not pathlib.Path(tool).exists()]


def ensure_image() -> pathlib.Path:
    """Return the folder with the guest's disk, kernel and initial file system; make it the first time.

    Raises:
        GuestError: a step failed.
    """
    requirements = (CHARM / "requirements.txt").read_text()
    recipe = json.dumps([_REVISION, SUITE, _PACKAGES, _CEPH, _MASKED, _FILES, _DISK_MIB, requirements], sort_keys=True)
    target = CACHE / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            for old in CACHE.glob(".new-*"):
                shutil.rmtree(old)
            temporary = pathlib.Path(tempfile.mkdtemp(prefix=".new-", dir=CACHE))
            try:
                _build(temporary)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            for other in CACHE.iterdir():  # earlier recipes
                if other.is_dir() and other != target:
                    shutil.rmtree(other)
    return target


def _build(folder: pathlib.Path) -> None:
    tree = folder / "tree"
    tree.mkdir()
    debs = CACHE.parent / "debs"
    debs.mkdir(exist_ok=True)
    options = ["--variant=minbase", f"--include={','.join(_PACKAGES)}", f"--cache-dir={debs}"]
    command = ["unshare", "--mount", "--propagation=private", "debootstrap", *options, SUITE, str(tree), *_mirror()]
    _step(command, timeout=1800)
    for name, content in _FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    script = (
        "export DEBIAN_FRONTEND=noninteractive; printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; "
        "chmod 755 /usr/sbin/policy-rc.d; "
        f"apt-get -q -y -o Acquire::Retries=3 --no-install-recommends install {' '.join(_CEPH)}; "
        f"systemctl mask {' '.join(_MASKED)}; systemctl enable agent.service systemd-networkd.service; "
        "systemctl disable systemd-networkd-wait-online.service rpcbind.service ceph-crash.service || true; "
        "systemctl set-default multi-user.target; passwd -d root; rm -rf /usr/share/doc /usr/share/man /usr/share/locale; "
        "rm -f /var/cache/apt/archives/*.deb; : > /etc/machine-id"
    )
    guest = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--as-pid2", "--pipe"]
    guest += ["--resolv-conf=off", "--bind-ro=/etc/resolv.conf", f"--directory={tree}"]
    guest += [f"--setenv={name}={os.environ[name]}" for name in os.environ if name.lower().endswith("_proxy")]
    _step([*guest, "--", "/bin/sh", "-ec", script], timeout=900)
    # The guest's Python is Debian's, whichever one runs the tests
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    pip += ["--require-hashes", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp"]
    pip += [f"--platform={name}" for name in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")]
    _step([*pip, f"--target={tree / 'opt/python'}", "-r", str(CHARM / "requirements.txt")], timeout=600)
    _step([*guest, "--", "/usr/bin/python3", "-m", "compileall", "-q", "/opt/python"], timeout=300)
    (kernel,) = (tree / "boot").glob("vmlinuz-*")
    (initrd,) = (tree / "boot").glob("initrd.img-*")
    shutil.copyfile(kernel, folder / "vmlinuz")
    shutil.copyfile(initrd, folder / "initrd")
    (folder / "disk").touch()
    os.truncate(folder / "disk", _DISK_MIB << 20)
    _step(["mkfs.ext4", "-q", "-F", "-d", str(tree), "-E", "lazy_itable_init=1", str(folder / "disk")], timeout=300)
    shutil.rmtree(tree)


def _mirror() -> list[str]:
    """Return this machine's own Debian archive, or nothing: debootstrap then takes Debian's."""
    if not re.search(rf'^VERSION_CODENAME="?{SUITE}"?$', pathlib.Path("/etc/os-release").read_text(), re.MULTILINE):
        return []
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return re.findall(rf"^(https?://\S+) {SUITE}$", listed, re.MULTILINE)[:1]


def _step(argv: list[str], *, timeout: float) -> None:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=timeout, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise GuestError(f"{argv[0]}: not done within {timeout:g} s") from e
    if done.returncode != 0:
        raise GuestError(f"{argv[0]} exited {done.returncode}: {(done.stderr + done.stdout)[-1500:]}")


def _await(guest: Guest) -> None:
    end = time.monotonic() + 180
    while True:
        try:
            guest.run("/bin/true", timeout=5)
            return
        except GuestError:
            if guest.process.poll() is not None:
                said = guest.process.stderr.read().decode(errors="replace") if guest.process.stderr else ""
                raise GuestError(f"QEMU ended: {said[-500:]}") from None
            if time.monotonic() > end:
                raise
            time.sleep(0.3)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member
