"""A script becomes a job: its id, and why the job waits."""

import contextlib
import datetime
import pathlib
import re
import time

from ddp.slurm import jobs, policy
from slurm_ddp import backports
from slurm_ddp.slurm import times

_ID = re.compile(r"^\s*(\d+)(?:;\S+)?\s*$", re.MULTILINE)  # a federation adds the cluster's name
_MARK = re.compile(r"\bddp:[0-9a-f]{16}\b")
_FORECAST = re.compile(
    r"to start (?P<when>at (?P<start>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)) .*\bon nodes (?P<nodes>\S+)"
)
_ASSUMED_S = (
    365 * 86400.0
)  # Slurm plans a job without a limit for a year (job_end_time_reset() in job_mgr.c)
_SOON_S = 3600.0
_WAIT = "State:|,Account:|,QOS:|,Partition:|,Reason:|"
_LOOKS, _PAUSE_S = (
    7,
    0.5,
)  # slurmctld evaluates a new job within batch_sched_delay, 3 s (slurm.conf(5))
_KNOWN = backports.read_toml(pathlib.Path(__file__).with_name("reasons.toml"))
FINAL: dict[str, str] = _KNOWN["final"]
_OF_ONE_JOB, _OF_ONE_USER, _SHARED = (
    re.compile(_KNOWN["limits"][name]) for name in ("job", "user", "shared")
)


def judge(script: str) -> str:
    """Check a script with `sbatch --test-only`, which submits and writes nothing: its output. Raises SlurmError.

    A start that Slurm only makes up, behind a job that may run for ever, is not in it.
    """
    verdict = jobs.words(jobs.ask("sbatch", "--test-only", stdin=script, answer="stderr"))
    found = _FORECAST.search(verdict)
    if found is None:
        return verdict
    with contextlib.suppress(jobs.SlurmError, ValueError):  # then the verdict is Slurm's
        start = datetime.datetime.fromisoformat(found["start"])
        wait_s = (
            start - datetime.datetime.now()
        ).total_seconds()  # as sbatch prints it: without a zone
        if wait_s > _SOON_S and (endless := _endless(wait_s, found["nodes"])):
            whose = f"job {endless.job_id} of {endless.user}"
            return verdict.replace(
                found["when"], f"at no known time, behind {whose}, which has no time limit,"
            )
    return verdict


def _endless(wait_s: float, nodes: str) -> jobs.Job | None:
    """Return a job without a time limit whose made-up end a forecast for these nodes relies on. Raises SlurmError."""
    wanted = set(jobs.hostnames(nodes))
    for job in jobs.jobs(user=None):
        if not job.is_active or job.time_limit not in times.NO_LIMIT:
            continue
        elapsed_s = times.parse_time(job.elapsed) or 0
        is_relied_on = wait_s > _ASSUMED_S - elapsed_s - _SOON_S
        if is_relied_on and (not job.nodes or wanted & set(jobs.hostnames(job.nodes))):
            return job
    return None


def submit(*words: str) -> int:
    """Submit the script named last and return the job's id, whatever a site prints around it. Raises SlurmError."""
    answer = jobs.ask("sbatch", "--parsable", *words)
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
    for line in jobs.ask(
        "squeue", "-h", "-a", "-t", "all", "-u", user, "-n", name, "-O", form
    ).splitlines():
        job_id, array, task, state, comment = (*line.split("|", 4), "", "", "", "", "")[:5]
        number = job_id if task in ("N/A", "") else array
        if number.isdecimal() and mark in comment:
            return int(number)
        if number.isdecimal() and state in jobs.ACTIVE and not _MARK.search(comment):
            others.append(int(number))
    return max(others, default=None)


def explain_wait(job_id: int, *, user: str) -> tuple[str, bool]:
    """Return the limit that a new job waits for, and whether it does so for ever; "" if it waits for no limit.

    Where Slurm does not answer, that it may wait for one.
    """
    try:
        for _ in range(_LOOKS):
            line = jobs.ask("squeue", "-h", "-a", "-j", str(job_id), "-O", _WAIT, timeout=10)
            state, account, qos, partition, reason, *_ = (
                *line.partition("\n")[0].split("|"),
                *[""] * 5,
            )
            if state != "PENDING" or reason not in ("None", ""):
                limit, is_final = _limit(reason, user) if state == "PENDING" else ("", False)
                return (is_final and _refusal(partition, account, qos)) or limit, is_final
            time.sleep(_PAUSE_S)
    except jobs.NotAnsweringError as e:
        return f"unknown, since Slurm does not answer: {e}", False
    except jobs.SlurmError:  # the job has ended already
        return "", False
    return "", False


def _refusal(partition: str, account: str, qos: str) -> str:
    """Return why a partition does not take a job of this account and QOS, which may be the user's defaults, or ""."""
    with contextlib.suppress(jobs.SlurmError):
        limits = (one.limits for one in jobs.partitions() if one.name == partition)
        found = (policy.refusal(partition, one, account=account, qos=qos) for one in limits)
        return next(filter(None, found), ("", ""))[1]
    return ""


def _limit(reason: str, user: str) -> tuple[str, bool]:
    """Return the reason if it is a limit, and whether that is final."""
    if reason.startswith(tuple(FINAL)) or _OF_ONE_JOB.match(reason):
        return reason, True
    if _OF_ONE_USER.match(reason):
        return reason, all(one.state == "PENDING" for one in jobs.jobs(user=user) if one.is_active)
    return (reason, False) if _SHARED.match(reason) else ("", False)
