"""Plays Canonical's mysql 8.0 with Debian's MariaDB, as far as slurmdbd uses it."""

import secrets

import mariadb
import ops

_ENDPOINT = "database"


class MySQLCharm(ops.CharmBase):
    """The database."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.start, self._on_start)
        framework.observe(self.on[_ENDPOINT].relation_changed, self._on_database_requested)
        framework.observe(self.on.collect_unit_status, self._on_collect_status)

    def _on_install(self, _: ops.InstallEvent) -> None:
        self.unit.status = ops.MaintenanceStatus("installing MariaDB")
        mariadb.install()
        self.unit.set_workload_version(mariadb.version())
        self.unit.open_port("tcp", mariadb.PORT)

    def _on_start(self, _: ops.StartEvent) -> None:
        """Observed, so that the status is looked at after a boot."""

    def _on_database_requested(self, event: ops.RelationChangedEvent) -> None:
        """Make the database and the account once; the credentials are in a secret."""
        asked, given = event.relation.data[event.relation.app], event.relation.data[self.app]
        if not self.unit.is_leader() or not {"database", "requested-secrets"} <= asked.keys() or "endpoints" in given:
            return
        user, password = f"relation-{event.relation.id}", secrets.token_hex(12)
        mariadb.create(asked["database"], user, password)
        label = f"{event.relation.name}.{event.relation.id}.user.secret"
        secret = self.app.add_secret({"username": user, "password": password}, label=label)
        secret.grant(event.relation)
        assert secret.id is not None
        given["secret-user"] = secret.id
        binding = self.model.get_binding(event.relation)
        assert binding is not None
        given["endpoints"] = f"{binding.network.ingress_address}:{mariadb.PORT}"
        given["database"] = asked["database"]
        given["version"] = mariadb.version()

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if not self.unit.is_leader():
            event.add_status(ops.BlockedStatus("the sandbox plays one mysql unit only: remove this one"))
        if not mariadb.is_running():
            event.add_status(ops.WaitingStatus("waiting for MariaDB to start"))
        event.add_status(ops.ActiveStatus("Primary"))


if __name__ == "__main__":
    ops.main(MySQLCharm)
