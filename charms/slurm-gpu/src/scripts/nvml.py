#!/usr/bin/env python3
"""gpu-nvml: what gpu-health looks at, asked of NVML itself, for drivers that come without nvidia-smi.

Ubuntu's nvidia-headless-no-dkms, which upstream's slurmd installs, has NVML (libnvidia-ml.so.1) and no nvidia-smi.
This program prints the elements of `nvidia-smi -q -x` that gpu-health reads, and exits as nvidia-smi does: 0, or NVML's
error number. It is a program of its own, so that it can be killed where the driver hangs, and runs with Python's
standard library only: the slurm-gpu charm copies it to each node beside gpu-health.

Functions, structures and numbers are those of NVIDIA's nvml.h of driver 580 (NVML API reference). What a library or a
card does not have is "N/A", as nvidia-smi prints it.
"""

import collections.abc
import ctypes
import sys
import typing
import xml.etree.ElementTree as ET

LIBRARY = "libnvidia-ml.so.1"
_NO_LIBRARY = 12  # NVML_ERROR_LIBRARY_NOT_FOUND
# INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, NO_DATA, ARGUMENT_VERSION_MISMATCH,
# DEPRECATED, NOT_READY: this kind of card or library has no answer, which is no fault.
_ABSENT = frozenset({2, 3, 4, 6, 13, 21, 25, 26, 27})
_INSUFFICIENT_SIZE = 7

_RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_RECOVERY = (
    "None", "Reset", "Reboot", "Drain P2P", "Drain and Reset", "Recover IMEX Domain", "Bus Reset", "System Reboot",
)  # fmt: skip
_FABRIC_STATES = ("N/A", "Not Started", "In Progress", "Completed")
_CORRECTED, _UNCORRECTED, _VOLATILE, _DRAM, _SRAM = 0, 1, 0, 2, 7
_SINGLE_BIT, _DOUBLE_BIT = 0, 1  # causes of retired pages
_THERMAL, _POWER_BRAKE = 0x40, 0x80  # nvmlClocksEventReasonHw...


class NvmlError(Exception):
    """NVML refused, and not for what a card lacks."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


class Pci(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_: typing.ClassVar = [
        ("legacy", ctypes.c_char * 16), ("domain", ctypes.c_uint), ("bus", ctypes.c_uint), ("device", ctypes.c_uint),
        ("id", ctypes.c_uint), ("subsystem", ctypes.c_uint), ("bus_id", ctypes.c_char * 32),
    ]  # fmt: skip


class Field(ctypes.Structure):
    """nvmlFieldValue_t; the value is a union, of which an unsigned int is read."""

    _fields_: typing.ClassVar = [
        ("id", ctypes.c_uint), ("scope", ctypes.c_uint), ("at", ctypes.c_longlong), ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint), ("result", ctypes.c_uint), ("value", ctypes.c_uint), ("rest", ctypes.c_uint),
    ]  # fmt: skip


class Sram(ctypes.Structure):
    """nvmlEccSramErrorStatus_v1_t."""

    _fields_: typing.ClassVar = [
        ("version", ctypes.c_uint), ("aggregate_parity", ctypes.c_ulonglong), ("aggregate_secded", ctypes.c_ulonglong),
        ("aggregate_corrected", ctypes.c_ulonglong), ("parity", ctypes.c_ulonglong), ("secded", ctypes.c_ulonglong),
        ("corrected", ctypes.c_ulonglong), ("l2", ctypes.c_ulonglong), ("sm", ctypes.c_ulonglong),
        ("pcie", ctypes.c_ulonglong), ("mcu", ctypes.c_ulonglong), ("other", ctypes.c_ulonglong),
        ("exceeded", ctypes.c_uint),
    ]  # fmt: skip


class Repair(ctypes.Structure):
    """nvmlRepairStatus_v1_t."""

    _fields_: typing.ClassVar = [("version", ctypes.c_uint), ("channel", ctypes.c_uint), ("tpc", ctypes.c_uint)]


class Fabric(ctypes.Structure):
    """nvmlGpuFabricInfo_t; the state is an unsigned char in an unsigned int's place."""

    _fields_: typing.ClassVar = [
        ("cluster", ctypes.c_ubyte * 16), ("status", ctypes.c_uint), ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]  # fmt: skip


