"""Cards shared by option: lines, registration, Slurm's prerequisites, and contradictions."""

import pytest
import roles
from conftest import OPTIONS
from slurm_double import SlurmDouble

import settings
from gpu import detect as gpu_detect
from gpu import gres
from node import slurmd_options
from slurm_ddp.charm import Level, Status
from slurm_ddp.interfaces.slurm_gres import NodeGres

CARDS = gpu_detect.Detection(
    "proc",
    (gpu_detect.Gpu("Mock GPU", "0000:01:00.0", 0), gpu_detect.Gpu("Mock GPU", "0000:02:00.0", 1)),
)


def test_a_line_for_the_shares_of_each_card():
    plan = gres.plan(CARDS, {}, None, shards=4)
    assert plan.gres == "gpu:mock_gpu:2,shard:8"
    assert plan.lines[2:] == (
        "Name=shard Count=4 File=/dev/nvidia0",
        "Name=shard Count=4 File=/dev/nvidia1",
    )
    assert not plan.is_detected, "Slurm's own detection finds the cards, and no shares"
    NodeGres(node="n0", gres=plan.gres, lines=plan.lines)  # which the controller takes


def test_shares_of_mig_instances_are_refused():
    card = gpu_detect.Gpu(
        "A", "0000:01:00.0", 0, mig=True, instances=(gpu_detect.Instance("1g.5gb", (1, 2)),)
    )
    with pytest.raises(
        gres.GresError,
        match=r"^no shards are available: GPU 0000:01:00.0 is cut into MIG instances",
    ):
        gres.plan(gpu_detect.Detection("nvml", (card,)), {}, None, shards=4)


@pytest.mark.parametrize(
    ("types", "shards", "text"),
    [
        (
            "gpu",
            4,
            "shards-per-gpu: set GresTypes=gpu,shard in slurm.conf (docs/howto/gpus.md): it has no shard",
        ),
        ("", 0, "set GresTypes=gpu in slurm.conf (docs/howto/gpus.md): it has no gpu"),
    ],
)
def test_nothing_is_touched_before_slurm_knows_the_name(
    registered: SlurmDouble, types: str, shards: int, text: str
):
    registered.types = types
    verdict = roles.hook(config=settings.Config(shards_per_gpu=shards))
    assert verdict == Status(Level.BLOCKED, text)
    assert slurmd_options.PATH.read_text() == OPTIONS
    assert registered.log == []
