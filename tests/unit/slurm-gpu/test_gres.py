"""Lines equal Slurm's own detection, on the machines whose output is known."""

import dataclasses
import pathlib

import pytest
from machines import add_topology, conf, detection, numbers, topology

from gpu import detect as gpu_detect
from gpu import gres
from gpu.detect import Gpu
from slurm_ddp.interfaces import slurm_gres

H100 = "NVIDIA H100 80GB HBM3"
NEAR = (
    "0-55,112-167",
    "56-111,168-223",
)  # the CPUs of the two sockets of a 2 x 56 core machine with two threads each


H100S = detection(
    *(Gpu(H100, f"0000:{i:02x}:00.0", i, cpus=numbers(NEAR[i // 4])) for i in range(8))
)


def test_one_card_makes_one_line():
    gpu = Gpu("Quadro RTX 6000", "0000:01:00.0", 0, cpus=numbers("0-1"))
    plan = gres.plan(detection(gpu), conf(1, 2, 1), topology(1, 2, 1))
    assert plan.gres == "gpu:quadro_rtx_6000:1"
    assert plan.lines == (
        "Name=gpu Type=quadro_rtx_6000 File=/dev/nvidia0 Cores=0-1 Flags=nvidia_gpu_env",
    )
    assert plan.is_detected


def test_eight_cards_make_eight_lines_with_their_sockets():
    plan = gres.plan(H100S, conf(2, 56, 2), topology(2, 56, 2))
    assert plan.gres == "gpu:nvidia_h100_80gb_hbm3:8"
    head = "Name=gpu Type=nvidia_h100_80gb_hbm3"
    assert plan.lines[0] == f"{head} File=/dev/nvidia0 Cores=0-55 Flags=nvidia_gpu_env"
    assert plan.lines[7] == f"{head} File=/dev/nvidia7 Cores=56-111 Flags=nvidia_gpu_env"
    assert plan.device_files == tuple(pathlib.Path(f"/dev/nvidia{i}") for i in range(8))
    assert slurm_gres.NodeGres(node="n", gres=plan.gres, lines=plan.lines).lines == plan.lines


def test_lines_keep_nvmls_order():
    gpus = [Gpu("NVIDIA A100-SXM4-40GB", f"0000:0{i}:00.0", 3 - i) for i in range(4)]
    plan = gres.plan(detection(*gpus), {}, None)
    assert [line.split()[2] for line in plan.lines] == [
        f"File=/dev/nvidia{minor}" for minor in (3, 2, 1, 0)
    ]


def test_cores_that_cut_a_socket_are_left_out_on_all_lines_and_reported():
    """An EPYC in NPS4: 25.11 would refuse the node with such Cores."""
    near = ("24-47", "0-95")
    gpus = [
        Gpu("NVIDIA H200", f"0000:0{i}:00.0", i, cpus=numbers(cpus)) for i, cpus in enumerate(near)
    ]
    plan = gres.plan(detection(*gpus), conf(2, 96, 1), topology(2, 96, 1))
    assert not any("Cores=" in line for line in plan.lines)
    assert plan.notes == (
        "no Cores: 0000:00:00.0 sits beside cores 24-47, which are not a whole socket; slurmd --parameters "
        "numa_node_as_socket would make them one",
    )


def test_two_whole_sockets_of_four_are_no_whole_socket():
    gpu = Gpu("NVIDIA H200", "0000:00:00.0", 0, cpus=numbers("0-3"))
    plan = gres.plan(detection(gpu), conf(4, 2, 1), topology(4, 2, 1))
    assert "Cores=" not in plan.lines[0]


def test_cores_are_left_out_when_one_card_does_not_tell():
    gpus = [Gpu(H100, "0000:00:00.0", 0, cpus=numbers("0-1")), Gpu(H100, "0000:01:00.0", 1)]
    plan = gres.plan(detection(*gpus), conf(1, 2, 1), topology(1, 2, 1))
    assert (["Cores=" in line for line in plan.lines], plan.notes) == ([False, False], ())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "nvidia_a100-sxm4-40gb"),
        ("Quadro RTX 6000", "quadro_rtx_6000"),
        ("NVIDIA  GB200", "nvidia__gb200"),
    ],
)
def test_types_are_spelt_as_slurm_does(name: str, kind: str):
    assert gres.slurm_type(name) == kind


def test_a_name_that_slurm_cannot_hold_needs_its_lines():
    plan = gres.plan(detection(Gpu("Quadro RTX 6000/8000 (R)", "0000:00:00.0", 0)), {}, None)
    assert plan.gres == "gpu:quadro_rtx_6000_8000__r_:1"
    assert not plan.is_detected
    assert slurm_gres.NodeGres(gres=plan.gres, lines=plan.lines).lines == plan.lines


A100 = Gpu(
    "NVIDIA A100-SXM4-40GB",
    "0000:1b:00.0",
    0,
    cpus=numbers("0-15,32-47"),
    mig=True,
    instances=(gpu_detect.Instance("3g.20gb", (12, 13)), gpu_detect.Instance("3g.20gb", (21, 22))),
)


def test_mig_instances_are_devices_of_three_files():
    plan = gres.plan(detection(A100), conf(2, 16, 2), topology(2, 16, 2))
    assert plan.gres == "gpu:nvidia_a100_3g.20gb:2"
    head = (
        "Name=gpu Type=nvidia_a100_3g.20gb MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap"
    )
    assert plan.lines == (
        f"{head}12,/dev/nvidia-caps/nvidia-cap13 Cores=0-15 Flags=nvidia_gpu_env",
        f"{head}21,/dev/nvidia-caps/nvidia-cap22 Cores=0-15 Flags=nvidia_gpu_env",
    )
    assert not plan.is_detected  # AutoDetect=nvidia sees the card only
    assert [str(file) for file in plan.device_files] == [
        "/dev/nvidia0",
        *(f"/dev/nvidia-caps/nvidia-cap{number}" for number in (12, 13, 21, 22)),
    ]
    assert slurm_gres.NodeGres(gres=plan.gres, lines=plan.lines).lines == plan.lines


def test_a_card_in_mig_mode_beside_a_whole_one():
    plan = gres.plan(detection(A100, Gpu("NVIDIA A100-SXM4-40GB", "0000:1c:00.0", 1)), {}, None)
    assert plan.gres == "gpu:nvidia_a100_3g.20gb:2,gpu:nvidia_a100-sxm4-40gb:1"
    assert "File=/dev/nvidia1 " in plan.lines[2]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "nvml",
            "GPU 0000:1b:00.0 is in MIG mode without instances: make some (nvidia-smi mig -cgi ... -C) or run "
            "nvidia-smi -i 0000:1b:00.0 -mig 0",
        ),
        (
            "proc",
            "GPU 0000:1b:00.0 is in MIG mode, whose instances only NVML reports: install libnvidia-ml.so.1",
        ),
    ],
)
def test_mig_without_instances_is_refused_in_words(source: str, text: str):
    bare = dataclasses.replace(A100, instances=())
    with pytest.raises(gres.GresError) as caught:
        gres.plan(gpu_detect.Detection(source, (bare,)), {}, None)
    assert str(caught.value) == text


