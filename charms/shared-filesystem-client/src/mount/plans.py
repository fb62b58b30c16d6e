"""Draws up the plan for what a provider offers, and removes what came of it."""

import collections.abc
import dataclasses
import pathlib

import mount_messages as messages
import mount_plan
from kinds import cephfs, kernel, lustre, lustre_client, nfs
from kinds import juicefs as juicefs_kind
from mount import mounter, states
from slurm_ddp import juicefs
from slurm_ddp.charm import Level, StatusError
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

    def secret(self, identifier: str) -> dict[str, str]:
        """Read a secret. Raises `StatusError` where it is not granted (yet), or was removed."""
        try:
            return self.read_secret(identifier)
        except SecretsError as e:
            raise StatusError(Level.WAITING, messages.NO_GRANT.format(app=self.provider), retry=True) from e


def draw(offer: Offer, spec: mount_plan.Spec, config: mount_plan.Config) -> mount_plan.Plan:
    """Draw up the plan for what is offered.

    Raises:
        StatusError: what is offered cannot be mounted (yet).
        juicefs.JuicefsError, mount_plan.MountError, mount_plan.NotYetError, CommandError: see the modules of each kind.
    """
    if not offer.uri:
        raise StatusError(Level.WAITING, messages.NO_OFFER.format(app=offer.provider))
    try:
        filesystem = fs.parse(offer.uri)
    except fs.UriError as e:
        raise StatusError(Level.BLOCKED, messages.BAD_OFFER.format(app=offer.provider, error=e)) from e
    match filesystem:
        case fs.Juicefs():
            return _juicefs(offer, filesystem, spec, config)
        case fs.Nfs():
            return nfs.plan(spec, filesystem)
        case fs.Cephfs():
            cephfs.ensure_helper()
            key = filesystem.key or offer.secret(filesystem.secret_id or "").get("key")
            if not key:
                raise StatusError(Level.BLOCKED, messages.NO_CEPH_KEY.format(app=offer.provider))
            return cephfs.plan(spec, filesystem, key)
        case fs.Lustre():
            return lustre.plan(spec, filesystem, config)


def _juicefs(offer: Offer, volume: fs.Juicefs, spec: mount_plan.Spec, config: mount_plan.Config) -> mount_plan.Plan:
    try:
        secret = fs.JuicefsSecret.from_content(offer.secret(volume.secret_id) if volume.secret_id else {})
    except ValueError as e:
        raise StatusError(Level.BLOCKED, messages.BAD_CREDENTIALS.format(app=offer.provider, error=e)) from e
    fetch, program = offer.fetch_program, juicefs_kind.program_path(spec.app)
    changed = fetch is not None and juicefs.ensure_program(program, fetch())
    config = config.model_copy(update={"metrics_port": states.metrics_port(spec.app, config.metrics_port)})
    plan = juicefs_kind.plan(spec, volume, secret, config, program_changed=changed)
    if fetch is not None:
        juicefs_kind.ensure_sticky_folders(spec, volume, secret)
    return plan


def remove(app: str, *, unit: str) -> str:
    """Remove the mount and all that came with it; return what had to stay, as one line."""
    kept = mounter.remove(app, unit=unit)
    if kernel.LUSTRE.fstype not in states.fstypes():
        lustre_client.remove()
    return kept
