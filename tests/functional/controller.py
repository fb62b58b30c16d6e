"""A slurmctld whose nodes are asleep in a cloud, so Slurm judges jobs for them and starts none.

It needs Slurm's packages, and no root.
"""

import collections.abc
import contextlib
import getpass
import os
import pathlib
import shutil
import socket
import subprocess
import time

READY_S = 30.0
CONF = """\
ClusterName=words
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/pid
SlurmctldLogFile={folder}/log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
PrivateData=cloud
SuspendTime=60
SuspendProgram=/bin/true
ResumeProgram=/bin/true
NodeName=n0 State=CLOUD CPUs=16 RealMemory=64000 Features=ib,a100,rack1,a100-80gb Gres=gpu:a100:4,gpu:a100_3g.20gb:8
NodeName=n1 State=CLOUD CPUs=16 RealMemory=64000 Features=opa,a100,rack1,old Gres=gpu:tesla_t4:2
NodeName=n2 State=CLOUD CPUs=16 RealMemory=64000 Features=ib,rack2,c5.xlarge Gres=gpu:a100:4
NodeName=n3 State=CLOUD CPUs=16 RealMemory=64000 Features=ib,rack2,h100
PartitionName=gpu Nodes=n[0-2] Default=YES State=UP
PartitionName=gpu_preempt Nodes=n[2-3] MaxNodes=1 MaxTime=60 State=UP
"""


def lacks() -> str | None:
    """Name the programs that this machine lacks, or return None."""
    missing = [name for name in ("slurmctld", "sbatch", "scontrol") if _find(name) is None]
    return (
        f"{', '.join(missing)} not installed; run scripts/setup.sh test demo" if missing else None
    )


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


@contextlib.contextmanager
def running(folder: pathlib.Path) -> collections.abc.Generator[pathlib.Path]:
    """Yield the slurm.conf of a controller that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(port=port, user=getpass.getuser(), folder=folder))
    (folder / "state").mkdir()
    argv = [_find("slurmctld") or "slurmctld", "-D", "-f", str(conf)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            _await(conf, folder / "log")
            yield conf
        finally:
            process.kill()


def _await(conf: pathlib.Path, log: pathlib.Path) -> None:
    deadline = time.monotonic() + READY_S
    env = {**os.environ, "SLURM_CONF": str(conf)}
    while True:
        argv = ["scontrol", "ping"]
        done = subprocess.run(
            argv, check=False, capture_output=True, text=True, env=env, timeout=60
        )
        if " UP" in done.stdout:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(log.read_text() if log.exists() else done.stderr)
        time.sleep(0.2)
