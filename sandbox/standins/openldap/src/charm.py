"""Play a directory outside of the model; its operator uses `ldapadd` on its machine."""

import pathlib
import secrets

import ops

from slurm_ddp import apt, files, systemd
from slurm_ddp.commands import run

SUFFIX = "dc=example,dc=org"
_PASSWORD = pathlib.Path("/root/password")
_CONF = pathlib.Path("/etc/ldap/directory.conf")
_DATA = pathlib.Path("/var/lib/ldap")
# Debian's package has a script for init only
_UNIT = "directory.service"
_SERVICE = f"""\
[Unit]
Description=A directory of users
After=network.target

[Service]
ExecStart=/usr/sbin/slapd -d 0 -u openldap -g openldap -f {_CONF} -h ldap:///
Restart=on-failure

[Install]
WantedBy=multi-user.target
"""
_SCHEMAS = ("core", "cosine", "rfc2307bis", "inetorgperson")
# draft-howard-rfc2307bis-02, as far as accounts need it: groups have `member`. slapd itself has
# uidNumber and gidNumber
_RFC2307BIS = """\
attributetype ( 1.3.6.1.1.1.1.3 NAME 'homeDirectory' EQUALITY caseExactIA5Match
  SYNTAX 1.3.6.1.4.1.1466.115.121.1.26 SINGLE-VALUE )
attributetype ( 1.3.6.1.1.1.1.4 NAME 'loginShell' EQUALITY caseExactIA5Match
  SYNTAX 1.3.6.1.4.1.1466.115.121.1.26 SINGLE-VALUE )
objectclass ( 1.3.6.1.1.1.2.0 NAME 'posixAccount' SUP top AUXILIARY
  MUST ( cn $ uid $ uidNumber $ gidNumber $ homeDirectory ) MAY ( userPassword $ loginShell $ description ) )
objectclass ( 1.3.6.1.1.1.2.2 NAME 'posixGroup' SUP top AUXILIARY MUST ( gidNumber ) MAY ( description ) )
"""
_TREE = f"""\
dn: {SUFFIX}
objectClass: dcObject
objectClass: organization
dc: example
o: example

dn: ou=people,{SUFFIX}
objectClass: organizationalUnit
ou: people

dn: ou=groups,{SUFFIX}
objectClass: organizationalUnit
ou: groups
"""


class OpenLDAPCharm(ops.CharmBase):
    """The directory."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        for event in (self.on.install, self.on.start, self.on.upgrade_charm):
            framework.observe(event, self._ensure)
        framework.observe(self.on.collect_unit_status, self._on_collect_status)

    def _ensure(self, _: ops.EventBase) -> None:
        self.unit.status = ops.MaintenanceStatus("installing slapd")
        apt.ensure_packages(("slapd", "ldap-utils"))
        if not systemd.exists(_UNIT):
            self._fill()
        systemd.ensure_unit(_UNIT, _SERVICE)
        systemd.enable_now(_UNIT)

    def _fill(self) -> None:
        """Make the directory, with no one in it yet."""
        files.ensure_file(_PASSWORD, secrets.token_hex(16), mode=0o600)
        files.ensure_file(pathlib.Path("/etc/ldap/schema/rfc2307bis.schema"), _RFC2307BIS)
        files.ensure_file(_CONF, _conf(_PASSWORD.read_text()), mode=0o640, owner="openldap")
        for path in _DATA.iterdir():
            path.unlink()
        run("/usr/sbin/slapadd", "-f", _CONF, stdin=_TREE)
        run("/usr/bin/chown", "-R", "openldap:openldap", _DATA)

    def _on_collect_status(self, event: ops.CollectStatusEvent) -> None:
        if not systemd.is_active(_UNIT):
            event.add_status(ops.WaitingStatus("waiting for slapd"))
        event.add_status(ops.ActiveStatus(f"serves {SUFFIX}"))


def _conf(password: str) -> str:
    """Return slapd.conf(5): one database, which everybody reads, without passwords."""
    includes = "".join(f"include /etc/ldap/schema/{name}.schema\n" for name in _SCHEMAS)
    return f"""\
{includes}pidfile /run/slapd/slapd.pid
modulepath /usr/lib/ldap
moduleload back_mdb
database mdb
suffix {SUFFIX}
rootdn cn=admin,{SUFFIX}
rootpw {password}
directory {_DATA}
index uid,uidNumber,gidNumber,member eq
access to attrs=userPassword by anonymous auth by * none
access to * by * read
"""


if __name__ == "__main__":
    ops.main(OpenLDAPCharm)
