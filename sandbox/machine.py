"""Machines of systemd-nspawn. They outlive the command that starts them; later ones find them.

Where systemd runs this computer, a machine is a transient service, like systemd-nspawn@.service.
Elsewhere (a container of a CI system, a minimal virtual machine) a shell in the background does
what systemd would: it starts systemd-nspawn again when the machine rebooted, in a cgroup of the
machine's own.
"""

import abc
import collections.abc
import contextlib
import os
import pathlib
import signal
import tempfile
import time

from sandbox.store import SandboxError
from slurm_ddp import files, mounts, systemd
from slurm_ddp.commands import CommandError, last_line, run

NSPAWN = "/usr/bin/systemd-nspawn"

_REBOOT_STATUS = (
    133  # systemd-nspawn's exit status when the machine rebooted, systemd-nspawn(1) "Exit status"
)
_NSPAWN_ENV = {"SYSTEMD_NSPAWN_TMPFS_TMP": "0"}  # /tmp on disk: pip unpacks gigabytes there
_KILL_S = 30.0
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_CANNOT_END = (
    "cannot be ended: its processes wait for a filesystem that hangs; restart this computer"
)

_SHELL = pathlib.Path(__file__).resolve().parent / "shell"
_BOOTED = [str(_SHELL / "boot.sh")]

# How a command gets into a machine. It joins the cgroups of the machine's first process; in those
# that systemd tracks (cgroup v2 and v1's name=systemd) only the command itself may join, since
# systemd stumbles over processes from outside its process namespace, such as the shell that waits.
# That shell replaces nsenter, which stops when its child is stopped, as a shutdown does with all
# processes, and then never reaps it.
_SYSTEMD = ("", "name=systemd")
_PREPARE = """
for group in $1; do echo 0 > "$group/cgroup.procs"; done 2> /dev/null
exec 3> "$2" 4> "$3"
shift 3
exec "$@"
"""
_WAIT = '"$@"; exit "$?"'
_ARRIVE = '{ echo 0 >&3; echo 0 >&4; } 2> /dev/null; exec 3>&- 4>&-; exec "$@"'


def machine(name: str, directory: pathlib.Path) -> "Machine":
    """Return the machine `name`, whose console and process are recorded in `directory`.

    The name is the machine's on this computer: no other may have it.
    """
    if pathlib.Path("/run/systemd/system").is_dir():
        return _Service(name, directory)
    return _Supervised(name, directory)


class Machine(abc.ABC):
    """One machine."""

    def __init__(self, name: str, directory: pathlib.Path) -> None:
        self.name = name
        self.directory = directory
        self.console = directory / "console.log"

    @abc.abstractmethod
    def launch(self, options: collections.abc.Sequence[str]) -> None:
        """Run systemd-nspawn with `options`; it boots in the background. Raises `CommandError`."""

    @abc.abstractmethod
    def is_kept_running(self) -> bool:
        """Check whether the machine is booting, up or rebooting."""

    @abc.abstractmethod
    def nspawn(self) -> int | None:
        """Return the pid of its systemd-nspawn; None if it does not run."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill all processes of the machine, and remove its cgroups. Raises `SandboxError`."""

    def leader(self, root: pathlib.Path) -> int | None:
        """Return the pid of its first process, once that has `root` as its root."""
        nspawn = self.nspawn()
        for pid in _children(nspawn) if nspawn is not None else []:
            # Before systemd-nspawn changes the root, a command sent there would meet this
            # computer's own files.
            with contextlib.suppress(OSError):
                same = pathlib.Path(f"/proc/{pid}/root").stat().st_ino == root.stat().st_ino
                if same and _stat(pid).get("name") == "systemd":
                    return pid
        return None

    def last_words(self) -> str:
        """Return the last line on its console."""
        return last_line(self.console.read_text(errors="replace")) if self.console.exists() else ""

    def _connections(self) -> set[str]:
        """Return the numbers of FUSE connections mounted in the machine but not on this computer.

        A client that uses its own mount waits for itself when it is killed, and no signal ends it:
        the kernel must be configured to answer for it.
        """
        nspawn = self.nspawn()
        inside = _children(nspawn) if nspawn is not None else []
        return {number for pid in inside for number in _fuse(str(pid))} - _fuse("self")


