"""What doctor makes of the cluster as a whole: Slurm's settings, absent nodes, tracking, what is stored or measured."""

import collections.abc
import pathlib
import re

from ddp import remedies
from ddp.base import Settings, one_line
from ddp.doctor.node_facts import Facts, Finding, Level, leading_number
from ddp.environment import environments
from ddp.measure import collectives, sampling
from slurm_ddp.slurm import jobs

_REQUEUE_DELAY_S, _LONG_DELAY_S = 120, 300
_SLOW_START_S = 180.0
_LOST = {
    "1": "a job whose node is lost is queued again",
    "0": "a job whose node is lost comes back only where it asks for that, as the trainer's do",
}
_PREEMPTED = {  # the first of these words that is in PreemptMode (slurm.conf(5))
    "OFF": "no job is stopped for another one",
    "REQUEUE": "a job that is stopped for another one saves, is queued again and goes on from there",
    "CANCEL": "a job that is stopped for another one saves and ends",
    "SUSPEND": "a job that is stopped for another one keeps its memory, and its ranks stand still",
    "GANG": "jobs on the same cores take turns",
}
_TRACKED = {
    "cgroup": "whatever a rank has started ends with its job",
    "linuxproc": "what has lost its parent may outlive its job and keep the GPU",
    "pgid": "what a rank starts may outlive its job and keep the GPU",
}


def judge(settings: Settings, facts: Facts) -> list[Finding]:
    """Return the findings that are not about a single node."""
    return [
        *_about_slurm(settings, facts),
        *_about_accounting(settings, facts),
        *_about_absent(settings, facts),
        *_about_tracking(settings),
        *_about_sample(settings, facts),
        *_about_stored(settings, facts),
    ]


def settings_in_words(config: collections.abc.Mapping[str, str], partition: jobs.Partition) -> list[str]:
    """Return what Slurm's settings mean for a training job, a line for each; nothing where they are not known."""
    if not config:
        return []
    delay_s, setting = requeue_delay(config)
    lost = _LOST.get(config.get("JobRequeue", ""), "?")
    mode = preemption(config, partition)
    preempted = next((text for word, text in _PREEMPTED.items() if word in mode), "?")
    tracked = config.get("ProctrackType", "?").removeprefix("proctrack/")
    return [
        f"KillWait={config.get('KillWait', '?')}: between TERM and KILL; a run is warned before that, and saves",
        f"JobRequeue={config.get('JobRequeue', '?')}: {lost}",
        f"{setting}: a job that is queued again waits {delay_s} s before it may start; resume-now ends that",
        f"PreemptMode={mode}: {preempted}",
        f"ProctrackType={tracked}: {_TRACKED.get(tracked, '?')}",
    ]


def requeue_delay(config: collections.abc.Mapping[str, str]) -> tuple[int, str]:
    """Return how many seconds a job waits that is queued again, and the setting that says so.

    slurm.conf(5): cred_expire of AuthInfo, 120 unless it is set; since 25.11 also requeue_delay of SchedulerParameters.
    """
    for name, word in (("SchedulerParameters", "requeue_delay"), ("AuthInfo", "cred_expire")):
        if found := re.search(rf"(?:^|,)\s*{word}=(\d+)", config.get(name, "")):
            return int(found[1]), f"{name}={word}={found[1]}"
    return _REQUEUE_DELAY_S, "AuthInfo without cred_expire"


def tracking_in_words(settings: Settings) -> str:
    """Return where runs are tracked. MLflow refuses plain files since 3.13, so a path becomes an SQLite store there."""
    uri = settings.mlflow_uri
    if not uri:
        return "none: mlflow-tracking-uri is empty; each run's metrics.jsonl is its record"
    if "://" in uri:
        return f"the MLflow server {uri}"
    return f"the SQLite file {uri.rstrip('/')}/mlflow.db, written by one run at a time; for many at once use a server"


def preemption(config: collections.abc.Mapping[str, str], partition: jobs.Partition) -> str:
    """Return the PreemptMode of a partition's jobs: with preempt/partition_prio its own (slurm.conf(5))."""
    kind = config.get("PreemptType", "")
    if kind.endswith("/none") or kind == "(null)":
        return "OFF"
    own = partition.preempt_mode if kind.endswith("/partition_prio") else ""
    return own or config.get("PreemptMode", "OFF")


