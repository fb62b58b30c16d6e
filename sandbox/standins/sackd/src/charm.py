"""Plays charmed-hpc's sackd 25.11, a login host, with Debian's Slurm."""

import logging

import ops
from common import charm, service, wire

from slurm_ddp.run import CommandError

logger = logging.getLogger(__name__)

_ENDPOINT = "slurmctld"
_SERVICE = service.Service(
    "sackd",
    owner="slurm",
    packages=("slurm-client",),
    dropin="[Unit]\nStartLimitIntervalSec=90\nStartLimitBurst=10\n[Service]\nRestart=on-failure\nRestartSec=10\n",
)


class SackdCharm(charm.Standin):
    """A login host."""

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
        self.unit.status = ops.MaintenanceStatus("installing sackd")
        try:
            _SERVICE.install()
        except CommandError as e:
            logger.error("%s", e)
            event.defer()
            raise charm.Stop(ops.BlockedStatus(f"sackd was not installed: {e}")) from e
        self.unit.open_port("tcp", wire.SLURMD_PORT)
        self.unit.set_workload_version(_SERVICE.version())

    @charm.refreshes
    def _on_update_status(self, _: ops.UpdateStatusEvent) -> None:
        """Look at the status only: what died is not started."""

    @charm.refreshes
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        if not event.relation.data[event.relation.app]:
            return
        ready = wire.controller_ready(self.model, _ENDPOINT, "auth_secret_id", "controllers")
        charm.wait_unless(event, ready, "waiting for slurmctld")
        self._block_unless_installed(event)
        data = wire.read_controller(self, event.relation)
        _SERVICE.set_auth_key(data.auth_key, data.auth_key_id)
        _SERVICE.set_controllers(data.controllers)
        _SERVICE.enable_and_restart()

    @charm.refreshes
    def _on_controller_broken(self, event: ops.RelationBrokenEvent) -> None:
        if self.is_departing:
            return
        self._block_unless_installed(event)
        _SERVICE.stop_and_disable()
        _SERVICE.forget_controllers()

    @charm.refreshes
    def _on_secret_changed(self, event: ops.SecretChangedEvent) -> None:
        self._block_unless_installed(event)
        if event.secret.label != wire.AUTH_LABEL:
            return
        content = event.secret.get_content(refresh=True)
        _SERVICE.set_auth_key(content["key"], content["keyid"])
        try:
            service.systemctl("reload", _SERVICE.name)
        except CommandError as e:
            logger.error("%s", e)
            event.defer()
            raise charm.Stop(ops.BlockedStatus(f"sackd was not reloaded; see juju debug-log: {e}"[:200])) from e

    def check(self) -> ops.StatusBase:
        """Return what keeps sackd from running."""
        if not _SERVICE.is_installed():
            return ops.BlockedStatus("sackd is not installed")
        if not self.model.relations[_ENDPOINT]:
            return ops.BlockedStatus(f"add a controller: juju integrate {self.app.name}:slurmctld slurmctld")
        if not _SERVICE.is_active():
            return ops.WaitingStatus("waiting for sackd to start")
        return ops.ActiveStatus()

    def _block_unless_installed(self, event: ops.EventBase) -> None:
        charm.block_unless(event, _SERVICE.is_installed(), "sackd is not installed")


if __name__ == "__main__":
    ops.main(SackdCharm)
