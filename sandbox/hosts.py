"""Hosts of the sandbox: Debian systems booted with systemd by systemd-nspawn, on a network of their own.

A model has one bridge with a free /24 behind NAT and any number of hosts. What must survive the command that made it is
in files under `<root>/<model>/`:

    network.json              bridge, subnet
    etc-hosts, resolv.conf    bound over those of every host; all hosts know all hosts by name
    hosts/<name>/host.json    address, layers of the image, binds, GPUs, machine id
    hosts/<name>/process      pid, start time and boot id of what keeps the host running
    hosts/<name>/{upper,work,root}, console.log

Every operation may be interrupted and repeated. Threads and processes may work on different hosts at once.
"""

import collections.abc
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import ipaddress
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading
import time
import typing
import uuid

from sandbox import image
from slurm_ddp import files
from slurm_ddp.run import CommandError, Completed, clean_env, last_line, run

Progress = collections.abc.Callable[[str], None]

ROOT = pathlib.Path("/var/lib/slurm-ddp")
BOOT_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0

_GUEST_GPUS = pathlib.Path(__file__).resolve().parent / "mock_gpus.py"
_REBOOT_STATUS = 133  # systemd-nspawn's exit status when the host rebooted, systemd-nspawn(1) "Exit status"
_HEARTBEAT_S = 5.0
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_UPSTREAM_RESOLV_CONF = pathlib.Path("/run/systemd/resolve/resolv.conf")  # behind systemd-resolved's stub

# systemd-nspawn without a service manager: run it again when its host rebooted. The first lines let a later command
# tell whether the process it finds under the pid is still this one.
_SUPERVISOR = f"""
start=$(cut -d' ' -f22 /proc/$$/stat)
echo "$$ $start $(cat /proc/sys/kernel/random/boot_id)" > "$1.new" && mv "$1.new" "$1" || exit 1
cgroups=$2
shift 2
while :; do
  ( for group in $cgroups; do echo 0 > "$group/cgroup.procs"; done; exec "$@" )
  status=$?
  [ $status = {_REBOOT_STATUS} ] || exit $status
done
"""

_GPU_UNIT = """\
[Unit]
Description=Mock GPUs of the sandbox
DefaultDependencies=no
After=local-fs.target systemd-tmpfiles-setup-dev.service
Before=sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/python3 -I /etc/sandbox/mock_gpus.py

[Install]
WantedBy=sysinit.target
"""


class HostError(Exception):
    """A host or its network cannot do what was asked. `str()` is one line."""


@dataclasses.dataclass(frozen=True)
class Gpus:
    """The mock GPUs of a host: how many, and the name their driver reports, such as `NVIDIA H200`."""

    count: int
    model: str


