"""Detection: three sources in their order, each on trees as the kernel and the driver show them."""

import json
import pathlib
import sys

import pytest
from conftest import ask_nvml
from machines import Card, add_driver, add_pci, numbers

from gpu import detect as gpu_detect
from gpu import nvml as gpu_nvml
from gpu.detect import Detection, NvmlAnswer
from slurm_ddp.commands import CommandError, CommandTimeout, Completed

H100 = "NVIDIA H100 80GB HBM3"


def answers(monkeypatch: pytest.MonkeyPatch, answer: dict[str, object]) -> None:
    monkeypatch.setattr(
        gpu_detect, "run_probe", lambda: NvmlAnswer.model_validate_json(json.dumps(answer))
    )


def test_a_machine_without_cards_asks_no_driver(
    paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_detect, "run_probe", pytest.fail)
    add_pci(paths, "0000:00:02.0", vendor="0x8086", kind="0x030000")
    assert gpu_detect.detect() == Detection("none")


def test_the_driver_lists_cards_by_bus_id(paths: pathlib.Path):
    cards = [
        Card(H100, "0000:9d:00.0"),
        Card(H100, "0000:1b:00.0"),
        Card("NVIDIA L40S", "10000:01:00.0"),
    ]
    add_driver(paths, cards, minors=[0, 1, 2])
    for card in cards[:2]:
        add_pci(paths, card.bus_id, cpus="0-55,112-167")
    found = gpu_detect.detect()
    assert found.driver == "580.159.04"
    assert [(gpu.bus_id, gpu.minor) for gpu in found.gpus] == [
        ("0000:1b:00.0", 1),
        ("0000:9d:00.0", 0),
        ("10000:01:00.0", 2),
    ]
    assert [gpu.name for gpu in found.gpus] == [H100, H100, "NVIDIA L40S"]
    assert found.gpus[0].uuid == "GPU-00000000-0000-0000-0000-000000000001"
    assert found.gpus[0].cpus == numbers("0-55,112-167")
    assert found.gpus[2].cpus is None


def test_mig_instances_are_seen_without_nvml(paths: pathlib.Path):
    add_driver(paths, [Card("NVIDIA A100-SXM4-40GB", "0000:1b:00.0")])
    (paths / "proc/driver/nvidia/capabilities/gpu0/mig/gi1").mkdir(parents=True)
    assert gpu_detect.detect().gpus[0].mig


def test_cards_without_a_driver(paths: pathlib.Path):
    add_pci(paths, "0000:1b:00.0", kind="0x030200")
    add_pci(paths, "0000:1c:00.0", kind="0x030000")
    add_pci(paths, "0000:1c:00.1", kind="0x040300")  # its audio
    add_pci(paths, "0000:05:00.0", kind="0x068000")  # an NVSwitch
    found = gpu_detect.detect()
    assert (found.source, [gpu.bus_id for gpu in found.gpus]) == (
        "pci",
        ["0000:1b:00.0", "0000:1c:00.0"],
    )
    assert (
        found.problem
        == "2 NVIDIA GPUs have no driver: set driver=580 (or another branch), or install one and reboot this machine"
    )
    assert not found.is_usable


