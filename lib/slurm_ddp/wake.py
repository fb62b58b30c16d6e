"""Run a unit's update-status hook once the thing that its status waits for is there.

Juju lacks an event for that. A transient unit of systemd's runs juju-exec(1), which waits for the
machine's lock. No two of these units share a name: the hook that one of them runs asks for the next
while its own is still loaded.
"""

import logging
import pathlib
import time

from slurm_ddp.commands import CommandError, run

JUJU_EXEC = pathlib.Path("/usr/bin/juju-exec")
LOOK_AGAIN_S = 30  # until a unit looks again while it waits for something without a Juju event

logger = logging.getLogger(__name__)


def command(unit: str, charm: pathlib.Path) -> list[str]:
    """Build the command that wakes `unit`, whose charm lies in `charm`.

    Empty on a machine without Juju.
    """
    if not JUJU_EXEC.exists():
        return []
    hook = f"JUJU_DISPATCH_PATH=hooks/update-status {charm}/dispatch"
    return [
        "/usr/bin/systemd-run",
        "--quiet",
        "--collect",
        "--no-block",
        str(JUJU_EXEC),
        unit,
        hook,
    ]


def later(unit: str, charm: pathlib.Path, seconds: int = LOOK_AGAIN_S) -> None:
    """Wake `unit` in so many seconds, unless that is due already."""
    argv = command(unit, charm)
    if not argv:
        return
    name = f"juju-wake-{unit.replace('/', '-')}-"
    # One whose hook runs or waits for the machine's lock is no longer "waiting".
    due = (
        "/usr/bin/systemctl",
        "list-units",
        "--plain",
        "--no-legend",
        "--state=waiting",
        f"{name}*.timer",
    )
    # systemd may start a timer's service a minute late unless AccuracySec is shorter.
    timer = (
        f"--unit={name}{time.time_ns()}",
        f"--on-active={seconds}",
        "--timer-property=AccuracySec=1s",
    )
    try:
        if not run(*due).stdout.strip():
            run(argv[0], *timer, *argv[1:])
    except CommandError as e:
        logger.warning("%s is not woken before Juju's next event: %s", unit, e)
