"""sbatch's answer among a site's own lines, and jobs that would wait for ever."""

import unittest.mock

import pytest
from cluster import Cluster, Job
from hypothesis import given
from hypothesis import strategies as st
from pip_double import Pip

from ddp import verbs
from ddp.base import Settings, TrainerError, texts_of
from ddp.options import fields
from ddp.slurm import jobs, submissions
from slurm_ddp.run import Completed

LINES = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\n")) | st.integers(1, 99).map(str), max_size=4
)


@given(before=LINES, after=LINES, job_id=st.integers(1, 2**32), cluster=st.sampled_from(["", ";west"]))
def test_the_id_is_found_among_any_lines_or_doubted(before: list[str], after: list[str], job_id: int, cluster: str):
    answer = "\n".join([*before, f"{job_id}{cluster}", *after, ""])
    with unittest.mock.patch.object(jobs, "run", lambda *_, **__: Completed(0, answer, "")):
        try:
            assert submissions.submit("job.sbatch") == job_id
        except jobs.UncertainError:
            assert any(line.partition(";")[0].strip().isdecimal() for line in "\n".join([*before, *after]).splitlines())


def test_the_line_of_a_site_s_plugin_is_no_id():  # reports/09: auks
    answer = "Thu Nov 26 15:08:22 2026 [INFO4] auks_krb5_cred: kerberos context successfully initialized\n31\n"
    with unittest.mock.patch.object(jobs, "run", lambda *_, **__: Completed(0, answer, "")):
        assert submissions.submit("job.sbatch") == 31


def submit(settings: Settings, **given: object) -> dict[str, str]:
    verb = verbs.ACTIONS["submit-ddp"]
    with settings.claims:
        return texts_of(verb.do(settings, fields.parse(verb.options, {"workload": "smoke", **given}), print) or {})


@pytest.mark.parametrize(
    ("reason", "option"),
    [
        ("PartitionNodeLimit", "nodes"),
        ("PartitionTimeLimit", "time-limit"),
        ("MaxMemPerLimit", "memory"),
        ("QOSMaxNodePerJobLimit", "nodes"),
        ("QOSMinGRES", "gpus-per-node"),
        ("QOSMaxJobsPerUserLimit", "qos"),
        ("Job's account not permitted to use this partition (gpu allows chem not physics)", "account"),
        ("AssocMaxJobsLimit", None),
    ],
)
def test_a_job_that_would_wait_for_ever_is_refused(
    settings: Settings, cluster: Cluster, pip: Pip, reason: str, option: str | None
):
    cluster.submitted = lambda job: setattr(job, "reason", reason)
    with pytest.raises(TrainerError) as caught:
        submit(settings, run="night")
    line = f"Slurm rejects the job: job 40 would wait for ever: {reason}; it is cancelled"
    assert str(caught.value).startswith(f"{option}: {line}" if option else line)
    assert cluster.job(40).cancelled
    assert not (settings.runs / "night").exists()


@pytest.mark.parametrize(
    ("reason", "limit"),
    [
        ("Resources", None),
        ("Priority", None),
        ("AssocGrpGRES", "AssocGrpGRES"),
        ("AssocMaxJobsLimit", "AssocMaxJobsLimit"),
    ],
)
def test_a_limit_that_other_jobs_free_is_reported(
    settings: Settings, cluster: Cluster, pip: Pip, reason: str, limit: str | None
):
    cluster.states = [("RUNNING", 0)]
    submit(settings, run="day")
    cluster.states = [("PENDING", 0)]

    def wait(job: Job) -> None:
        job.reason = reason

    cluster.submitted = wait
    results = submit(settings, run="night")
    assert (results["job-id"], results.get("waits-for")) == ("41", limit)
