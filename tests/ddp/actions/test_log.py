"""run-log: a job's last lines, new lines as they come, and logs that do not exist."""

import pytest
from cluster import Cluster
from left_by_jobs import write_result
from run_verbs import Program

from ddp.actions import log as run_log


def test_a_log_is_shown(program: Program, cluster: Cluster):
    cluster.submitted, cluster.states = write_result, [("COMPLETED", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    path = program.workspace / "runs" / "a" / "logs" / "40.out"
    wanted = {"job-id": "40", "run": "a", "state": "COMPLETED", "log": str(path), "lines": "2"}
    wanted["text"] = "[TRAIN] step=16\n[DONE] ok"
    for named in ({}, {"run": "40"}, {"run": 40}, {"run": "a"}):
        assert program.run("run-log", **named) == wanted
    assert program.record["lines"] == ["[TRAIN] step=16", "[DONE] ok"]
    assert program.run("run-log", lines=1)["text"] == "[DONE] ok"
    cluster.forgets = True
    assert "state" not in program.run("run-log", run="40")


def test_a_log_is_followed_to_the_jobs_end(
    program: Program, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    program.run("submit-ddp", run="first")
    job = cluster.jobs[0]
    job.states = [("PENDING", 0), ("PENDING", 0), ("RUNNING", 0), ("RUNNING", 0), ("COMPLETED", 0)]
    log = job.script.parent / "logs" / "40.out"
    pieces = iter(["one\ntw", "o\nthree \x1b[2J\n", "last\n", ""])

    def pause(_: float) -> None:
        with log.open("a") as file:
            file.write(next(pieces))

    program.pause = pause
    results = program.run("run-log", run="first", follow=True, lines=2)
    assert program.log == ["job 40 PENDING (Resources)", "one", "two", "three ?[2J", "last"]
    assert results["text"].splitlines() == ["three ?[2J", "last"]


def test_a_log_is_followed_for_a_limited_time(
    program: Program, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    program.run("submit-ddp", run="first")
    cluster.jobs[0].states = [("RUNNING", 0)]
    (cluster.jobs[0].script.parent / "logs" / "40.out").write_text("one\n")
    clock = iter(range(0, 10000, 30))
    monkeypatch.setattr(run_log.time, "monotonic", lambda: float(next(clock)))
    assert program.run("run-log", run="first", follow=True)["text"] == "one"
    assert program.log == ["one"]


def test_a_log_that_does_not_exist_is_explained(program: Program, cluster: Cluster):
    place = program.workspace
    assert program.fails("run-log") == f"there is no run in {place}/runs yet; ddp submit"
    for name, line in (
        ("no", f"there is no run 'no' in {place}/runs"),
        ("9", f"run: no run in {place}/runs has job 9"),
    ):
        assert program.fails("run-log", run=name) == f"{line}; ddp list"
    cluster.states = [("PENDING", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    assert program.fails("run-log") == "job 40 has no output; it is PENDING; ddp show a"
    assert (
        program.fails("run-log", rank=3)
        == "job 40 has no output of rank 3; it is PENDING; ddp show a"
    )
    assert program.run("run-log", follow=True, follow_timeout=1)["lines"] == "0"
