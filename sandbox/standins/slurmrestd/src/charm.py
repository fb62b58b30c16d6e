"""Plays charmed-hpc's slurmrestd 25.11 with Debian's Slurm."""

import logging
import pathlib

import ops
import slurmutils
from common import charm, conf, service, wire

from slurm_ddp import files, systemd
from slurm_ddp.run import CommandError, run

logger = logging.getLogger(__name__)

_ENDPOINT = "slurmctld"
_ACCOUNT = "slurmrestd"
_IDENTIFIER = "64031"
_SERVICE = service.Service("slurmrestd", owner=_ACCOUNT, packages=("slurm-wlm-basic-plugins", "slurm-wlm-jwt-plugin"))
_UNIT = pathlib.Path("/usr/lib/systemd/system/slurmrestd.service")
_UNIT_TEXT = f"""\
[Unit]
Description=Slurm REST daemon
After=network.target slurmctld.service
ConditionPathExists=/etc/slurm/slurm.conf

[Service]
Type=simple
EnvironmentFile=-/etc/default/slurmrestd
Environment="SLURM_JWT=daemon"
ExecStart=/usr/sbin/slurmrestd $SLURMRESTD_OPTIONS -vv 0.0.0.0:{wire.SLURMRESTD_PORT}
ExecReload=/bin/kill -HUP $MAINPID
User={_ACCOUNT}
Group={_ACCOUNT}
Restart=on-failure
RestartSec=30s

[Install]
WantedBy=multi-user.target
"""


class SlurmrestdCharm(charm.Standin):
    """The host that answers HTTP."""

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.update_status, self._on_update_status)
        framework.observe(self.on.secret_changed, self._on_secret_changed)
        relation = self.on[_ENDPOINT]
        framework.observe(relation.relation_changed, self._on_controller_changed)
        framework.observe(relation.relation_departed, self.note_departing)
        framework.observe(relation.relation_broken, self._on_controller_broken)

    @charm.refreshes
    def _on_install(self, event: ops.InstallEvent) -> None:
        self.unit.status = ops.MaintenanceStatus("installing slurmrestd")
        try:
            _SERVICE.install()
            run("/usr/sbin/groupadd", "--force", "--gid", _IDENTIFIER, _ACCOUNT)
            account = ("--system", "--uid", _IDENTIFIER, "--gid", _IDENTIFIER, "--no-create-home")
            existing = run("/usr/sbin/useradd", *account, "--home-dir", "/nonexistent", _ACCOUNT, check=False)
            if existing.returncode not in (0, 9):  # useradd(8): 9, the name is in use
                raise CommandError(f"useradd: {existing.stderr.strip()}")
        except CommandError as e:
            logger.error("%s", e)
            event.defer()
            raise charm.Stop(ops.BlockedStatus(f"slurmrestd was not installed: {e}")) from e
        files.ensure_file(_UNIT, _UNIT_TEXT)
        systemd.daemon_reload()
        self.unit.set_workload_version(_SERVICE.version())
        self.unit.open_port("tcp", wire.SLURMRESTD_PORT)

    @charm.refreshes
    def _on_update_status(self, _: ops.UpdateStatusEvent) -> None:
        """Look at the status only: what died is not started."""

    @charm.refreshes
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        if not event.relation.data[event.relation.app]:
            return
        ready = wire.controller_ready(self.model, _ENDPOINT, "auth_secret_id", "slurmconfig")
        charm.wait_unless(event, ready, "waiting for slurmctld")
        self._block_unless_installed(event)
        data = wire.read_controller(self, event.relation)
        _SERVICE.set_auth_key(data.auth_key, data.auth_key_id)
        editor = slurmutils.SlurmConfigEditor()
        for name, settings in data.slurmconfig.items():
            conf.ConfigFile(editor, service.ETC / name, _ACCOUNT).dump(slurmutils.SlurmConfig.from_dict(settings))
        _SERVICE.enable_and_restart()

    @charm.refreshes
    def _on_controller_broken(self, _: ops.RelationBrokenEvent) -> None:
        if not self.is_departing:
            _SERVICE.stop_and_disable()

    @charm.refreshes
    def _on_secret_changed(self, event: ops.SecretChangedEvent) -> None:
        self._block_unless_installed(event)
        if event.secret.label != wire.AUTH_LABEL:
            return
        content = event.secret.get_content(refresh=True)
        _SERVICE.set_auth_key(content["key"], content["keyid"])
        service.systemctl("restart", _SERVICE.name)

    def check(self) -> ops.StatusBase:
        """Return what keeps slurmrestd from running."""
        if not _SERVICE.is_installed():
            return ops.BlockedStatus("slurmrestd is not installed")
        if not self.model.relations[_ENDPOINT]:
            return ops.BlockedStatus(f"add a controller: juju integrate {self.app.name}:slurmctld slurmctld")
        if not _SERVICE.is_active():
            return ops.WaitingStatus("waiting for slurmrestd to start")
        return ops.ActiveStatus()

    def _block_unless_installed(self, event: ops.EventBase) -> None:
        charm.block_unless(event, _SERVICE.is_installed(), "slurmrestd is not installed")


if __name__ == "__main__":
    ops.main(SlurmrestdCharm)
