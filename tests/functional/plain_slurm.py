"""A Slurm without charms, with two nodes and one account: `ddp` on other people's clusters.

The login host and the nodes are namespaces of this machine, which needs Slurm's packages and root,
and is left unchanged: hosts with unresolvable names, a private network, a /var/tmp each, and a
shared /home.
"""

import ast
import collections.abc
import contextlib
import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

USER, UID = "ada", 7001
HOME = pathlib.Path("/home") / USER
LOGIN = "198.18.77.1"  # RFC 2544's, which is not routed
NODES = {"n1": "198.18.77.11", "n2": "198.18.77.12"}
BIN = "/mnt/slurm/bin"  # not /usr/bin: many administrators build Slurm themselves
COMMANDS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
READY_S = 120.0
CONF = f"""\
ClusterName=plain
SlurmctldHost=login({LOGIN})
AuthType=auth/munge
AuthInfo=socket=/mnt/munge/socket
CryptoType=crypto/munge
SlurmUser=root
StateSaveLocation=/mnt/state
SlurmdSpoolDir=/mnt/%n/spool
SlurmctldPidFile=/mnt/slurmctld.pid
SlurmdPidFile=/mnt/%n/slurmd.pid
SlurmctldLogFile=/mnt/slurmctld.log
SlurmdLogFile=/mnt/%n/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
MpiDefault=none
ReturnToService=2
JobSubmitPlugins=lua
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=charged Nodes=ALL Hidden=YES MaxNodes=1 MaxMemPerNode=1500 OverSubscribe=EXCLUSIVE State=UP
PartitionName=members Nodes=ALL AllowAccounts=physics State=UP
"""
# A site's plugin: jobs of one partition need an account
PLUGIN = """\
function slurm_job_submit(job, parts, uid)
  if job.partition ~= "charged" or job.account ~= nil then return slurm.SUCCESS end
  slurm.log_user("Please specify an account")
  return slurm.ERROR
end
function slurm_job_modify(job, record, parts, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""
# Shared files of the cluster are below /mnt, on all hosts; a host's own files are in a folder of
# its name
_MOUNTS = """\
hostname {host}
mount --bind {folder} /mnt
mount --bind /mnt/home /home
mount --bind /mnt/etc/slurm /etc/slurm
mount --bind /mnt/etc/passwd /etc/passwd
mount --bind /mnt/etc/group /etc/group
mount --bind /mnt/{host}/tmp /var/tmp
for name in {commands}; do mount --bind /dev/null /usr/bin/$name; done
export PATH={bin}:$PATH
"""
_LOGIN = """\
munged --force --socket=/mnt/munge/socket --key-file=/mnt/munge/key --pid-file=/mnt/munge/pid \
  --log-file=/mnt/munge/log --seed-file=/mnt/munge/seed --num-threads=2 --foreground & read -r go
exec slurmctld -D
"""
_NODE = """\
read -r go
ip link set lo up
ip addr add {address}/24 dev eth0
ip link set eth0 up
slurmd -D -N {host} &
wait $!
"""
_FOREIGN = (
    "SLURM_",
    "SBATCH_",
    "DDP_",
    "XDG_",
    "PYTHON",
    "VIRTUAL_ENV",
    "TOX_",
    "PYTEST_",
    "PIPX_",
)


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclasses.dataclass(frozen=True)
class PlainSlurm:
    """The cluster, at its login host."""

    folder: pathlib.Path  # mounted as /mnt in the hosts
    login: int  # a process there
    pip: dict[str, str] = dataclasses.field(
        default_factory=dict[str, str]
    )  # variables that say where packages are

    @property
    def home(self) -> pathlib.Path:
        """The account's home, as this machine sees it."""
        return self.folder / "home" / USER

    def as_root(self, *argv: str) -> str:
        """Run a command on the login host; return its standard output."""
        done = subprocess.run(
            [*_enter(self.login), *argv], check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def tries(self, script: str, *, timeout: float = 600) -> Done:
        """Run a shell script as the account, in its home, with its login's and pip's variables."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        path = f"{HOME}/.local/bin:{BIN}:/usr/local/bin:/usr/bin:/bin"
        env = kept | self.pip | {"HOME": str(HOME), "USER": USER, "LOGNAME": USER, "PATH": path}
        as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        argv = [*_enter(self.login), *as_user, "bash", "-c", f"cd && {script}"]
        done = subprocess.run(
            argv,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=env,
            input="",
        )
        # A run's lines begin with their task: torch may write such a line if its store ends before
        # an agent.
        assert not re.search(r"^Traceback", done.stderr, re.MULTILINE), done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def does(self, script: str, *, timeout: float = 600) -> str:
        """Run a shell script that succeeds; return its standard output."""
        done = self.tries(script, timeout=timeout)
        assert done.code == 0, (
            f"{script}: {done.code}\n{done.out[-3000:]}\n{done.err[-3000:]}\n{self._logs()}"
        )
        return done.out

    def writes(self, name: str, text: str) -> None:
        """Write a file of the account's."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.as_root("chown", "-R", f"{USER}:", f"{HOME}/{name.partition('/')[0]}")

    def _logs(self) -> str:
        paths = [*self.folder.glob("*.log"), *self.folder.glob("n*/*.log")]
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in paths
        )


def lacks() -> str | None:
    """Name the programs that this machine lacks, or return None."""
    programs = ("munged", "slurmctld", "slurmd", *COMMANDS, "ip", "unshare", "nsenter", "setpriv")
    missing = [name for name in programs if shutil.which(name) is None]
    return (
        f"{', '.join(missing)} not installed; run scripts/setup.sh test demo" if missing else None
    )


