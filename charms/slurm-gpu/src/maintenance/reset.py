"""Reset a card on a node free of jobs.

Afterwards `maintenance.hooks` registers the node and restores its state.

`known`, `check_smi` and `free` serve MIG layouts as well: the card that is asked for, and a node
free of jobs. What cannot be done raises `ActionError`, a node that cannot be held `NodeError` or
`KeptError`.
"""

import time

import pci
from driver import install
from gpu import mig
from maintenance import services
from node import health_timer, kept
from slurm_ddp.charm import ActionError, Log, Results
from slurm_ddp.commands import CommandError, run
from slurm_ddp.slurm import nodes

_RESET_S = 180.0
# First-generation NVSwitches, whose GPUs cannot be reset one at a time (nvidia-smi(1), "-r": GPUs
# connected by NVLink are reset together; from the H100 on, each by itself).
_FIRST_SWITCH = 0x1AF1
_POLL_S = 10.0


def reset(gpu: str, node: str | None, wait_s: float, log: Log) -> Results:
    """Reset one card, or with "all" all of them. The node is still held afterwards."""
    cards = tuple(card.bus_id for card in pci.cards())
    chosen = cards if gpu == "all" else (known(gpu, cards),)
    if gpu != "all" and _FIRST_SWITCH in pci.switches():
        raise ActionError("gpu: this board's NVSwitches reset all GPUs together: gpu=all")
    check_smi()
    shown = "all GPUs" if gpu == "all" else f"GPU {chosen[0]}"
    free(kept.RESET, node, "all" if gpu == "all" else chosen[0], wait_s, log)
    log(f"resetting {shown}")
    services.stop_holders()
    try:
        run(install.NVIDIA_SMI, "-r", *(() if gpu == "all" else ("-i", *chosen)), timeout=_RESET_S)
        health_timer.note_reset(chosen)
        mig.apply_all()  # a reset takes the instances with it
    except (CommandError, mig.MigError) as e:
        raise ActionError(f"{shown} could not be reset: {e}") from e
    finally:
        services.ensure_running()
    return {"result": "reset", "gpus": ", ".join(chosen)}


def known(gpu: str, cards: tuple[str, ...]) -> str:
    """Return the bus id of a card, in sysfs' spelling."""
    bus_id = pci.bus_id(gpu)
    if bus_id is None or gpu != gpu.strip():
        raise ActionError(
            f"gpu: {gpu!r:.60} is not a bus id such as 0000:1b:00.0; the action detect shows them"
        )
    if bus_id not in cards:
        raise ActionError(f"gpu: no card at {bus_id}; there is {', '.join(cards) or 'none'}")
    return bus_id


def check_smi() -> None:
    """Raise `ActionError` without nvidia-smi."""
    if not health_timer.can_look():
        raise ActionError(health_timer.NO_SMI)


def free(
    kind: str, node: str | None, why: str, wait_s: float, log: Log, *, drain: bool = True
) -> None:
    """Hold the node and wait until it is free of jobs; release it if they stay.

    Without `drain` none may run.
    """
    if node is None:
        return
    if not drain and (jobs := kept.jobs_on(nodes.show(node))) is not None:
        raise ActionError(f"{node} has {jobs}: try again when it has none, or with drain=true")
    found = kept.take(kind, node, why)
    end = time.monotonic() + (wait_s if drain else 0)
    reported = ""
    while (jobs := kept.jobs_on(found)) is not None:
        if time.monotonic() >= end:
            kept.restore()
            raise ActionError(
                f"{node} still had {jobs} after {wait_s:g} s, so nothing was done: try later"
            )
        if jobs != reported:
            log(f"{node} is drained: waiting for {jobs}")
            reported = jobs
        time.sleep(_POLL_S)
        found = nodes.show(node)
        if found is not None and not kept.is_taken(found, kind):  # a job may start at any time
            kept.forget()
            raise ActionError(
                f"another changed the state of {node} before it was free, so nothing was done"
            )
