#!/usr/bin/env python3
"""Offers a JuiceFS volume, which lies in a metadata engine and a bucket of the user's, or on a unit of this charm."""

import contextlib
import logging

import ops

import embedded.store
import embedded.users
import metrics
from relations import filesystem
from relations.filesystem import ENDPOINT
from relations.peers import PEERS, Ledger
from relations.sources import ENGINES, STORE, Sources
from slurm_ddp import exporter, juicefs, wake
from slurm_ddp.charm import Level, Status, StatusError, action_name, run_action
from slurm_ddp.interfaces import cos_agent
from slurm_ddp.run import CommandError
from volume import actions, formatting, messages
from volume.target import Target, Unit, install, open_target

_log = logging.getLogger(__name__)
_AGAIN_S = 60  # until what no event of Juju's announces is tried again


class JuicefsServerProxyCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self._status: Status | None = None  # of this hook, if it looked
        peers, clients, *services = (self.on[name] for name in (PEERS, ENDPOINT, *ENGINES, STORE))
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
            clients.relation_created,
            clients.relation_changed,
            *(event for end in services for event in (end.relation_created, end.relation_changed, end.relation_broken)),
        ):
            framework.observe(event, self._reconcile)
        for event in exporter.events(self.on):
            framework.observe(event, self._observe)
        framework.observe(clients.relation_broken, self._on_filesystem_relation_broken)
        framework.observe(self.on["volume"].storage_detaching, self._on_volume_storage_detaching)
        for event in (self.on.stop, self.on.remove):  # either may never come
            framework.observe(event, self._on_end)
        framework.observe(self.on.collect_unit_status, self._on_collect_unit_status)
        for name in actions.ACTIONS:
            framework.observe(self.on[name].action, self._on_action)

    def _reconcile(self, event: ops.EventBase) -> None:
        """Move this unit, and on the leader what it offers, to the desired state, whichever event woke it."""
        try:
            with self._explained():
                settings = self._serve()
                if self.unit.is_leader():
                    self._offer()
                target, setting = self._verify()
                text = self._describe(target.volume.name, settings, setting.used_bytes)
                self._status = filesystem.unable(self, Ledger(self)) or Status(Level.ACTIVE, text)
        except StatusError as e:
            self._status = e.status
            if e.retry:
                wake.later(self.unit.name, self.charm_dir, _AGAIN_S)
        self._observe(event)

    def _observe(self, _: ops.EventBase) -> None:
        """Serve metrics while a collector is related."""

        def serve(unit: str, topology: cos_agent.Topology) -> dict[str, str]:
            data: dict[str, str] = {}
            with self._explained():
                data.update(metrics.ensure(unit, topology, self._target()))
            return data

        exporter.follow(self, serve)

    def _serve(self) -> embedded.store.Settings | None:
        """Settle on the leader what the volume is, install juicefs, and serve the volume where it is this unit's."""
        ledger, sources, leads = Ledger(self), Sources(self), self.unit.is_leader()
        if leads:
            sources.request()
        is_embedded = sources.external(ledger) is None
        is_new = leads and ledger.settle(embedded=is_embedded)
        if ledger.pinned.mode == "external":
            embedded.store.ensure_none(self.app.name)
            ledger.withdraw()
        self.unit.set_workload_version(install(self.app.name, sources.program()))
        if is_embedded and leads:
            known = None if is_new else ledger.credentials()
            ledger.ensure_secret(embedded.store.passwords(self.app.name, known))
        if not is_embedded or not ledger.is_server:
            return None
        settings = sources.settings(ledger)
        if not embedded.store.is_running(settings):
            self._show_progress(messages.STARTING)
        embedded.store.ensure(settings)
        ledger.publish_address(settings.address)
        if ledger.pinned.uuid is None:
            ledger.publish_room(embedded.store.usage(settings.directory).room_gib(0))
        return settings

    def _offer(self) -> None:
        """Format the volume if there is none, make it have its options, and publish it."""
        ledger, target = Ledger(self), self._target()
        known = ledger.known(target.access.url, target.volume.name, adopt=Sources(self).config.adopt)
        setting = formatting.ensure_formatted(target, known)
        ledger.pin(uuid=setting.uuid, formatting=None)
        formatting.ensure_options(target, setting)
        formatting.ensure_sticky_root(target)
        secret, revision = ledger.ensure_secret(target.credentials)
        uri = formatting.published(target, setting, (secret.id if secret else None, revision)).uri()
        if filesystem.publish(self, uri, secret):
            ledger.pin(offered="yes")

    def _verify(self) -> tuple[Target, juicefs.Setting]:
        """Look at the volume without changing anything. Raises `StatusError` inside `_explained`."""
        target, uuid = self._target(), Ledger(self).pinned.uuid
        if uuid is None:
            raise StatusError(Level.WAITING, messages.UNFORMATTED)
        return target, formatting.ensure_formatted(target, formatting.Known(uuid))

    def _target(self) -> Target:
        """Open the volume that should be there."""
        ledger, sources = Ledger(self), Sources(self)
        wanted = sources.external(ledger)
        if wanted is None and ledger.is_server and not embedded.store.is_running(sources.settings(ledger)):
            raise StatusError(Level.MAINTENANCE, messages.STARTING)
        return open_target(self.app.name, *(wanted or sources.served(ledger)))

    def _describe(self, name: str, settings: embedded.store.Settings | None, used_bytes: int) -> str:
        """Describe what this unit does; where its disk holds the volume, publish what that may grow to."""
        ledger = Ledger(self)
        if settings is None:
            text = messages.OFFERING if ledger.pinned.mode == "external" else messages.STANDBY
            return text.format(name=name, server=ledger.pinned.server)
        usage = embedded.store.usage(settings.directory)
        ledger.publish_room(usage.room_gib(used_bytes))
        return messages.SERVING.format(name=name, usage=usage.summary())

    def _on_filesystem_relation_broken(self, event: ops.RelationBrokenEvent) -> None:
        with contextlib.suppress(StatusError):  # the peer relation may be removed first
            secret = Ledger(self).secret()
            if secret is not None and self.unit.is_leader():
                secret.revoke(event.relation)

    def _on_volume_storage_detaching(self, _: ops.StorageDetachingEvent) -> None:
        if embedded.store.is_enabled(self.app.name) and not self.config["allow-removal"]:
            try:
                ledger = Ledger(self)
                if not ledger.pinned.may_move:
                    clients = [relation.app.name for relation in self.model.relations[ENDPOINT]]
                    embedded.users.await_none(Sources(self).settings(ledger), clients, self._show_progress)
            except StatusError as e:  # then the servers cannot be asked
                problem = messages.UNKNOWN_CLIENTS.format(problem=e)
                raise embedded.users.RemovalRefusedError(self.app.name, problem, "resolve that") from e
        embedded.store.stop(self.app.name)
        self._status = Status(Level.MAINTENANCE, messages.STOPPED)

    def _on_end(self, _: ops.EventBase) -> None:
        """Remove all of the application from this machine but the volume's data and backups, on the unit's removal."""
        try:
            embedded.store.remove(self.app.name)
        except CommandError as e:
            _log.warning("%s", e)
        formatting.remove(self.app.name)
        exporter.ensure_none(self.unit.name)

    def _on_action(self, event: ops.ActionEvent) -> None:
        action = actions.ACTIONS[action_name(event.handle.kind)]
        run_action(action, self._action_unit, event, within=self._explained())

    def _action_unit(self) -> Unit:
        return Unit(
            name=self.unit.name,
            leads=self.unit.is_leader(),
            uuid=Ledger(self).pinned.uuid,
            target=self._target,
            verify=self._verify,
            storage=self._describe_storage,
            pin=lambda uuid: Ledger(self).pin(uuid=uuid),
        )

    def _describe_storage(self) -> dict[str, str]:
        ledger = Ledger(self)
        return embedded.store.describe(Sources(self).settings(ledger).directory) if ledger.is_server else {}

    def _on_collect_unit_status(self, event: ops.CollectStatusEvent) -> None:
        if self._status is not None:
            event.add_status(ops.StatusBase.from_name(self._status.level, self._status.text))

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        """Turn what fails inside into a `StatusError`: waiting for what may pass by itself, else blocked."""

        def explain(_: Exception, text: str, passes: bool) -> StatusError:
            if passes:
                return StatusError(Level.WAITING, messages.ENGINE.format(problem=text), retry=True)
            return StatusError(Level.BLOCKED, text)

        return juicefs.explained(self.app.name, explain, lasting=(formatting.VolumeError, embedded.store.StoreError))

    def _show_progress(self, text: str) -> None:
        self.unit.status = ops.MaintenanceStatus(text)


if __name__ == "__main__":
    ops.main(JuicefsServerProxyCharm)
