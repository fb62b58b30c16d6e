"""The timer that checks the GPUs: when it runs, its unit, and the charm's reaction."""

import dataclasses
import pathlib
import typing

import machines
import pytest
from conftest import OPTIONS
from health_scene import Scene
from slurm_double import SlurmDouble
from smi_samples import HEALTHY, answer

import settings
from gpu.detect import Gpu
from node import compute, health_timer, slurmd_options
from node import health as gpu_health
from node.machine import Machine, look
from slurm_ddp import systemd
from slurm_ddp.commands import Completed

HOT = "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown"


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record systemctl's arguments; the timer is active once it was started."""
    called: list[str] = []

    def run(*argv: str, **_: object) -> Completed:
        words = " ".join(argv[1:])
        if words.startswith("is-active"):
            return Completed(0 if f"enable --now {argv[-1]}" in called else 3, "", "")
        called.append(words)
        return Completed(0, "", "")

    monkeypatch.setattr(systemd, "run", run)
    return called


@pytest.fixture
def smi() -> pathlib.Path:
    health_timer.NVIDIA_SMI.parent.mkdir(parents=True, exist_ok=True)
    health_timer.NVIDIA_SMI.touch()
    return health_timer.NVIDIA_SMI


def test_the_timer_is_set_up_once(orders: list[str], smi: pathlib.Path):
    health_timer.ensure("slurmd-0", " +109,-74 ")
    assert orders == ["daemon-reload", "enable --now gpu-health.timer"]
    unit = (systemd.UNIT_DIR / "gpu-health.service").read_text()
    assert (
        f'ExecStart=/usr/bin/python3 -I {health_timer.PROGRAM} --act --node slurmd-0 "--xids=+109 -74"\n'
        in unit
    )
    assert "TimeoutStartSec=60\n" in unit
    assert health_timer.PROGRAM.stat().st_mode & 0o777 == 0o755
    orders.append("again")
    health_timer.ensure("slurmd-0", "+109 -74")
    assert orders[-1] == "again"


@pytest.mark.parametrize(
    "changes",
    [
        {"node": None},
        {"config": settings.Config(health_check="never")},
        {"detection": machines.detection()},
        {},
    ],
    ids=["no node", "never", "no GPU", "no nvidia-smi"],
)
def test_no_timer_without_a_node_a_gpu_or_nvidia_smi(
    orders: list[str], smi: pathlib.Path, changes: dict[str, typing.Any]
):
    here = Machine(
        machines.detection(Gpu("A", "0000:01:00.0", 0)), settings.Config(), "nvidia", node="n0"
    )
    compute.ensure_health_check(here)
    assert health_timer.PROGRAM.exists()
    if not changes:
        smi.unlink()
    for _ in range(2):
        compute.ensure_health_check(dataclasses.replace(here, **changes))
    assert orders.count("disable --now gpu-health.timer") == 1
    assert list(systemd.UNIT_DIR.iterdir()) == []
    assert not health_timer.PROGRAM.exists()


def test_an_unfit_node_is_the_status(slurm: SlurmDouble, mock_gpu: pathlib.Path):
    slurmd_options.PATH.write_text(
        OPTIONS.replace("features=slurmd", "features=slurmd gres=gpu:mock_gpu:1")
    )
    slurm.register()
    gpu_health.State(reason="gpu-health: Xid 79: fell off the bus: reboot 0000:01:00.0").save()
    machine = look()
    verdict = compute.status(machine, related=False, progress=None)
    text = "slurmd-0 is unfit: gpu-health: Xid 79: fell off the bus: reboot 0000:01:00.0"
    assert (verdict.level, verdict.text) == ("blocked", text)


def test_the_action_reports_all_findings_and_the_service_those_to_drain_for(
    scene: Scene, smi: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    scene.smi(answer(HEALTHY | {"gpu_recovery_action": "Reset", HOT: "Active"}))
    monkeypatch.setattr(gpu_health.time, "time", lambda: 1e9)
    results = health_timer.check("n0")
    found = "drain: recovery action Reset 0000:01:00.0\nwarn: slowed down by heat 0000:01:00.0"
    assert results == {"result": "drain", "findings": found, "seconds": "0.0"}
    assert health_timer.unfit("n0") == ["recovery action Reset 0000:01:00.0"]
    assert (scene.commands, gpu_health.State.load()) == ([], gpu_health.State()), (
        "it changes nothing"
    )
    smi.unlink()
    assert health_timer.unfit("n0") == []
