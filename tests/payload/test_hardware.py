"""What is known of the machine: memory, disk, GPUs, bf16, and what is decided by it."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib
import typing

import pytest
import torch
import yaml

from ddptrain import config, distributed, errors, hardware, planning, rendezvous

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


def test_memory_and_disk_are_checked_before_anything_is_built(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    hardware.need_memory(1000, torch.device("cpu"), sharers=4, extra_bytes=0)
    monkeypatch.setattr("ddptrain.files.free_bytes", lambda _: 10)
    with pytest.raises(errors.UserError, match=r"too little space in .* make room"):
        hardware.need_disk(tmp_path, 1000)


def test_beside_a_gpu_the_buffers_for_checkpoints_need_the_hosts_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "available_bytes", lambda device, _: {"cpu": 3 << 30, "cuda": 80 << 30}[device.type])
    gpu = torch.device("cuda", 0)
    hardware.need_memory(1000, gpu, sharers=8, extra_bytes=3 << 30)
    with pytest.raises(errors.UserError, match=r"need 4\.0 GiB, 3\.0 GiB is free; raise --mem"):
        hardware.need_memory(1000, gpu, sharers=8, extra_bytes=4 << 30)


@pytest.mark.parametrize(
    ("visible", "local_rank", "wanted"), [(8, 0, "cuda:0"), (8, 7, "cuda:7"), (1, 0, "cuda:0"), (1, 7, "cuda:0")]
)
def test_a_rank_takes_its_gpu_also_where_it_sees_no_other(
    visible: int, local_rank: int, wanted: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert str(hardware.choose_device("auto", local_rank)) == wanted
    with pytest.raises(errors.UserError, match="local rank 2 has no GPU: 2 visible; ask for as many GPUs per node"):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        hardware.choose_device("cuda", 2)


@pytest.mark.parametrize(("gpus", "shared"), [((None, None), False), (("a", "b"), False), (("a", "a"), True)])
def test_two_ranks_on_one_gpu_get_an_error(gpus: tuple[str | None, ...], shared: bool):
    store = torch.distributed.HashStore()
    for rank, gpu in enumerate(gpus):
        own = {"rank": rank, "host": "n1", "device": "H200", "problem": None, "gpu": gpu}
        store.set(f"p/rank/{rank}", json.dumps(own))
        store.add("p/joined", 1)
    members, verdict = rendezvous._collect(store, "p", 2)
    assert members == [{"rank": rank, "host": "n1", "device": "H200"} for rank in range(2)]
    assert ("ranks 0 and 1 on n1 have one GPU between them; ask for as many GPUs" in verdict) is shared
    assert bool(verdict) is shared


@pytest.mark.parametrize(
    ("name", "tflops"),  # as CUDA names it, or a GRES type
    CASES["the_peak_that_mfu_is_measured_against"],
)
def test_the_peak_that_mfu_is_measured_against(name: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    found = hardware.peak_flops(torch.device("cuda", 0))
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))
    assert hardware.peak_flops(torch.device("cpu")) is None


def test_what_compiling_needs_is_looked_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/cc")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert "no Python.h" in (hardware.can_compile() or "")
    (tmp_path / "Python.h").touch()
    assert hardware.can_compile() is None
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert hardware.can_compile() == "no C compiler"


def group(folder: pathlib.Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def test_a_jobs_memory_limit_is_found_at_any_level_of_version_2(tmp_path: pathlib.Path):
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n")
    job = root / "system.slice" / "slurmstepd.scope" / "job_7"
    stat = "anon 1\nactive_file 300\ninactive_file 100\nslab 9"
    group(root / "system.slice", memory_max="max", memory_current=9000, memory_stat=stat)
    group(job, memory_max=5000, memory_current=2000, memory_stat=stat)
    group(job / "step_0" / "user" / "task_0", memory_max="max", memory_current=1500, memory_stat=stat)
    assert hardware.cgroup_left(own, root) == [5000 - 2000 + 400]
    group(job / "step_0", memory_max=2500, memory_current=1500, memory_stat=stat)
    assert min(hardware.cgroup_left(own, root)) == 2500 - 1500 + 400
    group(root, memory_max=1500, memory_current=1500, memory_stat=stat)  # a container sees its own limit at the root
    assert min(hardware.cgroup_left(own, root)) == 400


def test_a_jobs_memory_limit_is_found_in_version_1(tmp_path: pathlib.Path):
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("12:pids:/x\n5:cpuset,memory:/slurm/uid_0/job_7/step_0\n1:name=systemd:/x\n0::/x\n")
    stat = "cache 7\ntotal_active_file 30\ntotal_inactive_file 10\nactive_file 1"
    job = root / "memory" / "slurm" / "uid_0" / "job_7"
    group(job, memory_limit_in_bytes=900, memory_usage_in_bytes=500, memory_stat=stat)
    group(job / "step_0", memory_limit_in_bytes=1 << 62, memory_usage_in_bytes=400, memory_stat=stat)
    assert min(hardware.cgroup_left(own, root)) == 900 - 500 + 40
    assert hardware.cgroup_left(tmp_path / "none", root) == []


def test_the_estimate_knows_the_jobs_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "cgroup_left", lambda *_: [8 << 30, 3 << 30])
    monkeypatch.setattr(hardware, "_meminfo", lambda _: 100 << 30)
    assert hardware.available_bytes(torch.device("cpu"), 2) == (3 << 30) // 2
    with pytest.raises(errors.UserError, match=r"need 1\.6 GiB on each rank, 1\.5 GiB is free"):
        hardware.need_memory(109_000_000, torch.device("cpu"), sharers=2, extra_bytes=0)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [("fpu avx512f avx512_bf16", True), ("fpu amx_tile amx_bf16", True), ("fpu avx2 avx512f avx512_bf16x", False)],
)
def test_a_processor_has_bf16_by_its_flags(
    flags: str, wanted: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    assert not hardware.has_bf16(torch.device("cpu")), "there is no such file"
    hardware.CPUINFO.write_text(f"vendor_id\t: any\nflags\t\t: {flags}\n")
    assert hardware.has_bf16(torch.device("cpu")) is wanted


@pytest.mark.parametrize(
    ("able", "asked", "wanted"),
    [
        (True, {}, "bf16"),
        (False, {}, "fp32"),
        (True, {"deterministic": True}, "fp32"),
        (True, {"deterministic": True, "precision": "bf16"}, "bf16"),
        (False, {"precision": "bf16"}, "bf16"),
    ],
)
def test_precision_is_decided_by_the_hardware_and_deterministic_means_fp32(
    able: bool, asked: dict[str, typing.Any], wanted: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hardware, "has_bf16", lambda _: able)
    world = distributed.World(rendezvous.Place(0, 1, 0, 1, "alone"), torch.device("cpu"))
    assert planning._choose_precision(config.Config(**asked), world).precision == wanted
