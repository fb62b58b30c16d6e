"""A guest machine in QEMU, with Debian's kernel, for filesystems that the kernel mounts.

The guest's disk is the sandbox's image with a kernel, file servers and clients on top. It is made
once, and cached under the hash of its recipe. Each guest works on a throwaway copy, has no way out
to any network, and answers a tiny agent on a port of the loopback.

The guest's clock counts its instructions (QEMU's -icount): on a busy host the guest is slow to an
observer, but never to itself. No deadline in the guest passes because the host lacked time.
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
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
import typing

import yaml

from sandbox import image

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CACHE = image.CACHE / "guests"
CHARM = REPOSITORY / "charms" / "shared-filesystem-client"
QEMU = "/usr/bin/qemu-system-x86_64"
TOOLS = (QEMU, "/usr/bin/mmdebstrap", "/usr/sbin/mkfs.ext4", "/usr/bin/systemd-nspawn")
PATIENCE_S = 900.0  # for anything in the guest, whose clock is its own
NEWER = "/opt/newer"  # the next Debian's mount.ceph, with all libraries
_REVISION = 2  # counts changes of the build's script
_DISK_MIB = 3072
_GUEST = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
_PACKAGES, _NEWER_PACKAGES, _MASKED = (
    tuple(_GUEST[name].split()) for name in ("packages", "newer", "masked")
)
_NEWER_SUITE = "trixie"
# Reads one JSON object a line, runs it, answers with one line; each connection in its own thread
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
        line = running.stdout.readline()
        return {"code": 0 if line else 1, "out": line, "err": ""}


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
_FILES: dict[str, str] = _GUEST["files"] | {"opt/agent.py": _AGENT}


class GuestError(Exception):
    """The guest cannot be made or does not answer. `str()` is one line."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a command in the guest."""

    code: int
    out: str
    err: str


@dataclasses.dataclass
class Guest:
    """A running machine."""

    port: int
    process: subprocess.Popen[bytes]
    console: pathlib.Path

    def run(
        self,
        *argv: str,
        timeout: float = 60,
        stdin: str = "",
        check: bool = True,
        patience: float = PATIENCE_S,
    ) -> Answer:
        """Run a command in the guest, for `timeout` of the guest's seconds at most and `patience` of the host's."""
        reply = self._ask({"argv": argv, "timeout": timeout, "stdin": stdin}, patience)
        answer = Answer(reply["code"], reply["out"], reply["err"])
        if check and answer.code != 0:
            raise GuestError(
                f"{' '.join(argv)[:200]} exited {answer.code}: {answer.err[-2000:]}{answer.out[-500:]}"
            )
        return answer

    def talk(self, program: str, line: str) -> str:
        """Say a line to a Python program of the guest's, which keeps running; return the line that it answers."""
        reply = self._ask({"talk": program, "line": line})
        if reply["code"] != 0:
            raise GuestError(f"{program} ended: {self._last_words()}")
        return reply["out"]

    def sh(self, script: str, *, timeout: float = 60, check: bool = True) -> str:
        """Run a shell script in the guest; return its output."""
        return self.run("/bin/sh", "-ec", script, timeout=timeout, check=check).out.strip()

    def put(self, tree: collections.abc.Mapping[str, pathlib.Path | bytes]) -> None:
        """Copy files and folders into the guest, by target path."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for target, source in tree.items():
                if isinstance(source, bytes):
                    member = tarfile.TarInfo(target.lstrip("/"))
                    member.size, member.mode = len(source), 0o755
                    archive.addfile(member, io.BytesIO(source))
                else:
                    archive.add(source, target.lstrip("/"), filter=_without_caches)
        self._ask({"tar": base64.b64encode(buffer.getvalue()).decode()})

    def until(self, script: str) -> None:
        """Wait until a shell script in the guest succeeds."""
        end = time.monotonic() + PATIENCE_S
        while (reply := self.run("/bin/sh", "-c", script, check=False)).code != 0:
            if time.monotonic() > end:
                raise GuestError(f"never came true: {script}: {reply.err[-500:]}{reply.out[-500:]}")
            time.sleep(0.3)

    def _ask(
        self, request: dict[str, object], patience: float = PATIENCE_S
    ) -> dict[str, typing.Any]:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=patience) as link:
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
            return "it has printed nothing"
        return " | ".join(self.console.read_text(errors="replace").splitlines()[-5:])


@contextlib.contextmanager
def booted(*, memory_mib: int = 1024) -> collections.abc.Generator[Guest]:
    """Boot a fresh guest, and switch it off at the end."""
    made = ensure_image()
    with tempfile.TemporaryDirectory(prefix="guest-") as folder:
        console = pathlib.Path(folder) / "console"
        port = _free_port()
        # Always emulated: on a machine that is itself a guest, /dev/kvm may exist and boot nothing
        argv = [
            QEMU,
            "-nodefaults",
            "-no-reboot",
            "-display",
            "none",
            "-machine",
            "q35",
            "-cpu",
            "Nehalem",
        ]
        argv += [
            "-accel",
            "tcg,thread=single",
            "-icount",
            "shift=1,sleep=on",
        ]  # 2 ns an instruction
        argv += ["-m", str(memory_mib), "-serial", f"file:{console}"]
        argv += ["-kernel", str(made / "vmlinuz"), "-initrd", str(made / "initrd")]
        argv += [
            "-append",
            "root=/dev/vda rw console=ttyS0 panic=-1 quiet net.ifnames=0 mitigations=off",
        ]
        argv += ["-drive", f"file={made / 'disk'},format=raw,if=virtio,snapshot=on"]
        argv += ["-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:4000"]
        argv += ["-device", "virtio-net-pci,netdev=net", "-device", "virtio-rng-pci"]
        environment = os.environ | {"TMPDIR": folder}  # the disk's copy grows here
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        ) as process:
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
        SandboxError: the sandbox's image cannot be made.
    """
    base = image.ensure_image(lambda line: print(line, flush=True))
    layers = [str(layer) for layer in base.layers]
    recipe = [
        _REVISION,
        layers,
        _PACKAGES,
        _NEWER_SUITE,
        _NEWER_PACKAGES,
        _MASKED,
        _FILES,
        _DISK_MIB,
    ]
    target = (
        CACHE
        / f"client-{hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]}"
    )
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            for old in CACHE.glob(".new-*"):
                shutil.rmtree(old)
            temporary = pathlib.Path(tempfile.mkdtemp(prefix=".new-", dir=CACHE))
            begin = time.monotonic()
            try:
                _build(temporary, layers)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            print(f"the guest's disk was made in {time.monotonic() - begin:.0f} s", flush=True)
            for other in CACHE.glob("client-*"):  # earlier recipes
                if other != target:
                    shutil.rmtree(other)
    return target


