"""Hosts of the sandbox: Debian systems booted with systemd by systemd-nspawn, on a private network.

A model has one bridge with a free /24 behind NAT and any number of hosts. Files that must outlive
their command are under `<root>/<model>/`:

    network.json              bridge, subnet
    resolv.conf               bound over each host's own
    hosts/<name>/host.json    address, layers of the image, binds, GPUs, machine id
    hosts/<name>/process      the process that keeps the host running, see machine.py
    hosts/<name>/{upper,work,root}, console.log

Every operation may be interrupted and repeated. Threads and processes may work on different hosts
at once.
"""

import collections.abc
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import pathlib
import shutil
import subprocess
import time
import typing
import uuid

import pydantic

from sandbox import image, machine, network, store
from sandbox.gpus import Gpu
from sandbox.guest import juju_exec
from sandbox.store import SandboxError
from slurm_ddp import files
from slurm_ddp.commands import CommandError, CommandTimeout, Completed, clean_env, last_line, run

Progress = collections.abc.Callable[[str], None]

BOOT_TIMEOUT_S = 240.0  # for a host that boots along with seven others on two cores

_GUEST_GPUS = pathlib.Path(__file__).resolve().parent / "guest" / "mock_gpus.py"
_HEARTBEAT_S = 5.0
_NETWORK_FILES = ("network.json", "resolv.conf")
_PROPAGATE = pathlib.Path("/run/systemd/nspawn/propagate")
_TRASH = ".trash"  # the files of removed hosts


