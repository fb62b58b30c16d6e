"""Why a job waits, in words."""

import re

import pytest

from ddp.slurm import queued_jobs

# job_state_reason_string() of slurmctld, 24.11, as far as a job that waits may have them
REASONS = """
Priority Dependency Resources PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive JobHeldAdmin
NodeDown BadConstraints BeginTime JobHeldUser Licenses Reservation ReqNodeNotAvail InvalidAccount InvalidQOS
QOSUsageThreshold QOSJobLimit QOSResourceLimit QOSTimeLimit AssociationJobLimit AssociationResourceLimit
AssociationTimeLimit QOSNotAllowed AccountNotAllowed DependencyNeverSatisfied QOSGrpCpuLimit QOSGrpGRES QOSGrpNodeLimit
QOSMaxCpuPerJobLimit QOSMaxCpuPerUserLimit QOSMaxJobsPerUserLimit QOSMaxGRESPerUser QOSMinCpuNotSatisfied
AssocGrpCpuLimit AssocGrpGRES AssocMaxJobsLimit AssocMaxCpuPerJobLimit AssocMaxGRESPerNode MaxCpuPerAccount
MaxGRESPerAccount JobArrayTaskLimit ReservationDeleted JobHoldMaxRequeue
""".split()


@pytest.mark.parametrize("reason", REASONS)
def test_a_known_reason_is_a_sentence(reason: str):
    words = queued_jobs.explain(reason)
    assert re.fullmatch(r"[a-zA-Z].* .*[a-zA-Z]", words), f"{reason}: {words}"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("ReqNodeNotAvail,_UnavailableNodes:slurmd-1", "nodes that it asks for are down"),
        ("Dependency", "it waits for another job"),
        ("DependencyNeverSatisfied", "the job that it depends on ended otherwise"),
        ("QOSMaxGRESPerUser", "its owner's jobs have all"),
        ("QOSMaxCpuPerJobLimit", "it asks for what its QOS"),
        ("ReservationDeleted", "its reservation was removed"),
        ("SomethingNew", "SomethingNew"),
    ],
)
def test_the_first_fitting_words_count_and_an_unknown_reason_stays(reason: str, words: str):
    assert queued_jobs.explain(reason).startswith(words)
