"""The health check on this machine: the program, its timer, and what it said last."""

import collections.abc
import dataclasses
import json
import pathlib
import time

from controller import advice as slurm_advice
from driver import state as driver_state
from scripts import health as gpu_health
from scripts import nvml as gpu_nvml
from slurm_ddp import files, systemd
from slurm_ddp.run import CommandError, run
from slurm_ddp.slurm import nodes

PROGRAM = slurm_advice.PROGRAM
NVML_PROGRAM = PROGRAM.with_name("gpu-nvml")
NVIDIA_SMI = pathlib.Path(gpu_health.NVIDIA_SMI)
SERVICE, TIMER = "gpu-health.service", "gpu-health.timer"
PYTHON = "/usr/bin/python3"
_TIMEOUT_S = 70.0  # the program itself ends within 60 s
_NOTHING = f"there is no {gpu_nvml.LIBRARY} on this machine: install libnvidia-compute of exactly the driver's version"

_SERVICE = """\
# Written by the slurm-gpu charm.
[Unit]
Description=Check the GPUs of Slurm node {node}

[Service]
Type=oneshot
ExecStart={python} -I {program} check --act --json --node {node}{also}
# 1: drained, 2: something to look at. Both are answers.
SuccessExitStatus=1 2
TimeoutStartSec=60
Nice=10
"""
_TIMER = """\
# Written by the slurm-gpu charm.
[Unit]
Description=Check the GPUs every five minutes

[Timer]
OnActiveSec=1min
OnBootSec=2min
OnUnitInactiveSec=5min
RandomizedDelaySec=30

[Install]
WantedBy=timers.target
"""


class MonitorError(Exception):
    """The health check cannot be set up or run. `str()` is one line and says what to do."""


def ensure(node: str | None, setting: str, *, has_gpus: bool, dcgm: bool = False, xids: str = "") -> None:
    """Let the timer run where the option asks for it: with `auto`, where there are GPUs and a driver to ask.

    Never beside Slurm's own HealthCheckProgram: where that is this check, there is the program and no timer. It is then
    on machines without GPUs, too, since Slurm runs it everywhere.

    Args:
        node: the node's name, None while it has none.
        setting: the option health-check.
        has_gpus: whether the timer has something to look at.
        dcgm: whether NVIDIA's short diagnosis is part of it.
        xids: the option health-xids.
    """
    if node is not None and (setting == "slurm" or (setting in {"auto", "on"} and is_slurms())):
        _ensure_no_timer()
        files.ensure_file(gpu_health.OPTIONS, "".join(f"{word}\n" for word in _arguments(dcgm, xids)))
        _ensure_program()
        return
    if node is None or not has_gpus or setting == "off" or not can_look():
        ensure_absent()
        return
    files.ensure_absent(gpu_health.OPTIONS)
    also = "".join(f' "{word}"' for word in _arguments(dcgm, xids))
    changed = _ensure_program()
    changed |= systemd.ensure_unit(SERVICE, _SERVICE.format(python=PYTHON, program=PROGRAM, node=node, also=also))
    changed |= systemd.ensure_unit(TIMER, _TIMER)
    if changed or not systemd.is_active(TIMER):
        systemd.enable_now(TIMER)


def ensure_absent() -> None:
    """Take the timer and the program away. A node that it drained is `compute_seat.release`'s affair."""
    _ensure_no_timer()
    files.ensure_absent(PROGRAM)
    files.ensure_absent(NVML_PROGRAM)
    files.ensure_absent(gpu_health.STATE)
    files.ensure_absent(gpu_health.OPTIONS)
    files.ensure_absent(gpu_health.TEXTFILES / gpu_health.METRICS)


def note_reset(gpus: collections.abc.Iterable[str]) -> None:
    """Let the health check forget the Xids that these cards had before they were reset, which the log still holds."""
    state = gpu_health.State.load()
    dataclasses.replace(state, resets=state.resets | dict.fromkeys(gpus, time.time())).save()


def can_look() -> bool:
    """Whether something here can ask the driver: nvidia-smi, or its library."""
    return NVIDIA_SMI.exists() or any((folder / gpu_nvml.LIBRARY).exists() for folder in driver_state.LIBRARY_DIRS)


