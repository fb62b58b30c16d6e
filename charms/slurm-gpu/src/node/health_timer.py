"""The health check on this machine: the program, its timer, and its last findings."""

import collections.abc
import dataclasses
import pathlib
import time

import template
from gpu import xids as gpu_xids
from node import health
from slurm_ddp import files, packing, systemd

PROGRAM = pathlib.Path("/usr/local/sbin/gpu-health")
NVIDIA_SMI = pathlib.Path(health.NVIDIA_SMI)
SERVICE, TIMER = "gpu-health.service", "gpu-health.timer"
PYTHON = "/usr/bin/python3"
NO_SMI = f"there is no {NVIDIA_SMI} on this machine: install nvidia-utils of exactly the driver's version"


def ensure(node: str | None, xids: str = "") -> None:
    """Set up the timer for the node, if there is nvidia-smi; None for no timer."""
    if node is None or not can_look():
        ensure_absent()
        return
    # Checked, so that no quoting is needed in a unit file
    words = " ".join(xids.replace(",", " ").split())
    changed = files.ensure_file(PROGRAM, packing.pack(pathlib.Path(health.__file__)), mode=0o755)
    text = template.fill(
        SERVICE,
        python=PYTHON,
        program=PROGRAM,
        node=node,
        more=f' "--xids={words}"' if words else "",
    )
    changed |= bool(systemd.ensure_units({SERVICE: text, TIMER: template.fill(TIMER)}))
    if changed or not systemd.is_active(TIMER):
        systemd.enable_now(TIMER)


def ensure_absent() -> None:
    """Remove the timer and the program. The drain of a node is left to `compute.release`."""
    for unit in (TIMER, SERVICE):
        systemd.ensure_no_unit(unit)
    for path in (PROGRAM, health.STATE):
        files.ensure_absent(path)


def note_reset(gpus: collections.abc.Iterable[str]) -> None:
    """Make the health check ignore the Xids from before the reset of these cards.

    The kernel's log still holds them.
    """
    state = health.State.load()
    dataclasses.replace(state, resets=state.resets | dict.fromkeys(gpus, time.time())).save()


def can_look() -> bool:
    """Report whether the driver can be asked here."""
    return NVIDIA_SMI.exists()


def unfit(node: str | None, *, xids: str = "") -> list[str]:
    """Check now; return the findings to drain for, none without nvidia-smi."""
    if not can_look():
        return []
    return [
        str(one)
        for one in health.check(node, gpu_xids.parse(xids)).findings
        if one.level == health.DRAIN
    ]


def check(node: str | None, *, xids: str = "") -> dict[str, str]:
    """Check now, with or without the timer, and change nothing in Slurm."""
    answer = health.check(node, gpu_xids.parse(xids))
    findings = "\n".join(f"{one.level}: {one}" for one in answer.findings)
    results = {"result": answer.result, "findings": findings, "seconds": str(answer.seconds)}
    return {key: value for key, value in results.items() if value}
