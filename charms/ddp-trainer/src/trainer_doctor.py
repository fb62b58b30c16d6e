"""doctor: one short job on all nodes at once, and what it found, in words: what would break a run, and what to type.

`gather` collects facts, `judge` turns them into findings, `report` into text; only `gather` touches anything.
"""

import base64
import collections.abc
import contextlib
import dataclasses
import json
import pathlib
import re
import secrets
import statistics
import typing
import urllib.parse
import zlib

import trainer_checks
import trainer_collectives
import trainer_environment
import trainer_params_runs
import trainer_plan
import trainer_sample
import trainer_workspace
from slurm_ddp import mounts
from slurm_ddp.slurm import access, jobs, nodes
from trainer_base import Log, ParameterError, Results, Settings, TrainerError, one_line, with_progress

Json = dict[str, typing.Any]
Level = typing.Literal["error", "warning", "note"]

MAX_NODES = 64  # every node speaks to every other; more are examined in several calls
_PROBE = pathlib.Path(__file__).with_name("trainer_probe.py")
_STEP_S = 240.0  # the probe's own deadlines add up to less
_CLOCK_S, _CLOCK_BREAKS_S = 1.0, 250.0  # munge refuses what is older than 300 s (munge(7), TTL)
_SLOW_WRITE_MB_S, _SLOW_RENAME_MS, _SLOW_SEEN_MS = 20.0, 500.0, 3000.0
_SLOW_IMPORT_S = 20.0
_LEAST_FREE, _LEAST_SHM = 2 << 30, 64 << 20
_LEAST_FILES, _LEAST_LOCKED = 1024, 64 << 20
_PORTS = (20000, 29999)  # of the rendezvous, see job.sbatch
_OLDEST_SLURM = (22, 5)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is not as it must be, or that is good to know."""

    level: Level  # error: a run would break; warning: it may suffer; note: good to know
    where: str  # a node's name, several, or what it is about
    text: str
    remedy: str  # what to type or do; a note may have none

    def __str__(self) -> str:
        return f"{self.level.upper()} {self.where}: {self.text}" + (f"\n    -> {self.remedy}" if self.remedy else "")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was gathered."""

    partition: jobs.Partition
    asked: tuple[str, ...]  # the nodes that were to be examined
    left_out: dict[str, str]  # node: why it could not be
    reports: dict[str, Json]
    trouble: str  # srun's words where some node gave no answer
    config: dict[str, str]
    manifests: tuple[trainer_workspace.Manifest, ...]
    damaged: tuple[str, ...]  # archives that are not what their manifests say
    login: tuple[str, str]  # type and source of the workspace's mount on this host
    accounting: access.Accounting | None = None  # None: there is none, or it gives no answer
    sample: trainer_sample.Sample | None = None  # None: it was not asked for


def doctor(settings: Settings, params: trainer_params_runs.Doctor, log: Log) -> Results:
    """Examine the nodes and return what was found. Raises TrainerError, with all of it, when a run would break."""
    facts = gather(settings, params, trainer_checks.partitions(), log)
    findings = judge(settings, facts)
    results = report(facts, findings)
    worst = next((finding for finding in findings if finding.level == "error"), None)
    if worst is not None:
        raise TrainerError(f"{results['verdict']}; the first: {worst.where}: {worst.text}", results=results)
    return results


