"""Play ldap-integrator: publish a configured directory, with the reader's password in a secret."""

import json

import ops

_LDAP = "ldap"
_REQUIRED = ("urls", "base_dn", "bind_dn", "bind_password")


class LdapIntegratorCharm(ops.CharmBase):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        # Not config-changed: upstream, too, tells of an option at the next update-status
        for event in (self.on.start, self.on.update_status, self.on[_LDAP].relation_changed):
            framework.observe(event, self._publish)
        framework.observe(self.on.collect_unit_status, self._on_collect_status)

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if missing := self._missing():
            event.add_status(ops.BlockedStatus(f"missing options: {', '.join(missing)}"))
        event.add_status(ops.ActiveStatus())

    def _missing(self) -> list[str]:
        return [name for name in _REQUIRED if not self.config.get(name)]

    def _publish(self, _: ops.EventBase) -> None:
        if self._missing() or not self.unit.is_leader():
            return
        urls = str(self.config["urls"]).split(",")
        data = {
            "urls": json.dumps([url for url in urls if url.startswith("ldap://")]),
            "ldaps_urls": json.dumps([url for url in urls if url.startswith("ldaps://")]),
            "base_dn": str(self.config["base_dn"]),
            "starttls": str(self.config["starttls"]),
            "bind_dn": str(self.config["bind_dn"]),
            "auth_method": "simple",
        }
        given = self.model.get_secret(id=str(self.config["bind_password"]))
        password = given.get_content()["password"]
        for relation in self.model.relations[_LDAP]:
            secret = self._secret(relation, password)
            relation.data[self.app].update({**data, "bind_password_secret": secret})

    def _secret(self, relation: ops.Relation, password: str) -> str:
        """Give the password to a relation in a secret; return the secret's URI."""
        label = f"relation-{relation.id}-bind-account-secret"
        try:
            secret = self.model.get_secret(label=label)
            secret.set_content({"password": password})
        except ops.SecretNotFoundError:
            secret = self.app.add_secret({"password": password}, label=label)
        secret.grant(relation)
        assert secret.id is not None
        return secret.id


if __name__ == "__main__":
    ops.main(LdapIntegratorCharm)
