"""Everybody's jobs in the queue: whose they are, their priority, and in words why one waits."""

import dataclasses
import pathlib
import re

from ddp.slurm import jobs
from slurm_ddp import backports

_FIELDS = (
    "JobID UserName Account QOS State PriorityLong NumNodes TimeUsed TimeLimit ArrayTaskID Reason "
    "NodeList Name".split()
)
_FORMAT = ",".join(f"{name}:|" for name in _FIELDS)
_WORDS: dict[str, str] = backports.read_toml(pathlib.Path(__file__).with_name("reasons.toml"))[
    "words"
]
_FOR_NODES = ("", "None", "Resources", "Priority")  # None: slurmctld has not looked at it yet


@dataclasses.dataclass(frozen=True)
class QueuedJob:
    """A job that runs or waits."""

    job_id: int
    user: str
    account: str  # "" where Slurm keeps none
    qos: str
    state: str
    priority: int | None  # None if Slurm does not report it
    num_nodes: int
    elapsed: str
    time_limit: str
    nodes: str  # a hostlist; empty before it starts
    reason: str  # Slurm's word, such as Resources
    name: str

    @property
    def is_waiting(self) -> bool:
        """Whether it has not started, or was queued again."""
        return self.state == "PENDING"

    @property
    def waits_for_nodes(self) -> bool:
        """Whether free nodes, and nothing else, would start it."""
        return self.is_waiting and self.reason in _FOR_NODES

    @property
    def waits_for(self) -> str:
        """Why it waits, in words; "" if it does not."""
        return explain(self.reason) if self.is_waiting else ""


def list_all() -> tuple[QueuedJob, ...]:
    """List everybody's active jobs: those that run, then those that wait, the next one first.

    Raises SlurmError.
    """
    found: list[QueuedJob] = []
    for line in jobs.ask("squeue", "-h", "-a", "--sort=-p,i", "-O", _FORMAT).splitlines():
        # A job's name may have a line break in it: its second line is not a record
        row = line.split("|", len(_FIELDS) - 1)
        if len(row) == len(_FIELDS) and row[0].isdecimal():
            found.append(_parse(dict(zip(_FIELDS, row, strict=True))))
    return tuple(sorted(found, key=lambda job: job.is_waiting))


def explain(reason: str) -> str:
    """Return the meaning of Slurm's reason in words, or the reason itself if it is unknown."""
    for pattern, words in _WORDS.items():
        if re.match(pattern, reason):
            return words
    return reason


def _parse(record: dict[str, str]) -> QueuedJob:
    known = {name: "" if text in ("N/A", "(null)") else text for name, text in record.items()}
    name = known["Name"].rstrip("|")
    if known["ArrayTaskID"]:
        name = f"{name}-{known['ArrayTaskID']}"
    priority = known["PriorityLong"]
    nodes = known["NumNodes"].partition("-")[0]
    return QueuedJob(
        job_id=int(known["JobID"]),
        user=known["UserName"],
        account=known["Account"],
        qos=known["QOS"],
        state=known["State"],
        priority=int(priority) if priority.isdecimal() else None,
        num_nodes=int(nodes) if nodes.isdecimal() else 0,
        elapsed=known["TimeUsed"],
        time_limit=known["TimeLimit"],
        nodes=known["NodeList"].replace("None assigned", ""),
        reason=known["Reason"],
        name=name,
    )
