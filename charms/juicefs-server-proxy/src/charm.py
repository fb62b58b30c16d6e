#!/usr/bin/env python3
"""Offers a JuiceFS volume, which lies in a metadata engine and a bucket of the user's, or on a unit of this charm."""

import contextlib
import pathlib

import ops

import embedded_store
import juicefs_volume
import volume_actions
import volume_maintenance
import volume_sources
import volume_users
from slurm_ddp import juicefs, juicefs_access, wake
from slurm_ddp.interfaces import filesystem_info as fs
from volume_ledger import PEERS, Ledger
from volume_options import Volume
from volume_trouble import TroubleError, explained


class JuicefsServerProxyCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        peers, filesystem = self.on[PEERS], self.on["filesystem"]
        self.program = juicefs_volume.program_path(self.app.name)
        self._status: ops.StatusBase | None = None  # of this hook, if it looked
        services = [self.on[name] for name in (*volume_sources.ENGINES, volume_sources.STORE)]
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
        for name in volume_actions.ACTIONS:
            framework.observe(self.on[name].action, self._on_action)

    def _reconcile(self, _: ops.EventBase) -> None:
        """Move this unit, and on the leader what it offers, to the desired state, whichever event woke it."""
        try:
            with explained(self.app.name):
                self._offer()
                volume, setting = self.verify()
                self._tell_room(setting.used_bytes)
                self._status = volume_users.unable(self, self.ledger()) or ops.ActiveStatus(self._describe(volume))
        except TroubleError as e:
            self._status = e.status
            if e.passes:
                wake.later(self.unit.name, self.charm_dir, 60)

    def _on_filesystem_relation_broken(self, event: ops.RelationBrokenEvent) -> None:
        with contextlib.suppress(TroubleError):  # the peer relation may be gone first
            secret = self.ledger().secret()
            if secret is not None and self.unit.is_leader():
                secret.revoke(event.relation)

    def _on_volume_storage_detaching(self, _: ops.StorageDetachingEvent) -> None:
        if embedded_store.is_enabled(self.app.name) and not self.config["allow-removal"]:
            with volume_users.refusing(self.app.name):
                if not self.ledger().pinned.may_move:
                    volume_users.await_none(self.model, self.program, self._settings())
        embedded_store.stop(self.app.name)
        self._status = ops.MaintenanceStatus("stopped, so that the storage can go")

    def _on_end(self, _: ops.EventBase) -> None:
        volume_maintenance.remove(self.app.name)

    def _on_action(self, event: ops.ActionEvent) -> None:
        volume_actions.run(self, event)

    def _on_collect_unit_status(self, event: ops.CollectStatusEvent) -> None:
        if self._status is not None:
            event.add_status(self._status)

    def _describe(self, volume: Volume) -> str:
        pinned = self.ledger().pinned
        if pinned.mode == "external":
            return f"offering volume {volume.name}"
        if pinned.server == self.unit.name:
            numbers = embedded_store.usage(self._settings().directory).summary()
            return f"serving volume {volume.name} from this unit: {numbers}; for trials and small teams"
        return f"{pinned.server} serves volume {volume.name}; this unit has nothing to do"

    def _offer(self) -> None:
        """Do what this unit has to do for the volume, in order."""
        ledger, leads = self.ledger(), self.unit.is_leader()
        sources = volume_sources.Sources(self)
        if leads:
            sources.request()
        wanted = self._wanted()
        is_new = leads and ledger.settle(embedded=wanted is None, unit=self.unit.name)
        pinned = ledger.pinned
        if pinned.mode == "external":
            embedded_store.ensure_none(self.app.name)
        juicefs.ensure_program(self.program, self._resource())
        self.unit.set_workload_version(juicefs.text(juicefs.version(self.program)))
        if wanted is None and leads:
            ledger.ensure_secret(embedded_store.passwords(self.app.name, None if is_new else ledger.credentials()))
        if wanted is None and pinned.server == self.unit.name:
            settings = self._settings()
            if not embedded_store.is_running(settings):
                self.unit.status = ops.MaintenanceStatus("starting the servers of the volume")
            embedded_store.ensure(settings)
            ledger.tell_address(settings.address)
            if pinned.uuid is None:
                self._tell_room(0)
        if not leads:
            return
        volume, credentials, access = self.access()
        known = ledger.known(access.url, volume.name, adopt=str(self.config.get("adopt", "")))
        setting = juicefs_volume.ensure_formatted(self.program, volume, credentials, access, known=known)
        ledger.pin(uuid=setting.uuid, formatting=None)
        juicefs_volume.ensure_options(self.program, volume, access, setting)
        juicefs_volume.ensure_sticky_root(self.program, volume, access)
        owned = ledger.ensure_secret(credentials)
        named = (str(owned[0].id), owned[1]) if owned is not None else None
        uri = juicefs_volume.published(volume, setting, self.program, named).uri()
        for relation in self.model.relations["filesystem"]:
            if owned is not None:
                owned[0].grant(relation)
            relation.data[self.app][fs.KEY] = uri
            ledger.pin(offered="yes")

    def verify(self) -> tuple[Volume, juicefs.Setting]:
        """Look at the volume without changing anything. Raises `TroubleError` inside `explained`."""
        volume, credentials, access = self.access()
        uuid = self.ledger().pinned.uuid
        if uuid is None:
            raise TroubleError(ops.WaitingStatus("waiting for the leader to format the volume"))
        known = juicefs_volume.Known(uuid)
        return volume, juicefs_volume.ensure_formatted(self.program, volume, credentials, access, known=known)

    def access(self) -> tuple[Volume, fs.JuicefsSecret, juicefs_access.Access]:
        """Return the volume that should be there, its credentials, and how juicefs gets at it."""
        wanted, pinned = self._wanted(), self.ledger().pinned
        if wanted is None and pinned.server == self.unit.name and not embedded_store.is_running(self._settings()):
            raise TroubleError(ops.MaintenanceStatus("starting the servers of the volume"))
        volume, credentials = wanted or volume_sources.Sources(self).embedded(self.ledger())
        return volume, credentials, juicefs_volume.open_access(self.program, self.app.name, volume, credentials)

    def _wanted(self) -> tuple[Volume, fs.JuicefsSecret] | None:
        """Return the volume that options and relations name; None for an embedded one."""
        wanted, pinned = volume_sources.Sources(self).read(), self.ledger().pinned
        if pinned.mode not in (None, "embedded" if wanted is None else "external") and not pinned.may_move:
            text = (
                f"metadata-url, bucket: this application's volume is {pinned.mode} for good: deploy another application"
            )
            raise TroubleError(ops.BlockedStatus(text))
        return wanted

    def _tell_room(self, volume_bytes: int) -> None:
        """Tell what the volume may grow to, where this unit's disk holds it."""
        if self.ledger().pinned.server == self.unit.name:
            self.ledger().tell_room(embedded_store.usage(self._settings().directory).room_gib(volume_bytes))

    def _settings(self) -> embedded_store.Settings:
        """Return what this unit has to serve."""
        storages, credentials = self.model.storages["volume"], self.ledger().credentials()
        if not storages or credentials is None:
            raise TroubleError(ops.WaitingStatus("waiting for storage and for the leader"))
        address = volume_sources.address(self.model.get_binding("filesystem").network)
        where = storages[0].location
        return embedded_store.Settings(self.app.name, address, where, credentials, bool(self.config["synchronous"]))

    def ledger(self) -> Ledger:
        """Return what the application remembers."""
        relation = self.model.get_relation(PEERS)
        if relation is None:
            raise TroubleError(ops.WaitingStatus("waiting for the peer relation"))
        return Ledger(self, relation)

    def _resource(self) -> pathlib.Path | None:
        with contextlib.suppress(ops.ModelError):  # none was attached
            return self.model.resources.fetch("juicefs")
        return None


if __name__ == "__main__":
    ops.main(JuicefsServerProxyCharm)