class _Service(Machine):
    """A transient service of this computer's systemd."""

    def __init__(self, name: str, directory: pathlib.Path) -> None:
        super().__init__(name, directory)
        self._unit = f"slurm-ddp-{name}.service"

    def launch(self, options: collections.abc.Sequence[str]) -> None:
        properties = [
            "Type=exec",
            "Delegate=yes",
            "KillMode=mixed",
            "TasksMax=infinity",
            "Slice=machine.slice",
        ]
        properties += [
            f"RestartForceExitStatus={_REBOOT_STATUS}",
            f"SuccessExitStatus={_REBOOT_STATUS}",
        ]
        properties += ["RestartSec=0", "StartLimitIntervalSec=0"]
        properties += [
            f"StandardOutput=truncate:{self.console}",
            f"StandardError=append:{self.console}",
        ]
        arguments = [f"--property={value}" for value in properties]
        arguments += [f"--setenv={key}={value}" for key, value in _NSPAWN_ENV.items()]
        unit = ["--quiet", "--collect", f"--unit={self._unit}", *arguments]
        run("/usr/bin/systemd-run", *unit, "--", *_BOOTED, NSPAWN, *options)

    def is_kept_running(self) -> bool:
        return systemd.show(self._unit, "ActiveState") not in ("inactive", "failed")

    def nspawn(self) -> int | None:
        pid = systemd.show(self._unit, "MainPID")
        return int(pid) if pid.isdigit() and pid != "0" else None

    def kill(self) -> None:
        connections = self._connections()
        run("/usr/bin/systemctl", "kill", "--signal=SIGKILL", self._unit, check=False)
        _abort(connections)
        try:
            run("/usr/bin/systemctl", "stop", self._unit, check=False, timeout=_KILL_S)
        except CommandError as e:
            raise SandboxError(f"{self.name} {_CANNOT_END} ({e})") from e
        systemd.reset_failed(self._unit)


class _Supervised(Machine):
    """systemd-nspawn kept running by a shell in the background."""

    def __init__(self, name: str, directory: pathlib.Path) -> None:
        super().__init__(name, directory)
        self._record, self._cgroup = directory / "process", f"slurm-ddp-{name}"

    def launch(self, options: collections.abc.Sequence[str]) -> None:
        files.ensure_absent(self._record)
        groups = " ".join(map(str, _make_cgroups(self._cgroup)))
        # The outer shell exits at once, so that the supervisor is orphaned and outlives this
        # command.
        detached = [
            "/bin/sh",
            "-c",
            '"$@" < /dev/null > "$0" 2>&1 &',
            str(self.console),
            "/usr/bin/setsid",
        ]
        supervised = [
            str(_SHELL / "supervise.sh"),
            str(self._record),
            groups,
            *_BOOTED,
            NSPAWN,
            *options,
        ]
        run(*detached, *supervised, env=_NSPAWN_ENV, timeout=30)
        if not wait_until(self._record.exists, 10):
            raise CommandError(self.last_words())

    def is_kept_running(self) -> bool:
        return self._supervisor() is not None

    def nspawn(self) -> int | None:
        supervisor = self._supervisor()
        children = _children(supervisor) if supervisor is not None else []
        return next((pid for pid in children if _stat(pid).get("name") == "systemd-nspawn"), None)

    def kill(self) -> None:
        connections = self._connections()
        supervisor, nspawn = self._supervisor(), self.nspawn()
        inside = _children(nspawn) if nspawn is not None else []
        pids = [pid for pid in (supervisor, nspawn, *inside) if pid is not None]
        for pid in pids:  # the machine's first process takes all its others with it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _abort(connections)
        if not wait_until(lambda: not any(_is_alive(pid) for pid in pids), _KILL_S):
            raise SandboxError(f"{self.name} {_CANNOT_END}")
        _remove_cgroups(self._cgroup)
        files.ensure_absent(self._record)

    def _supervisor(self) -> int | None:
        """Return the supervisor's pid; None if it ended, even if the number was reused."""
        try:
            pid, start, boot = self._record.read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        same = boot == files.read(_BOOT_ID) and _stat(int(pid)).get("start") == start
        return int(pid) if same and _is_alive(int(pid)) else None


