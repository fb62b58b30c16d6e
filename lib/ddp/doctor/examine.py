"""doctor: probe all nodes in one job step, apply the rules, and report what would break a run and what to type.

`gather` collects facts and is the only part with side effects; `judge` turns facts into findings, `report` into text.
"""

import base64
import collections.abc
import contextlib
import json
import pathlib
import re
import secrets
import shutil
import urllib.parse
import zlib

from ddp.doctor import cluster_rules, node_rules, reporting
from ddp.doctor.facts import Facts, Json, leading_number
from ddp.doctor.findings import Finding, Findings, first_few
from ddp.environment import environments
from ddp.options import declared, models
from ddp.problem import ParameterError, Problem, Results
from ddp.results.progress import Log, with_progress
from ddp.run import catalog, reading, telemetry
from ddp.settings import Settings
from ddp.slurm import access, cluster, jobs
from ddp.submit import resources
from ddp.workspace import folders, operations
from ddp.workspace.folders import Workspace
from slurm_ddp import mounts
from slurm_ddp.slurm import nodes

MAX_NODES = 64  # in one call: every node connects to every other
_PROBE = pathlib.Path(__file__).with_name("probe.py")
_MEMORY_MB = 1024
_NEWEST = 20  # runs
_STEP_S = 300.0  # the probe's own deadlines add up to less


def doctor(settings: Settings, params: models.Doctor, log: Log) -> Results:
    """Examine the nodes and return the report. Raises Problem, with the report, where a run would break."""
    facts = gather(settings, params, cluster.partitions(params.reservation), log)
    findings = judge(settings, facts)
    results = reporting.report(settings, facts, findings)
    counts = {
        level: sum(finding.level == level for finding in findings) for level in ("error", "warning")
    }
    with contextlib.suppress(folders.WorkspaceError):  # only the metrics lack it then
        settings.workspace.do(
            telemetry.note_findings, folder=str(settings.workspace.baselines), counts=counts
        )
    worst = next((finding for finding in findings if finding.level == "error"), None)
    if worst is not None:
        raise Problem(
            f"{results['verdict']}; the first: {worst.where}: {worst.text}", results=results
        )
    return results


def gather(
    settings: Settings, params: models.Doctor, partitions: tuple[jobs.Partition, ...], log: Log
) -> Facts:
    """Collect the facts of this host, the controller and the nodes."""
    workspace = settings.workspace
    partition = _partition(params, partitions)
    asked = _asked(params, partition)
    with jobs.asking():
        known = {node.name: node for node in jobs.show_nodes()}
        config = jobs.configuration()
    usable = {node.name for node in partition.usable}
    gone = {node.name: node.state for node in partition.nodes if node.state == access.GONE}
    left_out = {
        name: why for name in asked if (why := _unfit(known.get(name), is_usable=name in usable))
    } | gone
    fit = [name for name in asked if name not in left_out]
    if most := partition.limits.max_nodes:
        left_out |= dict.fromkeys(fit[most:], f"MaxNodes of partition {partition.name} is {most}")
        fit = fit[:most]
    contents = workspace.look()
    installed = environments.installed(settings, contents)
    mount = mounts.find(workspace.path)
    folder = workspace.do(
        operations.open_examination,
        workspace=str(workspace.folder),
        nonce=secrets.token_hex(8),
    )
    reports: dict[str, Json] = {}
    trouble = ""
    try:
        if fit:
            spec = {
                "hosts": {name: known[name].address or "" for name in fit},
                "workspace": str(workspace.path),
                "folder": folder["folder"],
                "nonce": folder["nonce"],
                "cache": str(workspace.node_cache),
                "port": 0,
                "tracking": _tracking_server(settings.mlflow_uri),
                "environment": {"hash": installed.hash, "sha256": installed.sha256}
                if installed
                else None,
            }
            gpus, cpus = (
                min(free(known[name]) for name in fit) for free in (_free_gpus, _free_cpus)
            )
            options = _options(params, partition, fit, gpus=gpus, cpus=cpus)
            reports, trouble = _examine(spec, options, log, patience_s=params.wait_timeout)
            for name in reports.keys() & known.keys():
                reports[name]["versions"]["slurm"] = known[name].fields.get("Version", "")
    finally:
        workspace.do(shutil.rmtree, path=folder["folder"], ignore_errors=True)
    return Facts(
        partition=partition,
        asked=tuple(asked),
        left_out=left_out,
        reports=reports,
        trouble=trouble,
        config=config,
        manifests=contents.environments,
        untrusted=contents.untrusted,
        stragglers=tuple(_stragglers(workspace)),
        login=(mount.fstype, mount.source) if mount else ("", ""),
    )


