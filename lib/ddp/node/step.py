"""The command that starts a task on each node: srun, then the program, in a container if the job has one."""

import collections.abc
import os
import shutil
import subprocess

from ddp.node import ending, slurm, spec

PYTHON = "/usr/bin/python3"
TOGETHER_S = 3.0  # for the other ranks to end, and other nodes to stop responding
# Starts the program on a node, once the shared filesystem is readable. In a container, with the image's interpreter.
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
    mounts: collections.abc.Iterable[str] = (),
) -> list[str]:
    """Return the command that runs `program`, a file and its arguments, on each host. Raises FatalError."""
    argv = [srun, f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1"]
    argv += [f"--cpus-per-task={env['SLURM_CPUS_PER_TASK']}", "--cpu-bind=none"]
    argv += ["--kill-on-bad-exit=1", "--wait=300", "--label", "--chdir=/"]
    if len(hosts) != int(env["SLURM_JOB_NUM_NODES"]):  # --overlap: the step of a lost node still holds its resources
        argv += [f"--nodelist={','.join(hosts)}", "--overlap"]
    launch = ["/bin/sh", "-c", _START, "" if job.container else PYTHON, *program]
    return [*argv, *(_contained(job, job.container, mounts, launch) if job.container else launch)]


def _contained(
    job: spec.JobSpec, container: spec.Container, mounts: collections.abc.Iterable[str], launch: list[str]
) -> list[str]:
    """Return srun's options for pyxis with the command, or the command within apptainer. Raises FatalError."""
    found = [job.workspace, *(path for path in mounts if os.path.exists(path))]
    bound = ",".join(f"{path}:{path}" for path in found)
    if "--container-image" in slurm.call("srun", "--help").stdout:  # pyxis
        options = [f"--container-image={container.image}", f"--container-mounts={bound}"]
        return [*options, f"--container-workdir={job.workdir}", f"--container-env={container.variables}", *launch]
    tool = shutil.which("apptainer") or shutil.which("singularity")
    if tool is None:
        why = "container-image needs pyxis in Slurm, or apptainer on the nodes, and neither is installed"
        raise ending.FatalError(f"{why}; omit container-image, or install one of them")
    image = container.image
    if not image.startswith("/") and "://" not in image:
        image = "docker://" + image.replace("#", "/")
    gpus = ["--nv"] if job.gpus_per_node else []
    return [tool, "exec", *gpus, "--bind", bound, "--pwd", job.workdir, image, *launch]


def end(process: subprocess.Popen[bytes], step: str) -> None:
    """End a step of which a node does not respond: srun and scancel would wait for that node."""
    subprocess.Popen(["scancel", "--signal=KILL", "--quiet", step], stdin=subprocess.DEVNULL)
    slurm.pause(TOGETHER_S)
    process.kill()
