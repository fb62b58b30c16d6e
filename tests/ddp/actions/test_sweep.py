"""Sweeps: one script, an array of jobs, a run for each element."""

import json
import pathlib
import typing

import pytest
import run_verbs
from cluster import Cluster, Job
from harness import Trainer
from left_by_jobs import write_result


@pytest.fixture
def ready(ready: Trainer) -> Trainer:  # without the charm's words
    return run_verbs.of(ready)


def start(
    cluster: Cluster, sweep: Job, number: int, job_id: int, states: list[tuple[str, int]]
) -> Job:
    """Let one task of the array start, as Slurm and the script would."""
    folder = pathlib.Path(f"{sweep.script.parent}-{number}")
    (folder / "control" / "job").write_text(f"{job_id}\n")
    job = Job(
        job_id,
        cluster.user,
        sweep.name,
        folder / "job.sbatch",
        "",
        states,
        task=str(number),
        array_id=40,
    )
    cluster.jobs.append(job)
    return job


def test_a_grid_is_every_combination_each_a_run_of_its_own(ready: Trainer, cluster: Cluster):
    results = ready.run(
        "submit-sweep", grid="lr=0.001,0.003 batch=8,16", name="lrs", parallel=2, args="--steps 5"
    )
    assert results["count"] == "4"
    assert results["runs"].splitlines()[1] == "lrs-1 batch=16 lr=0.001"
    script = cluster.job(40).text
    runs = ready.workspace / "runs"
    assert "#SBATCH --array=0-3%2\n" in script
    assert f"#SBATCH --output={runs}/lrs-%a/logs/%j.out\n" in script
    assert cluster.job(40).commands()[0].endswith(" --steps 5")
    assert cluster.job(40).training().is_sweep, "each task adds its own"
    assert (runs / "lrs-3" / "args").read_text() == "--lr=0.003\n--batch=16\n"
    record = json.loads((runs / "lrs-3" / "job.json").read_text())
    assert (record["job_id"], record["sweep"], record["kind"]) == (None, "lrs", "gpt")
    first = (runs / "lrs" / "sweep.jsonl").read_text().splitlines()[0]
    assert json.loads(first) == {"lr": "0.001", "batch": "8"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "grid: makes 0 runs; from 1 to 256 are allowed, such as lr=0.001,0.003 batch=8,16"),
        ({"grid": "lr=1 lr=2"}, "grid: lr is given twice"),
        (
            {"grid": " ".join(f"a{i}=1,2,3,4" for i in range(5))},
            "grid: makes 1024 runs; from 1 to 256 are allowed",
        ),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(
    ready: Trainer, cluster: Cluster, given: dict[str, str], line: str
):
    assert ready.fails("submit-sweep", **given).startswith(line)
    assert not cluster.changes


def test_an_existing_sweep_is_not_overwritten(ready: Trainer, cluster: Cluster):
    ready.run("submit-sweep", grid="lr=1,2", name="s")
    assert ready.fails("submit-sweep", grid="lr=3", name="s").endswith(
        "/s exists already; choose another name"
    )
    (ready.workspace / "runs" / "t-0").mkdir()
    (ready.workspace / "runs" / "t-0" / "notes.txt").touch()
    assert ready.fails("submit-sweep", grid="lr=3", name="t").endswith(
        "/t-0 exists already; choose another name"
    )
    assert len(cluster.jobs) == 1


def test_a_sweep_that_slurm_refuses_at_last_leaves_nothing(ready: Trainer, cluster: Cluster):
    cluster.submit_refusal = "sbatch: error: Batch job submission failed: Invalid account"
    before = set(ready.files())
    assert ready.fails("submit-sweep", grid="lr=1,2").startswith("account: Slurm rejects the job")
    assert set(ready.files()) == before


def test_a_dry_run_of_a_sweep_changes_nothing(ready: Trainer, cluster: Cluster):
    before = ready.files()
    results = ready.run("submit-sweep", grid="lr=1,2", name="s", dry_run=True)
    assert "#SBATCH --array=0-1%2\n" in results["script"]
    assert results["runs"] == "s-0 lr=1\ns-1 lr=2"
    assert ready.files() == before
    assert not cluster.changes


