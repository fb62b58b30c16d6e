"""Whether jobs can be submitted from this host; if not, why, and what to do."""

import dataclasses
import shutil
import typing

from ddp.environment import store
from ddp.problem import Command, Problem, Step
from ddp.settings import Settings
from ddp.slurm import advisories, cluster, jobs, remedies
from ddp.workspace import checks, folders
from ddp.workspace.folders import Workspace
from slurm_ddp import mounts


@dataclasses.dataclass(frozen=True)
class Readiness:
    """A unit's status."""

    level: typing.Literal["blocked", "waiting", "active"]
    text: str  # what prevents jobs, with the remedy first; or that all is ready


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
        environment = store.Store(settings).installed(contents)
    except Problem as e:
        return Readiness("blocked", _status(settings, e))
    if environment is None:  # still active: the first job that needs one builds it
        install = settings.render(Command("env install"))
        which = store.Store(settings).missing(contents)
        return Readiness("active", f"{which}; the first job builds it, or: {install}")
    text = f"ready; environment installed: torch {environment.torch}"
    version = jobs.version()
    if advisories.missing(version):
        text += f"; Slurm {version} lacks security fixes: ddp doctor"
    return Readiness("active", text)


def _status(settings: Settings, problem: Problem) -> str:
    """Write a problem with its remedy first, since the end may be cut."""
    if problem.remedy is None:
        return problem.what
    return f"{settings.render(problem.remedy)}: {problem.what}"


def require(workspace: Workspace, *, asks_nodes: bool = False) -> None:
    """Check that jobs can start, and make this user's folders. Raises Problem.

    With `asks_nodes`, start to list the nodes.
    """
    if asks_nodes:
        cluster.list_ahead()
    if problem := slurm_problem() or mount_problem(workspace):
        raise problem
    if shutil.which("zstd") is None:  # it packs an environment
        remedy = Step("install-package", "as root: apt install zstd")
        raise Problem("zstd is not installed on this host", remedy=remedy)
    workspace.ensure_folders()


def require_workspace(workspace: Workspace) -> None:
    """Raise Problem unless the workspace's filesystem responds and this user's folder is theirs."""
    if problem := mount_problem(workspace):
        raise problem
    workspace.check_own()


def mount_problem(workspace: Workspace) -> Problem | None:
    """Return why the workspace's filesystem cannot be used, or None.

    With a charm it must be a mount.
    """
    mount = mounts.find(workspace.path)
    if workspace.unit and (mount is None or mount.mountpoint == "/"):
        text = f"mount the shared filesystem at {workspace.path}"
        step = Step("mount-workspace", text, {"where": "this machine"})
        return Problem(f"no filesystem is mounted at {workspace.path}", remedy=step)
    if mount is None:
        return None
    found = mounts.probe(mount.mountpoint, deadline=5.0)
    if found:
        return None
    return Problem(found.detail, remedy=remedies.CHECK_FILESYSTEM)


def slurm_problem() -> Problem | None:
    """Return why Slurm does not respond, or None."""
    if not jobs.is_installed():
        step = Step("add-slurm-client", "install slurm-client, or use a login node")
        return Problem("Slurm's client is not installed on this host", remedy=step)
    try:
        jobs.ping()
    except jobs.NotAnsweringError as e:
        remedy = remedies.START_SLURMCTLD
        if str(e) == jobs.NOT_CONFIGURED:
            remedy = remedies.USE_LOGIN_NODE
        return Problem(str(e), remedy=remedy)
    return None
