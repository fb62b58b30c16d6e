"""The machine's disk, GPUs and bf16, and the decisions that depend on them."""

# pyright: basic, reportPrivateImportUsage=false
import pathlib
import typing

import pytest
import torch
import yaml

from ddptrain import planning, shapes
from ddptrain.ground import errors
from ddptrain.options import config
from ddptrain.world import distributed, hardware, rendezvous

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


def test_the_disk_is_checked_before_anything_is_built(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ddptrain.ground.files.free_bytes", lambda _: 10)
    with pytest.raises(errors.UserError, match=r"too little space in .* make room"):
        hardware.need_disk(tmp_path, 1000)


@pytest.mark.parametrize(("num_sites", "each"), [(0, 12), (1, 20), (3, 44)])
def test_the_disk_must_hold_the_parts_of_all_sites(
    num_sites: int, each: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """A site saves its weights and AdamW's moments, and one of them the exchanges' state."""
    two_bytes = 2 * each * 1000
    monkeypatch.setattr("ddptrain.ground.files.free_bytes", lambda _: two_bytes)
    hardware.need_disk(tmp_path, 1000, num_sites)
    monkeypatch.setattr("ddptrain.ground.files.free_bytes", lambda _: two_bytes - 1)
    with pytest.raises(errors.UserError, match="too little space"):
        hardware.need_disk(tmp_path, 1000, num_sites)


def test_a_rank_takes_its_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(hardware.choose_device("auto", rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(
        errors.UserError, match="local rank 2 has no GPU: 2 visible; ask for as many GPUs per node"
    ):
        hardware.choose_device("cuda", 2)


@pytest.mark.parametrize(
    ("name", "tflops"),  # as CUDA names it, or a GRES type
    CASES["the_peak_that_mfu_is_measured_against"],
)
def test_the_peak_that_mfu_is_measured_against(name: str, tflops: float | None):
    assert shapes.peak_flops(name) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_compiling_is_off_without_a_compiler(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/cc")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert "no Python.h" in (hardware.can_compile() or "")
    (tmp_path / "Python.h").touch()
    assert hardware.can_compile() is None
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert hardware.can_compile() == "no C compiler"


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("fpu avx512f avx512_bf16", True),
        ("fpu amx_tile amx_bf16", True),
        ("fpu avx2 avx512f avx512_bf16x", False),
    ],
)
def test_a_processor_has_bf16_by_its_flags(
    flags: str, wanted: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    assert not hardware.has_bf16(torch.device("cpu")), "there is no such file"
    hardware.CPUINFO.write_text(f"vendor_id\t: any\nflags\t\t: {flags}\n")
    assert hardware.has_bf16(torch.device("cpu")) is wanted


@pytest.mark.parametrize(
    ("device", "able", "asked", "wanted"),
    [
        ("cpu", True, {}, "bf16"),
        ("cpu", False, {}, "fp32"),
        ("cpu", True, {"deterministic": True}, "fp32"),
        ("cuda", True, {"deterministic": True}, "bf16"),
        ("cpu", True, {"deterministic": True, "precision": "bf16"}, "bf16"),
        ("cpu", False, {"precision": "bf16"}, "bf16"),
    ],
)
def test_precision_is_decided_by_the_hardware_and_deterministic_means_fp32_on_cpus(
    device: str,
    able: bool,
    asked: dict[str, typing.Any],
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(hardware, "has_bf16", lambda _: able)
    world = distributed.World(rendezvous.Place(0, 1, 0, 1), torch.device(device))
    settings = config.complete(config.Config(**asked), "cpu", {})
    assert planning.choose_precision(settings, world).precision == wanted
