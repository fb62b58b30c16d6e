"""Plays charmed-hpc's slurmrestd 25.11 with Debian's Slurm."""

import pathlib

import ops
import slurmutils
from common import charm, conf, daemons, service, wire

from slurm_ddp import files, systemd
from slurm_ddp.commands import run

_ACCOUNT = "slurmrestd"
_IDENTIFIER = "64031"
_SERVICE = service.Service(
    "slurmrestd", owner=_ACCOUNT, packages=("slurm-wlm-basic-plugins", "slurm-wlm-jwt-plugin")
)
_UNIT = pathlib.Path("/usr/lib/systemd/system/slurmrestd.service")


class SlurmrestdCharm(daemons.Client):
    """The host that answers HTTP."""

    daemon = _SERVICE

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self.observe_daemon()

    @charm.refreshes
    def _on_install(self, event: ops.InstallEvent) -> None:
        self.install(event, wire.SLURMRESTD_PORT)
        run("/usr/bin/systemd-sysusers", "--inline", f"u {_ACCOUNT} {_IDENTIFIER}")
        files.ensure_file(_UNIT, (pathlib.Path(__file__).parent / "slurmrestd.service").read_text())
        systemd.daemon_reload()

    @charm.refreshes
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        data = self.read_controller(event, "auth_secret_id", "slurmconfig")
        if data is None:
            return
        for name, settings in data.slurmconfig.items():
            file = conf.ConfigFile[slurmutils.SlurmConfig](
                slurmutils.SlurmConfigEditor(), service.ETC / name, _ACCOUNT
            )
            file.dump(slurmutils.SlurmConfig.from_dict(settings))
        _SERVICE.enable_and_restart()


if __name__ == "__main__":
    ops.main(SlurmrestdCharm)
