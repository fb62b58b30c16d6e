"""The rules for the cluster as a whole: Slurm's settings, absent nodes, tracking, what is stored or measured."""

import collections.abc
import pathlib
import re

from ddp import remedies
from ddp.base import Settings, one_line
from ddp.doctor.node_facts import Facts, Finding, leading_number
from ddp.doctor.rules import Rule, Table, Values, evaluate
from ddp.environment import environments
from ddp.measure import collectives, sampling
from ddp.slurm import jobs

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

SLURM: Table = (
    Rule("warning", lambda c: c.kill_wait is not None and c.kill_wait < 10,
         "KillWait is {kill_wait} s: at its time limit a job has no time left to write a checkpoint",
         remedies.slurm_conf(remedies.KILL_WAIT).text),
    Rule("warning", lambda c: "pgid" in c.proctrack,
         "ProctrackType is proctrack/pgid: what a rank starts may outlive its job and keep the GPU",
         remedies.slurm_conf(remedies.PROCTRACK).text),
    Rule("note", lambda c: "linear" in c.select,
         "SelectType is select/linear: every job takes whole nodes, whatever it asks for",
         remedies.slurm_conf(remedies.SELECT).text),
    Rule("note", lambda c: c.requeues == "0",
         "JobRequeue is 0: a job lost with its node is not queued again; the trainer's own jobs ask for it",
         remedies.slurm_conf(remedies.JOB_REQUEUE).text),
    (
        Rule("note", lambda c: "CANCEL" in c.preemption,
             "PreemptMode is {preemption}: a preempted run ends; submitted again, it goes on from its checkpoint",
             "{submit}; {requeue_preempted}"),
        Rule("warning", lambda c: "SUSPEND" in c.preemption,
             "PreemptMode is {preemption}: a stopped run keeps its GPUs' memory, "
             "and fails when its ranks' waits run out",
             "{requeue_preempted}"),
    ),
    Rule("note", lambda c: c.delay_s > _LONG_DELAY_S,
         "{delay}: a job that is queued again, as after each time limit, waits {delay_s} s before it may start",
         "{shorten}"),
    Rule("note", lambda c: c.storage.endswith("/none") or c.storage == "(null)",
         "there is no slurmdbd: Slurm forgets a job {age} after its end; runs keep their own record",
         "juju deploy slurmdbd; juju integrate slurmdbd slurmctld"),
    Rule("note", lambda c: c.max_array is not None and c.max_array < 1001,
         "MaxArraySize is {max_array}: sweeps have at most {max_elements} elements",
         remedies.slurm_conf(remedies.MAX_ARRAY_SIZE).text),
)  # fmt: skip
CLUSTER: Table = (
    Rule("warning", lambda c: not c.is_configured,
         "scontrol show config failed, so the configuration is not judged",
         "scontrol ping; juju status slurmctld"),
    (
        Rule("warning", lambda c: c.accounting is None and c.storage.endswith("slurmdbd"),
             "slurmdbd does not respond: jobs run, but accounts and QOS cannot be looked up",
             "juju status slurmdbd; sacctmgr show cluster"),
        Rule("error", lambda c: c.accounting and "associations" in c.accounting.enforces and not c.is_charged,
             "{user} has no account for partition {partition}, and Slurm takes no job without one",
             "sacctmgr add user {user} account={some_account}"),
    ),
    Rule("warning", lambda c: c.is_tracked_elsewhere,
         "mlflow-tracking-uri={mlflow} is outside the workspace: "
         "runs are tracked on the disk of the node that has rank 0",
         "juju config {app} mlflow-tracking-uri={workspace}/mlflow", where="tracking"),
    Rule("error", lambda c: c.untrusted, "{untrusted}", "{untrusted_remedy}", where="workspace"),
    (
        Rule("warning", lambda c: not c.has_environment,
             "no environment is installed yet; submit-ddp makes it first, which takes some minutes", "{install}",
             where="environment"),
        Rule("note", lambda c: not c.is_current,
             "the installed environment was made from another payload or Python; the next run makes a new one",
             "{install}", where="environment"),
    ),
)  # fmt: skip
ARCHIVE: Table = (
    Rule("error", lambda _: True, "{archive} does not match its manifest", "{install} force=true"),
)  # fmt: skip
LEFT_OUT: Table = (
    (
        Rule(lambda n: "warning" if n.is_all else "note", lambda n: n.why.startswith("busy"), "not examined: {why}",
             "squeue --nodelist={where} shows whose jobs these are; try again when they have ended"),
        Rule(lambda n: "error" if n.is_all else "warning", lambda _: True, "not examined: {why}",
             "scontrol show node {where}; then: scontrol update nodename={where} state=resume"),
    ),
)  # fmt: skip
SAMPLE: Table = (
    (
        Rule(lambda s: "error" if s.outcome == "failed" else "warning", lambda s: s.outcome != "measured",
             "nothing was measured: {text}", "{measure}"),
        Rule("note", lambda s: s.share is None, "{text}; there is no baseline yet", "{measure}"),
        Rule("warning", lambda s: s.share < collectives.KEEPS, "{text}",
             "squeue shows who else sends; ethtool, ibstat; if it is to stay so: {measure} store=always"),
    ),
    Rule("warning", lambda s: s.is_over_tcp,
         "NCCL sends over TCP although {device} on {node} is active: several times slower than it could be",
         "submit-ddp fabric=infiniband (or roce, efa); without NCCL_IB_DISABLE; is libibverbs installed there?"),
    Rule("warning", lambda s: s.outcome == "measured" and s.ready_s is not None and s.ready_s > _SLOW_START_S,
         "the ranks' first all_reduce came {ready_s:.0f} s after the job's begin; each start costs that",
         "UNPACK and COLD show what the environment takes; the job's log has a line for each node that unpacked it"),
)  # fmt: skip


