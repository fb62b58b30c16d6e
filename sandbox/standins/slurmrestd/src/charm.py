"""Plays charmed-hpc's slurmrestd 25.11 with Debian's Slurm."""

import pathlib

import ops
import slurmutils
from common import charm, conf, daemons, service, wire

from slurm_ddp import files, systemd
from slurm_ddp.run import CommandError, run

_ENDPOINT = "slurmctld"
_ACCOUNT = "slurmrestd"
_IDENTIFIER = "64031"
_SERVICE = service.Service("slurmrestd", owner=_ACCOUNT, packages=("slurm-wlm-basic-plugins", "slurm-wlm-jwt-plugin"))
_UNIT = pathlib.Path("/usr/lib/systemd/system/slurmrestd.service")


class SlurmrestdCharm(daemons.Daemon):
    """The host that answers HTTP."""

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
        with self.installing(event):
            run("/usr/sbin/groupadd", "--force", "--gid", _IDENTIFIER, _ACCOUNT)
            account = ("--system", "--uid", _IDENTIFIER, "--gid", _IDENTIFIER, "--no-create-home")
            existing = run("/usr/sbin/useradd", *account, "--home-dir", "/nonexistent", _ACCOUNT, check=False)
            if existing.returncode not in (0, 9):  # useradd(8): 9, the name is in use
                raise CommandError(f"useradd: {existing.stderr.strip()}")
        files.ensure_file(_UNIT, (pathlib.Path(__file__).parent / "slurmrestd.service").read_text())
        systemd.daemon_reload()
        self.unit.set_workload_version(_SERVICE.version())
        self.unit.open_port("tcp", wire.SLURMRESTD_PORT)

    @charm.refreshes
    def _on_controller_changed(self, event: ops.RelationChangedEvent) -> None:
        data = self.read_controller(event, "auth_secret_id", "slurmconfig")
        if data is None:
            return
        editor = slurmutils.SlurmConfigEditor()
        for name, settings in data.slurmconfig.items():
            conf.ConfigFile(editor, service.ETC / name, _ACCOUNT).dump(slurmutils.SlurmConfig.from_dict(settings))
        _SERVICE.enable_and_restart()

    @charm.refreshes
    def _on_controller_broken(self, _: ops.RelationBrokenEvent) -> None:
        if not self.is_departing:
            _SERVICE.stop_and_disable()


if __name__ == "__main__":
    ops.main(SlurmrestdCharm)
