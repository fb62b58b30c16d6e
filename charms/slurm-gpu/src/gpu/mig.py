#!/usr/bin/env python3
"""gpu-mig: the MIG layouts that this machine's cards should have, and the program to apply them.

    gpu-mig                  make every layout of /var/lib/slurm-gpu/mig.json, as at boot

A layout is a list of GPU instance profiles, each with one compute instance of its whole size; an
empty one means that the card is whole. Instances vanish with a reboot or a reset, so a unit applies
them before slurmd starts. Standard library only: the charm packs it with its imports. All functions
raise `MigError`.
"""

import collections.abc
import contextlib
import dataclasses
import json
import pathlib
import re
import sys
import typing

import pci
from slurm_ddp.commands import CommandError, last_line, run

NVIDIA_SMI = "/usr/bin/nvidia-smi"
LAYOUTS = pathlib.Path("/var/lib/slurm-gpu/mig.json")
_TIMEOUT_S, _RESET_S = 60.0, 180.0
_PROFILE = re.compile(r"[1-9]g\.[1-9][0-9]{0,2}gb([+-][a-z.]{1,8}){0,4}")
_MOST = 8  # instances of one card


class MigError(Exception):
    """A layout is invalid, does not fit or could not be made. `str()` is one line."""


class RebootNeeded(MigError):
    """The card changes its mode only with a reboot."""


@dataclasses.dataclass(frozen=True)
class Card:
    """One card as the driver shows it."""

    bus_id: str  # as sysfs spells it
    name: str
    enabled: bool | None  # None: it does not support MIG
    pending: bool | None
    instances: tuple[str, ...] = ()  # profiles, in the order of their ids

    def has(self, layout: collections.abc.Iterable[str]) -> bool:
        """Whether the card has this layout."""
        wanted = sorted(layout)
        return (
            bool(self.enabled) == bool(self.pending) == bool(wanted)
            and sorted(self.instances) == wanted
        )


def parse(text: str) -> tuple[str, ...]:
    """Return the layout in `text`: profiles with commas, or "none" for a whole card.

    `x7` behind a profile means seven of it.
    """
    if text.strip() == "none":
        return ()
    layout: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\S+?)\s*(?:[x*]\s*([1-9]))?\s*", part)
        if match is None or not _PROFILE.fullmatch(match[1]):
            raise MigError(
                f"profiles: {part.strip()!r:.60} is not a profile such as 3g.20gb or 1g.5gb x7, nor none"
            )
        layout += [match[1]] * int(match[2] or 1)
    if len(layout) > _MOST:
        raise MigError(f"profiles: {len(layout)} instances are more than a card can have")
    return tuple(layout)


def cards() -> list[Card]:
    """Return the cards."""
    printed = _smi(
        "--query-gpu=pci.bus_id,name,mig.mode.current,mig.mode.pending", "--format=csv,noheader"
    )
    modes = {"Enabled": True, "Disabled": False}
    found: list[Card] = []
    for line in printed.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 4:
            continue
        bus_id, *name, current, pending = fields  # a name may have commas
        card = Card(
            pci.bus_id(bus_id) or bus_id, ", ".join(name), modes.get(current), modes.get(pending)
        )
        if card.enabled:
            card = dataclasses.replace(card, instances=_instances(card.bus_id))
        found.append(card)
    return found


def card_at(bus_id: str) -> Card:
    """Return the card as it is now."""
    for card in cards():
        if card.bus_id == bus_id:
            return card
    raise MigError(f"no card at {bus_id}")


def apply(card: Card, layout: collections.abc.Sequence[str]) -> None:
    """Give the card this layout, if it has another one. Nothing may use the card."""
    if card.enabled is None and layout:
        raise MigError(f"{card.name} at {card.bus_id} has no MIG")
    if card.enabled is None or card.has(layout):
        return
    if card.instances:
        _smi("mig", "-i", card.bus_id, "-dci", empty_ok=True)  # an interrupted one did that already
        _smi("mig", "-i", card.bus_id, "-dgi")
    if card.enabled is not bool(layout) or card.pending is not bool(layout):
        _switch(card, on=bool(layout))
    if layout:
        # The driver places them in this order
        largest_first = sorted(layout, key=lambda profile: -int(profile[0]))
        _smi("mig", "-i", card.bus_id, "-cgi", ",".join(largest_first), "-C")
    after = card_at(card.bus_id)
    if not after.has(layout):
        found = ", ".join(after.instances) or "no instances"
        wanted = ", ".join(layout) or "no instances"
        raise MigError(f"{card.bus_id} has {found} instead of {wanted}")


def load() -> dict[str, tuple[str, ...]]:
    """Return the layouts that the cards should have, by bus id.

    An empty one means a whole card.
    """
    try:
        layouts = typing.cast("dict[str, list[str]]", json.loads(LAYOUTS.read_text()))
        found: dict[str, tuple[str, ...]] = {}
        for bus_id, profiles in layouts.items():
            found[bus_id] = parse(",".join(profiles)) if profiles else ()
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as e:
        raise MigError(f"{LAYOUTS}: not an object of layouts: {e}") from e


def apply_all() -> None:
    """Make every layout of the file. One failure does not stop the others."""
    wanted = load()
    if not wanted:
        return
    present = {card.bus_id: card for card in cards()}
    errors: list[MigError] = []
    for bus_id, layout in sorted(wanted.items()):
        try:
            if bus_id not in present:
                raise MigError(f"no card at {bus_id}")
            apply(present[bus_id], layout)
        except MigError as e:
            errors.append(e)
    if errors:
        raise type(errors[0])("; ".join(map(str, errors))) from errors[0]


def main() -> int:
    """Make every layout; return the exit status."""
    try:
        apply_all()
    except MigError as e:
        print(f"gpu-mig: {e}", file=sys.stderr)
        return 1
    return 0


def _switch(card: Card, *, on: bool) -> None:
    """Switch the mode.

    The driver resets the card for that if nothing uses it; an A100 may need the command.
    """
    _smi("-i", card.bus_id, "-mig", "1" if on else "0")
    if card_at(card.bus_id).enabled is on:
        return
    with contextlib.suppress(MigError):
        _smi("-r", "-i", card.bus_id, timeout=_RESET_S)
    if card_at(card.bus_id).enabled is not on:
        raise RebootNeeded(f"{card.bus_id} switches MIG {'on' if on else 'off'} only with a reboot")


def _instances(bus_id: str) -> tuple[str, ...]:
    printed = _smi("mig", "-i", bus_id, "-lgi", empty_ok=True)
    rows = re.findall(r"MIG\s+(\S+)\s+\d+\s+(\d+)\s+\d+:\d+", printed)
    return tuple(profile for profile, _ in sorted(rows, key=lambda row: int(row[1])))


def _smi(*arguments: str, timeout: float = _TIMEOUT_S, empty_ok: bool = False) -> str:
    """Run nvidia-smi, and give up on it if it hangs in the driver."""
    what = f"nvidia-smi {' '.join(arguments)[:80]}"
    try:
        done = run(NVIDIA_SMI, *arguments, timeout=timeout, check=False)
    except CommandError as e:
        raise MigError(f"{what}: {e}") from e
    printed = f"{done.stdout}\n{done.stderr}"
    if done.returncode != 0 and not (
        empty_ok and re.search(r"No (GPU|compute) instances found", printed)
    ):
        raise MigError(
            f"{what}: {last_line(printed, 200) or f'exited {done.returncode} with no output'}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
