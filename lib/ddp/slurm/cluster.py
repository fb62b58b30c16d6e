"""The cluster's partitions, and sbatch's verdict on a script with the option that it points to."""

import concurrent.futures
import os
import pwd
import re

from ddp.problem import ParameterError, Problem, Step
from ddp.results.progress import ahead
from ddp.slurm import accounts, jobs, partition_limits, partition_list, submissions, usable_nodes

_ACCOUNT = re.compile(r"^#SBATCH --account=(\S+)$", re.MULTILINE)
_listing: concurrent.futures.Future[tuple[partition_list.Partition, ...]] | None = None


def list_ahead() -> None:
    """Start to list the cluster's nodes, which takes longest on a large cluster."""
    global _listing  # noqa: PLW0603 - one command, one process
    _listing = ahead(partition_list.partitions)


def partitions(reservation: str | None = None) -> tuple[partition_list.Partition, ...]:
    """List Slurm's partitions with their nodes, as a job in the reservation meets them.

    Raises Problem.
    """
    with jobs.asking():
        listed = _listing.result() if _listing is not None else partition_list.partitions()
        found = usable_nodes.present(listed)
        if reservation is not None:
            found = usable_nodes.inside(found, reservation)
        return found


def judge(script: str, partition: str, *, contact: str = "") -> str:
    """Return the verdict of `sbatch --test-only`. Raises Problem if Slurm rejects the script.

    For an account or a QOS that is not the user's, the remedy is to ask `contact`, or the operator.
    """
    try:
        return submissions.judge(script)
    except jobs.NotAnsweringError as e:
        raise Problem(f"Slurm: {e}") from e
    except jobs.SlurmError as e:
        names = partition.split(",")
        chosen = next((one for one in partitions() if one.name in names), None)
        raise _lacks_association(str(e), script, contact) or refused(str(e), chosen) from e


def _lacks_association(words: str, script: str, contact: str) -> Problem | None:
    """Return the problem of a user without the account or the QOS, or None for another refusal."""
    named = _ACCOUNT.search(script)
    user = pwd.getpwuid(os.geteuid()).pw_name
    return accounts.explain_refusal(words, user, named[1] if named else "", contact)


# Words of sbatch, and the option that each points to
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
    "node name": "exclude",  # the names of nodelist were looked up before
    "GRES": "gpus-per-node",
    "(gres)": "gpus-per-node",
}
# Such as QOSMaxGRESPerUser (job_reason_str in slurm_protocol_defs.c): owner and kind of the limit
_LIMIT = re.compile(r"\b(QOS|Assoc)(?:Max|Min|Grp)\w*?(GRES|Node|Mem|Wall|Cpu|CPU|Job)?\w*")
_LIMITED = {"GRES": "gpus-per-node", "Node": "nodes", "Mem": "memory", "Wall": "time-limit"}
_POLICY = "violates accounting/QOS policy"
_SHOW_QOS = "sacctmgr show qos"
_SHOW_ASSOC = "sacctmgr show assoc where user=$USER"


def refused(stderr: str, partition: partition_list.Partition | None = None) -> Problem:
    """Turn sbatch's error into ours, with the option that it points to and the partition's lists.

    What Slurm calls an invalid account may be a limit of the QOS or of the account.
    """
    text = f"Slurm rejects the job: {stderr}"
    if found := _LIMIT.search(stderr):
        return _exceeds_limit(text, found)
    if _POLICY in stderr:
        text += "; it exceeds a limit of the QOS, the account or the partition"
        see = f"see them: {_SHOW_QOS}; {_SHOW_ASSOC}; scontrol show partition"
        return Problem(text, remedy=Step("show-limits", see))

    name = next((name for word, name in _CULPRITS.items() if word in stderr), None)
    if partition is not None:
        for rule, who in partition.limits.lists.items():
            if partition_limits.OPTIONS[rule] == name:
                text += f"; partition {partition.name} has {rule}={','.join(who)}"
    return Problem(text) if name is None else ParameterError(name, text)


def _exceeds_limit(text: str, found: re.Match[str]) -> Problem:
    """Return the problem of a job above a limit that Slurm names, such as QOSMaxGRESPerUser."""
    owner, what = found.groups()
    if owner == "QOS":
        text += f"; {found[0]} is a limit of the QOS, not a missing account"
        remedy = Step("show-limits", f"ask for less, or see it: {_SHOW_QOS}")
        name = _LIMITED.get(what, "qos")
        return ParameterError(name, text, remedy=remedy)

    text += f"; {found[0]} is a limit of the account, not a missing account"
    remedy = Step("show-limits", f"ask for less, or see it: {_SHOW_ASSOC}")
    if what in _LIMITED:
        return ParameterError(_LIMITED[what], text, remedy=remedy)
    return Problem(text, remedy=remedy)
