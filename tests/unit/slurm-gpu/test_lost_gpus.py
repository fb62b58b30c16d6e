"""A node that loses a card: jobs are kept away, nothing is registered anew, and it comes back by itself."""

import pathlib
import shutil

import ops
import pytest
from conftest import OPTIONS
from machines import Card, add_driver
from ops import testing
from slurm_double import SlurmDouble

import charm
import compute_seat
import gpu_detect
import slurmd_options
from compute_seat import Level, Verdict
from gpu_detect import NvmlAnswer
from slurm_ddp.interfaces.slurm_gres import ControllerGres

ROOT = pathlib.Path(charm.__file__).resolve().parents[1]
CARDS = [Card("NVIDIA H200", "0000:1b:00.0"), Card("NVIDIA H200", "0000:9d:00.0")]
LOSS = "1 of 2 GPUs found, 0000:9d:00.0 missing"
STATUS = Verdict(Level.BLOCKED, f"{LOSS}: bring back what is missing, or run accept-gpus")
DRAIN = f"/usr/bin/scontrol update nodename=slurmd-0 state=drain 'reason=slurm-gpu: {LOSS}'"
RESUME = "/usr/bin/scontrol update nodename=slurmd-0 state=resume"
UPSTREAM = ControllerGres(autodetect="nvidia")


def hook() -> Verdict:
    machine = compute_seat.look()
    progress = compute_seat.ensure(machine, UPSTREAM, owner="slurm-gpu/0")
    return compute_seat.verdict(machine, UPSTREAM, related=True, progress=progress)


def lose(paths: pathlib.Path, *cards: int) -> None:
    for i in cards:
        shutil.rmtree(paths / "proc/driver/nvidia/gpus" / CARDS[i].bus_id)


def bring_back(paths: pathlib.Path) -> None:
    shutil.rmtree(paths / "proc/driver/nvidia/gpus")
    add_driver(paths, CARDS)


@pytest.fixture
def node(slurm: SlurmDouble, paths: pathlib.Path) -> SlurmDouble:
    """A node in service with two cards."""
    slurm.version = "slurm-wlm 25.11.2"
    slurm.devices = 2
    add_driver(paths, CARDS)
    for minor in range(2):
        (paths / f"dev/nvidia{minor}").touch()
    slurmd_options.PATH.write_text(OPTIONS)
    slurm.register()
    hook()
    assert slurm.record is not None
    assert (slurm.record.gres, slurm.state()) == ("gpu:nvidia_h200:2", "IDLE+DYNAMIC_NORM")
    slurm.log.clear()
    return slurm


def test_a_lost_card_drains_the_node_and_its_return_resumes_it(node: SlurmDouble, paths: pathlib.Path):
    node.jobs = ["7"]
    before = slurmd_options.PATH.read_text()
    lose(paths, 1)
    assert hook() == STATUS
    assert node.log == [DRAIN]
    assert hook() == STATUS  # said once
    assert node.log == [DRAIN]
    assert compute_seat.offer(compute_seat.look(), UPSTREAM) is None  # its lines stay
    assert slurmd_options.PATH.read_text() == before
    assert (node.jobs, node.ended) == (["7"], [])
    bring_back(paths)
    assert hook().level == Level.ACTIVE
    assert node.log == [DRAIN, RESUME]
    assert (node.jobs, node.ended, node.state()) == (["7"], [], "MIXED+DYNAMIC_NORM")


def test_all_cards_lost(node: SlurmDouble, paths: pathlib.Path):
    lose(paths, 0, 1)
    loss = "0 of 2 GPUs found, 0000:1b:00.0, 0000:9d:00.0 missing"
    assert hook().text.startswith(loss)
    assert node.log == [f"/usr/bin/scontrol update nodename=slurmd-0 state=drain 'reason=slurm-gpu: {loss}'"]


