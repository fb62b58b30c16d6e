"""The cluster's partitions, and what sbatch says of a script, with the option that it means."""

import concurrent.futures
import re

from ddp.problem import ParameterError, Problem, Step
from ddp.results.progress import ahead
from ddp.slurm import access, jobs, policy, submissions

_listing: concurrent.futures.Future[tuple[jobs.Partition, ...]] | None = None


def list_ahead() -> None:
    """Start to list the cluster's nodes: on a large cluster that takes as long as all else together."""
    global _listing  # noqa: PLW0603 - one command, one process
    _listing = ahead(jobs.partitions)


def partitions(reservation: str | None = None) -> tuple[jobs.Partition, ...]:
    """List Slurm's partitions with their nodes, as a job in the reservation meets them. Raises Problem."""
    with jobs.asking():
        found = access.present(_listing.result() if _listing is not None else jobs.partitions())
        return found if reservation is None else access.inside(found, reservation)


def judge(script: str, partition: str) -> str:
    """Check a script with `sbatch --test-only` and give its verdict. Raises Problem if Slurm rejects it."""
    try:
        return submissions.judge(script)
    except jobs.NotAnsweringError as e:
        raise Problem(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        raise refused(
            str(e), next((one for one in partitions() if one.name == partition), None)
        ) from e


_CULPRITS = {
    "Accounts=": "account",
    "Qos=": "qos",
    **submissions.FINAL,
    "nvalid account": "account",
    "artition": "partition",
    "qos": "qos",
    "eservation": "reservation",
    "eature": "constraint",
    "ime limit": "time-limit",
    "emory": "memory",
    "ependency": "dependency",
}  # in sbatch's words, and the option that each points to
# A reason such as QOSMaxGRESPerUser (job_reason_str in slurm_protocol_defs.c): whose limit it is, and of what
_LIMIT = re.compile(r"\b(QOS|Assoc)(?:Max|Min|Grp)\w*?(GRES|Node|Mem|Wall|Cpu|CPU|Job)?\w*")
_LIMITED = {"GRES": "gpus-per-node", "Node": "nodes", "Mem": "memory", "Wall": "time-limit"}
_POLICY = "violates accounting/QOS policy"
_SHOW_QOS, _SHOW_ASSOC = "sacctmgr show qos", "sacctmgr show assoc where user=$USER"


def refused(stderr: str, partition: jobs.Partition | None = None) -> Problem:
    """Turn sbatch's error into ours, with the option's name if Slurm's words identify it, and the partition's lists.

    A limit is one of the QOS or of the account; that the account is missing is what Slurm calls an invalid one.
    """
    text = f"Slurm rejects the job: {stderr}"
    if found := _LIMIT.search(stderr):
        is_qos = found[1] == "QOS"
        text += f"; {found[0]} is a limit of the {'QOS' if is_qos else 'account'}, not a missing account"
        remedy = Step(
            "show-limits", f"ask for less, or see it: {_SHOW_QOS if is_qos else _SHOW_ASSOC}"
        )
        name = _LIMITED.get(found[2], "qos" if is_qos else None)
        return ParameterError(name, text, remedy=remedy) if name else Problem(text, remedy=remedy)
    if _POLICY in stderr:
        text += "; it exceeds a limit of the QOS, the account or the partition"
        see = f"see them: {_SHOW_QOS}; {_SHOW_ASSOC}; scontrol show partition"
        return Problem(text, remedy=Step("show-limits", see))
    name = next((name for word, name in _CULPRITS.items() if word in stderr), None)
    if partition:
        lists = {
            rule: who
            for rule, who in partition.limits.lists.items()
            if policy.OPTIONS[rule] == name
        }
        text += "".join(
            f"; partition {partition.name} has {rule}={','.join(who)}"
            for rule, who in lists.items()
        )
    return Problem(text) if name is None else ParameterError(name, text)
