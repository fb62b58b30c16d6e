"""list-runs, show-run, compare-runs: on whole runs, on half-written ones, and among what is no run at all."""

import collections
import contextlib
import json
import os
import pathlib
import typing

import pytest
import run_verbs
import yaml
from cluster import Cluster, Job
from harness import ActionFailedError, Trainer
from left_by_jobs import write_result

from ddp.run import catalog, folder

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


@pytest.fixture
def ready(ready: Trainer) -> Trainer:  # without the charm's words
    return run_verbs.of(ready)


def leave(
    where: Trainer, name: str, *, job_id: int | None = 7, rate: float = 100.0, **config: object
) -> pathlib.Path:
    """Leave in the workspace what a finished training of 40 steps leaves."""
    folder = where.workspace / "runs" / name
    for part in ("control", "logs", "epoch-0001"):
        (folder / part).mkdir(parents=True)
    records = [{"kind": "step", "step": step, "loss": 4 - 3 * step / 40} for step in range(1, 41)]
    evals = [
        {"kind": "eval", "step": 20, "val_loss": 2.75},
        {"kind": "eval", "step": 40, "val_loss": 2.9},
    ]
    figures = {
        "steps": 40,
        "last_loss": 1.0,
        "best_loss": 2.75,
        "tokens_per_second": rate,
        "nodes": 2,
    }
    files: dict[str, object] = {
        "job.json": {
            "job_id": job_id,
            "kind": "gpt",
            "submitted": "2026-11-20T18:00:00Z",
            "request": {"num_nodes": 2},
        },
        "config.json": {
            "lr": 0.003,
            "model": "tiny",
            "run_dir": str(folder),
            "batch": None,
            **config,
        },
        "epoch-0001/manifest.json": {"meta": {"step": 40}},
        "summary.json": {
            "workload": "gpt",
            "state": "done",
            "ranks": [{"device": "cpu"}],
            **figures,
        },
        f"control/{job_id}.r0.outcome": {"outcome": "done", "step": 40},
    }
    for path, content in files.items():
        (folder / path).write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [*records, *evals])
    )
    (folder / "latest").symlink_to("epoch-0001")
    (folder / "best").symlink_to("epoch-0001")
    (folder / "loss.png").write_bytes(b"PNG")
    return folder


def test_half_written_and_foreign_folders_do_no_harm(ready: Trainer):
    runs = ready.workspace / "runs"
    folder = leave(ready, "torn")
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
    results = ready.run("list-runs")
    assert results["count"] == "2"
    assert results["runs"].replace("\n", "").isprintable()
    assert "torn  gpt   UNKNOWN  -      3     2.5" in results["runs"]
    shown = ready.run("show-run", run="torn")
    assert shown["state"] == "UNKNOWN"
    assert shown["reason"] == "attempt 7.r0 left no outcome, and Slurm no longer knows its job"
    assert shown["metrics"] == "1 records, loss 2.5000 at step 3"
    assert ready.run("show-run", run="sum")["metrics"] == "none yet"


def test_a_run_is_shown_with_settings_figures_and_curve(ready: Trainer):
    folder = leave(ready, "night")
    shown = ready.run("show-run")
    assert shown["run"] == "night"
    assert shown["state"] == "COMPLETED"
    assert "lr=0.003" in shown["settings"].split()
    assert "num_nodes=2" in shown["settings"].split()
    assert "run_dir" not in shown["settings"]
    assert shown["metrics"] == "42 records, loss 1.0000 at step 40, validation loss 2.9000"
    assert shown["best"] == "validation loss 2.7500 at step 20"
    assert shown["checkpoints"] == "epoch-0001  step 40 (latest) (best)"
    assert shown["attempts"] == "7.r0: done, step 40"
    assert shown["curve"] == str(folder / "loss.png")
    assert shown["tokens-per-second"] == "100"
    lines = shown["curve-text"].splitlines()
    assert len(lines) == 12
    assert lines[1].startswith("3.92")
    assert shown["curve-text"].count("o") == 2
    assert lines[-1].split() == ["1", "40"]


def test_two_runs_are_compared(ready: Trainer):
    leave(ready, "night", rate=100.0, lr=0.003)
    leave(ready, "dawn", rate=150.0, lr=0.001, warmup=5)
    results = ready.run("compare-runs", runs="night, dawn")
    assert [line.split() for line in results["results"].splitlines()] == [
        ["RUN", "STATE", "LR", "WARMUP", "STEPS", "LOSS", "BEST", "PER-SECOND"],
        ["night", "COMPLETED", "0.003", "-", "40", "1", "2.75", "100"],
        ["dawn", "COMPLETED", "0.001", "5", "40", "1", "2.75", "*", "150"],
    ]
    assert (results["differing"], results["best-run"]) == ("lr, warmup", "dawn")


