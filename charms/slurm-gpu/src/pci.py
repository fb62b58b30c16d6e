"""The PCI bus as sysfs lists it: NVIDIA's GPUs and NVSwitches.

Standard library only: the health check uses it.
"""

import dataclasses
import pathlib
import re

from slurm_ddp import files

# Tests put others here
PROC, SYS, DEV = (pathlib.Path("/proc"), pathlib.Path("/sys"), pathlib.Path("/dev"))
DEVICES = "bus/pci/devices"  # in sysfs: a folder for each device, named by its bus id
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers; 0x0403 is a card's audio
_SWITCH_CLASS = "0x0680"  # "bridge, other": NVSwitches up to the fourth generation of NVLink
_BUS_ID = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.([0-7]))?")


@dataclasses.dataclass(frozen=True)
class Card:
    """One GPU."""

    bus_id: str  # as in sysfs: "0000:1b:00.0"
    device: int  # PCI device id
    bound_to: str | None = None  # the kernel driver that has it


def cards() -> tuple[Card, ...]:
    """List the GPUs in the order of their bus ids."""
    return tuple(
        Card(path.name, _device(path), _bound_to(path)) for path in _of_class(_GPU_CLASSES)
    )


def switches() -> tuple[int, ...]:
    """List the PCI device ids of the NVSwitches."""
    return tuple(_device(path) for path in _of_class((_SWITCH_CLASS,)))


def bus_id(text: str) -> str | None:
    """Spell a bus id as sysfs does, None where `text` is none.

    NVML has eight digits of domain and capitals, the kernel's log leaves out the function.
    """
    match = _BUS_ID.fullmatch(text.strip())
    return (
        f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4] or 0}".lower() if match else None
    )


def spell(text: str | None) -> str:
    """Spell a bus id as sysfs does; leave any other text as it is."""
    return bus_id(text or "") or (text or "").strip()


def bus_key(name: str) -> tuple[int, str]:
    """Return a key that sorts bus ids as NVML does."""
    match = _BUS_ID.fullmatch(name)
    return (int(match[1], 16), name.lower()) if match else (1 << 32, name)


def _of_class(classes: tuple[str, ...]) -> list[pathlib.Path]:
    found = sorted((SYS / DEVICES).glob("*"), key=lambda path: bus_key(path.name))
    return [
        path
        for path in found
        if files.read(path / "vendor") == _NVIDIA and files.read(path / "class").startswith(classes)
    ]


def _device(path: pathlib.Path) -> int:
    try:
        return int(files.read(path / "device"), 16)
    except ValueError:
        return 0


def _bound_to(path: pathlib.Path) -> str | None:
    driver = path / "driver"
    return driver.resolve().name if driver.exists() else None
