"""list-runs: the table of runs, its order, and its filters."""

import dataclasses
import os
import typing

import left_by_jobs
import pytest
from cluster import Cluster
from left_by_jobs import write_result
from run_verbs import Program


def rows(program: Program, **params: typing.Any) -> list[list[str]]:
    return [line.split() for line in program.run("list-runs", **params)["runs"].splitlines()]


def test_the_list_has_queue_and_results(program: Program, cluster: Cluster):
    assert program.run("list-runs")["count"] == "0"
    cluster.states = [("PENDING", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    cluster.states = [("RUNNING", 0)]
    program.run("submit-ddp", workload="smoke", run="b")
    os.utime(program.workspace / "runs" / "a" / "job.json", (1, 1))
    assert rows(program) == [
        "RUN KIND STATE NODES STEP LOSS BEST RATE ELAPSED WHERE/REASON".split(),
        ["b", "smoke", "RUNNING", "2", "-", "-", "-", "-", "00:00:07", "slurmd-[0-1]"],
        [
            "a",
            "smoke",
            "PENDING",
            "2",
            "-",
            "-",
            "-",
            "-",
            "00:00:07",
            "Resources",
            "(position",
            "1",
            "of",
            "1)",
        ],
    ]
    (first, second) = program.record["runs"]
    assert (first["run"], first["state"], first["nodes"], first["elapsed_s"]) == (
        "b",
        "RUNNING",
        2,
        7,
    )
    assert (second["job_id"], second["why"], second["position"], second["submitted"][:2]) == (
        40,
        "Resources",
        1,
        "20",
    )
    assert program.record["schema"] == 1
    assert program.record["count"] == 2


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"lines": 1}, ["lrs-2"]),
        ({"state": "failed"}, ["lrs-1"]),
        ({"state": "FAILED,COMPLETED"}, ["lrs-2", "lrs-1", "old"]),
        ({"name": "lrs*"}, ["lrs-2", "lrs-1"]),
        ({"since": "2d"}, ["lrs-2", "lrs-1"]),
        ({"since": "1999-01-01"}, ["lrs-2", "lrs-1", "old"]),
        ({"sort": "loss"}, ["old", "lrs-2", "lrs-1"]),
        ({"sort": "name", "lines": 2}, ["lrs-1", "lrs-2"]),
        ({"state": "RUNNING"}, []),
    ],
)
def test_the_list_is_filtered_and_sorted(
    program: Program, cluster: Cluster, params: dict[str, typing.Any], found: list[str]
):
    cluster.submitted = write_result
    for name, state, loss in (
        ("old", "COMPLETED", 0.1),
        ("lrs-1", "FAILED", None),
        ("lrs-2", "COMPLETED", 0.5),
    ):
        cluster.states = [(state, 0)]
        program.run("submit-ddp", workload="smoke", run=name)
        folder = program.workspace / "runs" / name
        if loss is None:
            (folder / "control" / f"{cluster.jobs[-1].job_id}.r0.outcome").write_text(
                '{"outcome": "failed"}'
            )
            (folder / "metrics.jsonl").unlink()
            (folder / "summary.json").unlink()
        else:
            (folder / "metrics.jsonl").write_text(
                f'{{"kind": "step", "step": 16, "loss": {loss}}}\n'
            )
    for path in (program.workspace / "runs" / "old").rglob("*"):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    assert [row[0] for row in rows(program, **params)[1:]] == found


