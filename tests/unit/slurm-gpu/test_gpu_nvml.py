"""gpu-nvml against a library in NVML's place, and gpu-health with it where there is no nvidia-smi."""

import collections.abc
import ctypes
import os
import pathlib
import subprocess
import sys
import typing
import xml.etree.ElementTree as ET

import pynvml  # pyright: ignore[reportMissingTypeStubs]
import pytest

from scripts import health as gpu_health
from scripts import nvml as gpu_nvml

OK, INVALID, NOT_SUPPORTED, INSUFFICIENT, LOST, VERSION = 0, 2, 3, 7, 15, 25
Card = dict[str, typing.Any]
H100: Card = {"bus": b"00000000:1B:00.0"}
FULL: Card = H100 | {
    "recovery": 0, "rows": (0, 1, 0, 0), "pages_pending": 0, "pages": (3, 60),
    "errors": {(0, 2): 17, (1, 2): 0, (0, 7): 0, (1, 7): 0}, "sram": (0, 0, 0), "repair": (0, 0), "reasons": 0,
    "fabric": (3, 0),
}  # fmt: skip


class Library:
    """libnvidia-ml.so.1 with these cards. It refuses what a card does not support, and an argument of a wrong size."""

    def __init__(self, cards: list[Card], init: int = OK, without: collections.abc.Collection[str] = ()) -> None:
        self.cards, self.init, self.without = cards, init, without
        self.is_shut = False

    def __getattr__(self, name: str) -> collections.abc.Callable[..., int]:
        if name in self.without or name == "nvmlErrorString":
            raise AttributeError(name)
        return getattr(type(self), f"_{name}").__get__(self)

    def _card(self, device: ctypes.c_void_p) -> Card:
        assert device.value is not None
        return self.cards[device.value - 1]

    def _nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's names, here and below
        return self.init

    def _nvmlShutdown(self) -> int:  # noqa: N802
        self.is_shut = True
        return OK

    def _nvmlDeviceGetCount_v2(self, count: typing.Any) -> int:  # noqa: N802
        count._obj.value = len(self.cards)
        return OK

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
        told = self._card(device).get("pages_pending")
        return self._fill(None if told is None else (told,), (pending,))

    def _nvmlDeviceGetRetiredPages(  # noqa: N802
        self, device: typing.Any, cause: int, count: typing.Any, addresses: None
    ) -> int:
        assert count._obj.value == 0
        told = self._card(device).get("pages")
        if told is None:
            return NOT_SUPPORTED
        count._obj.value = told[cause]
        return INSUFFICIENT if told[cause] else OK

    def _nvmlDeviceGetMemoryErrorCounter(  # noqa: N802
        self, device: typing.Any, kind: int, since: int, place: int, count: typing.Any
    ) -> int:
        assert since == pynvml.NVML_VOLATILE_ECC
        told = self._card(device).get("errors", {}).get((kind, place))
        return self._fill(None if told is None else (told,), (count,))

    def _nvmlDeviceGetSramEccErrorStatus(self, device: typing.Any, status: typing.Any) -> int:  # noqa: N802
        if status._obj.version != pynvml.nvmlEccSramErrorStatus_v1:
            return VERSION
        told = self._card(device).get("sram")
        if told is None:
            return NOT_SUPPORTED
        status._obj.parity, status._obj.secded, status._obj.exceeded = told
        return OK

    def _nvmlDeviceGetRepairStatus(self, device: typing.Any, status: typing.Any) -> int:  # noqa: N802
        if status._obj.version != pynvml.nvmlRepairStatus_v1:
            return VERSION
        told = self._card(device).get("repair")
        if told is None:
            return NOT_SUPPORTED
        status._obj.channel, status._obj.tpc = told
        return OK

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, device: typing.Any, reasons: typing.Any) -> int:  # noqa: N802
        told = self._card(device).get("reasons")
        return self._fill(None if told is None else (told,), (reasons,))

    def _nvmlDeviceGetGpuFabricInfo(self, device: typing.Any, fabric: typing.Any) -> int:  # noqa: N802
        told = self._card(device).get("fabric")
        if told is None:
            return NOT_SUPPORTED
        fabric._obj.state, fabric._obj.status = told
        return OK

    def _nvmlDeviceGetMigMode(self, device: typing.Any, now: typing.Any, after: typing.Any) -> int:  # noqa: N802
        told = self._card(device).get("instances")
        return self._fill(None if told is None else (1, 1), (now, after))

    def _nvmlDeviceGetMaxMigDeviceCount(self, device: typing.Any, most: typing.Any) -> int:  # noqa: N802
        most._obj.value = 7
        return OK

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, device: typing.Any, i: int, instance: typing.Any) -> int:  # noqa: N802
        return OK if i in self._card(device)["instances"] else 6

    @staticmethod
    def _fill(told: tuple[int, ...] | None, places: tuple[typing.Any, ...]) -> int:
        if told is None:
            return NOT_SUPPORTED
        for place, value in zip(places, told, strict=True):
            place._obj.value = value
        return OK


def reported(*cards: Card, **more: typing.Any) -> ET.Element:
    library = Library(list(cards), **more)
    with gpu_nvml.Nvml(library) as nvml:
        root = gpu_nvml.report(nvml)
    assert library.is_shut
    return ET.fromstring(ET.tostring(root))


