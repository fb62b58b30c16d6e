#!/usr/bin/env python3
"""Print the GPUs that NVML reports as JSON.

As a separate program it can be killed if the driver hangs.

`gpu.detect` runs it with the charm's Python and reads `{"driver": ..., "gpus": [...]}`, or
`{"error": ..., "broken": ...}` if NVML fails. A value that a card or a library does not support is
null.
"""

import collections.abc
import importlib
import json
import sys
import typing

pynvml: typing.Any = importlib.import_module("pynvml")  # untyped
_CPU_WORDS = 128  # of 64 CPUs each: 8192, the most that x86 kernels number (NR_CPUS), online or not
_NO_DRIVER = frozenset({pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})
_ABSENT = frozenset(
    {  # unsupported by this kind of card or library, so not a fault
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
        pynvml.NVML_ERROR_NOT_READY,
    }
)

_Call = collections.abc.Callable[..., typing.Any]


def main() -> int:
    """Print the answer. The exit status is always 0."""
    try:
        pynvml.nvmlInit()
        try:
            answer = probe()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as e:
        answer = {"error": str(e), "broken": e.value not in _NO_DRIVER}
    print(json.dumps(answer))
    return 0


def probe() -> dict[str, typing.Any]:
    """Return the driver's version and its cards in the order of their bus ids.

    Raises `pynvml.NVMLError`.
    """
    gpus = [_gpu(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    return {"driver": _ask(pynvml.nvmlSystemGetDriverVersion), "gpus": gpus}


def _set_bits(words: collections.abc.Iterable[int]) -> list[int]:
    """List the numbers of the bits that are set in words of 64 bits."""
    found: list[int] = []
    for i, word in enumerate(words):
        found += [64 * i + bit for bit in range(64) if word >> bit & 1]
    return found


def _gpu(device: object) -> dict[str, typing.Any]:
    bus_id = pynvml.nvmlDeviceGetPciInfo(device).busId
    words = _ask(pynvml.nvmlDeviceGetCpuAffinity, device, _CPU_WORDS)
    has_mig = (_ask(pynvml.nvmlDeviceGetMigMode, device) or [0])[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    return {
        "name": _ask(pynvml.nvmlDeviceGetName, device),
        "minor": pynvml.nvmlDeviceGetMinorNumber(device),
        "bus_id": bus_id.decode() if isinstance(bus_id, bytes) else bus_id,
        "uuid": _ask(pynvml.nvmlDeviceGetUUID, device),
        "cpus": words and _set_bits(words),
        "mig": has_mig,
        "instances": list(_instances(device)) if has_mig else [],
    }


def _instances(device: object) -> collections.abc.Iterator[dict[str, typing.Any]]:
    """Yield a card's MIG devices. The slots of NVML's table have gaps."""
    for i in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, device) or 0):
        instance = _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, device, i)
        if instance is not None:
            yield {
                "profile": str(_ask(pynvml.nvmlDeviceGetName, instance))
                .rpartition("MIG ")[2]
                .strip(),
                "gpu_instance": _ask(pynvml.nvmlDeviceGetGpuInstanceId, instance),
                "compute_instance": _ask(pynvml.nvmlDeviceGetComputeInstanceId, instance),
            }


def _ask(call: _Call, *arguments: object) -> typing.Any:
    """Return the answer, None if this card or library has none.

    Raises `pynvml.NVMLError` for any other failure.
    """
    try:
        return call(*arguments)
    except pynvml.NVMLError as e:
        if e.value not in _ABSENT:
            raise
    return None


if __name__ == "__main__":
    sys.exit(main())
