"""A node that loses a card: jobs are kept away, nothing is registered anew, and it comes back by itself."""

import pathlib
import shutil

import ops
import pytest
from conftest import OPTIONS, ROOT
from machines import Card, add_driver
from ops import testing
from roles import hook, offer
from slurm_double import SlurmDouble

import charm
from gpu import detect as gpu_detect
from gpu.detect import NvmlAnswer
from node import node_state, slurmd_options
from slurm_ddp.charm import Level, Status
from slurm_ddp.interfaces.slurm_gres import NodeGres

CARDS = [Card("NVIDIA H200", "0000:1b:00.0"), Card("NVIDIA H200", "0000:9d:00.0")]
LOSS = "1 of 2 GPUs found, 0000:9d:00.0 missing"
STATUS = Status(Level.BLOCKED, f"{LOSS}: bring back what is missing, or run accept-gpus")
DRAIN = f"/usr/bin/scontrol update nodename=slurmd-0 state=drain 'reason=slurm-gpu: {LOSS}'"
RESUME = "/usr/bin/scontrol update nodename=slurmd-0 state=resume"


def lose(paths: pathlib.Path, *cards: int) -> None:
    for i in cards:
        shutil.rmtree(paths / "proc/driver/nvidia/gpus" / CARDS[i].bus_id)


def orders(node: SlurmDouble) -> list[str]:
    """Record the commands about the node; slurmd's drop-in, which names the cards that it waits for, follows them."""
    return [order for order in node.log if order != "daemon-reload" and "reservation" not in order]


def bring_back(paths: pathlib.Path) -> None:
    shutil.rmtree(paths / "proc/driver/nvidia/gpus")
    add_driver(paths, CARDS)


@pytest.fixture
def node(slurm: SlurmDouble, paths: pathlib.Path) -> SlurmDouble:
    """A node in service with two cards."""
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
    assert orders(node) == [DRAIN]
    assert hook() == STATUS  # reported once
    assert orders(node) == [DRAIN]
    assert offer() == NodeGres(node="slurmd-0", gres="gpu:nvidia_h200:1", lines=(), awaits=False)
    assert slurmd_options.PATH.read_text() == before
    assert (node.jobs, node.ended) == (["7"], [])
    bring_back(paths)
    assert hook().level == Level.ACTIVE
    assert orders(node) == [DRAIN, RESUME]
    assert (node.jobs, node.ended, node.state()) == (["7"], [], "MIXED+DYNAMIC_NORM")


def test_a_driver_that_broke(node: SlurmDouble, monkeypatch: pytest.MonkeyPatch):
    broken = NvmlAnswer(error="Driver/library version mismatch", broken=True)
    monkeypatch.setattr(gpu_detect, "run_probe", lambda: broken)
    loss = "NVML: Driver/library version mismatch; reboot this machine"
    assert hook() == Status(Level.BLOCKED, loss)
    assert orders(node) == [f"/usr/bin/scontrol update nodename=slurmd-0 state=drain 'reason=slurm-gpu: {loss}'"]
    monkeypatch.setattr(gpu_detect, "run_probe", lambda: NvmlAnswer(error="NVML Shared Library Not Found"))
    assert hook().level == Level.ACTIVE
    assert orders(node)[1:] == [RESUME]


def test_a_card_that_moved_or_was_added_is_not_lost(node: SlurmDouble, paths: pathlib.Path):
    shutil.rmtree(paths / "proc/driver/nvidia/gpus")
    add_driver(paths, [CARDS[0], Card("NVIDIA H200", "0000:c1:00.0")])
    assert hook().level == Level.ACTIVE
    assert orders(node) == []
    shutil.rmtree(paths / "proc/driver/nvidia/gpus")
    node.devices = 3
    (paths / "dev/nvidia2").touch()
    add_driver(paths, [CARDS[0], Card("NVIDIA H200", "0000:c1:00.0"), Card("NVIDIA H200", "0000:c2:00.0")])
    assert hook().level == Level.ACTIVE
    assert node.record is not None
    assert node.record.gres == "gpu:nvidia_h200:3"


def run_event(name: str) -> object:
    relation = testing.SubordinateRelation("compute", interface="juju-info", remote_app_name="slurmd")
    ctx = testing.Context(charm.SlurmGpuCharm, charm_root=ROOT)
    event = ctx.on.action(name) if "-" in name else getattr(ctx.on, name)()
    return ctx.run(event, testing.State(relations=[relation])).unit_status


def run_accept() -> None:
    assert isinstance(run_event("accept-gpus"), ops.ActiveStatus)


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
    assert (node_state.STATE_DIR / node_state.CARDS).exists()