class _Record(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The contents of host.json."""

    address: str
    machine: str  # its name among all machines on this computer
    machine_id: str
    layers: tuple[str, ...]
    binds: dict[str, str]  # guest path: host path
    read_only_binds: tuple[str, ...]
    gpus: tuple[Gpu, ...]  # by slot


class Hosts:
    """The hosts of one model."""

    def __init__(self, model: str, root: pathlib.Path = store.ROOT) -> None:
        self.model = model
        self.root = root
        self.directory = root / model
        self._image: image.Image | None = None

    @property
    def network(self) -> network.Network:
        """The model's bridge and subnet."""
        return network.Network.model_validate_json((self.directory / "network.json").read_bytes())

    def up(self, progress: Progress) -> None:
        """Make the image, the bridge and the NAT rules, as far as they are missing.

        Raises:
            SandboxError: a kernel feature is missing, or the image cannot be built.
        """
        self.empty_trash()  # of a command whose deletion was interrupted
        if not self.names():
            self._image = image.ensure_image(progress)
        with self._lock():
            path = self.directory / "network.json"
            if not path.exists():
                taken = [
                    Hosts(other.parent.name, self.root).network.subnet
                    for other in self.root.glob("*/network.json")
                ]
                bridge = "sd" + hashlib.sha256(str(self.directory).encode()).hexdigest()[:8]
                made = network.Network(bridge=bridge, cidr=str(network.free_subnet(taken)))
                progress(f"network: {made.cidr} on bridge {made.bridge}")
                files.ensure_file(path, made.model_dump_json() + "\n")
            self.network.ensure()
            text, path = network.resolv_conf(), self.directory / "resolv.conf"
            if not (path.exists() and path.read_text() == text):
                path.write_text(text)  # in place: hosts have it bound over theirs

    def create(
        self, name: str, *, gpus: tuple[Gpu, ...], binds: dict[str, str], progress: Progress
    ) -> "Host":
        """Return the host `name`, made and booted if need be.

        Args:
            name: the host's name, which only the host itself resolves.
            gpus: the mock GPUs of a new host, by slot.
            binds: of a new host, guest path to path on this machine, writable.
            progress: gets a line every 5 s while the host boots.

        Raises:
            SandboxError: the host cannot be made, or did not finish booting.
        """
        host = Host(self, name)
        with host.lock():
            if not host.exists():
                made = self._image or image.ensure_image(progress)
                with self._lock():
                    taken = {Host(self, other).record.address for other in self.names()}
                    addresses = map(
                        str, list(self.network.subnet)[10:250]
                    )  # more hosts than any machine runs
                    host.record = _Record(
                        address=next(address for address in addresses if address not in taken),
                        machine=f"{self.network.bridge}-{name}",
                        machine_id=uuid.uuid4().hex,
                        layers=tuple(map(str, made.layers)),
                        binds=binds,
                        read_only_binds=tuple(map(str, made.read_only_binds)),
                        gpus=gpus,
                    )
        host.start(progress)
        return host

    def get(self, name: str) -> "Host":
        """Return the host `name`. Raises `SandboxError` if it does not exist."""
        host = Host(self, name)
        if not host.exists():
            raise SandboxError(
                f"model {self.model} has no host {name}; it has: {', '.join(self.names()) or 'none'}"
            )
        return host

    def names(self) -> list[str]:
        """Return the names of the hosts, sorted."""
        return sorted(path.parent.name for path in self.directory.glob("hosts/*/host.json"))

    def missing_sources(self) -> list[str]:
        """Return bound files and folders that do not exist: the hosts cannot boot without them."""
        records = [
            json.loads(path.read_text()) for path in self.directory.glob("hosts/*/host.json")
        ]
        sources = {source for record in records for source in record.get("binds", {}).values()}
        return sorted(source for source in sources if not pathlib.Path(source).exists())

    def destroy_host(self, name: str) -> None:
        """Remove the host with everything in it. It is not an error if the host is missing."""
        host = Host(self, name)
        if not host.directory.exists():
            return
        with host.lock():
            host.remove()
        self.empty_trash()

    def empty_trash(self) -> None:
        """Delete the files of removed hosts in a background process: a busy disk takes minutes."""
        trash = self.root / _TRASH
        if trash.exists():
            script = 'setsid nice rm -rf "$0" < /dev/null > /dev/null 2>&1 &'
            run("/bin/sh", "-c", script, str(trash))

    def destroy(self) -> None:
        """Remove all hosts and the network, with mounts, processes, rules, cgroups and folders."""
        for path in sorted(path for path in self.directory.glob("hosts/*") if path.is_dir()):
            with (host := Host(self, path.name)).lock():
                host.remove()
        self.empty_trash()
        if not self.directory.exists():
            return
        with self._lock():
            if (self.directory / "network.json").exists():
                self.network.remove()
            for path in (
                *self.directory.glob("hosts/.*.lock"),
                *map(self.directory.joinpath, _NETWORK_FILES),
            ):
                files.ensure_absent(path)
            for directory in (self.directory / "hosts", self.directory):
                with contextlib.suppress(OSError):  # the model keeps its own files here
                    directory.rmdir()

    def _lock(self) -> contextlib.AbstractContextManager[object]:
        """Lock the subnets of this machine's models, and the addresses of this model's hosts."""
        self.directory.mkdir(parents=True, exist_ok=True)
        network.RUN.mkdir(exist_ok=True)
        return contextlib.closing(store.Lock(network.RUN / "models.lock", fcntl.LOCK_EX))


class Host:
    """One host. Made by `Hosts`."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self.hosts = hosts
        self.name = name
        self.directory = hosts.directory / "hosts" / name
        self.root = self.directory / "root"
        self._lock_file = hosts.directory / "hosts" / f".{name}.lock"

    @property
    def _machine(self) -> machine.Machine:
        # Not by the whole record: a host that another version of the sandbox made can be removed
        name: str = json.loads((self.directory / "host.json").read_text())["machine"]
        return machine.machine(name, self.directory)

    @property
    def record(self) -> _Record:
        """The contents of host.json."""
        return _Record.model_validate_json((self.directory / "host.json").read_bytes())

    @record.setter
    def record(self, record: _Record) -> None:
        files.ensure_file(self.directory / "host.json", record.model_dump_json(indent=1) + "\n")

    def exists(self) -> bool:
        """Check whether the host was made."""
        return (self.directory / "host.json").exists()

    def is_running(self) -> bool:
        """Check whether the host is up to run commands."""
        return self.exists() and self._machine.leader(self.root) is not None

    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Hold the host against other commands that would start, stop or remove it."""
        self._lock_file.parent.mkdir(parents=True, exist_ok=True)
        return contextlib.closing(store.Lock(self._lock_file, fcntl.LOCK_EX))

    def start(self, progress: Progress = lambda _: None) -> None:
        """Boot the host if necessary, and wait until systemd is done; or `SandboxError`."""
        with self.lock():
            if not self._machine.is_kept_running():
                self._mount()
                self._prepare()
                try:
                    self._machine.launch(self._options())
                except CommandError as e:
                    raise SandboxError(f"{self.name} did not start: {e}") from e
        self._wait_booted(None, progress)

    def kill(self) -> None:
        """Switch the host off as a power cut would: no process gets to finish."""
        with self.lock():
            self._machine.kill()

    def reboot(self) -> None:
        """Reboot the host from inside and wait until it is up again. Raises `SandboxError`."""
        before = self._machine.leader(self.root)
        if before is None:
            raise SandboxError(f"{self.name} does not run")
        with contextlib.suppress(
            SandboxError
        ):  # the host may end before systemctl could say that all is well
            self.run(["/usr/bin/systemctl", "reboot"], timeout=60, check=False)
        self._wait_booted(before, lambda _: None)

    def set_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        """Give the host these mock GPUs, by slot, at once when it runs. They survive a reboot."""
        with self.lock():
            self.record = self.record.model_copy(update={"gpus": gpus})
            if self._machine.leader(self.root) is not None:
                self._write_gpus()
                self.run(["/usr/bin/systemctl", "restart", "sandbox-gpus.service"])

    def popen(
        self, argv: collections.abc.Sequence[str], **options: typing.Any
    ) -> subprocess.Popen[typing.Any]:
        """Start a command as root inside the host, in all its namespaces and a clean environment.

        No shell sees it. The command ends when the host does. To end it earlier, signal its process
        group (`start_new_session=True`): the process returned is a shell that waits for it. A
        command that a signal ended has the status 128 + signal.

        Raises:
            SandboxError: the host does not run.
        """
        return subprocess.Popen(
            [*self._entrance(), *argv], env=clean_env(image.host_proxies()), **options
        )

    def _entrance(self) -> list[str]:
        """Return the words before a command inside.

        Raises `SandboxError` if the host does not run.
        """
        leader = self._machine.leader(self.root)
        if leader is None:
            raise SandboxError(f"{self.name} does not run")
        return machine.enter(leader)

    def run(
        self, argv: collections.abc.Sequence[str], *, timeout: float = 60, check: bool = True
    ) -> Completed:
        """Run a command inside the host and return its status and texts.

        Raises:
            SandboxError: the host does not run, or the command took more than `timeout` seconds or
            failed with `check`.
        """
        try:
            done = run(
                *self._entrance(), *argv, env=image.host_proxies(), timeout=timeout, check=False
            )
        except CommandTimeout as e:
            raise SandboxError(f"{self.name}: {argv[0]}: no answer within {timeout:g} s") from e
        if check and done.returncode != 0:
            text = last_line(done.stderr) or last_line(done.stdout)
            raise SandboxError(f"{self.name}: {argv[0]} exited {done.returncode}: {text}")
        return done

    def remove(self) -> None:
        """Switch the host off and remove everything in it. The caller holds the lock."""
        if self.exists():
            self._machine.kill()
            network.remove_link(self._machine.name)
            with contextlib.suppress(OSError):  # systemd-nspawn leaves it, empty
                (_PROPAGATE / self._machine.name).rmdir()
        for mount in _mounts_below(self.directory):
            run("/usr/bin/umount", mount, check=False)
            if str(mount) in _mounts_below(self.directory):
                run("/usr/bin/umount", "--lazy", mount)
        if self.directory.exists():
            trash = self.hosts.root / _TRASH
            trash.mkdir(mode=0o700, exist_ok=True)
            self.directory.rename(trash / uuid.uuid4().hex)
        self._lock_file.unlink(missing_ok=True)

    # --- starting --------------------------------------------------------------------------------

    def _mount(self) -> None:
        if self.root.is_mount():
            return
        record = self.record
        for layer in record.layers:
            if not pathlib.Path(layer).is_dir():
                raise SandboxError(
                    f"{self.name}: its image {layer} was removed; destroy the model and deploy again"
                )
        for name in ("upper", "work", "root"):
            (self.directory / name).mkdir(exist_ok=True)
        self.root.chmod(0o755)
        (self.directory / "upper").chmod(0o755)
        options = f"lowerdir={':'.join(record.layers)},upperdir={self.directory}/upper,workdir={self.directory}/work"
        # Without syncs: databases and dpkg on eight hosts would wait for this machine's disk most
        # of the time
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory / "work" / "work" / "incompat")  # of the last such mount
        mount = ("/usr/bin/mount", "-t", "overlay", "overlay", "-o")
        try:
            if run(*mount, f"{options},volatile", self.root, check=False).returncode != 0:
                run(*mount, options, self.root)
        except CommandError as e:
            raise SandboxError(
                f"{self.name}: cannot mount an overlay filesystem on {self.directory}: {e}; put it on ext4 or xfs"
            ) from e

    def _prepare(self) -> None:
        """Write what makes this host itself."""
        record, net = self.record, self.hosts.network
        etc = self.root / "etc"
        files.ensure_file(etc / "hostname", f"{self.name}\n")
        files.ensure_file(
            etc / "hosts", f"127.0.0.1 localhost\n::1 localhost\n{record.address} {self.name}\n"
        )
        files.ensure_file(etc / "machine-id", f"{record.machine_id}\n", mode=0o444)
        # A boot forgets what juju-exec asked for: Juju holds it in memory
        files.ensure_file(
            etc / "tmpfiles.d/sandbox-juju-exec.conf", f"D! {juju_exec.REQUESTS} 0700 root root -\n"
        )
        files.ensure_file(
            etc / "systemd/network/10-host0.network",
            f"[Match]\nName=host0\n\n[Link]\nMTUBytes={network.mtu()}\n\n"
            f"[Network]\nAddress={record.address}/{net.subnet.prefixlen}\nGateway={net.subnet[1]}\n"
            "LinkLocalAddressing=no\nIPv6AcceptRA=no\n",
        )
        self._write_gpus()
        files.ensure_file(etc / "sandbox/mock_gpus.py", _GUEST_GPUS.read_text())

    def _write_gpus(self) -> None:
        """List the cards in their slots, with the identifiers and bus addresses that they keep."""
        machine_id = uuid.UUID(self.record.machine_id)
        listing = [
            {
                **dataclasses.asdict(gpu),
                "uuid": f"GPU-{uuid.uuid5(machine_id, str(slot))}",
                "bus": f"0000:{0x81 + slot:02x}:00.0",
            }
            for slot, gpu in enumerate(self.record.gpus)
            if gpu.model
        ]
        files.ensure_file(self.root / "etc/sandbox/gpus.json", json.dumps(listing, indent=1) + "\n")

    def _options(self) -> list[str]:
        """Return systemd-nspawn's options for this host."""
        record = self.record
        options = [
            "--quiet",
            "--boot",
            "--register=no",
            "--keep-unit",
            "--settings=no",
            "--link-journal=no",
        ]
        options += [
            "--resolv-conf=off",
            "--timezone=off",
            "--console=read-only",
            "--kill-signal=SIGRTMIN+3",
        ]
        options += [
            f"--directory={self.root}",
            f"--machine={record.machine}",
            f"--hostname={self.name}",
        ]
        options += [f"--uuid={record.machine_id}", f"--network-bridge={self.hosts.network.bridge}"]
        options += ["--capability=CAP_IPC_LOCK,CAP_SYSLOG", "--private-users=no"]
        options += [
            "--system-call-filter=bpf"
        ]  # slurmd keeps jobs from devices with it, on cgroup version 2
        options += [f"--bind={self.hosts.directory}/resolv.conf:/etc/resolv.conf"]
        options += [
            f"--bind={image.PIP_CACHE}",
            f"--bind={image.ENVIRONMENTS}:{image.GUEST_ENVIRONMENTS}",
        ]
        options += [
            f"--bind-ro={path}" for path in record.read_only_binds if pathlib.Path(path).exists()
        ]
        for guest, source in record.binds.items():
            if not pathlib.Path(source).exists():
                raise SandboxError(
                    f"{self.name} cannot boot: {source} is missing; "
                    "if its clone was deleted, ./sandboxctl destroy removes the deployment"
                )
            options.append(f"--bind={_escape(source)}:{_escape(guest)}")
        return options

    def _wait_booted(self, before: int | None, progress: Progress) -> None:
        """Wait until the host's first process is not `before`, and systemd is done."""
        begin = shown = time.monotonic()
        state = "not running"
        while True:
            leader = self._machine.leader(self.root)
            if leader is not None and leader != before:
                try:
                    done = self.run(
                        ["/usr/bin/systemctl", "is-system-running"], check=False, timeout=30
                    )
                    state = done.stdout.strip() or last_line(done.stderr)
                except SandboxError as e:  # no answer yet, or its first process has just gone
                    state = str(e)
                if state in ("running", "degraded"):
                    return
            elif before is None and not self._machine.is_kept_running():
                raise SandboxError(
                    f"{self.name}: did not boot: {self._machine.last_words() or 'it ended at once'}"
                )
            now = time.monotonic()
            if now - begin > BOOT_TIMEOUT_S:
                raise SandboxError(
                    f"{self.name}: not up within {BOOT_TIMEOUT_S:.0f} s ({state}); see {self.directory}/console.log"
                )
            if now - shown > _HEARTBEAT_S:
                progress(f"{self.name}: booting, {now - begin:.0f} s: {state}")
                shown = now
            time.sleep(0.1)


def _mounts_below(directory: pathlib.Path) -> list[str]:
    """Return the mount points in `directory`, innermost first."""
    points = [
        line.split()[1] for line in pathlib.Path("/proc/self/mounts").read_text().splitlines()
    ]
    return sorted(
        (point for point in points if point.startswith(f"{directory}/")), key=len, reverse=True
    )


def _escape(path: str) -> str:
    """Return `path` as --bind= takes it, systemd-nspawn(1)."""
    return path.replace("\\", "\\\\").replace(":", "\\:")