@contextlib.contextmanager
def running() -> collections.abc.Generator[PlainSlurm]:
    """Yield the cluster, both its nodes idle. Raises RuntimeError when it does not start."""
    lines = [
        f"NodeName={name} NodeAddr={address} CPUs=1 RealMemory=2500\n"
        for name, address in NODES.items()
    ]
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-ddp-plain-", dir="/var/tmp"))
        # An environment has 20,000 files: do not wait for the disk
        stack.callback(subprocess.run, ["sh", "-c", 'rm -rf "$1" &', "sh", folder], check=True)
        _fill(folder, CONF + "".join(lines))
        switch = _start(stack, ["unshare", "--net", "sleep", "infinity"])
        _in_network(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _in_network(switch, "ip", "link", "set", "bridge", "up")
        login = _start(stack, _host(folder, "login", _LOGIN))
        _connect(switch, os.getpid(), "login", f"plain{login.pid}")
        _run("ip", "addr", "add", f"{LOGIN}/24", "dev", f"plain{login.pid}")
        _run("ip", "link", "set", f"plain{login.pid}", "up")
        hosts = [login]
        for name, address in NODES.items():
            script = _NODE.format(host=name, address=address)
            host = _start(stack, _host(folder, name, script, is_node=True))
            _connect(switch, host.pid, name, "eth0")
            hosts.append(host)
        for process in hosts:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        found = PlainSlurm(folder, login.pid, _pip_variables())
        _await_idle(found)
        yield found


def _pip_variables() -> dict[str, str]:
    """Return this machine's package indexes as pip's variables."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    found: dict[str, str] = {}
    for line in listing.splitlines():
        name, _, literal = line.partition("=")
        key = name.rpartition(".")[2]
        if key in ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "cert"):
            found[f"PIP_{key.upper().replace('-', '_')}"] = str(ast.literal_eval(literal)).replace(
                "\n", " "
            )
    return found


def _fill(folder: pathlib.Path, conf: str) -> None:
    folder.chmod(0o755)
    for name in (
        "home",
        "etc/slurm",
        "state",
        "munge",
        "slurm/bin",
        *(f"{host}/spool" for host in NODES),
    ):
        (folder / name).mkdir(parents=True)
    for host in ("login", *NODES):
        (folder / host / "tmp").mkdir(parents=True)
        (folder / host / "tmp").chmod(0o1777)
    (folder / "home" / USER).mkdir(mode=0o750)
    os.chown(folder / "home" / USER, UID, UID)
    (folder / "etc/slurm/slurm.conf").write_text(conf)
    (folder / "etc/slurm/job_submit.lua").write_text(PLUGIN)
    passwd, group = pathlib.Path("/etc/passwd").read_text(), pathlib.Path("/etc/group").read_text()
    (folder / "etc/passwd").write_text(f"{passwd}{USER}:x:{UID}:{UID}::{HOME}:/bin/bash\n")
    (folder / "etc/group").write_text(f"{group}{USER}:x:{UID}:\n")
    for name in COMMANDS:
        shutil.copy2(shutil.which(name) or name, folder / "slurm/bin" / name)
    (folder / "munge/key").write_bytes(os.urandom(128))
    (folder / "munge/key").chmod(0o400)


def _host(folder: pathlib.Path, name: str, script: str, *, is_node: bool = False) -> list[str]:
    kinds = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"] if is_node else []
    mounts = _MOUNTS.format(
        host=name, folder=shlex.quote(str(folder)), commands=" ".join(COMMANDS), bin=BIN
    )
    return [
        "unshare",
        "--mount",
        "--uts",
        "--propagation=private",
        *kinds,
        "sh",
        "-ec",
        mounts + script,
    ]


def _start(stack: contextlib.ExitStack, argv: list[str]) -> "subprocess.Popen[bytes]":
    """Start a host's first process in a new process group, which ends with the cluster."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.communicate()

    stack.callback(end)
    deadline = time.monotonic() + READY_S
    while "--net" in argv and _network(process.pid) in (_network(os.getpid()), ""):
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError(f"no network of its own for: {shlex.join(argv)}")
        time.sleep(0.02)
    return process


def _connect(switch: "subprocess.Popen[bytes]", pid: int, name: str, interface: str) -> None:
    """Give a process's network an interface, and connect it with the others."""
    peer = ["peer", "name", interface, "netns", str(pid)]
    _in_network(switch, "ip", "link", "add", name, "type", "veth", *peer)
    _in_network(switch, "ip", "link", "set", name, "master", "bridge", "up")


def _network(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(pathlib.Path(f"/proc/{pid}/ns/net").readlink())
    return ""


def _in_network(host: "subprocess.Popen[bytes]", *argv: str) -> None:
    _run("nsenter", f"--net=/proc/{host.pid}/ns/net", *argv)


def _enter(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--mount", "--uts"]


def _run(*argv: str) -> None:
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(argv)}: {done.stderr.strip()}")


def _await_idle(cluster: PlainSlurm) -> None:
    deadline = time.monotonic() + READY_S
    output = ""
    while time.monotonic() < deadline:
        argv = [*_enter(cluster.login), f"{BIN}/sinfo", "-h", "-N", "-p", "all", "-o", "%N %T"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        if sorted(done.stdout.splitlines()) == sorted(f"{name} idle" for name in NODES):
            return
        output = (done.stdout + done.stderr).strip()
        time.sleep(0.2)
    logs = [
        path.read_text()[-800:]
        for path in (*cluster.folder.glob("*.log"), *cluster.folder.glob("n?/*.log"))
    ]
    raise RuntimeError(f"Slurm did not start: {output}; {logs}")
