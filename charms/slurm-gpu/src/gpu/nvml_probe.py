"""Print as JSON which GPUs NVML lists. It is run as a program, so that it can be killed where the driver hangs."""

import ctypes
import json
import sys
import typing

from gpu import nvml

_CPU_WORDS = 128  # of 64 CPUs each: 8192, the most that x86 kernels number (NR_CPUS), online or not
_MAX_LINKS = 64  # NVML_NVLINK_MAX_LINKS is 18 up to 12.x and 36 in 13.x; the loop ends at the first refusal
_INVALID_ARGUMENT = 2
_NO_DRIVER = frozenset({nvml.NO_DRIVER, nvml.NO_LIBRARY})  # "no driver here", not "a driver that fails"


def main() -> int:
    """Print {"driver": ..., "gpus": [...]}, or {"error": text, "broken": whether a driver is there and fails}."""
    try:
        with nvml.opened() as library:
            answer = probe(library)
    except nvml.NvmlError as e:
        answer: dict[str, typing.Any] = {"error": e.text, "broken": e.code not in _NO_DRIVER}
    json.dump(answer, sys.stdout)
    return 0


def probe(library: nvml.Nvml) -> dict[str, typing.Any]:
    """List the driver's version and its cards. Raises `nvml.NvmlError`."""
    devices = library.devices()
    gpus = [_gpu(library, device) for device in devices]
    at = {gpu["bus_id"].lower(): i for i, gpu in enumerate(gpus)}
    for i, device in enumerate(devices):
        gpus[i]["links"] = _links(library, device, i, at)
    return {"driver": library.get_text("nvmlSystemGetDriverVersion"), "gpus": gpus}


def _gpu(library: nvml.Nvml, device: ctypes.c_void_p) -> dict[str, typing.Any]:
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


def _instance(library: nvml.Nvml, instance: ctypes.c_void_p) -> dict[str, typing.Any]:
    return {
        "name": library.get_text("nvmlDeviceGetName", instance),
        "gpu_instance": library.get(ctypes.c_uint, "nvmlDeviceGetGpuInstanceId", instance),
        "compute_instance": library.get(ctypes.c_uint, "nvmlDeviceGetComputeInstanceId", instance),
        "uuid": library.get_text("nvmlDeviceGetUUID", instance),
    }


def _cpus(library: nvml.Nvml, device: ctypes.c_void_p) -> list[int] | None:
    words = library.get(ctypes.c_ulong * _CPU_WORDS, "nvmlDeviceGetCpuAffinity", device, _CPU_WORDS)
    if words is None:
        return None
    return [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _links(library: nvml.Nvml, device: ctypes.c_void_p, own: int, at: dict[str, int]) -> list[int]:
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
