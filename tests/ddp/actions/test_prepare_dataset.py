"""prepare-dataset: one job or an array with a job that ends it; what failed, and what came out."""

import json
import os
import pathlib
import typing

import pytest
from cluster import Cluster, Job
from harness import Trainer
from left_by_jobs import write_result

from ddp.node import spec
from ddp.workspace import operations


@pytest.fixture
def raw(ready: Trainer) -> pathlib.Path:
    folder = ready.workspace / "raw"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "x"}\n')
    return folder


def finish(job: Job) -> None:
    """Write the files of the job that ends the work."""
    if job.script.name == "job.sbatch":
        write_result(job)
        (job.script.parent / "summary.json").unlink()
        found = {
            "tokenizer": "byte",
            "vocabulary": 257,
            "totals": {"train": "90 tokens, 9 documents"},
            "shards": [{}, {}],
            "damage": [],
            "not-read": ".csv 2 (7 bytes)",
            "not-learned": "2 of 9 conversations teach nothing: role narrator",
        }
        (job.script.parent / "inspection.json").write_text(json.dumps(found))


def test_little_text_is_one_job(ready: Trainer, raw: pathlib.Path, cluster: Cluster):
    cluster.submitted = finish
    results = ready.run("prepare-dataset", source=str(raw), tokenizer=str(raw), errors="replace")
    (job,) = cluster.jobs
    assert "--array" not in job.text
    assert "--dependency" not in job.text
    prepares, checks = job.commands()
    assert f"ddptrain prepare --source {raw}" in prepares
    assert prepares.endswith(f" --tokenizer-local-dir {raw} --errors replace")
    assert results["not-read"] == ".csv 2 (7 bytes)"
    assert results["not-learned"] == "2 of 9 conversations teach nothing: role narrator"
    assert "ddptrain inspect --json" in checks
    assert results["train"] == "90 tokens, 9 documents"
    assert (results["shards"], results["verified"], results["vocabulary"]) == (
        "2",
        "every byte",
        "257",
    )


def test_without_arrays_much_text_is_one_job(ready: Trainer, raw: pathlib.Path, cluster: Cluster):
    with (raw / "big.txt").open("wb") as file:
        file.truncate(900 << 20)
    cluster.config += "MaxArraySize            = 0\n"
    assert ready.fails("prepare-dataset", source=str(raw), elements=2).startswith(
        "elements: 2 exceeds the limit of 0"
    )
    ready.run("prepare-dataset", source=str(raw), wait=False)
    assert ["--array" in job.text for job in cluster.jobs] == [False]


def test_the_limit_that_the_array_waits_for_is_reported(
    ready: Trainer, raw: pathlib.Path, cluster: Cluster
):
    cluster.states = [("PENDING", 0)]
    cluster.submitted = lambda job: setattr(
        job, "reason", "AssocGrpGRES" if "--array" in job.text else "Dependency"
    )
    results = ready.run("prepare-dataset", source=str(raw), elements=2, wait=False)
    assert results["waits-for"] == "AssocGrpGRES"


def test_much_text_is_an_array_and_a_job_that_ends_it(
    ready: Trainer, raw: pathlib.Path, cluster: Cluster
):
    for number in range(3):
        with (raw / f"big-{number}.txt").open("wb") as file:
            file.truncate(300 << 20)
    cluster.submitted = finish
    results = ready.run("prepare-dataset", source=str(raw), name="big", parallel=2)
    array, last = cluster.jobs
    assert array.script.name == "parts.sbatch"
    assert "#SBATCH --array=0-3%2\n" in array.text
    assert "/logs/%A_%a.out\n" in array.text
    assert (asked := array.asked()) and isinstance(asked, spec.PrepareSpec)
    assert asked.elements == 4
    assert [command.split()[1] for command in array.commands()] == ["prepare"]
    assert last.script.name == "job.sbatch"
    assert "#SBATCH --dependency=singleton\n" in last.text
    assert last.commands()[0].endswith(" --finalize")
    assert array.name == last.name == "prepare-big"
    assert (results["job-id"], results["array-job-id"], results["elements"]) == ("41", "40", "4")
    assert json.loads((last.script.parent / "job.json").read_text())["array_job_id"] == 40


def test_the_element_that_failed_names_its_input(
    ready: Trainer, raw: pathlib.Path, cluster: Cluster
):
    def fail(job: Job) -> None:
        logs = job.script.parent / "logs"
        if job.script.name == "parts.sbatch":
            (logs / f"{job.job_id}_0.out").write_text("[DATA] parts=1\n[DONE] ok\n")
            (logs / f"{job.job_id}_2.out").write_text(
                f"ERROR:ddptrain:[FATAL] {raw}/a.jsonl line 7 is not JSON\nsrun: error\n"
            )
        else:
            (logs / f"{job.job_id}.out").write_text("[FATAL] 1 of 3 parts are not done\n")

    cluster.submitted, cluster.states = fail, [("FAILED", 512)]
    line = ready.fails("prepare-dataset", source=str(raw), elements=3)
    assert (
        line
        == f"job 41: element 2: {raw}/a.jsonl line 7 is not JSON; correct the input and run the same command again"
    )
    assert ready.results["failed-elements"] == f"element 2: {raw}/a.jsonl line 7 is not JSON"


def test_an_array_does_not_outlive_a_refused_end(
    ready: Trainer, raw: pathlib.Path, cluster: Cluster
):
    def refuse(_: Job) -> None:
        cluster.submit_refusal = "sbatch: error: QOSMaxSubmitJobPerUserLimit"

    cluster.submitted = refuse
    assert "QOSMaxSubmitJobPerUserLimit" in ready.fails(
        "prepare-dataset", source=str(raw), elements=2
    )
    assert cluster.job(40).cancelled


@pytest.mark.parametrize("named", [{"run": "40"}, {"run": "41"}, {"run": "prepare-raw"}])
def test_a_preparation_is_cancelled_with_all_its_jobs(
    ready: Trainer, raw: pathlib.Path, cluster: Cluster, named: dict[str, typing.Any]
):
    cluster.states = [("PENDING", 0)]
    ready.run("prepare-dataset", source=str(raw), elements=3, wait=False)
    results = ready.run("cancel-run", **named)
    assert (results["state"], results["run"], results["cancelled"]) == (
        "CANCELLED",
        "prepare-raw",
        "41 40",
    )
    assert cluster.changes[-1] == ("scancel", "41", "40"), (
        "what ends the work first, or it would start"
    )
    assert all(job.cancelled for job in cluster.jobs)
    line = "no job of prepare-raw is pending or running; juju run trainer/leader list-runs"
    assert ready.fails("cancel-run", **named).endswith(line)


def test_sources_are_measured(tmp_path: pathlib.Path):
    for name, size in (("a.txt", 200), ("b.tar", 500), ("c.jsonl.gz", 50), ("sub/d.txt", 64)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = operations.measure_source(str(tmp_path), 64)
    assert found == operations.SourceSize(num_bytes=814, num_parts=4 + 1 + 1 + 1)
    assert operations.measure_source(str(tmp_path / "a.txt"), 64).num_parts == 4
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "a.txt").symlink_to("../a.txt")  # as the cache of Hugging Face's hub
    assert operations.measure_source(str(tmp_path / "snapshot"), 64).num_bytes == 200