def gather(
    settings: Settings, params: trainer_params_runs.Doctor, partitions: tuple[jobs.Partition, ...], log: Log
) -> Facts:
    """Return what this host, the controller and the nodes say."""
    partition = _partition(params, partitions)
    trainer_checks.admission(settings, params, partition)
    asked = _asked(params, partition)
    known = {node.name: node for node in _nodes()}
    left_out = {name: why for name in asked if (why := _unfit(known.get(name)))}
    fit = [name for name in asked if name not in left_out]
    contents = trainer_workspace.look(settings)
    mount = mounts.find(settings.workspace)
    folder = trainer_workspace.ask(
        settings, "open_examination", workspace=str(settings.workspace), nonce=secrets.token_hex(8)
    )
    reports: dict[str, Json] = {}
    trouble = ""
    try:
        if fit:
            spec = {
                "hosts": fit, "workspace": str(settings.workspace), "folder": folder["folder"],
                "nonce": folder["nonce"], "cache": str(settings.node_cache), "port": 0,
                "tracking": _tracking_server(settings.mlflow_uri), "environments": [
                    {"hash": manifest.hash, "sha256": manifest.sha256}
                    for manifest in contents.environments[:4]
                    if trainer_environment.is_current(settings, manifest)
                ],
            }  # fmt: skip
            options = _options(params, partition, fit, min(_free_gpus(known[name]) for name in fit))
            reports, trouble = _examine(settings, spec, options, log, patience_s=params.wait_timeout)
        damaged = with_progress(
            log,
            "checking the environments' archives",
            lambda: trainer_workspace.ask(
                settings, "verify_environments", timeout_s=300, folder=str(settings.environments)
            ),
        )["damaged"]
    finally:
        trainer_workspace.ask(settings, "close_examination", folder=folder["folder"])
    sample = None
    if params.collectives:
        sample = _sample(settings, params, log, contents=contents, partition=partition, reports=reports)
    try:
        config = jobs.configuration()
    except jobs.SlurmError:
        config = {}
    return Facts(
        partition=partition,
        asked=tuple(asked),
        left_out=left_out,
        reports=reports,
        trouble=trouble,
        config=config,
        manifests=contents.environments,
        damaged=tuple(damaged),
        login=(mount.fstype, mount.source) if mount else ("", ""),
        accounting=access.accounting(user=settings.user, configuration=config),
        sample=sample,
    )


def _sample(
    settings: Settings,
    params: trainer_params_runs.Doctor,
    log: Log,
    *,
    contents: trainer_workspace.Contents,
    partition: jobs.Partition,
    reports: dict[str, Json],
) -> trainer_sample.Sample:
    """Return what an all_reduce over the nodes that answered measures, with an environment that is there."""
    environment = trainer_environment.installed(settings, contents)
    if environment is None or not reports:
        return trainer_sample.Sample(
            "missed", "no node gave an answer" if environment else "no environment is installed"
        )
    seen = min(int(about["gpus"]["seen"]) for about in reports.values())
    gpus = seen if environment.manifest.build == "cuda" else 0
    return trainer_sample.take(settings, params, log, partition=partition.name, hosts=sorted(reports), gpus=gpus)


def _options(params: trainer_params_runs.Doctor, partition: jobs.Partition, fit: list[str], gpus: int) -> list[str]:
    """Return what srun is told; as many GPUs are asked for as every node has free."""
    options = [
        f"--partition={partition.name}", f"--nodes={len(fit)}", f"--ntasks={len(fit)}", "--ntasks-per-node=1",
        f"--nodelist={','.join(fit)}", "--cpus-per-task=1", "--mem=1024M", "--time=6", "--chdir=/",
        f"--immediate={params.wait_timeout}", "--job-name=trainer-doctor", "--propagate=NONE", "--wait=60",
    ]  # fmt: skip
    given = {"account": params.account, "qos": params.qos, "reservation": params.reservation}
    options += [f"--{name}={value}" for name, value in given.items() if value]
    return [*options, f"--gpus-per-node={gpus}"] if gpus else options


def _examine(
    settings: Settings, spec: Json, options: list[str], log: Log, *, patience_s: float
) -> tuple[dict[str, Json], str]:
    """Return each node's report, and what srun said where some gave none."""
    hosts: list[str] = spec["hosts"]
    argv = ("/usr/bin/python3", "-I", "-c", _PROBE.read_text(), json.dumps(spec))
    text, trouble = with_progress(
        log,
        f"examining {len(hosts)} node{'s' if len(hosts) > 1 else ''}: {_some(hosts)}",
        lambda: jobs.run_everywhere(*argv, options=options, user=settings.user_to_be, timeout_s=_STEP_S + patience_s),
    )
    return read_reports(text), trouble


