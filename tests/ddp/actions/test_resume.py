"""resume-run: requeued and held jobs, and why one cannot start."""

import json
import os
import pwd

import pytest
from cluster import Cluster, Job
from run_verbs import Program

from ddp.submit import control

USER = pwd.getpwuid(os.geteuid()).pw_name


def test_a_requeued_job_is_started(program: Program, cluster: Cluster):
    program.run("submit-ddp", run="first")
    job = cluster.jobs[0]
    job.states, job.reason, job.restarts = [("COMPLETING", 0), ("PENDING", 0)], "BeginTime", 1
    results = program.run("resume-run", run="first")
    assert results == {"job-id": "40", "run": "first", "state": "PENDING", "reason": "Resources"}
    assert cluster.changes[-1] == ("scontrol", "update", "JobId=40", "StartTime=now")
    assert program.log == [
        "job 40 is leaving its nodes",
        "job 40 was PENDING (BeginTime); it starts as soon as there is room",
    ]


@pytest.mark.parametrize("reason", ["JobHeldAdmin", "slurm_cred_create failure, holding job."])
def test_a_job_that_slurmctld_could_not_start_is_reported_with_the_account_that_it_lacks(
    program: Program, cluster: Cluster, reason: str
):
    """Slurm accepts the job, and holds it at its start (24.11.5); its owner cannot release it."""
    cluster.states = [("PENDING", 0)]

    def hold(job: Job) -> None:
        job.reason, job.held, job.restarts = reason, True, 1

    cluster.submitted = hold
    uid = os.geteuid()
    line = (
        f"job 40 is held ({reason}): by an administrator, or slurmctld does not know the account {USER} (uid {uid}); on "
        f"slurmctld's host, as root: useradd --no-create-home --uid {uid} {USER}; then: scontrol release 40"
    )
    assert program.fails("submit-ddp", run="first", wait=True) == line
    assert (program.results["state"], program.results["job-id"]) == ("PENDING", "40")
    assert program.run("show-run", run="first")["reason"] == line
    cluster.denial = "slurm_suspend error: Access/permission denied"
    assert program.fails("resume-run", run="first").endswith(f"Access/permission denied; {line}")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("PENDING", "JobHeldUser"),
        ("PENDING", "job requeued in held state"),  # scontrol requeuehold
        ("PENDING", "launch failed requeued held"),
        ("REQUEUE_HOLD", "job requeued in held state"),
        ("SPECIAL_EXIT", "job requeued in special exit state"),
        ("EXPEDITING", "None"),  # Slurm refuses to change it; 25.11 holds it if its epilogs passed
    ],
)
def test_a_held_job_is_released_for_each_reason_of_slurm(
    program: Program, cluster: Cluster, state: str, reason: str
):
    program.run("submit-ddp", run="first")
    job = cluster.jobs[0]
    job.states, job.reason, job.restarts, job.held = [(state, 0), ("PENDING", 0)], reason, 1, True
    assert program.run("resume-run") == {
        "job-id": "40",
        "run": "first",
        "state": "PENDING",
        "reason": "Resources",
    }
    assert cluster.changes[-2:] == [
        ("scontrol", "release", "40"),
        ("scontrol", "update", "JobId=40", "StartTime=now"),
    ]


def test_a_job_that_stays_held_is_an_error(
    program: Program, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    program.run("submit-ddp", run="first")
    cluster.jobs[0].states, cluster.jobs[0].held = [("PENDING", 0)], True
    monkeypatch.setattr(control.jobs, "release", lambda *_, **__: None)
    assert (
        program.fails("resume-run")
        == "job 40 is still held (Resources); as an administrator: scontrol release 40"
    )


def test_a_requeued_job_starts_only_after_it_has_left_its_nodes(
    program: Program, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """Within the same second slurmd would refuse it, and it would have failed."""
    program.run("submit-ddp", run="first")
    cluster.jobs[0].states, cluster.jobs[0].restarts = [("PENDING", 0)], 1
    paused: list[tuple[float, int]] = []
    program.pause = lambda seconds: paused.append((seconds, len(cluster.changes)))
    program.run("resume-run")
    assert paused == [(2.0, len(cluster.changes) - 1)], "before Slurm gets the change"
    cluster.jobs[0].restarts = 0
    program.run("resume-run")
    assert len(paused) == 1, "a job that never ran has no end"


def test_a_job_that_is_not_waiting_or_denied_is_reported(program: Program, cluster: Cluster):
    program.run("submit-ddp", run="first")
    cluster.jobs[0].states = [("RUNNING", 0)]
    assert (
        program.fails("resume-run", run="40")
        == "job 40 is not waiting: it is RUNNING; ddp log first"
    )
    cluster.jobs[0].states = [("TIMEOUT", 1)]
    assert program.fails("resume-run", run="40") == (
        "job 40 is not waiting: it is TIMEOUT; to resume, submit it with the same options; ddp submit --run first"
    )
    record = program.workspace / "runs" / "first" / "job.json"
    record.write_text(
        json.dumps({**json.loads(record.read_text()), "kind": "script", "workload": "/x/train.py"})
    )
    assert program.fails("resume-run", run="40").endswith(" ddp submit --run first /x/train.py"), (
        "else it would be a gpt"
    )
    assert [call[0] for call in cluster.changes] == ["sbatch"]
    cluster.jobs[0].states, cluster.denial = (
        [("PENDING", 0)],
        "scancel: error: Kill job error on job id 40: Access denied",
    )
    assert program.fails("cancel-run", run="40") == (
        "job 40 could not be cancelled: Kill job error on job id 40: Access denied; ddp list"
    )
    cluster.denial, cluster.jobs[0].held = "slurm_update error: Access/permission denied", True
    cluster.jobs[0].reason = "JobHeldUser"
    assert program.fails("resume-run").endswith(
        "permission denied; as an administrator: scontrol release 40"
    )
