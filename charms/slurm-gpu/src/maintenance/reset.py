"""What a person asks to be done to a node's cards: another driver, a reset, a MIG layout; each on a node free of jobs.

Each task holds the node (`gpu_hold`), does its work and leaves the rest to `gpu_work`: the node is registered anew
and put back into the state it was found in, in this action or, where that takes longer, by the next hooks.
"""

import collections.abc
import dataclasses
import json
import pathlib
import re
import time

from driver import install as driver_install
from driver import plan as driver_plan
from driver import state as driver_state
from driver import upgrade as driver_upgrade
from gpu import detect as gpu_detect
from gpu import pci as gpu_pci
from maintenance import hold as gpu_hold
from maintenance import mig as gpu_mig
from node import health_check as gpu_monitor
from slurm_ddp import files, systemd
from slurm_ddp.run import CommandError, run
from slurm_ddp.slurm import nodes

NVIDIA_SMI = pathlib.Path(gpu_mig.NVIDIA_SMI)
PROGRAM = pathlib.Path("/usr/local/sbin/gpu-mig")
SERVICE = "slurm-gpu-mig.service"
ROOTS = gpu_detect.Roots()
MOST_WAIT_S, MOST_PATIENCE_S = 3600, 7 * 24 * 3600
_POLL_S = 10.0
_RESET_S = 180.0
_BUS_ID = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
# NVSwitches of the first generation for which one GPU cannot be reset alone (nvidia-smi(1), "-r": GPUs connected by
# NVLink are reset together; from the H100 on, each by itself).
_FIRST_SWITCH = 0x1AF1

_UNIT = """\
# Written by the slurm-gpu charm: MIG instances do not survive a reboot.
[Unit]
Description=Make the MIG layouts of this machine's GPUs
Wants=nvidia-persistenced.service
After=nvidia-persistenced.service nvidia-fabricmanager.service
Before=slurmd.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={python} -I {program} apply
TimeoutStartSec=600

[Install]
WantedBy=multi-user.target
"""

Log = collections.abc.Callable[[str], None]


