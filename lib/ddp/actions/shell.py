"""shell: open a prompt on a node, in a new allocation or in a running job's."""

import collections.abc
import contextlib
import functools
import os
import pathlib
import shutil
import sys
import tempfile

from ddp.host import foreground
from ddp.node import spec, srun
from ddp.options import models
from ddp.problem import ParameterError, Problem
from ddp.results.progress import Log
from ddp.run import catalog, creation, folder, untrusted
from ddp.run.model import Run, State
from ddp.settings import Settings
from ddp.slurm import cluster
from ddp.submit import job_program, scripts, sessions
from ddp.workspace.folders import Workspace
from slurm_ddp import commands
from slurm_ddp.slurm import binaries

# Of the terminal, which the program on the node needs to know
_OF_TERMINAL = ("TERM", "COLORTERM", "LANG", "LC_ALL", "LC_CTYPE", "NO_COLOR")


def shell(settings: Settings, params: models.OpenShell, log: Log) -> None:
    """Give the user a prompt on a node until they leave it."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Problem("a prompt needs a terminal; for a command on nodes: ddp submit")
    if params.run is None:
        _open(settings, params, log)
    else:
        sessions.refuse_resources(params, params.run)
        _join(settings.workspace, params)


def _open(settings: Settings, params: models.OpenShell, log: Log) -> None:
    """Open a prompt on the first node of an allocation, which ends with it. Raises Problem."""
    if params.rank is not None:
        raise ParameterError("rank", "only a running job has ranks; name its run, too")
    checked = sessions.check(settings, params, log)
    environment = checked.provide(log)
    request = checked.request
    with _folder(settings.workspace) as place:
        texts = scripts.session(settings, request, checked.params, environment, folder=place)
        cluster.judge(texts["job.sbatch"], request.partition)
        create = functools.partial(creation.create, program=job_program.archive(), again=True)
        settings.workspace.do(create, path=place, texts=texts)
        asked = scripts.allocation(request, checked.params)
        words = [f"--{name}={value}" if value else f"--{name}" for name, value in asked]
        salloc = [binaries.find("salloc"), "--job-name=shell", "--chdir=/", *words]
        step = _step(place, request.cpus_per_task)
        _run([*salloc, *step], {})


@contextlib.contextmanager
def _folder(workspace: Workspace) -> collections.abc.Generator[pathlib.Path]:
    """Make a folder for the program of the node, and remove it with all that is in it."""
    make = tempfile.mkdtemp
    place = pathlib.Path(workspace.do(lambda: make(prefix=".shell-", dir=workspace.runs)))
    try:
        yield place
    finally:
        workspace.do(lambda: shutil.rmtree(place, ignore_errors=True))


def _join(workspace: Workspace, params: models.OpenShell) -> None:
    """Open a prompt on a node of a running job. Raises Problem."""
    name = catalog.find(workspace, params.run)[0]
    run = _running(workspace, name)
    host = _host(run, params.rank)
    owner = str(run.record.get("sweep") or name)
    job_dir = workspace.runs / owner
    assert run.job is not None
    if workspace.locate(spec.program_of(_specification(job_dir))).kind != "file":
        plain = f"srun --jobid {run.job.job_id} --overlap --nodelist {host} --pty bash"
        raise Problem(
            f"{name} was submitted by an earlier release; without its environment: {plain}"
        )

    request = untrusted.as_object(run.record.get("request"))
    cpus = untrusted.number(str(request.get("cpus_per_task")), 1)
    step = _step(job_dir, cpus)
    # Without a name srun calls the step, and SLURM_JOB_NAME, after its program
    where = [f"--jobid={run.job.job_id}", f"--nodelist={host}", f"--job-name={owner}"]
    run_dir = str(workspace.runs / name)
    _run([step[0], *where, *step[1:]], {"RUN_DIR": run_dir, "JOB_DIR": str(job_dir)})


def _running(workspace: Workspace, name: str) -> Run:
    """Load a run whose job is running. Raises Problem."""
    runs, silence = catalog.load(workspace, [name], is_brief=True)
    run = runs[0]
    if silence:
        raise Problem(silence)
    if run.job is None or run.state != State.RUNNING:
        raise ParameterError("run", f"{name} is {run.state}; only a running job has a prompt")
    return run


def _host(run: Run, rank: int | None) -> str:
    """Return the node of a rank. Raises Problem."""
    if not run.hosts:
        raise Problem(f"{run.name} has not placed its ranks yet; try again in a few seconds")
    ranks_per_node = max(1, untrusted.number(str(run.record.get("ranks_per_node")), 1))
    number = (rank or 0) // ranks_per_node
    if number >= len(run.hosts):
        most = ranks_per_node * len(run.hosts)
        raise ParameterError("rank", f"no rank {rank}; {run.name} has {most}, from 0")
    return run.hosts[number]


def _specification(job_dir: pathlib.Path) -> str:
    return str(job_dir / "program" / folder.RECORD)


def _step(job_dir: pathlib.Path, cpus: int) -> list[str]:
    """Return srun's command for the prompt, which leaves the job's resources to other steps."""
    specification = _specification(job_dir)
    return [
        binaries.find("srun"),
        "--pty",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={cpus}",
        "--cpu-bind=none",
        "--preserve-env",
        "--propagate=NONE",
        "--chdir=/",
        srun.PYTHON,
        "-I",
        "-S",
        "-B",
        spec.program_of(specification),
        "shell",
        specification,
    ]


def _run(argv: list[str], variables: dict[str, str]) -> None:
    """Run Slurm's command on this terminal. Raises Problem unless the prompt was left."""
    shown = {name: os.environ[name] for name in _OF_TERMINAL if name in os.environ}
    env = commands.clean_env({**binaries.variables(argv[0]), **shown, **variables})
    code = foreground.run(argv, env)
    if code:
        name = pathlib.PurePath(argv[0]).name
        raise Problem(f"{name} ended with exit status {code}; its reason is above")
