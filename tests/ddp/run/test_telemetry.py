"""The exporter's figures about runs: each follows the run's files and Slurm."""

import json
import math
import os
import pathlib
import pwd
import time
import typing

import pytest
import yaml
from cluster import Cluster, Job

from ddp.actions import list as listing
from ddp.options import models
from ddp.run import telemetry
from ddp.settings import Settings
from ddp.slurm import jobs

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

USER = pwd.getpwuid(os.geteuid()).pw_name
Json = dict[str, typing.Any]


def make(top: pathlib.Path, name: str, job_id: int = 40, **files: str) -> pathlib.Path:
    """Make a run's folder; `control__40_r0_outcome` is the file control/40.r0.outcome."""
    folder = top / "runs" / name
    (folder / "control").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "job.json").write_text(json.dumps({"job_id": job_id, "kind": "gpt"}))
    for path, text in files.items():
        at = path.replace("__", "/").replace("_", ".")
        (folder / at).write_text(text)
    return folder


def queued(cluster: Cluster, name: str, state: str, *, job_id: int = 40, restarts: int = 0) -> None:
    job = Job(job_id, USER, name, pathlib.Path("/s"), "", [(state, 0)], restarts=restarts)
    cluster.jobs.append(job)


def only(settings: Settings) -> Json:
    (run,) = telemetry.collect(settings.workspace)["runs"]
    return run


def failed(attempt: str, kind: str) -> str:
    return f"2026-11-20T18:48:22Z\t{attempt}\t{kind}\tslurmd-0\twords\n"


def test_a_workspace_without_runs(settings: Settings, cluster: Cluster):
    assert telemetry.collect(settings.workspace) == {"runs": [], "gpus": {}, "doctor": None}


WORDS = "rank 3 on slurmd-1 takes 1.83 times the ranks' median for its data and forward pass"
SLOW = {"rank": 3, "host": "slurmd-1", "times": 1.83}


def test_a_run_that_trains(settings: Settings, cluster: Cluster, workspace: pathlib.Path):
    records = [
        {"kind": "start", "step": 0, "time": 4990.0, "total_steps": 200, "world_size": 2},
        {
            "kind": "checkpoint",
            "step": 9,
            "time": 5000.0,
            "name": "epoch-1",
            "stall_s": 0.5,
            "seconds": 2.0,
        },
        {
            "kind": "step",
            "step": 10,
            "loss": 3.25,
            "tokens_per_second": 1000.0,
            "time": 5000.5,
            "mfu": 0.375,
            "slowest": SLOW,
            "sync_share": 0.25,
            "sync_bytes_per_step": 5e6,
            "sites": "slurmd-0,slurmd-1 slurmd-2",
        },
    ]
    log = "0: [TRAIN] step=9/999 loss=3.5 mfu=0.99\n0: [CKPT] saved=epoch-1 step=9 stall_s=9.9 write_s=2\n"
    lines = "".join(json.dumps(record) + "\n" for record in records)
    folder = make(workspace, "owt", logs__40_out=log, metrics_jsonl=lines)
    (folder / "epoch-1").mkdir()
    (folder / "latest").symlink_to("epoch-1")
    queued(cluster, "owt", "RUNNING")
    run = only(settings)
    at = run["values"].pop("checkpoint_timestamp_seconds")
    assert abs(at - time.time()) < 60
    assert run["values"] == {
        "step": 10,
        "max_steps": 200,
        "loss": 3.25,
        "tokens_per_second": 1000.0,
        "mfu_ratio": 0.375,
        "sync_ratio": 0.25,
        "sync_bytes_per_step": 5e6,
        "progress_timestamp_seconds": 5000.5,
        "checkpoint_stall_seconds": 0.5,
    }
    assert (run["run"], run["user"], run["state"], run["is_shown"]) == (
        "owt",
        USER,
        "running",
        True,
    )
    assert (run["requeues"], run["restarts"], run["failures"]) == (0, 0, {})
    assert run["slowest"] == [3, "slurmd-1", 1.83]
    assert run["sites"] == {"slurmd-0": 0, "slurmd-1": 0, "slurmd-2": 1}
    listed = listing.list_runs(settings, models.ListRuns(), print).values["runs"]
    assert [one["straggler"] for one in typing.cast("list[Json]", listed)] == [WORDS]


