"""What can happen to a training, done on purpose: it fails, is cancelled, warned, swept, crowded; Slurm is restarted.

The ranks are small scripts started with `launcher=srun`, so that a drill takes seconds; what torch itself does in such
moments is the payload's tests' affair, and test_bundle_runs trains for real.
"""

import json
import re
import subprocess

import pytest

from functional.conftest import REPOSITORY, Cluster
from functional.training_jobs import (
    CODE,
    PATIENCE_S,
    log_of,
    record,
    steps_done,
    submit,
    until,
    until_gone,
    until_state,
)

pytestmark = [
    pytest.mark.trains,
    pytest.mark.timeout(1500),
]  # the first test of a run deploys; each command has a limit of its own


def test_ranks_on_two_nodes_and_the_files_are_the_users(drills: Cluster):
    for unit, other in (("slurmd/0", "slurmd-1"), ("slurmd/1", "slurmd-0"), ("sackd/0", "slurmd-0")):
        assert drills.exec(unit, "getent", "hosts", other).code != 0, "nodes' names resolve nowhere"
    job = submit(drills, "options.py", "args=a b", "wait=true", nodes=2)
    assert job["state"] == "COMPLETED"
    output = log_of(drills, job)
    assert output.count("options a b") == 2
    assert set(re.findall(r"\[ENV\] node=(\S+)", output)) == {"slurmd-0", "slurmd-1"}
    assert drills.on("sackd/0", "find", job["run-dir"], "-not", "-user", "ubuntu") == ""


def test_a_rank_that_takes_more_memory_than_the_job_has_is_reported(drills: Cluster):
    small = ("gpus-per-node=0", "cpus-per-task=1", "memory=1G", "launcher=srun", "nodes=2", "wait=true")
    answer = drills.ctl("run", "trainer/0", "submit-ddp", f"workload={CODE}/greedy.py", *small, timeout=PATIENCE_S)
    assert answer.code == 1
    words = "killed: it took more memory than the job has; submit it with a larger memory"
    assert re.fullmatch(rf"submit-ddp: job \d+ FAILED, exit code \d+; rank 1 on slurmd-[01]: {words}", answer.error)


@pytest.mark.long
def test_an_account_that_slurmctld_lacks_is_named_with_the_command_that_adds_it(drills: Cluster):
    hosts = ("sackd/0", "slurmd/0", "slurmd/1")
    for unit in hosts:
        drills.on(unit, "useradd", "--uid", "2077", "drill")
    drills.on("sackd/0", "install", "-d", "-o", "drill", "/mnt/shared/second")
    drills.ok("config", "trainer", "workspace=/mnt/shared/second", "submit-user=drill")
    try:
        answer = drills.ctl("run", "trainer/0", "doctor")
        assert answer.code == 1
        add = "useradd --no-create-home --uid 2077 drill"
        assert f"juju exec --application slurmctld -- {add}" in answer.out
        assert "slurmctld: slurmctld does not know the account drill (uid 2077)" in answer.error
        drills.on("slurmctld/0", *add.split())
        assert drills.action("doctor")["errors"] == "0"
    finally:
        drills.ok("config", "trainer", "workspace=/mnt/shared", "submit-user=ubuntu")
        for unit in (*hosts, "slurmctld/0"):
            drills.exec(unit, "userdel", "--force", "drill")


def test_a_crash_ends_the_job_in_seconds_and_names_the_rank(drills: Cluster):
    small = ("gpus-per-node=0", "cpus-per-task=1", "memory=1G", "launcher=srun", "nodes=2", "args=never", "wait=true")
    # The other rank sleeps for ten minutes.
    answer = drills.ctl("run", "trainer/0", "submit-ddp", f"workload={CODE}/fails.py", *small, timeout=PATIENCE_S)
    assert answer.code == 1
    assert re.fullmatch(
        r"submit-ddp: job \d+ FAILED, exit code \d+; rank 1 on slurmd-[01]: ValueError: boom", answer.error
    )


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
    until(drills, job, "TERM: asking the ranks to save and leave")
    until_gone(drills, job)
    found = record(drills, job["job-id"])
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")


def test_a_warning_saves_requeues_once_and_the_run_goes_on_where_it_was(drills: Cluster):
    job = submit(drills, "steps.py", "args=100000 0.3")
    until(drills, job, "step=2 ")
    drills.on("sackd/0", "scancel", "--signal=USR1", "--batch", job["job-id"])
    until(drills, job, "is queued again")
    assert until_state(drills, job, "PENDING")["Restarts"] == "1"
    drills.action("resume-run", f"run={job['run']}")
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
    command = ["run", "trainer/0", "submit-ddp", f"workload={CODE}/steps.py", "args=20 0.5", "wait=true"]
    small = ["nodes=1", "gpus-per-node=0", "cpus-per-task=1", "memory=1G", "launcher=srun", "run=during-restart"]
    argv = [REPOSITORY / "sandboxctl", "--model", drills.model, *command, *small]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as waiting:
        until(drills, {"log": "/mnt/shared/runs/during-restart/logs/*.out"}, "step=1 ")
        drills.on("slurmctld/0", "systemctl", "stop", "slurmctld")
        try:
            (node,) = set(re.findall(r"host=(\S+)", log_of(drills, job)))
            program = f"[/]usr/bin/python3 .*{job['run-dir']}/program job job.json"
            drills.on(node.replace("-", "/"), "pkill", "-USR1", "-f", program)
            until(drills, job, "[REQUEUE] Slurm does not respond")
        finally:
            drills.on("slurmctld/0", "systemctl", "start", "slurmctld")
        output, _ = waiting.communicate(timeout=600)
    assert waiting.returncode == 0, output
    assert "state: COMPLETED" in output
    until(drills, job, "is queued again")
    assert until_state(drills, job, "PENDING")["Restarts"] == "1"
    drills.action("cancel-run", f"run={job['run']}")


