"""Launchers of other programs on two nodes: one process a node, and the settings of accelerate."""

import typing

import pytest

from functional.conftest import Cluster
from functional.test_people import Person, person
from functional.test_projects import bring, log_of

pytestmark = [pytest.mark.trains, pytest.mark.timeout(1500)]
OWN = {
    "meet.py": """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
names = "RANK WORLD_SIZE LOCAL_RANK NODE_RANK NNODES".split()
print("MET", total.item(), *(os.environ[name] for name in names), flush=True)
dist.destroy_process_group()
""",
    "run.sh": """\
torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE" \\
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" meet.py
""",
}
ACCELERATED = {
    "requirements.txt": "accelerate\n",
    "fsdp.yaml": """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
""",
    "train.py": """
import os
from accelerate import Accelerator
accelerator = Accelerator()
names = "ACCELERATE_USE_FSDP FSDP_VERSION ACCELERATE_MIXED_PRECISION".split()
print("SET", accelerator.num_processes, *(os.environ[name] for name in names), flush=True)
accelerator.wait_for_everyone()
""",
}


@pytest.fixture(scope="module")
def someone(cluster: Cluster) -> typing.Iterator[Person]:
    cluster.action("install-environment", timeout=1500)
    with person(cluster, "lena", "2011") as one:
        yield one


def test_one_process_a_node_meets_the_others_and_may_start_ranks_of_its_own(someone: Person):
    bring(someone, OWN, "own")
    log = log_of(someone, "own", "--launcher node meet.py")
    for node in (0, 1):
        assert f"MET 3.0 {node} 2 0 {node} 2" in log
    assert log_of(someone, "own", "--launcher node bash run.sh").count("MET 3.0 ") == 2
    assert log_of(someone, "own", "--launcher node run.sh").count("MET 3.0 ") == 2


@pytest.mark.long
def test_a_command_of_the_environment_starts_by_its_name(someone: Person):
    bring(someone, OWN, "own")
    assert log_of(someone, "own", "torchrun --no-python python3 meet.py").count("MET 3.0 ") == 2


@pytest.mark.long
def test_the_settings_of_accelerate_launch_reach_the_ranks(someone: Person):
    bring(someone, ACCELERATED, "accelerated")
    line = "-r requirements.txt accelerate launch --config_file fsdp.yaml train.py"
    log = log_of(someone, "accelerated", line)
    assert log.count("SET 2 true 2 bf16") == 2
