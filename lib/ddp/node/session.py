"""A user's session on a node: the jobs' environment, and the folder to begin in."""

import os
import typing

from ddp.node import caches, exit_codes, interpreter, network, spec


class Session(typing.NamedTuple):
    """The variables of a session, and its Python."""

    env: dict[str, str]
    python: interpreter.Interpreter
    folder: str


def prepare(job: spec.JobSpec, host: str, control: str = "") -> Session:
    """Unpack the job's environment, and set the variables of its ranks. Raises FatalError."""
    env = dict(os.environ)
    env.update(job.variables)
    env["PYTHONUNBUFFERED"] = "1"
    if not job.gpus_per_node:
        env["CUDA_VISIBLE_DEVICES"] = ""
    python = interpreter.find(job, host, control, env)

    num_nodes = int(env.get("SLURM_JOB_NUM_NODES", "1"))
    network.use(network.choose(job, num_nodes), job, env, num_nodes)
    cpus = int(env.get("SLURM_CPUS_PER_TASK", "1"))
    env.setdefault("OMP_NUM_THREADS", str(max(1, cpus // job.ranks_per_node)))
    return Session(env, python, _folder(job, env))


def _folder(job: spec.JobSpec, env: dict[str, str]) -> str:
    """Return the caller's working folder, or home, or else the user's folder in the workspace.

    The first two count only if the login host has them, too: files on this node's own disk would be
    lost there.
    """
    own = os.path.dirname(os.path.dirname(job.job_dir))
    for folder in (job.workdir, env.get("HOME", "")):
        is_of_workspace = folder == job.workspace or folder.startswith(f"{job.workspace}/")
        is_shared = is_of_workspace or not caches.is_local(folder)
        if folder and is_shared and os.path.isdir(folder):
            return folder
    if os.path.isdir(own):
        return own
    hint = "is the shared filesystem mounted here?"
    raise exit_codes.FatalError(f"{own} does not exist; {hint}")