def judge(settings: Settings, facts: Facts) -> list[Finding]:
    """Return the findings that are not about a single node."""
    values = _values(settings, facts)
    found = [*(evaluate(SLURM, values) if facts.config else []), *evaluate(CLUSTER, values)]
    found += _about_absent(settings, facts)
    if facts.sample is not None:
        found += evaluate(SAMPLE, _sample(settings, facts, facts.sample))
    for archive in facts.damaged:
        found += evaluate(ARCHIVE, Values(where="environment", archive=archive, install=values.install))
    return found


def settings_in_words(config: collections.abc.Mapping[str, str], partition: jobs.Partition) -> list[str]:
    """Explain Slurm's settings for a training job, a line for each; an empty list where they are not known."""
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
    """Return how many seconds a requeued job waits, and the setting that decides that.

    slurm.conf(5): cred_expire of AuthInfo, 120 unless it is set; since 25.11 also requeue_delay of SchedulerParameters.
    """
    for name, word in (("SchedulerParameters", "requeue_delay"), ("AuthInfo", "cred_expire")):
        if found := re.search(rf"(?:^|,)\s*{word}=(\d+)", config.get(name, "")):
            return int(found[1]), f"{name}={word}={found[1]}"
    return _REQUEUE_DELAY_S, "AuthInfo without cred_expire"


def tracking_in_words(settings: Settings) -> str:
    """Describe where runs are tracked. MLflow refuses plain files since 3.13, so a path becomes an SQLite store."""
    uri = settings.mlflow_uri
    if not uri:
        return "none: mlflow-tracking-uri is empty; each run's metrics.jsonl is its record"
    if "://" in uri:
        return f"the MLflow server {uri}"
    return f"the SQLite file {uri.rstrip('/')}/mlflow.db, written by one run at a time; for many at once use a server"


def preemption(config: collections.abc.Mapping[str, str], partition: jobs.Partition) -> str:
    """Return the PreemptMode that applies in a partition: its own with preempt/partition_prio (slurm.conf(5))."""
    kind = config.get("PreemptType", "")
    if kind.endswith("/none") or kind == "(null)":
        return "OFF"
    own = partition.preempt_mode if kind.endswith("/partition_prio") else ""
    return own or config.get("PreemptMode", "OFF")