def _options(
    params: models.Doctor, partition: jobs.Partition, fit: list[str], *, gpus: int, cpus: int
) -> list[str]:
    """Return srun's options: all GPUs that every node has free, and two CPUs, bound like torchrun's agent in a job."""
    cpus = max(1, min(2, cpus, partition.limits.max_cpus_per_node or 2))
    options = [
        f"--partition={partition.name}",
        f"--nodes={len(fit)}",
        f"--ntasks={len(fit)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(fit)}",
        f"--cpus-per-task={cpus}",
        "--cpu-bind=none",
        f"--mem={resources.bounded_mb(None, _MEMORY_MB, cpus, partition.limits)}M",
        f"--time={max(1, min(6, (partition.max_time_s or 360) // 60))}",
        "--chdir=/",
        f"--immediate={params.wait_timeout}",
        "--job-name=trainer-doctor",
        "--propagate=NONE",
        "--wait=60",
    ]
    options += [
        f"--{name}={value}" if value else f"--{name}" for name, value in declared.directives(params)
    ]
    return [*options, f"--gpus-per-node={gpus}"] if gpus else options


def _examine(
    spec: Json, options: list[str], log: Log, *, patience_s: float
) -> tuple[dict[str, Json], str]:
    """Run the probe; return each node's report, and srun's error output where some returned none."""
    hosts = list(spec["hosts"])
    # Sent, as what lies on this host need not lie on the nodes; nor in the workspace, which is what is looked at.
    argv, program = (folders.PYTHON, "-I", "-", json.dumps(spec)), _PROBE.read_text()
    text, trouble = with_progress(
        log,
        f"examining {len(hosts)} node{'s' if len(hosts) > 1 else ''}: {first_few(hosts)}",
        lambda: jobs.run_everywhere(
            *argv, options=options, stdin=program, timeout_s=_STEP_S + patience_s
        ),
    )
    return read_reports(text), trouble


def read_reports(text: str) -> dict[str, Json]:
    """Parse each node's report from the tasks' output; skip what is incomplete or not a report."""
    pieces: dict[tuple[str, int], dict[int, str]] = {}
    for node, number, count, piece in re.findall(
        r"^DOCTOR (\S+) (\d+) (\d+) (\S+)$", text, re.MULTILINE
    ):
        pieces.setdefault((node, int(count)), {})[int(number)] = piece
    reports: dict[str, Json] = {}
    for (node, count), found in pieces.items():
        if sorted(found) != list(range(count)):
            continue
        with contextlib.suppress(ValueError, TypeError, zlib.error):
            packed = base64.b64decode(
                "".join(found[number] for number in sorted(found)), validate=True
            )
            answer = reading.as_object(json.loads(zlib.decompressobj().decompress(packed, 4 << 20)))
            if answer.get("node") == node:
                reports[node] = answer
    return reports


def judge(settings: Settings, facts: Facts) -> tuple[Finding, ...]:
    """Apply all rules; the findings are sorted by level, errors first."""
    findings = Findings(settings)
    cluster_rules.judge(settings, facts, findings)
    node_rules.judge(settings, facts, findings)
    return findings.sorted()


