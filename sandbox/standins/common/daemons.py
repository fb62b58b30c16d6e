"""The common part of the daemons' charms: installation, keys, the controller's databag, status."""

import dataclasses
import json
import logging
import typing

import ops

from common import charm, service, wire
from slurm_ddp.commands import CommandError

logger = logging.getLogger(__name__)


class Daemon(charm.Standin):
    """A charm that runs one of Slurm's daemons."""

    daemon: typing.ClassVar[service.Service]

    def observe_daemon(self) -> None:
        """Observe the events that every one of these charms handles."""
        self.framework.observe(self.on.install, self._on_install)
        self.framework.observe(self.on.update_status, self.look)
        self.framework.observe(self.on.secret_changed, self._on_secret_changed)

    @charm.refreshes
    def _on_install(self, event: ops.InstallEvent) -> None:
        raise NotImplementedError

    def install(self, event: ops.InstallEvent, *ports: int) -> None:
        """Install the daemon and open its ports; on failure defer the event and block.

        Raises `Stop`.
        """
        self.unit.status = ops.MaintenanceStatus(f"installing {self.daemon.name}")
        try:
            self.daemon.install()
        except CommandError as e:
            logger.error("%s", e)
            event.defer()
            raise charm.Stop(ops.BlockedStatus(f"{self.daemon.name} was not installed: {e}")) from e
        for port in ports:
            self.unit.open_port("tcp", port)
        self.unit.set_workload_version(self.daemon.version())

    @charm.refreshes
    def look(self, _: ops.UpdateStatusEvent) -> None:
        """Look at the status only: what died is not started."""

    @charm.refreshes
    def _on_secret_changed(self, event: ops.SecretChangedEvent) -> None:
        """Take a rotated key of auth/slurm."""
        if event.secret.label != wire.AUTH_LABEL:
            return
        content = event.secret.get_content(refresh=True)
        self.daemon.set_auth_key(content["key"], content["keyid"])
        self.read_key_again(event)

    def read_key_again(self, event: ops.SecretChangedEvent) -> None:  # noqa: ARG002 - others defer it
        """Restart the daemon, since no reload reads its key. A systemd error is a hook error."""
        service.systemctl("restart", self.daemon.name)

    def reload(self, event: ops.EventBase) -> None:
        """Reload the daemon, which keeps jobs running; on failure defer and block.

        Raises `Stop`.
        """
        try:
            self.daemon.reload()
        except service.SlurmError as e:
            event.defer()
            raise self.failed("reloaded", e) from e

    def failed(self, what: str, error: Exception) -> charm.Stop:
        """Log the error; return what ends the handler with a status that names the failure."""
        logger.error("%s", error)
        text = f"{self.daemon.name} was not {what}; see juju debug-log: {error}"
        return charm.Stop(ops.BlockedStatus(text[:200]))

    def check(self) -> ops.StatusBase:
        """Return the reason why the daemon cannot run."""
        if not self.daemon.is_installed():
            return ops.BlockedStatus(f"{self.daemon.name} is not installed")
        lack = self.lacks_relations()
        if lack:
            return ops.BlockedStatus(lack)
        if not self.daemon.is_active():
            return ops.WaitingStatus(f"waiting for {self.daemon.name} to start")
        return ops.ActiveStatus()

    def lacks_relations(self) -> str:
        """Return the status for a missing relation, or ""."""
        if self.model.relations["slurmctld"]:
            return ""
        return f"add a controller: juju integrate {self.app.name}:slurmctld slurmctld"

    def read_controller(
        self, event: ops.RelationChangedEvent, *keys: str
    ) -> wire.ControllerData | None:
        """Store the controller's key and return its published data, or None before there is any.

        The keys are from the secret revisions that this unit tracks. If one of `keys` is missing,
        the event is deferred. Raises `Stop`.
        """
        bag = event.relation.data[event.relation.app]
        if not bag:
            return None
        ready = wire.controller_ready(self.model, event.relation.name, *keys)
        charm.wait_unless(event, ready, "waiting for slurmctld")
        names = [field.name for field in dataclasses.fields(wire.ControllerData)]
        data = wire.ControllerData(**{name: json.loads(bag[name]) for name in names if name in bag})
        # secret-changed recognises the secrets by these labels
        content = self.model.get_secret(id=data.auth_secret_id, label=wire.AUTH_LABEL).get_content()
        self.daemon.set_auth_key(content["key"], content["keyid"])
        if data.jwt_secret_id:
            content = self.model.get_secret(
                id=data.jwt_secret_id, label=wire.JWT_LABEL
            ).get_content()
            data = dataclasses.replace(data, jwt_key=content["key"])
        return data


class Client(Daemon):
    """A daemon of one controller, which it gets over the endpoint `slurmctld`."""

    def observe_daemon(self) -> None:
        """Observe the controller, too."""
        super().observe_daemon()
        relation = self.on["slurmctld"]
        self.framework.observe(relation.relation_changed, self._on_controller_changed)
        self.framework.observe(relation.relation_departed, self.note_departing)
        self.framework.observe(relation.relation_broken, self._on_controller_broken)

    @charm.refreshes
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        raise NotImplementedError

    @charm.refreshes
    def _on_controller_broken(self, _: ops.RelationBrokenEvent) -> None:
        if not self._stored.departing:
            self.daemon.stop_and_disable()