def _values(settings: Settings, facts: Facts) -> Values:
    config, partition, known = facts.config, facts.partition, facts.accounting
    delay_s, delay = requeue_delay(config)
    shorten = settings.typed("resume-now")
    if delay.startswith("AuthInfo") and "AuthInfo" in config:  # upstream's charm cannot set requeue_delay
        shorter = re.sub(r"cred_expire=\d+", f"cred_expire={_REQUEUE_DELAY_S}", config["AuthInfo"])
        shorten += f"; {remedies.slurm_conf(f'AuthInfo={shorter}').text}"
    if config.get("PreemptType", "").endswith("/qos"):
        requeue_preempted = "sacctmgr modify qos NAME set preemptmode=requeue"
    else:
        requeue_preempted = remedies.partition_config(partition.name, remedies.PREEMPT_MODE).text
    max_array = leading_number(config.get("MaxArraySize", ""))
    uri = settings.mlflow_uri
    untrusted, _, untrusted_remedy = facts.untrusted.rpartition(": ")
    return Values(
        where="slurm", is_configured=bool(config), kill_wait=leading_number(config.get("KillWait", "")),
        proctrack=config.get("ProctrackType", ""), select=config.get("SelectType", ""),
        requeues=config.get("JobRequeue"), preemption=preemption(config, partition),
        submit=settings.typed("submit-ddp", run="NAME"), requeue_preempted=requeue_preempted,
        delay_s=delay_s, delay=delay, shorten=shorten, storage=config.get("AccountingStorageType", ""),
        age=config.get("MinJobAge", "300 sec"), max_array=max_array, max_elements=(max_array or 0) - 1,
        accounting=known, is_charged=known is not None and known.charged(partition.name),
        some_account=next(iter(known.accounts), "NAME") if known else "NAME",
        user=settings.user, partition=partition.name, app=settings.unit.partition("/")[0],
        workspace=settings.workspace, mlflow=uri,
        is_tracked_elsewhere=uri and "://" not in uri and not pathlib.PurePath(uri).is_relative_to(settings.workspace),
        untrusted=untrusted, untrusted_remedy=untrusted_remedy, install=settings.typed("install-environment"),
        has_environment=bool(facts.manifests),
        is_current=any(environments.is_current(settings, manifest) for manifest in facts.manifests),
    )  # fmt: skip


def _about_absent(settings: Settings, facts: Facts) -> list[Finding]:
    """Return the findings about nodes that were left out, and about those that returned no report."""
    found: list[Finding] = []
    is_all = len(facts.left_out) == len(facts.asked)
    for name, why in sorted(facts.left_out.items()):
        found += evaluate(LEFT_OUT, Values(where=name, why=why, is_all=is_all))
    if remedies.NO_CREDENTIAL in facts.trouble:
        unknown, add = remedies.unknown_account(settings)
        return [*found, Finding("error", "slurmctld", f"{unknown}, so none of its jobs starts", settings.render(add))]
    if not facts.reports and re.search(r"busy|immediate|Job/step already completing", facts.trouble):
        text = f"the nodes were not free in time: {one_line(facts.trouble, 200)}"
        return [*found, Finding("warning", "slurm", text, "try again later, or with a longer wait-timeout")]
    why = one_line(facts.trouble or "its task ended without an answer", 300)
    return found + [
        Finding(
            "error",
            name,
            f"Slurm could not examine it: {why}",
            f"on {name}: systemctl status slurmd; journalctl -u slurmd -n 50",
        )
        for name in facts.asked
        if name not in facts.left_out and name not in facts.reports
    ]


def _sample(settings: Settings, facts: Facts, sample: sampling.Sample) -> Values:
    ports = {
        name: port["device"] for name, about in facts.reports.items() for port in about["infiniband"]
        if port["state"] == "ACTIVE"
    }  # fmt: skip
    node, device = next(iter(ports.items()), ("", ""))
    return Values(
        where="collectives", outcome=sample.outcome, text=sample.text, share=sample.share, ready_s=sample.ready_s,
        node=node, device=device,
        is_over_tcp=sample.outcome == "measured" and sample.network == sampling.SOCKETS and bool(ports),
        measure=settings.typed("benchmark-collectives", nodelist=",".join(facts.asked)),
    )  # fmt: skip
