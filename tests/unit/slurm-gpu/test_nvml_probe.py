"""The queries to NVML, with fake cards that refuse as NVML does."""

import collections.abc
import ctypes
import json
import pathlib
import subprocess
import sys
import types
import typing

import pynvml  # pyright: ignore[reportMissingTypeStubs]
import pytest

from gpu import nvml

Card = dict[str, typing.Any]
Probe = collections.abc.Callable[..., dict[str, typing.Any]]
NOT_SUPPORTED, NOT_FOUND, LOST = 3, 6, 15


def card(name: str, minor: int, bus: str, **more: typing.Any) -> Card:
    return {"name": name, "minor": minor, "bus": bus, **more}


def needed(value: typing.Any, code: int = NOT_SUPPORTED) -> typing.Any:
    if value is None:
        raise pynvml.NVMLError(code)
    return value


def affinity(device: Card, words: int) -> typing.Any:
    mask = (ctypes.c_ulonglong * words)()
    for cpu in needed(device.get("cpus", (0, 1))):
        mask[cpu // 64] |= 1 << cpu % 64
    return mask


DEVICES: dict[
    str, collections.abc.Callable[..., typing.Any]
] = {  # nvidia-ml-py's functions; a device is its card
    "SystemGetDriverVersion": lambda: "580.159.04",
    "DeviceGetCpuAffinity": affinity,
    "DeviceGetName": lambda device: device["name"],
    "DeviceGetMinorNumber": lambda device: device["minor"],
    "DeviceGetUUID": lambda device: f"GPU-{device['minor']}",
    "DeviceGetPciInfo": lambda device: types.SimpleNamespace(busId=device["bus"].encode()),
    "DeviceGetMigMode": lambda device: needed([1, 1] if "instances" in device else None),
    "DeviceGetMaxMigDeviceCount": lambda device: 7,
    "DeviceGetMigDeviceHandleByIndex": lambda device, i: needed(
        device["instances"].get(i), NOT_FOUND
    ),
    "DeviceGetGpuInstanceId": lambda device: device["gi"],
    "DeviceGetComputeInstanceId": lambda device: 0,
}


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Probe:
    def run(*cards: Card, init: int = 0) -> dict[str, typing.Any]:
        ended: list[bool] = []
        machine = {
            "Init": lambda: needed(None if init else True, init),
            "Shutdown": lambda: ended.append(True),
            "DeviceGetCount": lambda: len(cards),
            "DeviceGetHandleByIndex": lambda i: needed(
                cards[i] if "lost" not in cards[i] else None, LOST
            ),
        }
        for name, function in (DEVICES | machine).items():
            monkeypatch.setattr(pynvml, f"nvml{name}", function)
        assert nvml.main() == 0
        assert bool(ended) == (not init)
        return json.loads(capsys.readouterr().out)

    return run


def test_the_probe_prints_one_card(probe: Probe):
    assert probe(card("Quadro RTX 6000", 0, "00000000:1B:00.0", cpus=(0, 1, 64, 70))) == {
        "driver": "580.159.04",
        "gpus": [
            {
                "name": "Quadro RTX 6000",
                "minor": 0,
                "bus_id": "00000000:1B:00.0",
                "uuid": "GPU-0",
                "cpus": [0, 1, 64, 70],
                "mig": False,
                "instances": [],
            }
        ],
    }


def test_unsupported_values_of_a_card_are_left_out(probe: Probe):
    (gpu,) = probe(card("Tesla T4", 0, "00000000:01:00.0", cpus=None, instances={}))["gpus"]
    assert (gpu["cpus"], gpu["mig"], gpu["instances"]) == (None, True, [])


@pytest.mark.parametrize(("code", "broken"), [(9, False), (12, False), (18, True), (999, True)])
def test_nvml_that_does_not_start(probe: Probe, code: int, broken: bool):
    assert probe(init=code) == {"error": str(pynvml.NVMLError(code)), "broken": broken}


def test_nvml_that_fails_half_way(probe: Probe):
    assert probe(card("A", 0, "0", lost=True)) == {"error": "GPU is lost", "broken": True}


def test_mig_instances_are_listed_in_order_whatever_gaps_there_are(probe: Probe):
    instances = {i: card(f"NVIDIA H100 80GB HBM3 MIG {i}g.20gb", 7 + i, "", gi=i) for i in (1, 2)}
    (gpu,) = probe(card("NVIDIA H100 80GB HBM3", 0, "00000000:01:00.0", instances=instances))[
        "gpus"
    ]
    assert gpu["instances"] == [
        {"profile": "1g.20gb", "gpu_instance": 1, "compute_instance": 0},
        {"profile": "2g.20gb", "gpu_instance": 2, "compute_instance": 0},
    ]


def test_the_check_for_a_machine_with_a_gpu_says_in_one_line_that_there_is_none():
    check = pathlib.Path(__file__).resolve().parents[3] / "bench" / "gpu_check.py"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        done = subprocess.run(
            (sys.executable, str(check)), capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("gpu_check: NVML: ")
        assert done.stderr.count("\n") == 1
    else:
        pytest.skip("this machine has a driver of NVIDIA")