def read_reports(text: str) -> dict[str, Json]:
    """Return each node's report from what the tasks printed; one that is not whole, or not ours, is left out."""
    pieces: dict[tuple[str, int], dict[int, str]] = {}
    for line in text.splitlines():
        match line.split():
            case ["DOCTOR", node, number, count, piece] if number.isdecimal() and count.isdecimal():
                pieces.setdefault((node, int(count)), {})[int(number)] = piece
            case _:
                continue
    reports: dict[str, Json] = {}
    for (node, count), found in pieces.items():
        if sorted(found) != list(range(count)):
            continue
        with contextlib.suppress(ValueError, TypeError, zlib.error):
            packed = base64.b64decode("".join(found[number] for number in sorted(found)), validate=True)
            answer = _dict(json.loads(zlib.decompressobj().decompress(packed, 4 << 20)))
            if answer.get("node") == node:
                reports[node] = answer
    return reports


# -- what the facts mean ----------------------------------------------------------------------------------------------


def judge(settings: Settings, facts: Facts) -> tuple[Finding, ...]:
    """Return the findings, the worst first."""
    found: list[Finding] = []
    found += _about_slurm(settings, facts)
    found += _about_accounting(settings, facts)
    found += _about_absent(facts)
    found += _about_versions(facts)
    for name, about in sorted(facts.reports.items()):
        found += _about_filesystem(settings, facts, name, about)
        found += _about_host(settings, facts, name, about)
        found += _about_network(facts, name, about)
        found += _about_environment(settings, facts, name, about)
        found += _about_gpus(settings, facts, name, about)
        found += _about_tracking(settings, name, about)
    found += _about_sharing(settings, facts)
    found += _about_clocks(facts)
    found += _about_sample(settings, facts)
    found += _about_stored(settings, facts)
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(_merged(found), key=lambda finding: order[finding.level]))


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
    kill_wait = _leading_number(config.get("KillWait", ""))
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
    limit = _leading_number(config.get("MaxArraySize", ""))
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


def _about_versions(facts: Facts) -> list[Finding]:
    found: list[Finding] = []
    levels: dict[str, Level] = {
        "python": "error", "machine": "error", "libc": "warning", "system": "warning", "slurm": "warning",
        "kernel": "note",
    }  # fmt: skip
    for key, level in levels.items():
        groups = _grouped({name: str(about["versions"].get(key, "")) for name, about in facts.reports.items()})
        if len(groups) > 1:
            found.append(
                Finding(level, "nodes", f"{key} differs: {_told(groups)}", "bring the nodes to the same release")
            )
    controller = _version(facts.config.get("SLURM_VERSION", ""))
    for name, about in sorted(facts.reports.items()):
        theirs = _version(str(about["versions"].get("slurm", "")))
        if theirs and theirs < _OLDEST_SLURM:
            text = f"Slurm {about['versions']['slurm']} is older than 22.05, the oldest that the jobs are written for"
            found.append(Finding("error", name, text, f"on {name}: apt-get install slurmd, from a release that has it"))
        elif theirs and controller and theirs > controller:
            text = (
                f"its Slurm {about['versions']['slurm']} is newer than the controller's {facts.config['SLURM_VERSION']}"
            )
            found.append(Finding("error", name, text, "upgrade slurmctld first (Slurm's upgrade guide)"))
    return found


