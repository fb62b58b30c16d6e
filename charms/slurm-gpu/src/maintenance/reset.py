"""Reset a card on a node free of jobs; `maintenance.work` registers the node and restores its state afterwards."""

from driver import install, upgrade
from gpu import pci
from maintenance import hold, task
from node import health_check
from scripts import mig
from slurm_ddp.charm import ActionError, Log, Results
from slurm_ddp.run import CommandError, run

_RESET_S = 180.0
# NVSwitches of the first generation for which one GPU cannot be reset alone (nvidia-smi(1), "-r": GPUs connected by
# NVLink are reset together; from the H100 on, each by itself).
_FIRST_SWITCH = 0x1AF1


def reset(gpu: str, node: str | None, wait_s: float, log: Log) -> Results:
    """Reset one card, or with "all" all of them. The node is still held afterwards.

    Raises:
        ActionError: there is no such card, jobs still run after `wait_s` seconds, or the driver refuses.
        NodeError, HoldError: the node cannot be held.
    """
    cards = tuple(card.bus_id for card in pci.cards(upgrade.ROOTS.sys))
    chosen = cards if gpu == "all" else (task.known(gpu, cards),)
    if gpu != "all" and _FIRST_SWITCH in pci.switches(upgrade.ROOTS.sys):
        raise ActionError("gpu: this board's NVSwitches reset all GPUs together: gpu=all")
    task.check_smi()
    shown = "all GPUs" if gpu == "all" else f"GPU {chosen[0]}"
    task.free(hold.RESET, node, "all" if gpu == "all" else chosen[0], wait_s, log)
    log(f"resetting {shown}")
    install.stop_holders()
    try:
        run(install.NVIDIA_SMI, "-r", *(() if gpu == "all" else ("-i", *chosen)), timeout=_RESET_S)
        health_check.note_reset(chosen)
        mig.apply_all()  # a reset takes the instances with it
    except (CommandError, mig.MigError) as e:
        raise ActionError(f"{shown} could not be reset: {e}") from e
    finally:
        install.ensure_services()
    return {"result": "reset", "gpus": ", ".join(chosen)}
