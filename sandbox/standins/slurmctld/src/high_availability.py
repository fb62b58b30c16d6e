"""Several slurmctlds: /etc/slurm and StateSaveLocation move to a filesystem that all mount, as upstream does it."""

import pathlib
import time

import slurm_controller
from common import service


def share_settings(*, is_leader: bool) -> None:
    """Link /etc/slurm to the shared filesystem; the leader copies it there first, and the old folder is kept."""
    target = slurm_controller.SHARED / "etc" / "slurm"
    if service.ETC.is_symlink():
        return
    if is_leader and not target.exists():
        target.parent.mkdir(parents=True)
        service.run("/usr/bin/cp", "--archive", str(service.ETC), str(target), timeout=600)
    service.ETC.rename(f"{service.ETC}_{time.strftime('%Y%m%d_%H%M%S')}")
    service.ETC.symlink_to(target)


def share_state() -> None:
    """Move StateSaveLocation to the shared filesystem; slurmctld must be started afterwards."""
    with slurm_controller.slurm_conf().edit() as config:
        source = pathlib.Path(str(config.state_save_location))
        target = slurm_controller.SHARED / source.name
        if not target.exists():
            service.systemctl("stop", slurm_controller.SERVICE.name)
            service.run("/usr/bin/cp", "--archive", str(source), str(target), timeout=600)
        config.state_save_location = str(target)