def test_a_sweep_is_shown_while_it_runs_and_its_runs_alone(ready: Trainer, cluster: Cluster):
    cluster.states = [("PENDING", 0)]
    ready.run("submit-sweep", grid="lr=1,2,3", name="s")
    sweep = cluster.job(40)
    first = start(cluster, sweep, 0, 41, [("RUNNING", 0)])
    (first.script.parent / "metrics.jsonl").write_text('{"kind": "step", "step": 7, "loss": 2.5}\n')
    table = ready.run("show-run", run="s")
    assert table["states"] == "2 PENDING, 1 RUNNING"
    rows = [line.split() for line in table["runs"].splitlines()]
    assert rows[1] == ["s-0", "41", "RUNNING", "7", "2.5", "lr=1"]
    assert rows[2][:2] == ["s-1", "PENDING"]
    assert ready.run("show-run", run="s-0")["job-id"] == "41"
    assert ready.run("show-run", run="s-1")["state"] == "PENDING"
    assert ready.fails("run-log", run="s") == "run: s is a sweep; name one of its runs, such as s-0"
    assert ready.fails("submit-ddp", run="s-1").startswith("run: s-1 is active as job 4")


def test_the_end_of_a_sweep_names_the_best(ready: Trainer, cluster: Cluster):
    def submitted(sweep: Job) -> None:
        if sweep.task == "N/A":
            return
        sweep.states = [("PENDING", 0)]
        for number, loss in enumerate((2.0, 1.5)):
            job = start(cluster, sweep, number, 50 + number, [("RUNNING", 0), ("COMPLETED", 0)])
            write_result(job, last_loss=9.0, best_loss=loss)
        sweep.states = [("COMPLETED", 0)]

    cluster.submitted = submitted
    results = ready.run("submit-sweep", grid="lr=1,2", name="s", wait=True)
    assert (results["best-run"], results["best-loss"], results["best-options"]) == (
        "s-1",
        "1.5",
        "lr=2",
    )
    assert results["states"] == "2 COMPLETED"
    assert any("sweep s: 2 RUNNING" in line for line in ready.log)


def test_a_sweep_with_a_run_that_failed_fails(ready: Trainer, cluster: Cluster):
    def submitted(sweep: Job) -> None:
        start(cluster, sweep, 0, 50, [("COMPLETED", 0)])
        start(cluster, sweep, 1, 51, [("FAILED", 1 << 8)])
        sweep.states = [("COMPLETED", 0)]

    cluster.submitted = submitted
    line = ready.fails("submit-sweep", grid="lr=1,2", name="s", wait=True)
    assert line == "1 of 2 runs did not complete; ddp show s-1"
    assert ready.results["states"] == "1 COMPLETED, 1 FAILED"


def shape(cluster: Cluster, ready: Trainer) -> dict[str, Job]:
    """A sweep of four: the first runs, two wait, and one has ended."""
    cluster.states = [("PENDING", 0)]
    ready.run("submit-sweep", grid="lr=1,2,3,4", name="s")
    sweep = cluster.job(40)
    jobs = {"runs": start(cluster, sweep, 0, 41, [("RUNNING", 0)]), "rest": sweep}
    jobs["ended"] = start(cluster, sweep, 1, 42, [("COMPLETED", 0)])
    sweep.task = "2-3%2"
    return jobs


def cancelled(cluster: Cluster) -> list[int]:
    return sorted(job.job_id for job in cluster.jobs if job.cancelled)


def test_a_run_of_a_sweep_is_cancelled_alone(ready: Trainer, cluster: Cluster):
    shape(cluster, ready)
    assert ready.run("cancel-run", run="41") == {"job-id": "41", "state": "CANCELLED", "run": "s-0"}
    assert cluster.changes[-1] == ("scancel", "40_0")
    assert cancelled(cluster) == [41]
    assert ready.run("cancel-run", run="s-3")["state"] == "CANCELLED", (
        "it has no record of its own, nor gets one"
    )
    assert cluster.changes[-1] == ("scancel", "40_3")
    line = "run: no job of s-1 is pending or running; ddp list"
    assert ready.fails("cancel-run", run="s-1") == line
    assert ready.fails("cancel-run", run="s-9") == line.replace("s-1", "s-9")


