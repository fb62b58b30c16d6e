"""Plays Canonical's mysql 8.0 with Debian's MariaDB, as far as slurmdbd uses it."""

import pathlib
import secrets

import ops

from slurm_ddp import apt, files, systemd
from slurm_ddp.commands import run

_ENDPOINT = "database"
_SERVICE = "mariadb.service"
_PORT = 3306
_CONFIG = pathlib.Path("/etc/mysql/mariadb.conf.d/60-sandbox.cnf")
# Clients are known by address alone: no machine of a model resolves another. 20 MB is what
# `profile=testing` takes.
_SETTINGS = "[mariadbd]\nbind-address = 0.0.0.0\nskip-name-resolve\ninnodb_buffer_pool_size = 20M\n"


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
        files.ensure_file(_CONFIG, _SETTINGS)
        apt.ensure_packages(("mariadb-server",))
        systemd.enable_now(_SERVICE)
        self.unit.set_workload_version(_version())
        self.unit.open_port("tcp", _PORT)

    def _on_start(self, _: ops.StartEvent) -> None:
        """Observed, so that the status is looked at after a boot."""

    def _on_database_requested(self, event: ops.RelationChangedEvent) -> None:
        """Make the database and the account once; the credentials are in a secret."""
        asked, given = event.relation.data[event.relation.app], event.relation.data[self.app]
        if (
            not self.unit.is_leader()
            or not {"database", "requested-secrets"} <= asked.keys()
            or "endpoints" in given
        ):
            return
        user, password = f"relation-{event.relation.id}", secrets.token_hex(12)
        _create(asked["database"], user, password)
        label = f"{event.relation.name}.{event.relation.id}.user.secret"
        secret = self.app.add_secret({"username": user, "password": password}, label=label)
        secret.grant(event.relation)
        assert secret.id is not None
        given["secret-user"] = secret.id
        binding = self.model.get_binding(event.relation)
        assert binding is not None
        given["endpoints"] = f"{binding.network.ingress_address}:{_PORT}"
        given["database"] = asked["database"]
        given["version"] = _version()

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if not self.unit.is_leader():
            event.add_status(
                ops.BlockedStatus("the sandbox plays one mysql unit only: remove this one")
            )
        if not systemd.is_active(_SERVICE):
            event.add_status(ops.WaitingStatus("waiting for MariaDB to start"))
        event.add_status(ops.ActiveStatus("Primary"))


def _version() -> str:
    """Return the server's version, such as 10.11.6."""
    return _sql("SELECT VERSION();").partition("-")[0].strip()


def _create(database: str, user: str, password: str) -> None:
    """Make a database and the account that may do everything in it."""
    _sql(
        f"CREATE DATABASE IF NOT EXISTS `{database}`;\n"
        f"CREATE OR REPLACE USER '{user}'@'%' IDENTIFIED BY '{password}';\n"
        f"GRANT ALL PRIVILEGES ON `{database}`.* TO '{user}'@'%';\n",
        password,
    )


def _sql(statements: str, *hidden: str) -> str:
    """Run SQL as root over the server's socket and return the rows. Raises CommandError."""
    return run(
        "/usr/bin/mariadb", "--batch", "--skip-column-names", stdin=statements, secrets=hidden
    ).stdout


if __name__ == "__main__":
    ops.main(MySQLCharm)
