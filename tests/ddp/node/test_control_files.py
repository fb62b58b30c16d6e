"""The files in a run's control/, which tell the starts of a job about each other."""

import json
import pathlib

import pytest
from job_specs import make

from ddp.node import spool, started_job, storage
from ddp.node.control_files import ControlFiles

SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "gpu-[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "main",
    "SLURMD_NODENAME": "gpu-0",
}


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "runs" / "nano"
    (folder / "control").mkdir(parents=True)
    return folder


@pytest.fixture
def files(run_dir: pathlib.Path) -> ControlFiles:
    job = started_job.read(make(run_dir), str(run_dir / "program/job.json"), SLURM)
    return ControlFiles(job, storage.Storage(job.control, spool.note("gpu-0")))


def test_the_next_start_of_a_job_reads_what_this_one_wrote(files: ControlFiles):
    assert files.read_retries() == {}
    files.write_retries({"program": 1, "faults": 2})
    files.exclude(["gpu-3"])
    files.exclude(["gpu-4"])
    assert files.read_retries() == {"program": 1, "faults": 2}
    assert files.read_excluded() == ["gpu-3", "gpu-4"]


@pytest.mark.parametrize("text", ["", "[]", '{"program": []}', "no JSON"])
def test_a_damaged_count_of_retries_begins_anew(
    files: ControlFiles, run_dir: pathlib.Path, text: str
):
    (run_dir / "control" / "12.retries").write_text(text)
    assert files.read_retries() == {}


def test_a_new_attempt_does_not_find_the_outcome_of_an_earlier_one(
    files: ControlFiles, run_dir: pathlib.Path
):
    files.write_outcome("12.r0", "preempted", 75, "limit")
    outcome = run_dir / "control" / "12.r0.outcome"
    assert json.loads(outcome.read_text()) == {
        "outcome": "preempted",
        "exit_code": 75,
        "cause": "limit",
    }
    assert files.read_outcome("12.r0") == "preempted"
    assert not files.clear("12.r0"), "the run has no checkpoint"
    assert files.read_outcome("12.r0") == ""
    (run_dir / "latest").mkdir()
    assert files.clear("12.r0")
