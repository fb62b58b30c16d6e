"""Plays charmed-hpc's sssd, revision 12: SSSD with a domain for each directory that is related."""

import collections.abc
import configparser
import contextlib
import json
import pathlib

import ops
from common import charm

from slurm_ddp import apt, files, systemd
from slurm_ddp.commands import run

_LDAP = "ldap"
# The last two, which a machine of Ubuntu gets with the first, as recommended packages
_PACKAGES = ("sssd", "sssd-ldap", "libnss-sss", "libpam-sss")
_CONF = pathlib.Path("/etc/sssd/sssd.conf")


class SSSDCharm(charm.Standin):
    """See the module."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.stop, self._on_stop)
        framework.observe(self.on[_LDAP].relation_created, self._on_created)
        framework.observe(self.on[_LDAP].relation_changed, self._on_changed)
        framework.observe(self.on[_LDAP].relation_broken, self._on_broken)

    def check(self) -> ops.StatusBase:
        """Return whether SSSD runs."""
        if not self.model.relations[_LDAP]:
            return ops.WaitingStatus("waiting for relations: ldap")
        if systemd.is_active("sssd"):
            return ops.ActiveStatus()
        return ops.BlockedStatus("SSSD does not run")

    @charm.refreshes
    def _on_install(self, _: ops.InstallEvent) -> None:
        self.unit.status = ops.MaintenanceStatus("installing SSSD")
        apt.ensure_packages(_PACKAGES)
        with _edited() as config:
            config["sssd"] = {"config_file_version": "2"}

    def _on_stop(self, _: ops.StopEvent) -> None:
        _systemctl("disable")
        run("/usr/bin/apt-get", "remove", "--yes", "sssd", "sssd-ldap", timeout=300)
        _CONF.unlink(missing_ok=True)

    def _on_created(self, event: ops.RelationCreatedEvent) -> None:
        if self.unit.is_leader():
            about = {"user": self.app.name, "group": self.model.name}
            event.relation.data[self.app].update(about)

    @charm.refreshes
    def _on_changed(self, event: ops.RelationChangedEvent) -> None:
        data = event.relation.data[event.relation.app]
        secret = data.get("bind_password_secret")
        if not secret:
            return
        is_encrypted = data["starttls"] == "True"
        charm.wait_unless(event, not is_encrypted, "waiting for relations: receive-ca-cert")
        password = self.model.get_secret(id=secret).get_content()["password"]

        name = event.relation.app.name
        with _edited() as config:
            others = _domains(config)
            config["sssd"]["domains"] = ",".join(dict.fromkeys([*others, name]))
            section = f"domain/{name}"
            known = dict(config[section]) if section in config else _FIRST
            config[section] = known | _settings(data, password)
        _systemctl("restart" if others else "enable")

    @charm.refreshes
    def _on_broken(self, event: ops.RelationBrokenEvent) -> None:
        name = event.relation.app.name
        with _edited() as config:
            left = [other for other in _domains(config) if other != name]
            config["sssd"]["domains"] = ",".join(left)
            config.remove_section(f"domain/{name}")
        _systemctl("restart" if left else "disable")


# What upstream writes of a new directory, and never again
_FIRST = {
    "id_provider": "ldap",
    "auth_provider": "ldap",
    "ldap_default_authtok_type": "password",
    "ldap_use_tokengroups": "False",
    "ldap_group_member": "member",
    "ldap_schema": "rfc2307bis",
    "cache_credentials": "True",
}


def _settings(data: collections.abc.Mapping[str, str], password: str) -> dict[str, str]:
    """Return the settings that upstream writes at each change of a directory."""
    return {
        "ldap_uri": ",".join(json.loads(data["urls"])),
        "ldap_search_base": data["base_dn"],
        "ldap_default_bind_dn": data["bind_dn"],
        "ldap_default_authtok": password,
        "ldap_id_use_start_tls": data["starttls"] or "False",
    }


@contextlib.contextmanager
def _edited() -> collections.abc.Generator[configparser.ConfigParser]:
    """Change sssd.conf, which root alone reads: it holds the directory's password."""
    config = configparser.ConfigParser()
    config.read(_CONF)
    yield config
    _CONF.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    files.ensure_file(_CONF, "", mode=0o600)
    with _CONF.open("w") as target:
        config.write(target)


def _domains(config: configparser.ConfigParser) -> list[str]:
    return [name for name in config["sssd"].get("domains", "").split(",") if name]


def _systemctl(verb: str) -> None:
    now = () if verb == "restart" else ("--now",)
    run("/usr/bin/systemctl", verb, *now, "sssd", timeout=120)


if __name__ == "__main__":
    ops.main(SSSDCharm)
