"""The health check on this machine: the program, its timer, and its last findings."""

import collections.abc
import dataclasses
import json
import pathlib
import tempfile
import time

import template
from scripts import health
from slurm_ddp import files, systemd, watchdog
from slurm_ddp.run import CommandError, run

PROGRAM = pathlib.Path("/usr/local/sbin/gpu-health")
NVIDIA_SMI = pathlib.Path(health.NVIDIA_SMI)
SERVICE, TIMER = "gpu-health.service", "gpu-health.timer"
PYTHON = "/usr/bin/python3"
_TIMEOUT_S = 70.0  # the program itself ends within 60 s
NO_SMI = f"there is no {NVIDIA_SMI} on this machine: install nvidia-utils of exactly the driver's version"


class MonitorError(Exception):
    """The health check cannot be set up or run. `str()` is one line: what failed, and what to do."""


def ensure(node: str | None, xids: str = "") -> None:
    """Set up the timer for the node, if there is nvidia-smi; None for no timer."""
    if node is None or not can_look():
        ensure_absent()
        return
    more = "".join(f' "{word}"' for word in _arguments(xids))
    changed = _install(PROGRAM)
    changed |= systemd.ensure_unit(
        SERVICE, template.fill(SERVICE, python=PYTHON, program=PROGRAM, node=node, more=more)
    )
    changed |= systemd.ensure_unit(TIMER, template.fill(TIMER))
    if changed or not systemd.is_active(TIMER):
        systemd.enable_now(TIMER)


def ensure_absent() -> None:
    """Remove the timer and the program. The drain of a node is left to `compute.release`."""
    for unit in (TIMER, SERVICE):
        systemd.ensure_no_unit(unit)
    for path in (PROGRAM, health.STATE):
        files.ensure_absent(path)


def note_reset(gpus: collections.abc.Iterable[str]) -> None:
    """Make the health check ignore the Xids from before the reset of these cards, which the log still holds."""
    state = health.State.load()
    dataclasses.replace(state, resets=state.resets | dict.fromkeys(gpus, time.time())).save()


def can_look() -> bool:
    """Report whether the driver can be asked here."""
    return NVIDIA_SMI.exists()


def unfit(node: str | None, *, xids: str = "") -> list[str]:
    """Check now; return the findings to drain for, none without nvidia-smi."""
    if not can_look():
        return []
    try:
        results = check(node, xids=xids)
    except MonitorError as e:
        return [str(e)]
    prefix = f"{health.DRAIN}: "
    return [line.removeprefix(prefix) for line in results.get("findings", "").splitlines() if line.startswith(prefix)]


def check(node: str | None, *, xids: str = "") -> dict[str, str]:
    """Check now, with or without the timer, and change nothing in Slurm.

    Raises:
        MonitorError: the driver cannot be asked here, or the check itself failed.
    """
    if not can_look():
        raise MonitorError(NO_SMI)
    arguments = [*(("--node", node) if node else ()), *_arguments(xids)]
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, PROGRAM.name)
        _install(program)
        try:
            answer = json.loads(run(PYTHON, "-I", program, *arguments, timeout=_TIMEOUT_S, check=False).stdout)
            findings = [f"{one['level']}: {one['text']} {one['gpu']}".strip() for one in answer["findings"]]
            results = {"result": answer["result"], "findings": "\n".join(findings), "seconds": answer["seconds"]}
        except (CommandError, ValueError, KeyError, TypeError) as e:
            raise MonitorError(f"gpu-health: {e}") from e
    return {key: str(value) for key, value in results.items() if value != ""}


def _arguments(xids: str) -> list[str]:
    """Return the options for more checks. `xids` was checked, so that no quoting is needed in a unit file."""
    words = " ".join(xids.replace(",", " ").split())
    return [f"--xids={words}"] if words else []


def _install(program: pathlib.Path) -> bool:
    """Write the program; return whether it changed."""
    return files.ensure_file(program, watchdog.pack(pathlib.Path(health.__file__)), mode=0o755)