def _about_filesystem(settings: Settings, facts: Facts, name: str, about: Json) -> list[Finding]:
    filesystem: Json = about["filesystem"]
    join = f"juju status shared-filesystem-client; integrate it with the application of {name} (juju-info)"
    mount = _dict(filesystem.get("mount"))
    if mount and mount.get("mountpoint") == "/":
        return [
            Finding("error", name, f"nothing is mounted at {settings.workspace}: it lies on the node's own disk", join)
        ]
    if "hung" in filesystem:
        text = f"{settings.workspace} gave no answer within 25 s ({mount.get('type') or 'asking for its mount'})"
        return [
            Finding("error", name, text, "is the filesystem's server up? juju status; then reboot the node or remount")
        ]
    if "error" in filesystem:
        return [Finding("error", name, f"the workspace cannot be used: {filesystem['error']}", join)]
    found: list[Finding] = []
    theirs, ours = (mount.get("type"), mount.get("source")), facts.login
    if theirs != ours:
        text = f"{settings.workspace} is {theirs[0]} {theirs[1]} here and {ours[0]} {ours[1]} on {settings.unit}"
        remedy = f"findmnt {settings.workspace} on both; if they are not the same filesystem: {join}"
        found.append(Finding("note", name, text, remedy))
    if filesystem.get("read_only"):
        found.append(Finding("error", name, f"{settings.workspace} is mounted read-only", join))
    if (free := filesystem.get("free")) is not None and free < _LEAST_FREE:
        text = f"{settings.workspace} has {free >> 20} MiB free"
        found.append(
            Finding("error" if free < 256 << 20 else "warning", "workspace", text, "remove old runs, or grow it")
        )
    if filesystem.get("inodes") == 0:
        found.append(
            Finding("error", "workspace", f"{settings.workspace} has no inode left", "remove files, or grow it")
        )
    speed = filesystem.get("write_mb_s")
    if speed is not None and speed < _SLOW_WRITE_MB_S:
        text = f"writes {speed:.1f} MB/s to {settings.workspace} (8 MiB with fsync): checkpoints will take long"
        remedy = f"on {name}: findmnt {settings.workspace}; is the server that it names near, and idle?"
        found.append(Finding("warning", name, text, remedy))
    rename = filesystem.get("rename_ms")
    if rename is not None and rename > _SLOW_RENAME_MS:
        text = f"making and renaming a file in {settings.workspace} takes {rename:.0f} ms"
        remedy = f"on {name}: findmnt {settings.workspace}; is the filesystem's metadata server busy or far away?"
        found.append(Finding("warning", name, text, remedy))
    if filesystem.get("locks") is False:
        found.append(
            Finding("note", name, f"{settings.workspace} has no flock; nothing of the trainer's needs it there", "")
        )
    if "writeback" in str(mount.get("options", "")):
        text = "JuiceFS writes back: other nodes see files late, and a node that dies loses what it has not uploaded"
        found.append(
            Finding("warning", name, text, "juju config shared-filesystem-client (mount options without writeback)")
        )
    return found


def _about_host(settings: Settings, facts: Facts, name: str, about: Json) -> list[Finding]:
    found: list[Finding] = []
    limits, disk = _dict(about["limits"]), _dict(about["disk"])
    if about["uid"] != settings.uid:
        text = f"{settings.user} is uid {about['uid']} here and {settings.uid} on {settings.unit}"
        found.append(Finding("error", name, text, "give the account the same uid everywhere"))
    if (files := limits.get("nofile")) is not None and files < _LEAST_FILES:
        text = f"a job may open {files} files only"
        found.append(
            Finding("warning", name, text, "LimitNOFILE=1048576 in slurmd's unit, then: systemctl restart slurmd")
        )
    locked = limits.get("memlock")
    if about["infiniband"] and locked is not None and locked < _LEAST_LOCKED:
        text = f"a job may lock {locked >> 10} KiB of memory: RDMA registers more than that, and NCCL fails"
        found.append(
            Finding("error", name, text, "LimitMEMLOCK=infinity in slurmd's unit, then: systemctl restart slurmd")
        )
    shm = limits.get("shm")
    if shm is None or shm < _LEAST_SHM:
        text = "there is no /dev/shm" if shm is None else f"/dev/shm has {shm >> 20} MiB"  # noqa: S108
        level: Level = "error" if _dict(about["gpus"]).get("seen") else "warning"
        found.append(
            Finding(level, name, f"{text}: ranks of one node talk through it", "mount -o remount,size=50% /dev/shm")
        )
    if (ports := limits.get("ports")) and ports[0] <= _PORTS[1]:
        text = f"outgoing connections take ports from {ports[0]} on, which the rendezvous uses up to {_PORTS[1]}"
        found.append(Finding("warning", name, text, "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"))
    needed = max((m.unpacked_bytes for m in facts.manifests[:1]), default=0)
    unpacked = any(e.get("unpacked") for e in about["environments"])
    if "error" in disk:
        place = settings.node_cache.parent
        remedy = f"on {name}: df {place}; ls -ld {place}; all must be able to write there"
        found.append(Finding("error", name, f"the environment cannot be unpacked: {disk['error']}", remedy))
    elif needed and not unpacked and disk["free"] < needed + (256 << 20):
        free_mb, needed_mb = disk["free"] >> 20, (needed >> 20) + 256
        text = f"{settings.node_cache.parent} has {free_mb} MiB free; the environment needs {needed_mb}"
        found.append(Finding("error", name, text, f"make room in {settings.node_cache.parent}"))
    return found