@pytest.mark.parametrize("names", [[H100], [H100, "NVIDIA H100 NVL"]])
def test_types_that_slurm_detects_need_no_lines(names: list[str]):
    gpus = [Gpu(name, f"0000:0{i}:00.0", i) for i, name in enumerate(names)]
    plan = gres.plan(detection(*gpus), {}, None)
    assert plan.gres == ",".join(f"gpu:{gres.slurm_type(name)}:1" for name in names)
    assert plan.is_detected


def test_a_card_without_a_model_is_refused_in_words():
    with pytest.raises(gres.GresError) as caught:
        gres.plan(gpu_detect.Detection("proc", (Gpu(None, "0000:1b:00.0", 0),)), {}, None)
    assert str(caught.value) == "GPU 0000:1b:00.0: /proc/driver/nvidia gives no model"


def test_the_topology_lists_the_cores_of_each_socket(paths: pathlib.Path):
    assert gres.read_topology() is None
    add_topology(paths, 2, 4, 2)
    (paths / "sys/devices/system/cpu/cpufreq").mkdir()
    (paths / "sys/devices/system/cpu/cpu99").mkdir()  # offline
    found = gres.read_topology()
    assert found == topology(2, 4, 2)
    assert found is not None
    assert sum(map(len, found)) == 8
    assert found[1][0] == {4, 12}


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({}, True),
        ({"sockets": "2"}, True),
        ({"sockets": "1"}, False),
        ({"boards": "2", "socketsperboard": "1", "corespersocket": "2"}, True),
        ({"socketsperboard": "2", "corespersocket": "1"}, False),
        ({"socketsperboard": "4", "corespersocket": "1"}, False),
        (conf(2, 2, 1) | {"boards": "2"}, False),
        ({"sockets": "two"}, False),
    ],
)
def test_cores_only_where_the_configured_sockets_are_the_machines(
    settings: dict[str, str], fits: bool
):
    gpu = Gpu("Tesla T4", "0000:01:00.0", 0, cpus=numbers("2-3"))
    plan = gres.plan(detection(gpu), settings, topology(2, 2, 1))
    note = "no Cores: the node's --conf describes other sockets and cores than this machine has"
    assert ("Cores=2-3" in plan.lines[0], plan.notes) == (fits, () if fits else (note,))
