"""Plan a mount from the options and the offers, and remove the results of a plan."""

import collections.abc
import pathlib

import accounts
import logins
import mount_plan
from kinds import cephfs, kernel, lustre, nfs
from kinds import juicefs as juicefs_kind
from mount import mounter, states
from slurm_ddp import juicefs
from slurm_ddp.charm import Level, StatusError, config_errors, naming
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.interfaces import mount_info

Requests = collections.abc.Iterable[tuple[str, collections.abc.Mapping[str, str]]]
# Raises StatusError if it is not granted
ReadSecret = collections.abc.Callable[[str], dict[str, str]]
Fetch = collections.abc.Callable[[], pathlib.Path | None]  # returns the resource, None without one


def spec(unit: str, config: mount_plan.Config, requests: Requests) -> mount_plan.Spec:
    """Decide where and how to mount: as the charm behind `mount` asks, or as the options state.

    `requests` are the names and databags of the charms that may ask. Raises `StatusError` if
    something is missing, wrong or contradictory.
    """
    with config_errors():
        _check(config)
    app = unit.partition("/")[0]
    spec = mount_plan.Spec(app=app, wanted_by=unit, **config.model_dump())
    for name, databag in requests:
        try:
            request = mount_info.load(databag)
        except ValueError as e:
            raise StatusError(
                Level.BLOCKED, f"{name} asks for a mount in an unknown format: {e}"
            ) from e
        if request is None:
            raise StatusError(Level.WAITING, f"waiting for {name} to request a mountpoint")
        if spec.mountpoint not in ("", request.mountpoint):
            text = f"mountpoint: {spec.mountpoint} is set, and {name} requests {request.mountpoint}: reset the option"
            raise StatusError(Level.BLOCKED, text)
        limits = {
            "read_only": spec.read_only or request.read_only,
            "noexec": spec.noexec or request.noexec,
        }
        spec = spec.model_copy(update=limits | {"mountpoint": request.mountpoint})
    if not spec.mountpoint:
        raise StatusError(
            Level.BLOCKED, f"mountpoint: not set: juju config {app} mountpoint=/mnt/shared"
        )
    with config_errors(), naming("mountpoint"):
        mount_plan.check_mountpoint(spec.mountpoint)
    return spec


def draw(
    spec: mount_plan.Spec,
    provider: str,
    uri: str | None,
    *,
    read_secret: ReadSecret,
    fetch_program: Fetch | None,
) -> mount_plan.Plan:
    """Draw up the plan for an offer, or raise an error that `judge.explained` turns into a status.

    Without `fetch_program` the program stays as it is: an action looks, and a hook may be at it.
    """
    if not uri:
        raise StatusError(Level.WAITING, f"waiting for {provider} to offer a filesystem")
    try:
        filesystem = fs.parse(uri)
    except fs.UriError as e:
        raise StatusError(Level.BLOCKED, f"{provider} offers what cannot be mounted: {e}") from e
    match filesystem:
        case fs.Juicefs():
            try:
                content = read_secret(filesystem.secret_id) if filesystem.secret_id else {}
                secret = fs.JuicefsSecret.from_content(content)
            except ValueError as e:
                raise StatusError(
                    Level.BLOCKED, f"{provider} offers unusable credentials: {e}"
                ) from e
            return _juicefs(spec, filesystem, secret, fetch_program)
        case fs.Nfs():
            return nfs.plan(spec, filesystem)
        case fs.Cephfs():
            client = cephfs.ensure_client(spec)
            key = filesystem.key or read_secret(filesystem.secret_id or "").get("key")
            if not key:
                raise StatusError(
                    Level.BLOCKED, f"{provider} offers a secret without the key of Ceph's user"
                )
            return cephfs.plan(spec, filesystem, key, client)
        case fs.Lustre():
            return lustre.plan(spec, filesystem)


def remove(app: str, *, unit: str) -> None:
    """Remove the mount and all that came with it."""
    mounter.remove(app, unit=unit)
    if not any(kernel.LUSTRE.fstype in state.fstypes for state in states.load_all().values()):
        lustre.remove()


def _check(config: mount_plan.Config) -> None:
    parts, path = config.subdirectory.strip("/").split("/"), config.subdirectory
    if path and (any(part in ("", ".", "..") for part in parts) or not path.isprintable()):
        raise ValueError(
            "subdirectory: a folder of the filesystem, like team/a, without . and .. in it"
        )
    accounts.check(config.separate_accounts)
    logins.check(config)
    juicefs_kind.check(config)
    lustre.check(config)


def _juicefs(
    spec: mount_plan.Spec, volume: fs.Juicefs, secret: fs.JuicefsSecret, fetch: Fetch | None
) -> mount_plan.Plan:
    changed = fetch is not None and juicefs.ensure_program(
        juicefs_kind.program_path(spec.app), fetch()
    )
    spec = spec.model_copy(
        update={"metrics_port": states.metrics_port(spec.app, spec.metrics_port)}
    )
    plan = juicefs_kind.plan(spec, volume, secret, program_changed=changed)
    if fetch is not None:
        juicefs_kind.ensure_sticky_folders(spec, volume, secret)
    return plan
