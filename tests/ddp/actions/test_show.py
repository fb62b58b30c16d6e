"""show-run: a run from its submission to its end, runs of other kinds, and sweeps."""

import contextlib
import json
import typing

import left_by_jobs
import pytest
from cluster import Cluster
from harness import ActionFailedError
from left_by_jobs import write_result
from run_verbs import Program


def test_a_run_is_shown_from_its_submission_to_its_result(program: Program, cluster: Cluster):
    folder = program.workspace / "runs" / "a"
    cluster.states = [("PENDING", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    shown = program.run("show-run")
    assert (shown["job-id"], shown["state"], shown["reason"]) == ("40", "PENDING", "Resources")
    assert (shown["log"], shown["script"]) == (
        str(folder / "logs" / "40.out"),
        str(folder / "job.sbatch"),
    )
    cluster.jobs[0].states = [("RUNNING", 0)]
    (folder / "metrics.jsonl").write_text('{"step": 7, "loss": 1.23456789}\n')
    shown = program.run("show-run", run="40")
    expected = {
        "state": "RUNNING",
        "elapsed": "00:00:07",
        "nodes": "slurmd-[0-1]",
        "step": "7",
        "loss": "1.23457",
    }
    assert expected.items() <= shown.items()
    cluster.jobs[0].states = [("COMPLETED", 0)]
    write_result(cluster.jobs[0])
    shown = program.run("show-run", run="a")
    assert (shown["state"], shown["exit-code"], shown["loss"], shown["ranks"]) == (
        "COMPLETED",
        "0",
        "0.586587",
        "2",
    )
    assert "reason" not in shown
    assert program.record["figures"]["last_loss"] == 0.586587


def test_show_names_the_data_that_a_run_does_not_learn(program: Program):
    program.run("submit-ddp", workload="smoke", run="a")
    line = "120 of 300 conversations teach nothing: role narrator"
    start = {"kind": "start", "step": 0, "time": 1.0, "not_learned": [line, "\u001b[31mred"]}
    metrics = program.workspace / "runs" / "a" / "metrics.jsonl"
    metrics.write_text(json.dumps(start) + "\n")
    assert program.run("show-run")["not-learned"].splitlines() == [line, "?[31mred"]


def test_a_run_over_slow_links_is_shown_with_its_sites_and_what_they_exchange(program: Program):
    program.run("submit-ddp", workload="smoke", run="a")
    about: dict[str, object] = {"sites": "a,b c", "sync_share": 0.125, "sync_bytes_per_step": 4e6}
    lines = [
        {"kind": "start", "step": 0, "time": 1.0, "sites": "a,b c"},
        {"kind": "step", "step": 1, "loss": 2.0, "time": 2.0, **about},
    ]
    metrics = program.workspace / "runs" / "a" / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    shown = program.run("show-run")

    assert shown["sites"] == "site 0: a, b; site 1: c"
    assert shown["exchanges"] == "12.5% of the time, 4 MB a step"


def test_a_failed_run_is_shown_with_its_reason_once(program: Program, cluster: Cluster):
    cluster.states = [("FAILED", 9)]
    program.run("submit-ddp", workload="smoke", run="a")
    folder = program.workspace / "runs" / "a"
    (folder / "logs" / "40.out").write_text(
        "0: loading\n0: [FATAL] slurmd-0: no\n[RESULT] rc=78 outcome=none\n"
    )
    (folder / "control" / "40.failures").write_text(
        "2026-11-23T17:01:12Z\t40.r0\tnode\tslurmd-0\tslurmd-0: no\n"
    )
    shown = program.run("show-run")
    assert shown["reason"] == "job 40 FAILED, exit code 137: [FATAL] slurmd-0: no"
    assert (shown["state"], shown["failure"]) == ("FAILED", "loading")
    assert "\n".join(shown.values()).count("slurmd-0: no") == 1
    (folder / "control" / "40.failures").write_text(
        "t\t40.r0\tnode\tslurmd-0\tslow\nt\t40.r0t1\tnode\tslurmd-0\tno\n"
    )
    assert program.run("show-run")["failures"].splitlines()[0] == "t fault=node node=slurmd-0: slow"
    (folder / "control" / "40.failures").unlink()
    (folder / "logs" / "40.out").write_text("")
    (folder / "job.json").write_text("[")
    assert program.run("show-run", run="a")["reason"] == (
        f"job 40 FAILED, exit code 137; {folder}/job.json is missing or damaged, so other files of the run may be, too"
    )


def test_the_summary_of_an_earlier_job_is_not_shown(program: Program, cluster: Cluster):
    cluster.submitted, cluster.states = write_result, [("COMPLETED", 0)]
    program.run("submit-ddp", run="a")
    cluster.submitted, cluster.states = lambda _: None, [("RUNNING", 0)]
    program.run("submit-ddp", run="a")
    shown = program.run("show-run")
    assert (shown["job-id"], shown["state"]) == ("41", "RUNNING")
    assert "tokens-per-second" not in shown
    assert "exit-code" not in shown


def test_an_earlier_controllers_job_of_the_same_number_is_another_job(
    program: Program, cluster: Cluster
):
    cluster.submitted, cluster.states = write_result, [("COMPLETED", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    cluster.jobs[0].name = "b"
    cluster.jobs[0].states = [("PENDING", 0)]
    assert program.run("show-run", run="a")["state"] == "COMPLETED", "what it wrote itself"
    assert "state" not in program.run("run-log", run="a")
    assert "it is unknown to Slurm" in program.fails("resume-run", run="a")


def test_a_run_is_shown_with_settings_figures_and_curve(program: Program):
    folder = left_by_jobs.leave_training(program, "night")
    shown = program.run("show-run")
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


def test_ranks_that_never_connected_are_remarked_by_show_and_list(program: Program):
    folder = left_by_jobs.leave_training(program, "night")
    remark = "the 2 ranks never connected: each trained alone"
    (folder / "control" / "7.r0.remark").write_text(f"{remark}, unless \x1b[31m; num_nodes=2\n")
    shown = program.run("show-run", run="night")
    assert (shown["state"], shown["remark"]) == (
        "COMPLETED",
        f"{remark}, unless ?[31m; num_nodes=2",
    )
    assert program.run("list-runs")["runs"].splitlines()[1].endswith(remark)


def test_the_accounting_is_asked_for_a_job_that_slurmctld_has_forgotten(
    program: Program, cluster: Cluster
):
    folder = left_by_jobs.leave_training(program, "lost", job_id=99)
    (folder / "control" / "99.r0.outcome").unlink()
    assert program.run("show-run")["state"].startswith("UNKNOWN")
    cluster.accounting = f"99|{cluster.user}|NODE_FAIL|1:0|2|slurmd|00:10:00|UNLIMITED|2026-11-20T18:48:22|slurmd-[0-1]|lost\n"
    assert program.run("show-run")["state"] == "NODE_FAIL"
    assert "NODE_FAIL" in program.run("list-runs")["runs"]


def test_a_preempted_run_says_at_which_step_it_saved(program: Program):
    folder = left_by_jobs.leave_training(program, "night")
    (folder / "control" / "7.r0.outcome").write_text('{"outcome": "preempted", "step": 17}')
    shown = program.run("show-run")
    assert (shown["state"], shown["reason"]) == (
        "PREEMPTED",
        "job 7 PREEMPTED, exit code 1; it saved at step 17; to resume, submit it with the same options; "
        "ddp submit --run night",
    )


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED"])
def test_the_result_of_a_submission_that_waited_has_the_curve(
    program: Program, cluster: Cluster, state: str
):
    cluster.submitted, cluster.states = write_result, [(state, 0 if state == "COMPLETED" else 256)]
    with contextlib.suppress(ActionFailedError):
        program.run("submit-ddp", workload="smoke", wait=True)
    assert program.results["curve-text"].splitlines()[-1].split() == ["16"]


def test_runs_that_are_not_trainings_say_why_they_have_no_metrics(motley: Program):
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
def test_a_damaged_file_of_a_run_breaks_no_command(program: Program, text: str):
    folder = left_by_jobs.leave_training(program, "odd")
    for name in (
        "summary.json",
        "config.json",
        "metrics.jsonl",
        "tracking.json",
        "control/7.r0.outcome",
    ):
        (folder / name).write_text(text)
    (folder / "epoch-0001" / "manifest.json").write_text(text)
    left_by_jobs.leave_training(program, "even")
    assert program.run("show-run", run="odd")["metrics"] == "none yet"
    assert program.run("list-runs")["count"] == "2"
    assert program.run("compare-runs", runs="odd,even")["runs"] == "odd, even"


def test_a_loss_that_became_nan_is_reported(program: Program):
    folder = left_by_jobs.leave_training(program, "burst")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '{"kind": "step", "step": 41, "loss": NaN}\n{"kind": "step", "step": 42, "loss": Infinity}\n'
        )
    (folder / "summary.json").write_text(
        '{"last_loss": NaN, "tokens_per_second": 1.0, "steps": 42}'
    )
    shown = program.run("show-run", run="burst")["metrics"]
    assert shown.endswith(
        "loss 1.0000 at step 40, validation loss 2.9000, the loss is not finite from step 41 on"
    )
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 3.5}\n')
    assert program.run("show-run", run="burst")["metrics"] == "2 records, loss 3.5000 at step 2"


def test_a_sweep_is_counted_as_a_whole_and_by_its_runs(program: Program, cluster: Cluster):
    found = left_by_jobs.leave_sweep(program, cluster)
    for shown in (program.run("show-run", run="s"), program.run("show-run", run="40")):
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
        for line in program.run("list-runs")["runs"].splitlines()[1:]
    }
    assert rows == {
        "s": ["sweep", "RUNNING"],
        "s-0": ["gpt", "COMPLETED"],
        "s-1": ["gpt", "COMPLETED"],
        "s-2": ["gpt", "FAILED"],
        "s-3": ["gpt", "RUNNING"],
        "s-4": ["gpt", "PENDING"],
    }
    assert program.run("show-run", run="s-3")["state"] == "RUNNING"
    found["array"].task = "4-7%2"
    shown = program.run("show-run", run="s-4")
    assert (shown["state"], shown["reason"]) == ("PENDING", "Resources"), (
        "those that wait together have one record"
    )
    for name in ("3", "array"):
        found[name].states = [("COMPLETED", 0)]
    assert program.run("show-run", run="s")["state"] == "FAILED", "one of its runs did"


def test_a_sweeps_run_is_known_by_its_files_once_slurm_has_forgotten_it(
    program: Program, cluster: Cluster
):
    left_by_jobs.leave_sweep(program, cluster)
    outcome = {"outcome": "failed", "error": "unrecognized arguments: --x"}
    (program.workspace / "runs" / "s-2" / "control" / "43.r0.outcome").write_text(
        json.dumps(outcome)
    )
    assert program.run("show-run", run="s-2")["state"] == "FAILED"
    cluster.jobs.clear()
    assert program.run("show-run", run="s-2")["state"] == "FAILED"
    rows = {
        line.split()[0]: line.split()[2]
        for line in program.run("list-runs")["runs"].splitlines()[1:]
    }
    assert (rows["s-0"], rows["s-2"]) == ("COMPLETED", "FAILED")


def test_a_sweep_of_scripts_marks_the_run_with_the_lowest_last_loss(program: Program):
    for name, done in (("s-0", 0.5), ("s-1", 0.25)):
        left_by_jobs.leave_script(program, name, [0.1, 9.0], done=done)
        record = {"kind": "script", "sweep": "s", "choice": '{"lr": 1}', "job_id": None}
        (program.workspace / "runs" / name / "job.json").write_text(json.dumps(record))
        (program.workspace / "runs" / name / "control" / "job").write_text("7\n")
    (program.workspace / "runs" / "s").mkdir()
    (program.workspace / "runs" / "s" / "job.json").write_text(
        json.dumps({"kind": "sweep", "count": 2, "job_id": 7})
    )
    shown = program.run("show-run", run="s")
    assert (shown["best-run"], shown["best-loss"]) == ("s-1", "0.25")
    assert [line.split()[3:6] for line in shown["runs"].splitlines()[1:]] == [
        ["2", "0.5", "lr=1"],
        ["2", "0.25", "*"],
    ]


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"run": "nope"}, "there is no run 'nope' in {runs}; ddp list"),
        (
            {"run": "../x"},
            "run: '../x' is not allowed; only letters, digits and . _ -, beginning with a letter or digit",
        ),
    ],
)
def test_an_unknown_run_is_refused_in_one_line(
    program: Program, params: dict[str, typing.Any], line: str
):
    runs = str(program.workspace / "runs")
    assert program.fails("show-run", **params) == line.replace("{runs}", runs)