def _about_network(facts: Facts, name: str, about: Json) -> list[Finding]:
    network: Json = about["network"]
    found: list[Finding] = []
    if network["port"] is None:
        ports = ", ".join(str(port) for port, _ in network["taken"])
        text = f"none of the ports {ports} could be taken: {network['taken'][0][1]}"
        found.append(Finding("error", name, text, "ss -ltnp, and stop what listens there"))
    for host, peer in sorted(network["peers"].items()):
        mend = f"on {name}: getent hosts {host}; mend DNS or /etc/hosts"
        if "unresolved" in peer:
            found.append(Finding("error", name, f"does not know the name {host}: {peer['unresolved']}", mend))
            continue
        if str(peer.get("address", "")).startswith("127."):
            text = f"reaches {host} by {peer['address']}, its own loopback: ranks would wait for each other for ever"
            found.append(Finding("error", name, text, mend))
            continue
        if "unreachable" in peer and host in facts.reports:
            ports = f"{_PORTS[0]}-{_PORTS[1]}"
            where = f"{host} ({peer.get('address', '?')})"
            text = f"cannot reach {where} on the rendezvous ports {ports}: {peer['unreachable']}"
            remedy = (
                f"let all TCP ports through between the nodes: the firewall of {host}, or the cloud's security group"
            )
            found.append(Finding("error", name, text, remedy))
        elif "route" in peer:
            found.append(
                Finding(
                    "error",
                    name,
                    f"has no route to {host}: {peer['route']}",
                    f"on {name}: ip route get {peer.get('address', host)}",
                )
            )
        elif "port" in peer and not peer.get("iface"):
            text = f"has no interface with the address {peer.get('mine')} that leads to {host}"
            found.append(Finding("warning", name, text, "gloo needs GLOO_SOCKET_IFNAME then: submit-ddp env=..."))
    seen = next((peer for peer in network["peers"].values() if "seen_ms" in peer), None)
    if seen and seen["seen_ms"] is None:
        before = next(host for host, peer in network["peers"].items() if "seen_ms" in peer)
        text = f"does not see within 10 s what {before} wrote: other filesystems at the same path, or too long a cache"
        found.append(Finding("error", name, text, "findmnt on both nodes; the same source must be mounted"))
    elif seen and seen["seen_ms"] > _SLOW_SEEN_MS:
        text = f"sees another node's new file only after {seen['seen_ms'] / 1e3:.1f} s"
        found.append(Finding("warning", name, text, "NFS: mount with lookupcache=positive or a smaller acdirmax"))
    return found


def _about_environment(settings: Settings, facts: Facts, name: str, about: Json) -> list[Finding]:
    found: list[Finding] = []
    theirs = str(about["versions"]["python"])
    if facts.manifests and theirs != facts.manifests[0].python:
        text = f"has Python {theirs}, the environment was made for {facts.manifests[0].python}"
        found.append(
            Finding(
                "error",
                name,
                text,
                f"the same release on all hosts; then: juju run {settings.unit} install-environment",
            )
        )
    for environment in about["environments"]:
        if "error" in environment:
            text = f"import torch fails in the environment {environment['hash']}: {environment['error']}"
            home = settings.node_cache / environment["hash"]
            found.append(
                Finding("error", name, text, f"on {name}: rm -r {home} {home}.complete; the next job unpacks it anew")
            )
        elif environment.get("seconds", 0.0) > _SLOW_IMPORT_S:
            text = f"import torch takes {environment['seconds']:.0f} s from {settings.node_cache}"
            found.append(Finding("warning", name, text, "the node's own disk is slow, or its memory full"))
    return found