def test_a_driver_that_broke(node: SlurmDouble, monkeypatch: pytest.MonkeyPatch):
    broken = NvmlAnswer(error="Driver/library version mismatch", broken=True)
    monkeypatch.setattr(gpu_detect, "run_probe", lambda: broken)
    loss = "NVML: Driver/library version mismatch; reboot this machine"
    assert hook() == Verdict(Level.BLOCKED, loss)
    assert node.log == [f"/usr/bin/scontrol update nodename=slurmd-0 state=drain 'reason=slurm-gpu: {loss}'"]
    monkeypatch.setattr(gpu_detect, "run_probe", lambda: NvmlAnswer(error="NVML Shared Library Not Found"))
    assert hook().level == Level.ACTIVE
    assert node.log[1:] == [RESUME]


@pytest.mark.parametrize("flags", [{"DRAIN"}, {"FAIL"}])
def test_what_an_administrator_set_stays(node: SlurmDouble, paths: pathlib.Path, flags: set[str]):
    assert node.record is not None
    node.record.flags |= flags
    node.record.reason = "replaced by ops"
    lose(paths, 1)
    assert hook() == STATUS
    bring_back(paths)
    hook()
    assert node.log == []
    assert node.record.reason == "replaced by ops"


def test_a_controller_that_is_silent_is_told_later(node: SlurmDouble, paths: pathlib.Path):
    lose(paths, 1)
    node.answering = False
    assert hook() == STATUS
    node.answering = True
    assert hook() == STATUS
    assert node.log == [DRAIN]


def test_a_card_that_moved_or_was_added_is_not_lost(node: SlurmDouble, paths: pathlib.Path):
    shutil.rmtree(paths / "proc/driver/nvidia/gpus")
    add_driver(paths, [CARDS[0], Card("NVIDIA H200", "0000:c1:00.0")])
    assert hook().level == Level.ACTIVE
    assert node.log == []
    shutil.rmtree(paths / "proc/driver/nvidia/gpus")
    node.devices = 3
    (paths / "dev/nvidia2").touch()
    add_driver(paths, [CARDS[0], Card("NVIDIA H200", "0000:c1:00.0"), Card("NVIDIA H200", "0000:c2:00.0")])
    assert hook().level == Level.ACTIVE
    assert node.record is not None
    assert node.record.gres == "gpu:nvidia_h200:3"


def run_accept() -> None:
    relation = testing.SubordinateRelation("compute", interface="juju-info", remote_app_name="slurmd")
    ctx = testing.Context(charm.SlurmGpuCharm, charm_root=ROOT)
    out = ctx.run(ctx.on.action("accept-gpus"), testing.State(relations=[relation]))
    assert isinstance(out.unit_status, ops.ActiveStatus)


def test_a_card_taken_out_for_good_is_accepted(node: SlurmDouble, paths: pathlib.Path):
    lose(paths, 1)
    assert hook() == STATUS
    run_accept()
    assert node.record is not None
    assert (node.record.gres, node.state()) == ("gpu:nvidia_h200:1", "IDLE+DYNAMIC_NORM")
    assert hook().level == Level.ACTIVE


def test_accepting_nothing_is_refused(node: SlurmDouble, paths: pathlib.Path):
    lose(paths, 0, 1)
    with pytest.raises(testing.ActionFailed) as caught:
        run_accept()
    assert caught.value.message == "no NVIDIA GPU on this machine"
    assert compute_seat.CARDS.exists()


@pytest.mark.parametrize("text", ["", "null", "{}", "["])
def test_a_damaged_memory_is_no_loss(node: SlurmDouble, paths: pathlib.Path, text: str):
    compute_seat.CARDS.write_text(text)
    assert compute_seat.lost(compute_seat.look()) is None


def test_a_charm_that_goes_forgets_the_cards(node: SlurmDouble):
    assert compute_seat.CARDS.exists()
    compute_seat.release(owner="slurm-gpu/0")
    assert not compute_seat.CARDS.exists()
