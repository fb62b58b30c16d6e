"""gpu-nvml against a library in NVML's place, and gpu-health with it where there is no nvidia-smi."""

import ctypes
import os
import pathlib
import subprocess
import sys
import typing
import xml.etree.ElementTree as ET

import pynvml  # pyright: ignore[reportMissingTypeStubs]
import pytest
from nvml_double import LOST, Card, Library

from gpu import nvml
from node import health_check
from scripts import health as gpu_health
from scripts import nvml as gpu_nvml

H100: Card = {"bus": b"00000000:1B:00.0"}
FULL: Card = H100 | {
    "recovery": 0, "rows": (0, 1, 0, 0), "pages_pending": 0, "pages": (3, 60),
    "errors": {(0, 2): 17, (1, 2): 0, (0, 7): 0, (1, 7): 0}, "sram": (0, 0, 0), "repair": (0, 0), "reasons": 0,
    "fabric": (3, 0),
}  # fmt: skip


def reported(*cards: Card, **more: typing.Any) -> ET.Element:
    library = Library(list(cards), **more)
    with nvml.opened(library) as opened:
        root = gpu_nvml.report(opened)
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
    root = reported(H100 | {"instances": {0: {}, 2: {}, 5: {}}}, FULL)
    assert [len(gpu.findall("mig_devices/mig_device")) for gpu in root.iter("gpu")] == [3, 0]
    assert root.findtext("attached_gpus") == "2"


@pytest.mark.parametrize(
    ("library", "code"),
    [(Library([], init=9), 9), (Library([], init=18), 18), (Library([H100 | {"lost": True}]), LOST)],
)
def test_a_driver_that_refuses_is_its_exit_status(
    library: Library, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda _: library)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert gpu_nvml.main() == code
    assert code in gpu_health.SMI_EXITS
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (nvml.Pci, pynvml.nvmlPciInfo_t),
        (nvml.Memory, pynvml.c_nvmlMemory_t),
        (nvml.Field, pynvml.c_nvmlFieldValue_t),
        (nvml.Sram, pynvml.c_nvmlEccSramErrorStatus_v1_t),
        (nvml.Repair, pynvml.c_nvmlRepairStatus_t),
        (nvml.Fabric, pynvml.c_nvmlGpuFabricInfo_t),
    ],
)
def test_structures_are_laid_out_as_nvidias_own(ours: type[ctypes.Structure], theirs: type[ctypes.Structure]):
    assert ctypes.sizeof(ours) == ctypes.sizeof(theirs)
    offsets = [getattr(theirs, field[0]).offset for field in theirs._fields_]
    mine = [getattr(ours, field[0]).offset for field in ours._fields_]
    assert mine[: len(offsets)] == offsets


def test_gpu_health_asks_it_where_there_is_no_nvidia_smi(paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """With both programs as on a node, where the library is missing as well: which is reported, and nothing is passed over."""
    health_check._install(paths / "gpu-health", paths / "gpu-nvml")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[1:]; from runpy import run_path;"
        "q = run_path(sys.argv[0])['_ask_driver']; q.__globals__['NVIDIA_SMI'] = '/nonesuch'; q()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(paths / "gpu-health")],
        capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert "gpu-nvml exited 12: libnvidia-ml.so.1 is missing: install libnvidia-compute" in done.stderr