def _about_gpus(settings: Settings, facts: Facts, name: str, about: Json) -> list[Finding]:
    gpus: Json = about["gpus"]
    promised = next((node.gpus for node in facts.partition.nodes if node.name == name), 0)
    found: list[Finding] = []
    if promised and not gpus["seen"]:
        devices = f"{gpus['devices']} device files" if gpus["devices"] else "no device file"
        level: Level = "error" if settings.torch_build == "cuda" else "warning"
        text = f"Slurm counts {promised} GPUs, but no CUDA driver answers here ({devices} in /dev)"
        found.append(Finding(level, name, text, "juju status slurm-gpu; nvidia-smi on the node"))
    elif promised and 0 < gpus["seen"] < promised and not facts.left_out.get(name):
        text = f"Slurm counts {promised} GPUs, this job was shown {gpus['seen']}"
        found.append(Finding("note", name, text, "the others may be in use; else: nvidia-smi on the node"))
    for index, card in enumerate(gpus["cards"]):
        if card["ecc"]:
            text = f"GPU {index} ({card['name']}) has {card['ecc']} uncorrected memory errors"
            found.append(
                Finding("error", name, text, f"scontrol update nodename={name} state=drain reason=ecc; nvidia-smi -r")
            )
    if gpus.get("no_peer"):
        pairs = ", ".join(f"{one}-{other}" for one, other in gpus["no_peer"][:4])
        text = f"GPUs cannot reach each other's memory directly ({pairs}): ranks of this node talk through host memory"
        found.append(Finding("warning", name, text, "nvidia-smi topo -p2p r; IOMMU and ACS settings"))
    down = [port for port in about["infiniband"] if port["state"] != "ACTIVE"]
    if down:
        text = ", ".join(f"{port['device']} ({port['kind']}) is {port['state']}" for port in down[:8])
        found.append(Finding("warning", name, text, "ibstat; NCCL falls back to TCP, ten times slower"))
    return found


def _about_tracking(settings: Settings, name: str, about: Json) -> list[Finding]:
    """Return whether runs on this node would be tracked; a server that is away stops none."""
    if not about.get("tracking"):
        return []
    text = f"cannot reach the MLflow server {settings.mlflow_uri} ({about['tracking']}): runs train on, untracked"
    app = settings.unit.partition("/")[0]
    remedy = f"on {name}: curl -I {settings.mlflow_uri}; or: juju config {app} mlflow-tracking-uri=..."
    return [Finding("warning", name, text, remedy)]


def _tracking_server(uri: str) -> list[str | int] | None:
    """Return host and port of an MLflow server; None where the store is a path, or there is none."""
    parts = urllib.parse.urlsplit(uri)
    with contextlib.suppress(ValueError):  # a port that is no number
        if parts.scheme in ("http", "https") and parts.hostname:
            return [parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)]
    return None


def _about_sharing(settings: Settings, facts: Facts) -> list[Finding]:
    """Return where nodes differ in what must be alike: drivers, torch, NCCL, interfaces, addresses."""
    found: list[Finding] = []
    with_gpus = {name: about for name, about in facts.reports.items() if about["gpus"]["seen"]}
    levels: dict[str, Level] = {"driver": "warning", "cuda": "warning", "seen": "note"}
    for key, level in levels.items():
        groups = _grouped({name: str(about["gpus"].get(key)) for name, about in with_gpus.items()})
        if len(groups) > 1:
            what = {"driver": "the GPUs' driver", "cuda": "the driver's CUDA", "seen": "the number of GPUs"}[key]
            found.append(
                Finding(level, "nodes", f"{what} differs: {_told(groups)}", "bring the nodes to the same release")
            )
    for key in ("torch", "nccl"):
        told = {
            name: str(environment[key])
            for name, about in facts.reports.items()
            for environment in about["environments"]
            if environment.get(key)
        }
        if len(groups := _grouped(told)) > 1:
            found.append(
                Finding(
                    "error",
                    "nodes",
                    f"{key} differs: {_told(groups)}",
                    f"juju run {settings.unit} install-environment force=true",
                )
            )
    addresses: dict[str, dict[str, list[str]]] = {}
    mtus: dict[str, str] = {}
    for name, about in facts.reports.items():
        for host, peer in about["network"]["peers"].items():
            if peer.get("address"):
                addresses.setdefault(host, {}).setdefault(peer["address"], []).append(name)
            if peer.get("mtu") and peer["iface"] != "lo":
                mtus[name] = f"{peer['mtu']} on {peer['iface']}"
    for host, groups in sorted(addresses.items()):
        if len(groups) > 1:
            found.append(
                Finding(
                    "warning", host, f"its name means different addresses: {_told(groups)}", "mend DNS or /etc/hosts"
                )
            )
    sizes = _grouped({name: text.split()[0] for name, text in mtus.items()})
    if len(sizes) > 1:
        text = f"the largest packet (MTU) differs: {_told(sizes)}: big transfers may hang while small ones pass"
        found.append(Finding("warning", "nodes", text, "ip link set dev IFACE mtu N, the same on all nodes"))
    return found