@pytest.mark.parametrize("named", [{"run": "40"}, {"run": "s"}])
def test_a_sweep_is_cancelled_as_a_whole(
    ready: Trainer, cluster: Cluster, named: dict[str, typing.Any]
):
    shape(cluster, ready)
    results = ready.run("cancel-run", **named)
    assert (results["state"], results["run"]) == ("CANCELLED", "s")
    assert cluster.changes[-1] == ("scancel", "40")
    assert cancelled(cluster) == [40, 41]


def test_the_id_that_a_sweep_shares_with_its_last_run_is_asked_about(
    ready: Trainer, cluster: Cluster
):
    """Slurm gives the array's own id to the task that is split off last."""
    last = shape(cluster, ready)["rest"]
    last.task, last.states = "3", [("RUNNING", 0)]
    message = ready.fails("cancel-run", run="40")
    assert (
        message == "run: 40 is the sweep s, and its run s-3; name s-3 for that run alone, s for all"
    )
    assert cancelled(cluster) == []
    assert ready.run("cancel-run", run="s-3") == {
        "job-id": "40",
        "state": "CANCELLED",
        "run": "s-3",
    }
    assert cancelled(cluster) == [40]
    assert ready.run("cancel-run", run="40")["run"] == "s", (
        "the last one is over, so the sweep is meant"
    )
    assert cancelled(cluster) == [40, 41]


def test_the_last_run_left_of_a_sweep_is_cancelled_by_its_id(ready: Trainer, cluster: Cluster):
    jobs = shape(cluster, ready)
    jobs["runs"].states = [("COMPLETED", 0)]
    jobs["rest"].task, jobs["rest"].states = "3", [("RUNNING", 0)]
    assert ready.run("cancel-run", run="40")["run"] == "s-3"
    assert ready.fails("cancel-run", run="40") == "run: job 40 has ended already: CANCELLED"


# -- one element of an array, named by the array's id ---------------------------------------------


def test_an_element_is_shown_read_and_cancelled(ready: Trainer, cluster: Cluster):
    jobs = shape(cluster, ready)
    (jobs["runs"].script.parent / "logs" / "41.out").write_text("hello\n")
    shown = ready.run("show-run", run="40_0")
    assert (shown["run"], shown["job-id"], shown["state"]) == ("s-0", "41", "RUNNING")
    assert ready.run("run-log", run="40_0")["text"] == "hello"
    assert ready.run("show-run", run="40_3")["state"] == "PENDING", (
        "it waits, so Slurm knows it by the array"
    )
    assert ready.run("cancel-run", run="40_0") == {
        "job-id": "41",
        "state": "CANCELLED",
        "run": "s-0",
    }
    assert cluster.changes[-1] == ("scancel", "40_0")
    assert ready.run("cancel-run", run="40_3")["run"] == "s-3"
    assert cluster.changes[-1] == ("scancel", "40_3")
    assert cancelled(cluster) == [41]


def test_an_element_that_was_queued_again_is_let_go(ready: Trainer, cluster: Cluster):
    job = shape(cluster, ready)["runs"]
    job.states, job.reason, job.restarts = [("PENDING", 0)], "BeginTime", 1
    assert ready.run("resume-run", run="40_0")["run"] == "s-0"
    assert cluster.changes[-1] == ("scontrol", "update", "JobId=41", "StartTime=now")


@pytest.mark.parametrize("action", ["show-run", "run-log", "cancel-run", "resume-run"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("40_9", "run: no run in {runs} has job 40_9; ddp list"),
        ("7_1", "run: no run in {runs} has job 7_1; ddp list"),
    ],
)
def test_an_element_that_does_not_exist_is_refused(
    ready: Trainer, cluster: Cluster, action: str, name: str, line: str
):
    shape(cluster, ready)
    assert ready.fails(action, run=name) == line.replace("{runs}", str(ready.workspace / "runs"))
    assert cancelled(cluster) == []
