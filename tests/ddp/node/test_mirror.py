"""The mirror of checkpoints: the newest finished one is copied, and its state is there to read."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import job_specs
import pytest

from ddp.node import mirror, spec, started_job
from ddp.run import folder


class Bucket:
    """Record the copies, and fail with a text while one is set."""

    def __init__(self) -> None:
        self.copied: list[tuple[str, str]] = []
        self.trouble = ""

    def copy(self, path: str, url: str) -> str:
        if not self.trouble:
            self.copied.append((pathlib.Path(path).name, url))
        return self.trouble


@pytest.fixture
def job(tmp_path: pathlib.Path) -> started_job.StartedJob:
    run_dir = tmp_path / "night"
    (run_dir / "control").mkdir(parents=True)
    (run_dir / "code").mkdir()
    environment = spec.Environment((), str(tmp_path / "cache"), "", ())
    bucket = spec.Mirror("s3://models/physics/", environment)
    about = job_specs.make(run_dir, workdir=str(run_dir / "code"), mirror=bucket)
    env = {
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "slurmd-0",
        "SLURM_JOB_NODELIST": "slurmd-0",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_NUM_NODES": "1",
    }
    return started_job.read(about, f"{run_dir}/program/job.json", env)


def save(job: started_job.StartedJob, step: int) -> pathlib.Path:
    """Leave a checkpoint of the payload's."""
    path = pathlib.Path(job.run_dir, f"epoch-{step:04d}")
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"meta": {"step": step}}))
    return path


def shown(job: started_job.StartedJob) -> str:
    return folder.read(pathlib.Path(job.run_dir), is_brief=True).mirror


def test_the_newest_finished_checkpoint_is_copied_once(job: started_job.StartedJob):
    bucket = Bucket()
    copies = mirror.Mirror(job, bucket.copy)
    pathlib.Path(job.run_dir, "epoch-0001.tmp-7.r0").mkdir()
    assert copies.look()
    assert bucket.copied == []
    save(job, 1)
    save(job, 2)
    assert copies.look()
    assert copies.look()
    assert bucket.copied == [("epoch-0002", "s3://models/physics/night/epoch-0002")]
    assert shown(job) == "s3://models/physics/night/epoch-0002 is verified"

    again = mirror.Mirror(job, bucket.copy)  # of the job's next start
    assert again.look()
    assert len(bucket.copied) == 1


def test_a_failure_is_shown_and_tried_again(job: started_job.StartedJob):
    bucket = Bucket()
    copies = mirror.Mirror(job, bucket.copy)
    save(job, 1)
    bucket.trouble = "s3://models: access denied"
    assert not copies.look()
    assert shown(job) == "it tries again: epoch-0001: s3://models: access denied"
    bucket.trouble = ""
    assert copies.look()
    assert shown(job) == "s3://models/physics/night/epoch-0001 is verified"


def test_another_programs_checkpoint_is_copied_once_it_is_quiet(job: started_job.StartedJob):
    bucket = Bucket()
    place = pathlib.Path(job.spec.workdir, "out", "checkpoint-20")
    place.mkdir(parents=True)
    copies = mirror.Mirror(job, bucket.copy)
    (place / "trainer_state.json").write_text("{}")
    later = time.time() + 1
    os.utime(place / "trainer_state.json", (later, later))
    assert copies.look()
    assert bucket.copied == []
    assert copies.look(quiet_s=-5)
    assert bucket.copied == [("checkpoint-20", "s3://models/physics/night/out/checkpoint-20")]


PROCESS = """
import signal, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print(flush=True)
while not asked:
    time.sleep(0.05)
time.sleep(1)
"""


@pytest.mark.parametrize(
    ("is_urgent", "code"), [(False, 0), (True, -9)], ids=["at the end", "to make way"]
)
def test_the_last_copy_is_awaited_unless_the_job_has_to_leave(
    job: started_job.StartedJob, is_urgent: bool, code: int
):
    process = subprocess.Popen([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    mirror.end(process, job, lambda: is_urgent)
    assert process.wait() == code
    process.stdout.close()


def test_a_job_without_a_mirror_starts_nothing(job: started_job.StartedJob):
    without = dataclasses.replace(job, spec=dataclasses.replace(job.spec, mirror=None))
    assert mirror.start(without, {}) is None