@pytest.mark.parametrize(
    ("state", "restarts", "shown"),
    [
        ("PENDING", 0, "pending"),
        ("PENDING", 1, "requeued"),
        ("REQUEUED", 0, "requeued"),
        ("RUNNING", 1, "running"),
        ("COMPLETING", 0, "running"),
    ],
)
def test_an_active_jobs_state(
    settings: Settings,
    cluster: Cluster,
    workspace: pathlib.Path,
    state: str,
    restarts: int,
    shown: str,
):
    make(workspace, "owt")
    queued(cluster, "owt", state, restarts=restarts)
    run = only(settings)
    assert (run["state"], run["requeues"]) == (shown, restarts)


def test_requeues_restarts_and_failures_add_up_over_attempts_and_jobs(
    settings: Settings, cluster: Cluster, workspace: pathlib.Path
):
    make(
        workspace,
        "owt",
        control__40_failures=failed("40.r0", "node")
        + failed("40.r1", "program")
        + failed("40.r1t1", "program"),
        control__39_failures=failed("39.r0", "filesystem")
        + failed("39.r0", "invented")
        + "half a li",
        control__40_r2_outcome=json.dumps({"outcome": "done"}),
    )
    queued(cluster, "owt", "RUNNING", restarts=3)
    run = only(settings)
    assert (run["requeues"], run["restarts"]) == (3, 1)
    assert run["failures"] == {"node": 1, "program": 2, "filesystem": 1}


def test_a_run_that_ended_long_ago_is_counted_and_not_shown(
    settings: Settings, cluster: Cluster, workspace: pathlib.Path
):
    folder = make(workspace, "owt", control__40_failures=failed("40.r0", "node"))
    os.utime(folder / "job.json", (1000, 1000))
    run = only(settings)
    assert (run["is_shown"], run["failures"]) == (False, {"node": 1})
    queued(cluster, "owt", "RUNNING")
    assert only(settings)["is_shown"]


@pytest.mark.parametrize("kind", ["sweep", "prepare", "collectives"])
def test_runs_that_do_not_train_are_left_out(
    settings: Settings, cluster: Cluster, workspace: pathlib.Path, kind: str
):
    folder = make(workspace, "owt")
    (folder / "job.json").write_text(json.dumps({"job_id": 40, "kind": kind}))
    assert telemetry.collect(settings.workspace)["runs"] == []


def test_the_newest_runs_of_all_users(
    settings: Settings, cluster: Cluster, workspace: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    for number, top in enumerate([workspace, workspace / "users" / "ann", workspace]):
        folder = make(top, f"run-{number}")
        os.utime(folder / "job.json", (1000 + number, 1000 + number))
    assert [run["run"] for run in telemetry.collect(settings.workspace)["runs"]] == [
        "run-2",
        "run-1",
        "run-0",
    ]
    monkeypatch.setattr(telemetry, "MAX_RUNS", 2)
    assert [run["run"] for run in telemetry.collect(settings.workspace)["runs"]] == [
        "run-2",
        "run-1",
    ]


@pytest.mark.parametrize(("words", "count"), CASES["gpus_that_a_job_holds"])
def test_gpus_that_a_job_holds(settings: Settings, cluster: Cluster, words: str, count: int):
    """By Slurm's allocation, if it tracks gres/gpu (AccountingStorageTRES), or by the request."""
    cluster.running = f"ann|{words}\nbob|1|1|cpu=1,node=1|N/A|gres/gpu:2|N/A|\n"
    assert telemetry.collect(settings.workspace)["gpus"] == ({"ann": count} if count else {}) | {
        "bob": 2
    }


def test_hostile_values_of_one_run_cost_no_other_its_figures(
    settings: Settings, cluster: Cluster, workspace: pathlib.Path
):
    metric = (
        '{"step": 1' + "0" * 400 + ', "loss": NaN}\n{"step": "ten", "loss": [1], "time": true}\n'
    )
    folder = make(
        workspace,
        "owt",
        metrics_jsonl=metric,
        summary_json="[",
        control__40_r0_outcome='{"outcome": []}',
    )
    (folder / "job.json").write_text('{"job_id": [40], "kind": "gpt"}')
    run = only(settings)
    assert run["state"] is None
    assert "step" not in run["values"]
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    assert math.isnan(only(settings)["values"]["loss"])


def test_a_controller_that_does_not_answer_is_an_error(settings: Settings, cluster: Cluster):
    cluster.silent = 9
    with pytest.raises(jobs.NotAnsweringError):
        telemetry.collect(settings.workspace)


def test_doctors_findings_are_kept(settings: Settings, cluster: Cluster, workspace: pathlib.Path):
    telemetry.note_findings(str(settings.workspace.baselines), {"error": 1, "warning": 2})
    doctor = telemetry.collect(settings.workspace)["doctor"]
    assert abs(doctor.pop("time") - time.time()) < 60
    assert doctor == {"error": 1, "warning": 2}
