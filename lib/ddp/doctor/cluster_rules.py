"""Rules that find the cluster's faults: Slurm's settings, absent nodes, tracking, workspace."""

import collections.abc
import pathlib
import re

from ddp.doctor import node_rules
from ddp.doctor.facts import Facts, leading_number
from ddp.doctor.findings import Findings
from ddp.problem import one_line
from ddp.settings import Settings
from ddp.slurm import partition_list, usable_nodes, usage

# slurmctld looks the account up to sign what starts a job (fetch_identity() in cred.c), not when it
# is submitted. Without one srun prints this (slurm_errno.c)
_NO_CREDENTIAL = "Error generating job credential"
_REFUSED = "Unable to allocate resources: "  # srun, with slurmctld's reason behind it
_NOT_FREE = re.compile(r"busy|immediate|Job/step already completing")
_REQUEUE_DELAY_S = 120
_LONG_DELAY_S = 60
_LONG_SILENCE_S = 120  # of a node that lost power


def judge(settings: Settings, facts: Facts, findings: Findings) -> None:
    """Judge everything that is not about a single node."""
    if facts.config:
        _configuration(facts, findings)
    else:
        findings.add("no-config", "slurm")
    if _is_tracked_elsewhere(settings):
        findings.add("tracked-elsewhere", "tracking")
    if facts.untrusted:
        untrusted, _, how = facts.untrusted.rpartition(": ")
        findings.add("untrusted", "workspace", untrusted=untrusted, how=how)
    if not facts.manifests:
        findings.add("no-environment", "environment")
    for run, host, words in facts.stragglers:
        findings.add("straggler", host, run=run, words=words)
    for name in facts.asked:
        if name in facts.checks and facts.checks[name].failures:
            findings.add("check-failed", name, why=facts.checks[name].failures[-1])
    _left_out(facts, findings)
    _unanswered(facts, findings)


def _is_tracked_elsewhere(settings: Settings) -> bool:
    """Return whether runs are tracked in a folder that the nodes do not share."""
    uri = settings.mlflow_uri
    if not uri or "://" in uri:
        return False
    return not pathlib.PurePath(uri).is_relative_to(settings.workspace.path)


def _configuration(facts: Facts, findings: Findings) -> None:
    config = facts.config
    # config_info.c; a failed push forgets the host (agent.c)
    if config.get("HASH_VAL", "").startswith("Different"):
        findings.add("stale-config", "slurm")
    node_rules.unfixed(config.get("SLURM_VERSION", ""), "slurmctld", findings)
    has_gpus = any(node.gpus for node in facts.partition.nodes)
    is_accounted = "slurmdbd" in config.get("AccountingStorageType", "")
    if has_gpus and is_accounted and usage.GPU not in config.get("AccountingStorageTRES", ""):
        findings.add("gpus-uncounted", "slurm")
    mode = _preemption(config, facts.partition)
    if "SUSPEND" in mode:
        findings.add("preempt-suspend", "slurm", mode=mode, partition=facts.partition.name)
    delay_s, setting = _requeue_delay(config)
    if delay_s > _LONG_DELAY_S:
        findings.add("requeue-delay", "slurm", setting=setting, seconds=delay_s)
    silence_s = leading_number(config.get("SlurmdTimeout", ""))
    if silence_s is not None and not 0 < silence_s <= _LONG_SILENCE_S:
        findings.add("slurmd-timeout", "slurm", seconds=silence_s)


def _requeue_delay(config: collections.abc.Mapping[str, str]) -> tuple[int, str]:
    """Return how many seconds a requeued job waits, and the setting that decides that.

    slurm.conf(5): cred_expire of AuthInfo, 120 unless it is set; since 25.11 also requeue_delay of
    SchedulerParameters.
    """
    for name, word in (("SchedulerParameters", "requeue_delay"), ("AuthInfo", "cred_expire")):
        found = re.search(rf"(?:^|,)\s*{word}=(\d+)", config.get(name, ""))
        if found:
            return int(found[1]), f"{name}={word}={found[1]}"
    return _REQUEUE_DELAY_S, "AuthInfo without cred_expire"


def _preemption(
    config: collections.abc.Mapping[str, str], partition: partition_list.Partition
) -> str:
    """Return a partition's PreemptMode: its own with preempt/partition_prio (slurm.conf(5))."""
    kind = config.get("PreemptType", "")
    if kind.endswith("/none") or kind == "(null)":
        return "OFF"
    own = partition.preempt_mode if kind.endswith("/partition_prio") else ""
    return own or config.get("PreemptMode", "OFF")


def _left_out(facts: Facts, findings: Findings) -> None:
    """Judge the nodes that were not examined, by the reason that Slurm gives."""
    is_all = len(facts.left_out) == len(facts.asked)
    for name, why in sorted(facts.left_out.items()):
        if why == usable_nodes.GONE:
            findings.add("gone", name, "error" if is_all else None)
        elif why.startswith("busy"):
            findings.add("busy", name, "warning" if is_all else None, why=why)
        elif why.startswith("MaxNodes"):
            findings.add("beyond-limit", name, why=why)
        else:
            findings.add("left-out", name, "error" if is_all else None, why=why)


def _unanswered(facts: Facts, findings: Findings) -> None:
    """Judge the nodes that returned no report, by what srun printed."""
    trouble = one_line(facts.trouble or "its task ended without an answer", 300)
    if _NO_CREDENTIAL in facts.trouble:
        findings.add("unknown-account", "slurmctld")
        return
    if not facts.reports and _NOT_FREE.search(facts.trouble):
        findings.add("not-free", "slurm", trouble=trouble)
        return
    if not facts.reports and _REFUSED in facts.trouble:
        findings.add("refused", "slurm", trouble=trouble)
        return
    for name in facts.asked:
        if name not in facts.left_out and name not in facts.reports:
            findings.add("no-answer", name, trouble=trouble)
