"""slurmd as a systemd unit of this machine: its drop-in, a drained start, its version."""

import pathlib

import template
from node import journals, slurmd_options
from slurm_ddp import files, systemd

SLURMD = "slurmd.service"
DROPIN = "20-gpu.conf"
PUSHED = pathlib.Path("/run/slurm/conf/gres.conf")  # fetched by a configless slurmd
# The drop-in names it behind /etc/default/slurmd. On disk, since the machine may reboot while its
# node is deleted.
DRAINED_ENV = journals.STATE_DIR / "held-options"
_DEVICE_WAIT_S = 60


def ensure_dropin(device_files: tuple[pathlib.Path, ...]) -> bool:
    """Make slurmd wait for its device files at start; return whether the drop-in changed.

    slurmd is not restarted for that.

    A slurmd that waits reads the list again, so it starts as soon as a missing card is known to be
    lost. Each start ends former slurmds: a restart during `scontrol reconfigure` stops the process
    that hands over, and, with the unit's KillMode=process, not the one that takes over and keeps
    the port. Seen on 24.11.5.
    """
    changed = files.ensure_file(_devices(), "".join(f"{file}\n" for file in device_files))
    text = template.fill(
        "slurmd.conf",
        wait_s=_DEVICE_WAIT_S,
        present=f"! test -e {_devices()} || xargs -ra {_devices()} ls >/dev/null 2>&1",
        drained_env=DRAINED_ENV,
    )
    return systemd.ensure_dropin(SLURMD, DROPIN, text) or changed


def ensure_no_dropin() -> bool:
    """Remove the drop-in; return whether it was there."""
    files.ensure_absent(_devices())
    return systemd.ensure_no_dropin(SLURMD, DROPIN)


def drain_at_start() -> None:
    """Make slurmd register its node drained whenever it starts next. Raises `OptionsError`."""
    files.ensure_file(
        DRAINED_ENV, slurmd_options.drained(slurmd_options.PATH.read_text()), mode=0o600
    )


def _devices() -> pathlib.Path:
    return journals.STATE_DIR / "devices"  # the files that slurmd waits for
