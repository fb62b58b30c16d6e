"""Accidents of a training: failure, cancellation, warning, sweep, crowding; Slurm restarts.

The ranks are small scripts without torch, so that a drill takes seconds; the payload's tests cover
torch itself in such moments, and test_bundle_runs trains for real.
"""

import re
import subprocess

import pytest

from functional.conftest import REPOSITORY, Cluster, eventually
from functional.training_jobs import (
    CODE,
    PATIENCE_S,
    log_of,
    record,
    steps_done,
    submit,
    until,
    until_gone,
    until_queued_again,
    until_state,
)

pytestmark = [
    pytest.mark.trains,
    pytest.mark.timeout(1500),
]  # the first test of a run deploys; each command has its own limit


def test_a_rank_that_takes_more_memory_than_the_job_has_is_reported(drills: Cluster):
    small = ("gpus-per-node=0", "cpus-per-task=1", "memory=1G", "nodes=2", "wait=true")
    answer = drills.ctl(
        "run", "trainer/0", "submit-ddp", f"workload={CODE}/greedy.py", *small, timeout=PATIENCE_S
    )
    assert answer.code == 1
    words = "killed: it took more memory than the job has: had 1024 MiB, reached it on slurmd-[01]: --memory 2G"
    line = rf"submit-ddp: job \d+ FAILED, exit code \d+; rank 1 on slurmd-[01]: {words}; or use a smaller batch"
    assert re.fullmatch(line, answer.error)


def test_a_crash_ends_the_job_in_seconds_and_names_the_rank(drills: Cluster):
    small = (
        "gpus-per-node=0",
        "cpus-per-task=1",
        "memory=1G",
        "nodes=2",
        "args=never",
        "wait=true",
    )
    # The other rank sleeps for ten minutes.
    answer = drills.ctl(
        "run", "trainer/0", "submit-ddp", f"workload={CODE}/fails.py", *small, timeout=PATIENCE_S
    )
    assert answer.code == 1
    assert re.fullmatch(
        r"submit-ddp: job \d+ FAILED, exit code \d+; rank 1 on slurmd-[01]: ValueError: boom \(fails\.py:\d+\)",
        answer.error,
    )


@pytest.mark.long
def test_a_crashed_program_is_started_again(drills: Cluster):
    job = submit(drills, "fails.py", "args=t1", "max-restarts=1", "wait=true", nodes=2)
    assert job["state"] == "COMPLETED"
    output = log_of(drills, job)
    assert output.count("[FAILED] ") == 1
    assert "fault=program" in output


@pytest.mark.long
def test_a_node_at_fault_is_left_out_and_the_job_goes_on_elsewhere(drills: Cluster):
    job = submit(drills, "bad_node.py", "max-restarts=1")
    until(drills, job, "[RESTART] without slurmd-")
    bad = drills.on("sackd/0", "cat", f"{job['run-dir']}/first")
    assert until_state(drills, job, "PENDING")["ExcNodeList"] == bad
    drills.action("resume-run", f"run={job['run']}")
    found = until_state(drills, job, "COMPLETED")
    assert found["Restarts"] == "1"
    assert found["NodeList"] not in (bad, "")


def test_a_cancelled_job_saves_and_never_comes_back(drills: Cluster):
    job = submit(drills, "steps.py", "args=1000 0.2")
    until(drills, job, "step=2 ")
    assert drills.action("cancel-run", f"run={job['run']}")["state"] == "CANCELLED"
    until(drills, job, "TERM: $STOP_FILE asks the ranks to save and leave")
    until(drills, job, "Slurm ends this job: it was cancelled")
    until_gone(drills, job)
    found = record(drills, job["job-id"])
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")


def test_a_warning_saves_requeues_once_and_the_run_goes_on_where_it_was(drills: Cluster):
    job = submit(drills, "steps.py", "args=100000 0.3")
    until(drills, job, "step=2 ")
    drills.on("sackd/0", "scancel", "--signal=USR1", "--batch", job["job-id"])
    found = until_state(
        drills, job, "PENDING", "COMPLETED"
    )  # it may have gone on before it is asked for
    if found["JobState"] == "PENDING":
        drills.ctl("run", "trainer/0", "resume-run", f"run={job['run']}")
    found = until_state(drills, job, "COMPLETED")
    assert found["Restarts"] == "1", "exactly once"
    done = steps_done(drills, job)
    assert [step for step, _ in done] == list(range(len(done))), "no step twice, none left out"
    assert {attempt.split(".")[1] for _, attempt in done} == {"r0", "r1"}


@pytest.mark.long
def test_slurmctld_is_restarted_in_the_middle(drills: Cluster):
    """The action that waits, and a warning that comes while slurmctld is stopped."""
    job = submit(drills, "steps.py", "args=1000 0.3")
    until(drills, job, "step=1 ")
    command = [
        "run",
        "trainer/0",
        "submit-ddp",
        f"workload={CODE}/steps.py",
        "args=20 0.5",
        "wait=true",
    ]
    small = ["nodes=1", "gpus-per-node=0", "cpus-per-task=1", "memory=1G", "run=during-restart"]
    argv = [REPOSITORY / "sandboxctl", "--model", drills.model, *command, *small]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as waiting:
        until(drills, {"log": "/mnt/shared/runs/during-restart/logs/*.out"}, "step=1 ")
        drills.on("slurmctld/0", "systemctl", "stop", "slurmctld")
        try:
            (node,) = set(re.findall(r"host=(\S+)", log_of(drills, job)))
            program = f"[/]usr/bin/python3 .*{job['run-dir']}/program/ddp.pyz job"
            drills.on(node.replace("-", "/"), "pkill", "-USR1", "-f", program)
            until(drills, job, "[REQUEUE] Slurm does not respond")
        finally:
            drills.on("slurmctld/0", "systemctl", "start", "slurmctld")
        output, _ = waiting.communicate(timeout=600)
    assert waiting.returncode == 0, output
    assert "state: COMPLETED" in output
    until_queued_again(drills, job)
    assert until_state(drills, job, "PENDING")["Restarts"] == "1"
    drills.action("cancel-run", f"run={job['run']}")


