"""The health check on this machine: the program, its timer, and what it said last."""

import json
import pathlib

import gpu_health
from slurm_ddp import files, systemd
from slurm_ddp.run import CommandError, run

PROGRAM = pathlib.Path("/usr/local/sbin/gpu-health")
NVIDIA_SMI = pathlib.Path(gpu_health.NVIDIA_SMI)
SERVICE, TIMER = "gpu-health.service", "gpu-health.timer"
SETTINGS = ("auto", "on", "off")
PYTHON = "/usr/bin/python3"
_TIMEOUT_S = 70.0  # the program itself ends within 60 s

_SERVICE = """\
# Written by the slurm-gpu charm.
[Unit]
Description=Check the GPUs of Slurm node {node}

[Service]
Type=oneshot
ExecStart={python} -I {program} check --act --json --node {node}
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


def ensure(node: str | None, setting: str, *, has_gpus: bool) -> None:
    """Let the timer run where the option asks for it: with `auto`, where there are GPUs and nvidia-smi."""
    if node is None or not has_gpus or setting == "off" or not NVIDIA_SMI.exists():
        ensure_absent()
        return
    changed = _ensure_program()
    changed |= systemd.ensure_unit(SERVICE, _SERVICE.format(python=PYTHON, program=PROGRAM, node=node))
    changed |= systemd.ensure_unit(TIMER, _TIMER)
    if changed or not systemd.is_active(TIMER):
        systemd.enable_now(TIMER)


def ensure_absent() -> None:
    """Take the timer and the program away. A node that it drained stays drained, with its reason."""
    for unit in (TIMER, SERVICE):
        systemd.ensure_no_unit(unit)
    files.ensure_absent(PROGRAM)
    files.ensure_absent(gpu_health.STATE)


def problem(setting: str) -> str | None:
    """Return what is wrong with the option health-check on this machine."""
    if setting not in SETTINGS:
        return f"health-check: {setting!r} is none of {', '.join(SETTINGS)}"
    if setting == "on" and not NVIDIA_SMI.exists():
        return f"health-check=on needs {NVIDIA_SMI}: install nvidia-utils of the driver's branch"
    return None


def complaint() -> str | None:
    """Return why jobs should stay away, as the last check said; None when it had nothing to say."""
    return gpu_health.State.load().reason or None


def check(node: str | None) -> dict[str, str]:
    """Look now, and change nothing in Slurm. Works without the timer.

    Raises:
        MonitorError: there is no nvidia-smi here, or the check itself failed.
    """
    if not NVIDIA_SMI.exists():
        raise MonitorError(f"there is no {NVIDIA_SMI} on this machine")
    arguments = ["check", "--json", *(("--node", node) if node else ())]
    try:
        done = run(PYTHON, "-I", gpu_health.__file__, *arguments, timeout=_TIMEOUT_S, check=False)
        answer = json.loads(done.stdout)
        findings = [f"{one['level']}: {one['text']} {one['gpu']}".strip() for one in answer["findings"]]
        results = {"result": str(answer["result"]), "findings": "\n".join(findings), "seconds": str(answer["seconds"])}
    except (CommandError, ValueError, KeyError, TypeError) as e:
        raise MonitorError(f"gpu-health: {e}") from e
    return {key: text for key, text in results.items() if text}


def _ensure_program() -> bool:
    return files.ensure_file(PROGRAM, pathlib.Path(gpu_health.__file__).read_text(), mode=0o755)