def _about_clocks(facts: Facts) -> list[Finding]:
    """Return whose clock is off, measured between nodes by question and answer, half the trip taken off."""
    offsets = clock_offsets(facts)
    if not offsets:
        return []
    spread = max(offsets.values()) - min(offsets.values())
    if spread <= _CLOCK_S:
        return []
    middle = statistics.median(offsets.values())
    worst = max(offsets, key=lambda name: abs(offsets[name] - middle))
    level: Level = "error" if spread > _CLOCK_BREAKS_S else "warning"
    way = "ahead of" if offsets[worst] > middle else "behind"
    text = f"its clock is {abs(offsets[worst] - middle):.1f} s {way} the others'"
    return [Finding(level, worst, text, f"on {worst}: timedatectl; systemctl restart systemd-timesyncd (or chrony)")]


def clock_offsets(facts: Facts) -> dict[str, float]:
    """Return each node's clock against the first's, in seconds."""
    names = [name for name in facts.asked if name in facts.reports]
    if len(names) < 2:
        return {}
    peers = facts.reports[names[0]]["network"]["peers"]
    found = {name: float(peers[name]["clock_s"]) for name in names[1:] if "clock_s" in peers.get(name, {})}
    return {names[0]: 0.0} | found


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


# -- what a person sees -----------------------------------------------------------------------------------------------


def report(facts: Facts, findings: collections.abc.Sequence[Finding]) -> Results:
    """Return the table of the nodes, the findings, and how many of each kind."""
    counts = {level: sum(1 for finding in findings if finding.level == level) for level in ("error", "warning", "note")}
    if counts["error"]:
        verdict = f"{counts['error']} finding{'s' if counts['error'] > 1 else ''} would break a run"
    else:
        verdict = "a run can start" + (f"; {counts['warning']} warnings" if counts["warning"] else "")
    measured = {"collectives": facts.sample.text} if facts.sample else {}
    return {
        "verdict": verdict,
        **measured,
        "nodes": _table(facts, findings),
        "findings": "\n".join(str(finding) for finding in findings) or "none",
        "errors": str(counts["error"]),
        "warnings": str(counts["warning"]),
    }