def findings(card: Card, **more: typing.Any) -> list[str]:
    gpu = reported(card, **more).find("gpu")
    assert gpu is not None
    return [f"{one.level}: {one}" for one in gpu_health.judge(gpu)]


@pytest.fixture(autouse=True)
def booted(paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (paths / "uptime").write_text("1000.0 1.0\n")
    monkeypatch.setattr(gpu_health, "UPTIME", paths / "uptime")


def test_cards_that_are_fine_or_have_no_answers():
    assert findings(FULL) == []
    assert findings(H100) == []


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"recovery": 1}, "drain: recovery action Reset"),
        ({"recovery": 9}, "drain: recovery action 9"),
        ({"rows": (0, 0, 1, 0)}, "drain: row remapping pending: reset it"),
        ({"rows": (0, 0, 0, 1)}, "drain: row remapping failed: replace it"),
        ({"pages_pending": 1}, "drain: page retirement pending: reset it"),
        ({"pages": (0, 61)}, "drain: 61 pages retired for double-bit errors: replace it"),
        ({"pages": (61, 0)}, "drain: 61 pages retired for single-bit errors: replace it"),
        ({"errors": {(1, 2): 2}}, "drain: 2 uncorrectable DRAM errors: reset it"),
        ({"errors": {(1, 7): 3}}, "drain: 3 uncorrectable SRAM errors: reset it"),
        ({"errors": {(0, 2): 20_000_001}}, "warn: 20000001 correctable DRAM errors"),
        ({"errors": {(0, 7): 10_001}}, "warn: 10001 correctable SRAM errors"),
        ({"sram": (4, 0, 0)}, "drain: 4 SRAM parity errors: reset it"),
        ({"sram": (0, 5, 0)}, "drain: 5 SRAM SEC-DED errors: reset it"),
        ({"sram": (0, 0, 1)}, "drain: SRAM error threshold: replace it"),
        ({"repair": (1, 0)}, "drain: channel repair pending: reset it"),
        ({"repair": (0, 1)}, "drain: TPC repair pending: reset it"),
        ({"reasons": pynvml.nvmlClocksEventReasonHwThermalSlowdown}, "warn: slowed down by heat"),
        ({"reasons": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown}, "warn: slowed down by the power supply"),
        ({"fabric": (2, 0)}, "drain: fabric/state In Progress: is nvidia-fabricmanager running?"),
        ({"fabric": (3, 999)}, "drain: fabric/status error 999: is nvidia-fabricmanager running?"),
    ],
)
def test_each_fault_is_found_as_nvidia_smi_shows_it(fault: Card, text: str):
    assert findings(FULL | fault) == [f"{text} 0000:1b:00.0"]


def test_every_rule_of_the_check_has_its_element():
    gpu = reported(FULL).find("gpu")
    assert gpu is not None
    missing = {rule.path for rule in gpu_health.RULES if gpu.find(rule.path) is None}
    assert missing == set()


def test_a_library_without_newer_functions_has_no_answers():
    new = {"nvmlDeviceGetRepairStatus", "nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetGpuFabricInfo"}
    assert findings(FULL | {"repair": (1, 1)}, without=new) == []


def test_instances_are_counted():
    root = reported(H100 | {"instances": {0, 2, 5}}, FULL)
    assert [len(gpu.findall("mig_devices/mig_device")) for gpu in root.iter("gpu")] == [3, 0]
    assert root.findtext("attached_gpus") == "2"


@pytest.mark.parametrize(
    ("library", "code"),
    [(Library([], init=9), 9), (Library([], init=18), 18), (Library([H100 | {"lost": True}]), LOST)],
)
def test_a_driver_that_refuses_is_its_exit_status(
    library: Library, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpu_nvml.ctypes, "CDLL", lambda _: library)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert gpu_nvml.main() == code
    assert code in gpu_health.SMI_EXITS
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (gpu_nvml.Pci, pynvml.nvmlPciInfo_t),
        (gpu_nvml.Field, pynvml.c_nvmlFieldValue_t),
        (gpu_nvml.Sram, pynvml.c_nvmlEccSramErrorStatus_v1_t),
        (gpu_nvml.Repair, pynvml.c_nvmlRepairStatus_t),
        (gpu_nvml.Fabric, pynvml.c_nvmlGpuFabricInfo_t),
    ],
)
def test_structures_are_laid_out_as_nvidias_own(ours: type[ctypes.Structure], theirs: type[ctypes.Structure]):
    assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)
    offsets = [getattr(theirs, field[0]).offset for field in theirs._fields_]
    mine = [getattr(ours, field[0]).offset for field in ours._fields_]
    assert mine[: len(offsets)] == offsets


def test_gpu_health_asks_it_where_there_is_no_nvidia_smi(paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """With both programs as on a node, where the library is missing as well: which is said, and nothing is passed over."""
    folder = paths / "sbin"
    folder.mkdir()
    for source, name in ((gpu_health, "gpu-health"), (gpu_nvml, "gpu-nvml")):
        (folder / name).write_text(pathlib.Path(str(source.__file__)).read_text())
    code = (
        "import runpy, sys; m = runpy.run_path(sys.argv[1]); q = m['_driver_query'];"
        "q.__globals__['NVIDIA_SMI'] = '/nonesuch'; q.__globals__['_deadline'].begin(); q.__globals__['_ask_driver']()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(folder / "gpu-health")],
        capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert "gpu-nvml exited 12: libnvidia-ml.so.1 is missing: install libnvidia-compute" in done.stderr
