"""What doctor makes of the cluster as a whole: Slurm's settings, absent nodes, tracking, what is stored or measured."""

import re

import trainer_collectives
import trainer_environment
import trainer_sample
from trainer_base import Settings, one_line
from trainer_doctor_facts import Facts, Finding, Level, leading_number


def judge(settings: Settings, facts: Facts) -> list[Finding]:
    """Return the findings that are not about a single node."""
    return [
        *_about_slurm(settings, facts),
        *_about_accounting(settings, facts),
        *_about_absent(facts),
        *_about_sample(settings, facts),
        *_about_stored(settings, facts),
    ]


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
        found.append(Finding("warning", "slurm", text, _slurm_conf("KillWait=30")))
    if "pgid" in config.get("ProctrackType", ""):
        text = "ProctrackType is proctrack/pgid: what a rank starts may outlive its job and keep the GPU"
        found.append(Finding("warning", "slurm", text, _slurm_conf("ProctrackType=proctrack/cgroup")))
    if "linear" in config.get("SelectType", ""):
        text = "SelectType is select/linear: every job takes whole nodes, whatever it asks for"
        found.append(Finding("note", "slurm", text, _slurm_conf("SelectType=select/cons_tres")))
    if config.get("JobRequeue") == "0":
        text = "JobRequeue is 0: a job lost with its node does not come back; the trainer's own jobs ask for it"
        found.append(Finding("note", "slurm", text, _slurm_conf("JobRequeue=1")))
    preempt = config.get("PreemptMode", "OFF")
    if "CANCEL" in preempt:
        text = f"PreemptMode is {preempt}: a preempted run ends; submitted again, it goes on from its checkpoint"
        remedy = f"juju run {settings.unit} submit-ddp run=NAME; {_slurm_conf('PreemptMode=REQUEUE')}"
        found.append(Finding("note", "slurm", text, remedy))
    if config.get("AccountingStorageType", "").endswith("/none") or config.get("AccountingStorageType") == "(null)":
        age = config.get("MinJobAge", "300 sec")
        text = f"there is no slurmdbd: Slurm forgets a job {age} after its end; runs keep their own record"
        found.append(Finding("note", "slurm", text, "juju deploy slurmdbd; juju integrate slurmdbd slurmctld"))
    limit = leading_number(config.get("MaxArraySize", ""))
    if limit is not None and limit < 1001:
        text = f"MaxArraySize is {limit}: sweeps have at most {limit - 1} elements"
        found.append(Finding("note", "slurm", text, _slurm_conf("MaxArraySize=1001")))
    return found


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


def _about_absent(facts: Facts) -> list[Finding]:
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


def _about_sample(settings: Settings, facts: Facts) -> list[Finding]:
    """Return what the measured all_reduce says of the network between the ranks."""
    if (sample := facts.sample) is None:
        return []
    measure = f"juju run {settings.unit} benchmark-collectives nodelist={','.join(facts.asked)}"
    if sample.outcome != "measured":
        level: Level = "error" if sample.outcome == "failed" else "warning"
        return [Finding(level, "collectives", f"nothing was measured: {sample.text}", measure)]
    found: list[Finding] = []
    ports = {
        name: port["device"] for name, about in facts.reports.items() for port in about["infiniband"]
        if port["state"] == "ACTIVE"
    }  # fmt: skip
    if sample.network == trainer_sample.SOCKETS and ports:
        name, device = next(iter(ports.items()))
        text = f"NCCL sends over TCP although {device} on {name} is active: several times slower than it could be"
        remedy = "submit-ddp fabric=infiniband (or roce, efa); without NCCL_IB_DISABLE; is libibverbs installed there?"
        found.append(Finding("warning", "collectives", text, remedy))
    if sample.share is None:
        found.append(Finding("note", "collectives", f"{sample.text}; there is no baseline yet", measure))
    elif sample.share < trainer_collectives.KEEPS:
        remedy = f"squeue shows who else sends; ethtool, ibstat; if it is to stay so: {measure} store=always"
        found.append(Finding("warning", "collectives", sample.text, remedy))
    return found


def _about_stored(settings: Settings, facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    install = f"juju run {settings.unit} install-environment"
    for archive in facts.damaged:
        text = f"{archive} is not what its manifest says"
        found.append(Finding("error", "environment", text, f"{install} force=true"))
    if not facts.manifests:
        text = "no environment is installed yet; submit-ddp makes it first, which takes some minutes"
        found.append(Finding("warning", "environment", text, install))
    elif not any(trainer_environment.is_current(settings, manifest) for manifest in facts.manifests):
        text = "the installed environment was made from another payload or Python; the next run makes a new one"
        found.append(Finding("note", "environment", text, install))
    return found


def _slurm_conf(line: str) -> str:
    return f"juju config slurmctld slurm-conf-parameters='{line}'"
