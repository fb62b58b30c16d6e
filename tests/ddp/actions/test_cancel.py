"""cancel-run: runs by name and by job id, and jobs that cannot be cancelled."""

import os
import pwd

from cluster import Cluster
from run_verbs import Program

USER = pwd.getpwuid(os.geteuid()).pw_name


def test_runs_are_cancelled_by_name_and_by_job(program: Program, cluster: Cluster):
    cluster.states = [("RUNNING", 0)]
    for name in "abc":
        program.run("submit-ddp", workload="smoke", run=name)
    assert program.fails("cancel-run") == "run: must be given"
    assert program.run("cancel-run", run="40") == {"job-id": "40", "state": "CANCELLED", "run": "a"}
    assert program.log == ["job 40 was RUNNING; cancelling, the ranks may save first"]
    assert program.fails("cancel-run", run="40") == "run: job 40 has ended already: CANCELLED"
    assert (
        program.fails("cancel-run", run="b,nope")
        == "run: no job of nope is pending or running; ddp list"
    )
    assert [job.cancelled for job in cluster.jobs] == [True, False, False], "all or none"
    results = program.run("cancel-run", run="b 42")
    assert results == {
        "job-id": "41, 42",
        "state": "CANCELLED",
        "run": "b, c",
        "cancelled": "41 42",
    }
    assert cluster.changes[-1] == ("scancel", "41", "42")


def test_another_users_job_is_not_cancelled(program: Program, cluster: Cluster):
    program.run("submit-ddp", workload="smoke", run="a")
    cluster.jobs[0].user = "eve"
    for job_id in (40, 99):
        assert (
            program.fails("cancel-run", run=job_id)
            == f"run: Slurm knows no job {job_id} of {USER}; ddp list"
        )
    assert not cluster.jobs[0].cancelled
