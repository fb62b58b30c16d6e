"""The services that hold the cards open: they stop for work on the cards, and start again."""

import logging
import pathlib

import template
from driver import state
from driver.state import FABRIC, DriverError
from slurm_ddp import files, systemd
from slurm_ddp.commands import CommandError

logger = logging.getLogger(__name__)

PERSISTENCED = "nvidia-persistenced.service"
PERSISTENCED_PROGRAM = pathlib.Path("/usr/bin/nvidia-persistenced")
STOPPED = pathlib.Path("/var/lib/slurm-gpu/stopped-units")  # by this charm, and to be started again
_DROPIN = "10-slurm-gpu.conf"
_STOP_S, _START_S = 120.0, 300.0  # a fabric manager takes minutes
# In stop order; DCGM comes as a package, or as a snap with upstream's slurmd charm.
# `node.health_timer` starts the health check's timer again.
HOLDERS = (
    "gpu-health.timer",
    "gpu-health.service",
    "dcgm-exporter.service",
    "nvidia-dcgm.service",
    "snap.dcgm.dcgm-exporter.service",
    "snap.dcgm.nv-hostengine.service",
    PERSISTENCED,
    FABRIC,
)


def stop_holders() -> None:
    """Stop what keeps the driver's devices open.

    Jobs are not part of that: check first. Raises `DriverError`.
    """
    active = [unit for unit in HOLDERS if systemd.is_active(unit)]
    # First, so that they start again in any case
    recorded = sorted({*active, *files.read(STOPPED).split()})
    files.ensure_file(STOPPED, "".join(f"{unit}\n" for unit in recorded))
    for unit in active:
        try:
            systemd.stop(unit, timeout=_STOP_S)
        except CommandError as e:
            raise DriverError(f"{unit} does not stop: {e}; see journalctl -u {unit}") from e


def ensure_running() -> None:
    """Start what `stop_holders` stopped and what came with the driver.

    The status shows one that does not start.
    """
    stopped = set(files.read(STOPPED).split())
    programs = {PERSISTENCED: PERSISTENCED_PROGRAM, FABRIC: state.FABRIC_PROGRAM}
    for unit in reversed(HOLDERS):  # DCGM's engine before what queries it
        wanted = unit in stopped or (unit in programs and programs[unit].exists())
        if wanted and not unit.startswith("gpu-health") and not systemd.is_active(unit):
            _restart(unit)
    files.ensure_absent(STOPPED)


def ensure_persistence(*, on: bool) -> None:
    """Keep the driver's state on idle cards.

    Ubuntu's unit stops when nothing needs it, and lacks that mode.
    """
    if on and PERSISTENCED_PROGRAM.exists():
        changed = systemd.ensure_dropin(
            PERSISTENCED,
            _DROPIN,
            template.fill("nvidia-persistenced.conf", program=PERSISTENCED_PROGRAM),
        )
    else:
        changed = systemd.ensure_no_dropin(PERSISTENCED, _DROPIN)
    if changed and PERSISTENCED_PROGRAM.exists():
        _restart(PERSISTENCED)  # jobs go on


def _restart(unit: str) -> None:
    try:
        systemd.restart(unit, timeout=_START_S)
    except CommandError as e:
        logger.warning("%s does not start: %s", unit, e)
