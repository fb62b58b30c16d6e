#!/usr/bin/env python3
"""Offers a JuiceFS volume, which lies in a metadata engine and a bucket of the user's, or on a unit of this charm."""

import contextlib
import pathlib

import ops
import pydantic

import embedded_store
import juicefs_volume
from slurm_ddp import juicefs
from slurm_ddp.interfaces import filesystem_info as fs
from volume_ledger import PEERS, Ledger
from volume_trouble import TroubleError, explained


class Config(pydantic.BaseModel, frozen=True, arbitrary_types_allowed=True):
    """The options. `metadata_url` and `bucket` are both set, or the volume is embedded: a unit serves it itself."""

    volume_name: str
    storage_type: str
    synchronous: bool
    metadata_url: str = ""
    bucket: str = ""
    credentials: ops.Secret | None = None


class JuicefsServerProxyCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        peers, filesystem = self.on[PEERS], self.on["filesystem"]
        self._program = juicefs_volume.program_path(self.app.name)
        self._status: ops.StatusBase | None = None  # of this hook, if it looked
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
            filesystem.relation_joined,
        ):
            framework.observe(event, self._reconcile)
        framework.observe(filesystem.relation_broken, self._on_filesystem_relation_broken)
        framework.observe(self.on["volume"].storage_detaching, self._on_volume_storage_detaching)
        framework.observe(self.on.remove, self._on_remove)
        framework.observe(self.on["status"].action, self._on_status_action)
        framework.observe(self.on.collect_unit_status, self._on_collect_unit_status)

    def _reconcile(self, _: ops.EventBase) -> None:
        """Move this unit, and on the leader what it offers, to the desired state, whichever event woke it."""
        try:
            with explained(self.app.name):
                self._offer()
                volume = self._verify()[0]
                self._status = ops.ActiveStatus(self._describe(volume))
        except TroubleError as e:
            self._status = e.status

    def _on_filesystem_relation_broken(self, event: ops.RelationBrokenEvent) -> None:
        with contextlib.suppress(TroubleError):  # the peer relation may be gone first
            secret = self._ledger().secret()
            if secret is not None and self.unit.is_leader():
                secret.revoke(event.relation)

    def _on_volume_storage_detaching(self, _: ops.StorageDetachingEvent) -> None:
        embedded_store.stop(self.app.name)
        self._status = ops.MaintenanceStatus("stopped, so that the storage can go")

    def _on_remove(self, _: ops.RemoveEvent) -> None:
        embedded_store.remove(self.app.name)
        juicefs_volume.remove_program(self.app.name)

    def _on_status_action(self, event: ops.ActionEvent) -> None:
        try:
            with explained(self.app.name):
                volume, setting = self._verify()
                event.set_results(juicefs_volume.describe(volume, setting, self._program))
        except TroubleError as e:
            event.fail(e.status.message)

    def _on_collect_unit_status(self, event: ops.CollectStatusEvent) -> None:
        if self._status is not None:
            event.add_status(self._status)

    def _describe(self, volume: juicefs_volume.Volume) -> str:
        pinned = self._ledger().pinned
        if pinned.mode == "external":
            return f"offering volume {volume.name}"
        if pinned.server == self.unit.name:
            return f"serving volume {volume.name} from this unit: for trials and small teams"
        return f"{pinned.server} serves volume {volume.name}; this unit has nothing to do"

    def _offer(self) -> None:
        """Do what this unit has to do for the volume, in order."""
        wanted, ledger, leads = self._wanted(), self._ledger(), self.unit.is_leader()
        if leads and ledger.pinned.mode is None:
            server = self.unit.name if wanted is None else None
            ledger.pin(mode="embedded" if wanted is None else "external", server=server)
        juicefs.ensure_program(self._program, self._resource())
        self.unit.set_workload_version(".".join(map(str, juicefs.version(self._program))))
        if wanted is None and leads:
            ledger.ensure_secret(embedded_store.with_passwords(ledger.credentials()))
        if wanted is None and ledger.pinned.server == self.unit.name:
            settings = self._settings()
            if not embedded_store.is_running(settings):
                self.unit.status = ops.MaintenanceStatus("starting the servers of the volume")
            embedded_store.ensure(settings)
            ledger.tell_address(settings.address)
        if not leads:
            return
        volume, credentials = wanted or self._embedded()
        setting = juicefs_volume.ensure_formatted(self._program, volume, credentials, uuid=ledger.pinned.uuid)
        ledger.pin(uuid=setting.uuid)
        owned = ledger.ensure_secret(credentials)
        named = (str(owned[0].id), owned[1]) if owned is not None else None
        uri = juicefs_volume.published(volume, setting, self._program, named).uri()
        for relation in self.model.relations["filesystem"]:
            if owned is not None:
                owned[0].grant(relation)
            relation.data[self.app][fs.KEY] = uri

    def _verify(self) -> tuple[juicefs_volume.Volume, juicefs.Setting]:
        """Look at the volume without changing anything."""
        wanted, pinned = self._wanted(), self._ledger().pinned
        if wanted is None and pinned.server == self.unit.name and not embedded_store.is_running(self._settings()):
            raise TroubleError(ops.MaintenanceStatus("starting the servers of the volume"))
        volume, credentials = wanted or self._embedded()
        if pinned.uuid is None:
            raise TroubleError(ops.WaitingStatus("waiting for the leader to format the volume"))
        return volume, juicefs_volume.ensure_formatted(self._program, volume, credentials, uuid=pinned.uuid)

    def _wanted(self) -> tuple[juicefs_volume.Volume, fs.JuicefsSecret] | None:
        """Return the volume and the credentials that the options name; None for an embedded volume."""
        config, mode = self.load_config(Config), self._ledger().pinned.mode
        try:
            content = config.credentials.get_content(refresh=True) if config.credentials is not None else None
            wanted = juicefs_volume.read_options(
                config.volume_name, config.metadata_url, config.storage_type, config.bucket, content
            )
        except ops.ModelError:  # no such secret, or not for us
            text = f"credentials: no access to the secret: juju grant-secret SECRET {self.app.name}"
            raise TroubleError(ops.BlockedStatus(text)) from None
        except ValueError as e:
            raise TroubleError(ops.BlockedStatus(str(e))) from e
        if mode is not None and (mode == "external") != (wanted is not None):
            text = f"metadata-url, bucket: this application's volume is {mode} for good: deploy another application"
            raise TroubleError(ops.BlockedStatus(text))
        return wanted

    def _embedded(self) -> tuple[juicefs_volume.Volume, fs.JuicefsSecret]:
        """Return the volume that a unit serves, and its credentials."""
        ledger = self._ledger()
        server = ledger.pinned.server
        try:
            address, credentials = ledger.address(), ledger.credentials()
        except KeyError:
            text = f"{server}, whose storage holds the volume, is gone: deploy another application"
            raise TroubleError(ops.BlockedStatus(text)) from None
        if address is None or credentials is None:
            raise TroubleError(ops.WaitingStatus(f"waiting for {server or 'the leader'} to serve the volume"))
        return embedded_store.volume(self.load_config(Config).volume_name, address), credentials

    def _settings(self) -> embedded_store.Settings:
        """Return what this unit has to serve."""
        storages, credentials = self.model.storages["volume"], self._ledger().credentials()
        if not storages or credentials is None:
            raise TroubleError(ops.WaitingStatus("waiting for storage and for the leader"))
        address = str(self.model.get_binding("filesystem").network.ingress_address)
        synchronous = self.load_config(Config).synchronous
        return embedded_store.Settings(self.app.name, address, storages[0].location, credentials, synchronous)

    def _ledger(self) -> Ledger:
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
