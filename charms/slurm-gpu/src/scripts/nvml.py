#!/usr/bin/env python3
"""gpu-nvml: print what NVML reports; a program of its own, so that it can be killed where the driver hangs.

    gpu-nvml            what gpu-health looks at, for drivers that come without nvidia-smi
    gpu-nvml gpus       as JSON, which GPUs there are, for `gpu.detect`

Ubuntu's nvidia-headless-no-dkms, which upstream's slurmd installs, has NVML (libnvidia-ml.so.1) and no nvidia-smi.
This program prints the elements of `nvidia-smi -q -x` that gpu-health reads, and exits as nvidia-smi does: 0, or NVML's
error number. Python's standard library only: the slurm-gpu charm installs it beside gpu-health. What a library or a
card does not have is "N/A", as nvidia-smi prints it.
"""

import collections.abc
import ctypes
import json
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

_CPU_WORDS = 128  # of 64 CPUs each: 8192, the most that x86 kernels number (NR_CPUS), online or not
_MAX_LINKS = 64  # NVML_NVLINK_MAX_LINKS is 18 up to 12.x and 36 in 13.x; the loop ends at the first refusal
_INVALID_ARGUMENT = 2
_NO_DRIVER = frozenset({nvml.NO_DRIVER, nvml.NO_LIBRARY})  # "no driver here", not "a driver that fails"


def main(arguments: collections.abc.Sequence[str] | None = None) -> int:
    """Print the report; return NVML's error number. The list of GPUs holds the error, and its exit status is 0."""
    lists = list(sys.argv[1:] if arguments is None else arguments) == ["gpus"]
    try:
        with nvml.opened() as library:
            printed = json.dumps(probe(library)) if lists else ET.tostring(report(library), encoding="unicode")
    except NvmlError as e:
        if not lists:
            sys.stderr.write(f"{e}\n")
            return e.code if 0 < e.code < 255 else 255
        printed = json.dumps({"error": e.text, "broken": e.code not in _NO_DRIVER})
    print(printed)
    return 0


def report(library: Nvml) -> ET.Element:
    """Report as `nvidia-smi -q -x` does what gpu-health reads. Raises `NvmlError`: a card or the driver failed."""
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


def probe(library: Nvml) -> dict[str, typing.Any]:
    """List the driver's version and its cards. Raises `NvmlError`."""
    devices = library.devices()
    gpus = [_gpu(library, device) for device in devices]
    at = {gpu["bus_id"].lower(): i for i, gpu in enumerate(gpus)}
    for i, device in enumerate(devices):
        gpus[i]["links"] = _links(library, device, i, at)
    return {"driver": library.get_text("nvmlSystemGetDriverVersion"), "gpus": gpus}


def _gpu(library: Nvml, device: ctypes.c_void_p) -> dict[str, typing.Any]:
    minor = ctypes.c_uint()
    library.need("nvmlDeviceGetMinorNumber", device, ctypes.byref(minor))
    memory = library.get(nvml.Memory, "nvmlDeviceGetMemoryInfo", device)
    instances = library.instances(device)
    return {
        "name": library.get_text("nvmlDeviceGetName", device),
        "minor": minor.value,
        "bus_id": library.bus_id(device),
        "uuid": library.get_text("nvmlDeviceGetUUID", device),
        "cpus": _cpus(library, device),
        "memory_bytes": memory.total if memory is not None else None,
        "mig": instances is not None,
        "instances": [_instance(library, instance) for instance in instances or ()],
    }


def _instance(library: Nvml, instance: ctypes.c_void_p) -> dict[str, typing.Any]:
    return {
        "name": library.get_text("nvmlDeviceGetName", instance),
        "gpu_instance": library.get(ctypes.c_uint, "nvmlDeviceGetGpuInstanceId", instance),
        "compute_instance": library.get(ctypes.c_uint, "nvmlDeviceGetComputeInstanceId", instance),
        "uuid": library.get_text("nvmlDeviceGetUUID", instance),
    }


def _cpus(library: Nvml, device: ctypes.c_void_p) -> list[int] | None:
    words = library.get(ctypes.c_ulong * _CPU_WORDS, "nvmlDeviceGetCpuAffinity", device, _CPU_WORDS)
    if words is None:
        return None
    return [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _links(library: Nvml, device: ctypes.c_void_p, own: int, at: dict[str, int]) -> list[int]:
    """Count the active NVLinks to each card, -1 for the own place; one to an NVSwitch leads to no card."""
    counts = [-1 if i == own else 0 for i in range(len(at))]
    for link in range(_MAX_LINKS):
        active, remote = ctypes.c_uint(), nvml.Pci()
        code = library.call("nvmlDeviceGetNvLinkState", device, link, ctypes.byref(active))
        if code == 0 and active.value:
            code = library.call("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, link, ctypes.byref(remote))
        if code == _INVALID_ARGUMENT or (code and link == 0):
            break
        other = at.get(remote.bus_id.decode().lower())
        if other is not None and other != own:
            counts[other] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
