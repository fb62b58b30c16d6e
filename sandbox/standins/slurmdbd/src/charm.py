"""Plays charmed-hpc's slurmdbd 25.11 with Debian's Slurm."""

import json
import logging
import socket

import accounting_daemon
import ops
import slurmutils
from common import charm, service, wire

from slurm_ddp.run import CommandError

logger = logging.getLogger(__name__)

_CONTROLLER = "slurmctld"
_DATABASE = "database"
_SERVICE = accounting_daemon.SERVICE


class SlurmdbdCharm(charm.Standin):
    """The accounting daemon."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        try:
            self._overrides = slurmutils.SlurmdbdConfig.from_str(str(self.config["slurmdbd-conf-parameters"]))
        except (slurmutils.ModelError, ValueError) as e:
            logger.error("slurmdbd-conf-parameters: %s", e)
            self.refuse(["slurmdbd-conf-parameters"])
            return
        self._stored.set_default(has_database=False)
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.config_changed, self._on_config_changed)
        framework.observe(self.on.update_status, self._on_update_status)
        framework.observe(self.on.secret_changed, self._on_secret_changed)
        framework.observe(self.on[_CONTROLLER].relation_changed, self._on_controller_changed)
        framework.observe(self.on[_DATABASE].relation_created, self._on_database_joined)
        framework.observe(self.on[_DATABASE].relation_changed, self._on_database_changed)
        framework.observe(self.on[_DATABASE].relation_broken, self._on_database_broken)

    @charm.refreshes
    def _on_install(self, event: ops.InstallEvent) -> None:
        if not self.unit.is_leader():
            raise charm.Stop(ops.BlockedStatus("slurmdbd has one unit only: remove this one"))
        self.unit.status = ops.MaintenanceStatus("installing slurmdbd")
        try:
            _SERVICE.install()
        except CommandError as e:
            logger.error("%s", e)
            event.defer()
            raise charm.Stop(ops.BlockedStatus(f"slurmdbd was not installed: {e}")) from e
        self.unit.set_workload_version(_SERVICE.version())
        self.unit.open_port("tcp", wire.SLURMDBD_PORT)

    @charm.leader_only
    @charm.refreshes
    def _on_config_changed(self, _: ops.ConfigChangedEvent) -> None:
        accounting_daemon.write_options(socket.gethostname(), self._address, self._overrides)
        self._reconfigure()

    @charm.leader_only
    @charm.refreshes
    def _on_update_status(self, _: ops.UpdateStatusEvent) -> None:
        """Look at the status only: what died is not started."""

    @charm.leader_only
    @charm.refreshes
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        if not event.relation.data[event.relation.app]:
            return
        charm.wait_unless(event, self._has_controller(), "waiting for slurmctld")
        charm.block_unless(event, _SERVICE.is_installed(), "slurmdbd is not installed")
        data = wire.read_controller(self, event.relation)
        _SERVICE.set_auth_key(data.auth_key, data.auth_key_id)
        _SERVICE.set_jwt_key(data.jwt_key)
        self._reconfigure()

    @charm.refreshes
    def _on_secret_changed(self, event: ops.SecretChangedEvent) -> None:
        charm.block_unless(event, _SERVICE.is_installed(), "slurmdbd is not installed")
        if event.secret.label not in (wire.AUTH_LABEL, wire.JWT_LABEL):
            return
        content = event.secret.get_content(refresh=True)
        if event.secret.label == wire.AUTH_LABEL:
            _SERVICE.set_auth_key(content["key"], content["keyid"])
        else:
            _SERVICE.set_jwt_key(content["key"])
        service.systemctl("restart", _SERVICE.name)

    def _on_database_joined(self, event: ops.RelationCreatedEvent) -> None:
        """Ask for the database, with its credentials in a secret, as the data platform's library does."""
        if self.unit.is_leader():
            secrets = ["username", "password", "tls", "tls-ca", "uris"]
            event.relation.data[self.app].update(
                {"database": accounting_daemon.DATABASE, "requested-secrets": json.dumps(secrets)}
            )

    @charm.leader_only
    @charm.refreshes
    def _on_database_changed(self, event: ops.RelationChangedEvent) -> None:
        """Take the database when its credentials appear; later changes, of the address too, are nobody's business."""
        credentials = self._credentials(event.relation)
        if not credentials or self._stored.has_database:
            return
        endpoints = event.relation.data[event.relation.app].get("endpoints", "")
        endpoint = next((word.strip() for word in endpoints.split(",") if word.strip()), "")
        if not endpoint:
            self.unit.status = ops.BlockedStatus("the database has no endpoints")
            raise ValueError(f"the database has no endpoints: {endpoints!r}")
        accounting_daemon.write_storage(*credentials, endpoint)
        self._stored.has_database = True
        self._reconfigure()

    def _on_database_broken(self, _: ops.RelationBrokenEvent) -> None:
        self._stored.has_database = False

    def check(self) -> ops.StatusBase:
        """Return what keeps slurmdbd from running."""
        if not _SERVICE.is_installed():
            return ops.BlockedStatus("slurmdbd is not installed")
        missing = [endpoint for endpoint in (_CONTROLLER, _DATABASE) if not self.model.relations[endpoint]]
        if missing:
            return ops.BlockedStatus(f"waiting for relations: {', '.join(missing)}")
        if not _SERVICE.is_active():
            return ops.WaitingStatus("waiting for slurmdbd to start")
        return ops.ActiveStatus()

    def _reconfigure(self) -> None:
        """Start slurmdbd with what is known and tell slurmctld where it is. Raises `Stop`."""
        has_database = any(self._credentials(relation) for relation in self.model.relations[_DATABASE])
        has_keys = _SERVICE.auth_key_path.exists() and _SERVICE.jwt_key_path.exists()
        if not (self._has_controller() and has_database and has_keys):
            return
        try:
            accounting_daemon.merge_and_restart()
        except service.SlurmError as e:
            logger.error("%s", e)
            message = f"slurmdbd was not reconfigured; see juju debug-log: {e}"
            raise charm.Stop(ops.BlockedStatus(message[:200])) from e
        for relation in self.model.relations[_CONTROLLER]:
            relation.data[self.app]["hostname"] = json.dumps(self._address)

    def _has_controller(self) -> bool:
        return wire.controller_ready(self.model, _CONTROLLER, "auth_secret_id", "jwt_secret_id")

    def _credentials(self, relation: ops.Relation) -> tuple[str, str] | None:
        """Return user and password, from the provider's secret or, of an old one, from its databag."""
        data = relation.data[relation.app]
        content: dict[str, str] = dict(data)
        if "secret-user" in data:
            label = f"{relation.name}.{relation.id}.user.secret"
            content = self.model.get_secret(id=data["secret-user"], label=label).get_content()
        user, password = content.get("username"), content.get("password")
        return (user, password) if user and password else None

    @property
    def _address(self) -> str:
        binding = self.model.get_binding("slurmdbd-peer")
        assert binding is not None
        return str(binding.network.ingress_address)


if __name__ == "__main__":
    ops.main(SlurmdbdCharm)
