"""NVML, the driver's library, through ctypes: standard library only, as a program needs it that runs on its own.

Functions, structures and numbers are those of NVIDIA's nvml.h of driver 580 (NVML API reference).
"""

import collections.abc
import contextlib
import ctypes
import typing

LIBRARY = "libnvidia-ml.so.1"
NO_DRIVER, NO_LIBRARY = 9, 12  # NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND
_FUNCTION_NOT_FOUND = 13
# INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, NO_DATA, ARGUMENT_VERSION_MISMATCH,
# DEPRECATED, NOT_READY: this kind of card or library has no answer, which is no fault.
_ABSENT = frozenset({2, 3, 4, 6, _FUNCTION_NOT_FOUND, 21, 25, 26, 27})
_TEXT = ctypes.c_char * 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE; others are shorter


class NvmlError(Exception):
    """NVML failed, for another reason than what a card lacks."""

    def __init__(self, code: int, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.code, self.text = code, text


def _structure(**fields: type[typing.Any]) -> typing.Any:
    """Make a structure of NVML's, with these fields in its order."""
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


_UINT, _LONG = ctypes.c_uint, ctypes.c_ulonglong
_SRAM = "aggregate_parity aggregate_secded aggregate_corrected parity secded corrected l2 sm pcie mcu other"

# nvmlPciInfo_t
Pci = _structure(
    legacy=ctypes.c_char * 16, domain=_UINT, bus=_UINT, device=_UINT, id=_UINT, subsystem=_UINT,
    bus_id=ctypes.c_char * 32,
)  # fmt: skip
Memory = _structure(total=_LONG, free=_LONG, used=_LONG)  # nvmlMemory_t, in bytes
# nvmlFieldValue_t; the value is a union, of which an unsigned int is read
Field = _structure(
    id=_UINT, scope=_UINT, at=ctypes.c_longlong, latency=ctypes.c_longlong, type=_UINT, result=_UINT, value=_UINT,
    rest=_UINT,
)  # fmt: skip
Sram = _structure(version=_UINT, **dict.fromkeys(_SRAM.split(), _LONG), exceeded=_UINT)  # nvmlEccSramErrorStatus_v1_t
Repair = _structure(version=_UINT, channel=_UINT, tpc=_UINT)  # nvmlRepairStatus_v1_t
# nvmlGpuFabricInfo_t; the state is an unsigned char in an unsigned int's place
Fabric = _structure(cluster=ctypes.c_ubyte * 16, status=_UINT, clique=_UINT, state=ctypes.c_ubyte)


class Nvml:
    """The library, initialized."""

    def __init__(self, library: typing.Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: object) -> int:
        """Call a function; return its error number."""
        function = getattr(self._library, name, None)
        return int(function(*arguments)) if function is not None else _FUNCTION_NOT_FOUND

    def need(self, name: str, *arguments: object) -> None:
        """Call a function that must work. Raises `NvmlError`."""
        self._check(name, self.call(name, *arguments))

    def ask(self, name: str, *arguments: object) -> bool:
        """Call a function that this library or card may lack; return whether it answered. Raises `NvmlError`."""
        code = self.call(name, *arguments)
        return code not in _ABSENT and self._check(name, code)

    def get(self, kind: type[typing.Any], name: str, *arguments: object) -> typing.Any:
        """Call a function that writes its answer, of a type of ctypes, to its last argument; None where it has none.

        Raises:
            NvmlError: it failed otherwise.
        """
        answer = kind()
        return getattr(answer, "value", answer) if self.ask(name, *arguments, ctypes.byref(answer)) else None

    def get_text(self, name: str, *arguments: object) -> str | None:
        """Call a function that writes a text to its last argument but one; None where it has none. See `get`."""
        answer = _TEXT()
        answered = self.ask(name, *arguments, answer, ctypes.c_uint(ctypes.sizeof(answer)))
        return answer.value.decode(errors="replace") if answered else None

    def devices(self) -> list[ctypes.c_void_p]:
        """Return the handles of all cards, in the order of their bus ids. Raises `NvmlError`."""
        count = ctypes.c_uint()
        self.need("nvmlDeviceGetCount_v2", ctypes.byref(count))
        handles = [ctypes.c_void_p() for _ in range(count.value)]
        for i, handle in enumerate(handles):
            self.need("nvmlDeviceGetHandleByIndex_v2", i, ctypes.byref(handle))
        return handles

    def bus_id(self, device: ctypes.c_void_p) -> str:
        """Return a card's bus id as NVML spells it: "00000000:1B:00.0". Raises `NvmlError`."""
        pci = Pci()
        self.need("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(pci))
        return pci.bus_id.decode()

    def instances(self, device: ctypes.c_void_p) -> list[ctypes.c_void_p] | None:
        """Return the handles of a card's MIG devices, None where MIG is off; the places of NVML's table have holes."""
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        if not self.ask("nvmlDeviceGetMigMode", device, ctypes.byref(mode), ctypes.byref(pending)) or mode.value != 1:
            return None
        most = self.get(ctypes.c_uint, "nvmlDeviceGetMaxMigDeviceCount", device) or 0
        handles = [ctypes.c_void_p() for _ in range(most)]
        name = "nvmlDeviceGetMigDeviceHandleByIndex"
        return [handle for i, handle in enumerate(handles) if self.ask(name, device, i, ctypes.byref(handle))]

    def _check(self, name: str, code: int) -> typing.Literal[True]:
        if code == 0:
            return True
        function = getattr(self._library, "nvmlErrorString", None)
        text = ""
        if function is not None:
            function.restype = ctypes.c_char_p
            text = (function(code) or b"").decode(errors="replace")
        raise NvmlError(code, name, text or f"error {code}")


@contextlib.contextmanager
def opened(library: typing.Any = None) -> collections.abc.Generator[Nvml]:
    """Load and initialize the library. Raises `NvmlError`: it is not installed, or does not initialize."""
    try:
        nvml = Nvml(library or ctypes.CDLL(LIBRARY))
    except OSError as e:
        raise NvmlError(NO_LIBRARY, LIBRARY, str(e)) from e
    nvml.need("nvmlInit_v2")
    try:
        yield nvml
    finally:
        nvml.call("nvmlShutdown")