def test_nvml_comes_first(paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    add_driver(paths, [Card(H100, "0000:1b:00.0")])
    card = {"name": H100, "minor": 3, "bus_id": "00000000:1B:00.0", "cpus": [0, 1], "uuid": "GPU-a"}
    answers(monkeypatch, {"driver": "580.1", "gpus": [card]})
    found = gpu_detect.detect()
    assert (found.source, found.driver, found.problem) == ("nvml", "580.1", None)
    (gpu,) = found.gpus
    assert (gpu.bus_id, gpu.minor, gpu.cpus, gpu.uuid) == ("0000:1b:00.0", 3, {0, 1}, "GPU-a")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            CommandTimeout("python3: no answer within 60 s"),
            "the driver does not answer (python3: no answer within 60 s)",
        ),
        (Completed(0, "Segmentation", ""), "the driver's library returned unexpected values"),
        (Completed(0, '{"gpus": [{}]}', ""), "the driver's library returned unexpected values"),
    ],
)
def test_a_silent_nvml_probe_is_a_problem_and_not_no_gpu(
    monkeypatch: pytest.MonkeyPatch, answer: Completed | CommandError, error: str
):
    def run(*argv: object, env: dict[str, str], timeout: float) -> Completed:
        assert argv == (sys.executable, gpu_nvml.__file__)
        assert set(env) == {"PYTHONPATH"}
        assert timeout == 60
        if isinstance(answer, CommandError):
            raise answer
        return answer

    monkeypatch.setattr(gpu_detect, "run", run)
    assert ask_nvml() == NvmlAnswer(error=error, broken=True)


@pytest.mark.parametrize("hangs", [False, True])
def test_device_files(paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch, hangs: bool):
    files = [paths / "dev/nvidia0", paths / "dev/nvidia3", paths / "dev/nvidia4"]
    files[0].touch()
    assert gpu_detect.ensure_device_files(files[:1]) == []
    assert gpu_detect.ensure_device_files(files) == files[1:], "there is no nvidia-modprobe"
    gpu_detect.NVIDIA_MODPROBE.parent.mkdir(parents=True)
    gpu_detect.NVIDIA_MODPROBE.touch()
    asked: list[str] = []

    def run(*argv: object, **_: object) -> None:
        asked.append(str(argv[-1]))
        if hangs:
            raise CommandTimeout("nvidia-modprobe: no answer within 60 s")
        (paths / f"dev/nvidia{argv[-1]}").touch()

    monkeypatch.setattr(gpu_detect, "run", run)
    assert gpu_detect.ensure_device_files(files) == (files[1:] if hangs else [])
    assert asked == (["0"] if hangs else ["0", "3", "4"])


@pytest.mark.parametrize(
    ("text", "found"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", None), ("0-", None), ("a", None), ("0,,1", None)],
)
def test_cpu_lists(text: str, found: set[int] | None):
    assert gpu_detect.parse_cpu_list(text) == found


MIG_CARD = {
    "name": "NVIDIA A100-SXM4-40GB",
    "minor": 0,
    "bus_id": "00000000:1B:00.0",
    "mig": True,
    "instances": [{"profile": "3g.20gb", "gpu_instance": 1, "compute_instance": 0}],
}


def mig_machine(
    paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch, minors: str
) -> gpu_detect.Detection:
    add_pci(paths, "0000:1b:00.0")
    (paths / "proc/driver/nvidia-caps").mkdir(parents=True)
    (paths / "proc/driver/nvidia-caps/mig-minors").write_text(minors)
    answers(monkeypatch, {"gpus": [MIG_CARD]})
    return gpu_detect.detect()


def test_mig_instances_with_their_capability_files(
    paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    found = mig_machine(
        paths,
        monkeypatch,
        "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu1/gi1/access 147\n",
    )
    assert found.gpus[0].instances == (gpu_detect.Instance("3g.20gb", (12, 13), 1),)
    assert found.is_usable


def test_capability_files_are_asked_of_the_driver_by_name(
    paths: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    mig_machine(paths, monkeypatch, "gpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n")
    gpu_detect.NVIDIA_MODPROBE.parent.mkdir(parents=True)
    gpu_detect.NVIDIA_MODPROBE.touch()
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(gpu_detect, "run", lambda *argv, **_: asked.append(argv[1:]))
    files = [
        paths / "dev" / name
        for name in ("nvidia0", "nvidia-caps/nvidia-cap13", "nvidia-caps/nvidia-cap99")
    ]
    assert gpu_detect.ensure_device_files(files) == files
    assert asked == [
        ("-u", "-c", "0"),
        ("-f", "/proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access"),
    ]
