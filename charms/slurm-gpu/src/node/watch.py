#!/usr/bin/python3
"""Work on a compute node that cannot wait for Juju's next event.

A systemd service runs it until it is done.

If anyone but an administrator ends a hold, the node is drained and reserved again (`node.kept`). A
node that is down only for a reboot, or for being new, takes jobs as soon as its mounts, its cards
and their health allow it (`node.resume`). The service starts at boot, with each change of a
readiness file (a path unit), and with a hold. It ends when nothing is left to do. It runs from the
charm's own folder, with Python's standard library only.
"""

import dataclasses
import logging
import pathlib
import sys
import time

import pci
import settings
import template
from node import health_timer, journals, kept, resume, slurmd_options
from slurm_ddp import files, readiness, records, systemd
from slurm_ddp.commands import CommandError
from slurm_ddp.slurm import nodes

logger = logging.getLogger(__name__)

UNIT, PATH_UNIT = kept.WATCH, "slurm-gpu-node.path"
CONFIG = journals.STATE_DIR / "node.json"

_HOLD_S = 5.0
_LOCAL_S = 1.0  # files on this machine
_SLURM_S = 10.0  # questions to the controller
_UNFIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Config(settings.Config):
    """The settings that the last hook left for the service."""

    node: str = ""


def ensure(config: Config) -> None:
    """Set up the service for this node and start it. Raises `CommandError` if systemd refuses."""
    changed = files.ensure_file(CONFIG, records.text(config), mode=0o600)
    if _ensure_units() or changed or kept.grounds():
        systemd.start_later(UNIT)


def _ensure_units() -> bool:
    """Write the units, and enable them; return whether that changed them."""
    source = pathlib.Path(__file__).resolve()
    library = f"{source.parents[1]}:{pathlib.Path(readiness.__file__).resolve().parents[1]}"
    text = template.fill(UNIT, program=source, library=library, python=health_timer.PYTHON)
    path = template.fill(PATH_UNIT, directory=readiness.DIRECTORY)
    changed = bool(systemd.ensure_units({UNIT: text, PATH_UNIT: path}))
    if changed or not systemd.is_active(PATH_UNIT):  # a hook that died may have written them only
        systemd.enable(UNIT)
        systemd.enable_now(PATH_UNIT)
    return changed


def ensure_absent() -> None:
    """Remove the service, and end the holds that it enforced."""
    for unit in (PATH_UNIT, UNIT):
        systemd.ensure_no_unit(unit)
    kept.end_all()
    journals.clear(journals.SERVED)
    files.ensure_absent(CONFIG)


class Watch:
    """The service: `step` does all that is possible now, and returns when to look again."""

    def __init__(self) -> None:
        self._next_resume = 0.0
        self._missing: list[str] = []  # what the node's jobs lack on this machine

    def step(self) -> float | None:
        """Return after how many seconds to look again, None when nothing is left to do."""
        waits = [wait for wait in (self._hold(), self._resume()) if wait is not None]
        return min(waits, default=None)

    def _hold(self) -> float | None:
        try:
            return _HOLD_S if kept.keep() else None
        except (nodes.NodeError, CommandError) as e:
            logger.info("the hold waits: %s", e)
            return _HOLD_S

    def _resume(self) -> float | None:
        config = records.load(Config(), CONFIG)
        if not config.node or not (config.resume_after_reboot or config.resume_when_ready):
            return None  # no hook knew the node, or nothing is to be resumed
        if _is_hooks_business():
            return None
        now = time.monotonic()
        if now < self._next_resume:
            return self._next_resume - now
        try:
            wait = self._resume_node(config)
        except (nodes.NodeError, CommandError, slurmd_options.OptionsError) as e:
            logger.info("%s waits: %s", config.node, e)
            wait = _SLURM_S
        self._next_resume = time.monotonic() + (wait or 0.0)
        return wait

    def _resume_node(self, config: Config) -> float | None:
        if self._missing and readiness.missing() == self._missing:
            return _LOCAL_S  # without the controller
        node = nodes.show(config.node)
        if node is None:
            return _SLURM_S if config.resume_when_ready else None
        resume.note_service(node)
        held = resume.held(node, config)
        if held is None:
            return None
        if held.lacks:  # only the controller knows more
            return _SLURM_S
        self._missing = readiness.missing()
        lacks = self._missing or self._lacks(config, node)
        held = dataclasses.replace(held, lacks=tuple(lacks))
        if not lacks:
            held = resume.ensure(node.name, config, held)
        if held is None:
            return None
        logger.info("%s %s and waits for %s", config.node, held.why, ", ".join(held.lacks))
        if self._missing:
            return _LOCAL_S
        return _SLURM_S if config.health_check == "never" else _UNFIT_S

    def _lacks(self, config: Config, node: nodes.Node) -> list[str]:
        on_bus, with_driver = pci.SYS / pci.DEVICES, pci.PROC / "driver/nvidia/gpus"
        lacks: list[str] = []
        for card in sorted(journals.cards()):
            if not (on_bus / card).exists() and not (with_driver / card).exists():
                lacks.append(f"GPU {card}")
        options = slurmd_options.read()
        wanted = options.gres if options else None
        if not nodes.same_gres(node.gres, wanted):
            lacks.append(f"Gres={wanted or '(none)'} instead of {node.gres or '(none)'}")
        if lacks or config.health_check == "never":
            return lacks
        return health_timer.unfit(config.node, xids=config.health_xids)


def _is_hooks_business() -> bool:
    """Whether a hook, or the end of a hold, goes on from here."""
    if kept.grounds() or kept.maintenance() is not None:
        return True
    return (journals.STATE_DIR / journals.REGISTRATION).exists()


def main() -> int:
    """Run until nothing is left to do."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    watch = Watch()
    while (wait := watch.step()) is not None:
        time.sleep(wait)
    return 0


if __name__ == "__main__":
    sys.exit(main())
