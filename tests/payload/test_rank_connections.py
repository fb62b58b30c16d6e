"""Whether a program's ranks connect, seen from their node: real torchrun, its store and gloo."""

import os
import pathlib
import subprocess
import sys
import time

import pytest
import ranks

from ddp.node import processes, rank_connections, torchrun

MEET = "dist.init_process_group('gloo')"
OWN = """
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", {port}, 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""
SCRIPT = """\
import os, sys, time
{imports}
def until(path):
    deadline = time.monotonic() + 100
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.05)
open(sys.argv[1] + os.environ["RANK"], "w").close()
{before}
import torch.distributed as dist
{connect}
{after}
"""


class Job:
    """One agent with two ranks, started as a job's first node starts it."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        imports: str = "",
        before: str = "",
        connect: str = "",
        after: str = "",
    ):
        self.script, self.remark = folder / "train.py", folder / "9.r0.remark"
        connect = connect.format(port=ranks.free_port())
        self.script.write_text(
            SCRIPT.format(imports=imports, before=before, connect=connect, after=after)
        )
        port = self.port = ranks.free_port()
        self.watch = rank_connections.Watch(str(self.remark), 1, 2, [str(self.script)], port)
        place = ["--nnodes=1", "--nproc-per-node=2", "--node-rank=0", "--rdzv-backend=static"]
        place += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        argv = [
            sys.executable,
            "-c",
            torchrun.agent(self.watch.pipe),
            *place,
            str(self.script),
            f"{folder}/started.",
        ]
        pipe = (self.watch.pipe,)
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in ("PATH", "HOME", "OMP_NUM_THREADS")
        }
        self.agent = subprocess.Popen(
            argv, cwd=folder, pass_fds=pipe, env={**kept, "TORCH_GLOO_LAZY_INIT": "1"}
        )
        self.watch.start(self.agent.pid)

    def end(self) -> str:
        """Wait for the agent, and return the remark that is left."""
        try:
            code = self.agent.wait(180)
        finally:
            self.agent.kill()
        self.watch.close(is_done=code == 0)
        assert code == 0
        return self.remark.read_text() if self.remark.exists() else ""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_connections, "PATIENCE_S", 1.0)


def test_ranks_that_meet_get_no_remark(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]):
    job = Job(tmp_path, connect=MEET, after="dist.destroy_process_group()")
    assert job.end() == ""
    assert "[ENV]" not in capfd.readouterr().out


@pytest.mark.usefixtures("impatient")
def test_ranks_that_never_meet_are_named_at_once_and_at_the_end(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
):
    seen = f"until({str(tmp_path / '9.r0.remark')!r})"
    job = Job(tmp_path, imports="if 0:\n    import lightning", after=seen)
    after = job.end()
    remedy = (
        "unless the program connects them itself; in Trainer(...) or Fabric(...) give num_nodes=1, "
    )
    assert after == f"the 2 ranks never connected: each trained alone, {remedy}devices=2\n"
    lines = [line for line in capfd.readouterr().out.splitlines() if "[ENV]" in line]
    assert lines == [
        f"[ENV] the 2 ranks have not connected after 1 s: each trains alone, {remedy}devices=2",
        f"[ENV] {after.strip()}",
    ]


@pytest.mark.long
def test_a_rendezvous_of_the_program_s_own_is_remarked_and_no_failure(tmp_path: pathlib.Path):
    job = Job(tmp_path, connect=OWN, after="dist.barrier(); dist.destroy_process_group()")
    assert (
        "unless the program connects them itself; the program has to call init_process_group"
        in job.end()
    )


@pytest.mark.usefixtures("impatient")
@pytest.mark.long
def test_ranks_that_meet_late_take_the_remark_back(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
):
    job = Job(tmp_path, before=f"until({str(tmp_path / '9.r0.remark')!r})", connect=MEET)
    assert job.end() == ""
    out = capfd.readouterr().out
    assert "each trains alone" in out
    assert "[ENV] the 2 ranks have connected now" in out
    assert "never" not in out


def test_a_group_that_has_communicated_nothing_yet_counts(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
):
    """NCCL writes its first key at the first collective: connections to the store tell earlier."""
    connected, looked = tmp_path / "connected", tmp_path / "looked"
    note = f"open({str(connected)!r} + os.environ['RANK'], 'w').close()"
    job = Job(tmp_path, connect=MEET, after=f"{note}; until({str(looked)!r})")
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("connected?"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks_there = list(processes.children(job.agent.pid))
    assert len(ranks_there) == 2
    assert all(rank_connections.is_connected(rank, job.port) for rank in ranks_there)
    assert not rank_connections.is_connected(ranks_there[0], job.port + 1)
    assert not rank_connections.is_connected(os.getpid(), job.port)
    looked.touch()
    assert job.end() == ""
