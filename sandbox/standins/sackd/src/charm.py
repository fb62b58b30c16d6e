"""Plays charmed-hpc's sackd 25.11, a login host, with Debian's Slurm."""

import ops
from common import charm, daemons, service, wire

_ENDPOINT = "slurmctld"
_SERVICE = service.Service(
    "sackd",
    owner="slurm",
    packages=("slurm-client",),
    dropin="[Unit]\nStartLimitIntervalSec=90\nStartLimitBurst=10\n[Service]\nRestart=on-failure\nRestartSec=10\n",
)


class SackdCharm(daemons.Daemon):
    """A login host."""

    daemon = _SERVICE

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        framework.observe(self.on.install, self._on_install)
        framework.observe(self.on.update_status, self.look)
        relation = self.on[_ENDPOINT]
        framework.observe(relation.relation_changed, self._on_controller_changed)
        framework.observe(relation.relation_departed, self.note_departing)
        framework.observe(relation.relation_broken, self._on_controller_broken)

    @charm.refreshes
    def _on_install(self, event: ops.InstallEvent) -> None:
        self.install(event)
        self.unit.open_port("tcp", wire.SLURMD_PORT)
        self.unit.set_workload_version(_SERVICE.version())

    @charm.refreshes
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        data = self.read_controller(event, "auth_secret_id", "controllers")
        if data is None:
            return
        _SERVICE.set_controllers(data.controllers)
        _SERVICE.enable_and_restart()

    @charm.refreshes
    def _on_controller_broken(self, event: ops.RelationBrokenEvent) -> None:
        if self.is_departing:
            return
        self.block_unless_installed(event)
        _SERVICE.stop_and_disable()
        _SERVICE.forget_controllers()


if __name__ == "__main__":
    ops.main(SackdCharm)
