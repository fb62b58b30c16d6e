"""submit --local: the ranks of a program on this machine, without Slurm, for debugging."""

import os
import pathlib
import shlex
import socket
import tempfile

from ddp.environment import store
from ddp.host import foreground
from ddp.node import exit_codes, rank_command, spec, unpacking
from ddp.options import models
from ddp.problem import Command, ParameterError, Problem
from ddp.results.progress import Log, with_progress
from ddp.settings import Settings
from ddp.submit import own_python, resources, scripts, tokens, workloads
from ddp.workspace.folders import Manifest

_ATTEMPT = "local.r0"
# Only rank 0 has the terminal: pdb in another rank would take the input for it
_RANK = """\
if [ "$RANK" != 0 ]; then
  exec </dev/null
  PYTHONBREAKPOINT=0
  export PYTHONBREAKPOINT
fi
exec "$@"
"""


def run(settings: Settings, params: models.SubmitDdp, log: Log) -> None:
    """Run a program's ranks here until they end. Raises Problem unless they succeed."""
    if params.workload in ("gpt", "smoke"):
        raise ParameterError("local", f"{params.workload} runs in jobs; name a program of yours")
    if params.container_image:
        raise ParameterError("local", "an image runs in jobs; omit container-image")
    params = params.model_copy(update={"snapshot": True})
    workload = workloads.of(settings, params)
    assert isinstance(workload, workloads.UserProgram)
    workload.check_place(takes_any_script=True)  # nothing is sent to other machines

    num_ranks = params.ranks or params.ranks_per_node or _num_gpus() or 1
    share = resources.Request(
        "local", 1, _num_gpus(), os.cpu_count() or 1, 0, None, 0, ranks=num_ranks
    )
    job = scripts.TrainingJob(settings, share, params, "local", workload.program())
    job = job.specification(store.NOT_INSTALLED)
    env = {**os.environ, **dict(job.variables), **tokens.read_variables(settings.workspace, params)}
    python, locks = _python(settings, params, log)
    env["PATH"] = f"{pathlib.Path(python).parent}:{env.get('PATH', os.defpath)}"
    if not locks:  # else the environment of jobs, which has the payload
        parts = (env.get("PYTHONPATH"), str(settings.payload))
        env["PYTHONPATH"] = ":".join(filter(None, parts))

    with tempfile.TemporaryDirectory(prefix="ddp-local-") as folder:
        pathlib.Path(folder, "control").mkdir()
        env |= _variables(folder, num_ranks, env)
        words = _command(job, python, env)
        log(f"{num_ranks} ranks on this machine: {shlex.join(words)}")
        agent = _agent(python, num_ranks)
        code = foreground.run([*agent, *words], env, folder=job.workdir)
    if code:
        raise Problem(f"the program ended with exit status {code}")


def _num_gpus() -> int:
    """Return the number of GPUs that a program sees here."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([one for one in chosen.split(",") if one])
    return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def _python(settings: Settings, params: models.SubmitDdp, log: Log) -> tuple[str, tuple[int, ...]]:
    """Return the Python of the ranks, and the open locks of an environment of jobs.

    Raises Problem.
    """
    if not params.environment and not params.requirements:
        found = own_python.here(settings.workspace, params)
        if found:
            return found, ()
    manifest = _environment(settings, params, log)
    unpacked = scripts.environment_of(settings, manifest, settings.workspace.host_cache)
    try:
        return with_progress(
            log, "unpacking the jobs' environment", lambda: unpacking.use(unpacked, "this host")
        )
    except exit_codes.FatalError as e:
        raise Problem(str(e)) from e


def _environment(settings: Settings, params: models.SubmitDdp, log: Log) -> Manifest:
    """Return the environment that the options ask for, or the cluster's. Raises Problem."""
    environments = store.Store(settings)
    contents = settings.workspace.look()
    if params.environment:
        return environments.named(contents, params.environment)
    installed = environments.installed(contents)
    if installed is None:
        text = "no Python with torch on this machine; activate an environment, or give --python"
        raise Problem(f"{text}; for the one of jobs", remedy=Command("env install"))
    if not params.requirements:
        return installed
    path = pathlib.Path(params.requirements)
    return environments.layer(environments.request(path, installed.build), log)


def _variables(folder: str, num_ranks: int, env: dict[str, str]) -> dict[str, str]:
    """Return the variables that a job's program finds; the user's own values stay."""
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    found = {
        "JOB_DIR": folder,
        "RUN_DIR": folder,
        "RUN_ATTEMPT_ID": _ATTEMPT,
        "STOP_FILE": f"{folder}/control/{_ATTEMPT}.stop",
        "NPROC": str(num_ranks),
        "NNODES": "1",
        "NODE_RANK": "0",
    }
    for name, value in (("OMP_NUM_THREADS", str(threads)), ("GLOO_SOCKET_IFNAME", "lo")):
        found[name] = env.get(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found["PROGRAM_PORT"] = str(probe.getsockname()[1])
    return found


def _command(job: spec.JobSpec, python: str, env: dict[str, str]) -> list[str]:
    """Return the command of each rank. Raises Problem."""
    try:
        words = rank_command.of(job, python, [one.text for one in job.command], env)
    except exit_codes.FatalError as e:
        raise Problem(str(e)) from e
    first, *rest = words
    if first == "--no-python":
        return rest
    if first == "--module":
        return [python, "-u", "-m", *rest]
    return [python, "-u", *words]


def _agent(python: str, num_ranks: int) -> list[str]:
    """Return torchrun's command, which the ranks' own follows."""
    place = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}"]
    rank = ["--no-python", "/bin/sh", "-c", _RANK, "sh"]
    return [python, "-m", "torch.distributed.run", *place, *rank]
