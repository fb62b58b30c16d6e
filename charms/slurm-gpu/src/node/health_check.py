"""The health check on this machine: the program, its timer, and its last findings."""

import collections.abc
import dataclasses
import json
import pathlib
import tempfile
import time

from driver import state as driver_state
from gpu import nvml
from scripts import health
from scripts import nvml as nvml_report
from slurm_ddp import files, systemd, watchdog
from slurm_ddp.run import CommandError, run
from slurm_ddp.slurm import advice, nodes

PROGRAM = pathlib.Path("/usr/local/sbin/gpu-health")
HEALTH_CHECK = {"HealthCheckProgram": str(PROGRAM), "HealthCheckInterval": "300"}  # in slurm.conf
NVML_PROGRAM = PROGRAM.with_name(health.NVML_PROGRAM)
NVIDIA_SMI = pathlib.Path(health.NVIDIA_SMI)
SERVICE, TIMER = "gpu-health.service", "gpu-health.timer"
PYTHON = "/usr/bin/python3"
_TIMEOUT_S = 70.0  # the program itself ends within 60 s
_NO_LIBRARY = f"there is no {nvml.LIBRARY} on this machine: install libnvidia-compute of exactly the driver's version"
_CONTRADICTS = (
    f"health-check=on contradicts HealthCheckProgram={PROGRAM} of slurm.conf: set it to slurm, or take that out"
)
_NEEDS_SLURM = f"health-check=slurm needs it in Slurm: {advice.slurm_conf(HEALTH_CHECK)}"

_SERVICE = """\
# Written by the slurm-gpu charm.
[Unit]
Description=Check the GPUs of Slurm node {node}

[Service]
Type=oneshot
ExecStart={python} -I {program} check --act --json --node {node}{more}
# 1: drained, 2: warnings. Both are results.
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
    """The health check cannot be set up or run. `str()` is one line: what failed, and what to do."""


def ensure(node: str | None, setting: str, *, has_gpus: bool, dcgm: bool = False, xids: str = "") -> None:
    """Set up the timer where the option asks for it: with `auto`, where there are GPUs and a driver to ask.

    Where this check is Slurm's own HealthCheckProgram, the program is installed, on machines without GPUs too since
    Slurm runs it everywhere, and no timer.

    Args:
        node: the node's name, None while it has none.
        setting: the option health-check.
        has_gpus: whether the timer has something to look at.
        dcgm: whether NVIDIA's short diagnosis is part of it.
        xids: the option health-xids.
    """
    if node is not None and (setting == "slurm" or (setting in {"auto", "on"} and is_slurms())):
        _ensure_no_timer()
        files.ensure_file(health.OPTIONS, "".join(f"{word}\n" for word in _arguments(dcgm, xids)))
        _install(PROGRAM, NVML_PROGRAM)
        return
    if node is None or not has_gpus or setting == "off" or not can_look():
        ensure_absent()
        return
    files.ensure_absent(health.OPTIONS)
    more = "".join(f' "{word}"' for word in _arguments(dcgm, xids))
    changed = _install(PROGRAM, NVML_PROGRAM)
    changed |= systemd.ensure_unit(SERVICE, _SERVICE.format(python=PYTHON, program=PROGRAM, node=node, more=more))
    changed |= systemd.ensure_unit(TIMER, _TIMER)
    if changed or not systemd.is_active(TIMER):
        systemd.enable_now(TIMER)


def ensure_absent() -> None:
    """Remove the timer and the programs. The drain of a node is left to `compute.release`."""
    _ensure_no_timer()
    for path in (PROGRAM, NVML_PROGRAM, health.STATE, health.OPTIONS):
        files.ensure_absent(path)


def note_reset(gpus: collections.abc.Iterable[str]) -> None:
    """Make the health check ignore the Xids from before the reset of these cards, which the log still holds."""
    state = health.State.load()
    dataclasses.replace(state, resets=state.resets | dict.fromkeys(gpus, time.time())).save()


def can_look() -> bool:
    """Tell whether the driver can be asked here: with nvidia-smi, or through its library."""
    return NVIDIA_SMI.exists() or any((folder / nvml.LIBRARY).exists() for folder in driver_state.LIBRARY_DIRS)


def is_slurms() -> bool | None:
    """Tell whether this check is Slurm's HealthCheckProgram; None while the controller does not respond."""
    try:
        return nodes.setting("HealthCheckProgram") == str(PROGRAM)
    except nodes.NodeError:
        return None