def is_slurms() -> bool:
    """Whether Slurm itself runs this check, as its HealthCheckProgram. A controller that does not answer runs none."""
    try:
        return _is_slurms()
    except nodes.NodeError:
        return False


def problem(setting: str) -> str | None:
    """Return what is wrong with the option health-check on this machine."""
    if setting == "on" and is_slurms():
        return (
            f"health-check=on contradicts HealthCheckProgram={PROGRAM} of slurm.conf: set it to slurm, or take that out"
        )
    try:
        lacks = setting == "slurm" and not _is_slurms()
    except nodes.NodeError:
        lacks = False  # not known before the controller answers
    if lacks:
        return f"health-check=slurm needs it in Slurm: {slurm_advice.command(slurm_advice.HEALTH_CHECK)}"
    if setting == "on" and not can_look():
        return f"health-check=on cannot ask the driver: {_NOTHING}"
    return None


def is_ours(reason: str | None) -> bool:
    """Whether the health check drained with this reason."""
    return (reason or "").startswith(gpu_health.REASON)


def complaint() -> str | None:
    """Return why jobs should stay away, as the last check said; None when it had nothing to say."""
    return gpu_health.State.load().reason or None


def unfit(node: str | None, *, dcgm: bool = False, xids: str = "") -> list[str]:
    """Look now; return what should keep jobs away. Where there is no driver's library nothing can look."""
    if not can_look():
        return []
    try:
        results = check(node, dcgm=dcgm, xids=xids)
    except MonitorError as e:
        return [str(e)]
    return [
        line.removeprefix("drain: ") for line in results.get("findings", "").splitlines() if line.startswith("drain: ")
    ]


def still_unfit(node: str | None, *, dcgm: bool = False, xids: str = "") -> str | None:
    """Return what should keep jobs away, None after as many passes in a row without a complaint as the timer waits for.

    Looks up to twice now, for a node that nothing will look at later.
    """
    if not can_look():
        return _NOTHING
    for _ in range(max(1, gpu_health.PASSES_TO_RESUME - gpu_health.State.load().passes)):
        complaints = unfit(node, dcgm=dcgm, xids=xids)
        if complaints:
            return "; ".join(complaints)
    return None


def check(node: str | None, *, dcgm: bool = False, xids: str = "") -> dict[str, str]:
    """Look now, and change nothing in Slurm. Works without the timer.

    Raises:
        MonitorError: nothing here can ask the driver, or the check itself failed.
    """
    if not can_look():
        raise MonitorError(_NOTHING)
    arguments = ["check", "--json", *(("--node", node) if node else ())]
    arguments += _arguments(dcgm, xids)
    try:
        done = run(PYTHON, "-I", gpu_health.__file__, *arguments, timeout=_TIMEOUT_S, check=False)
        answer = json.loads(done.stdout)
        findings = [f"{one['level']}: {one['text']} {one['gpu']}".strip() for one in answer["findings"]]
        results = {"result": str(answer["result"]), "findings": "\n".join(findings), "seconds": str(answer["seconds"])}
    except (CommandError, ValueError, KeyError, TypeError) as e:
        raise MonitorError(f"gpu-health: {e}") from e
    return {key: text for key, text in results.items() if text}


def _arguments(dcgm: bool, xids: str) -> list[str]:
    """Return what makes the program look at more. `xids` was checked, so that no quoting is needed in a unit file."""
    words = " ".join(xids.replace(",", " ").split())
    return [*(("--dcgm",) if dcgm else ()), *((f"--xids={words}",) if words else ())]


def _is_slurms() -> bool:
    return nodes.setting("HealthCheckProgram") == str(PROGRAM)


def _ensure_no_timer() -> None:
    for unit in (TIMER, SERVICE):
        systemd.ensure_no_unit(unit)


def _ensure_program() -> bool:
    changed = files.ensure_file(NVML_PROGRAM, pathlib.Path(gpu_nvml.__file__).read_text(), mode=0o755)
    return changed | files.ensure_file(PROGRAM, pathlib.Path(gpu_health.__file__).read_text(), mode=0o755)
