"""A node that loses a card gets no jobs and no new registration, and recovers by itself."""

import pathlib
import shutil

import ops
import pytest
from conftest import COMPUTE
from machines import H200S, Card, add_driver, bring_back, lose
from ops import testing
from roles import GRES, drained, hook, offer
from slurm_double import SHORT_OF_GPUS, Record, SlurmDouble

import charm
from gpu import detect as gpu_detect
from gpu.detect import NvmlAnswer
from node import journals, kept, registration, slurmd_options
from node.registration import Progress, Stage
from slurm_ddp.charm import Level, Status
from slurm_ddp.interfaces.slurm_gres import NodeGres

LOSS = "1 of 2 GPUs found, 0000:9d:00.0 missing"
STATUS = Status(Level.BLOCKED, f"bring back what is missing, or run accept-gpus: {LOSS}")
DRAIN = f"/usr/bin/scontrol update nodename=slurmd-0 state=drain 'reason=slurm-gpu: {LOSS}'"
RESUME = "/usr/bin/scontrol update nodename=slurmd-0 state=resume"


def orders(two_cards: SlurmDouble) -> list[str]:
    """Record the commands about the node; slurmd's drop-in, which names its cards, follows them."""
    return [
        order for order in two_cards.log if order != "daemon-reload" and "reservation" not in order
    ]


def test_a_lost_card_drains_the_node_and_its_return_resumes_it(
    two_cards: SlurmDouble, paths: pathlib.Path
):
    two_cards.jobs = ["7"]
    before = slurmd_options.PATH.read_text()
    lose(paths, 1)
    assert hook() == STATUS
    assert orders(two_cards) == [DRAIN]
    assert hook() == STATUS  # reported once
    assert orders(two_cards) == [DRAIN]
    assert offer() == NodeGres(node="slurmd-0", gres="gpu:nvidia_h200:1", lines=(), awaits=False)
    assert slurmd_options.PATH.read_text() == before
    assert (two_cards.jobs, two_cards.ended) == (["7"], [])
    bring_back(paths)
    assert hook().level == Level.ACTIVE
    assert orders(two_cards) == [DRAIN, RESUME]
    assert (two_cards.jobs, two_cards.ended, two_cards.state()) == (["7"], [], "MIXED+DYNAMIC_NORM")


def test_a_driver_that_broke(two_cards: SlurmDouble, monkeypatch: pytest.MonkeyPatch):
    broken = NvmlAnswer(error="Driver/library version mismatch", broken=True)
    monkeypatch.setattr(gpu_detect, "run_probe", lambda: broken)
    loss = "NVML: Driver/library version mismatch; reboot this machine"
    assert hook() == Status(Level.BLOCKED, loss)
    assert orders(two_cards) == [
        f"/usr/bin/scontrol update nodename=slurmd-0 state=drain 'reason=slurm-gpu: {loss}'"
    ]
    monkeypatch.setattr(
        gpu_detect, "run_probe", lambda: NvmlAnswer(error="NVML Shared Library Not Found")
    )
    assert hook().level == Level.ACTIVE
    assert orders(two_cards)[1:] == [RESUME]


def test_a_card_that_moved_or_was_added_is_not_lost(two_cards: SlurmDouble, paths: pathlib.Path):
    shutil.rmtree(paths / "proc/driver/nvidia/gpus")
    add_driver(paths, [H200S[0], Card("NVIDIA H200", "0000:c1:00.0")])
    assert hook().level == Level.ACTIVE
    assert orders(two_cards) == []
    shutil.rmtree(paths / "proc/driver/nvidia/gpus")
    two_cards.devices = 3
    (paths / "dev/nvidia2").touch()
    add_driver(
        paths, [H200S[0], Card("NVIDIA H200", "0000:c1:00.0"), Card("NVIDIA H200", "0000:c2:00.0")]
    )
    assert hook().level == Level.ACTIVE
    assert two_cards.record is not None
    assert two_cards.record.gres == "gpu:nvidia_h200:3"


def accept(ctx: testing.Context[charm.SlurmGpuCharm]) -> object:
    return ctx.run(ctx.on.action("accept-gpus"), testing.State(relations=[COMPUTE])).unit_status


def test_a_card_taken_out_for_good_is_accepted(
    ctx: testing.Context[charm.SlurmGpuCharm], two_cards: SlurmDouble, paths: pathlib.Path
):
    lose(paths, 1)
    assert hook() == STATUS
    assert isinstance(accept(ctx), ops.ActiveStatus)
    assert two_cards.record is not None
    assert (two_cards.record.gres, two_cards.state()) == ("gpu:nvidia_h200:1", "IDLE+DYNAMIC_NORM")
    assert hook().level == Level.ACTIVE


def test_accept_gpus_without_gpus_is_refused(
    ctx: testing.Context[charm.SlurmGpuCharm], two_cards: SlurmDouble, paths: pathlib.Path
):
    lose(paths, 0, 1)
    with pytest.raises(testing.ActionFailed, match=r"^no NVIDIA GPU on this machine$"):
        accept(ctx)
    assert (journals.STATE_DIR / journals.CARDS).exists()


def test_a_loss_drains_a_node_in_service_once(slurm: SlurmDouble):
    """Even if it still shows an old reason after its resume, as with 25.11."""
    slurm.record = Record(GRES, reason="bad fan")
    for _ in range(2):
        assert registration.drain_for_loss("slurmd-0", LOSS) == Progress(Stage.LOST, LOSS)
    assert slurm.record.reason == f"slurm-gpu: {LOSS}"
    assert "DRAIN" in slurm.record.flags
    assert [order for order in slurm.log if "state=drain" in order] == slurm.log[:1]
    assert [one.reason for one in kept.grounds()] == [slurm.record.reason]


@pytest.mark.parametrize("state", ["drain", "fail", "down"])
def test_a_loss_leaves_what_an_administrator_ordered(slurm: SlurmDouble, state: str):
    slurm.record = Record(GRES)
    slurm.run(
        "/usr/bin/scontrol", "update", "nodename=slurmd-0", f"state={state}", "reason=bad fan"
    )
    slurm.log.clear()
    assert registration.drain_for_loss("slurmd-0", LOSS).stage is Stage.LOST
    assert (slurm.record.reason, slurm.log, kept.grounds()) == ("bad fan", [], ())


def test_a_loss_leaves_an_order_behind_slurms_own_reason(slurm: SlurmDouble):
    """Slurm's reason replaced the administrator's, which is in the journal.

    Other nodes' orders do not count.
    """
    slurm.record = drained("bad fan")
    registration.drain_for_loss("slurmd-0", LOSS)
    slurm.record.reason = SHORT_OF_GPUS.format(found=1, wanted=2)
    registration.drain_for_loss("slurmd-0", LOSS)
    assert slurm.log == []
    journals.NodeSnapshot("slurmd-1", ("drain",), "bad fan").save(journals.ORDER)
    registration.drain_for_loss("slurmd-0", LOSS)
    assert slurm.record.reason == f"slurm-gpu: {LOSS}"


def test_a_loss_on_a_node_that_slurm_does_not_know(slurm: SlurmDouble):
    assert registration.drain_for_loss("slurmd-0", LOSS) == Progress(Stage.LOST, LOSS)
    assert slurm.log == []
