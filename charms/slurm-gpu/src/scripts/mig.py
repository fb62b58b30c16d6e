#!/usr/bin/env python3
"""gpu-mig: the MIG layouts that this machine's cards should have, and making them so.

    gpu-mig apply            make every layout of /var/lib/slurm-gpu/mig.json, as at boot
    gpu-mig show             print what the cards have

A layout is a list of GPU instance profiles, each with one compute instance of its whole size; an empty one means that
the card is whole. Instances vanish with a reboot or a reset, and on some cards the mode does too, so a unit applies
them before slurmd starts. It runs alone, with Python's standard library only: the slurm-gpu charm copies it to nodes.
"""

import argparse
import collections.abc
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import typing

NVIDIA_SMI = "/usr/bin/nvidia-smi"
LAYOUTS = pathlib.Path("/var/lib/slurm-gpu/mig.json")
_TIMEOUT_S, _RESET_S = 60.0, 180.0
_REAP_S = 1.0
_PROFILE = re.compile(r"(?P<slices>[1-9])g\.(?P<memory>[1-9][0-9]{0,2})gb(?P<more>(?:[+-][a-z.]{1,8}){0,4})")
_MOST = 8  # instances of one card

# The cards that take MIG, and their profiles: name -> (memory slices, where they may begin). NVIDIA's MIG User Guide,
# "Supported MIG Profiles". A profile with a suffix (+me, +gfx, ...) takes the place of the one without.
_SEVEN = ((1, tuple(range(7))), (2, (0, 2, 4, 6)), (2, (0, 2, 4)), (4, (0, 4)), (4, (0,)), (8, (0,)))
_FOUR = ((1, tuple(range(4))), (2, (0, 2)), (4, (0,)))


@dataclasses.dataclass(frozen=True)
class Kind:
    """Cards of one geometry."""

    pattern: str  # of NVML's name
    slices: int  # of compute
    memory: int  # slices of it
    profiles: dict[str, tuple[int, tuple[int, ...]]]


def _seven(pattern: str, *names: str) -> Kind:
    return Kind(pattern, 7, 8, dict(zip(names, _SEVEN, strict=True)))


