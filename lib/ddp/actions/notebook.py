"""notebook: JupyterLab on a node, and the line that opens it on a laptop."""

import contextlib
import os
import pathlib
import shlex
import shutil

from ddp.environment import store
from ddp.node import exit_codes, network
from ddp.node import notebook as on_node
from ddp.options import models
from ddp.problem import Command, ParameterError, Problem, Results
from ddp.results import tables
from ddp.results.progress import Log
from ddp.run import catalog, logs
from ddp.settings import Settings
from ddp.slurm import jobs, outages
from ddp.submit import control, scripts, sessions
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

KIND = "notebook"
_LOG_LINES = 8


def notebook(settings: Settings, params: models.Notebook, log: Log) -> Results:
    """Start a notebook unless it is there; return what opens it, once it can be opened."""
    workspace = settings.workspace
    job_id = _find(workspace, params.run)
    if job_id is None:
        job_id = _submit(settings, params, log)
    else:
        log(f"{params.run} is there already as job {job_id}; to end it: ddp cancel {params.run}")
    return _await(settings, params.run, job_id, log)


def _find(workspace: Workspace, run: str) -> int | None:
    """Return the job of a notebook that runs or waits, or None. Raises Problem."""
    with jobs.asking():
        queue = jobs.jobs(user=workspace.user, name=run)
    active = [job for job in queue if job.is_active]
    kind = catalog.read_record(workspace, run).get("kind")
    if kind not in (None, KIND):
        raise ParameterError("run", f"{run} exists and is not a notebook; choose another name")
    if active and kind is None:
        raise ParameterError("run", f"job {active[0].job_id} has this name; choose another one")
    return active[0].job_id if active else None


def _submit(settings: Settings, params: models.Notebook, log: Log) -> int:
    """Submit a notebook's job and return its id. Raises Problem."""
    workspace = settings.workspace
    checked = sessions.check(settings, params, log)
    jupyter = store.Store(settings).notebook(log)
    brings_packages = params.environment or params.requirements or checked.params.own_python
    environment = checked.provide(log) if brings_packages else jupyter

    submission = control.Submission(workspace, params.run)
    submission.claim()
    place = submission.path
    if catalog.read_record(workspace, params.run):  # of one that failed
        workspace.do(lambda: shutil.rmtree(place))
    texts = scripts.session(
        settings, checked.request, checked.params, environment, folder=place, jupyter=jupyter
    )
    facts: dict[str, object] = {
        "kind": KIND,
        "environment": None if checked.params.own_python else environment.hash,
        "jupyter": jupyter.hash,
    }
    return submission.submit(texts, facts, again=False).job_id


def _await(settings: Settings, run: str, job_id: int, log: Log) -> Results:
    """Wait until a notebook can be opened, and return how. Raises Problem if its job ends."""
    workspace = settings.workspace
    slurm = outages.PatientClient(log)
    shown = ""
    while True:
        known = slurm.ask(lambda: jobs.job(job_id, user=workspace.user))
        with contextlib.suppress(folders.MissingError):
            about = workspace.read_json(str(workspace.runs / run / on_node.ABOUT))
            return _describe(workspace, run, job_id, about, known)
        if known is None or (isinstance(known, jobs.Job) and not known.is_active):
            raise _ended(settings, run, job_id)
        if isinstance(known, jobs.Job):
            if problem := control.held(workspace, known):
                raise problem
            text = f"job {job_id} {known.state}"
            text += f" ({known.reason})" if known.state == "PENDING" else ", starting JupyterLab"
            if text != shown:
                log(tables.Step(text, text))
            shown = text
        settings.wait.pause(1.0)


def _ended(settings: Settings, run: str, job_id: int) -> Problem:
    """Return why a notebook's job has ended, in its log's words."""
    workspace = settings.workspace
    lines: list[str] = []
    with contextlib.suppress(folders.WorkspaceError):
        path = workspace.runs / run
        _, lines = workspace.do(
            logs.read_log, path=path, job_id=job_id, lines=_LOG_LINES, rank=None
        )
    fatal = [line.partition("[FATAL] ")[2] for line in lines if "[FATAL] " in line]
    why = fatal[-1] if fatal else next(reversed(lines), "its log is empty")
    return Problem(
        f"the notebook's job {job_id} has ended: {why}", remedy=Command("log", arguments=(run,))
    )


def _describe(
    workspace: Workspace,
    run: str,
    job_id: int,
    about: dict[str, object],
    known: jobs.Job | jobs.Silence | None,
) -> Results:
    """Return the lines that open a notebook. None has the token: ssh shows it on the laptop."""
    port = str(about["port"])
    url_file = workspace.runs / run / on_node.URL
    results = {
        "run": run,
        "job-id": str(job_id),
        "node": str(about["node"]),
        "on-your-laptop": _tunnel(workspace.user, port, str(about["address"]), url_file),
        "browser": "open the URL that this line prints",
        "vs-code": "Select Kernel, Existing Jupyter Server: the same URL",
        "to-end": f"ddp cancel {run}",
    }
    if isinstance(known, jobs.Job):
        results["time-limit"] = f"{known.time_limit}, used {known.elapsed}"
    return results


def _tunnel(user: str, port: str, address: str, url_file: pathlib.Path) -> str:
    """Return the line for the laptop, by the address through which this login came."""
    came = os.environ.get("SSH_CONNECTION", "").split()
    words = ["ssh", "-L", f"{port}:{address}:{port}"]
    if len(came) != 4:
        here = _own_address(address)
    else:
        here = came[2]
        if came[3] != "22":
            words += ["-p", came[3]]
    words += [f"{user}@{here}", "cat", str(url_file), "-"]
    return shlex.join(words)


def _own_address(towards: str) -> str:
    """Return this host's address in the cluster; its name need not resolve."""
    try:
        return network.source_address(towards, "the notebook's node")
    except exit_codes.FatalError:
        return "LOGIN-HOST"  # the reader knows the name by which the laptop reaches it
