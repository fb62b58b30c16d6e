"""Plays charmed-hpc's slurmdbd 25.11 with Debian's Slurm."""

import json
import socket

import ops
import slurmutils
from common import charm, conf, daemons, service, wire

_CONTROLLER = "slurmctld"
_DATABASE = "database"
_DATABASE_NAME = "slurm_acct_db"
_KEYS = ("auth_secret_id", "jwt_secret_id")
_SERVICE = service.Service("slurmdbd", owner="slurm", packages=("slurm-wlm-jwt-plugin",))


class SlurmdbdCharm(daemons.Daemon):
    """The accounting daemon."""

    daemon = _SERVICE
    look = charm.refreshes_on_leader(daemons.Daemon.look)

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self.observe_daemon()
        self._stored.set_default(has_database=False)
        framework.observe(self.on.config_changed, self._on_config_changed)
        framework.observe(self.on[_CONTROLLER].relation_changed, self._on_controller_changed)
        framework.observe(self.on[_DATABASE].relation_created, self._on_database_joined)
        framework.observe(self.on[_DATABASE].relation_changed, self._on_database_changed)
        framework.observe(self.on[_DATABASE].relation_broken, self._on_database_broken)

    @charm.refreshes
    def _on_install(self, event: ops.InstallEvent) -> None:
        if not self.unit.is_leader():
            raise charm.Stop(ops.BlockedStatus("slurmdbd has one unit only: remove this one"))
        self.install(event, wire.SLURMDBD_PORT)

    @charm.refreshes_on_leader
    def _on_config_changed(self, _: ops.ConfigChangedEvent) -> None:
        with _slurmdbd_conf().edit() as config:
            config.auth_alt_parameters = {"jwt_key": str(_SERVICE.jwt_key_path)}
            config.auth_alt_types = ["auth/jwt"]
            config.auth_type = "auth/slurm"
            config.dbd_addr = self._address
            config.dbd_host = socket.gethostname()
            config.dbd_port = 6819
            config.log_file = "/var/log/slurm/slurmdbd.log"
            config.pid_file = "/var/run/slurmdbd/slurmdbd.pid"
            config.plugin_dir = ["/usr/lib/x86_64-linux-gnu/slurm-wlm"]
            config.slurm_user = "slurm"
            config.storage_type = "accounting_storage/mysql"
        self._reconfigure()

    @charm.refreshes_on_leader
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        data = self.read_controller(event, *_KEYS)
        if data is None:
            return
        _SERVICE.set_jwt_key(data.jwt_key)
        self._reconfigure()

    def _on_database_joined(self, event: ops.RelationCreatedEvent) -> None:
        """Ask for the database, with credentials in a secret, like the data platform's library."""
        if self.unit.is_leader():
            secrets = ["username", "password", "tls", "tls-ca", "uris"]
            event.relation.data[self.app].update(
                {"database": _DATABASE_NAME, "requested-secrets": json.dumps(secrets)}
            )

    @charm.refreshes_on_leader
    def _on_database_changed(self, event: ops.RelationChangedEvent) -> None:
        """Take the database when its credentials appear; ignore later changes, even an address."""
        credentials = self._credentials(event.relation)
        if not credentials or self._stored.has_database:
            return
        endpoints = event.relation.data[event.relation.app].get("endpoints", "")
        endpoint = next((word.strip() for word in endpoints.split(",") if word.strip()), "")
        if not endpoint:
            self.unit.status = ops.BlockedStatus("the database has no endpoints")
            raise ValueError(f"the database has no endpoints: {endpoints!r}")
        host, _, port = endpoint.rpartition(":")
        with _slurmdbd_conf().edit() as config:
            config.storage_user, config.storage_pass = credentials
            config.storage_loc = _DATABASE_NAME
            config.storage_host = host.removeprefix("[").removesuffix("]")  # IPv6
            config.storage_port = int(port)
        self._stored.has_database = True
        self._reconfigure()

    def _on_database_broken(self, _: ops.RelationBrokenEvent) -> None:
        self._stored.has_database = False

    def lacks_relations(self) -> str:
        """Return which relations are missing."""
        missing = [
            endpoint for endpoint in (_CONTROLLER, _DATABASE) if not self.model.relations[endpoint]
        ]
        return f"waiting for relations: {', '.join(missing)}" if missing else ""

    def _reconfigure(self) -> None:
        """Start slurmdbd once everything is known and publish its address. Raises `Stop`."""
        has_database = any(
            self._credentials(relation) for relation in self.model.relations[_DATABASE]
        )
        has_keys = _SERVICE.auth_key_path.exists() and _SERVICE.jwt_key_path.exists()
        if not (
            wire.controller_ready(self.model, _CONTROLLER, *_KEYS) and has_database and has_keys
        ):
            return
        try:
            _SERVICE.reconfigure()
        except service.SlurmError as e:
            raise self.failed("reconfigured", e) from e
        for relation in self.model.relations[_CONTROLLER]:
            relation.data[self.app]["hostname"] = json.dumps(self._address)

    def _credentials(self, relation: ops.Relation) -> tuple[str, str] | None:
        """Return user and password from the provider's secret; None before there is one."""
        identifier = relation.data[relation.app].get("secret-user")
        if identifier is None:
            return None
        label = f"{relation.name}.{relation.id}.user.secret"
        content = self.model.get_secret(id=identifier, label=label).get_content()
        return content["username"], content["password"]

    @property
    def _address(self) -> str:
        binding = self.model.get_binding("slurmdbd-peer")
        assert binding is not None
        return str(binding.network.ingress_address)


def _slurmdbd_conf() -> conf.ConfigFile[slurmutils.SlurmdbdConfig]:
    """Return slurmdbd.conf with the database's password, readable only by slurmdbd's account."""
    return conf.ConfigFile(
        slurmutils.SlurmdbdConfigEditor(), service.ETC / "slurmdbd.conf", "slurm", mode=0o600
    )


if __name__ == "__main__":
    ops.main(SlurmdbdCharm)