def test_a_recipe_that_changed_is_shown_and_compared(ready: Trainer):
    """Both end with one rate, and one had it from step 218 on only."""
    changes = [
        {"setting": "lr", "before": 0.003, "after": 0.001, "step": 218},
        {"setting": "weight_decay", "before": 0.1, "after": 0.2, "step": 218},
        {"setting": "lr", "before": 0.001, "after": 0.0005, "step": 300},
    ]
    leave(ready, "night", lr=0.0005, weight_decay=0.2, changes=changes)
    leave(ready, "dawn", lr=0.0005, weight_decay=0.2)
    assert ready.run("show-run", run="night")["changed"].splitlines() == [
        "lr 0.003 -> 0.001 from step 218",
        "weight-decay 0.1 -> 0.2 from step 218",
        "lr 0.001 -> 0.0005 from step 300",
    ]
    assert "changed" not in ready.run("show-run", run="dawn")
    compared = ready.run("compare-runs", runs="night, dawn")
    assert compared["differing"] == "lr, weight_decay"
    assert "0.003, 0.001 from step 218, 0.0005 from" in compared["results"]
    assert "0.1, 0.2 from step 218" in compared["results"]


def test_ranks_that_never_connected_are_remarked_by_show_and_list(ready: Trainer):
    folder = leave(ready, "night")
    remark = "the 2 ranks never connected: each trained alone"
    (folder / "control" / "7.r0.remark").write_text(f"{remark}, unless \x1b[31m; num_nodes=2\n")
    shown = ready.run("show-run", run="night")
    assert (shown["state"], shown["remark"]) == (
        "COMPLETED",
        f"{remark}, unless ?[31m; num_nodes=2",
    )
    assert ready.run("list-runs")["runs"].splitlines()[1].endswith(remark)


@pytest.mark.parametrize(
    "changes",
    [
        7,
        "lr",
        [7, None, "x"],
        [{"setting": "lr"}],
        [{"setting": {}, "step": 1}],
        [{"setting": "lr", "step": 1}],
    ],
)
def test_whatever_stands_where_changes_are_recorded_the_run_is_shown(
    ready: Trainer, changes: object
):
    leave(ready, "night", changes=changes)
    leave(ready, "dawn")
    assert ready.run("show-run", run="night")["state"] == "COMPLETED"
    assert "night" in ready.run("compare-runs", runs="night, dawn")["results"]


def test_what_slurm_has_forgotten_is_asked_of_the_accounting(ready: Trainer, cluster: Cluster):
    folder = leave(ready, "lost", job_id=99)
    (folder / "control" / "99.r0.outcome").unlink()
    assert ready.run("show-run")["state"].startswith("UNKNOWN")
    cluster.accounting = f"99|{cluster.user}|NODE_FAIL|1:0|2|slurmd|00:10:00|UNLIMITED|2026-11-20T18:48:22|slurmd-[0-1]|lost\n"
    assert ready.run("show-run")["state"] == "NODE_FAIL"
    assert "NODE_FAIL" in ready.run("list-runs")["runs"]


def test_a_preempted_run_says_from_where_it_goes_on(ready: Trainer):
    folder = leave(ready, "night")
    (folder / "control" / "7.r0.outcome").write_text('{"outcome": "preempted", "step": 17}')
    shown = ready.run("show-run")
    assert (shown["state"], shown["reason"]) == (
        "PREEMPTED",
        "job 7 PREEMPTED, exit code 1; it saved at step 17; to resume, submit it with the same options; "
        "ddp submit --run night",
    )


@pytest.mark.parametrize(("action", "params", "line"), CASES["what_cannot_be_is_refused"])
def test_what_cannot_be_is_refused(
    ready: Trainer, action: str, params: dict[str, typing.Any], line: str
):
    assert ready.fails(action, **params) == line.replace("{runs}", str(ready.workspace / "runs"))


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED"])
def test_the_answer_to_a_finished_run_carries_its_curve(
    ready: Trainer, cluster: Cluster, state: str
):
    cluster.submitted, cluster.states = write_result, [(state, 0 if state == "COMPLETED" else 256)]
    with contextlib.suppress(ActionFailedError):
        ready.run("submit-ddp", workload="smoke", wait=True)
    assert ready.results["curve-text"].splitlines()[-1].split() == ["16"]


# -- runs of other kinds, and what is no run ---------------------------------------------------------------------------