def _build(folder: pathlib.Path, layers: list[str]) -> None:
    """Make the disk in `folder`, as layers of overlayfs in a mount namespace that goes with the build."""
    upper, work, tree = (folder / name for name in ("upper", "work", "tree"))
    for path in (upper, work, tree):
        path.mkdir(mode=0o755)
    for name, content in _FILES.items():
        path = upper / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    apt = "/root/apt"
    inside = f"""
export DEBIAN_FRONTEND=noninteractive
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
echo 'path-include=/etc/init.d/*' >/etc/dpkg/dpkg.cfg.d/zz-init-scripts  # nfs-kernel-server needs its own
apt-get -q update
apt-get -q -y --no-install-recommends install {" ".join(_PACKAGES)}
mkdir -p {apt}/lists/partial {apt}/archives/partial {NEWER}
mirror=$(awk '$3 == "{image.SUITE}" {{ print $2; exit }}' /etc/apt/sources.list)
echo "deb $mirror {_NEWER_SUITE} main" >{apt}/sources.list
newer() {{
  apt-get -q -y -o Dir::Etc::sourcelist={apt}/sources.list -o Dir::Etc::sourceparts=- -o Dir::State::lists={apt}/lists \
    -o Dir::Cache={apt} -o Dir::State::status=/dev/null -o APT::Sandbox::User=root "$@"
}}
newer update
newer --no-install-recommends --download-only install {" ".join(_NEWER_PACKAGES)}
(cd {apt}/archives && newer download ceph-common)
for deb in {apt}/archives/*.deb; do dpkg-deb --fsys-tarfile "$deb" | tar -x -C {NEWER} --exclude=./usr/share; done
dpkg-deb -f {apt}/archives/ceph-common_*.deb Version >{NEWER}/version
systemctl mask {" ".join(_MASKED)}
systemctl enable agent.service systemd-networkd.service
systemctl disable rpcbind.service ceph-crash.service || true
systemctl set-default multi-user.target
passwd -d root
rm -rf {apt} /var/cache/slurm-ddp /var/cache/apt/* /var/lib/apt/lists/* /usr/share/doc /usr/share/man /usr/share/locale
: >/etc/machine-id
"""
    nspawn = [
        "systemd-nspawn",
        "--quiet",
        "--register=no",
        "--keep-unit",
        "--settings=no",
        "--as-pid2",
        "--pipe",
    ]
    nspawn += [
        "--timezone=off",
        "--resolv-conf=off",
        "--bind-ro=/etc/resolv.conf",
        f"--directory={tree}",
    ]
    nspawn += [f"--setenv={name}={value}" for name, value in image.host_proxies().items()]
    script = """
tree=$1 folder=$2 mib=$3 layers=$4
shift 4
mount -t overlay overlay -o "lowerdir=$layers,upperdir=$folder/upper,workdir=$folder/work" "$tree"
"$@"
cp "$tree"/boot/vmlinuz-* "$folder/vmlinuz"
cp "$tree"/boot/initrd.img-* "$folder/initrd"
truncate -s "${mib}M" "$folder/disk"
mkfs.ext4 -q -F -d "$tree" -E lazy_itable_init=1 "$folder/disk"
"""
    arguments = [
        str(tree),
        str(folder),
        str(_DISK_MIB),
        ":".join(layers),
        *nspawn,
        "--",
        "/bin/sh",
        "-ec",
        inside,
    ]
    argv = [
        "unshare",
        "--mount",
        "--propagation=private",
        "/bin/sh",
        "-ec",
        script,
        "sh",
        *arguments,
    ]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=1500,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as e:
        raise GuestError("the guest's disk was not made within 25 minutes") from e
    if done.returncode != 0:
        raise GuestError(f"the guest's disk cannot be made: {(done.stderr + done.stdout)[-1500:]}")
    for path in (upper, work, tree):
        shutil.rmtree(path)


def _await(guest: Guest) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            guest.run("/bin/true", patience=20)
            return
        except GuestError:
            if guest.process.poll() is not None:
                reply = (
                    guest.process.stderr.read().decode(errors="replace")
                    if guest.process.stderr
                    else ""
                )
                raise GuestError(f"QEMU ended: {reply[-500:]}") from None
            if time.monotonic() > end:
                raise
            time.sleep(0.3)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member
