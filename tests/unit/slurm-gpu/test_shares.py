"""Cards that are shared, by option: lines, registration, what Slurm must know first, and what contradicts."""

import pathlib
import typing

import pytest
import roles
from conftest import OPTIONS, WITH_GPU
from slurm_double import SlurmDouble

import settings
from gpu import detect as gpu_detect
from gpu import gres, gres_conf
from node import machine as machines
from node import slurmd_options
from slurm_ddp.charm import Level, Status
from slurm_ddp.interfaces.slurm_gres import ControllerGres, NodeGres
from slurm_ddp.slurm import advice as slurm_advice
from slurm_ddp.slurm import nodes

CARDS = gpu_detect.Detection(
    "proc", (gpu_detect.Gpu("Mock GPU", "0000:01:00.0", 0), gpu_detect.Gpu("Mock GPU", "0000:02:00.0", 1))
)
SHARDED = "gpu:mock_gpu:1,shard:4"


@pytest.fixture
def node(slurm: SlurmDouble, mock_gpu: pathlib.Path) -> SlurmDouble:
    slurmd_options.PATH.write_text(OPTIONS)
    slurm.types = "gpu,shard"
    slurm.register()
    return slurm


def hook(answer: ControllerGres | None, **options: typing.Any) -> Status:
    return roles.hook(answer, settings.Config(**options))


def live(**options: typing.Any) -> ControllerGres:
    return roles.live(roles.UPSTREAM, settings.Config(**options))


def test_a_line_for_the_shares_of_each_card():
    plan = gres.plan(CARDS, {}, None, shards=4)
    assert plan.gres == "gpu:mock_gpu:2,shard:8"
    assert plan.lines[2:] == ("Name=shard Count=4 File=/dev/nvidia0", "Name=shard Count=4 File=/dev/nvidia1")
    assert plan.beside == ("Name=shard Count=8",), "Slurm's own detection finds the cards, and no shares"
    NodeGres(node="n0", gres=plan.gres, lines=plan.lines)  # which the controller takes


def test_the_controller_counts_cards_and_not_their_shares(paths: pathlib.Path):
    from controller import gres_lines

    plan = gres.plan(CARDS, {}, None, shards=4)
    entry = gres_conf.Entry.of("slurm-gpu/0", NodeGres(node="n0", gres=plan.gres, lines=plan.lines))
    assert gres_lines.counts(gres_conf.GresConf("", "", {"slurm-gpu/0": entry})) == (1, 2)


def test_mig_instances_have_no_shares():
    card = gpu_detect.Gpu("A", "0000:01:00.0", 0, mig=True, instances=(gpu_detect.Instance("1g.5gb", (1, 2)),))
    with pytest.raises(gres.GresError, match=r"^no shards are available: GPU 0000:01:00.0 is cut into MIG instances"):
        gres.plan(gpu_detect.Detection("nvml", (card,)), {}, None, shards=4)


def test_a_node_registers_its_shares_and_loses_them_with_the_option(node: SlurmDouble):
    assert hook(live(shards_per_gpu=4), shards_per_gpu=4).level == Level.ACTIVE
    assert node.record is not None
    assert node.record.gres == SHARDED
    node.record.gres = "gpu:mock_gpu:1,shard:mock_gpu:4"  # as the controller prints it
    node.log.clear()
    assert hook(live(shards_per_gpu=4), shards_per_gpu=4).level == Level.ACTIVE
    assert node.log == []
    assert hook(live()).level == Level.ACTIVE
    assert node.record.gres == "gpu:mock_gpu:1"
    assert slurmd_options.PATH.read_text() == WITH_GPU
    assert hook(live()).level == Level.ACTIVE
    assert not machines.SHARED.exists()


def test_shares_that_an_administrator_configured_stay(node: SlurmDouble):
    slurmd_options.PATH.write_text(WITH_GPU.replace("gres=gpu:mock_gpu:1", "gres=shard:2"))
    assert hook(live()).level == Level.ACTIVE
    assert node.record is not None
    assert node.record.gres == "gpu:mock_gpu:1,shard:2"


def test_nothing_is_touched_before_slurm_knows_the_name(node: SlurmDouble):
    node.types = "gpu"
    assert hook(live(), shards_per_gpu=4) == Status(
        Level.BLOCKED,
        "shards-per-gpu: slurm.conf has no shard among its GresTypes: "
        + slurm_advice.slurm_conf({"GresTypes": "gpu,shard"}),
    )
    answer = live()
    node.types = ""
    assert hook(answer) == Status(
        Level.BLOCKED,
        "slurm.conf has no gpu among its GresTypes: " + slurm_advice.slurm_conf({"GresTypes": "gpu"}),
    )
    assert slurmd_options.PATH.read_text() == OPTIONS
    assert node.log == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shards_per_gpu": -1}, "shards-per-gpu: -1 is not between 0 and 1024"),
        ({"health_check": "yes"}, "health-check: 'yes' is none of auto, on, off"),
        (
            {"gpu_type_alias": "x"},
            "gpu-type-alias: 'x' is not of the form TYPE=ALIAS, such as nvidia_h100_80gb_hbm3=h100",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(node: SlurmDouble, options: dict[str, typing.Any], text: str):
    assert hook(live(), **options) == Status(Level.BLOCKED, text)
    assert slurmd_options.PATH.read_text() == OPTIONS
    assert node.log == []


def test_a_bad_option_is_reported_on_a_machine_without_gpus_too(slurm: SlurmDouble):
    assert hook(None, shards_per_gpu=-4).level == Level.BLOCKED


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("gpu:a:2,shard:8", "gpu:a:2(S:0),shard:a:8(S:0)", True),
        ("gpu:a:2,shard:8", "gpu:a:2,shard:a:4", False),
        ("gpu:a:2,mps:200", "gpu:a:2,mps:a:100,mps:a:100", True),
        ("gpu:a:2", "gpu:a:2,shard:a:4", False),
    ],
)
def test_what_the_controller_makes_of_shares(left: str, right: str, same: bool):
    assert nodes.same_gres(left, right) is same