@pytest.fixture
def motley(ready: Trainer) -> Trainer:
    """A training, a benchmark, a preparation, a user's script, and a folder of notes."""
    leave(ready, "night")
    for name, kind in (("table", "collectives"), ("prepare-owt", "prepare"), ("mine", "script")):
        folder = ready.workspace / "runs" / name
        folder.mkdir()
        (folder / "job.json").write_text(
            json.dumps({"job_id": 9, "kind": kind, "submitted": "2026-11-20T18:00:00Z"})
        )
    (ready.workspace / "runs" / "notes").mkdir()
    (ready.workspace / "runs" / "notes" / "monday.md").touch()
    return ready


def test_what_is_no_training_is_shown_with_clear_words(motley: Trainer):
    shown_runs = {
        name: motley.run("show-run", run=name) for name in ("table", "prepare-owt", "mine")
    }
    assert {name: shown["kind"] for name, shown in shown_runs.items()} == {
        "table": "collectives",
        "prepare-owt": "prepare",
        "mine": "script",
    }
    assert shown_runs["table"]["metrics"] == ("none: it is a benchmark; its output: ddp log table")
    assert shown_runs["prepare-owt"]["metrics"].startswith(
        "none: it is the preparation of a dataset; "
    )
    assert shown_runs["mine"]["metrics"] == "none: the script wrote no metrics.jsonl"
    assert not [
        name
        for name in shown_runs
        if "curve-text" in shown_runs[name] or "best" in shown_runs[name]
    ]
    rows = {
        line.split()[0]: line.split()[1:3]
        for line in motley.run("list-runs")["runs"].splitlines()[1:]
    }
    assert rows["table"] == ["collectives", "UNKNOWN"]
    assert "notes" not in rows
    line = f"run: {motley.workspace}/runs/notes is a folder without a run's files; ddp list"
    assert motley.fails("show-run", run="notes") == line


def test_what_has_no_loss_is_not_compared(motley: Trainer):
    for name, what in (("table", "a benchmark"), ("prepare-owt", "the preparation of a dataset")):
        assert motley.fails("compare-runs", runs=f"night,{name}") == (
            f"runs: {name} is {what}, which has no loss to compare; ddp show {name}"
        )
    assert "kind" in motley.run("compare-runs", runs="night,mine")["differing"]


@pytest.mark.parametrize(("params", "line"), CASES["a_run_of_another_kind_is_not_gone_on_with"])
def test_a_run_of_another_kind_is_not_gone_on_with(
    motley: Trainer, cluster: Cluster, params: dict[str, typing.Any], line: str
):
    before = motley.files()
    assert motley.fails("submit-ddp", **params) == line.replace(
        "{runs}", str(motley.workspace / "runs")
    )
    assert motley.files() == before
    assert not cluster.changes


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"step": 1e999, "loss": 1}',
        '{"step": [], "loss": {}}',
        "null",
        '"x"',
        "\x00",
    ],
)
def test_no_file_of_a_run_makes_the_answer_fail(ready: Trainer, text: str):
    folder = leave(ready, "odd")
    for name in (
        "summary.json",
        "config.json",
        "metrics.jsonl",
        "tracking.json",
        "control/7.r0.outcome",
    ):
        (folder / name).write_text(text)
    (folder / "epoch-0001" / "manifest.json").write_text(text)
    leave(ready, "even")
    assert ready.run("show-run", run="odd")["metrics"] == "none yet"
    assert ready.run("list-runs")["count"] == "2"
    assert ready.run("compare-runs", runs="odd,even")["runs"] == "odd, even"


def test_a_loss_that_became_nan_is_reported(ready: Trainer):
    folder = leave(ready, "burst")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '{"kind": "step", "step": 41, "loss": NaN}\n{"kind": "step", "step": 42, "loss": Infinity}\n'
        )
    (folder / "summary.json").write_text(
        '{"last_loss": NaN, "tokens_per_second": 1.0, "steps": 42}'
    )
    shown = ready.run("show-run", run="burst")["metrics"]
    assert shown.endswith(
        "loss 1.0000 at step 40, validation loss 2.9000, the loss is not finite from step 41 on"
    )
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 3.5}\n')
    assert ready.run("show-run", run="burst")["metrics"] == "2 records, loss 3.5000 at step 2"


# -- sweeps ------------------------------------------------------------------------------------------------------------


