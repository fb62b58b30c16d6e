"""slurmd as a systemd unit on this machine: its drop-in, a start with the node drained, its version."""

import pathlib

import template
from node import node_state, slurmd_options
from slurm_ddp import files, systemd

SLURMD = "slurmd.service"
DROPIN = "20-gpu.conf"
PUSHED = pathlib.Path("/run/slurm/conf/gres.conf")  # what a configless slurmd fetched
# The drop-in names it behind /etc/default/slurmd. On disk, since the machine may reboot while its node is deleted.
DRAINED_ENV = node_state.STATE_DIR / "held-options"
_DEVICE_WAIT_S = 60
# Runs before the unit's own slurmd starts, so every slurmd in its control group is a former one. By its command line:
# the one that takes over at a reconfiguration is named after the thread that made it, "worker[7]" (24.11.5).
_END_FORMER = """\
for s in TERM TERM TERM TERM TERM TERM TERM TERM KILL TERM; do \
p=$(grep -ls :/system.slice/slurmd.service $(pgrep -f "^[^ ]*/slurmd " \
| sed "s,.*,/proc/&/cgroup,") /dev/null | cut -d/ -f3); \
test "$p" || break; \
echo "slurmd" $p "of the former start holds the port: sending SIG$s"; kill -$s $p; sleep 0.5; done"""


def ensure_dropin(device_files: tuple[pathlib.Path, ...]) -> bool:
    """Make slurmd wait for its device files at start, without restarting it; return whether the drop-in changed.

    A slurmd that waits already reads the list again, so it starts as soon as a missing card is known to be lost.

    Each start ends former slurmds: a restart during `scontrol reconfigure` (some 0.05 s on each node) stops the process
    that hands over, and, with the unit's KillMode=process, not the one that takes over. That one would keep the port,
    and no slurmd of the unit could start. Seen on 24.11.5.
    """
    changed = files.ensure_file(_devices(), "".join(f"{file}\n" for file in device_files))
    text = template.fill(
        "slurmd.conf",
        wait_s=_DEVICE_WAIT_S,
        present=f"! test -e {_devices()} || xargs -ra {_devices()} ls >/dev/null 2>&1",
        end_former=_END_FORMER.replace("$", "$$"),  # for systemd
        drained_env=DRAINED_ENV,
    )
    return systemd.ensure_dropin(SLURMD, DROPIN, text) or changed


def ensure_no_dropin() -> bool:
    """Remove the drop-in; return whether it was there."""
    files.ensure_absent(_devices())
    return systemd.ensure_no_dropin(SLURMD, DROPIN)


def restart_if_active() -> None:
    """Restart slurmd where it runs; jobs go on."""
    if systemd.is_active(SLURMD):
        systemd.restart(SLURMD)


def drain_at_start() -> None:
    """Make slurmd register its node drained whenever it starts next. Raises `OptionsError`."""
    files.ensure_file(DRAINED_ENV, slurmd_options.drained(slurmd_options.PATH.read_text()), mode=0o600)


def _devices() -> pathlib.Path:
    return node_state.STATE_DIR / "devices"  # the files that slurmd waits for