KINDS = (
    Kind(r"NVIDIA A30\b", 4, 4, dict(zip(("1g.6gb", "2g.12gb", "4g.24gb"), _FOUR, strict=True))),
    _seven(r"A100.*40GB", "1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
    _seven(r"A100.*80GB", "1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),
    _seven(r"H100 (PCIe|80GB)", "1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),
    _seven(r"H100 NVL|H100.*94GB", "1g.12gb", "1g.24gb", "2g.24gb", "3g.47gb", "4g.47gb", "7g.94gb"),
    _seven(r"GH200 480GB|NVIDIA H20\b|H100.*96GB", "1g.12gb", "1g.24gb", "2g.24gb", "3g.48gb", "4g.48gb", "7g.96gb"),
    _seven(r"NVIDIA H200\b", "1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
    _seven(r"NVIDIA B200\b", "1g.23gb", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"),
    Kind(r"RTX PRO 6000 Blackwell", 4, 4, dict(zip(("1g.24gb", "2g.48gb", "4g.96gb"), _FOUR, strict=True))),
)


class MigError(Exception):
    """A layout is not one, does not fit or could not be made. `str()` is one line."""


class RebootNeeded(MigError):
    """The card changes its mode only with a reboot."""


@dataclasses.dataclass(frozen=True)
class Card:
    """One card as the driver shows it."""

    bus_id: str  # as sysfs spells it
    name: str
    enabled: bool | None  # None: it has no MIG
    pending: bool | None
    instances: tuple[str, ...] = ()  # profiles, in the order of their ids

    def has(self, layout: collections.abc.Iterable[str]) -> bool:
        """Whether it is as the layout says."""
        wanted = sorted(layout)
        return bool(self.enabled) == bool(self.pending) == bool(wanted) and sorted(self.instances) == wanted


def parse(text: str) -> tuple[str, ...]:
    """Return the layout in `text`: profiles with commas, `x7` behind one for seven of it, "off" for a whole card.

    Raises:
        MigError: it is none.
    """
    if text.strip() == "off":
        return ()
    layout: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\S+?)\s*(?:[x*]\s*([1-9]))?\s*", part)
        if match is None or not _PROFILE.fullmatch(match[1]):
            raise MigError(f"profiles: {part.strip()!r:.60} is not a profile such as 3g.20gb or 1g.5gb x7, nor off")
        layout += [match[1]] * int(match[2] or 1)
    if len(layout) > _MOST:
        raise MigError(f"profiles: {len(layout)} instances are more than a card can have")
    return tuple(layout)


def kind_of(name: str) -> Kind | None:
    """Return the geometry of the card with this name, None for one that the table does not have."""
    return next((kind for kind in KINDS if re.search(kind.pattern, name)), None)


def check(name: str, layout: collections.abc.Sequence[str]) -> None:
    """Make sure that the layout fits on the card, as far as the table knows it; the card has the last word.

    Raises:
        MigError: it does not, with what the card has.
    """
    kind = kind_of(name)
    if kind is None or not layout:
        return
    bases = [_base(profile) for profile in layout]
    unknown = [profile for profile, base in zip(layout, bases, strict=True) if base not in kind.profiles]
    if unknown:
        raise MigError(f"profiles: {name} has no {unknown[0]}, only {', '.join(kind.profiles)}")
    media = [profile for profile in layout if "+me" in profile]
    if len(media) > 1:
        raise MigError(f"profiles: {name} has media engines for one +me instance, not for {len(media)}")
    slices = sum(int(base[0]) for base in bases)
    if slices > kind.slices:
        raise MigError(f"profiles: {slices} compute slices do not fit on {name}, which has {kind.slices}")
    places = sorted((kind.profiles[base] for base in bases), key=lambda place: -place[0])
    if not _fits(places, frozenset(range(kind.memory))):
        raise MigError(f"profiles: {', '.join(layout)} do not fit beside each other on {name}")


def cards() -> list[Card]:
    """Return the cards.

    Raises:
        MigError: the driver does not tell.
    """
    told = _smi("--query-gpu=pci.bus_id,name,mig.mode.current,mig.mode.pending", "--format=csv,noheader")
    found: list[Card] = []
    for line in told.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 4:
            continue
        mode = {"Enabled": True, "Disabled": False}
        card = Card(bus(fields[0]), ", ".join(fields[1:-2]), mode.get(fields[-2]), mode.get(fields[-1]))
        if card.enabled:
            card = dataclasses.replace(card, instances=_instances(card.bus_id))
        found.append(card)
    return found


def apply(card: Card, layout: collections.abc.Sequence[str]) -> bool:
    """Give the card this layout; return whether anything had to change. Nothing may use the card.

    A layout that the card refuses leaves it with the one it had.

    Raises:
        RebootNeeded: only a reboot switches the card's mode.
        MigError: it could not be made.
    """
    if card.enabled is None:
        if layout:
            raise MigError(f"{card.name} at {card.bus_id} has no MIG")
        return False
    if card.has(layout):
        return False
    try:
        _make(card, layout)
    except RebootNeeded:
        raise
    except MigError:
        with contextlib.suppress(MigError):  # as it was, as far as that goes
            _make(card_at(card.bus_id), card.instances)
        raise
    return True


def load() -> dict[str, tuple[str, ...]]:
    """Return the layouts that the cards should have, by bus id; an empty one for a card to be whole.

    Raises:
        MigError: the file says nothing that can be read.
    """
    try:
        raw = json.loads(LAYOUTS.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise MigError(f"{LAYOUTS}: {e}") from e
    layouts = typing.cast("dict[str, list[str]]", raw)
    try:
        return {bus_id: parse(",".join(profiles)) if profiles else () for bus_id, profiles in layouts.items()}
    except (AttributeError, TypeError) as e:
        raise MigError(f"{LAYOUTS}: not an object of layouts") from e


def apply_all() -> list[str]:
    """Make every layout of the file; return what was done.

    Raises:
        MigError: one could not be made; the others are.
    """
    wanted = load()
    if not wanted:
        return []
    there = {card.bus_id: card for card in cards()}
    did: list[str] = []
    troubles: list[MigError] = []
    for bus_id, layout in sorted(wanted.items()):
        if bus_id not in there:
            troubles.append(MigError(f"no card at {bus_id}"))
            continue
        try:
            if apply(there[bus_id], layout):
                did.append(f"{bus_id}: {', '.join(layout) or 'whole'}")
        except MigError as e:
            troubles.append(e)
    if troubles:
        raise type(troubles[0])("; ".join(str(trouble) for trouble in troubles)) from troubles[0]
    return did


def bus(text: str) -> str:
    """Return a bus id as sysfs spells it: NVML has eight digits of domain and capitals."""
    match = re.fullmatch(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])", text.strip())
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower() if match else text.strip()


def main(arguments: collections.abc.Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="gpu-mig", description="Keep the MIG layouts of this machine's cards.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("apply", help="make every layout of the file")
    commands.add_parser("show", help="print what the cards have")
    options = parser.parse_args(arguments)
    try:
        if options.command == "show":
            rows = [f"{card.bus_id} {card.name}: {', '.join(card.instances) or _mode(card)}" for card in cards()]
        else:
            rows = apply_all()
    except MigError as e:
        print(f"gpu-mig: {e}", file=sys.stderr)
        return 1
    print("\n".join(rows))
    return 0


def _mode(card: Card) -> str:
    return "no MIG" if card.enabled is None else "no instances" if card.enabled else "whole"


def _make(card: Card, layout: collections.abc.Sequence[str]) -> None:
    if card.instances:
        _smi("mig", "-i", card.bus_id, "-dci", empty_ok=True)  # an interrupted one did that already
        _smi("mig", "-i", card.bus_id, "-dgi")
    if card.enabled is not bool(layout) or card.pending is not bool(layout):
        _switch(card, on=bool(layout))
    if layout:
        largest_first = sorted(layout, key=lambda profile: -int(profile[0]))  # the driver places them in this order
        _smi("mig", "-i", card.bus_id, "-cgi", ",".join(largest_first), "-C")
    after = card_at(card.bus_id)
    if not after.has(layout):
        made = ", ".join(after.instances) or _mode(after)
        raise MigError(f"{card.bus_id} has {made} instead of {', '.join(layout) or 'no MIG'}")


def _switch(card: Card, *, on: bool) -> None:
    """Switch the mode. The driver resets the card for that where nothing uses it; the A100 may want it asked."""
    _smi("-i", card.bus_id, "-mig", "1" if on else "0")
    after = card_at(card.bus_id)
    if after.enabled is on:
        return
    with contextlib.suppress(MigError):
        _smi("-r", "-i", card.bus_id, timeout=_RESET_S)
    if card_at(card.bus_id).enabled is not on:
        raise RebootNeeded(f"{card.bus_id} switches MIG {'on' if on else 'off'} only with a reboot")


def card_at(bus_id: str) -> Card:
    """Return the card as it is now.

    Raises:
        MigError: it left the bus, or the driver does not respond.
    """
    for card in cards():
        if card.bus_id == bus_id:
            return card
    raise MigError(f"no card at {bus_id}")


def _instances(bus_id: str) -> tuple[str, ...]:
    told = _smi("mig", "-i", bus_id, "-lgi", empty_ok=True)
    rows = re.findall(r"MIG\s+(\S+)\s+\d+\s+(\d+)\s+\d+:\d+", told)
    return tuple(profile for profile, _ in sorted(rows, key=lambda row: int(row[1])))


def _base(profile: str) -> str:
    match = _PROFILE.fullmatch(profile)
    return f"{match['slices']}g.{match['memory']}gb" if match else profile


def _fits(places: list[tuple[int, tuple[int, ...]]], free: frozenset[int]) -> bool:
    """Whether all of these find room, each at one of its places."""
    if not places:
        return True
    (size, starts), *rest = places
    taken = (frozenset(range(start, start + size)) for start in starts)
    return any(_fits(rest, free - room) for room in taken if room <= free)


def _smi(*arguments: str, timeout: float = _TIMEOUT_S, empty_ok: bool = False) -> str:
    """Run nvidia-smi, and give up on it where it hangs in the driver."""
    what = f"nvidia-smi {' '.join(arguments)[:80]}"
    code, said = run(NVIDIA_SMI, *arguments, timeout=timeout)
    if code is None:
        raise MigError(f"{what}: {said}")
    if code != 0 and not (empty_ok and re.search(r"No (GPU|compute) instances found", said)):
        last = [line.strip() for line in said.splitlines() if line.strip()]
        raise MigError(f"{what}: {last[-1][:200] if last else f'exited {code}'}")
    return said


def run(*argv: str, timeout: float) -> tuple[int | None, str]:
    """Return a program's exit status and what it printed, or None and why it did not end."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as e:
        return None, str(e.strerror or e)
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        typing.cast("typing.IO[str]", process.stdout).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_REAP_S)
        return None, f"no answer within {timeout:g} s"
    return process.returncode, said


if __name__ == "__main__":
    sys.exit(main())