class TaskError(Exception):
    """What was asked cannot be done. `str()` is one line: which parameter, why, what to type."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """How long a person will wait, and how to tell them."""

    wait_s: float
    log: Log


def seconds(name: str, number: object, most: int) -> float:
    """Return a parameter in seconds.

    Raises:
        TaskError: it is not in its range.
    """
    if not isinstance(number, int) or not 0 <= number <= most:
        raise TaskError(f"{name}: {number} is not between 0 and {most} seconds")
    return float(number)


def reset(gpu: str, node: str | None, asked: Asked) -> dict[str, str]:
    """Reset one card, or with "all" all of them. Afterwards the node is still held; `gpu_work` gives it back.

    Raises:
        TaskError: there is no such card, jobs still run, or the driver refuses.
        NodeError, HoldError: the node cannot be held.
    """
    cards = _cards()
    if gpu != "all":
        gpu = _known(gpu, cards)
    if gpu != "all" and _resets_together():
        raise TaskError("gpu: this board's NVSwitches reset all GPUs together: gpu=all")
    _need_smi()
    with_gpus = f"GPU {gpu}" if gpu != "all" else "all GPUs"
    _hold(gpu_hold.RESET, node, gpu, asked)
    asked.log(f"resetting {with_gpus}")
    driver_install.stop_holders()
    try:
        run(NVIDIA_SMI, "-r", *(() if gpu == "all" else ("-i", gpu)), timeout=_RESET_S)
        gpu_monitor.note_reset(cards if gpu == "all" else (gpu,))
        gpu_mig.apply_all()  # a reset takes the instances with it
    except (CommandError, gpu_mig.MigError) as e:
        raise TaskError(f"{with_gpus} could not be reset: {e}") from e
    finally:
        driver_install.ensure_services()
    return {"result": "reset", "gpus": gpu if gpu != "all" else ", ".join(cards)}


def set_mig(gpu: str, profiles: str, node: str | None, asked: Asked) -> dict[str, str]:
    """Give one card, or with "all" each, a MIG layout, which lasts. The node is still held afterwards.

    Raises:
        TaskError: the layout does not fit, there is no such card, jobs still run, or the driver refuses.
        NodeError, HoldError: the node cannot be held.
    """
    _need_smi()
    try:
        layout = gpu_mig.parse(profiles)
        there = {card.bus_id: card for card in gpu_mig.cards()}
        chosen = sorted(there) if gpu == "all" else [_known(gpu, tuple(there))]
        for bus_id in chosen:
            if there[bus_id].enabled is None:
                raise TaskError(f"gpu: {there[bus_id].name} at {bus_id} has no MIG")
            gpu_mig.check(there[bus_id].name, layout)
        before = gpu_mig.load()
    except gpu_mig.MigError as e:
        raise TaskError(str(e)) from e
    if all(there[bus_id].has(layout) and before.get(bus_id, ()) == layout for bus_id in chosen):
        return {"result": "unchanged", "layout": _spell(layout)}
    _hold(gpu_hold.MIG, node, f"{gpu}: {_spell(layout)}", asked)
    driver_install.stop_holders()
    _keep(before | dict.fromkeys(chosen, layout))  # first, so that an interrupted one is finished
    done: list[str] = []
    try:
        for bus_id in chosen:
            asked.log(f"{bus_id}: {_spell(layout)}")
            done.append(bus_id)
            gpu_mig.apply(there[bus_id], layout)
    except gpu_mig.RebootNeeded as e:
        gpu_hold.until_reboot(driver_upgrade.boot_id())
        return {
            "result": "reboot",
            "detail": f"{e}, which comes with the next event",
        }
    except gpu_mig.MigError as e:
        _keep(before)
        for bus_id in done:  # all or none
            _restore(there[bus_id])
        raise TaskError(f"profiles: {e}") from e
    finally:
        driver_install.ensure_services()
    return {"result": "done", "layout": _spell(layout), "gpus": ", ".join(chosen)}


def upgrade(
    wanted: driver_plan.Spec,
    node: str | None,
    patience_s: float,
    asked: Asked,
    go_on: collections.abc.Callable[[], None],
) -> dict[str, str]:
    """Change the driver, as far as that goes while the person waits; the next hooks do the rest.

    Args:
        wanted: which driver.
        node: the node's name.
        patience_s: how long jobs are waited for.
        asked: how long the person waits.
        go_on: what a hook does.

    Raises:
        TaskError: a step failed; the text says which and what to do.
        DriverError: it cannot begin.
    """
    begun = driver_upgrade.begin(node, wanted, patience_s=patience_s)
    if begun is None:
        return {"result": "up-to-date", "driver": _loaded()}
    asked.log(begun.text)
    told = begun.text
    end = time.monotonic() + asked.wait_s
    while True:
        go_on()
        now = driver_upgrade.Upgrade.load()
        if now is None:
            return {"result": "done", "driver": _loaded()}
        if now.failed:
            raise TaskError(now.text)
        if now.text != told:
            told = now.text
            asked.log(told)
        if now.step is driver_upgrade.Step.REBOOT:
            return {"result": "reboot", "driver": now.plan.version, "detail": now.text}
        if time.monotonic() >= end:
            return {"result": "waiting", "driver": now.plan.version, "detail": now.text}
        time.sleep(_POLL_S)


def ensure_no_layouts() -> None:
    """Forget the layouts; the cards keep what they have until a reboot."""
    systemd.ensure_no_unit(SERVICE)
    files.ensure_absent(PROGRAM)
    files.ensure_absent(gpu_mig.LAYOUTS)


def _hold(kind: str, node: str | None, why: str, asked: Asked) -> None:
    """Keep the node free, and wait for its jobs; give it back where they stay."""
    if node is None:
        return
    if driver_upgrade.Upgrade.load() is not None:
        raise TaskError("a driver upgrade is under way: wait for it, or run upgrade-driver cancel=true")
    found = gpu_hold.take(kind, node, why)
    end = time.monotonic() + asked.wait_s
    told = ""
    while (busy := gpu_hold.in_the_way(found)) is not None:
        if time.monotonic() >= end:
            gpu_hold.give_back()
            raise TaskError(f"{busy} still ran on {node} after {asked.wait_s:g} s, so nothing was done: try later")
        if busy != told:
            asked.log(f"{node} is drained: waiting for {busy}")
            told = busy
        time.sleep(_POLL_S)
        found = nodes.show(node)
        if found is not None and not gpu_hold.is_ours(found, kind):  # a job may start at any time
            gpu_hold.forget()
            raise TaskError(f"somebody else changed the state of {node} before it was free, so nothing was done")


def _keep(layouts: dict[str, tuple[str, ...]]) -> None:
    """Write the layouts down, and have them made at boot."""
    if not layouts:
        ensure_no_layouts()
        return
    kept = {bus_id: list(layout) for bus_id, layout in sorted(layouts.items())}
    files.ensure_file(gpu_mig.LAYOUTS, json.dumps(kept) + "\n")
    files.ensure_file(PROGRAM, pathlib.Path(gpu_mig.__file__).read_text(), mode=0o755)
    systemd.ensure_unit(SERVICE, _UNIT.format(python="/usr/bin/python3", program=PROGRAM))
    systemd.enable(SERVICE)


def _restore(card: gpu_mig.Card) -> None:
    try:
        now = next(one for one in gpu_mig.cards() if one.bus_id == card.bus_id)
        gpu_mig.apply(now, card.instances)
    except (gpu_mig.MigError, StopIteration):
        pass  # the registration tells what the card has


def _cards() -> tuple[str, ...]:
    return tuple(card.bus_id for card in gpu_pci.cards(ROOTS.sys))


def _known(gpu: str, cards: tuple[str, ...]) -> str:
    if not _BUS_ID.fullmatch(gpu):
        raise TaskError(f"gpu: {gpu!r:.60} is not a bus id such as 0000:1b:00.0; the action detect shows them")
    bus_id = gpu_mig.bus(gpu)
    if bus_id not in cards:
        raise TaskError(f"gpu: no card at {bus_id}; there is {', '.join(cards) or 'none'}")
    return bus_id


def _resets_together() -> bool:
    return _FIRST_SWITCH in gpu_pci.switches(ROOTS.sys)


def _need_smi() -> None:
    if not NVIDIA_SMI.exists():
        raise TaskError(
            f"there is no {NVIDIA_SMI} on this machine, and NVML alone cannot do it: {driver_install.utils_advice()}"
        )


def _loaded() -> str:
    return driver_state.look(ROOTS.proc, ROOTS.sys).loaded or ""


def _spell(layout: tuple[str, ...]) -> str:
    return ", ".join(layout) or "off"
