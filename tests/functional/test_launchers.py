"""Launchers of other programs on two nodes: one process a node, and the settings of accelerate."""

import re
import typing

import pytest

from functional.conftest import REPOSITORY, Cluster, eventually
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


@pytest.mark.long
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


SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --mem=1G --time=30
#SBATCH --output=job.out
source {folder}/bin/activate || exit
srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 1 \\
    --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID \\
    --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT meet.py
"""


def test_a_job_script_of_one_s_own_trains_by_plain_sbatch(someone: Person):
    place = f"{someone.folder}/plain"
    bring(someone, {"meet.py": OWN["meet.py"].replace(" NODE_RANK NNODES", "")}, place)
    folder = someone.does("ddp env path")
    someone.writes(f"{place}/job.sbatch", SCRIPT.format(folder=folder))
    job = someone.does(f"cd {place} && sbatch --parsable --hold job.sbatch")
    (listed,) = someone.json("ddp list --json")["jobs"]
    assert (listed["name"], listed["state"]) == ("job.sbatch", "PENDING")
    assert re.search(r"^job.sbatch +job +PENDING +2 ", someone.does("ddp list"), re.MULTILINE)

    someone.does(f"scontrol release {job}")

    def is_over() -> None:
        assert someone.does("squeue --me --noheader") == ""

    eventually(is_over)
    log = someone.does(f"cat {place}/job.out")
    assert sorted(re.findall("MET .*", log)) == ["MET 3.0 0 2 0", "MET 3.0 1 2 0"], log


def test_names_of_nodes_resolve_after_the_page_s_line(cluster: Cluster):
    page = (REPOSITORY / "docs/howto/submit.md").read_text()
    found = re.search(r'sh -c "(scontrol -o show node.*?)"\n```', page, re.DOTALL)
    assert found is not None
    hosts = ("slurmd/0", "slurmd/1", "sackd/0")
    shown = cluster.on("sackd/0", "scontrol", "-o", "show", "node", "slurmd-1")
    address = shown.partition("NodeAddr=")[2].split()[0]
    for host in hosts:
        cluster.on(host, "cp", "/etc/hosts", "/etc/hosts.before")
    try:
        for host in (*hosts, *hosts):
            cluster.on(host, "sh", "-c", found[1])
        for host in hosts:
            assert cluster.on(host, "getent", "hosts", "slurmd-1").split()[:2] == [
                address,
                "slurmd-1",
            ]
            assert cluster.on(host, "grep", "-cw", "slurmd-1", "/etc/hosts") == "1"
    finally:
        for host in hosts:
            cluster.on(host, "sh", "-c", "cat /etc/hosts.before >/etc/hosts")
