"""list-runs, show-run, compare-runs: on whole runs, on half-written ones, and among what is no run at all."""

import json
import os
import pathlib
import typing

import pytest
from cluster import Cluster
from test_charm import Trainer, ready, trainer, write_result  # noqa: F401 # pyright: ignore[reportUnusedImport] - fixtures

import trainer_child
import trainer_runs


def leave(
    where: Trainer, name: str, *, job_id: int | None = 7, steps: int = 40, rate: float = 100.0, **config: object
) -> pathlib.Path:
    """Leave in the workspace what a finished training leaves."""
    folder = where.workspace / "runs" / name
    for part in ("control", "logs", "epoch-0001"):
        (folder / part).mkdir(parents=True)
    job = {
        "format": 1,
        "job_id": job_id,
        "kind": "gpt",
        "submitted": "2026-11-20T18:00:00Z",
        "args": "",
        "request": {"num_nodes": 2},
    }
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "config.json").write_text(
        json.dumps({"lr": 0.003, "model": "tiny", "run_dir": str(folder), "batch": None, **config})
    )
    records = [{"kind": "step", "step": step, "loss": 4 - 3 * step / steps} for step in range(1, steps + 1)]
    evals = [{"kind": "eval", "step": steps // 2, "val_loss": 2.75}, {"kind": "eval", "step": steps, "val_loss": 2.9}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*records, *evals]))
    (folder / "epoch-0001" / "manifest.json").write_text(json.dumps({"meta": {"step": steps}}))
    (folder / "latest").symlink_to("epoch-0001")
    (folder / "best").symlink_to("epoch-0001")
    (folder / "loss.png").write_bytes(b"PNG")
    summary = {"workload": "gpt", "state": "done", "world_size": 2, "nodes": 2, "steps": steps, "last_loss": 1.0, "best_loss": 2.75,
               "tokens_per_second": rate, "ranks": [{"device": "cpu"}]}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "control" / f"{job_id}.r0.outcome").write_text('{"outcome": "done", "step": 40}')
    return folder


def test_runs_are_listed_the_newest_first(ready: Trainer, cluster: Cluster):  # noqa: F811
    os.utime(leave(ready, "old") / "job.json", (1, 1))
    leave(ready, "new")
    results = ready.run("list-runs")
    lines = results["runs"].splitlines()
    assert results["count"] == "2"
    assert lines[0].split()[:3] == ["RUN", "KIND", "STATE"]
    assert [line.split()[0] for line in lines[1:]] == ["new", "old"]
    assert lines[1].split()[1:8] == ["gpt", "COMPLETED", "7", "2", "40", "1", "2.75"]
    assert ready.run("list-runs", lines=1)["runs"].count("\n") == 1


def test_an_empty_workspace_has_no_runs(ready: Trainer):  # noqa: F811
    assert ready.run("list-runs")["count"] == "0"
    assert "there is no run in" in ready.fails("show-run")
    assert "0 runs with results; two are needed" in ready.fails("compare-runs")


def test_half_written_and_foreign_folders_do_no_harm(ready: Trainer):  # noqa: F811
    runs = ready.workspace / "runs"
    folder = leave(ready, "torn")
    (folder / "summary.json").write_text('{"last_loss": 1')
    (folder / "config.json").write_text("[]")
    (folder / "control" / "7.r0.outcome").write_text("")
    (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 3, "loss": 2.5}\n{"kind": "step", "step": 4, "lo')
    (runs / "notes").mkdir()
    (runs / "notes" / "todo.txt").write_text("x")
    (runs / "away").symlink_to("/etc")
    (runs / "file").write_text("x")
    os.mkfifo(runs / "notes" / "metrics.jsonl")
    (runs / "sum").mkdir()
    (runs / "sum" / "summary.json").write_text('{"last_loss": {"a": 1}, "best_loss": "\\u001b[31mred", "steps": [1]}')
    results = ready.run("list-runs")
    assert results["count"] == "2"
    assert results["foreign"].startswith("1 folders")
    assert results["runs"].replace("\n", "").isprintable()
    assert "torn  gpt   UNKNOWN  7    -      3     2.5" in results["runs"]
    shown = ready.run("show-run", run="torn")
    assert shown["state"] == "UNKNOWN (it wrote no outcome, and Slurm has forgotten its job)"
    assert shown["metrics"] == "1 records, the last at step 3 with loss 2.5000"
    assert ready.run("show-run", run="sum")["metrics"] == "none yet"


def test_a_run_is_shown_with_settings_figures_and_curve(ready: Trainer):  # noqa: F811
    folder = leave(ready, "night")
    shown = ready.run("show-run")
    assert shown["run"] == "night"
    assert shown["state"] == "COMPLETED"
    assert "lr: 0.003" in shown["settings"].splitlines()
    assert "num_nodes: 2" in shown["settings"].splitlines()
    assert "run_dir" not in shown["settings"]
    assert shown["metrics"] == "42 records, the last at step 40 with loss 1.0000; validation loss 2.9000"
    assert shown["best"] == "validation loss 2.7500 at step 20"
    assert shown["checkpoints"] == "epoch-0001  step 40 (latest) (best)"
    assert shown["attempts"] == "7.r0: done, step 40"
    assert shown["curve"] == str(folder / "loss.png")
    assert shown["tokens-per-second"] == "100"
    lines = shown["curve-text"].splitlines()
    assert len(lines) == 14
    assert "*" in lines[0]
    assert lines[0].startswith("   3.9250 |*")
    assert shown["curve-text"].count("o") == 2
    assert lines[-1].split() == ["1", "40", "step"]


def test_two_runs_are_compared(ready: Trainer):  # noqa: F811
    leave(ready, "night", rate=100.0, lr=0.003)
    leave(ready, "dawn", rate=150.0, lr=0.001, warmup=5)
    results = ready.run("compare-runs", runs="night, dawn")
    assert [line.split() for line in results["settings"].splitlines()] == [
        ["night", "dawn"], ["lr", "0.003", "0.001"], ["warmup", "-", "5"],
    ]  # fmt: skip
    table = {line.split()[0]: line.split()[1:] for line in results["results"].splitlines()}
    assert table["tokens-per-second"] == ["100", "150", "*", "(1.500x)"]
    assert table["state"] == ["COMPLETED", "COMPLETED"]
    assert len(results["losses"].splitlines()) == 6
    assert results["losses"].splitlines()[1].split() == ["1", "3.9250", "3.9250"]
    assert set(ready.run("compare-runs")["runs"].split(", ")) == {"night", "dawn"}


def test_a_job_at_work_decides_the_state(ready: Trainer, cluster: Cluster):  # noqa: F811
    cluster.states = [("RUNNING", 0)]
    run = ready.run("submit-ddp", workload="smoke")["run"]
    write_result(cluster.jobs[0])  # of an attempt before
    assert ready.run("show-run")["state"] == "RUNNING"
    assert "RUNNING" in ready.run("list-runs")["runs"]
    cluster.jobs[0].states = [("COMPLETED", 0)]
    assert ready.run("show-run", run=run)["state"] == "COMPLETED"


def test_what_slurm_has_forgotten_is_asked_of_the_accounting(ready: Trainer, cluster: Cluster):  # noqa: F811
    folder = leave(ready, "lost", job_id=99)
    (folder / "control" / "99.r0.outcome").unlink()
    assert ready.run("show-run")["state"].startswith("UNKNOWN")
    cluster.accounting = (
        f"99|{cluster.user}|NODE_FAIL|1:0|2|slurmd|00:10:00|UNLIMITED|2026-11-20T18:48:22|slurmd-[0-1]|lost\n"
    )
    assert ready.run("show-run")["state"] == "NODE_FAIL"
    assert "NODE_FAIL" in ready.run("list-runs")["runs"]


def test_a_preempted_run_says_from_where_it_goes_on(ready: Trainer):  # noqa: F811
    folder = leave(ready, "night")
    (folder / "control" / "7.r0.outcome").write_text('{"outcome": "preempted", "step": 17}')
    assert ready.run("show-run")["state"] == "PREEMPTED (saved at step 17)"


@pytest.mark.parametrize(
    ("action", "params", "line"),
    [
        ("show-run", {"run": "nope"}, "run: there is no run 'nope' in {runs}; see: juju run trainer/0 list-runs"),
        ("show-run", {"run": "../x"}, "run: '../x' is not allowed; only letters, digits and . _ -, beginning with a letter or digit"),
        ("compare-runs", {"runs": "one"}, "runs: 1 named; two to eight different ones, separated by commas"),
        ("compare-runs", {"runs": "one,one"}, "runs: 1 named; two to eight different ones, separated by commas"),
        ("compare-runs", {"runs": "a,b,c,d,e,f,g,h,i"}, "runs: 9 named; two to eight different ones, separated by commas"),
        ("compare-runs", {"runs": "a,$(id)"}, "runs: 'a,$(id)' is not allowed; names of runs, separated by commas or blanks"),
        ("compare-runs", {"runs": "one,two"}, "run: there is no run 'one' in {runs}; see: juju run trainer/0 list-runs"),
        ("list-runs", {"lines": 0}, "lines: 0 is not allowed; a whole number from 1 to 1000"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(ready: Trainer, action: str, params: dict[str, typing.Any], line: str):  # noqa: F811
    assert ready.fails(action, **params) == line.replace("{runs}", str(ready.workspace / "runs"))


def test_a_curve_of_millions_of_steps_is_read_in_samples(tmp_path: pathlib.Path):
    folder = tmp_path / "runs" / "long"
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(120_000):
            file.write(json.dumps({"kind": "step", "step": step, "loss": 10 - step / 20_000, "lr": 0.0003}) + "\n")
    found = trainer_child.read_result(str(tmp_path), "long")
    assert len(found["steps"]) <= 2001
    assert found["steps"][0][0] == 0
    assert found["steps"][-1][0] == 119_999
    assert found["lines"] == pytest.approx(120_000, rel=0.1)
    curve = trainer_runs.text_curve([(step, loss) for step, loss in found["steps"]])
    assert curve.splitlines()[0].lstrip().startswith("9.9")


def test_a_curve_of_one_point_and_of_none():
    assert trainer_runs.text_curve([]) == ""
    assert "1.0000 |*" in trainer_runs.text_curve([(5, 1.0)])