@pytest.mark.long
def test_a_sweep_runs_each_element_with_its_own_options(drills: Cluster):
    small = ("nodes=1", "gpus-per-node=0", "cpus-per-task=1", "memory=1G", "name=drill")
    done = drills.action(
        "submit-sweep", f"workload={CODE}/options.py", "grid=lr=0.1,0.2", *small, "wait=true"
    )
    assert done["states"] == "2 COMPLETED"
    for number, rate in enumerate(("0.1", "0.2")):
        assert f"options --lr={rate}" in drills.action("run-log", f"run=drill-{number}")["text"]


@pytest.mark.long
def test_a_token_reaches_the_job_in_a_file_and_a_new_one_the_next_job(drills: Cluster):
    secret = drills.ok("add-secret", "hub", "token=hf_first").split()[-1]
    drills.ok("grant-secret", "hub", "trainer")
    drills.ok("config", "trainer", f"hf-token={secret}")
    try:
        for number, token in enumerate(("first", "second")):
            if number:
                drills.ok("update-secret", "hub", f"token=hf_{token}")
            job = submit(drills, "hf_token.py", f"run=token-{number}", "wait=true")
            assert f"token 0o600 0o700 0o700 {token} False" in log_of(drills, job)
    finally:
        drills.ok("config", "trainer", "--reset", "hf-token")
    assert drills.on("sackd/0", "find", "/mnt/shared/.secrets", "-type", "f") == ""


STUTTER = """
pid=$(pgrep -f '[b]in/python -u -m ddptrain train' | head -n 1)
(while kill -STOP $pid && sleep 0.3 && kill -CONT $pid && sleep 0.1; do :; done) >/dev/null 2>&1 &
"""


@pytest.mark.long
def test_a_rank_that_holds_the_others_up_is_named_with_its_node(drills: Cluster):
    small = ("nodes=2", "gpus-per-node=0", "cpus-per-task=1", "memory=2G", "run=held-up")
    job = drills.action("submit-ddp", *small, "args=--steps 100000")
    try:
        until(drills, job, "[TRAIN] step=")
        _, node = re.findall(r" nodes=(\S+) (\S+) head=", log_of(drills, job))[0]
        drills.on(node.replace("-", "/"), "sh", "-c", STUTTER)
        until(drills, job, f"rank 1 on {node} is slow: its data and forward pass take ")

        def is_found() -> None:
            doctor = drills.ctl("run", "trainer/0", "doctor")
            assert re.search(
                rf"rank 1 on {node} takes [0-9.]+ times the ranks' median", doctor.out + doctor.err
            )

        eventually(is_found)  # by the metrics
    finally:
        drills.action("cancel-run", f"run={job['run']}")


NEVER_MET = "the 2 ranks never connected: each trained alone"


@pytest.mark.long
def test_ranks_that_never_met_are_remarked_in_the_log_and_by_show_and_list(drills: Cluster):
    job = submit(drills, "alone.py", "args=1", "env=ACCELERATE_USE_CPU=own", "wait=true", nodes=2)
    assert (job["state"], job["remark"].partition(",")[0]) == ("COMPLETED", NEVER_MET)
    output = log_of(drills, job)
    assert output.count(f"[ENV] {NEVER_MET}, unless the program connects them itself; ") == 1
    assert output.count("on CPUs: own") == 2
    shown = drills.action("show-run", f"run={job['run']}")
    assert (shown["state"], shown["remark"].partition(",")[0]) == ("COMPLETED", NEVER_MET)
    assert NEVER_MET in drills.action("list-runs", f"name={job['run']}")["runs"]


@pytest.mark.long
def test_ranks_that_have_not_met_after_a_minute_are_remarked_while_they_run(drills: Cluster):
    job = submit(drills, "alone.py", "args=80", nodes=2)
    until(drills, job, "[ENV] the 2 ranks have not connected after 60 s: each trains alone")
    assert record(drills, job["job-id"])["JobState"] == "RUNNING"
    shown = drills.action("show-run", f"run={job['run']}")
    assert (shown["state"], "have not connected" in shown["remark"]) == ("RUNNING", True)
    until(drills, job, NEVER_MET)
    assert log_of(drills, job).count("on CPUs: true") == 2


@pytest.mark.long
def test_a_training_that_goes_on_keeps_its_recipe_and_names_what_is_changed(drills: Cluster):
    def train(*more: str) -> dict[str, str]:
        small = ("nodes=2", "gpus-per-node=0", "cpus-per-task=1", "memory=1G", "run=recipe")
        return drills.action("submit-ddp", "workload=gpt", *small, *more)

    train("args=--steps 10 --lr 0.003 --epoch-steps 5", "wait=true")
    other = "args=--steps 20 --lr 0.001"
    assert "lr 0.003 -> 0.001 from step 10" in train(other, "dry-run=true")["checks"]
    job = train(other, "wait=true")
    output = log_of(drills, job)
    assert "[CKPT] lr 0.003 -> 0.001 from step 10" in output
    assert "exact=no" in output
    changed = "steps 10 -> 20 from step 10\nlr 0.003 -> 0.001 from step 10"
    assert drills.action("show-run", "run=recipe")["changed"] == changed
    job = train("wait=true")
    assert "exact=yes" in log_of(drills, job)
    assert drills.action("show-run", "run=recipe")["changed"] == changed, (
        "what nobody types is the run's"
    )
