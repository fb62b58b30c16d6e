#!/usr/bin/env python3
"""Offer a JuiceFS volume, in the user's own engine and bucket or on a unit of this charm."""

import contextlib
import logging

import ops

import embedded.store
import embedded.users
import metrics
from relations.application import Application
from relations.peers import PEERS
from relations.sources import CLIENTS, ENGINES, STORE
from slurm_ddp import exporter, juicefs, wake
from slurm_ddp.charm import Level, Status, StatusError, action_name, run_action, shown
from slurm_ddp.commands import CommandError
from slurm_ddp.interfaces import cos_agent
from volume import actions, formatting

logger = logging.getLogger(__name__)


class JuicefsServerProxyCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self._status: Status | None = None  # of this hook, if it looked
        peers, clients, *services = (self.on[name] for name in (PEERS, CLIENTS, *ENGINES, STORE))
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
            *(
                event
                for end in services
                for event in (end.relation_created, end.relation_changed, end.relation_broken)
            ),
        ):
            framework.observe(event, self._reconcile)
        for event in exporter.events(self.on):
            framework.observe(event, self._observe)
        framework.observe(clients.relation_broken, self._on_filesystem_relation_broken)
        framework.observe(self.on["volume"].storage_detaching, self._on_volume_storage_detaching)
        for event in (self.on.stop, self.on.remove):  # either may never come
            framework.observe(event, self._on_removed)
        framework.observe(self.on.collect_unit_status, self._on_collect_unit_status)
        for name in actions.ACTIONS:
            framework.observe(self.on[name].action, self._on_action)

    def _observe(self, _: ops.EventBase) -> None:
        """Serve metrics while a collector is related."""

        def serve(unit: str, topology: cos_agent.Topology) -> dict[str, str]:
            data: dict[str, str] = {}
            with self._explained():
                data.update(metrics.ensure(unit, topology, Application(self).target()))
            return data

        exporter.follow(self, serve)

    def _on_filesystem_relation_broken(self, event: ops.RelationBrokenEvent) -> None:
        with contextlib.suppress(StatusError):  # the peer relation may be removed first
            Application(self).revoke(event.relation)

    def _on_volume_storage_detaching(self, _: ops.StorageDetachingEvent) -> None:
        if embedded.store.is_enabled(self.app.name) and not self.config["allow-removal"]:
            try:
                Application(self).await_unmounted()
            except StatusError as e:  # then the servers cannot be asked
                problem = f"it is unknown who has the volume mounted ({e})"
                raise embedded.users.RemovalRefusedError(
                    self.app.name, problem, "resolve that"
                ) from e
        embedded.store.stop(self.app.name)
        self._status = Status(Level.MAINTENANCE, "stopped, so that the storage can go")

    def _on_removed(self, _: ops.EventBase) -> None:
        """Remove the application from this machine, except the volume's data and backups."""
        try:
            embedded.store.remove(self.app.name)
        except CommandError as e:
            logger.warning("%s", e)
        formatting.remove(self.app.name)
        exporter.ensure_none(self.unit.name)

    def _on_action(self, event: ops.ActionEvent) -> None:
        action = actions.ACTIONS[action_name(event.handle.kind)]
        run_action(action, lambda: Application(self), event, within=self._explained())

    def _reconcile(self, event: ops.EventBase) -> None:
        """Move this unit, and the leader's offers, to the desired state for any event."""
        try:
            with self._explained():
                self._status = Application(self).reconcile()
        except StatusError as e:
            self._status = e.status
            if e.retry:
                wake.later(self.unit.name, self.charm_dir)
        self._observe(event)

    def _on_collect_unit_status(self, event: ops.CollectStatusEvent) -> None:
        if self._status is not None:
            text = shown(self._status, self.unit.status.message)
            event.add_status(ops.StatusBase.from_name(self._status.level, text))

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        """Turn errors inside into a `StatusError`: Waiting if they may pass, or Blocked."""
        lasting = (formatting.VolumeError, embedded.store.StoreError)
        return juicefs.explained(self.app.name, lambda e: f"metadata engine: {e}", lasting=lasting)


if __name__ == "__main__":
    ops.main(JuicefsServerProxyCharm)
