"""Check whether jobs can be submitted from this host; if not, report why and what to do."""

import dataclasses
import shutil
import typing

from ddp.environment import environments
from ddp.problem import Command, Problem, Step
from ddp.settings import Settings
from ddp.slurm import cluster, jobs, remedies
from ddp.workspace import checks, folders
from ddp.workspace.folders import Workspace
from slurm_ddp import mounts


@dataclasses.dataclass(frozen=True)
class Readiness:
    """A unit's status: what prevents jobs, or `active`."""

    level: typing.Literal["blocked", "waiting", "active"]
    text: str


def check(settings: Settings) -> Readiness:
    """Check whether jobs can be submitted now."""
    workspace = settings.workspace
    if problem := slurm_problem() or mount_problem(workspace):
        return Readiness("waiting", _status(settings, problem))
    try:
        contents = workspace.look()
    except folders.WorkspaceError as e:
        return Readiness("waiting", _status(settings, e))
    try:
        checks.trusted(contents)
        checks.check_writable(workspace, contents)
        environment = environments.installed(settings, contents)
    except Problem as e:
        return Readiness("blocked", _status(settings, e))
    if environment is None:  # still active: the first job that needs one builds it
        install = settings.render(Command("env install"))
        which = environments.missing(settings, contents)
        return Readiness("active", f"{which}; the first job builds it, or: {install}")
    return Readiness("active", f"ready; environment installed: torch {environment.torch}")


def _status(settings: Settings, problem: Problem) -> str:
    """Write a problem with its remedy first: what comes last may be cut."""
    return (
        problem.what
        if problem.remedy is None
        else f"{settings.render(problem.remedy)}: {problem.what}"
    )


def require(workspace: Workspace, *, asks_nodes: bool = False) -> None:
    """Make this user's folders; with `asks_nodes` list the nodes meanwhile. Raises Problem if no job can start."""
    if asks_nodes:
        cluster.list_ahead()
    if problem := slurm_problem() or mount_problem(workspace):
        raise problem
    if shutil.which("zstd") is None:  # it packs an environment
        raise Problem(
            "zstd is not installed on this host",
            remedy=Step("install-package", "as root: apt install zstd"),
        )
    workspace.ensure_folders()


def require_workspace(workspace: Workspace) -> None:
    """Raise Problem unless the workspace's filesystem can be used, and this user's folder is its own."""
    if problem := mount_problem(workspace):
        raise problem
    workspace.check_own()


def mount_problem(workspace: Workspace) -> Problem | None:
    """Explain why the workspace's filesystem cannot be used, if so. With a charm it must be a mount."""
    mount = mounts.find(workspace.path)
    if workspace.unit and (mount is None or mount.mountpoint == "/"):
        text = f"mount the shared filesystem at {workspace.path}"
        step = Step("mount-workspace", text, {"where": "this machine"})
        return Problem(f"no filesystem is mounted at {workspace.path}", remedy=step)
    if mount is None:
        return None
    found = mounts.probe(mount.mountpoint, deadline=5.0)
    return None if found else Problem(found.detail, remedy=remedies.CHECK_FILESYSTEM)


def slurm_problem() -> Problem | None:
    """Explain why Slurm does not respond, if so: its client is missing, or its controller is silent."""
    if not jobs.is_installed():
        step = Step("add-slurm-client", "install slurm-client, or use a login node")
        return Problem("Slurm's client is not installed on this host", remedy=step)
    try:
        jobs.ping()
    except jobs.NotAnsweringError as e:
        is_elsewhere = str(e) == jobs.NOT_CONFIGURED
        return Problem(
            str(e), remedy=remedies.USE_LOGIN_NODE if is_elsewhere else remedies.START_SLURMCTLD
        )
    return None
