"""sbatch's answer among a site's own lines, and jobs that would wait for ever."""

import unittest.mock

import pytest
from cluster import Cluster
from hypothesis import example, given
from hypothesis import strategies as st
from pip_double import Pip

from ddp import verbs
from ddp.base import Settings, TrainerError, texts_of
from ddp.options import fields
from ddp.slurm import jobs, submissions
from slurm_ddp.run import Completed

LINES = st.lists(st.text(st.characters(codec="utf-8")) | st.integers(1, 99).map(str), max_size=4).map("\n".join)
AUKS = "Thu Nov 26 15:08:22 2026 [INFO4] auks_krb5_cred: kerberos context successfully initialized"


@given(before=LINES, after=LINES, job_id=st.integers(1, 2**32), cluster=st.sampled_from(["", ";west"]))
@example(before=AUKS, after="", job_id=31, cluster="")
def test_the_id_is_found_among_any_lines_or_doubted(before: str, after: str, job_id: int, cluster: str):
    answer = Completed(0, f"{before}\n{job_id}{cluster}\n{after}\n", "")
    with unittest.mock.patch.object(jobs, "run", lambda *_, **__: answer):
        try:
            assert submissions.submit("job.sbatch") == job_id
        except jobs.UncertainError:
            assert any(line.partition(";")[0].strip().isdecimal() for line in f"{before}\n{after}".splitlines())


def submit(settings: Settings, run: str) -> dict[str, str]:
    verb = verbs.ACTIONS["submit-ddp"]
    with settings.claims:
        return texts_of(verb.do(settings, fields.parse(verb.options, {"workload": "smoke", "run": run}), print) or {})


@pytest.mark.parametrize(
    ("state", "reason", "wanted"),
    [
        ("RUNNING", "Resources", ""),
        ("RUNNING", "AssocGrpGRES", "AssocGrpGRES"),
        ("RUNNING", "AssocMaxJobsLimit", "AssocMaxJobsLimit"),
        ("FAILED", "AssocMaxJobsLimit", "Slurm rejects"),
        ("FAILED", "QOSMaxJobsPerUserLimit", "qos: Slurm rejects"),
        ("RUNNING", "QOSMaxNodePerJobLimit", "nodes: Slurm rejects"),
        (
            "RUNNING",
            "PartitionNodeLimit",
            "nodes: Slurm rejects the job: job 41 would wait for ever: PartitionNodeLimit",
        ),
        ("RUNNING", "MaxMemPerLimit", "memory: Slurm rejects"),
        ("RUNNING", "Job's account not permitted to use this partition (p allows a not b)", "account: Slurm rejects"),
    ],
)
def test_a_limit_is_reported_and_one_that_nothing_ends_is_refused(
    settings: Settings, cluster: Cluster, pip: Pip, state: str, reason: str, wanted: str
):
    cluster.states = [(state, 0)]  # of the user's other job
    submit(settings, "day")
    cluster.states = [("PENDING", 0)]
    cluster.submitted = lambda job: setattr(job, "reason", reason)
    try:
        answer = submit(settings, "night").get("waits-for", "")
    except TrainerError as e:
        answer = str(e)
        assert cluster.job(41).cancelled
        assert not (settings.runs / "night").exists()
    assert answer.startswith(wanted)
    assert bool(answer) == bool(wanted)
