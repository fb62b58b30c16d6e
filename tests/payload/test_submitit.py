"""submitit's names: the same program runs with each package; only submitit's needs submitit."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import time
import typing

import pytest
from test_functions import asked, double, local, rank, scaled

from ddptrain import submitit
from ddptrain.functions import calls, outcomes
from ddptrain.submitit import parameters

__all__ = ["double"]


def fails() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("cluster", ["slurm", "local", "debug"])
def test_a_program_of_submitits_pages_runs_on_each_executor(
    double: pathlib.Path, tmp_path: pathlib.Path, cluster: str
):
    executor = submitit.AutoExecutor(folder=tmp_path / "log", cluster=cluster)
    executor.update_parameters(timeout_min=1, slurm_partition="dev", name="sum", local_setup=["x"])
    job = executor.submit(local(scaled), 5, lr=2)
    assert job.result() == 10
    assert job.results() == [10]
    assert job.done()
    assert job.exception() is None
    assert [one.result() for one in executor.map_array(local(scaled), [1, 2], [3, 4])] == [3, 8]
    with executor.batch():
        delayed = [executor.submit(local(scaled), number) for number in (1, 2)]
        with pytest.raises(AttributeError, match=r'after the block "with executor\.batch'):
            delayed[0].job_id  # noqa: B018
    assert [one.result() for one in delayed] == [1, 2]
    assert asyncio.run(job.awaitable().result()) == 10
    assert list(submitit.helpers.as_completed([job])) == [job]


def test_on_slurm_parameters_become_options_of_ddp(double: pathlib.Path):
    executor = submitit.SlurmExecutor("x")
    executor.update_parameters(
        time=30,
        nodes=1,
        ntasks_per_node=2,
        cpus_per_task=3,
        mem="4G",
        partition="dev",
        job_name="fit",
    )
    job = executor.submit(local(rank))
    assert job.results() == [0, 1]
    assert job.num_tasks == 2
    assert job.task(1).result() == 1
    (words,) = [words for words in asked(double) if words[0] == "submit"]
    wanted = (
        "--time-limit=30 --nodes=1 --ranks-per-node=2 --cpus-per-task=6 --memory=4G --partition=dev"
    )
    assert set(wanted.split()) <= set(words)
    assert job.run.startswith("fit-")
    assert job.paths.submitted_pickle.exists()


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_a_failure_is_a_failed_job_error_with_the_trace(
    double: pathlib.Path, tmp_path: pathlib.Path, cluster: str
):
    job = submitit.AutoExecutor(tmp_path, cluster=cluster).submit(local(fails))
    with pytest.raises(submitit.FailedJobError, match="in fails") as caught:
        job.result()
    assert isinstance(caught.value.__cause__, ValueError)
    assert "ValueError: boom" in (job.stderr() or "")


def test_local_ranks_meet_and_a_killed_one_is_named(tmp_path: pathlib.Path):
    executor = submitit.LocalExecutor(tmp_path)
    executor.update_parameters(tasks_per_node=2)
    assert executor.submit(local(rank)).results() == [0, 1]

    def killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(submitit.FailedJobError, match="rank 0 was ended by signal 9"):
        executor.submit(local(killed)).result()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"nodes": 1, "gpus_per_node": 0, "ranks_per_node": 1, "cpus_per_task": 1}),
        ({"mem_gb": 1.5}, {"memory": "1536M"}),
        ({"mem_gb": 1.5, "slurm_mem": "8G"}, {"memory": "8G"}),
        ({"timeout_min": 5, "slurm_time": 9}, {"time_limit": 9}),
        ({"tasks_per_node": 4, "cpus_per_task": 2}, {"ranks_per_node": 4, "cpus_per_task": 8}),
        ({"tasks_per_node": 2, "slurm_gpus_per_task": 1}, {"gpus_per_node": 2}),
        ({"gpus_per_node": 8, "slurm_cpus_per_gpu": 4}, {"cpus_per_task": 32}),
        ({"gpus_per_node": 2, "slurm_mem_per_gpu": "10GB"}, {"memory": "20G"}),
        (
            {"slurm_gres": "gpu:2", "slurm_comment": "x"},
            {"sbatch": ["--gres=gpu:2", "--comment=x"]},
        ),
        (
            {"slurm_additional_parameters": {"licenses": "a", "fabric": "efa"}},
            {"fabric": "efa", "sbatch": ["--licenses=a"]},
        ),
        ({"slurm_array_parallelism": 3}, {"parallel": 3}),
        ({"local_x": 1, "slurm_signal_delay_s": 90}, {}),
    ],
)
def test_each_parameter_has_its_option(given: dict[str, typing.Any], found: dict[str, typing.Any]):
    parameters.check(given)
    assert found.items() <= parameters.options(given).items()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("slurm_setup", "is not supported: give env="),
        ("slurm_tmie", "unknown parameter slurm_tmie"),
    ],
)
def test_what_cannot_be_followed_is_refused(name: str, words: str):
    with pytest.raises(ValueError, match=words):
        submitit.AutoExecutor("x", cluster="debug").update_parameters(**{name: 1})


class Counts(submitit.helpers.Checkpointable):
    """Counts, and goes on from its count."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, until: int) -> list[int]:
        began = self.count
        while self.count < until:
            self.count += 1
            (pathlib.Path(os.environ["RUN_DIR"]) / "count").write_text(str(self.count))
            time.sleep(0.05)
        return [began, self.count]


def test_a_checkpointable_goes_on_where_it_was_asked_to_stop(tmp_path: pathlib.Path):
    calls.write(tmp_path / calls.FILE, [calls.Call(local_class(Counts)(), (40,))])
    payload = str(pathlib.Path(calls.__file__).parents[2])
    env = {**os.environ, "RUN_DIR": str(tmp_path), "JOB_DIR": str(tmp_path), "PYTHONPATH": payload}
    argv = [sys.executable, "-m", "ddptrain.functions"]
    with subprocess.Popen(argv, env=env) as first:
        until = time.monotonic() + 30
        while not (tmp_path / "count").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        first.send_signal(signal.SIGUSR2)
        assert first.wait(30) == 1
    assert outcomes.read_all(tmp_path) == {}, "it is no failure of the function"
    assert subprocess.run(argv, env=env, check=False).returncode == 0
    began, ended = outcomes.read_all(tmp_path)[0].value()
    assert began > 0
    assert ended == 40


def local_class(found: type[Counts]) -> type[Counts]:
    found.__module__ = "__main__"
    return found