def sweep(ready: Trainer, cluster: Cluster) -> dict[str, Job]:
    """A sweep of five: two ended well, one failed, one works, and one waits."""
    cluster.states = [("PENDING", 0)]
    ready.run("submit-sweep", grid="lr=1,2,3,4,5", args="--steps 16", name="s")
    array = cluster.job(40)
    found = {"array": array}
    states = {0: ("COMPLETED", 0), 1: ("COMPLETED", 0), 2: ("FAILED", 256), 3: ("RUNNING", 0)}
    for number, state in states.items():
        folder = ready.workspace / "runs" / f"s-{number}"
        (folder / "control" / "job").write_text(f"{41 + number}\n")
        job = Job(
            41 + number,
            cluster.user,
            "s",
            folder / "job.sbatch",
            "",
            [state],
            task=str(number),
            array_id=40,
        )
        if number < 2:
            write_result(job, last_loss=2.0 - number, best_loss=2.5 + number, workload="gpt")
        (folder / "config.json").write_text(json.dumps({"lr": float(number + 1), "steps": 16}))
        cluster.jobs.append(job)
        found[str(number)] = job
    array.task = "4"
    array.states = [("PENDING", 0)]
    return found


def test_a_sweep_is_counted_as_a_whole_and_by_its_runs(ready: Trainer, cluster: Cluster):
    found = sweep(ready, cluster)
    for shown in (ready.run("show-run", run="s"), ready.run("show-run", run="40")):
        assert shown["state"] == "RUNNING"
        assert shown["states"] == "2 COMPLETED, 1 FAILED, 1 PENDING, 1 RUNNING"
        assert (shown["best-run"], shown["best-loss"], shown["best-options"]) == (
            "s-0",
            "2.5",
            "lr=1",
        )
        assert [line.split()[0] for line in shown["runs"].splitlines() if "*" in line] == ["s-0"]
    rows = {
        line.split()[0]: line.split()[1:3]
        for line in ready.run("list-runs")["runs"].splitlines()[1:]
    }
    assert rows == {
        "s": ["sweep", "RUNNING"],
        "s-0": ["gpt", "COMPLETED"],
        "s-1": ["gpt", "COMPLETED"],
        "s-2": ["gpt", "FAILED"],
        "s-3": ["gpt", "RUNNING"],
        "s-4": ["gpt", "PENDING"],
    }
    assert ready.run("show-run", run="s-3")["state"] == "RUNNING"
    found["array"].task = "4-7%2"
    shown = ready.run("show-run", run="s-4")
    assert (shown["state"], shown["reason"]) == ("PENDING", "Resources"), (
        "those that wait together have one record"
    )
    for name in ("3", "array"):
        found[name].states = [("COMPLETED", 0)]
    assert ready.run("show-run", run="s")["state"] == "FAILED", "one of its runs did"


def test_a_sweeps_run_is_known_by_what_it_wrote_once_slurm_has_forgotten_it(
    ready: Trainer, cluster: Cluster
):
    sweep(ready, cluster)
    outcome = {"outcome": "failed", "error": "unrecognized arguments: --x"}
    (ready.workspace / "runs" / "s-2" / "control" / "43.r0.outcome").write_text(json.dumps(outcome))
    assert ready.run("show-run", run="s-2")["state"] == "FAILED"
    cluster.jobs.clear()
    assert ready.run("show-run", run="s-2")["state"] == "FAILED"
    rows = {
        line.split()[0]: line.split()[2] for line in ready.run("list-runs")["runs"].splitlines()[1:]
    }
    assert (rows["s-0"], rows["s-2"]) == ("COMPLETED", "FAILED")


@pytest.mark.parametrize(("states", "whole"), CASES["what_a_sweep_comes_to"])
def test_what_a_sweep_comes_to(states: dict[str, int], whole: str):
    assert catalog.whole(collections.Counter(states)) == whole


def test_a_sweeps_runs_are_compared_with_what_differs(ready: Trainer, cluster: Cluster):
    sweep(ready, cluster)
    results = ready.run("compare-runs", runs="s")
    head, *rows = [line.split() for line in results["results"].splitlines()]
    assert head == ["RUN", "STATE", "LR", "STEPS", "LOSS", "BEST", "PER-SECOND"]
    assert [row[:3] for row in rows] == [
        ["s-0", "COMPLETED", "1"],
        ["s-1", "COMPLETED", "2"],
        ["s-2", "FAILED", "3"],
        ["s-3", "RUNNING", "4"],
        ["s-4", "PENDING", "5"],
    ]
    assert rows[0][3:] == ["16", "0.5", "2.5", "*", "56118.5"]
    assert rows[1][3:] == ["16", "0.5", "3.5", "56118.5"]
    assert (results["best-run"], results["best-loss"]) == ("s-0", "2.5"), (
        "the lowest validation loss"
    )
    assert results["differing"].split(", ")[0] == "lr"
    leave(ready, "night", lr=9.0)
    both = [
        line.split() for line in ready.run("compare-runs", runs="s,night")["results"].splitlines()
    ]
    last = {line[0]: line[-1] for line in both}  # too wide for a line for each run
    assert (last["RUN"], last["STATE"], last["LR"]) == ("night", "COMPLETED", "9")
    many = [f"m{number}" for number in range(12)]
    for name in many:
        leave(ready, name, a=f"{name:x<40}", b=f"{name:x<40}", c=f"{name:x<40}")
    assert (
        ready.run("compare-runs", runs=",".join(many))["results"].splitlines()[1].startswith("m0 ")
    )
    assert ready.fails("compare-runs", runs="s,nope").startswith("there is no run 'nope' in ")


