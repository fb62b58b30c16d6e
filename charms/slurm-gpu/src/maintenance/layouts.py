"""MIG layouts on a node free of jobs, and the program that makes them again at boot.

Raises the errors of `reset`.
"""

import contextlib
import json
import pathlib

import template
from gpu import mig
from maintenance import reset, services
from node import kept
from slurm_ddp import files, packing, systemd
from slurm_ddp.charm import ActionError, Log, Results

PROGRAM = pathlib.Path("/usr/local/sbin/gpu-mig")
SERVICE = "slurm-gpu-mig.service"


def set_layout(gpu: str, profiles: str, node: str | None, wait_s: float, log: Log) -> Results:
    """Give one card, or with "all" each, a MIG layout, which lasts.

    The node is still held afterwards.
    """
    reset.check_smi()
    try:
        layout = mig.parse(profiles)
        chosen = _chosen(gpu)
        before = mig.load()
    except mig.MigError as e:
        raise ActionError(str(e)) from e
    shown = ", ".join(layout) or "none"
    if all(card.has(layout) and before.get(card.bus_id, ()) == layout for card in chosen):
        _ensure_layouts(before, whole=False)
        return {"result": "unchanged", "layout": shown}

    reset.free(kept.MIG, node, f"{gpu}: {shown}", wait_s, log)
    services.stop_holders()
    names = [card.bus_id for card in chosen]
    after = before | dict.fromkeys(names, layout)
    _ensure_layouts(after)  # first, so that an interrupted one is finished
    try:
        for card in chosen:
            log(f"{card.bus_id}: {shown}")
            mig.apply(card, layout)
    except mig.RebootNeeded as e:
        kept.keep_until_reboot()
        return {"result": "reboot", "detail": f"{e}: reboot this machine"}
    except mig.MigError as e:
        _ensure_layouts(before)
        _restore(chosen)  # all or none
        raise ActionError(f"profiles: {e}") from e
    finally:
        services.ensure_running()
    _ensure_layouts(after, whole=False)
    return {"result": "done", "layout": shown, "gpus": ", ".join(names)}


def _chosen(gpu: str) -> list[mig.Card]:
    """Return the card of this bus id, or with "all" each. Raises `ActionError`, `MigError`."""
    cards = {card.bus_id: card for card in mig.cards()}
    names = sorted(cards) if gpu == "all" else [reset.known(gpu, tuple(cards))]
    chosen = [cards[name] for name in names]
    for card in chosen:
        if card.enabled is None:
            raise ActionError(f"gpu: {card.name} at {card.bus_id} has no MIG")
    return chosen


def _restore(cards: list[mig.Card]) -> None:
    """Give the cards the instances again that they had; one that still has them is left alone."""
    for card in cards:
        with contextlib.suppress(mig.MigError):  # the registration reads the cards
            mig.apply(mig.card_at(card.bus_id), card.instances)


def ensure_no_layouts() -> None:
    """Forget the layouts; the cards keep their instances until a reboot."""
    systemd.ensure_no_unit(SERVICE)
    files.ensure_absent(PROGRAM)
    files.ensure_absent(mig.LAYOUTS)


def _ensure_layouts(layouts: dict[str, tuple[str, ...]], *, whole: bool = True) -> None:
    """Record the layouts and restore them at boot.

    With `whole`, also the empty ones of whole cards.
    """
    layouts = {bus_id: layout for bus_id, layout in layouts.items() if layout or whole}
    if not layouts:
        ensure_no_layouts()
        return
    files.ensure_file(mig.LAYOUTS, json.dumps(dict(sorted(layouts.items()))) + "\n")
    files.ensure_file(PROGRAM, packing.pack(pathlib.Path(mig.__file__)), mode=0o755)
    systemd.ensure_unit(SERVICE, template.fill(SERVICE, program=PROGRAM))
    systemd.enable(SERVICE)