def test_half_written_and_foreign_folders_break_neither_list_nor_show(program: Program):
    runs = program.workspace / "runs"
    folder = left_by_jobs.leave_training(program, "torn")
    (folder / "summary.json").write_text('{"last_loss": 1')
    (folder / "config.json").write_text("[]")
    (folder / "control" / "7.r0.outcome").write_text("")
    (folder / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 3, "loss": 2.5}\n{"kind": "step", "step": 4, "lo'
    )
    (runs / "notes").mkdir()
    (runs / "notes" / "todo.txt").write_text("x")
    (runs / "away").symlink_to("/etc")
    (runs / "file").write_text("x")
    os.mkfifo(runs / "notes" / "metrics.jsonl")
    (runs / "sum").mkdir()
    (runs / "sum" / "summary.json").write_text(
        '{"last_loss": {"a": 1}, "best_loss": "\\u001b[31mred", "steps": [1]}'
    )
    results = program.run("list-runs")
    assert results["count"] == "2"
    assert results["runs"].replace("\n", "").isprintable()
    assert "torn  gpt   UNKNOWN  -      3     2.5" in results["runs"]
    shown = program.run("show-run", run="torn")
    assert shown["state"] == "UNKNOWN"
    assert shown["reason"] == "attempt 7.r0 left no outcome, and Slurm no longer knows its job"
    assert shown["metrics"] == "1 records, loss 2.5000 at step 3"
    assert program.run("show-run", run="sum")["metrics"] == "none yet"


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"lines": 0}, "lines: 0 is not allowed; a whole number from 1 to 1000"),
    ],
)
def test_a_bad_option_of_the_list_is_refused_in_one_line(
    program: Program, params: dict[str, typing.Any], line: str
):
    runs = str(program.workspace / "runs")
    assert program.fails("list-runs", **params) == line.replace("{runs}", runs)


EVERYONES = """\
41|ada|physics|normal|PENDING|5012|2|0:00|1:00:00|N/A|Priority||waits|
40|bob|ml|normal|PENDING|9001|4|0:00|UNLIMITED|0-3%2|Resources||sweep|
42|eve|N/A|low|RUNNING|4500|1|7:12|30:00|N/A|None|slurmd-1|odd|name
with a break
"""


def test_everyone_s_jobs_show_their_priority_and_in_words_why_they_wait(
    program: Program, cluster: Cluster
):
    cluster.everyones = EVERYONES
    head, *lines = program.run("list-runs", everyone=True)["jobs"].splitlines()
    assert head.split() == (
        "JOB USER ACCOUNT QOS PRIORITY STATE NODES ELAPSED LIMIT RUN NODELIST/REASON".split()
    )
    assert [line.split(maxsplit=10) for line in lines] == [
        "42 eve - low 4500 RUNNING 1 7:12 30:00 odd|name slurmd-1".split(),
        [
            *"41 ada physics normal 5012 PENDING 2 0:00 1:00:00 waits".split(),
            "jobs of higher priority are before it",
        ],
        [
            *"40 bob ml normal 9001 PENDING 4 0:00 UNLIMITED sweep-0-3%2".split(),
            "it is next, and waits for nodes to be free",
        ],
    ]
    assert program.record["jobs"][0]["waits_for"] == ""
    assert program.record["jobs"][2]["priority"] == 9001


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"state": "PENDING"}, [41, 40]),
        ({"name": "w*"}, [41]),
        ({"lines": 1}, [42]),
    ],
)
def test_everyone_s_jobs_are_filtered(
    program: Program, cluster: Cluster, params: dict[str, typing.Any], found: list[int]
):
    cluster.everyones = EVERYONES
    program.run("list-runs", everyone=True, **params)
    assert [job["job_id"] for job in program.record["jobs"]] == found


def test_everyone_s_jobs_need_slurm(program: Program, cluster: Cluster):
    cluster.silent = 9
    assert program.fails("list-runs", everyone=True).startswith("Slurm: Unable to contact slurm")


def test_jobs_that_ddp_did_not_submit_are_listed_as_jobs(program: Program, cluster: Cluster):
    cluster.states = [("RUNNING", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    mine = cluster.jobs[0]
    plain = dataclasses.replace(mine, job_id=70, name="own.sbatch")
    ended = dataclasses.replace(plain, job_id=71, name="ended", states=[("COMPLETED", 0)])
    cluster.jobs += [plain, ended]
    table = rows(program)
    assert [row[:3] for row in table[1:]] == [
        ["own.sbatch", "job", "RUNNING"],
        ["a", "smoke", "RUNNING"],
    ]
    assert {row[8] for row in table[1:]} == {"00:00:07"}
    assert [(job["job_id"], job["name"]) for job in program.record["jobs"]] == [(70, "own.sbatch")]
    assert program.record["count"] == 1, "of runs"
    assert [row[0] for row in rows(program, name="a*")[1:]] == ["a"]