@dataclasses.dataclass(frozen=True)
class _Record:
    """host.json."""

    address: str
    machine: str  # unique on this machine: systemd-nspawn's machine name, the interface's, the cgroup's
    machine_id: str
    layers: tuple[str, ...]
    binds: dict[str, str]  # guest path: host path
    read_only_binds: tuple[str, ...]
    gpus: Gpus | None = None

    @classmethod
    def load(cls, path: pathlib.Path) -> "_Record":
        values = json.loads(path.read_text())
        values["layers"] = tuple(values["layers"])
        values["read_only_binds"] = tuple(values["read_only_binds"])
        values["gpus"] = Gpus(**values["gpus"]) if values["gpus"] else None
        return cls(**values)

    def save(self, path: pathlib.Path) -> None:
        files.ensure_file(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class _Network:
    """network.json."""

    bridge: str
    cidr: str

    @property
    def subnet(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(self.cidr)

    @property
    def gateway(self) -> ipaddress.IPv4Address:
        return self.subnet[1]


class Hosts:
    """The hosts of one model."""

    def __init__(self, model: str, root: pathlib.Path = ROOT) -> None:
        if not _NAME.fullmatch(model):
            raise HostError(f"model name {model!r}: use lower-case letters, digits and hyphens, at most 40")
        self.model = model
        self.root = root
        self.directory = root / model

    @property
    def cidr(self) -> str:
        """The model's subnet, such as `10.77.3.0/24`."""
        return self._network().cidr

    def up(self, progress: Progress) -> None:
        """Make the image, the bridge and the NAT rules, as far as they are missing.

        Raises:
            HostError: not root, a tool or kernel feature is missing, or the image cannot be built.
        """
        if os.geteuid() != 0:
            raise HostError("the sandbox needs root; run it with sudo")
        if not self.names():
            _image(progress)
        with self._lock():
            path = self.directory / "network.json"
            if not path.exists():
                network = _Network(bridge=_bridge_name(self.directory), cidr=str(_free_subnet(self.root)))
                progress(f"network: {network.cidr} on bridge {network.bridge}")
                files.ensure_file(path, json.dumps(dataclasses.asdict(network)) + "\n")
            _ensure_bridge(self._network())
            _ensure_forwarding(self.root)
            _ensure_rules(self._network())
            self._write_resolv_conf()

    def create(
        self,
        name: str,
        *,
        gpus: Gpus | None = None,
        binds: collections.abc.Mapping[str, str] | None = None,
        progress: Progress,
    ) -> "Host":
        """Return the host `name`, made and booted if need be.

        Args:
            name: the host's name, which all hosts of the model resolve.
            gpus: its mock GPUs; on a host that exists already they are changed at once.
            binds: guest path to path on this machine, writable. On a host that runs they count from its next start.
            progress: hears one line per step, and again at least every 5 s while the host boots.

        Raises:
            HostError: the host cannot be made, or did not finish booting within 120 s.
        """
        if not _NAME.fullmatch(name):
            raise HostError(f"host name {name!r}: use lower-case letters, digits and hyphens, at most 40")
        bound = dict(binds or {})
        for source in bound.values():
            if not pathlib.Path(source).exists():
                raise HostError(f"{name}: {source} does not exist, so it cannot be bound into the host")
        host = Host(self, name)
        with host.lock():
            if not host.exists():
                made = _image(progress)
                with self._lock():
                    taken = {self._host(other).address for other in self.names()}
                    address = next(str(ip) for ip in list(self._network().subnet)[10:250] if str(ip) not in taken)
                    _Record(
                        address=address,
                        machine=f"{self._network().bridge}-{name}",
                        machine_id=uuid.uuid4().hex,
                        layers=tuple(map(str, made.layers)),
                        binds=bound,
                        read_only_binds=tuple(map(str, made.read_only_binds)),
                        gpus=gpus,
                    ).save(host.directory / "host.json")
            elif host.record.binds != bound:
                dataclasses.replace(host.record, binds=bound).save(host.directory / "host.json")
        self._write_hosts()
        if host.gpus != gpus:
            host.set_gpus(gpus)
        host.start(progress)
        return host

    def get(self, name: str) -> "Host":
        """Return the host `name`.

        Raises:
            HostError: there is none.
        """
        host = Host(self, name)
        if not host.exists():
            raise HostError(f"model {self.model} has no host {name}; it has: {', '.join(self.names()) or 'none'}")
        return host

    def names(self) -> list[str]:
        """Return the names of the hosts, sorted."""
        return sorted(path.parent.name for path in self.directory.glob("hosts/*/host.json"))

    def recover(self, progress: Progress) -> list[str]:
        """Boot the hosts that should run and do not, as after a restart of this machine; return their names."""
        stopped = [host for host in map(self._host, self.names()) if host.wanted and not host.is_running()]
        for host in stopped:
            host.start(progress)
        return [host.name for host in stopped]

    def destroy_host(self, name: str) -> None:
        """Remove the host with all it holds. A host that is not there is no error."""
        host = Host(self, name)
        if not host.directory.exists():
            return
        with host.lock():
            host.remove()
        self._write_hosts()

    def destroy(self) -> None:
        """Remove every host and the network: no mount, process, interface, iptables rule, cgroup or directory stays."""
        for path in sorted(path for path in self.directory.glob("hosts/*") if path.is_dir()):
            self.destroy_host(path.name)
        if not self.directory.exists():
            return
        with self._lock():
            if (self.directory / "network.json").exists():
                _remove_network(self._network())
            for name in ("network.json", "etc-hosts", "resolv.conf", "hosts.lock"):
                files.ensure_absent(self.directory / name)
            for directory in (self.directory / "hosts", self.directory):
                with contextlib.suppress(OSError):  # the model keeps its own files here
                    directory.rmdir()
            _restore_forwarding(self.root)

    def _host(self, name: str) -> "Host":
        return Host(self, name)

    def network(self) -> _Network:
        """Return the model's bridge and subnet."""
        return self._network()

    def _network(self) -> _Network:
        path = self.directory / "network.json"
        if not path.exists():
            raise HostError(f"model {self.model} has no network yet")
        return _Network(**json.loads(path.read_text()))

    @contextlib.contextmanager
    def _lock(self) -> collections.abc.Generator[None]:
        """Hold what the hosts of all models share: subnets, addresses, /etc/hosts."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _write_hosts(self) -> None:
        with self._lock():
            lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
            lines += [f"{self._host(name).address} {name}" for name in self.names()]
            _rewrite(self.directory / "etc-hosts", "\n".join(lines) + "\n")

    def _write_resolv_conf(self) -> None:
        source = pathlib.Path("/etc/resolv.conf")
        servers = _name_servers(source) or _name_servers(_UPSTREAM_RESOLV_CONF)
        lines = [*(f"nameserver {server}" for server in servers), "options timeout:2 attempts:3"]
        _rewrite(self.directory / "resolv.conf", "\n".join(lines) + "\n")


class Host:
    """One host. Made by `Hosts`."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self.hosts = hosts
        self.name = name
        self.directory = hosts.directory / "hosts" / name
        self.root = self.directory / "root"

    @property
    def record(self) -> _Record:
        """What host.json says now."""
        return _Record.load(self.directory / "host.json")

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return self.record.address

    @property
    def gpus(self) -> Gpus | None:
        """Its mock GPUs."""
        return self.record.gpus

    @property
    def wanted(self) -> bool:
        """Whether it should run: it was started, and neither stopped nor killed since."""
        return (self.directory / "wanted").exists()

    def exists(self) -> bool:
        """Tell whether the host was made."""
        return (self.directory / "host.json").exists()

    def is_running(self) -> bool:
        """Tell whether the host is up to run commands."""
        return self._leader() is not None

    @contextlib.contextmanager
    def lock(self) -> collections.abc.Generator[None]:
        """Hold the host against other commands that would start, stop or remove it."""
        (self.hosts.directory / "hosts").mkdir(parents=True, exist_ok=True)
        path = self.hosts.directory / "hosts" / f".{self.name}.lock"
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def start(self, progress: Progress = lambda _: None, *, timeout: float = BOOT_TIMEOUT_S) -> None:
        """Boot the host if it does not run, and wait until systemd has started everything.

        Raises:
            HostError: it was not up within `timeout` seconds.
        """
        with self.lock():
            if not self._supervised():
                _ensure_bridge(self.hosts.network())
                self._mount()
                self._prepare()
                self._launch()
            (self.directory / "wanted").touch()
        self._wait_booted(None, progress, timeout)

    def stop(self, *, timeout: float = STOP_TIMEOUT_S) -> None:
        """Shut the host down in order; after `timeout` seconds switch it off."""
        with self.lock():
            nspawn = self._nspawn()
            if nspawn is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(nspawn, signal.SIGTERM)
                _wait_until(lambda: not self._supervised(), timeout)
            self._kill()

    def kill(self) -> None:
        """Switch the host off as a power cut would: no process gets to finish."""
        with self.lock():
            self._kill()

    def reboot(self, timeout: float = BOOT_TIMEOUT_S, progress: Progress = lambda _: None) -> None:
        """Reboot the host from inside and wait until it is up again.

        Raises:
            HostError: it does not run, or is not up within `timeout` seconds.
        """
        before = self._leader()
        if before is None:
            raise HostError(f"{self.name} does not run")
        with contextlib.suppress(HostError):  # the host may be gone before systemctl could say that all is well
            self.run(["/usr/bin/systemctl", "reboot"], timeout=15, check=False)
        self._wait_booted(before, progress, timeout)

    def set_gpus(self, gpus: Gpus | None) -> None:
        """Give the host these mock GPUs, at once when it runs. They survive a reboot."""
        with self.lock():
            dataclasses.replace(self.record, gpus=gpus).save(self.directory / "host.json")
            if self._leader() is not None:
                self._write_gpus()
                self.run(["/usr/bin/systemctl", "restart", "sandbox-gpus.service"])

    def popen(
        self,
        argv: collections.abc.Sequence[str],
        *,
        env: collections.abc.Mapping[str, str] | None = None,
        user: str = "root",
        cwd: str | None = None,
        **options: typing.Any,
    ) -> subprocess.Popen[typing.Any]:
        """Start a command inside the host, in all its namespaces and a clean environment.

        Args:
            argv: the command; no shell sees it.
            env: variables added to a small clean environment.
            user: the account of the host that runs it, with its groups and home.
            cwd: its working directory in the host; `/` when absent.
            **options: `stdin`, `stdout`, `stderr`, `text` and whatever else `subprocess.Popen` takes.

        The command ends when the host does. To end it earlier, signal its process group (`start_new_session=True`):
        the process returned is a shell that waits for it. A command that a signal ended has the status 128 + signal.

        Raises:
            HostError: the host does not run.
        """
        leader = self._leader()
        if leader is None:
            raise HostError(f"{self.name} does not run")
        # The shell waits outside the host's process namespace for its child inside. nsenter would do the same but for one
        # thing: it stops when its child is stopped, as a shutdown does with all processes, and then never reaps it.
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"]
        enter = ["/usr/bin/nsenter", f"--target={leader}", *namespaces, "--no-fork", "--"]
        enter += ["/bin/sh", "-c", '"$@"; exit "$?"', "sandbox-exec"]
        command = list(argv)
        identity: dict[str, str] = {}
        if user != "root":
            command = ["/sbin/runuser", "-u", user, "--", *command]
            identity = {"USER": user, "LOGNAME": user, "HOME": self._home(user)}
        if cwd is not None:
            command = ["/usr/bin/env", "-C", cwd, *command]
        child_env = clean_env(image.host_proxies() | identity | dict(env or {}))
        return subprocess.Popen([*enter, *command], env=child_env, **options)

    def run(
        self,
        argv: collections.abc.Sequence[str],
        *,
        timeout: float = 60,
        check: bool = True,
        input: str | None = None,  # noqa: A002 - the name subprocess.run gives it
        env: collections.abc.Mapping[str, str] | None = None,
        user: str = "root",
    ) -> Completed:
        """Run a command inside the host and return its status and texts.

        Raises:
            HostError: the host does not run, the command took longer than `timeout` seconds, or it failed and `check`
                is set.
        """
        process = self.popen(
            argv,
            env=env,
            user=user,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException as e:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=2)
            if isinstance(e, subprocess.TimeoutExpired):
                raise HostError(f"{self.name}: {argv[0]}: no answer within {timeout:g} s") from e
            raise
        if check and process.returncode != 0:
            said = last_line(stderr) or last_line(stdout)
            raise HostError(f"{self.name}: {argv[0]} exited {process.returncode}: {said}")
        return Completed(process.returncode, stdout, stderr)

    def _home(self, user: str) -> str:
        accounts = (line.split(":") for line in (self.root / "etc/passwd").read_text().splitlines())
        home = next((fields[5] for fields in accounts if fields[0] == user), None)
        if home is None:
            raise HostError(f"{self.name} has no account {user}")
        return home

    def console(self, lines: int = 20) -> str:
        """Return the last lines of what the host wrote on its console."""
        path = self.directory / "console.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def remove(self) -> None:
        """Switch the host off and remove all it holds. The caller holds the lock."""
        self._kill()
        for mount in _mounts_below(self.directory):
            run("/usr/bin/umount", mount, check=False)
            if str(mount) in _mounts_below(self.directory):
                run("/usr/bin/umount", "--lazy", mount)
        if self.directory.exists():
            shutil.rmtree(self.directory)
        (self.hosts.directory / "hosts" / f".{self.name}.lock").unlink(missing_ok=True)

    # --- starting -------------------------------------------------------------------------------------------------

    def _mount(self) -> None:
        if self.root.is_mount():
            return
        record = self.record
        for layer in record.layers:
            if not pathlib.Path(layer).is_dir():
                raise HostError(f"{self.name}: its image {layer} is gone; destroy the model and deploy again")
        for name in ("upper", "work", "root"):
            (self.directory / name).mkdir(exist_ok=True)
        self.root.chmod(0o755)
        (self.directory / "upper").chmod(0o755)
        options = f"lowerdir={':'.join(record.layers)},upperdir={self.directory}/upper,workdir={self.directory}/work"
        try:
            run("/usr/bin/mount", "-t", "overlay", "overlay", "-o", options, self.root)
        except CommandError as e:
            raise HostError(
                f"{self.name}: no overlay filesystem on {self.directory} ({e}); is it on ext4 or xfs?"
            ) from e

    def _prepare(self) -> None:
        """Write what makes this host itself."""
        record, network = self.record, self.hosts.network()
        etc = self.root / "etc"
        files.ensure_file(etc / "hostname", f"{self.name}\n")
        files.ensure_file(etc / "machine-id", f"{record.machine_id}\n", mode=0o444)
        files.ensure_file(
            etc / "systemd/network/10-host0.network",
            f"[Match]\nName=host0\n\n[Link]\nMTUBytes={_mtu()}\n\n"
            f"[Network]\nAddress={record.address}/{network.subnet.prefixlen}\nGateway={network.gateway}\n"
            "LinkLocalAddressing=no\nIPv6AcceptRA=no\n",
        )
        self._write_gpus()
        files.ensure_file(etc / "sandbox/mock_gpus.py", _GUEST_GPUS.read_text())
        files.ensure_file(etc / "systemd/system/sandbox-gpus.service", _GPU_UNIT)
        wants = etc / "systemd/system/sysinit.target.wants"
        wants.mkdir(exist_ok=True)
        if not (wants / "sandbox-gpus.service").is_symlink():
            (wants / "sandbox-gpus.service").symlink_to("/etc/systemd/system/sandbox-gpus.service")

    def _write_gpus(self) -> None:
        gpus = self.record.gpus or Gpus(0, "")
        listing = [
            {
                "model": gpus.model,
                "uuid": f"GPU-{uuid.uuid5(uuid.UUID(self.record.machine_id), str(minor))}",
                "bus": f"0000:{0x81 + minor:02x}:00.0",
            }
            for minor in range(gpus.count)
        ]
        files.ensure_file(self.root / "etc/sandbox/gpus.json", json.dumps(listing, indent=1) + "\n")

    def _launch(self) -> None:
        files.ensure_absent(self.directory / "process")
        command = self._nspawn_command()
        if pathlib.Path("/run/systemd/system").is_dir():
            _start_service(self._unit, self.name, command, self.directory)
            return
        groups = _make_cgroups(self.record.machine)
        supervisor = ["/usr/bin/setsid", "/bin/sh", "-c", _SUPERVISOR, "sandbox-host", str(self.directory / "process")]
        # The shell leaves at once, so the supervisor is nobody's child and outlives this command.
        background = '"$@" < /dev/null > "$0" 2>&1 &'
        console = str(self.directory / "console.log")
        subprocess.run(
            ["/bin/sh", "-c", background, console, *supervisor, " ".join(map(str, groups)), *command],
            env=clean_env() | _NSPAWN_ENV,
            check=True,
            timeout=30,
        )
        if not _wait_until((self.directory / "process").exists, 10):
            raise HostError(f"{self.name}: did not start: {last_line(self.console())}")

    def _nspawn_command(self) -> list[str]:
        record, network = self.record, self.hosts.network()
        options = ["--quiet", "--boot", "--register=no", "--keep-unit", "--settings=no", "--link-journal=no"]
        options += ["--resolv-conf=off", "--timezone=off", "--console=read-only", "--kill-signal=SIGRTMIN+3"]
        options += [f"--directory={self.root}", f"--machine={record.machine}", f"--hostname={self.name}"]
        options += [f"--uuid={record.machine_id}", f"--network-bridge={network.bridge}"]
        options += ["--capability=CAP_IPC_LOCK,CAP_SYSLOG", "--private-users=no"]
        options += [f"--bind={self.hosts.directory}/etc-hosts:/etc/hosts"]
        options += [f"--bind={self.hosts.directory}/resolv.conf:/etc/resolv.conf"]
        options += [f"--bind={image.PIP_CACHE}"]
        options += [f"--bind-ro={path}" for path in record.read_only_binds if pathlib.Path(path).exists()]
        for guest, source in record.binds.items():
            if not pathlib.Path(source).exists():
                raise HostError(f"{self.name}: {source} does not exist, so it cannot be bound into the host")
            options.append(f"--bind={_escape(source)}:{_escape(guest)}")
        return ["/usr/bin/systemd-nspawn", *options]

    def _wait_booted(self, before: int | None, progress: Progress, timeout: float) -> None:
        """Wait until the host has a first process other than `before`, and systemd has started everything."""
        begin = said = time.monotonic()
        state = "not running"
        while True:
            leader = self._leader()
            if leader is not None and leader != before:
                done = self.run(["/usr/bin/systemctl", "is-system-running"], check=False, timeout=15)
                state = done.stdout.strip() or last_line(done.stderr)
                if state in ("running", "degraded"):
                    return
            elif before is None and not self._supervised():
                raise HostError(f"{self.name}: did not boot: {last_line(self.console()) or 'it ended at once'}")
            now = time.monotonic()
            if now - begin > timeout:
                raise HostError(
                    f"{self.name}: not up within {timeout:.0f} s ({state}); see {self.directory}/console.log"
                )
            if now - said > _HEARTBEAT_S:
                progress(f"{self.name}: booting, {now - begin:.0f} s: {state}")
                said = now
            time.sleep(0.1)

    # --- the processes behind it ----------------------------------------------------------------------------------

    @property
    def _unit(self) -> str:
        return f"slurm-ddp-{self.record.machine}.service"

    def _supervised(self) -> bool:
        """Tell whether what keeps the host running lives, be it booting, rebooting or up."""
        if not self.exists():
            return False
        if pathlib.Path("/run/systemd/system").is_dir():
            return _service_state(self._unit) not in ("inactive", "failed")
        return self._supervisor() is not None

    def _supervisor(self) -> int | None:
        """Return the supervisor's pid; None when it ended, also when another process has its number now."""
        try:
            pid, start, boot = (self.directory / "process").read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        if boot != _boot_id() or _stat(int(pid)).get("start") != start or _stat(int(pid)).get("state") == "Z":
            return None
        return int(pid)

    def _nspawn(self) -> int | None:
        """Return the pid of the host's systemd-nspawn."""
        if not self.exists():
            return None
        if pathlib.Path("/run/systemd/system").is_dir():
            return _service_pid(self._unit)
        supervisor = self._supervisor()
        if supervisor is None:
            return None
        return next((pid for pid in _children(supervisor) if _stat(pid).get("name") == "systemd-nspawn"), None)

    def _leader(self) -> int | None:
        """Return the pid of the host's first process, once it has the host's root and name."""
        nspawn = self._nspawn()
        for pid in _children(nspawn) if nspawn is not None else []:
            try:
                # Before systemd-nspawn switches the root, a command sent there would meet this machine's own files.
                same = (pathlib.Path("/proc") / str(pid) / "root").stat().st_ino == self.root.stat().st_ino
                if same and _stat(pid).get("name") == "systemd":
                    return pid
            except OSError:
                continue
        return None

    def _kill(self) -> None:
        """End all processes of the host and what the kernel keeps for them. The caller holds the lock."""
        if not self.exists():
            return
        record = self.record
        if pathlib.Path("/run/systemd/system").is_dir():
            run("/usr/bin/systemctl", "kill", "--signal=SIGKILL", self._unit, check=False)
            run("/usr/bin/systemctl", "stop", self._unit, check=False, timeout=60)
            run("/usr/bin/systemctl", "reset-failed", self._unit, check=False)
        else:
            supervisor, nspawn = self._supervisor(), self._nspawn()
            inside = _children(nspawn) if nspawn is not None else []
            for pid in (supervisor, nspawn, *inside):  # the first process takes all others of the host with it
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            gone = _wait_until(lambda: not any(_alive(pid) for pid in (supervisor, nspawn, *inside) if pid), 30)
            if not gone:
                raise HostError(f"{self.name}: a process of it cannot be killed; is a filesystem hung?")
            _remove_cgroups(record.machine)
        files.ensure_absent(self.directory / "process")
        files.ensure_absent(self.directory / "wanted")


# --- image ------------------------------------------------------------------------------------------------------------

_images: list[image.Image] = []
_images_lock = threading.Lock()


def _image(progress: Progress) -> image.Image:
    """Return the image, looked up once per command."""
    with _images_lock:
        if not _images:
            try:
                _images.append(image.ensure_image(progress))
            except (image.ImageError, CommandError) as e:
                raise HostError(str(e)) from e
        return _images[0]


# --- network ----------------------------------------------------------------------------------------------------------


def _bridge_name(directory: pathlib.Path) -> str:
    return "sd" + hashlib.sha256(str(directory).encode()).hexdigest()[:8]  # the kernel allows 15 characters


def _free_subnet(root: pathlib.Path) -> ipaddress.IPv4Network:
    """Return a private /24 that neither this machine's routes nor another model use."""
    routes = json.loads(run("/usr/sbin/ip", "-json", "-4", "route", "show", "table", "all").stdout)
    used = [ipaddress.ip_network(route["dst"], strict=False) for route in routes if route["dst"][0].isdigit()]
    used += [_Network(**json.loads(path.read_text())).subnet for path in root.glob("*/network.json")]
    for second in range(77, 256):
        for third in range(256):
            candidate = ipaddress.IPv4Network(f"10.{second}.{third}.0/24")
            if not any(candidate.overlaps(other) for other in used if isinstance(other, ipaddress.IPv4Network)):
                return candidate
    raise HostError("no free /24 in 10.77.0.0 to 10.255.255.255 for the hosts")


def _ensure_bridge(network: _Network) -> None:
    address = f"{network.gateway}/{network.subnet.prefixlen}"
    try:
        if not pathlib.Path("/sys/class/net", network.bridge).exists():
            run("/usr/sbin/ip", "link", "add", network.bridge, "type", "bridge")
        run("/usr/sbin/ip", "address", "replace", address, "dev", network.bridge)
        run("/usr/sbin/ip", "link", "set", network.bridge, "mtu", str(_mtu()), "up")
    except CommandError as e:
        raise HostError(f"bridge {network.bridge}: {e}") from e


def _mtu() -> int:
    """Return the frame size of this machine's way out, at most Ethernet's 1500; larger frames might be lost there."""
    routes = json.loads(run("/usr/sbin/ip", "-json", "-4", "route", "show", "default").stdout)
    mtus = [int(pathlib.Path("/sys/class/net", route["dev"], "mtu").read_text()) for route in routes if "dev" in route]
    return min([1500, *mtus])


def _rules(network: _Network) -> list[tuple[str, str, list[str]]]:
    """Return (table, chain, rule): the hosts reach the outside, and nothing a firewall set up by others stops them."""
    comment = ["-m", "comment", "--comment", f"slurm-ddp {network.bridge}"]
    nat = ["-s", network.cidr, "!", "-d", network.cidr, *comment, "-j", "MASQUERADE"]
    return [
        ("nat", "POSTROUTING", nat),
        ("filter", "FORWARD", ["-i", network.bridge, *comment, "-j", "ACCEPT"]),
        ("filter", "FORWARD", ["-o", network.bridge, *comment, "-j", "ACCEPT"]),
    ]


def _iptables(table: str, action: str, chain: str, rule: list[str], *, check: bool = True) -> bool:
    try:
        return run("/usr/sbin/iptables", "-w", "30", "-t", table, action, chain, *rule, check=check).returncode == 0
    except CommandError as e:
        raise HostError(f"iptables: {e}") from e


def _ensure_rules(network: _Network) -> None:
    for table, chain, rule in _rules(network):
        if not _iptables(table, "-C", chain, rule, check=False):
            _iptables(table, "-I", chain, rule)


def _remove_network(network: _Network) -> None:
    for table, chain, rule in _rules(network):
        while _iptables(table, "-D", chain, rule, check=False):
            pass
    if pathlib.Path("/sys/class/net", network.bridge).exists():
        run("/usr/sbin/ip", "link", "delete", network.bridge)


def _ensure_forwarding(root: pathlib.Path) -> None:
    """Let this machine forward packets; remember what it did before."""
    switch = pathlib.Path("/proc/sys/net/ipv4/ip_forward")
    if switch.read_text().strip() != "1":
        files.ensure_file(root / ".ip_forward", switch.read_text())
        switch.write_text("1\n")


def _restore_forwarding(root: pathlib.Path) -> None:
    """Once no model is left, forward packets only if this machine did so before us."""
    before = root / ".ip_forward"
    if before.exists() and not any(root.glob("*/network.json")):
        pathlib.Path("/proc/sys/net/ipv4/ip_forward").write_text(before.read_text())
        before.unlink()


def _name_servers(path: pathlib.Path) -> list[str]:
    """Return the name servers that guests can reach too, so none on this machine's loopback."""
    if not path.exists():
        return []
    servers = re.findall(r"(?m)^\s*nameserver\s+(\S+)", path.read_text())
    return [server for server in servers if not server.startswith(("127.", "::1"))]


def _rewrite(path: pathlib.Path, text: str) -> None:
    """Make the file hold `text`, in the same inode: hosts have it bound over theirs. Readers see one write."""
    if path.exists() and path.read_text() == text:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, text.encode(), 0)
        os.ftruncate(descriptor, len(text.encode()))
    finally:
        os.close(descriptor)


# --- processes, cgroups, services -------------------------------------------------------------------------------------

_NSPAWN_ENV = {"SYSTEMD_NSPAWN_TMPFS_TMP": "0"}  # /tmp on disk: pip unpacks gigabytes there


def _stat(pid: int) -> dict[str, str]:
    """Return name, state, parent and start time (clock ticks since boot) of a process, proc(5); {} when it is gone."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return {}
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return {"name": name, "state": fields[0], "parent": fields[1], "start": fields[19]}


def _alive(pid: int) -> bool:
    return _stat(pid).get("state", "Z") not in "ZX"


def _children(pid: int) -> list[int]:
    return [
        int(path.name)
        for path in pathlib.Path("/proc").glob("[0-9]*")
        if _stat(int(path.name)).get("parent") == str(pid)
    ]


@functools.cache
def _boot_id() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _wait_until(condition: collections.abc.Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _cgroup_roots() -> list[pathlib.Path]:
    """Return where cgroup hierarchies are mounted: one on a cgroup v2 machine, one per controller on v1."""
    mounts = [line.split() for line in pathlib.Path("/proc/self/mounts").read_text().splitlines()]
    return [pathlib.Path(fields[1]) for fields in mounts if fields[2] in ("cgroup", "cgroup2")]


def _make_cgroups(machine: str) -> list[pathlib.Path]:
    """Make a cgroup for the host in every hierarchy; two systemds in one cgroup would end each other's units."""
    made: list[pathlib.Path] = []
    for root in _cgroup_roots():
        group = root / f"slurm-ddp-{machine}"
        try:
            group.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # v1: empty in a new group, and then nothing may join
                if (root / name).exists() and (group / "cpuset.cpu_exclusive").exists():
                    (group / name).write_text((root / name).read_text())
        except OSError:
            continue  # a hierarchy that is not ours to change: the host stays where this command is
        made.append(group)
    return made


def _remove_cgroups(machine: str) -> None:
    for root in _cgroup_roots():
        group = root / f"slurm-ddp-{machine}"
        if not group.is_dir():
            continue
        for directory, _, _ in os.walk(group, topdown=False):
            for _ in range(100):  # a process that ended a moment ago still counts
                with contextlib.suppress(OSError):
                    pathlib.Path(directory).rmdir()
                    break
                time.sleep(0.02)


def _start_service(unit: str, name: str, command: list[str], directory: pathlib.Path) -> None:
    """Run systemd-nspawn as a transient service, like systemd-nspawn@.service, so that it outlives this session."""
    properties = ["Type=exec", "Delegate=yes", "KillMode=mixed", "TasksMax=infinity", "Slice=machine.slice"]
    properties += [f"RestartForceExitStatus={_REBOOT_STATUS}", f"SuccessExitStatus={_REBOOT_STATUS}"]
    properties += ["RestartSec=0", "StartLimitIntervalSec=0"]
    properties += [f"StandardOutput=truncate:{directory}/console.log", f"StandardError=append:{directory}/console.log"]
    options = [f"--property={value}" for value in properties]
    options += [f"--setenv={key}={value}" for key, value in _NSPAWN_ENV.items()]
    try:
        run("/usr/bin/systemd-run", "--quiet", "--collect", f"--unit={unit}", *options, "--", *command)
    except CommandError as e:
        raise HostError(f"{name}: did not start: {e}") from e


def _service_state(unit: str) -> str:
    return run("/usr/bin/systemctl", "show", "--property=ActiveState", "--value", unit, check=False).stdout.strip()


def _service_pid(unit: str) -> int | None:
    pid = run("/usr/bin/systemctl", "show", "--property=MainPID", "--value", unit, check=False).stdout.strip()
    return int(pid) if pid.isdigit() and pid != "0" else None


def _mounts_below(directory: pathlib.Path) -> list[str]:
    """Return the mount points in `directory`, innermost first."""
    points = [line.split()[1] for line in pathlib.Path("/proc/self/mounts").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(f"{directory}/")), key=len, reverse=True)


def _escape(path: str) -> str:
    """Return `path` as --bind= takes it, systemd-nspawn(1)."""
    return path.replace("\\", "\\\\").replace(":", "\\:")