class Nvml:
    """The library, opened and initialized. Use as a context manager."""

    def __init__(self, library: typing.Any) -> None:
        self._library = library

    def __enter__(self) -> "Nvml":
        self.need("nvmlInit_v2")
        return self

    def __exit__(self, *_: object) -> None:
        self._call("nvmlShutdown")

    def need(self, name: str, *arguments: object) -> None:
        """Call a function that must work.

        Raises:
            NvmlError: it did not.
        """
        code = self._call(name, *arguments)
        if code != 0:
            raise NvmlError(code, f"{name}: {self._text(code)}")

    def has(self, name: str, *arguments: object) -> bool:
        """Call a function that this library or card may lack; return whether there is an answer.

        Raises:
            NvmlError: it failed otherwise.
        """
        code = self._call(name, *arguments)
        if code not in {0, *_ABSENT}:
            raise NvmlError(code, f"{name}: {self._text(code)}")
        return code == 0

    def count_pages(self, device: object, cause: int) -> int | None:
        """Return the number of pages that were retired for this cause."""
        count = ctypes.c_uint(0)
        code = self._call("nvmlDeviceGetRetiredPages", device, cause, ctypes.byref(count), None)
        return count.value if code in {0, _INSUFFICIENT_SIZE} else None

    def _call(self, name: str, *arguments: object) -> int:
        function = getattr(self._library, name, None)
        return int(function(*arguments)) if function is not None else 13  # FUNCTION_NOT_FOUND

    def _text(self, code: int) -> str:
        function = getattr(self._library, "nvmlErrorString", None)
        if function is None:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        return (function(code) or b"").decode(errors="replace") or f"error {code}"


