"""srun's command that starts a task on each node, in a container if the job has one."""

import contextlib
import os
import signal
import subprocess

from ddp.node import container, slurm_calls, spec

PYTHON = "/usr/bin/python3"
ABORTING_S = 60.0
# Starts the program on a node, once the shared filesystem is readable. In a container, with the
# image's interpreter.
_START = """\
n=0
until [ -r "$1" ]; do
  [ $n -gt 0 ] || echo "[ENV] $SLURMD_NODENAME: $1 does not respond (it cannot be read); waiting for it, 0 s"
  n=$((n + 1))
  if [ $n -gt 60 ]; then
    echo "[FATAL] $SLURMD_NODENAME: $1 cannot be read; is the shared filesystem mounted here?" >&2
    exit 78
  fi
  sleep 2
done
p=$0
[ -x "$p" ] || p=$(command -v python3 || command -v python) || {
  echo "[FATAL] $SLURMD_NODENAME: there is no python3 here; use an image with torch" >&2
  exit 78
}
exec "$p" -I -S -B "$@"
"""


def command(
    srun: str,
    job: spec.JobSpec,
    hosts: list[str],
    program: list[str],
    *,
    env: dict[str, str],
    mounts: tuple[str, ...] = (),
) -> list[str]:
    """Return the command that runs `program` on each host. Raises FatalError.

    `program` is a file, a part and its arguments.
    """
    argv = [
        srun,
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={env['SLURM_CPUS_PER_TASK']}",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        "--wait=300",
        "--label",
        "--chdir=/",
    ]
    if len(hosts) != int(env["SLURM_JOB_NUM_NODES"]):
        # --overlap: the step of a lost node still holds its resources
        argv += [f"--nodelist={','.join(hosts)}", "--overlap"]

    is_contained = job.container is not None and program[1] == "node"
    python = "" if is_contained else PYTHON
    start_program = ["/bin/sh", "-c", _START, python, *program]
    if not is_contained:
        return [*argv, *start_program]
    existing = [path for path in mounts if os.path.exists(path)]
    options, contained = container.launch(job, existing, start_program, env)
    return [*argv, *options, *contained]


def start(argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start srun, which forks a second process, in a process group for `kill`."""
    return subprocess.Popen(argv, env=env, cwd="/", start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill srun and its second process.

    The second one would have slurmctld signal the step on a lost node (_shepherd_spawn()).
    slurmctld repeats that each minute until the node is back, and the job's next start has a step
    of the same number.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, signal.SIGKILL)


def end(process: subprocess.Popen[bytes], job_id: str) -> None:
    """Kill a job's newest step unless it ends by itself within ABORTING_S."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ABORTING_S)
        return
    step = _newest_step(job_id)
    slurm_calls.call("scancel", "--signal=KILL", "--quiet", f"{job_id}.{step}")
    kill(process)


def _newest_step(job_id: str) -> int:
    newest = 0
    for step in slurm_calls.call("squeue", "-h", "-s", "-j", job_id, "-o", "%i").stdout.split():
        number = step.rpartition(".")[2]
        if number.isdigit():
            newest = max(newest, int(number))
    return newest
