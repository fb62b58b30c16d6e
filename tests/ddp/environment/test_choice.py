"""The build of torch that a cluster needs: a node with GPUs is asked for its driver."""

import pathlib
import subprocess

import pytest
from cluster import Cluster, Machine

from ddp.base import Settings, TrainerError
from ddp.environment import choice
from ddp.problem import Step
from ddp.slurm.jobs import Capacity, Partition

CUDA = """\
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = %d; return 0; }
"""


def partition(gpus: int) -> tuple[Partition, ...]:
    return (Partition("main", True, True, None, None, (Capacity("n0", 4, 8000, gpus, "IDLE", True),)),)


def choose(settings: Settings, gpus: int = 8) -> choice.Choice:
    return choice.choose(settings, partition(gpus), lambda _: None)


@pytest.mark.parametrize(
    ("source", "build"),
    [(CUDA % 1, "cuda"), (CUDA % 0, "cpu"), ("int none;", "cpu"), ("", "cpu")],
    ids=["a GPU", "no GPU for the job", "another library", "no driver"],
)
def test_a_node_is_asked_by_the_script_itself(
    settings: Settings,
    cluster: Cluster,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    build: str,
):
    env = {"PATH": "/usr/bin:/bin"}
    if source:
        (tmp_path / "cuda.c").write_text(source)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "cuda.c"], check=True)
        env["LD_LIBRARY_PATH"] = str(tmp_path)
    cluster.machines = [Machine("n1", gres="gpu:a100:1")]

    def answer(script: str) -> int:
        return subprocess.run(["/bin/bash"], input=script, text=True, check=False, cwd="/", env=env).returncode

    monkeypatch.setattr(cluster, "answer", answer)
    found = choose(settings)
    assert (found.build, found.driverless) == (build, build == "cpu")


def test_without_gpus_no_node_is_asked(settings: Settings, cluster: Cluster):
    assert choose(settings, gpus=0) == choice.Choice("cpu", False, "Slurm has no node with GPUs")
    assert not cluster.calls


@pytest.mark.parametrize(
    ("states", "why"),
    [
        ([("FAILED", 127 << 8)], "job 900 ended as FAILED with status 127"),
        ([("NODE_FAIL", 0)], "job 900 ended as NODE_FAIL with status 1"),
        ([("PENDING", 0)], "job 900 is PENDING (Resources) after 0 s"),
    ],
)
def test_nothing_is_guessed_without_an_answer(
    settings: Settings, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, states: list[tuple[str, int]], why: str
):
    monkeypatch.setattr(choice, "WAIT_S", 0.0)
    cluster.driver_states = states
    with pytest.raises(TrainerError) as caught:
        choose(settings)
    remedy = "try again when a GPU node is free, or set torch-build to cpu or cuda"
    assert str(caught.value) == f"no GPU node reported its driver: {why}; {remedy}"
    cancelled = [call for call in cluster.calls if call[0] == "scancel"]
    assert cancelled == [("scancel", "900")] * (states[0][0] == "PENDING")


def test_a_job_that_cannot_be_cancelled_hides_no_reason(
    settings: Settings, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(choice, "WAIT_S", 0.0)
    cluster.driver_states, cluster.denial = [("PENDING", 0)], "scancel: error: Kill job error on job id 900"
    with pytest.raises(TrainerError, match=r": job 900 is PENDING \(Resources\) after 0 s; "):
        choose(settings)


def test_a_refused_job_is_reported(settings: Settings, cluster: Cluster):
    cluster.driver = ""
    with pytest.raises(TrainerError, match=r"reported its driver: Batch job submission failed: busy; try again"):
        choose(settings)


def test_an_account_that_slurmctld_lacks_is_reported_with_the_step(settings: Settings, cluster: Cluster):
    cluster.driver_states, cluster.driver_reason = [("PENDING", 0)], "JobHeldAdmin"
    with pytest.raises(TrainerError, match=r"^slurmctld does not know the account ") as caught:
        choose(settings)
    assert isinstance(caught.value.remedy, Step)
    assert caught.value.remedy.name == "add-account"
    assert caught.value.remedy.values == {"user": settings.user, "uid": str(settings.uid)}
