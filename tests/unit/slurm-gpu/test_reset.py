"""Resetting a card: the node is free of jobs, everything starts again, the state is restored."""

import pathlib

import pytest
import roles
from machine_double import MachineDouble, MigCard
from slurm_double import Record

from driver import state as driver_state
from gpu import mig as gpu_mig
from maintenance import reset as maintenance_reset
from node import health as gpu_health
from node import health_timer, kept
from slurm_ddp import systemd
from slurm_ddp.charm import ActionError
from slurm_ddp.commands import CommandTimeout
from slurm_ddp.slurm import nodes

BUS = "0000:1b:00.0"
NAME = "slurmd-0"
DCGM = {
    "snap.dcgm.nv-hostengine.service",
    "snap.dcgm.dcgm-exporter.service",
}  # as upstream's slurmd brings it


@pytest.fixture(autouse=True)
def resettable(paths: pathlib.Path, node: MachineDouble) -> MachineDouble:
    node.smi.cards = {BUS: MigCard("NVIDIA H100 80GB HBM3")}
    (paths / "usr/bin").mkdir(parents=True, exist_ok=True)
    for program in ("nvidia-smi", "nvidia-persistenced"):
        (paths / "usr/bin" / program).touch()
    node.active = {"nvidia-persistenced.service", "gpu-health.timer", *DCGM}
    node.slurm.record = Record("")
    return node


def reset(gpu: str = BUS, wait_s: float = 60, log: list[str] | None = None) -> dict[str, str]:
    return maintenance_reset.reset(
        gpu, NAME, wait_s, log.append if log is not None else lambda _: None
    )


@pytest.mark.parametrize(
    "found",
    [
        Record(""),
        Record(
            "",
            "IDLE",
            {"DYNAMIC_NORM", "DRAIN"},
            "gpu-health: Xid 119: GSP does not answer: reset it 0000:1b:00.0",
        ),
        Record("", "DOWN", {"DYNAMIC_NORM"}, "'n/a'"),
    ],
)
def test_a_card_is_reset_and_the_node_put_back(node: MachineDouble, found: Record):
    node.slurm.record = Record(found.gres, found.base, set(found.flags), found.reason)
    log: list[str] = []
    assert reset(log=log) == {"result": "reset", "gpus": BUS}
    assert node.smi.log == [f"-r -i {BUS}"]
    assert log == [f"resetting GPU {BUS}"]
    assert node.slurm.record.reason == f"gpu-reset: {BUS}"
    assert node.active >= {"nvidia-persistenced.service", *DCGM}
    assert roles.maintain()
    assert node.slurm.record == found


def test_without_nvidia_smi_nothing_is_done(node: MachineDouble):
    health_timer.NVIDIA_SMI.unlink()
    with pytest.raises(
        ActionError, match="there is no /usr/bin/nvidia-smi on this machine: install nvidia-utils"
    ):
        reset()
    assert node.slurm.log == []


def test_its_layout_is_made_again(node: MachineDouble):
    node.smi.cards[BUS] = MigCard("NVIDIA H100 80GB HBM3", True, True, ["3g.40gb", "3g.40gb"])
    gpu_mig.LAYOUTS.parent.mkdir(parents=True, exist_ok=True)
    gpu_mig.LAYOUTS.write_text('{"0000:1b:00.0": ["3g.40gb", "3g.40gb"]}')
    reset()
    assert node.smi.cards[BUS].instances == ["3g.40gb", "3g.40gb"]


def test_boards_that_reset_all_cards_together(node: MachineDouble):
    for number in range(6):
        node.add_card(f"0000:0{number}:00.0", 0x1AF1, kind="0x068000")
    with pytest.raises(ActionError, match="reset all GPUs together: gpu=all"):
        reset()
    assert node.slurm.log == []
    assert reset("all") == {"result": "reset", "gpus": BUS}
    assert node.smi.log == ["-r"]


def test_a_reset_that_the_driver_refuses_is_reported(node: MachineDouble):
    node.smi.broken = "GPU 00000000:1B:00.0 is currently in use by another process."
    with pytest.raises(
        ActionError, match=rf"GPU {BUS} could not be reset: .*in use by another process"
    ):
        reset()
    assert "nvidia-persistenced.service" in node.active  # everything runs again
    roles.maintain()
    assert node.slurm.record == Record("")


def test_a_node_that_another_resumes_while_its_jobs_are_waited_for(
    node: MachineDouble, monkeypatch: pytest.MonkeyPatch
):
    node.slurm.jobs = ["7"]
    monkeypatch.setattr(maintenance_reset.time, "sleep", lambda _: nodes.resume(NAME))
    with pytest.raises(
        ActionError, match=r"another changed the state of slurmd-0 .*, so nothing was done"
    ):
        reset()
    assert (node.smi.log, node.slurm.jobs, node.slurm.ended) == ([], ["7"], [])
    assert kept.maintenance() is None


def test_xids_from_before_are_done_with(node: MachineDouble):
    gpu_health.State(since=1.0, drained=True, reason="gpu-health: Xid 119").save()
    reset()
    state = gpu_health.State.load()
    assert list(state.resets) == [BUS]
    assert state.resets[BUS] > state.since == 1.0
    health_timer.note_reset([BUS, "0000:9d:00.0"])
    assert sorted(gpu_health.State.load().resets) == [BUS, "0000:9d:00.0"]


def test_a_service_that_does_not_stop(node: MachineDouble, monkeypatch: pytest.MonkeyPatch):
    def stuck(name: str, **_: object) -> None:
        raise CommandTimeout(f"systemctl: no answer within 120 s ({name})")

    monkeypatch.setattr(systemd, "stop", stuck)
    with pytest.raises(
        driver_state.DriverError, match=r"gpu-health\.timer does not stop: .*; see journalctl -u"
    ):
        reset()
    assert node.smi.log == []