def _about_slurm(settings: Settings, facts: Facts) -> list[Finding]:
    """Return what Slurm's configuration means for training jobs."""
    found: list[Finding] = []
    config = facts.config
    if not config:
        return [
            Finding(
                "warning",
                "slurm",
                "scontrol show config gave no answer, so the configuration is not judged",
                "scontrol ping; juju status slurmctld",
            )
        ]
    kill_wait = leading_number(config.get("KillWait", ""))
    if kill_wait is not None and kill_wait < 10:
        text = f"KillWait is {kill_wait} s: at its time limit a job has no time left to write a checkpoint"
        found.append(Finding("warning", "slurm", text, remedies.slurm_conf(remedies.KILL_WAIT)))
    if "pgid" in config.get("ProctrackType", ""):
        text = "ProctrackType is proctrack/pgid: what a rank starts may outlive its job and keep the GPU"
        found.append(Finding("warning", "slurm", text, remedies.slurm_conf(remedies.PROCTRACK)))
    if "linear" in config.get("SelectType", ""):
        text = "SelectType is select/linear: every job takes whole nodes, whatever it asks for"
        found.append(Finding("note", "slurm", text, remedies.slurm_conf(remedies.SELECT)))
    if config.get("JobRequeue") == "0":
        text = "JobRequeue is 0: a job lost with its node does not come back; the trainer's own jobs ask for it"
        found.append(Finding("note", "slurm", text, remedies.slurm_conf(remedies.JOB_REQUEUE)))
    found += _about_preemption(settings, facts)
    delay_s, setting = requeue_delay(config)
    if delay_s > _LONG_DELAY_S:
        text = f"{setting}: a job that is queued again, as after each time limit, waits {delay_s} s before it may start"
        remedy = settings.typed("resume-now")
        if setting.startswith("AuthInfo"):  # upstream's charm cannot set requeue_delay
            shorter = re.sub(r"cred_expire=\d+", f"cred_expire={_REQUEUE_DELAY_S}", config["AuthInfo"])
            remedy += f"; {remedies.slurm_conf(f'AuthInfo={shorter}')}"
        found.append(Finding("note", "slurm", text, remedy))
    if config.get("AccountingStorageType", "").endswith("/none") or config.get("AccountingStorageType") == "(null)":
        age = config.get("MinJobAge", "300 sec")
        text = f"there is no slurmdbd: Slurm forgets a job {age} after its end; runs keep their own record"
        found.append(Finding("note", "slurm", text, "juju deploy slurmdbd; juju integrate slurmdbd slurmctld"))
    limit = leading_number(config.get("MaxArraySize", ""))
    if limit is not None and limit < 1001:
        text = f"MaxArraySize is {limit}: sweeps have at most {limit - 1} elements"
        found.append(Finding("note", "slurm", text, remedies.slurm_conf(remedies.MAX_ARRAY_SIZE)))
    return found


def _about_preemption(settings: Settings, facts: Facts) -> list[Finding]:
    """Return what becomes of a job of this partition that is preempted."""
    mode, name = preemption(facts.config, facts.partition), facts.partition.name
    if facts.config.get("PreemptType", "").endswith("/qos"):
        change = "sacctmgr modify qos NAME set preemptmode=requeue"
    else:
        change = remedies.partition_config(name, remedies.PREEMPT_MODE)
    if "CANCEL" in mode:
        text = f"PreemptMode is {mode}: a preempted run ends; submitted again, it goes on from its checkpoint"
        return [Finding("note", "slurm", text, f"{settings.typed('submit-ddp', run='NAME')}; {change}")]
    if "SUSPEND" in mode:
        text = f"PreemptMode is {mode}: a stopped run keeps its GPUs' memory, and fails when its ranks' waits run out"
        return [Finding("warning", "slurm", text, change)]
    return []


def _about_accounting(settings: Settings, facts: Facts) -> list[Finding]:
    """Return whether the submit user's jobs would be taken."""
    known = facts.accounting
    if known is None:
        if facts.config.get("AccountingStorageType", "").endswith("slurmdbd"):
            text = "slurmdbd gives no answer: jobs run, but accounts and QOS cannot be looked up"
            return [Finding("warning", "slurm", text, "juju status slurmdbd; sacctmgr show cluster")]
        return []
    if "associations" not in known.enforces or known.charged(facts.partition.name):
        return []
    text = f"{settings.user} has no account for partition {facts.partition.name}, and Slurm takes no job without one"
    some = next(iter(known.accounts), "NAME")
    return [Finding("error", "slurm", text, f"sacctmgr add user {settings.user} account={some}")]


