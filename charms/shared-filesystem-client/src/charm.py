#!/usr/bin/env python3
"""Mounts a shared filesystem on the machine of the charm that this one accompanies."""

import collections.abc
import contextlib
import pathlib

import ops
import pydantic

import juicefs_mount
import mounter
import nfs_mount
from slurm_ddp import juicefs, mounts
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.interfaces import mount_info
from slurm_ddp.run import CommandError


class Config(pydantic.BaseModel, frozen=True):
    """The options."""

    mountpoint: str = ""
    read_only: bool
    noexec: bool
    cache_size: int = pydantic.Field(ge=0)
    buffer_size: int = pydantic.Field(ge=32)


class TroubleError(Exception):
    """There is no mount, or none that is right; `status` says why."""

    def __init__(self, status: ops.StatusBase) -> None:
        super().__init__(status.message)
        self.status = status


class SharedFilesystemClientCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        filesystem, mount = self.on["filesystem"], self.on["mount"]
        self._status: ops.StatusBase | None = None  # of this hook, if it looked
        for event in (
            self.on.install,
            self.on.start,
            self.on.config_changed,
            self.on.update_status,
            self.on.upgrade_charm,
            self.on.secret_changed,
            filesystem.relation_created,
            filesystem.relation_changed,
            filesystem.relation_broken,
            mount.relation_created,
            mount.relation_changed,
            mount.relation_broken,
        ):
            framework.observe(event, self._reconcile)
        framework.observe(self.on.stop, self._on_stop)
        framework.observe(self.on.remove, self._on_stop)
        framework.observe(self.on.collect_unit_status, self._on_collect_unit_status)

    def _reconcile(self, _: ops.EventBase) -> None:
        """Move this machine to the desired state, whichever event woke the charm, and tell those who wait for it."""
        try:
            with _explained(self.app.name):
                plan = self._plan()
                if not mounter.probe(plan):
                    self.unit.status = ops.MaintenanceStatus(f"mounting {plan.source} at {plan.wish.mountpoint}")
                self._status = self._judge(plan, mounter.ensure(plan, unit=self.unit.name))
        except TroubleError as e:
            self._status = e.status
        mounted = isinstance(self._status, ops.ActiveStatus)
        for relation in self.model.relations["mount"]:
            relation.data[self.unit].update(mount_info.answer(mounted=mounted))

    def _on_stop(self, _: ops.EventBase) -> None:
        mounter.remove(self.app.name, unit=self.unit.name)
        self._status = ops.MaintenanceStatus("unmounted")

    def _on_collect_unit_status(self, event: ops.CollectStatusEvent) -> None:
        if self._status is not None:
            event.add_status(self._status)

    def _judge(self, plan: mounter.Plan, look: mounts.Result) -> ops.StatusBase:
        """Return the status that says what a look at the mount found."""
        waits = mounter.pending(plan)
        match look.state:
            case mounts.State.RIGHT:
                text = f"{plan.source} is mounted at {plan.wish.mountpoint}"
                return ops.ActiveStatus(f"{text}; a change waits until nobody uses it" if waits else text)
            case mounts.State.WRONG if waits:
                return ops.MaintenanceStatus(f"{look.detail}; the change waits until nobody uses it")
            case mounts.State.WRONG:
                return ops.BlockedStatus(f"{look.detail}: unmount it, or choose another mountpoint")
            case mounts.State.ABSENT:
                return ops.BlockedStatus(f"{plan.source} does not mount: {mounter.reason(plan)}")
            case mounts.State.FAILED:
                return ops.BlockedStatus(look.detail)
            case mounts.State.HUNG:
                return ops.WaitingStatus(look.detail)
            case mounts.State.STALE | mounts.State.STACKED:
                return ops.MaintenanceStatus(f"{look.detail}; mounting it anew")

    def _plan(self) -> mounter.Plan:
        """Return the mount that should be here."""
        relation = self.model.get_relation("filesystem")
        if relation is None:
            mounter.remove(self.app.name, unit=self.unit.name)
            text = f"nothing to mount: juju integrate {self.app.name}:filesystem PROVIDER:filesystem"
            raise TroubleError(ops.BlockedStatus(text))
        config, wish = self._config_and_wish()
        uri = relation.data[relation.app].get(fs.KEY)
        if not uri:
            raise TroubleError(ops.WaitingStatus(f"waiting for {relation.app.name} to offer a filesystem"))
        try:
            filesystem = fs.parse(uri)
        except fs.UriError as e:
            raise TroubleError(ops.BlockedStatus(f"{relation.app.name} offers what cannot be mounted: {e}")) from e
        match filesystem:
            case fs.Juicefs():
                secret = self._secret(filesystem.secret_id, relation.app.name)
                program = juicefs_mount.program_path(self.app.name)
                changed = juicefs.ensure_program(program, self._resource())
                self.unit.set_workload_version(".".join(map(str, juicefs.version(program))))
                tuning = juicefs_mount.Tuning(cache_mib=config.cache_size, buffer_mib=config.buffer_size)
                return juicefs_mount.plan(wish, filesystem, secret, tuning, program_changed=changed)
            case fs.Nfs():
                return nfs_mount.plan(wish, filesystem)
            case fs.Cephfs() | fs.Lustre():
                kind = type(filesystem).__name__.lower()
                text = f"{relation.app.name} offers {kind}, which this charm cannot mount yet"
                raise TroubleError(ops.BlockedStatus(text))

    def _config_and_wish(self) -> tuple[Config, mounter.Wish]:
        """Return the options, and where and how to mount: as the charm behind `mount` asks, else as the options say."""
        try:
            config = self.load_config(Config)
        except pydantic.ValidationError as e:
            error = e.errors()[0]
            text = f"{str(error['loc'][0]).replace('_', '-')}: {error['msg'].lower()}"
            raise TroubleError(ops.BlockedStatus(text)) from e
        wish = mounter.Wish(self.app.name, config.mountpoint, read_only=config.read_only, noexec=config.noexec)
        for relation in self.model.relations["mount"]:
            name = relation.app.name
            try:
                request = mount_info.load(relation.data[relation.app])
            except ValueError as e:
                raise TroubleError(ops.BlockedStatus(f"{name} asks for a mount in words unknown here: {e}")) from e
            if request is None:
                raise TroubleError(ops.WaitingStatus(f"waiting for {name} to say where it needs a mount"))
            if wish.mountpoint and wish.mountpoint != request.mountpoint:
                text = f"mountpoint: {wish.mountpoint} is wanted, and {request.mountpoint} by {name}: reset the option"
                raise TroubleError(ops.BlockedStatus(text))
            read_only, noexec = wish.read_only or request.read_only, wish.noexec or request.noexec
            wish = mounter.Wish(self.app.name, request.mountpoint, read_only=read_only, noexec=noexec)
        if not wish.mountpoint:
            text = f"mountpoint: say where to mount: juju config {self.app.name} mountpoint=/mnt/shared"
            raise TroubleError(ops.BlockedStatus(text))
        try:
            mounter.check_mountpoint(wish.mountpoint)
        except ValueError as e:
            raise TroubleError(ops.BlockedStatus(f"mountpoint: {e}")) from e
        return config, wish

    def _secret(self, identifier: str | None, provider: str) -> fs.JuicefsSecret:
        if identifier is None:
            return fs.JuicefsSecret()
        try:
            return fs.JuicefsSecret.from_content(self.model.get_secret(id=identifier).get_content(refresh=True))
        except ops.ModelError as e:  # not granted (yet), or removed
            raise TroubleError(ops.WaitingStatus(f"waiting for {provider} to grant its credentials")) from e
        except ValueError as e:
            raise TroubleError(ops.BlockedStatus(f"{provider} offers unusable credentials: {e}")) from e

    def _resource(self) -> pathlib.Path | None:
        with contextlib.suppress(ops.ModelError):  # none was attached
            return self.model.resources.fetch("juicefs")
        return None


@contextlib.contextmanager
def _explained(app: str) -> collections.abc.Generator[None]:
    """Turn what fails inside into the status that says so: Waiting for what may mend itself, else Blocked."""
    try:
        yield
    except juicefs.UnreachableError as e:
        raise TroubleError(ops.WaitingStatus(f"{e}; the mount waits for it")) from e
    except juicefs.DownloadError as e:
        raise TroubleError(ops.BlockedStatus(f"{e}: attach it: juju attach-resource {app} juicefs=FILE")) from e
    except (juicefs.JuicefsError, mounter.MounterError, CommandError) as e:
        raise TroubleError(ops.BlockedStatus(str(e))) from e


if __name__ == "__main__":
    ops.main(SharedFilesystemClientCharm)
