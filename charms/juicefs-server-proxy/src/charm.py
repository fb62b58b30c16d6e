#!/usr/bin/env python3
"""Offers a JuiceFS volume, which lies in a metadata engine and a bucket of the user's, or on a unit of this charm."""

import contextlib
import logging
import pathlib

import ops

import actions
import embedded.store
import embedded.users
import relations.filesystem
import relations.sources
from relations.peers import PEERS, Ledger
from slurm_ddp import juicefs, juicefs_access, trouble, wake
from slurm_ddp.charm import Level, Status, StatusError, action_name, run_action
from slurm_ddp.interfaces import filesystem_info as fs
from slurm_ddp.run import CommandError
from volume import formatting, maintenance
from volume.spec import Volume

_log = logging.getLogger(__name__)


class JuicefsServerProxyCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        peers, filesystem = self.on[PEERS], self.on[relations.filesystem.ENDPOINT]
        self._program = formatting.program_path(self.app.name)
        self._status: Status | None = None  # set by the hooks that look
        services = [self.on[name] for name in (*relations.sources.ENGINES, relations.sources.STORE)]
        for event in (
            self.on.start,
            self.on.config_changed,
            self.on.leader_elected,
            self.on.update_status,
            self.on.upgrade_charm,
            self.on.secret_changed,
            self.on["volume"].storage_attached,
            peers.relation_created,
            peers.relation_changed,
            peers.relation_departed,
            filesystem.relation_created,
            filesystem.relation_changed,
            *(service.relation_created for service in services),
            *(service.relation_changed for service in services),
            *(service.relation_broken for service in services),
        ):
            framework.observe(event, self._reconcile)
        framework.observe(filesystem.relation_broken, self._on_filesystem_relation_broken)
        framework.observe(self.on["volume"].storage_detaching, self._on_volume_storage_detaching)
        for event in (self.on.stop, self.on.remove):  # either may never come
            framework.observe(event, self._on_end)
        framework.observe(self.on.collect_unit_status, self._on_collect_unit_status)
        for name in actions.ACTIONS:
            framework.observe(self.on[name].action, self._on_action)

    def _reconcile(self, _: ops.EventBase) -> None:
        """Move this unit, and on the leader what it offers, to the desired state, whichever event woke it."""
        try:
            with self._explained():
                self._offer()
                volume, setting = self._verify()
                self._publish_room(setting.used_bytes)
                unable = relations.filesystem.unable(self, self._ledger())
                self._status = unable or Status(Level.ACTIVE, self._describe(volume))
        except StatusError as e:
            self._status = e.status
            if e.retry:
                wake.later(self.unit.name, self.charm_dir, 60)

    def _on_filesystem_relation_broken(self, event: ops.RelationBrokenEvent) -> None:
        with contextlib.suppress(StatusError):  # the peer relation may be removed first
            secret = self._ledger().secret()
            if secret is not None and self.unit.is_leader():
                secret.revoke(event.relation)

    def _on_volume_storage_detaching(self, _: ops.StorageDetachingEvent) -> None:
        if embedded.store.is_enabled(self.app.name) and not self.config["allow-removal"]:
            with embedded.users.refusing(self.app.name):
                if not self._ledger().pinned.may_move:
                    clients = [relation.app.name for relation in self.model.relations[relations.filesystem.ENDPOINT]]
                    embedded.users.await_none(self._program, self._settings(), clients, self._show_progress)
        embedded.store.stop(self.app.name)
        self._status = Status(Level.MAINTENANCE, "stopped, so that the storage can go")

    def _on_end(self, _: ops.EventBase) -> None:
        """Remove all of the application from this machine but the volume's data and backups; the unit goes anyway."""
        try:
            embedded.store.remove(self.app.name)
        except CommandError as e:
            _log.warning("%s", e)
        formatting.remove_program(self.app.name)
        maintenance.remove(self.app.name)

    def _on_action(self, event: ops.ActionEvent) -> None:
        action = actions.ACTIONS[action_name(event.handle.kind)]
        run_action(action, self._action_unit, event, within=self._explained())

    def _on_collect_unit_status(self, event: ops.CollectStatusEvent) -> None:
        if self._status is not None:
            event.add_status(ops.StatusBase.from_name(self._status.level, self._status.text))

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        """Turn what fails inside into a `StatusError`: waiting for what may pass by itself, else blocked."""

        def tell(_: Exception, text: str, *, passes: bool) -> StatusError:
            if passes:
                return StatusError(Level.WAITING, f"metadata engine: {text}", retry=True)
            return StatusError(Level.BLOCKED, text)

        return trouble.explained(self.app.name, tell, lasting=(formatting.VolumeError, embedded.store.StoreError))

    def _show_progress(self, text: str) -> None:
        self.unit.status = ops.MaintenanceStatus(text)

    def _describe(self, volume: Volume) -> str:
        pinned = self._ledger().pinned
        if pinned.mode == "external":
            return f"offering volume {volume.name}"
        if pinned.server == self.unit.name:
            numbers = embedded.store.usage(self._settings().directory).summary()
            return f"serving volume {volume.name} from this unit: {numbers}; for trials and small teams"
        return f"{pinned.server} serves volume {volume.name}; this unit has nothing to do"

    def _action_unit(self) -> actions.Unit:
        ledger, storages = self._ledger(), self.model.storages["volume"]
        pinned = ledger.pinned
        return actions.Unit(
            app=self.app.name,
            name=self.unit.name,
            leads=self.unit.is_leader(),
            program=self._program,
            uuid=pinned.uuid,
            directory=storages[0].location if pinned.server == self.unit.name and storages else None,
            verify=self._verify,
            access=self._access,
            pin=lambda uuid: ledger.pin(uuid=uuid),
        )

    def _offer(self) -> None:
        """Do what this unit has to do for the volume, in order."""
        ledger, leads = self._ledger(), self.unit.is_leader()
        if leads:
            relations.sources.Sources(self).request()
        wanted = self._wanted()
        is_new = leads and ledger.settle(embedded=wanted is None, unit=self.unit.name)
        pinned = ledger.pinned
        if pinned.mode == "external":
            embedded.store.ensure_none(self.app.name)
        juicefs.ensure_program(self._program, self._resource())
        self.unit.set_workload_version(juicefs.text(juicefs.version(self._program)))
        if wanted is None and leads:
            ledger.ensure_secret(embedded.store.passwords(self.app.name, None if is_new else ledger.credentials()))
        if wanted is None and pinned.server == self.unit.name:
            settings = self._settings()
            if not embedded.store.is_running(settings):
                self._show_progress("starting the servers of the volume")
            embedded.store.ensure(settings)
            ledger.publish_address(settings.address)
            if pinned.uuid is None:
                self._publish_room(0)
        if not leads:
            return
        volume, credentials, access = self._access()
        known = ledger.known(access.url, volume.name, adopt=str(self.config.get("adopt", "")))
        setting = formatting.ensure_formatted(self._program, volume, credentials, access, known=known)
        ledger.pin(uuid=setting.uuid, formatting=None)
        formatting.ensure_options(self._program, volume, access, setting)
        formatting.ensure_sticky_root(self._program, volume, access)
        secret, revision = ledger.ensure_secret(credentials) or (None, 0)
        named = (str(secret.id), revision) if secret is not None else None
        uri = formatting.published(volume, setting, self._program, named).uri()
        if relations.filesystem.publish(self, uri, secret):
            ledger.pin(offered="yes")

    def _verify(self) -> tuple[Volume, juicefs.Setting]:
        """Look at the volume without changing anything. Raises `StatusError` inside `_explained`."""
        volume, credentials, access = self._access()
        uuid = self._ledger().pinned.uuid
        if uuid is None:
            raise StatusError(Level.WAITING, "waiting for the leader to format the volume")
        known = formatting.Known(uuid)
        return volume, formatting.ensure_formatted(self._program, volume, credentials, access, known=known)

    def _access(self) -> tuple[Volume, fs.JuicefsSecret, juicefs_access.Access]:
        """Return the volume that should be there, its credentials, and how juicefs gets at it."""
        wanted, pinned = self._wanted(), self._ledger().pinned
        if wanted is None and pinned.server == self.unit.name and not embedded.store.is_running(self._settings()):
            raise StatusError(Level.MAINTENANCE, "starting the servers of the volume")
        volume, credentials = wanted or relations.sources.Sources(self).embedded(self._ledger())
        return volume, credentials, formatting.open_access(self._program, self.app.name, volume, credentials)

    def _wanted(self) -> tuple[Volume, fs.JuicefsSecret] | None:
        """Return the volume that options and relations name; None for an embedded one."""
        wanted, pinned = relations.sources.Sources(self).read(), self._ledger().pinned
        if pinned.mode not in (None, "embedded" if wanted is None else "external") and not pinned.may_move:
            text = f"this application's volume is {pinned.mode} for good: deploy another application"
            raise StatusError(Level.BLOCKED, f"metadata-url, bucket: {text}")
        return wanted

    def _publish_room(self, volume_bytes: int) -> None:
        """Publish what the volume may grow to, where this unit's disk holds it."""
        if self._ledger().pinned.server == self.unit.name:
            self._ledger().publish_room(embedded.store.usage(self._settings().directory).room_gib(volume_bytes))

    def _settings(self) -> embedded.store.Settings:
        """Return what this unit has to serve."""
        storages, credentials = self.model.storages["volume"], self._ledger().credentials()
        if not storages or credentials is None:
            raise StatusError(Level.WAITING, "waiting for storage and for the leader")
        address = relations.sources.address(self.model.get_binding(relations.filesystem.ENDPOINT).network)
        where = storages[0].location
        return embedded.store.Settings(self.app.name, address, where, credentials, bool(self.config["synchronous"]))

    def _ledger(self) -> Ledger:
        """Return what the application remembers."""
        relation = self.model.get_relation(PEERS)
        if relation is None:
            raise StatusError(Level.WAITING, "waiting for the peer relation")
        return Ledger(self, relation)

    def _resource(self) -> pathlib.Path | None:
        with contextlib.suppress(ops.ModelError):  # none was attached
            return self.model.resources.fetch("juicefs")
        return None


if __name__ == "__main__":
    ops.main(JuicefsServerProxyCharm)