def _about_absent(settings: Settings, facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    chosen = len(facts.left_out) == len(facts.asked)
    for name, why in sorted(facts.left_out.items()):
        level: Level = "error" if chosen else "warning"
        remedy = (
            f"squeue --nodelist={name} shows whose jobs these are; try again when they have ended"
            if why.startswith("busy")
            else f"scontrol show node {name}; then: scontrol update nodename={name} state=resume"
        )
        if why.startswith("busy"):
            level = "note" if not chosen else "warning"
        found.append(Finding(level, name, f"not examined: {why}", remedy))
    if remedies.NO_CREDENTIAL in facts.trouble:
        unknown, add = remedies.unknown_account(settings)
        return [*found, Finding("error", "slurmctld", f"{unknown}, so none of its jobs starts", add)]
    if not facts.reports and re.search(r"busy|immediate|Job/step already completing", facts.trouble):
        text = f"the nodes were not free in time: {one_line(facts.trouble, 200)}"
        found.append(Finding("warning", "slurm", text, "try again later, or with a longer wait-timeout"))
        return found
    for name in facts.asked:
        if name not in facts.left_out and name not in facts.reports:
            why = facts.trouble or "its task ended without an answer"
            remedy = f"on {name}: systemctl status slurmd; journalctl -u slurmd -n 50"
            found.append(Finding("error", name, f"Slurm could not examine it: {one_line(why, 300)}", remedy))
    return found


def _about_tracking(settings: Settings) -> list[Finding]:
    """Return whether all nodes would write to the same store."""
    uri = settings.mlflow_uri
    if not uri or "://" in uri or pathlib.PurePath(uri).is_relative_to(settings.workspace):
        return []
    text = (
        f"mlflow-tracking-uri={uri} is outside the workspace: runs are tracked on the disk of the node that has rank 0"
    )
    app = settings.unit.partition("/")[0]
    return [Finding("warning", "tracking", text, f"juju config {app} mlflow-tracking-uri={settings.workspace}/mlflow")]


def _about_sample(settings: Settings, facts: Facts) -> list[Finding]:
    """Return what the measured all_reduce says of the network between the ranks."""
    if (sample := facts.sample) is None:
        return []
    measure = settings.typed("benchmark-collectives", nodelist=",".join(facts.asked))
    if sample.outcome != "measured":
        level: Level = "error" if sample.outcome == "failed" else "warning"
        return [Finding(level, "collectives", f"nothing was measured: {sample.text}", measure)]
    found: list[Finding] = []
    ports = {
        name: port["device"] for name, about in facts.reports.items() for port in about["infiniband"]
        if port["state"] == "ACTIVE"
    }  # fmt: skip
    if sample.network == sampling.SOCKETS and ports:
        name, device = next(iter(ports.items()))
        text = f"NCCL sends over TCP although {device} on {name} is active: several times slower than it could be"
        remedy = "submit-ddp fabric=infiniband (or roce, efa); without NCCL_IB_DISABLE; is libibverbs installed there?"
        found.append(Finding("warning", "collectives", text, remedy))
    if sample.ready_s is not None and sample.ready_s > _SLOW_START_S:
        text = f"the ranks' first all_reduce came {sample.ready_s:.0f} s after the job's begin; each start costs that"
        remedy = (
            "UNPACK and COLD say what the environment takes; the job's log has a line for each node that unpacked it"
        )
        found.append(Finding("warning", "collectives", text, remedy))
    if sample.share is None:
        found.append(Finding("note", "collectives", f"{sample.text}; there is no baseline yet", measure))
    elif sample.share < collectives.KEEPS:
        remedy = f"squeue shows who else sends; ethtool, ibstat; if it is to stay so: {measure} store=always"
        found.append(Finding("warning", "collectives", sample.text, remedy))
    return found


def _about_stored(settings: Settings, facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    install = settings.typed("install-environment")
    if facts.untrusted:
        text, _, remedy = facts.untrusted.rpartition(": ")
        found.append(Finding("error", "workspace", text, remedy))
    for archive in facts.damaged:
        text = f"{archive} is not what its manifest says"
        found.append(Finding("error", "environment", text, f"{install} force=true"))
    if not facts.manifests:
        text = "no environment is installed yet; submit-ddp makes it first, which takes some minutes"
        found.append(Finding("warning", "environment", text, install))
    elif not any(environments.is_current(settings, manifest) for manifest in facts.manifests):
        text = "the installed environment was made from another payload or Python; the next run makes a new one"
        found.append(Finding("note", "environment", text, install))
    return found
