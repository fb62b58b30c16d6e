"""Which build of torch the cluster needs: a job asks a node with GPUs whether it has a CUDA driver.

A batch job whose exit status is the answer, and not srun: if slurmctld cannot resolve the name of srun's host, it
answers nobody for ten seconds, and the node takes no job for another minute (24.11.5).
"""

import contextlib
import dataclasses
import pathlib
import time

from ddp import base, remedies
from ddp.base import Log, Settings, TrainerError
from ddp.environment import driver
from ddp.problem import Step
from ddp.slurm import jobs
from ddp.workspace import folders

WAIT_S = 1800.0  # for a node to become free, and the answer
_PROGRAM = pathlib.Path(driver.__file__)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A build of torch."""

    build: str  # cpu or cuda
    driverless: bool  # a node with GPUs was asked, and it has no CUDA driver
    why: str


def choose(
    settings: Settings, partitions: tuple[jobs.Partition, ...], log: Log, *, reservation: str | None = None
) -> Choice:
    """Return the build of torch that the cluster's nodes can use. Raises TrainerError."""
    place = next(((p, node) for p in partitions if p.is_up for node in p.usable if node.gpus), None)
    if place is None:
        return Choice("cpu", False, "Slurm has no node with GPUs")
    partition, node = place
    options = ["--job-name=trainer-driver", f"--partition={partition.name}", "--nodes=1", "--ntasks=1"]
    options += ["--cpus-per-task=1", "--mem=256M", "--gpus-per-node=1", "--time=2", "--no-requeue", "--chdir=/"]
    options += ["--output=/dev/null", *([f"--reservation={reservation}"] if reservation else [])]
    head = "".join(f"#SBATCH {option}\n" for option in options)
    script = f"#!/bin/bash\n{head}exec {folders.PYTHON} -I - <<'PROGRAM'\n{_PROGRAM.read_text()}\nPROGRAM\n"
    log(f"asking a node with GPUs ({node.name} has {node.gpus}) for its CUDA driver")
    try:
        ended = _run(settings, script, log)
        if ended.exit_code == driver.MISSING:
            return Choice("cpu", True, f"{ended.nodes} has no CUDA driver")
        if ended.state != "COMPLETED":
            raise jobs.SlurmError(f"job {ended.job_id} ended as {ended.state} with status {ended.exit_code}")
    except jobs.SlurmError as e:
        remedy = Step("torch-build", "try again when a GPU node is free, or set torch-build to cpu or cuda")
        raise TrainerError(f"no GPU node reported its driver: {e}", remedy=remedy) from e
    return Choice("cuda", False, f"{ended.nodes} has a CUDA driver")


def _run(settings: Settings, script: str, log: Log) -> jobs.Job:
    """Run a job to its end, and return it. Raises SlurmError if it does not start or end in time."""
    number = jobs.submit(stdin=script)
    began = reported = time.monotonic()
    try:
        while True:
            known = jobs.job(number, user=settings.user)
            if known is None:
                raise jobs.SlurmError(f"Slurm does not know job {number}, which it accepted")
            if not known.is_active:
                return known
            if known.is_held and known.reason.startswith(remedies.HELD):
                what = f"slurmctld does not know the account {settings.user} (uid {settings.uid}), so it starts no job"
                add = f"on slurmctld's host: useradd --no-create-home --uid {settings.uid} {settings.user}"
                values = {"user": settings.user, "uid": str(settings.uid)}
                raise TrainerError(what, remedy=Step("add-account", add, values))
            now, state = time.monotonic(), f"job {number} is {known.state} ({known.reason})"
            if now - began > WAIT_S:
                raise jobs.SlurmError(f"{state} after {WAIT_S:.0f} s")
            if now - reported > base.REPORT_S:
                log(f"{state}: {now - began:.0f} s")
                reported = now
            time.sleep(0.5 if now - began < 60 else 5)
    except BaseException:
        with contextlib.suppress(jobs.SlurmError):  # the job's own limit ends it
            jobs.cancel(number)
        raise
