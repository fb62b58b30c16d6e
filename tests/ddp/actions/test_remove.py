"""remove-runs: runs and checkpoints are removed whole, but never if in use or outside."""

import json
import os
import pathlib

import left_by_jobs
import pytest
from cluster import Cluster
from run_verbs import Program

from ddp.run import folder, removal

LIST = "ddp list"


def runs_of(program: Program) -> pathlib.Path:
    return program.workspace / "runs"


def left(program: Program) -> list[str]:
    return sorted(path.name for path in runs_of(program).iterdir())


def leave_sweep(program: Program, name: str, count: int = 2) -> None:
    """Leave a sweep whose runs have ended."""
    path = runs_of(program) / name
    path.mkdir()
    about = {"kind": "sweep", "count": count, "submitted": "2026-11-20T18:00:00Z", "job_id": 3}
    (path / "job.json").write_text(json.dumps(about))
    for number in range(count):
        element = left_by_jobs.leave_training(program, f"{name}-{number}")
        record = json.loads((element / "job.json").read_text())
        (element / "job.json").write_text(json.dumps({**record, "sweep": name}))


def test_a_run_goes_with_all_its_files_and_its_room_is_shown(program: Program):
    left_by_jobs.leave_training(program, "night")
    left_by_jobs.leave_training(program, "dawn")
    (runs_of(program) / "night" / "epoch-0001" / "weights").write_bytes(bytes(1 << 20))
    shown = program.run("remove-runs", run="night")
    assert left(program) == ["dawn"]
    assert shown["removed"] == "night"
    assert shown["size"] == "1.0 MiB"
    (item,) = program.record["items"]
    assert item["kind"] == "run"
    assert item["bytes"] == program.record["bytes"] > 1 << 20
    assert program.run("list-runs")["count"] == "1"


def test_a_sweep_goes_with_its_runs_and_one_of_them_alone(program: Program):
    leave_sweep(program, "lrs")
    left_by_jobs.leave_training(program, "lrs-9")
    program.run("remove-runs", run="lrs-1")
    assert left(program) == ["lrs", "lrs-0", "lrs-9"]
    program.run("remove-runs", run="lrs")
    assert left(program) == ["lrs-9"]


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_run_in_the_queue_stays_with_all_that_was_named(
    program: Program, cluster: Cluster, state: str
):
    left_by_jobs.leave_training(program, "night")
    cluster.states = [(state, 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    before = left(program)
    why = program.fails("remove-runs", run="night,a")
    assert why == f"run: a is in use: job 40 is {state}; wait for its end, or cancel it; {LIST}"
    assert left(program) == before


def test_a_run_stays_while_a_job_continues_from_it(program: Program, cluster: Cluster):
    source = left_by_jobs.leave_training(program, "night")
    cluster.states = [("PENDING", 0)]
    program.run("submit-ddp", run="again", resume="night")
    assert "the job of again reads from it" in program.fails("remove-runs", run="night")
    assert source.is_dir()


def test_nothing_goes_while_slurm_does_not_answer(program: Program, cluster: Cluster):
    left_by_jobs.leave_training(program, "night")
    cluster.silent = 99
    assert "Unable to contact slurm controller" in program.fails("remove-runs", run="night")
    assert left(program) == ["night"]


def test_a_submission_under_way_keeps_its_run(program: Program):
    path = left_by_jobs.leave_training(program, "night", job_id=None)
    record = json.loads((path / "job.json").read_text())
    (path / "job.json").write_text(json.dumps({**record, "submission": "ddp:1"}))
    assert "another command is submitting it" in program.fails("remove-runs", run="night")


def test_a_link_in_place_of_a_run_is_refused_and_links_inside_are_not_followed(
    program: Program, tmp_path: pathlib.Path
):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "job.json").write_text('{"kind": "gpt", "job_id": 1}')
    (runs_of(program) / "night").symlink_to(outside)
    assert "is not a folder" in program.fails("remove-runs", run="night")

    path = left_by_jobs.leave_training(program, "dawn")
    (path / "data").symlink_to(outside)
    program.run("remove-runs", run="dawn")
    assert (outside / "job.json").is_file()


@pytest.mark.parametrize(
    ("run", "line"),
    [
        ("none", "run: there is no run 'none' in {runs}; ddp list"),
        ("notes", "run: {runs}/notes is a folder without a run's files; ddp list"),
        ("../x", "run: '../x' is not allowed; names, separated by commas or blanks"),
        ("*", "run: '*' is not allowed; names, separated by commas or blanks"),
    ],
)
def test_only_a_run_by_its_name_goes(program: Program, run: str, line: str):
    notes = runs_of(program) / "notes"
    notes.mkdir()
    (notes / "monday.md").write_text("x")
    assert program.fails("remove-runs", run=run) == line.format(runs=runs_of(program))
    assert (notes / "monday.md").is_file()


def test_a_run_of_another_account_stays(program: Program, monkeypatch: pytest.MonkeyPatch):
    path = left_by_jobs.leave_training(program, "night")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(removal.RefusedError, match="belongs to"):
        removal.check_own(path)


def test_what_a_killed_command_hid_is_in_no_list_and_the_next_one_deletes_it(program: Program):
    path = left_by_jobs.leave_training(program, "night")
    left_by_jobs.leave_training(program, "dawn")
    removal.hide(runs_of(program), path)  # and the command is killed here
    assert folder.names(runs_of(program)) == ["dawn"]
    left_by_jobs.leave_training(program, "noon")
    program.run("remove-runs", run="noon")
    assert left(program) == ["dawn"]


# -- checkpoints ----------------------------------------------------------------------------------


def test_checkpoints_go_alone_with_what_was_left_unfinished(program: Program):
    path = left_by_jobs.leave_training(program, "night")
    (path / "epoch-0002.tmp-7.r0").mkdir()
    shown = program.run("remove-runs", run="night", checkpoints=True)
    assert program.record["count"] == 2
    assert "night/epoch-0001" in shown["items"]
    assert not list(path.glob("epoch-*"))
    assert not os.path.lexists(path / "latest")
    assert not os.path.lexists(path / "best")
    shown = program.run("show-run", run="night")
    assert "checkpoints" not in shown
    assert shown["best"].startswith("validation loss 2.75")
    assert program.run("remove-runs", run="night", checkpoints=True)["count"] == "0"


def test_checkpoints_of_known_trainers_go_and_the_projects_own_files_stay(program: Program):
    path = left_by_jobs.leave_training(program, "mine")
    (path / "epoch-0001" / "manifest.json").unlink()
    (path / "epoch-0001").rmdir()
    code = path / "code"
    made = {
        "out/checkpoint-20/trainer_state.json": "{}",
        "out/checkpoint-20/model.safetensors": "x",
        "out/trainer_state.json": "{}",
        "checkpoint/step-10/.metadata": "x",
        "logs/version_0/last.ckpt": "x",
        "pretrained.ckpt": "given",
        "train.py": "given",
    }
    for name, text in made.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(text)
    states = {name: ["a", "b"] for name, text in made.items() if text == "given"}
    (path / "code.json").write_text(json.dumps(states))

    program.run("remove-runs", run="mine", checkpoints=True)
    kept = {str(one.relative_to(code)) for one in code.rglob("*") if one.is_file()}
    assert kept == {"out/trainer_state.json", "pretrained.ckpt", "train.py"}
