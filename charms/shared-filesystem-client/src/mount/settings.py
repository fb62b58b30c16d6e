"""What the operator and the charm beside ask for, as a spec that makes sense."""

import collections.abc
import dataclasses

import mount_messages as messages
import mount_plan
from kinds import juicefs as juicefs_kind
from kinds import lustre_client, presets
from slurm_ddp.charm import Level, StatusError, config_errors, naming
from slurm_ddp.interfaces import mount_info

Requests = collections.abc.Iterable[tuple[str, collections.abc.Mapping[str, str]]]


def spec(app: str, config: mount_plan.Config, requests: Requests) -> mount_plan.Spec:
    """Decide where and how to mount: as the charm behind `mount` asks, else as the options say.

    Args:
        app: the application's name.
        config: the options.
        requests: of each charm that may ask for a mount, its name and application databag.

    Raises:
        StatusError: something is missing, wrong or contradictory.
    """
    with config_errors():
        _check(config)
    wanted = mount_plan.Spec(
        app,
        config.mountpoint,
        read_only=config.read_only,
        noexec=config.noexec,
        subdirectory=config.subdirectory.strip("/"),
        profile=config.profile,
        mount_options=config.mount_options,
        drain=config.drain_on_failure,
    )
    for name, databag in requests:
        try:
            request = mount_info.load(databag)
        except ValueError as e:
            raise StatusError(Level.BLOCKED, messages.BAD_REQUEST.format(app=name, error=e)) from e
        if request is None:
            raise StatusError(Level.WAITING, messages.NO_REQUEST.format(app=name))
        if wanted.mountpoint and wanted.mountpoint != request.mountpoint:
            text = messages.MOUNTPOINT_CONTRADICTION.format(
                option=wanted.mountpoint, request=request.mountpoint, app=name
            )
            raise StatusError(Level.BLOCKED, text)
        wanted = dataclasses.replace(
            wanted,
            mountpoint=request.mountpoint,
            read_only=wanted.read_only or request.read_only,
            noexec=wanted.noexec or request.noexec,
        )
    if not wanted.mountpoint:
        raise StatusError(Level.BLOCKED, messages.NO_MOUNTPOINT.format(app=app))
    with config_errors(), naming("mountpoint"):
        mount_plan.check_mountpoint(wanted.mountpoint)
    return wanted


def _check(config: mount_plan.Config) -> None:
    if config.profile not in presets.PROFILES:
        raise ValueError(messages.PROFILE.format(given=config.profile[:40], known=", ".join(presets.PROFILES)))
    parts, path = config.subdirectory.strip("/").split("/"), config.subdirectory
    if path and (any(part in ("", ".", "..") for part in parts) or not path.isprintable()):
        raise ValueError(messages.SUBDIRECTORY)
    juicefs_kind.check(config)
    lustre_client.check(config)
