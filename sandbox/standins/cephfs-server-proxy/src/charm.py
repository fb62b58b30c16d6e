"""Play charmed-hpc's cephfs-server-proxy: publish a configured CephFS, with its key in a secret."""

import urllib.parse

import ops

_PEERS = "server-peers"


class CephFSServerProxyCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        framework.observe(self.on.config_changed, self._on_config_changed)
        framework.observe(self.on["filesystem"].relation_joined, self._on_joined)

    def _on_config_changed(self, _: ops.ConfigChangedEvent) -> None:
        config = {
            name: str(self.config.get(name, ""))
            for name in ("fsid", "sharepoint", "monitor-hosts", "auth-info")
        }
        if missing := [name for name, value in config.items() if not value]:
            names = ", ".join(f"`{name}`" for name in missing)
            self.unit.status = ops.BlockedStatus(f"Missing required configuration for {names}")
            return
        for name in ("sharepoint", "auth-info"):
            if not all(config[name].partition(":")[::2]):
                self.unit.status = ops.BlockedStatus(
                    f"Invalid {name} `{config[name]}`"
                )  # upstream shows the key, too
                return
        if self.unit.is_leader():
            self._publish(config)
        self.unit.status = ops.ActiveStatus()

    def _publish(self, config: dict[str, str]) -> None:
        (name, _, path), (user, _, key) = (
            config[option].partition(":") for option in ("sharepoint", "auth-info")
        )
        try:
            secret = self.model.get_secret(label="auth")
            secret.set_content({"key": key})
        except ops.SecretNotFoundError:
            secret = self.app.add_secret({"key": key}, label="auth")
        revision = str(secret.get_info().revision)
        options = {"fsid": config["fsid"], "name": name, "auth": secret.id, "auth-rev": revision}
        hosts = urllib.parse.quote(",".join(config["monitor-hosts"].split()))
        parts = (
            f"{urllib.parse.quote(user)}@({hosts})",
            urllib.parse.quote(path),
            urllib.parse.urlencode(options),
        )
        uri = urllib.parse.urlunsplit(("cephfs", *parts, ""))
        peers = self.model.get_relation(_PEERS)
        assert peers is not None, "upstream raises FilesystemInfoError"
        peers.data[self.app]["endpoint"] = uri
        for relation in self.model.relations["filesystem"]:
            secret.grant(relation)
            relation.data[self.app]["endpoint"] = uri

    def _on_joined(self, event: ops.RelationJoinedEvent) -> None:
        peers = self.model.get_relation(_PEERS)
        if (
            not self.unit.is_leader()
            or peers is None
            or not (uri := peers.data[self.app].get("endpoint"))
        ):
            return
        self.model.get_secret(label="auth").grant(event.relation)
        event.relation.data[self.app]["endpoint"] = uri


if __name__ == "__main__":
    ops.main(CephFSServerProxyCharm)
