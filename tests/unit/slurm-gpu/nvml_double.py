"""libnvidia-ml.so.1 as ctypes calls it, with cards that a test makes up. fake_nvml.c is one in C."""

import collections.abc
import ctypes
import typing

import pynvml  # pyright: ignore[reportMissingTypeStubs]

OK, INVALID, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT, LOST, VERSION = 0, 2, 3, 6, 7, 15, 25
Card = dict[str, typing.Any]


class Library:
    """libnvidia-ml.so.1 with these cards. It refuses what a card does not support, and an argument of a wrong size."""

    def __init__(
        self, cards: list[Card], init: int = OK, count: int = OK, without: collections.abc.Collection[str] = ()
    ) -> None:
        self.cards, self.init, self.count, self.without = cards, init, count, without
        self.is_shut = False

    def __getattr__(self, name: str) -> collections.abc.Callable[..., int]:
        if name in self.without or name == "nvmlErrorString":
            raise AttributeError(name)
        return getattr(type(self), f"_{name}").__get__(self)

    def _card(self, device: ctypes.c_void_p) -> Card:
        """Return a card, or an instance of one: the handles of instances are the card's, and 100 for each place."""
        assert device.value is not None
        place, number = divmod(device.value, 100)
        card = self.cards[number - 1]
        return card["instances"][place] if place else card

    def _nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's names, here and below
        return self.init

    def _nvmlShutdown(self) -> int:  # noqa: N802
        self.is_shut = True
        return OK

    def _nvmlDeviceGetCount_v2(self, count: typing.Any) -> int:  # noqa: N802
        count._obj.value = len(self.cards)
        return self.count

    def _nvmlDeviceGetHandleByIndex_v2(self, i: int, device: typing.Any) -> int:  # noqa: N802
        if self.cards[i].get("lost"):
            return LOST
        device._obj.value = i + 1
        return OK

    def _nvmlDeviceGetPciInfo_v3(self, device: typing.Any, pci: typing.Any) -> int:  # noqa: N802
        pci._obj.bus_id = self._card(device)["bus"]
        return OK

    def _nvmlDeviceGetFieldValues(self, device: typing.Any, count: int, field: typing.Any) -> int:  # noqa: N802
        assert (count, field._obj.id) == (1, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
        action = self._card(device).get("recovery")
        field._obj.result = NOT_SUPPORTED if action is None else OK
        field._obj.value = action or 0
        return OK

    def _nvmlDeviceGetRemappedRows(self, device: typing.Any, *rows: typing.Any) -> int:  # noqa: N802
        return self._fill(self._card(device).get("rows"), rows)

    def _nvmlDeviceGetRetiredPagesPendingStatus(self, device: typing.Any, pending: typing.Any) -> int:  # noqa: N802
        reported = self._card(device).get("pages_pending")
        return self._fill(None if reported is None else (reported,), (pending,))

    def _nvmlDeviceGetRetiredPages(  # noqa: N802
        self, device: typing.Any, cause: int, count: typing.Any, addresses: None
    ) -> int:
        assert count._obj.value == 0
        reported = self._card(device).get("pages")
        if reported is None:
            return NOT_SUPPORTED
        count._obj.value = reported[cause]
        return INSUFFICIENT if reported[cause] else OK

    def _nvmlDeviceGetMemoryErrorCounter(  # noqa: N802
        self, device: typing.Any, kind: int, since: int, place: int, count: typing.Any
    ) -> int:
        assert since == pynvml.NVML_VOLATILE_ECC
        reported = self._card(device).get("errors", {}).get((kind, place))
        return self._fill(None if reported is None else (reported,), (count,))

    def _nvmlDeviceGetSramEccErrorStatus(self, device: typing.Any, status: typing.Any) -> int:  # noqa: N802
        if status._obj.version != pynvml.nvmlEccSramErrorStatus_v1:
            return VERSION
        reported = self._card(device).get("sram")
        if reported is None:
            return NOT_SUPPORTED
        status._obj.parity, status._obj.secded, status._obj.exceeded = reported
        return OK

    def _nvmlDeviceGetRepairStatus(self, device: typing.Any, status: typing.Any) -> int:  # noqa: N802
        if status._obj.version != pynvml.nvmlRepairStatus_v1:
            return VERSION
        reported = self._card(device).get("repair")
        if reported is None:
            return NOT_SUPPORTED
        status._obj.channel, status._obj.tpc = reported
        return OK

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, device: typing.Any, reasons: typing.Any) -> int:  # noqa: N802
        reported = self._card(device).get("reasons")
        return self._fill(None if reported is None else (reported,), (reasons,))

    def _nvmlDeviceGetGpuFabricInfo(self, device: typing.Any, fabric: typing.Any) -> int:  # noqa: N802
        reported = self._card(device).get("fabric")
        if reported is None:
            return NOT_SUPPORTED
        fabric._obj.state, fabric._obj.status = reported
        return OK

    def _nvmlDeviceGetMigMode(self, device: typing.Any, now: typing.Any, after: typing.Any) -> int:  # noqa: N802
        reported = self._card(device).get("instances")
        return self._fill(None if reported is None else (1, 1), (now, after))

    def _nvmlDeviceGetMaxMigDeviceCount(self, device: typing.Any, most: typing.Any) -> int:  # noqa: N802
        most._obj.value = 7
        return OK

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, device: typing.Any, i: int, instance: typing.Any) -> int:  # noqa: N802
        instance._obj.value = 100 * i + device.value
        return OK if i in self._card(device)["instances"] else NOT_FOUND

    def _nvmlSystemGetDriverVersion(self, text: typing.Any, size: ctypes.c_uint) -> int:  # noqa: N802
        return self._write("580.159.04", text, size)

    def _nvmlDeviceGetName(self, device: typing.Any, text: typing.Any, size: ctypes.c_uint) -> int:  # noqa: N802
        return self._write(self._card(device)["name"], text, size)

    def _nvmlDeviceGetUUID(self, device: typing.Any, text: typing.Any, size: ctypes.c_uint) -> int:  # noqa: N802
        return self._write(f"GPU-{self._card(device)['minor']}", text, size)

    def _nvmlDeviceGetMinorNumber(self, device: typing.Any, minor: typing.Any) -> int:  # noqa: N802
        return self._fill((self._card(device)["minor"],), (minor,))

    def _nvmlDeviceGetMemoryInfo(self, device: typing.Any, memory: typing.Any) -> int:  # noqa: N802
        memory._obj.total = 80 << 30
        return OK

    def _nvmlDeviceGetGpuInstanceId(self, device: typing.Any, number: typing.Any) -> int:  # noqa: N802
        return self._fill((self._card(device)["gi"],), (number,))

    def _nvmlDeviceGetComputeInstanceId(self, device: typing.Any, number: typing.Any) -> int:  # noqa: N802
        return self._fill((0,), (number,))

    def _nvmlDeviceGetCpuAffinity(self, device: typing.Any, words: int, mask: typing.Any) -> int:  # noqa: N802
        cpus = self._card(device).get("cpus", (0, 1))
        if cpus is None:
            return NOT_SUPPORTED
        assert words * 64 >= 8192
        assert len(mask._obj) == words
        for cpu in cpus:
            mask._obj[cpu // 64] |= 1 << cpu % 64
        return OK

    def _nvmlDeviceGetNvLinkState(self, device: typing.Any, link: int, active: typing.Any) -> int:  # noqa: N802
        lanes = self._card(device).get("lanes")
        if lanes is None:
            return NOT_SUPPORTED
        return INVALID if link >= len(lanes) else self._fill((int(lanes[link] is not None),), (active,))

    def _nvmlDeviceGetNvLinkRemotePciInfo_v2(self, device: typing.Any, link: int, pci: typing.Any) -> int:  # noqa: N802
        remote = self._card(device)["lanes"][link]
        assert remote is not None, "the link is down"
        pci._obj.bus_id = remote
        return OK

    @staticmethod
    def _write(text: str, place: typing.Any, size: ctypes.c_uint) -> int:
        assert len(place) == size.value
        place.value = text.encode()
        return OK

    @staticmethod
    def _fill(reported: tuple[int, ...] | None, places: tuple[typing.Any, ...]) -> int:
        if reported is None:
            return NOT_SUPPORTED
        for place, value in zip(places, reported, strict=True):
            place._obj.value = value
        return OK