def enter(leader: int) -> list[str]:
    """Return the prefix that runs a command in the machine with the first process `leader`."""
    groups = _cgroups_of(leader)
    tracked: list[str] = []
    for name in _SYSTEMD:
        group = groups.pop(name, None)
        tracked.append("/dev/null" if group is None else str(group / "cgroup.procs"))
    namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd"]
    namespaces += ["--time"] if pathlib.Path("/proc/self/ns/time").exists() else []
    return [
        *("/bin/sh", "-c", _PREPARE, "sandbox-exec", " ".join(map(str, groups.values())), *tracked),
        *("/usr/bin/nsenter", f"--target={leader}", *namespaces, "--no-fork", "--"),
        *("/bin/sh", "-c", _WAIT, "sandbox-exec", "/bin/sh", "-c", _ARRIVE, "sandbox-exec"),
    ]


def wait_until(condition: collections.abc.Callable[[], bool], timeout: float) -> bool:
    """Wait until `condition` holds, at most `timeout` seconds; return whether it does."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _stat(pid: int) -> dict[str, str]:
    """Return name, state, parent and start time of a process, proc(5); {} if it ended."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return {}
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return {"name": name, "state": fields[0], "parent": fields[1], "start": fields[19]}


def _is_alive(pid: int) -> bool:
    return _stat(pid).get("state", "Z") not in "ZX"


def _children(pid: int) -> list[int]:
    lists = list(
        pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    )  # of each thread; not every kernel has it
    if lists:
        with contextlib.suppress(OSError):
            return [int(child) for path in lists for child in path.read_text().split()]
    pids = (int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*"))
    return [child for child in pids if _stat(child).get("parent") == str(pid)]


def _fuse(pid: str) -> set[str]:
    """Return the numbers of the FUSE connections that a process sees mounted."""
    try:
        table = mounts.table(
            pathlib.Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape")
        )
    except OSError:  # it ended
        return set()
    return {
        mount.device.partition(":")[2]
        for mount in table
        if mount.fstype.partition(".")[0] in ("fuse", "fuseblk")
    }


def _abort(connections: collections.abc.Collection[str]) -> None:
    """Abort FUSE connections (Documentation/filesystems/fuse.rst)."""
    if not connections:
        return
    with tempfile.TemporaryDirectory(
        prefix="sandbox-fuse-"
    ) as place:  # not every computer has it mounted
        if run("/bin/mount", "-t", "fusectl", "fusectl", place, check=False).returncode != 0:
            return
        try:
            for number in connections:
                with contextlib.suppress(OSError):  # it ended
                    pathlib.Path(place, number, "abort").write_text("1")
        finally:
            run("/bin/umount", "-l", place, check=False)


def _cgroup_roots() -> dict[str, pathlib.Path]:
    """Return the mount points of cgroup hierarchies by name in /proc/<pid>/cgroup, cgroups(7).

    The name is `""` for version 2, and `cpu,cpuacct` or `name=systemd` for version 1.
    """
    known = [
        line.split(":")[1] for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    ]
    roots: dict[str, pathlib.Path] = {}
    for line in pathlib.Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2":
            roots.setdefault("", pathlib.Path(point))
        elif kind == "cgroup":
            words = set(options.split(","))
            for name in known:
                if name and set(name.split(",")) <= words:
                    roots.setdefault(name, pathlib.Path(point))
    return roots


def _cgroups_of(pid: int) -> dict[str, pathlib.Path]:
    """Return the cgroups of a process as directories, by hierarchy."""
    roots = _cgroup_roots()
    try:
        lines = [
            line.split(":", 2)
            for line in pathlib.Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        ]
    except OSError:  # it ended just now; what follows will say so
        return {}
    return {name: roots[name] / path.lstrip("/") for _, name, path in lines if name in roots}


def _make_cgroups(name: str) -> list[pathlib.Path]:
    """Make a cgroup in every hierarchy; two systemds in one cgroup would end each other's units."""
    made: list[pathlib.Path] = []
    for root in _cgroup_roots().values():
        group = root / name
        try:
            group.mkdir(exist_ok=True)
            if (
                group / "cpuset.cpu_exclusive"
            ).exists():  # v1: a new group without CPUs accepts no process
                for setting in ("cpuset.cpus", "cpuset.mems"):
                    (group / setting).write_text((root / setting).read_text())
        except OSError:
            continue  # we cannot change this hierarchy: the machine stays in this command's group
        made.append(group)
    return made


def _remove_cgroups(name: str) -> None:
    for root in _cgroup_roots().values():
        for directory, _, _ in os.walk(root / name, topdown=False):
            for _ in range(100):  # a process that ended a moment ago still counts
                with contextlib.suppress(OSError):
                    pathlib.Path(directory).rmdir()
                    break
                time.sleep(0.02)
