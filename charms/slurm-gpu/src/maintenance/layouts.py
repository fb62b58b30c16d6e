"""MIG layouts on a node free of jobs, and the program that makes them again at boot. Errors are those of `reset`."""

import contextlib
import json
import pathlib

import template
from gpu import mig
from maintenance import reset, services
from node import kept
from slurm_ddp import files, systemd, watchdog
from slurm_ddp.charm import ActionError, Log, Results

PROGRAM = pathlib.Path("/usr/local/sbin/gpu-mig")
SERVICE = "slurm-gpu-mig.service"


def set_layout(gpu: str, profiles: str, node: str | None, wait_s: float, log: Log) -> Results:
    """Give one card, or with "all" each, a MIG layout, which lasts. The node is still held afterwards."""
    reset.check_smi()
    try:
        layout = mig.parse(profiles)
        cards = {card.bus_id: card for card in mig.cards()}
        chosen = sorted(cards) if gpu == "all" else [reset.known(gpu, tuple(cards))]
        for bus_id in chosen:
            if cards[bus_id].enabled is None:
                raise ActionError(f"gpu: {cards[bus_id].name} at {bus_id} has no MIG")
        before = mig.load()
    except mig.MigError as e:
        raise ActionError(str(e)) from e
    shown = ", ".join(layout) or "none"
    if all(cards[bus_id].has(layout) and before.get(bus_id, ()) == layout for bus_id in chosen):
        _ensure_layouts(before, whole=False)
        return {"result": "unchanged", "layout": shown}
    reset.free(kept.MIG, node, f"{gpu}: {shown}", wait_s, log)
    services.stop_holders()
    after = before | dict.fromkeys(chosen, layout)
    _ensure_layouts(after)  # first, so that an interrupted one is finished
    done: list[str] = []
    try:
        for bus_id in chosen:
            log(f"{bus_id}: {shown}")
            done.append(bus_id)
            mig.apply(cards[bus_id], layout)
    except mig.RebootNeeded as e:
        kept.keep_until_reboot()
        return {"result": "reboot", "detail": f"{e}: reboot this machine"}
    except mig.MigError as e:
        _ensure_layouts(before)
        for bus_id in done:  # all or none
            with contextlib.suppress(mig.MigError):  # the registration finds what the card has
                mig.apply(mig.card_at(bus_id), cards[bus_id].instances)
        raise ActionError(f"profiles: {e}") from e
    finally:
        services.ensure_running()
    _ensure_layouts(after, whole=False)
    return {"result": "done", "layout": shown, "gpus": ", ".join(chosen)}


def ensure_no_layouts() -> None:
    """Forget the layouts; the cards keep what they have until a reboot."""
    systemd.ensure_no_unit(SERVICE)
    files.ensure_absent(PROGRAM)
    files.ensure_absent(mig.LAYOUTS)


def _ensure_layouts(layouts: dict[str, tuple[str, ...]], *, whole: bool = True) -> None:
    """Record the layouts, those of whole cards too if asked for, and have them made at boot."""
    layouts = {bus_id: layout for bus_id, layout in layouts.items() if layout or whole}
    if not layouts:
        ensure_no_layouts()
        return
    files.ensure_file(mig.LAYOUTS, json.dumps(dict(sorted(layouts.items()))) + "\n")
    files.ensure_file(PROGRAM, watchdog.pack(pathlib.Path(mig.__file__)), mode=0o755)
    systemd.ensure_unit(SERVICE, template.fill(SERVICE, program=PROGRAM))
    systemd.enable(SERVICE)
