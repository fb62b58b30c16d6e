"""Plays charmed-hpc's sackd 25.11, a login host, with Debian's Slurm."""

import ops
from common import charm, daemons, service, wire

_SERVICE = service.Service(
    "sackd",
    owner="slurm",
    packages=("slurm-client",),
    dropin="[Unit]\nStartLimitIntervalSec=90\nStartLimitBurst=10\n[Service]\nRestart=on-failure\nRestartSec=10\n",
)


class SackdCharm(daemons.Client):
    """A login host."""

    daemon = _SERVICE

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self.observe_daemon()

    @charm.refreshes
    def _on_install(self, event: ops.InstallEvent) -> None:
        self.install(event, wire.SLURMD_PORT)

    @charm.refreshes
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        data = self.read_controller(event, "auth_secret_id", "controllers")
        if data is None:
            return
        _SERVICE.set_controllers(data.controllers)
        _SERVICE.enable_and_restart()

    def read_key_again(self, event: ops.SecretChangedEvent) -> None:
        """Reload sackd."""
        self.reload(event)

    @charm.refreshes
    def _on_controller_broken(self, _: ops.RelationBrokenEvent) -> None:
        if self._stored.departing:
            return
        _SERVICE.stop_and_disable()
        _SERVICE.set_controllers([])


if __name__ == "__main__":
    ops.main(SackdCharm)
