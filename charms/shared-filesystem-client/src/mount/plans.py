"""From what a provider offers to a plan, and from a look at the mount to a verdict."""

import collections.abc
import contextlib
import dataclasses
import pathlib
import time

import mount_plan
from kinds import cephfs, kernel, lustre, lustre_client, nfs, presets
from kinds import juicefs as juicefs_kind
from mount import mounter, settings
from scripts import keeper
from slurm_ddp import juicefs, mounts, trouble
from slurm_ddp.charm import Level, Status, StatusError
from slurm_ddp.interfaces import filesystem_info as fs

Fetch = collections.abc.Callable[[], pathlib.Path | None]  # returns the resource; None where there is none


class SecretsError(Exception):
    """The provider's secret cannot be read (yet)."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """What there is to mount."""

    provider: str
    uri: str | None
    read_secret: collections.abc.Callable[[str], dict[str, str]]  # raises SecretsError
    fetch_program: Fetch | None  # None: the program stays as it is, since an action looks and a hook may be at it


def draw(offer: Offer, spec: mount_plan.Spec, config: settings.Config) -> mount_plan.Plan:
    """Return the plan for what is offered.

    Raises:
        StatusError: what is offered cannot be mounted (yet).
        juicefs.JuicefsError, mount_plan.MountError, mount_plan.NotYetError, CommandError: see the modules of each kind.
    """
    if not offer.uri:
        raise StatusError(Level.WAITING, f"waiting for {offer.provider} to offer a filesystem")
    try:
        filesystem = fs.parse(offer.uri)
    except fs.UriError as e:
        raise StatusError(Level.BLOCKED, f"{offer.provider} offers what cannot be mounted: {e}") from e
    match filesystem:
        case fs.Juicefs():
            secret = _juicefs_secret(offer, filesystem)
            program = juicefs_kind.program_path(spec.app)
            changed = offer.fetch_program is not None and juicefs.ensure_program(program, offer.fetch_program())
            port = mounter.metrics_port(spec.app, config.metrics_port)
            tuning = dataclasses.replace(config.tuning, metrics_port=port)
            plan = juicefs_kind.plan(spec, filesystem, secret, tuning, program_changed=changed)
            if offer.fetch_program is not None:
                juicefs_kind.ensure_sticky_folders(spec, filesystem, secret)
            return plan
        case fs.Nfs():
            return nfs.plan(spec, filesystem)
        case fs.Cephfs():
            cephfs.ensure_helper()
            return cephfs.plan(spec, filesystem, _ceph_key(offer, filesystem))
        case fs.Lustre():
            return lustre.plan(spec, filesystem, config.lustre)


def judge(plan: mount_plan.Plan, look: mounts.Result) -> Status:
    """Return what a look at the mount means."""
    waits = mounter.pending(plan)
    seen = mounter.health(plan.spec.app)
    match look.state:
        case mounts.State.RIGHT:
            text = f"{plan.source} is mounted at {plan.spec.mountpoint}"
            text += "; restart pending: a change waits until nobody uses it" if waits else ""
            text += f"; {warning}" if (warning := exposed(plan, look)) else ""
            return Status(Level.ACTIVE, text)
        case mounts.State.WRONG if waits:
            return Status(Level.MAINTENANCE, f"{look.detail}; the change waits until nobody uses it")
        case mounts.State.WRONG:
            return Status(Level.BLOCKED, f"{look.detail}: unmount it, or choose another mountpoint")
        case mounts.State.ABSENT:
            return Status(Level.BLOCKED, f"{plan.source} does not mount: {mounter.reason(plan)}")
        case mounts.State.FAILED:
            return Status(Level.BLOCKED, look.detail)
        case mounts.State.SLOW:
            if seen.slow and time.time() - seen.slow >= keeper.SLOW_S:
                return Status(Level.WAITING, f"{look.detail}; look at what stores the data of {plan.source}")
            return Status(Level.ACTIVE, f"{plan.source} is mounted at {plan.spec.mountpoint}; writes are slow now")
        case mounts.State.HUNG if seen.down:
            return Status(Level.WAITING, f"{seen.down}{_since(seen.down_since)}; the mount waits for it")
        case mounts.State.HUNG:
            text = f"{plan.spec.mountpoint} does not answer{_since(seen.hung)}" if seen.hung else look.detail
            return Status(Level.WAITING, text)
        case mounts.State.STALE | mounts.State.STACKED:
            return Status(Level.MAINTENANCE, f"{look.detail}; mounting it anew")


def exposed(plan: mount_plan.Plan, look: mounts.Result) -> str:
    """Return that others can replace what is in the filesystem's root, and what to type; nothing where they cannot.

    It keeps nobody from using the mount: whose filesystem it is decides.
    """
    if look.open_mode is None:
        return ""
    return f"others can replace folders in it (mode {look.open_mode:04o}, no sticky bit): {plan.remedy}"


def remove(app: str, *, unit: str) -> str:
    """Take away the mount and all that came with it; return what had to stay, as one line."""
    kept = mounter.remove(app, unit=unit)
    if kernel.LUSTRE.fstype not in mounter.fstypes():
        lustre_client.remove()
    return kept


def explained(app: str) -> contextlib.AbstractContextManager[None]:
    """Turn what fails inside into the verdict that says so: Waiting for what may mend itself, else Blocked.

    Raises:
        StatusError: instead of what was raised.
    """

    def tell(error: Exception, said: str, *, passes: bool) -> StatusError:
        if isinstance(error, juicefs.UnreachableError):
            said = f"{said}{_since(mounter.health(app).down_since)}; the mount waits for it"
        return StatusError(Level.WAITING if passes else Level.BLOCKED, said, retry=passes)

    lasting = (mount_plan.MountError, presets.OptionError)
    return trouble.explained(app, tell, passing=(mount_plan.NotYetError,), lasting=lasting)


def _juicefs_secret(offer: Offer, volume: fs.Juicefs) -> fs.JuicefsSecret:
    if volume.secret_id is None:
        return fs.JuicefsSecret()
    content = _read(offer, volume.secret_id)
    try:
        return fs.JuicefsSecret.from_content(content)
    except ValueError as e:
        raise StatusError(Level.BLOCKED, f"{offer.provider} offers unusable credentials: {e}") from e


def _ceph_key(offer: Offer, volume: fs.Cephfs) -> str:
    if volume.key is not None:
        return volume.key
    content = _read(offer, volume.secret_id or "")
    if not content.get("key"):
        raise StatusError(Level.BLOCKED, f"{offer.provider} offers a secret without the key of Ceph's user")
    return content["key"]


def _read(offer: Offer, identifier: str) -> dict[str, str]:
    try:
        return offer.read_secret(identifier)
    except SecretsError as e:  # not granted (yet), or removed
        raise StatusError(Level.WAITING, f"waiting for {offer.provider} to grant its credentials", retry=True) from e


def _since(moment: float) -> str:
    return f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(moment))} UTC" if moment else ""
