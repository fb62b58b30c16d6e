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
from ddp.node import spec

pytestmark = pytest.mark.skipif(slurm.absent() is not None, reason=slurm.absent() or "")
TINY = (
    "--layers", 1, "--heads", 2, "--width", 32, "--seq-len", 32, "--batch", 4, "--precision", "fp32", "--eval-rows", 8, "--log-every", 1,
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> collections.abc.Iterator[dict[str, str]]:
    with slurm.running(tmp_path_factory.mktemp("slurm") / "mini") as env:
        yield env


def srun(cluster: dict[str, str], *args: object, **env: str) -> ranks.Result:
    """Run `ddptrain` in two tasks on two nodes."""
    argv = ["srun", "--nodes=2", "--ntasks=2", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    done = subprocess.run(
        [*argv, sys.executable, "-m", "ddptrain", *(str(a) for a in args)], env={**cluster, "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False,
    )  # fmt: skip
    return ranks.Result([done.returncode], done.stdout)


def test_training_on_two_nodes_needs_nothing_but_srun(
    cluster: dict[str, str], dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir = tmp_path / "run"
    result = srun(cluster, "train", "--data", dataset, *TINY, "--steps", 6, RUN_DIR=str(run_dir), RUN_ATTEMPT_ID="1.r0")
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


RAISES = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
    if os.environ["RANK"] == "1" and os.environ["RUN_ATTEMPT_ID"].endswith(".r0"):
        raise ValueError("boom")
    time.sleep(0 if "t1" in os.environ["RUN_ATTEMPT_ID"] else 60)

main()
"""


def test_a_job_under_a_real_slurm_tells_why_it_failed_and_starts_again(cluster: dict[str, str], tmp_path: pathlib.Path):
    """The program that a batch script becomes, on two nodes, with a script that uses `@record`."""
    run_dir, cache = tmp_path / "runs" / "first", tmp_path / "cache"
    home = cache / "environment"
    (home / "bin").mkdir(parents=True)
    cache.chmod(0o700)
    (home / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (home / "bin" / "python").chmod(0o755)
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (cache / "environment.complete").write_text(f"x {boot}\n")
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    made = spec.Environment("/none/environment.tar.zst", str(cache), "x", 1, f"3.{sys.version_info[1]}", (), "")
    job = spec.JobSpec(
        run="first", job_dir=str(run_dir), workspace=str(tmp_path), cache=str(cache), command=(spec.Word(str(script)),),
        resume="auto", leaves_outcome=False, ranks_per_node=1, gpus_per_node=0, launcher="srun", variables=(),
        fabric="own", fabrics=(spec.Fabric("own", (), "lo", (), (), "", "", "", (), ()),), environment=made,
        container=None, profile=None, max_requeues=0, max_restarts=1, nodelist=(), exclude=(), reservation="",
        is_sweep=False, token_path="",
    )  # fmt: skip
    package = pathlib.Path(spec.__file__).parent
    program = run_dir / "program"
    for folder in ("logs", "control", "program/ddp/node"):
        (run_dir / folder).mkdir(parents=True)
    for path in package.glob("*.py"):
        target = program if path.name == "__main__.py" else program / "ddp" / "node"
        (target / path.name).write_text(path.read_text())
    (program / "ddp" / "__init__.py").touch()
    (program / "job.json").write_text(spec.dump(job))
    (run_dir / "job.json").write_text(json.dumps({"launcher": "srun", "ranks_per_node": 1}))
    batch = run_dir / "job.sbatch"
    batch.write_text(f"#!/bin/bash\nexec /usr/bin/python3 -I -S -B {program} job job.json\n")
    asks = [
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        f"--output={run_dir}/logs/%j.out",
        "--open-mode=append",
    ]
    done = subprocess.run(
        ["sbatch", "--wait", "--parsable", *asks, batch],
        env=cluster,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    number = done.stdout.split()[0]
    log = (run_dir / "logs" / f"{number}.out").read_text()
    assert done.returncode == 0, log
    (failed,) = [line for line in log.splitlines() if line.startswith("[FAILED] ")]
    assert failed == f"[FAILED] attempt={number}.r0 fault=program node=m1: ValueError: boom"
    assert "[RESTART] 1 of 1" in log
    assert log.count("rank 1 of 2") == 2
    assert json.loads((run_dir / "control" / f"{number}.r0t1.outcome").read_text()) == {
        "outcome": "done",
        "exit_code": 0,
    }
    (error,) = run_dir.glob("logs/*/node-1/*/attempt_0/0/error.json")
    assert json.loads(error.read_text())["message"]["message"] == "ValueError: boom"
    assert not list(cache.glob("jobs/*")), "what was copied is removed from the nodes' disks"