def leave_script(
    where: Trainer, name: str, losses: list[float], *, done: float | None = None, **more: object
) -> None:
    """Leave in the workspace what a script leaves that logs its loss: metrics.jsonl and an outcome, no summary."""
    folder = where.workspace / "runs" / name
    for part in ("control", "logs"):
        (folder / part).mkdir(parents=True)
    lines = [
        {"step": at, "loss": loss, "time": 100 + at / 4, **more}
        for at, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "job.json").write_text(json.dumps({"job_id": 7, "kind": "script"}))
    (folder / "control" / "7.r0.outcome").write_text(
        json.dumps({"outcome": "done", "step": len(losses), "loss": done})
    )


@pytest.mark.parametrize(
    ("losses", "done", "more", "cells"),
    [
        ([3.0, 1.0, 2.0], None, {}, ["3", "2", "1", "4", "steps/s"]),
        ([3.0, 1.0, 2.0], 0.25, {}, ["3", "0.25", "1", "4", "steps/s"]),
        (
            [3.0, 2.0],
            None,
            {"val_loss": 1.5, "samples_per_second": 8.0},
            ["2", "2", "1.5", "8", "samples/s"],
        ),
        (
            [2.0] * 5000 + [5.0],
            None,
            {"best": {"loss": [7, 0.5]}},
            ["5001", "5", "0.5", "4", "steps/s"],
        ),
        ([], 0.75, {}, ["0", "0.75", "-", "-"]),
    ],
)
def test_a_scripts_numbers_are_in_every_view(
    ready: Trainer,
    losses: list[float],
    done: float | None,
    more: dict[str, object],
    cells: list[str],
):
    leave_script(ready, "own", losses, done=done, **more)
    leave_script(ready, "worse", [9.0], done=9.0)
    leave_script(ready, "lost", [0.125, 99.0])
    by_best = [
        line.split()[0] for line in ready.run("list-runs", sort="best")["runs"].splitlines()[1:]
    ]
    assert by_best == (["lost", "own", "worse"] if losses else ["lost", "worse", "own"]), (
        "as the column BEST has it"
    )
    rows = {line.split()[0]: line.split() for line in ready.run("list-runs")["runs"].splitlines()}
    assert rows["own"][4 : 4 + len(cells)] == cells
    compared = ready.run("compare-runs", runs="own,worse")
    assert compared["best-run"] == "own"
    assert compared["results"].splitlines()[1].replace(" *", "").split()[-4:] == [*cells, "-"][:4]
    shown = ready.run("show-run", run="own")
    assert [shown[name] for name in ("steps", "loss")] == cells[:2]
    assert ("curve-text" in shown) == bool(losses)
    figures = folder.read(ready.workspace / "runs" / "own").figures
    assert [f"{figures[name]:g}" for name in ("steps", "last_loss")] == cells[:2]


def test_a_sweep_of_scripts_marks_the_run_with_the_lowest_last_loss(ready: Trainer):
    for name, done in (("s-0", 0.5), ("s-1", 0.25)):
        leave_script(ready, name, [0.1, 9.0], done=done)
        record = {"kind": "script", "sweep": "s", "choice": '{"lr": 1}', "job_id": None}
        (ready.workspace / "runs" / name / "job.json").write_text(json.dumps(record))
        (ready.workspace / "runs" / name / "control" / "job").write_text("7\n")
    (ready.workspace / "runs" / "s").mkdir()
    (ready.workspace / "runs" / "s" / "job.json").write_text(
        json.dumps({"kind": "sweep", "count": 2, "job_id": 7})
    )
    shown = ready.run("show-run", run="s")
    assert (shown["best-run"], shown["best-loss"]) == ("s-1", "0.25")
    assert [line.split()[3:6] for line in shown["runs"].splitlines()[1:]] == [
        ["2", "0.5", "lr=1"],
        ["2", "0.25", "*"],
    ]