def problem(setting: str) -> str | None:
    """State what is wrong with the option health-check on this machine; nothing is known without a controller."""
    by_slurm = is_slurms() if setting in {"on", "slurm"} else None
    if setting == "on" and by_slurm:
        return _CONTRADICTS
    if setting == "slurm" and by_slurm is False:
        return _NEEDS_SLURM
    return f"health-check=on cannot ask the driver: {_NO_LIBRARY}" if setting == "on" and not can_look() else None


def is_ours(reason: str | None) -> bool:
    """Tell whether the health check drained with this reason."""
    return (reason or "").startswith(health.REASON)


def complaint() -> str | None:
    """Read the last check's reason to keep jobs away, None without one."""
    return health.State.load().reason or None


def unfit(node: str | None, *, dcgm: bool = False, xids: str = "") -> list[str]:
    """Check now; return the findings to drain for, none where there is no driver's library to ask."""
    if not can_look():
        return []
    try:
        results = check(node, dcgm=dcgm, xids=xids)
    except MonitorError as e:
        return [str(e)]
    prefix = f"{health.DRAIN}: "
    return [line.removeprefix(prefix) for line in results.get("findings", "").splitlines() if line.startswith(prefix)]


def still_unfit(node: str | None, *, dcgm: bool = False, xids: str = "") -> str | None:
    """Check as often as the passes in a row still lack which the timer waits for; return the first findings.

    This is for a node that nothing will check later.
    """
    if not can_look():
        return _NO_LIBRARY
    for _ in range(max(1, watchdog.PASSES_TO_RESUME - health.State.load().passes)):
        findings = unfit(node, dcgm=dcgm, xids=xids)
        if findings:
            return "; ".join(findings)
    return None


def check(node: str | None, *, dcgm: bool = False, xids: str = "") -> dict[str, str]:
    """Check now, with or without the timer, and change nothing in Slurm.

    Raises:
        MonitorError: the driver cannot be asked here, or the check itself failed.
    """
    if not can_look():
        raise MonitorError(_NO_LIBRARY)
    arguments = ["check", "--json", *(("--node", node) if node else ()), *_arguments(dcgm, xids)]
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, PROGRAM.name)
        _install(program, program.with_name(NVML_PROGRAM.name))
        try:
            answer = json.loads(run(PYTHON, "-I", program, *arguments, timeout=_TIMEOUT_S, check=False).stdout)
            findings = [f"{one['level']}: {one['text']} {one['gpu']}".strip() for one in answer["findings"]]
            results = {"result": answer["result"], "findings": "\n".join(findings), "seconds": answer["seconds"]}
        except (CommandError, ValueError, KeyError, TypeError) as e:
            raise MonitorError(f"gpu-health: {e}") from e
    return {key: str(value) for key, value in results.items() if value != ""}


def _arguments(dcgm: bool, xids: str) -> list[str]:
    """Return the options for more checks. `xids` was checked, so that no quoting is needed in a unit file."""
    words = " ".join(xids.replace(",", " ").split())
    return [*(("--dcgm",) if dcgm else ()), *((f"--xids={words}",) if words else ())]


def _ensure_no_timer() -> None:
    for unit in (TIMER, SERVICE):
        systemd.ensure_no_unit(unit)


def _install(program: pathlib.Path, nvml_program: pathlib.Path) -> bool:
    """Write the two programs; return whether they changed."""
    changed = files.ensure_file(nvml_program, watchdog.pack(pathlib.Path(nvml_report.__file__)), mode=0o755)
    return changed | files.ensure_file(program, watchdog.pack(pathlib.Path(health.__file__)), mode=0o755)