@pytest.mark.long
def test_jobs_share_a_node(drills: Cluster):
    """Three jobs of one core on two nodes of two: two of them meet, with a port and an environment for each."""
    more = ("nodes=1", "gpus-per-node=0", "cpus-per-task=1", "memory=1G", "args=3 1")
    found = [drills.action("submit-ddp", f"workload={CODE}/steps.py", *more, f"run=crowd-{n}") for n in range(3)]
    ended = [until_state(drills, job, "COMPLETED", "FAILED") for job in found]
    assert {job["JobState"] for job in ended} == {"COMPLETED"}
    nodes = [job["NodeList"] for job in ended]
    assert len(set(nodes)) < 3
    ports = {re.findall(r"head=\S+:(\d+)", log_of(drills, job))[0] for job in found}
    assert len(ports) == 3


def test_a_sweep_runs_each_element_with_its_own_options(drills: Cluster):
    small = ("nodes=1", "gpus-per-node=0", "cpus-per-task=1", "memory=1G", "launcher=srun", "name=drill")
    done = drills.action("submit-sweep", f"workload={CODE}/options.py", "grid=lr=0.1,0.2", *small, "wait=true")
    assert done["states"] == "2 COMPLETED"
    for number, rate in enumerate(("0.1", "0.2")):
        assert f"options --lr {rate}" in drills.action("run-log", f"run=drill-{number}")["text"]


@pytest.mark.long
def test_a_run_of_a_sweep_is_cancelled_alone_and_then_the_sweep(drills: Cluster):
    small = (
        "nodes=1",
        "gpus-per-node=0",
        "cpus-per-task=1",
        "memory=1G",
        "launcher=srun",
        "name=ended",
        "args=1000 0.3",
    )
    drills.action("submit-sweep", f"workload={CODE}/steps.py", "grid=x=1,2,3", "parallel=2", *small)
    for number in (0, 1):
        until(drills, {"log": f"/mnt/shared/runs/ended-{number}/logs/*.out"}, "step=1 ")
    assert drills.action("cancel-run", "run=ended-0")["state"] == "CANCELLED"
    shown = drills.action("show-run", "run=ended")
    assert "1 CANCELLED" in shown["states"], shown
    assert drills.action("show-run", "run=ended-1")["state"] == "RUNNING"
    assert drills.action("cancel-run", "run=ended")["state"] == "CANCELLED"
    assert drills.action("show-run", "run=ended")["states"] == "3 CANCELLED"


def test_a_token_reaches_the_job_in_a_file_and_a_new_one_the_next_job(drills: Cluster):
    secret = drills.ok("add-secret", "hub", "token=hf_first").split()[-1]
    drills.ok("grant-secret", "hub", "trainer")
    drills.ok("config", "trainer", f"hf-token={secret}")
    try:
        for number, token in enumerate(("first", "second")):
            if number:
                drills.ok("update-secret", "hub", f"token=hf_{token}")
            job = submit(drills, "token.py", f"run=token-{number}", "wait=true")
            assert f"token 0o600 0o700 0o700 {token} False" in log_of(drills, job)
    finally:
        drills.ok("config", "trainer", "--reset", "hf-token")
    assert drills.on("sackd/0", "find", "/mnt/shared/.secrets", "-type", "f") == ""


def test_a_damaged_dataset_is_reported_in_one_line(drills: Cluster):
    folder = "/mnt/shared/datasets/hollow"
    drills.on("sackd/0", "sh", "-c", f"mkdir -p {folder}; echo '{{}}' > {folder}/dataset.json; chmod -R a+rX {folder}")
    try:
        answer = drills.ctl(
            "run", "trainer/0", "submit-ddp", "dataset=hollow", "nodes=1", "max-restarts=3", "wait=true"
        )
    finally:
        drills.on("sackd/0", "rm", "-rf", folder)
    assert answer.code == 1
    assert folder in answer.error
    assert "fault=mistake" in answer.out, "and it was not tried again"


@pytest.mark.long
def test_a_full_filesystem_is_reported_before_and_during_a_job(drills: Cluster):
    job = submit(drills, "full.py")
    until_state(drills, job, "FAILED")
    shown = drills.action("show-run", f"run={job['run']}")
    assert shown["failure"].endswith("OSError: [Errno 28] No space left on device")
    runs = "/mnt/shared/runs"
    owner = drills.on("sackd/0", "id", "-u", "ubuntu").strip()
    drills.on("sackd/0", "mount", "-t", "tmpfs", "-o", f"size=16m,mode=755,uid={owner}", "tmpfs", runs)
    try:
        answer = drills.ctl("run", "trainer/0", "submit-ddp", f"workload={CODE}/steps.py", "args=1 1")
        left = drills.on("sackd/0", "ls", runs)
    finally:
        drills.on("sackd/0", "umount", runs)
    assert answer.code == 1
    assert "has room for 16 MiB" in answer.error
    assert left == ""


def test_what_a_dry_run_checks_is_listed(drills: Cluster):
    before = drills.on("sackd/0", "ls", "/mnt/shared/runs")
    done = drills.action("submit-ddp", f"workload={CODE}/steps.py", "fabric=tcpxo", "dry-run=true")
    checks = [line.split(":")[0] for line in done["checks"].splitlines()]
    assert checks == ["resources", "workspace", "workload"]
    assert {"prolog", "epilog", "script", "verdict"} <= set(done)
    assert drills.on("sackd/0", "ls", "/mnt/shared/runs") == before
    assert json.dumps(done).count("rm -rf") == 0
