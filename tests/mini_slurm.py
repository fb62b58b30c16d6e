"""A Slurm of two nodes on this host, from the distribution's package: up in seconds and without munge."""

import collections.abc
import contextlib
import getpass
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import time

READY_S = 180  # where it has the machine to itself, two
END_S = 60  # for jobs that were killed
CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=m0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=m1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def absent() -> str | None:
    """Return why there can be no such Slurm here, or None."""
    missing = [name for name in ("slurmctld", "slurmd", "srun", "sinfo") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client)"
    return None if os.geteuid() == 0 else "slurmd needs root to start tasks"


@contextlib.contextmanager
def running(folder: pathlib.Path) -> collections.abc.Generator[dict[str, str], None, None]:
    """Yield the environment in which srun finds the cluster. Raises RuntimeError when it does not start."""
    (folder / "state").mkdir(parents=True)
    for node in ("m0", "m1"):
        (folder / node).mkdir()
    host = socket.gethostname().split(".")[0]
    text = CONF.format(host=host, ports=_free_ports(3), user=getpass.getuser(), folder=folder)
    (folder / "slurm.conf").write_text(text)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    env = {**kept, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for argv in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "m0"], ["slurmd", "-D", "-N", "m1"]):
            daemons.append(subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        _await_idle(env, folder)
        try:
            yield env
        finally:
            _end_jobs(env)
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _await_idle(env: dict[str, str], folder: pathlib.Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False, timeout=60
        )
        if done.stdout.split() == ["idle"]:
            return
        time.sleep(0.2)
    log = folder / "slurmctld.log"
    raise RuntimeError(f"Slurm did not start: {log.read_text()[-800:] if log.exists() else 'no log'}")


def _end_jobs(env: dict[str, str]) -> None:
    """Kill all jobs and wait until nothing of them is left: a slurmstepd and its job outlive slurmd."""

    def output(*argv: str) -> str:
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60).stdout

    mine = f"--user={getpass.getuser()}"
    output("scancel", "--full", "--signal=KILL", mine)  # of those that run
    output("scancel", mine)
    deadline = time.monotonic() + END_S
    while output("squeue", "-h", "-o", "%i %T"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"jobs of the benchmark's Slurm did not end within {END_S} s")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Pick ports without a listener, outside the range from which the kernel picks."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(15000, 32000)  # below net.ipv4.ip_local_port_range
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)
