"""Check whether jobs can be submitted from this host; else name the reason and what to type."""

import dataclasses
import shutil
import typing

from ddp.base import Settings, TrainerError
from ddp.environment import environments
from ddp.slurm import jobs
from ddp.submit import checks
from ddp.workspace import folders
from slurm_ddp import mounts

PROGRAMS = {"zstd": "zstd"}  # needed to build an environment, and their packages


@dataclasses.dataclass(frozen=True)
class Readiness:
    """A unit's status: what prevents jobs, or `active`."""

    level: typing.Literal["blocked", "waiting", "active"]
    text: str


def check(settings: Settings) -> Readiness:
    """Check whether jobs can be submitted now."""
    if (missing := silent(settings) or mounted(settings)) is not None:
        return Readiness("waiting", missing)
    try:
        contents = folders.look(settings)
    except folders.WorkspaceError as e:
        return Readiness("waiting", str(e))
    if contents.untrusted:
        return Readiness("blocked", contents.untrusted)
    if not contents.is_writable:
        return Readiness(
            "blocked", f"{settings.user} cannot write {settings.runs}; chown {settings.user} {settings.runs}"
        )
    try:
        environment = environments.installed(settings, contents)
    except TrainerError as e:
        return Readiness("blocked", str(e))
    if environment is None:  # still active: the first job that needs one builds it
        which = "no environment of this release" if contents.environments else "no environment yet"
        return Readiness("active", f"{which}: {settings.typed('install-environment')}, or submit-ddp does it")
    return Readiness("active", f"ready; environment installed: torch {environment.manifest.torch}")


def require(settings: Settings, *, asks_nodes: bool = False) -> None:
    """Raise TrainerError with what stands in the way of submitting jobs; make this user's folders.

    A list of the nodes that will be asked for is made meanwhile: that of a large cluster takes as long as all else
    together.
    """
    if asks_nodes:
        checks.list_ahead()
    if problem := silent(settings) or mounted(settings) or _lacking():
        raise TrainerError(problem)
    folders.ensure_folders(settings)


def mounted(settings: Settings) -> str | None:
    """Return why the workspace's filesystem cannot be used, else None. With a charm it must be a mount."""
    mount = mounts.find(settings.workspace)
    if settings.unit and (mount is None or mount.mountpoint == "/"):
        what = "integrate shared-filesystem-client:juju-info with this machine's application"
        return f"no filesystem is mounted at {settings.workspace}; {what}"
    if mount is None:
        return None
    found = mounts.probe(mount.mountpoint, deadline=5.0)
    return None if found else f"{found.detail}; is the filesystem's server up? see: {_where(settings)}"


def silent(settings: Settings) -> str | None:
    """Name what is missing of Slurm: its client, or its controller's answer."""
    if not jobs.is_installed():
        need = "the principal must be sackd" if settings.unit else "install slurm-client, or go to a login node"
        return f"Slurm's client is not on this host; {need}"
    try:
        jobs.ping()
    except jobs.NotAnsweringError as e:
        hint = " (juju status)? else: juju integrate sackd slurmctld" if settings.unit else "? see: scontrol ping"
        return f"{e}; is slurmctld up{hint}"
    return None


def _where(settings: Settings) -> str:
    return "juju status" if settings.unit else "findmnt"


def _lacking() -> str | None:
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    return f"{missing[0]} is not installed on this host; as root: apt install {missing[0]}" if missing else None
