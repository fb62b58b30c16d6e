"""Under a real srun, one task per rank and no torchrun: two slurmd on this host, up in seconds."""

# pyright: basic, reportPrivateImportUsage=false
import collections.abc
import json
import pathlib
import subprocess
import sys

import conftest
import pytest
import ranks

import mini_slurm as slurm

pytestmark = pytest.mark.skipif(slurm.absent() is not None, reason=slurm.absent() or "")
TINY = ("--layers 1 --heads 2 --width 32 --seq-len 32 --batch 4 --precision fp32 --eval-rows 8 --log-every 1").split()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> collections.abc.Iterator[dict[str, str]]:
    with slurm.running(tmp_path_factory.mktemp("slurm") / "mini") as env:
        yield env


def srun(cluster: dict[str, str], *args: object, meet: str = "MASTER_ADDR MASTER_PORT", **env: str) -> ranks.Result:
    """Run `ddptrain` in two tasks on two nodes, which find the place to meet in the variables `meet`."""
    meeting = dict(zip(meet.split(), ("127.0.0.1", str(ranks.free_port())), strict=False))
    argv = ["srun", "--nodes=2", "--ntasks=2", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    done = subprocess.run(
        [*argv, sys.executable, "-m", "ddptrain", *(str(a) for a in args)],
        env={**cluster, "PYTHONUNBUFFERED": "1", **meeting, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return ranks.Result([done.returncode], done.stdout)


def test_training_on_two_nodes_needs_no_torchrun(
    cluster: dict[str, str], dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir = tmp_path / "run"
    job = {"RUN_DIR": str(run_dir), "RUN_ATTEMPT_ID": "1.r0"}
    result = srun(cluster, "train", "--data", dataset, *TINY, "--steps", 6, meet="HEAD_IP HEAD_PORT", **job)
    assert result.returncode == 0, result.output
    (world,) = result.marked("DDP")
    assert (world["launcher"], world["world_size"]) == ("srun", "2")
    assert len(result.marked("RANK")) == 2
    assert list(conftest.losses(run_dir)) == [1, 2, 3, 4, 5, 6]
    assert json.loads((run_dir / "control" / "1.r0.outcome").read_text())["outcome"] == "done"


def test_a_mistake_is_one_line_and_ends_both_tasks(
    cluster: dict[str, str], dataset: pathlib.Path, tmp_path: pathlib.Path
):
    """Without --kill-on-bad-exit: each task must find its own way out."""
    result = srun(cluster, "train", "--data", dataset, "--run-dir", tmp_path / "run", *TINY, "--width", 33)
    assert result.returncode == 2, result.output
    assert result.fatal() == ["--width 33 is not divisible by --heads 2"]
    assert (tmp_path / "run" / "summary.json").exists()


def test_without_a_place_to_meet_each_rank_names_what_is_missing(cluster: dict[str, str]):
    result = srun(cluster, "smoke", meet="")
    assert result.returncode == 2
    assert result.output.count("set MASTER_ADDR") == 2