def _stragglers(workspace: Workspace) -> collections.abc.Iterator[tuple[str, str, str]]:
    """Yield run, host and words of the user's newest runs in which one rank holds the others up."""
    with contextlib.suppress(Problem, folders.WorkspaceError):
        for run in catalog.load(workspace, catalog.names(workspace)[:_NEWEST], is_brief=True)[0]:
            if run.state.is_active and run.metrics.straggler:
                yield (
                    run.name,
                    reading.printable(str(run.metrics.slowest["host"]), 64),
                    run.metrics.straggler,
                )


def _tracking_server(uri: str) -> list[str | int] | None:
    """Return host and port of an MLflow server; None for a path or no tracking."""
    parts = urllib.parse.urlsplit(uri)
    with contextlib.suppress(ValueError):  # a port that is no number
        if parts.scheme in ("http", "https") and parts.hostname:
            return [parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)]
    return None


def _partition(params: models.Doctor, partitions: tuple[jobs.Partition, ...]) -> jobs.Partition:
    """Choose the partition to examine; one without a usable node is examined too."""
    try:
        return resources.choose_partition(params, partitions)
    except ParameterError:
        named = [
            p
            for p in partitions
            if p.name == params.partition or (params.partition is None and p.is_default)
        ]
        if len(named) == 1 and named[0].nodes:
            return named[0]
        raise


def _asked(params: models.Doctor, partition: jobs.Partition) -> list[str]:
    there = [node.name for node in partition.nodes if node.state != access.OUTSIDE]
    if params.nodes is None:
        if len(there) > MAX_NODES:
            raise ParameterError(
                "nodes",
                f"{partition.name} has {len(there)} nodes; name at most {MAX_NODES}, such as {there[0]},{there[1]}",
            )
        return there
    names = list(resources.hosts("nodes", params.nodes))
    if len(names) > MAX_NODES:
        raise ParameterError("nodes", f"{len(names)} named; at most {MAX_NODES} at once")
    if strangers := [name for name in names if name not in there]:
        known = ", ".join(there[:8])
        place = f"partition {partition.name}" + (
            f" in reservation {params.reservation}" if params.reservation else ""
        )
        raise ParameterError("nodes", f"{strangers[0]} is no node of {place}; there are: {known}")
    return names


def _unfit(node: nodes.Node | None, *, is_usable: bool) -> str:
    """Return why Slurm starts no step on a node now, "" where it does. The job's own reservation is no reason."""
    if node is None:
        return "Slurm does not know it"
    flags = sorted(
        node.flags & jobs.UNUSABLE - ({"MAINTENANCE", "NOT_RESPONDING"} if is_usable else set())
    )
    if flags or node.state not in ("IDLE", "MIXED", "ALLOCATED"):
        return f"{'+'.join([node.state, *flags])}" + (f" ({node.reason})" if node.reason else "")
    if node.flags & jobs.POWER:
        return "busy: it is powered down, or not up yet"
    if node.state == "ALLOCATED" or _free_cpus(node) == 0:
        return "busy: jobs use all its cores"
    return "busy: jobs use all its memory" if _free_memory_mb(node) < _MEMORY_MB else ""


def _free_cpus(node: nodes.Node) -> int:
    """Return the number of unallocated CPUs; 1 where Slurm does not report it."""
    total = leading_number(node.fields.get("CPUEfctv", "0")) or 0
    return max(0, total - (leading_number(node.fields.get("CPUAlloc", "0")) or 0)) if total else 1


def _free_memory_mb(node: nodes.Node) -> int:
    """Return the unallocated memory; enough for the probe if Slurm does not report it."""
    total, used = (leading_number(node.fields.get(name, "")) for name in ("RealMemory", "AllocMem"))
    return _MEMORY_MB if total is None or used is None else total - used


def _free_gpus(node: nodes.Node) -> int:
    used = re.search(r"gres/gpu=(\d+)", node.alloc_tres or "")
    return max(0, nodes.count_gres(node.gres, "gpu") - (int(used[1]) if used else 0))
