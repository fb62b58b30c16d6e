"""Turn a script into a job: Slurm's verdict before, the job's id, and why the job waits."""

import contextlib
import datetime
import pathlib
import re
import time

from ddp.slurm import jobs, partition_limits, partition_list
from slurm_ddp import backports
from slurm_ddp.slurm import times

_ID = re.compile(r"^\s*(\d+)(?:;\S+)?\s*$", re.MULTILINE)  # a federation adds the cluster's name
_MARK = re.compile(r"\bddp:[0-9a-f]{16}\b")
_FORECAST = re.compile(
    r"to start (?P<when>at (?P<start>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)) .*\bon nodes (?P<nodes>\S+)"
)
# Slurm plans a job without a limit for a year (job_end_time_reset() in job_mgr.c)
_ASSUMED_S = 365 * 86400.0
_SOON_S = 3600.0
_WAIT = "State:|,Account:|,QOS:|,Partition:|,Reason:|"
# slurmctld evaluates a new job within batch_sched_delay, 3 s (slurm.conf(5))
_LOOKS = 7
_PAUSE_S = 0.5
_KNOWN = backports.read_toml(pathlib.Path(__file__).with_name("reasons.toml"))
FINAL: dict[str, str] = _KNOWN["final"]
_OF_ONE_JOB = re.compile(_KNOWN["limits"]["job"])
_OF_ONE_USER = re.compile(_KNOWN["limits"]["user"])
_SHARED = re.compile(_KNOWN["limits"]["shared"])


def judge(script: str) -> str:
    """Check a script with `sbatch --test-only`, which submits nothing, and return its verdict.

    A start that Slurm makes up, behind a job without a time limit, is taken out of it.
    Raises SlurmError.
    """
    verdict = jobs.words(jobs.ask("sbatch", "--test-only", stdin=script, answer="stderr"))
    found = _FORECAST.search(verdict)
    if found is None:
        return verdict
    with contextlib.suppress(jobs.SlurmError, ValueError):  # then the verdict is Slurm's
        start = datetime.datetime.fromisoformat(found["start"])
        wait = start - datetime.datetime.now()  # sbatch prints local time, without a zone
        blocker = _blocker_without_limit(wait.total_seconds(), found["nodes"])
        if blocker is not None:
            whose = f"job {blocker.job_id} of {blocker.user}"
            known = f"at no known time, behind {whose}, which has no time limit,"
            return verdict.replace(found["when"], known)
    return verdict


def _blocker_without_limit(wait_s: float, nodes: str) -> jobs.Job | None:
    """Return a job without a time limit whose made-up end a forecast for these nodes relies on.

    Raises SlurmError.
    """
    if wait_s <= _SOON_S:
        return None
    wanted = set(jobs.hostnames(nodes))
    for job in jobs.jobs(user=None):
        if not job.is_active or job.time_limit not in times.NO_LIMIT:
            continue
        elapsed_s = times.parse_time(job.elapsed) or 0
        is_relied_on = wait_s > _ASSUMED_S - elapsed_s - _SOON_S
        if not is_relied_on:
            continue
        if not job.nodes or wanted & set(jobs.hostnames(job.nodes)):
            return job
    return None


def submit(*words: str) -> int:
    """Submit the script named last and return the job's id; a site may print text around it.

    Raises SlurmError.
    """
    answer = jobs.ask("sbatch", "--parsable", *words)
    found = set(_ID.findall(answer))
    if len(found) != 1:
        raise jobs.UncertainError(f"sbatch answered {answer.strip()[:80]!r} instead of a job's id")
    return int(found.pop())


def find(mark: str, *, user: str, name: str) -> int | None:
    """Return the id of the job or array of this name that was submitted with `mark` in its comment.

    If a site's plugin replaces comments, the newest active job of this name without another mark
    counts. None if the controller does not know it. Raises SlurmError.
    """
    form = "JobID:|,ArrayJobID:|,ArrayTaskID:|,State:|,Comment:|"
    text = jobs.ask("squeue", "-h", "-a", "-t", "all", "-u", user, "-n", name, "-O", form)
    unmarked: list[int] = []
    for line in text.splitlines():
        job_id, array, task, state, comment = _columns(line, 5)
        number = job_id if task in ("N/A", "") else array
        if not number.isdecimal():
            continue
        if mark in comment:
            return int(number)
        if state in jobs.ACTIVE and not _MARK.search(comment):
            unmarked.append(int(number))
    return max(unmarked, default=None)


def _columns(line: str, count: int) -> list[str]:
    """Split a line at `|` into exactly `count` columns; missing ones are ""."""
    columns = line.split("|", count - 1)
    return columns + [""] * (count - len(columns))


def explain_wait(job_id: int, *, user: str) -> tuple[str, bool]:
    """Return the limit that a new job waits for, or "", and whether it can never start.

    If Slurm does not answer, the text says so: the job may wait for a limit.
    """
    try:
        for _ in range(_LOOKS):
            text = jobs.ask("squeue", "-h", "-a", "-j", str(job_id), "-O", _WAIT, timeout=10)
            state, account, qos, partition, reason, _rest = _columns(text.partition("\n")[0], 6)
            if state != "PENDING":
                return "", False
            if reason not in ("None", ""):
                limit, is_final = _limit(reason, user)
                refusal = _refusal(partition, account, qos) if is_final else ""
                return refusal or limit, is_final
            time.sleep(_PAUSE_S)
    except jobs.NotAnsweringError as e:
        return f"unknown, since Slurm does not answer: {e}", False
    except jobs.SlurmError:  # the job has ended already
        return "", False
    return "", False


def _refusal(partition: str, account: str, qos: str) -> str:
    """Return why a partition does not take a job of this account and QOS, or "".

    Both may be the user's defaults.
    """
    with contextlib.suppress(jobs.SlurmError):
        for one in partition_list.partitions():
            if one.name != partition:
                continue
            refusal = partition_limits.refusal(partition, one.limits, account=account, qos=qos)
            if refusal is not None:
                return refusal[1]
    return ""


def _limit(reason: str, user: str) -> tuple[str, bool]:
    """Return the reason if it is a limit, or "", and whether that is final."""
    if reason.startswith(tuple(FINAL)) or _OF_ONE_JOB.match(reason):
        return reason, True
    if _OF_ONE_USER.match(reason):
        active = [one for one in jobs.jobs(user=user) if one.is_active]
        none_runs = all(one.state == "PENDING" for one in active)
        return reason, none_runs
    if _SHARED.match(reason):
        return reason, False
    return "", False