def _table(facts: Facts, findings: collections.abc.Sequence[Finding]) -> str:
    offsets = clock_offsets(facts)
    rows = [
        ["NODE", "SLURM", "PYTHON", "CLOCK", "MOUNT", "MB/S", "RENAME", "SEEN", "NET", "TRIP", "NET-MB/S", "SHM",
         "GPUS", "TORCH", "IMPORT", "VERDICT"]
    ]  # fmt: skip
    bad = {
        level: {word for f in findings if f.level == level for word in re.split(r"[ ,]+", f.where)}
        for level in ("error", "warning")
    }
    for name in facts.asked:
        verdict = "ERROR" if name in bad["error"] else "warning" if name in bad["warning"] else "ok"
        about = facts.reports.get(name)
        if about is None:
            rows.append([name, *["-"] * (len(rows[0]) - 2), facts.left_out.get(name, "no answer")])
            continue
        filesystem = _dict(about["filesystem"])
        peers = list(about["network"]["peers"].values())
        environment = next((_dict(e) for e in about["environments"] if "seconds" in e), _dict(None))
        rows.append(
            [
                name,
                str(about["versions"]["slurm"]) or "-",
                str(about["versions"]["python"]),
                f"{offsets[name] * 1e3:+.0f}ms" if name in offsets else "-",
                str(_dict(filesystem.get("mount")).get("type") or "-"),
                _number(filesystem.get("write_mb_s"), ".0f"),
                _number(filesystem.get("rename_ms"), ".0f", "ms"),
                _number(next((p["seen_ms"] for p in peers if p.get("seen_ms") is not None), None), ".0f", "ms"),
                next((p["iface"] for p in peers if p.get("iface")), "-"),
                _number(min((p["trip_ms"] for p in peers if "trip_ms" in p), default=None), ".2f", "ms"),
                _number(next((p["mb_s"] for p in peers if "mb_s" in p), None), ".0f"),
                _number((about["limits"].get("shm") or 0) >> 20, "d", "M"),
                f"{about['gpus']['seen']}" if about["gpus"]["seen"] else "-",
                str(environment.get("torch", "-")),
                _number(environment.get("seconds"), ".1f", "s"),
                verdict,
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


# -- helpers ----------------------------------------------------------------------------------------------------------


def _partition(params: trainer_params_runs.Doctor, partitions: tuple[jobs.Partition, ...]) -> jobs.Partition:
    """Return the partition to examine; one without a usable node is examined too, since that is what to explain."""
    try:
        return trainer_plan.choose_partition(params.partition, partitions)
    except ParameterError:
        named = [p for p in partitions if p.name == params.partition or (params.partition is None and p.is_default)]
        if len(named) == 1 and named[0].nodes:
            return named[0]
        raise


def _asked(params: trainer_params_runs.Doctor, partition: jobs.Partition) -> list[str]:
    there = [node.name for node in partition.nodes]
    if params.nodes is None:
        if len(there) > MAX_NODES:
            raise ParameterError(
                "nodes",
                f"{partition.name} has {len(there)} nodes; name at most {MAX_NODES}, such as {there[0]},{there[1]}",
            )
        return there
    try:
        names = list(dict.fromkeys(jobs.hostnames(params.nodes)))
    except jobs.SlurmError as e:
        raise ParameterError("nodes", f"{params.nodes}: {e}") from e
    if len(names) > MAX_NODES:
        raise ParameterError("nodes", f"{len(names)} named; at most {MAX_NODES} at once")
    if strangers := [name for name in names if name not in there]:
        known = ", ".join(there[:8])
        raise ParameterError("nodes", f"{strangers[0]} is no node of partition {partition.name}; there are: {known}")
    return names


def _nodes() -> tuple[nodes.Node, ...]:
    try:
        return tuple(nodes.show_all())
    except nodes.NodeError as e:
        raise TrainerError(f"Slurm: {e}") from e


def _unfit(node: nodes.Node | None) -> str:
    """Return why Slurm starts nothing on a node now, or nothing."""
    if node is None:
        return "Slurm does not know it"
    flags = sorted(
        node.flags & {"DRAIN", "FAIL", "MAINTENANCE", "NOT_RESPONDING", "INVALID_REG", "INVAL", "REBOOT_ISSUED"}
    )
    if flags or node.state not in ("IDLE", "MIXED", "ALLOCATED"):
        return f"{'+'.join([node.state, *flags])}" + (f" ({node.reason})" if node.reason else "")
    total = _leading_number(node.fields.get("CPUEfctv", node.fields.get("CPUTot", "0"))) or 0
    if (_leading_number(node.fields.get("CPUAlloc", "0")) or 0) >= total > 0:
        return "busy: all its cores are in use"
    return ""


def _free_gpus(node: nodes.Node) -> int:
    used = re.search(r"gres/gpu=(\d+)", node.alloc_tres or "")
    return max(0, jobs.parse_gpus(node.gres or "") - (int(used[1]) if used else 0))


def _some(names: collections.abc.Sequence[str]) -> str:
    return f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"


def _merged(found: list[Finding]) -> list[Finding]:
    """Return the findings with those that differ only in the node told once."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for finding in found:
        remedy = finding.remedy
        groups.setdefault((finding.level, finding.text, remedy), []).append(finding.where)
    return [
        Finding(typing.cast(Level, level), ", ".join(dict.fromkeys(where)), text, remedy)
        for (level, text, remedy), where in groups.items()
    ]


def _grouped(values: dict[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, value in sorted(values.items()):
        groups.setdefault(value, []).append(name)
    return groups


def _told(groups: collections.abc.Mapping[str, collections.abc.Sequence[str]]) -> str:
    return "; ".join(
        f"{value or 'unknown'} on {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for value, names in groups.items()
    )


def _slurm_conf(line: str) -> str:
    return f"juju config slurmctld slurm-conf-parameters='{line}'"


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else ()


def _leading_number(text: str) -> int | None:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None


def _number(value: object, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if isinstance(value, int | float) else "-"


def _dict(value: object) -> Json:
    return typing.cast(Json, value) if isinstance(value, dict) else {}
