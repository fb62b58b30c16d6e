"""One process on each node under torchrun's agent: they meet, and may run torchrun themselves."""

import os
import pathlib
import socket
import subprocess
import sys
import typing

import pytest

from ddp.node import rank_command, spec, torchrun

MEET = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("MET", total.item(), os.environ["NODE_RANK"], os.environ["WORLD_SIZE"], flush=True)
dist.destroy_process_group()
"""
RUN = """\
exec python -m torch.distributed.run --nnodes $NNODES --node-rank $NODE_RANK \\
  --nproc-per-node $NPROC_PER_NODE --master-addr $MASTER_ADDR --master-port $MASTER_PORT meet.py
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def job(folder: pathlib.Path, **more: typing.Any) -> spec.JobSpec:
    """Return a job of two nodes that starts one process on each."""
    about = {
        "run": "first",
        "job_dir": str(folder),
        "workspace": str(folder),
        "cache": str(folder),
        "command": [],
        "resume": "auto",
        "leaves_outcome": False,
        "ranks_per_node": 1,
        "gpus_per_node": 0,
        "variables": [],
        "fabric": "auto",
        "fabrics": [],
        "environment": None,
        "container": None,
        "max_requeues": 0,
        "max_restarts": 0,
        "nodelist": [],
        "exclude": [],
        "reservation": "",
        "is_sweep": False,
        "token_path": "",
        "metrics": [],
        "workdir": str(folder),
        "launcher": "node",
    }
    return spec.build(spec.JobSpec, about | more)


@pytest.mark.parametrize(
    ("words", "is_command", "per_node"),
    [
        (["meet.py"], False, 1),
        pytest.param(["bash", "run.sh"], True, 2, marks=pytest.mark.long),
    ],
    ids=["script", "torchrun-in-a-shell"],
)
def test_the_processes_of_two_nodes_meet(
    tmp_path: pathlib.Path, words: list[str], *, is_command: bool, per_node: int
):
    (tmp_path / "meet.py").write_text(MEET)
    (tmp_path / "run.sh").write_text(RUN)
    about = job(tmp_path, is_command=is_command)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    shared = {
        "HEAD_IP": "127.0.0.1",
        "HEAD_PORT": str(free_port()),
        "PROGRAM_PORT": str(free_port()),
        "MY_IP": "127.0.0.1",
        "RUN_ATTEMPT_ID": "1.r0",
        "SLURM_STEP_NUM_NODES": "2",
        "NNODES": "2",
        "NPROC_PER_NODE": str(per_node),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": path,
    }
    agents: list[subprocess.Popen[str]] = []
    for number in ("0", "1"):
        env = {**shared, "SLURM_NODEID": number, "NODE_RANK": number}
        logs = str(tmp_path / f"node-{number}")
        argv = torchrun.command(sys.executable, about, env, logs, pipe=None, has_instances=False)
        argv += rank_command.of(about, sys.executable, words, env)
        agents.append(
            subprocess.Popen(
                argv,
                env=env,
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    printed = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], printed
    world = 2 * per_node
    total = world * (world + 1) / 2
    for number, text in enumerate(printed):
        assert text.count(f"MET {total} {number} {world}") == per_node
