"""A script becomes a job: its id, and why the job waits."""

import contextlib
import re
import time

from ddp.slurm import jobs
from slurm_ddp.slurm import commands

_SBATCH = commands.find("sbatch")
_SQUEUE = commands.find("squeue")
_ID = re.compile(r"^\s*(\d+)(?:;\S+)?\s*$", re.MULTILINE)  # a federation adds the cluster's name
_MARK = re.compile(r"\bddp:[0-9a-f]{16}\b")
_LOOKS, _PAUSE_S = 5, 0.5  # slurmctld evaluates a new job within batch_sched_delay, 3 s (slurm.conf(5))
# Reasons that only another request ends, and the option that each points to: slurm.schedmd.com/job_reason_codes.html,
# and part_policy_valid_acct() and part_policy_valid_qos() in slurmctld of 22.05, whose reasons are sentences
FINAL = {
    "PartitionNodeLimit": "nodes",
    "PartitionTimeLimit": "time-limit",
    "PartitionConfig": "partition",  # slurmctld's first word for each limit of a partition
    "MaxMemPerLimit": "memory",
    "BadConstraints": "constraint",
    "AccountNotAllowed": "account",
    "InvalidAccount": "account",
    "Job's account": "account",
    "InvalidQOS": "qos",
    "QOSNotAllowed": "qos",
    "Job's QOS": "qos",
}
_OF_ONE_JOB = re.compile(r"(?:Assoc|QOS)(?:Max\w*Per(?:Job|Node)|Min)")
_OF_ONE_USER = re.compile(r"AssocMaxJobs|QOSMax\w*PerUser")  # final for a user without other jobs
_SHARED = re.compile(r"(?:Assoc|QOS)Grp|Max\w+PerAccount")


def judge(script: str) -> str:
    """Check a script with `sbatch --test-only`, which submits and writes nothing: its output. Raises SlurmError."""
    return jobs.words(jobs.ask(_SBATCH, "--test-only", stdin=script, answer="stderr"))


def submit(*words: str) -> int:
    """Submit the script named last and return the job's id, whatever a site prints around it.

    Raises UncertainError if no line, or more than one, may be the id, and SlurmError.
    """
    answer = jobs.ask(_SBATCH, "--parsable", *words)
    found = {*_ID.findall(answer)}
    if len(found) != 1:
        raise jobs.UncertainError(f"sbatch answered {answer.strip()[:80]!r} instead of a job's id")
    return int(found.pop())


def find(mark: str, *, user: str, name: str) -> int | None:
    """Return the job of this name that was submitted with `mark` in its comment; of an array its id.

    Where a site's plugin replaces comments, the newest active job of this name counts that has no other mark.
    None if the controller does not know it. Raises SlurmError.
    """
    form = "JobID:|,ArrayJobID:|,ArrayTaskID:|,State:|,Comment:|"
    others: list[int] = []
    for line in jobs.ask(_SQUEUE, "-h", "-a", "-t", "all", "-u", user, "-n", name, "-O", form).splitlines():
        job_id, array, task, state, comment = (*line.split("|", 4), "", "", "", "", "")[:5]
        number = job_id if task in ("N/A", "") else array
        if number.isdecimal() and mark in comment:
            return int(number)
        if number.isdecimal() and state in jobs.ACTIVE and not _MARK.search(comment):
            others.append(int(number))
    return max(others, default=None)


def explain_wait(job_id: int, *, user: str) -> tuple[str, bool]:
    """Return the limit that a new job waits for, and whether it does so for ever; "" if it waits for no limit.

    slurmctld takes a moment to evaluate a job: the answer may take two seconds.
    """
    for _ in range(_LOOKS):
        with contextlib.suppress(jobs.SlurmError):
            line = jobs.ask(_SQUEUE, "-h", "-a", "-j", str(job_id), "-O", "State:|,Reason:|", timeout=10)
            state, reason, *_ = (*line.partition("\n")[0].split("|"), "", "")
            if state == "PENDING" and is_limit(reason):
                return reason, _is_final(reason, user)
            if state != "PENDING" or reason not in ("None", ""):
                break
        time.sleep(_PAUSE_S)
    return "", False


def is_limit(reason: str) -> bool:
    """Return whether a job with this reason waits for a limit, not for its turn."""
    return reason.startswith(tuple(FINAL)) or any(found.match(reason) for found in (_OF_ONE_JOB, _OF_ONE_USER, _SHARED))


def _is_final(reason: str, user: str) -> bool:
    if _OF_ONE_USER.match(reason):
        known = jobs.jobs(user=user)
        return not any(one.is_active and one.state != "PENDING" for one in known)
    return not _SHARED.match(reason)
