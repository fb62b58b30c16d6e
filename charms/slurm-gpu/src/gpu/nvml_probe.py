"""Asks NVML what GPUs there are and prints the answer as JSON. It is run as a program, so that it can be killed."""

import json
import sys
import typing

_CPU_WORDS = 128  # of 64 CPUs each: 8192, the most that x86 kernels number (NR_CPUS), online or not
_MAX_LINKS = 64  # NVML_NVLINK_MAX_LINKS is 18 up to 12.x and 36 in 13.x; the loop ends at the first refusal

# NVML's error numbers (nvml.h) that mean "no driver here" and not "a driver that fails".
_ABSENT = frozenset({9, 12})  # DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND


def probe(nvml: typing.Any) -> dict[str, object]:
    """Return {"driver": ..., "gpus": [...]}, or {"error": text, "broken": whether a driver is there and fails}."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        return _failure(e)
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = [_gpu(nvml, handle) for handle in handles]
        _add_links(nvml, handles, gpus)
        return {"driver": _optional(nvml, nvml.nvmlSystemGetDriverVersion), "gpus": gpus}
    except nvml.NVMLError as e:
        return _failure(e)
    finally:
        nvml.nvmlShutdown()


def _failure(error: typing.Any) -> dict[str, object]:
    return {"error": str(error), "broken": error.value not in _ABSENT}


def _gpu(nvml: typing.Any, handle: typing.Any) -> dict[str, typing.Any]:
    mode = _optional(nvml, nvml.nvmlDeviceGetMigMode, handle)
    memory = _optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "minor": nvml.nvmlDeviceGetMinorNumber(handle),
        "bus_id": nvml.nvmlDeviceGetPciInfo(handle).busId,
        "uuid": _optional(nvml, nvml.nvmlDeviceGetUUID, handle),
        "cpus": _cpus(nvml, handle),
        "memory_bytes": memory.total if memory is not None else None,
        "mig": bool(mode and mode[0] == 1),  # (current, pending)
        "instances": _instances(nvml, handle) if mode and mode[0] == 1 else [],
    }


def _instances(nvml: typing.Any, handle: typing.Any) -> list[dict[str, typing.Any]]:
    """Return the MIG instances of a card in NVML's order; the numbering of their places has holes."""
    found: list[dict[str, typing.Any]] = []
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
        except nvml.NVMLError as e:
            if e.value == nvml.NVML_ERROR_NOT_FOUND:
                continue
            raise
        found.append(
            {
                "name": nvml.nvmlDeviceGetName(instance),
                "gpu_instance": nvml.nvmlDeviceGetGpuInstanceId(instance),
                "compute_instance": nvml.nvmlDeviceGetComputeInstanceId(instance),
                "uuid": _optional(nvml, nvml.nvmlDeviceGetUUID, instance),
            }
        )
    return found


def _cpus(nvml: typing.Any, handle: typing.Any) -> list[int] | None:
    words = _optional(nvml, nvml.nvmlDeviceGetCpuAffinity, handle, _CPU_WORDS)
    if words is None:
        return None
    return [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _add_links(nvml: typing.Any, handles: list[typing.Any], gpus: list[dict[str, typing.Any]]) -> None:
    """Count the active NVLinks between each pair; a link to an NVSwitch leads to no GPU and counts for none."""
    at = {gpu["bus_id"].lower(): i for i, gpu in enumerate(gpus)}
    for i, handle in enumerate(handles):
        counts = [0] * len(gpus)
        counts[i] = -1
        for link in range(_MAX_LINKS):
            try:
                if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                    continue
                remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
            except nvml.NVMLError as e:
                if e.value == nvml.NVML_ERROR_INVALID_ARGUMENT or link == 0:
                    break
                continue
            other = at.get(remote.lower())
            if other is not None and other != i:
                counts[other] += 1
        gpus[i]["links"] = counts


def _optional(nvml: typing.Any, call: typing.Any, *arguments: typing.Any) -> typing.Any:
    """Return what the card tells, or None for what this kind of card does not support."""
    try:
        return call(*arguments)
    except nvml.NVMLError as e:
        if e.value in {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND}:
            return None
        raise


if __name__ == "__main__":
    try:
        import pynvml  # pyright: ignore[reportMissingTypeStubs] - it has none
    except ImportError as e:
        result: dict[str, object] = {"error": f"nvidia-ml-py is not installed ({e})", "broken": False}
    else:
        result = probe(pynvml)
    json.dump(result, sys.stdout)
