"""Machines with GPUs: trees as kernel and driver show them, and NVML's view of the same cards."""

import dataclasses
import pathlib
import shutil

from gpu import detect as gpu_detect
from gpu import gres


@dataclasses.dataclass(frozen=True)
class Card:
    """One NVIDIA card."""

    model: str
    bus_id: str
    cpus: str = "0-1"


def add_pci(
    root: pathlib.Path,
    bus_id: str,
    *,
    vendor: str = "0x10de",
    kind: str = "0x030200",
    cpus: str = "0-1",
) -> None:
    """Put a device on the PCI bus."""
    device = root / "sys/bus/pci/devices" / bus_id
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    (device / "local_cpulist").write_text(f"{cpus}\n")


def add_driver(root: pathlib.Path, cards: list[Card], minors: list[int] | None = None) -> None:
    """Show the cards the way the loaded driver does, field names and padding included."""
    for i, card in enumerate(cards):
        directory = root / "proc/driver/nvidia/gpus" / card.bus_id
        directory.mkdir(parents=True)
        minor = minors[i] if minors else i
        (directory / "information").write_text(
            f"Model: \t\t {card.model}\nIRQ:   \t\t 170\nGPU UUID: \t GPU-00000000-0000-0000-0000-00000000000{i}\n"
            f"Video BIOS: \t 96.00.30.00.01\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n"
            f"Bus Location: \t {card.bus_id}\nDevice Minor: \t {minor}\nGPU Firmware: \t 580.159.04\nGPU Excluded:\t No\n"
        )
    (root / "sys/module/nvidia").mkdir(parents=True, exist_ok=True)
    (root / "sys/module/nvidia/version").write_text("580.159.04\n")


H200S = [Card("NVIDIA H200", "0000:1b:00.0"), Card("NVIDIA H200", "0000:9d:00.0")]


def lose(root: pathlib.Path, *cards: int) -> None:
    """Take these of two cards away."""
    for i in cards:
        shutil.rmtree(root / "proc/driver/nvidia/gpus" / H200S[i].bus_id)


def bring_back(root: pathlib.Path) -> None:
    """Show both cards again."""
    shutil.rmtree(root / "proc/driver/nvidia/gpus")
    add_driver(root, H200S)


def add_topology(root: pathlib.Path, sockets: int, cores: int, threads: int) -> None:
    """Number processors as on real hosts: first each core's first thread, then each second one."""
    for cpu in range(sockets * cores * threads):
        core = cpu % (sockets * cores)
        siblings = ",".join(str(core + sockets * cores * thread) for thread in range(threads))
        directory = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        directory.mkdir(parents=True)
        (directory / "physical_package_id").write_text(f"{core // cores}\n")
        (directory / "thread_siblings_list").write_text(f"{siblings}\n")


def conf(sockets: int, cores: int, threads: int) -> dict[str, str]:
    """Return the node's `--conf` for such processors, as upstream writes it."""
    return {
        "cpus": str(sockets * cores * threads),
        "boards": "1",
        "socketsperboard": str(sockets),
        "corespersocket": str(cores),
        "threadspercore": str(threads),
    }


def detection(*gpus: gpu_detect.Gpu) -> gpu_detect.Detection:
    """Build NVML's answer."""
    return gpu_detect.Detection("nvml", gpus)


def topology(sockets: int, cores: int, threads: int) -> gres.Topology:
    """Return such processors, already read."""
    total = sockets * cores
    return tuple(
        tuple(
            frozenset(first + core + total * thread for thread in range(threads))
            for core in range(cores)
        )
        for first in range(0, total, cores)
    )


def numbers(text: str) -> frozenset[int]:
    """Return the numbers of a kernel list."""
    found = gpu_detect.parse_cpu_list(text)
    assert found is not None
    return found
