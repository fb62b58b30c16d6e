"""compare-runs: the settings that differ, the results, and the best run."""

import typing

import left_by_jobs
import pytest
from cluster import Cluster
from run_verbs import Program

from ddp.run import folder


def test_two_runs_are_compared(program: Program):
    left_by_jobs.leave_training(program, "night", rate=100.0, lr=0.003)
    left_by_jobs.leave_training(program, "dawn", rate=150.0, lr=0.001, warmup=5)
    results = program.run("compare-runs", runs="night, dawn")
    assert [line.split() for line in results["results"].splitlines()] == [
        ["RUN", "STATE", "LR", "WARMUP", "STEPS", "LOSS", "BEST", "PER-SECOND"],
        ["night", "COMPLETED", "0.003", "-", "40", "1", "2.75", "100"],
        ["dawn", "COMPLETED", "0.001", "5", "40", "1", "2.75", "*", "150"],
    ]
    assert (results["differing"], results["best-run"]) == ("lr, warmup", "dawn")


def test_a_setting_that_changed_while_it_trained_is_shown_and_compared(program: Program):
    """Both end with one rate, and one had it from step 218 on only."""
    changes = [
        {"setting": "lr", "before": 0.003, "after": 0.001, "step": 218},
        {"setting": "weight_decay", "before": 0.1, "after": 0.2, "step": 218},
        {"setting": "lr", "before": 0.001, "after": 0.0005, "step": 300},
    ]
    left_by_jobs.leave_training(program, "night", lr=0.0005, weight_decay=0.2, changes=changes)
    left_by_jobs.leave_training(program, "dawn", lr=0.0005, weight_decay=0.2)
    assert program.run("show-run", run="night")["changed"].splitlines() == [
        "lr 0.003 -> 0.001 from step 218",
        "weight-decay 0.1 -> 0.2 from step 218",
        "lr 0.001 -> 0.0005 from step 300",
    ]
    assert "changed" not in program.run("show-run", run="dawn")
    compared = program.run("compare-runs", runs="night, dawn")
    assert compared["differing"] == "lr, weight_decay"
    assert "0.003, 0.001 from step 218, 0.0005 from" in compared["results"]
    assert "0.1, 0.2 from step 218" in compared["results"]


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
def test_a_damaged_record_of_changes_breaks_neither_show_nor_compare(
    program: Program, changes: object
):
    left_by_jobs.leave_training(program, "night", changes=changes)
    left_by_jobs.leave_training(program, "dawn")
    assert program.run("show-run", run="night")["state"] == "COMPLETED"
    assert "night" in program.run("compare-runs", runs="night, dawn")["results"]


def test_a_run_without_a_loss_is_refused(motley: Program):
    for name, what in (("table", "a benchmark"), ("prepare-owt", "the preparation of a dataset")):
        assert motley.fails("compare-runs", runs=f"night,{name}") == (
            f"runs: {name} is {what}, which has no loss to compare; ddp show {name}"
        )
    assert "kind" in motley.run("compare-runs", runs="night,mine")["differing"]


def test_the_runs_of_a_sweep_are_compared_by_its_grid(program: Program, cluster: Cluster):
    left_by_jobs.leave_sweep(program, cluster)
    results = program.run("compare-runs", runs="s")
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
    left_by_jobs.leave_training(program, "night", lr=9.0)
    both = [
        line.split() for line in program.run("compare-runs", runs="s,night")["results"].splitlines()
    ]
    last = {line[0]: line[-1] for line in both}  # too wide for a line for each run
    assert (last["RUN"], last["STATE"], last["LR"]) == ("night", "COMPLETED", "9")
    many = [f"m{number}" for number in range(12)]
    for name in many:
        left_by_jobs.leave_training(
            program, name, a=f"{name:x<40}", b=f"{name:x<40}", c=f"{name:x<40}"
        )
    assert (
        program.run("compare-runs", runs=",".join(many))["results"]
        .splitlines()[1]
        .startswith("m0 ")
    )
    assert program.fails("compare-runs", runs="s,nope").startswith("there is no run 'nope' in ")


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
def test_a_scripts_numbers_are_the_same_in_list_show_and_compare(
    program: Program,
    losses: list[float],
    done: float | None,
    more: dict[str, object],
    cells: list[str],
):
    left_by_jobs.leave_script(program, "own", losses, done=done, **more)
    left_by_jobs.leave_script(program, "worse", [9.0], done=9.0)
    left_by_jobs.leave_script(program, "lost", [0.125, 99.0])
    by_best = [
        line.split()[0] for line in program.run("list-runs", sort="best")["runs"].splitlines()[1:]
    ]
    assert by_best == (["lost", "own", "worse"] if losses else ["lost", "worse", "own"]), (
        "as the column BEST has it"
    )
    rows = {line.split()[0]: line.split() for line in program.run("list-runs")["runs"].splitlines()}
    assert rows["own"][4 : 4 + len(cells)] == cells
    compared = program.run("compare-runs", runs="own,worse")
    assert compared["best-run"] == "own"
    assert compared["results"].splitlines()[1].replace(" *", "").split()[-4:] == [*cells, "-"][:4]
    shown = program.run("show-run", run="own")
    assert [shown[name] for name in ("steps", "loss")] == cells[:2]
    assert ("curve-text" in shown) == bool(losses)
    figures = folder.read(program.workspace / "runs" / "own").figures
    assert [f"{figures[name]:g}" for name in ("steps", "last_loss")] == cells[:2]


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({}, "runs: 0 named; from two to 256 different ones are compared"),
        ({"runs": "one,two"}, "there is no run 'one' in {runs}; ddp list"),
        (
            {"runs": "a,$(id)"},
            "runs: 'a,$(id)' is not allowed; names, separated by commas or blanks",
        ),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_in_one_line(
    program: Program, params: dict[str, typing.Any], line: str
):
    runs = str(program.workspace / "runs")
    assert program.fails("compare-runs", **params) == line.replace("{runs}", runs)
