"""The check of idle nodes by a timer on the leader's login host; the timer runs this file.

The program `ddp` checks them as the submit user, and never delays a job. This file, as root, drains
nodes that failed twice; slurm-gpu on the node holds it from then on, until an administrator resumes
it.
"""

import collections.abc
import json
import logging
import pathlib
import sys
import typing

import program
from slurm_ddp import files, systemd, watchdog
from slurm_ddp.commands import CommandError

STATE = pathlib.Path("/var/lib/slurm-ddp-node-check")
SERVICE, TIMER = "slurm-ddp-node-check.service", "slurm-ddp-node-check.timer"
REASON = "node-check: "
_TEMPLATES = pathlib.Path(__file__).with_name("templates")
_LONGEST_S = 3500.0
_SHARE = 3  # at most one of so many nodes is drained: what more nodes have is the cluster's fault

logger = logging.getLogger(__name__)


def follow(
    unit: str, user: str, config: collections.abc.Mapping[str, object], *, is_wanted: bool
) -> None:
    """Set up the timer, or remove it; the unit's own work goes on if systemd refuses."""
    if not is_wanted:
        ensure_none(unit)
        return
    try:
        ensure(unit, user, config)
    except CommandError as e:
        logger.warning("idle nodes are not checked: %s", e)


def ensure(unit: str, user: str, config: collections.abc.Mapping[str, object]) -> None:
    """Set up the timer. Raises CommandError if systemd refuses."""
    settings = _settings(unit)
    text = json.dumps({"unit": unit, "user": user, "config": dict(config)}, sort_keys=True) + "\n"
    settings.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.ensure_file(settings, text, mode=0o600)
    source = pathlib.Path(__file__).resolve()
    library = f"{pathlib.Path(files.__file__).resolve().parents[1]}:{source.parent}"
    place = {"program": source, "path": library, "python": sys.executable, "settings": settings}
    service = (_TEMPLATES / SERVICE).read_text().format(unit=unit, **place)
    timer = (_TEMPLATES / TIMER).read_text()
    changed = systemd.ensure_units({SERVICE: service, TIMER: timer})
    if changed or not systemd.is_active(TIMER):
        systemd.enable_now(TIMER)


def ensure_none(unit: str) -> None:
    """Remove the timer, unless another unit on this machine has set it up."""
    if not _settings(unit).exists():
        return
    for name in (TIMER, SERVICE):
        systemd.ensure_no_unit(name)
    files.ensure_absent(_settings(unit))


def check(settings: dict[str, typing.Any]) -> dict[str, str]:
    """Have the idle nodes checked; return why nodes are unfit, by name. Raises ProgramError."""
    request = {
        "do": "doctor",
        "params": {"idle": True},
        "config": settings["config"],
        "unit": settings["unit"],
    }
    answer = program.ask(settings["user"], request, logger.info, timeout_s=_LONGEST_S)
    if answer.error:
        raise program.ProgramError(answer.error)
    logger.info("%s", answer.results["verdict"])
    unfit: dict[str, str] = {}
    for line in str(answer.results["unfit"]).splitlines():
        name, colon, why = line.partition(": ")
        if colon:
            unfit[name] = why
    return unfit


def drain(unfit: collections.abc.Mapping[str, str]) -> list[str]:
    """Drain the unfit nodes, at most a third of all; return those that were drained.

    Raises CommandError.
    """
    listed = watchdog.show_nodes()
    num_drained = sum(watchdog.is_drained_by(REASON, node) for node in listed)
    room = max(1, len(listed) // _SHARE) - num_drained
    drained: list[str] = []
    for node in listed:
        if node.name not in unfit or node.is_drained:
            continue
        if len(drained) >= room:
            logger.warning("%s is not drained, since too many nodes are", node.name)
            continue
        watchdog.drain(node.name, watchdog.drain_reason(REASON, [unfit[node.name]]))
        drained.append(node.name)
    return drained


def main() -> int:
    """Check the idle nodes once, and return the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    settings = json.loads(pathlib.Path(sys.argv[1]).read_text())
    try:
        unfit = check(settings)
    except program.ProgramError as e:
        logger.error("idle nodes are not checked: %s", e)
        return 1
    for name in drain(unfit) if unfit else ():
        logger.warning("%s is drained: %s", name, unfit[name])
    return 0


def _settings(unit: str) -> pathlib.Path:
    return STATE / f"{unit.replace('/', '-')}.json"


if __name__ == "__main__":  # pragma: no cover
    sys.exit(main())
