"""Whether the trainer can work, and what to type where it cannot."""

import dataclasses
import pathlib
import typing

import trainer_environment
import trainer_params
import trainer_token
import trainer_workspace
from slurm_ddp import apt, mounts
from slurm_ddp.run import CommandError
from slurm_ddp.slurm import jobs
from trainer_base import Ahead, Log, Settings, TrainerError, account, with_progress

PACKAGES = ("python3-venv", "zstd")


@dataclasses.dataclass(frozen=True)
class Readiness:
    """A unit's status: what stands in the way, or that nothing does (`active`)."""

    level: typing.Literal["blocked", "waiting", "active"]
    text: str


def settings(config: trainer_params.Config, charm_dir: pathlib.Path, unit: str, token: str = "") -> Settings:
    """Return the settings that the options mean. Raises ParameterError for an account that cannot be."""
    who = account(config.submit_user)
    return Settings(
        unit=unit,
        workspace=pathlib.Path(config.workspace.rstrip("/")),
        user=config.submit_user,
        uid=who.pw_uid,
        gid=who.pw_gid,
        payload=charm_dir / "payload",
        torch_build=config.torch_build,
        torch_index=config.torch_index,
        mlflow_uri=config.mlflow_tracking_uri,
        tensorboard=config.tensorboard,
        transformers=config.transformers,
        token=token,
    )


def ensure(options: Settings) -> str:
    """Install what this host needs and make the workspace's folders; return what went wrong, or nothing."""
    if problem := _install():
        return problem
    if mounted(options) is None:
        try:
            trainer_workspace.ensure_folders(options)
            trainer_token.sync(options)
        except trainer_workspace.WorkspaceError as e:
            return str(e)
    return ""


def _install() -> str:
    try:
        apt.ensure_packages(PACKAGES)
    except CommandError as e:
        return f"cannot install {' '.join(PACKAGES)}: {e}"
    return ""


def mounted(options: Settings) -> str | None:
    """Return why the workspace is not on a mounted filesystem that answers; None when it is."""
    mount = mounts.find(options.workspace)
    if mount is None or mount.mountpoint == "/":
        what = "integrate shared-filesystem-client:juju-info with this machine's application"
        return f"no filesystem is mounted at {options.workspace}; {what}"
    found = mounts.probe(mount.mountpoint, deadline=5.0)
    return None if found else f"{found.detail}; is the filesystem's server up? see: juju status"


def check(options: Settings) -> Readiness:
    """Return whether jobs can be submitted now."""
    if (missing := _silent() or mounted(options)) is not None:
        return Readiness("waiting", missing)
    try:
        contents = trainer_workspace.look(options)
    except trainer_workspace.WorkspaceError as e:
        return Readiness("waiting", str(e))
    if contents.untrusted:
        return Readiness("blocked", contents.untrusted)
    if not contents.is_writable:
        folder = options.workspace / "runs"
        return Readiness("blocked", f"{options.user} cannot write {folder}; chown {options.user} {folder}")
    try:
        environment = trainer_environment.installed(options, contents)
    except TrainerError as e:
        return Readiness("blocked", str(e))
    if environment is None:  # still active: it can do its work, and does this by itself when it is first asked to
        which = "no environment of this release" if contents.environments else "no environment yet"
        return Readiness("active", f"{which}: juju run {options.unit} install-environment, or submit-ddp does it")
    return Readiness("active", f"ready; environment installed: torch {environment.manifest.torch}")


def require(options: Settings, log: Log, *, asks_nodes: bool = False) -> Settings:
    """Raise TrainerError with what stands in the way of submitting jobs; mend first what this unit can mend.

    Return the settings to go on with. A list of the nodes that will be asked for is made meanwhile: that of a large
    cluster takes as long as all else together.
    """
    problem = _silent()
    if not problem and asks_nodes:
        options = dataclasses.replace(options, listing=Ahead(options.listing))
    problem = problem or mounted(options)
    if not problem and set(apt.installed(*PACKAGES)) != set(PACKAGES):
        problem = with_progress(log, f"installing {' '.join(PACKAGES)}", _install)
    if problem:
        raise TrainerError(problem)
    trainer_workspace.ensure_folders(options)
    return options


def _silent() -> str | None:
    """Return what is missing of Slurm: its client, or its controller's answer."""
    if not jobs.is_installed():
        return "Slurm's client is not on this host; the principal must be sackd"
    try:
        jobs.ping()
    except jobs.NotAnsweringError as e:
        return f"{e}; is slurmctld up (juju status)? else: juju integrate sackd slurmctld"
    return None
