#!/usr/bin/env python3
"""gpu-nvml: print what gpu-health looks at, asked of NVML itself, for drivers that come without nvidia-smi.

Ubuntu's nvidia-headless-no-dkms, which upstream's slurmd installs, has NVML (libnvidia-ml.so.1) and no nvidia-smi.
This program prints the elements of `nvidia-smi -q -x` that gpu-health reads, and exits as nvidia-smi does: 0, or NVML's
error number. It is a program of its own, so that it can be killed where the driver hangs. Python's standard library
only: the slurm-gpu charm installs it beside gpu-health. What a library or a card does not have is "N/A", as nvidia-smi
prints it.
"""

import collections.abc
import ctypes
import sys
import typing
import xml.etree.ElementTree as ET

from gpu import nvml
from gpu.nvml import Nvml, NvmlError

_INSUFFICIENT_SIZE = 7
_RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_RECOVERY = (
    "None", "Reset", "Reboot", "Drain P2P", "Drain and Reset", "Recover IMEX Domain", "Bus Reset", "System Reboot",
)  # fmt: skip
_FABRIC_STATES = ("N/A", "Not Started", "In Progress", "Completed")
_VOLATILE = 0
_ERRORS = {  # type of error and location
    "dram_correctable": (0, 2), "dram_uncorrectable": (1, 2), "sram_correctable": (0, 7), "sram_uncorrectable": (1, 7),
}  # fmt: skip
_PAGES = {"multiple_single_bit_retirement": 0, "double_bit_retirement": 1}  # cause
_SLOWDOWNS = {"hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80}  # nvmlClocksEventReasonHw...


def main() -> int:
    """Print the report; return NVML's error number."""
    try:
        with nvml.opened() as library:
            root = report(library)
    except NvmlError as e:
        sys.stderr.write(f"{e}\n")
        return e.code if 0 < e.code < 255 else 255
    print(ET.tostring(root, encoding="unicode"))
    return 0


def report(library: Nvml) -> ET.Element:
    """Report as `nvidia-smi -q -x` does what gpu-health reads.

    Raises:
        NvmlError: a card or the driver failed.
    """
    root = ET.Element("nvidia_smi_log")
    devices = library.devices()
    ET.SubElement(root, "attached_gpus").text = str(len(devices))
    for device in devices:
        gpu = ET.SubElement(root, "gpu", id=library.bus_id(device))
        for path, value in _values(library, device):
            at = gpu
            for name in path.split("/"):
                there = at.find(name)
                at = ET.SubElement(at, name) if there is None else there
            at.text = "N/A" if value is None else str(value)
        instances = library.instances(device)
        if instances:
            parent = ET.SubElement(gpu, "mig_devices")
            for _ in instances:
                ET.SubElement(parent, "mig_device")
    return root


def _values(library: Nvml, device: ctypes.c_void_p) -> collections.abc.Iterator[tuple[str, object]]:
    """Yield the path of each element below <gpu>, with its value, None where there is none."""
    field = nvml.Field(id=_RECOVERY_FIELD)
    has_field = library.ask("nvmlDeviceGetFieldValues", device, 1, ctypes.byref(field)) and field.result == 0
    yield "gpu_recovery_action", _name(_RECOVERY, field.value) if has_field else None

    rows = [ctypes.c_uint() for _ in range(4)]
    has_rows = library.ask("nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, rows))
    yield "remapped_rows/remapped_row_pending", _yes(rows[2].value if has_rows else None)
    yield "remapped_rows/remapped_row_failure", _yes(rows[3].value if has_rows else None)

    pending = library.get(ctypes.c_uint, "nvmlDeviceGetRetiredPagesPendingStatus", device)
    yield "retired_pages/pending_retirement", _yes(pending)
    for name, cause in _PAGES.items():
        count = ctypes.c_uint(0)
        code = library.call("nvmlDeviceGetRetiredPages", device, cause, ctypes.byref(count), None)
        yield f"retired_pages/{name}/retired_count", count.value if code in {0, _INSUFFICIENT_SIZE} else None

    for name, (kind, place) in _ERRORS.items():
        arguments = (device, kind, _VOLATILE, place)
        yield (
            f"ecc_errors/volatile/{name}",
            library.get(ctypes.c_ulonglong, "nvmlDeviceGetMemoryErrorCounter", *arguments),
        )

    sram = _versioned(library, nvml.Sram, "nvmlDeviceGetSramEccErrorStatus", device)
    yield "ecc_errors/volatile/sram_uncorrectable_parity", sram and sram.parity
    yield "ecc_errors/volatile/sram_uncorrectable_secded", sram and sram.secded
    yield "ecc_errors/aggregate/sram_threshold_exceeded", _yes(sram and sram.exceeded)

    repair = _versioned(library, nvml.Repair, "nvmlDeviceGetRepairStatus", device)
    yield "ecc_errors/channel_repair_pending", _yes(repair and repair.channel)
    yield "ecc_errors/tpc_repair_pending", _yes(repair and repair.tpc)

    reasons = library.get(ctypes.c_ulonglong, "nvmlDeviceGetCurrentClocksThrottleReasons", device)
    for name, bit in _SLOWDOWNS.items():
        text = None if reasons is None else "Active" if reasons & bit else "Not Active"
        yield f"clocks_event_reasons/clocks_event_reason_{name}", text

    fabric = library.get(nvml.Fabric, "nvmlDeviceGetGpuFabricInfo", device)
    state = fabric.state if fabric is not None else 0
    yield "fabric/state", _name(_FABRIC_STATES, state)
    status = "Success" if fabric is not None and fabric.status == 0 else f"error {fabric and fabric.status}"
    yield "fabric/status", status if _name(_FABRIC_STATES, state) == "Completed" else None


def _versioned(library: Nvml, kind: type[ctypes.Structure], name: str, device: ctypes.c_void_p) -> typing.Any:
    """Call a function that fills a structure of version 1; None where it has no answer."""
    answer = kind(version=ctypes.sizeof(kind) | 1 << 24)  # NVML_STRUCT_VERSION
    return answer if library.ask(name, device, ctypes.byref(answer)) else None


def _yes(number: int | None) -> str | None:
    return None if number is None else "Yes" if number else "No"


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else str(number)


if __name__ == "__main__":
    sys.exit(main())