def report(nvml: Nvml) -> ET.Element:
    """Return what `nvidia-smi -q -x` would print of what gpu-health reads.

    Raises:
        NvmlError: a card or the driver does not answer.
    """
    root = ET.Element("nvidia_smi_log")
    count = ctypes.c_uint()
    nvml.need("nvmlDeviceGetCount_v2", ctypes.byref(count))
    ET.SubElement(root, "attached_gpus").text = str(count.value)
    for i in range(count.value):
        device, pci = ctypes.c_void_p(), Pci()
        nvml.need("nvmlDeviceGetHandleByIndex_v2", i, ctypes.byref(device))
        nvml.need("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(pci))
        gpu = ET.SubElement(root, "gpu", id=pci.bus_id.decode())
        for path, value in _values(nvml, device):
            _put(gpu, path, value)
        for _ in range(_instances(nvml, device)):
            _put(gpu, "mig_devices", None)
            ET.SubElement(typing.cast("ET.Element", gpu.find("mig_devices")), "mig_device")
    return root


def _values(nvml: Nvml, device: object) -> collections.abc.Iterator[tuple[str, str | None]]:
    field = Field(id=_RECOVERY_FIELD)
    has_field = nvml.has("nvmlDeviceGetFieldValues", device, 1, ctypes.byref(field)) and field.result == 0
    named = field.value < len(_RECOVERY)
    yield "gpu_recovery_action", (_RECOVERY[field.value] if named else f"{field.value}") if has_field else None

    rows = [ctypes.c_uint() for _ in range(4)]
    has_rows = nvml.has("nvmlDeviceGetRemappedRows", device, *(ctypes.byref(row) for row in rows))
    yield "remapped_rows/remapped_row_pending", _yes(rows[2].value) if has_rows else None
    yield "remapped_rows/remapped_row_failure", _yes(rows[3].value) if has_rows else None

    pending = ctypes.c_uint()
    has_pages = nvml.has("nvmlDeviceGetRetiredPagesPendingStatus", device, ctypes.byref(pending))
    yield "retired_pages/pending_retirement", _yes(pending.value) if has_pages else None
    for cause, name in ((_SINGLE_BIT, "multiple_single_bit_retirement"), (_DOUBLE_BIT, "double_bit_retirement")):
        pages = nvml.count_pages(device, cause)
        yield f"retired_pages/{name}/retired_count", None if pages is None else str(pages)

    for kind, place, name in (
        (_CORRECTED, _DRAM, "dram_correctable"), (_UNCORRECTED, _DRAM, "dram_uncorrectable"),
        (_CORRECTED, _SRAM, "sram_correctable"), (_UNCORRECTED, _SRAM, "sram_uncorrectable"),
    ):  # fmt: skip
        errors = ctypes.c_ulonglong()
        has_errors = nvml.has("nvmlDeviceGetMemoryErrorCounter", device, kind, _VOLATILE, place, ctypes.byref(errors))
        yield f"ecc_errors/volatile/{name}", str(errors.value) if has_errors else None

    sram = Sram(version=_version(Sram, 1))
    has_sram = nvml.has("nvmlDeviceGetSramEccErrorStatus", device, ctypes.byref(sram))
    yield "ecc_errors/volatile/sram_uncorrectable_parity", str(sram.parity) if has_sram else None
    yield "ecc_errors/volatile/sram_uncorrectable_secded", str(sram.secded) if has_sram else None
    yield "ecc_errors/aggregate/sram_threshold_exceeded", _yes(sram.exceeded) if has_sram else None

    repair = Repair(version=_version(Repair, 1))
    has_repair = nvml.has("nvmlDeviceGetRepairStatus", device, ctypes.byref(repair))
    yield "ecc_errors/channel_repair_pending", _yes(repair.channel) if has_repair else None
    yield "ecc_errors/tpc_repair_pending", _yes(repair.tpc) if has_repair else None

    reasons = ctypes.c_ulonglong()
    has_reasons = nvml.has("nvmlDeviceGetCurrentClocksThrottleReasons", device, ctypes.byref(reasons))
    for bit, name in ((_THERMAL, "hw_thermal_slowdown"), (_POWER_BRAKE, "hw_power_brake_slowdown")):
        text = "Active" if reasons.value & bit else "Not Active"
        yield f"clocks_event_reasons/clocks_event_reason_{name}", text if has_reasons else None

    fabric = Fabric()
    has_fabric = nvml.has("nvmlDeviceGetGpuFabricInfo", device, ctypes.byref(fabric)) and fabric.state > 0
    known = fabric.state < len(_FABRIC_STATES)
    yield "fabric/state", (_FABRIC_STATES[fabric.state] if known else str(fabric.state)) if has_fabric else None
    status = "Success" if fabric.status == 0 else f"error {fabric.status}"
    yield "fabric/status", status if has_fabric and fabric.state == len(_FABRIC_STATES) - 1 else None


def _instances(nvml: Nvml, device: object) -> int:
    """Return how many MIG devices the card has."""
    now, after, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    if not nvml.has("nvmlDeviceGetMigMode", device, ctypes.byref(now), ctypes.byref(after)) or now.value != 1:
        return 0
    if not nvml.has("nvmlDeviceGetMaxMigDeviceCount", device, ctypes.byref(most)):
        return 0
    return sum(
        nvml.has("nvmlDeviceGetMigDeviceHandleByIndex", device, i, ctypes.byref(ctypes.c_void_p()))
        for i in range(most.value)
    )


def _version(structure: type[ctypes.Structure], number: int) -> int:
    return ctypes.sizeof(structure) | number << 24  # NVML_STRUCT_VERSION


def _yes(number: int) -> str:
    return "Yes" if number else "No"


def _put(gpu: ET.Element, path: str, value: str | None) -> None:
    at = gpu
    for name in path.split("/"):
        there = at.find(name)
        at = ET.SubElement(at, name) if there is None else there
    if path != "mig_devices":
        at.text = "N/A" if value is None else value


def main() -> int:
    """Print the report; return NVML's error number."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as e:
        sys.stderr.write(f"{LIBRARY}: {e}\n")
        return _NO_LIBRARY
    try:
        with Nvml(library) as nvml:
            root = report(nvml)
    except NvmlError as e:
        sys.stderr.write(f"{e}\n")
        return e.code if 0 < e.code < 255 else 255
    print(ET.tostring(root, encoding="unicode"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
