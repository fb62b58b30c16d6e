"""What is wrong with the cluster as a whole: Slurm's settings, absent nodes, tracking, what is stored."""

import collections.abc
import pathlib
import re

from ddp.doctor.facts import Facts, leading_number
from ddp.doctor.findings import Findings
from ddp.environment import environments
from ddp.problem import one_line
from ddp.settings import Settings
from ddp.slurm import access, jobs

# slurmctld looks the account up to sign what starts a job (fetch_identity() in cred.c), not when it is submitted.
# Without one srun prints this (slurm_errno.c)
_NO_CREDENTIAL = "Error generating job credential"
_REFUSED = "Unable to allocate resources: "  # srun, with slurmctld's reason behind it
_REQUEUE_DELAY_S, _LONG_DELAY_S = 120, 60
_LONG_SILENCE_S = 120  # of a node that lost power
_LEAST_KILL_WAIT_S = 10


def judge(settings: Settings, facts: Facts, findings: Findings) -> None:
    """Judge everything that is not about a single node."""
    if facts.config:
        _configuration(facts, findings)
    else:
        findings.add("no-config", "slurm")
    uri = settings.mlflow_uri
    if (
        uri
        and "://" not in uri
        and not pathlib.PurePath(uri).is_relative_to(settings.workspace.path)
    ):
        findings.add("tracked-elsewhere", "tracking")
    if facts.untrusted:
        untrusted, _, how = facts.untrusted.rpartition(": ")
        findings.add("untrusted", "workspace", untrusted=untrusted, how=how)
    if not facts.manifests:
        findings.add("no-environment", "environment")
    elif not any(environments.is_current(settings, manifest) for manifest in facts.manifests):
        findings.add("old-environment", "environment")
    for run, host, words in facts.stragglers:
        findings.add("straggler", host, run=run, words=words)
    _absent(facts, findings)


def requeue_delay(config: collections.abc.Mapping[str, str]) -> tuple[int, str]:
    """Return how many seconds a requeued job waits, and the setting that decides that.

    slurm.conf(5): cred_expire of AuthInfo, 120 unless it is set; since 25.11 also requeue_delay of SchedulerParameters.
    """
    for name, word in (("SchedulerParameters", "requeue_delay"), ("AuthInfo", "cred_expire")):
        if found := re.search(rf"(?:^|,)\s*{word}=(\d+)", config.get(name, "")):
            return int(found[1]), f"{name}={word}={found[1]}"
    return _REQUEUE_DELAY_S, "AuthInfo without cred_expire"


def preemption(config: collections.abc.Mapping[str, str], partition: jobs.Partition) -> str:
    """Return the PreemptMode that applies in a partition: its own with preempt/partition_prio (slurm.conf(5))."""
    kind = config.get("PreemptType", "")
    if kind.endswith("/none") or kind == "(null)":
        return "OFF"
    own = partition.preempt_mode if kind.endswith("/partition_prio") else ""
    return own or config.get("PreemptMode", "OFF")


def _configuration(facts: Facts, findings: Findings) -> None:
    config, partition = facts.config, facts.partition.name
    if config.get("HASH_VAL", "").startswith(
        "Different"
    ):  # config_info.c; a failed push forgets the host (agent.c)
        findings.add("stale-config", "slurm")
    kill_wait = leading_number(config.get("KillWait", ""))
    if kill_wait is not None and kill_wait < _LEAST_KILL_WAIT_S:
        findings.add("kill-wait", "slurm", seconds=kill_wait)
    if "pgid" in config.get("ProctrackType", ""):
        findings.add("proctrack", "slurm")
    if config.get("JobRequeue") == "0":
        findings.add("no-requeue", "slurm")
    mode = preemption(config, facts.partition)
    if "CANCEL" in mode:
        findings.add("preempt-cancel", "slurm", mode=mode, partition=partition)
    elif "SUSPEND" in mode:
        findings.add("preempt-suspend", "slurm", mode=mode, partition=partition)
    delay_s, setting = requeue_delay(config)
    if delay_s > _LONG_DELAY_S:
        findings.add("requeue-delay", "slurm", setting=setting, seconds=delay_s)
    silence_s = leading_number(config.get("SlurmdTimeout", ""))
    if silence_s is not None and not 0 < silence_s <= _LONG_SILENCE_S:
        findings.add("slurmd-timeout", "slurm", seconds=silence_s)
    storage = config.get("AccountingStorageType", "")
    if storage.endswith("/none") or storage == "(null)":
        findings.add("no-accounting", "slurm", age=config.get("MinJobAge", "300 sec"))


def _absent(facts: Facts, findings: Findings) -> None:
    """Judge the nodes that were left out, and those that returned no report."""
    is_all = len(facts.left_out) == len(facts.asked)
    for name, why in sorted(facts.left_out.items()):
        if why == access.GONE:
            findings.add("gone", name, "error" if is_all else None)
        elif why.startswith("busy"):
            findings.add("busy", name, "warning" if is_all else None, why=why)
        elif why.startswith("MaxNodes"):
            findings.add("beyond-limit", name, why=why)
        else:
            findings.add("left-out", name, "error" if is_all else None, why=why)
    trouble = one_line(facts.trouble or "its task ended without an answer", 300)
    if _NO_CREDENTIAL in facts.trouble:
        findings.add("unknown-account", "slurmctld")
    elif not facts.reports and re.search(
        r"busy|immediate|Job/step already completing", facts.trouble
    ):
        findings.add("not-free", "slurm", trouble=trouble)
    elif not facts.reports and _REFUSED in facts.trouble:
        findings.add("refused", "slurm", trouble=trouble)
    else:
        for name in facts.asked:
            if name not in facts.left_out and name not in facts.reports:
                findings.add("no-answer", name, trouble=trouble)
