"""doctor: probe all nodes in one job step, apply the rules, and report what would break a run.

`gather` collects facts and is the only part with side effects; `judge` turns facts into findings.
"""

import base64
import collections.abc
import contextlib
import json
import os
import pathlib
import re
import secrets
import shutil
import urllib.parse
import zlib

from ddp.doctor import cluster_rules, node_checks, node_rules, reporting, selection
from ddp.doctor.facts import Facts, Json
from ddp.doctor.findings import Finding, Findings, first_few
from ddp.environment import store
from ddp.options import declared, models
from ddp.prediction import round_trips
from ddp.problem import Problem, Results
from ddp.results.progress import Log, with_progress
from ddp.run import catalog, telemetry, untrusted
from ddp.settings import Settings
from ddp.slurm import cluster, jobs, partition_list
from ddp.submit import resources
from ddp.workspace import folders, operations
from ddp.workspace.folders import Workspace
from slurm_ddp.slurm import nodes

_PROBE = pathlib.Path(__file__).with_name("probe.py")
_NEWEST = 20  # runs
_STEP_S = 300.0  # the probe's own deadlines add up to less
_LINE = re.compile(r"^DOCTOR (\S+) (\d+) (\d+) (\S+)$", re.MULTILINE)  # of ddp.doctor.probe
_MOST_BYTES = 4 << 20  # of a report


def doctor(settings: Settings, params: models.Doctor, log: Log) -> Results:
    """Examine the nodes and return the report. Raises Problem, with it, if a run would break."""
    facts = gather(settings, params, cluster.partitions(params.reservation), log)
    findings = judge(settings, facts)
    results = reporting.report(settings, facts, findings)
    _note_counts(settings.workspace, findings)
    _note_trips(settings.workspace, facts)
    for finding in findings:
        if finding.level == "error":
            first = f"the first: {finding.where}: {finding.text}"
            raise Problem(f"{results['verdict']}; {first}", results=results)
    return results


def judge(settings: Settings, facts: Facts) -> tuple[Finding, ...]:
    """Apply all rules; the findings are sorted by level, errors first."""
    findings = Findings(settings)
    cluster_rules.judge(settings, facts, findings)
    node_rules.judge(settings, facts, findings)
    return findings.sorted()


def gather(
    settings: Settings,
    params: models.Doctor,
    partitions: tuple[partition_list.Partition, ...],
    log: Log,
    *,
    job_name: str = "trainer-doctor",
) -> Facts:
    """Collect the facts of the controller and the nodes."""
    workspace = settings.workspace
    partition = selection.choose_partition(params, partitions)
    asked = selection.list_asked(params, partition)
    with jobs.asking():
        known = {node.name: node for node in partition_list.show_nodes()}
        config = jobs.configuration()
    left_out = selection.find_unfit(asked, partition, known)
    fit = [known[name] for name in asked if name not in left_out]

    contents = workspace.look()
    reports: dict[str, Json] = {}
    trouble = ""
    with _folder(workspace) as place:
        if fit:
            installed = store.Store(settings).installed(contents)
            spec = {
                "hosts": {node.name: node.address or "" for node in fit},
                "workspace": str(workspace.path),
                **place,
                "cache": str(workspace.node_cache),
                "port": 0,
                "tracking": _tracking_server(settings.mlflow_uri),
                "environment": None,
            }
            if installed:
                spec["environment"] = {"hash": installed.hash, "sha256": installed.sha256}
            options = [*_options(params, partition, fit), f"--job-name={job_name}"]
            reports, trouble = _probe(spec, options, log, patience_s=params.wait_timeout)
    for name, report in reports.items():
        if name in known:
            report["versions"]["slurm"] = known[name].fields.get("Version", "")
    return Facts(
        partition=partition,
        asked=tuple(asked),
        left_out=left_out,
        reports=reports,
        trouble=trouble,
        config=config,
        manifests=contents.environments,
        free=_free(workspace, contents),
        untrusted=contents.untrusted,
        stragglers=tuple(_stragglers(workspace)),
        checks=node_checks.read(workspace),
    )


def _free(workspace: Workspace, contents: folders.Contents) -> tuple[tuple[str, int], ...]:
    """Return the room left in this account's folders, within the filesystem's quotas."""
    found = [(str(workspace.folder), contents.free_bytes)]
    home = os.environ.get("HOME", "")
    with contextlib.suppress(folders.WorkspaceError):
        if home:
            found.append((home, workspace.do(operations.free_bytes, path=home)))
    return tuple(found)


@contextlib.contextmanager
def _folder(workspace: Workspace) -> collections.abc.Generator[dict[str, str]]:
    """Make a folder for the nodes to write to, and yield its path and nonce."""
    nonce = secrets.token_hex(8)
    folder = workspace.do(operations.open_examination, workspace=str(workspace.folder), nonce=nonce)
    try:
        yield {"folder": folder, "nonce": nonce}
    finally:
        workspace.do(shutil.rmtree, path=folder, ignore_errors=True)


def _options(
    params: models.Doctor, partition: partition_list.Partition, fit: list[nodes.Node]
) -> list[str]:
    """Return srun's options: the GPUs that every node has free, two CPUs, bound as in a job."""
    limits = partition.limits
    free_cpus = min(selection.free_cpus(node) for node in fit)
    free_gpus = min(selection.free_gpus(node) for node in fit)
    cpus = max(1, min(2, free_cpus, limits.max_cpus_per_node or 2))
    names = ",".join(node.name for node in fit)
    options = [
        f"--partition={partition.name}",
        f"--nodes={len(fit)}",
        f"--ntasks={len(fit)}",
        "--ntasks-per-node=1",
        f"--nodelist={names}",
        f"--cpus-per-task={cpus}",
        "--cpu-bind=none",
        f"--mem={resources.bounded_mb(None, selection.MEMORY_MB, cpus, limits)}M",
        f"--time={max(1, min(6, (partition.max_time_s or 360) // 60))}",
        "--chdir=/",
        f"--immediate={params.wait_timeout}",
        "--propagate=NONE",
        "--wait=60",
    ]
    for name, value in declared.directives(params):
        options.append(f"--{name}={value}" if value else f"--{name}")
    if free_gpus:
        options.append(f"--gpus-per-node={free_gpus}")
    return options


def _probe(
    spec: Json, options: list[str], log: Log, *, patience_s: float
) -> tuple[dict[str, Json], str]:
    """Run the probe; return the nodes' reports, and srun's errors if some returned none.

    The program is sent along: the nodes need not have this host's files.
    """
    hosts = list(spec["hosts"])
    argv = (folders.PYTHON, "-I", "-", json.dumps(spec))
    program = _PROBE.read_text()
    noun = "nodes" if len(hosts) > 1 else "node"
    text, trouble = with_progress(
        log,
        f"examining {len(hosts)} {noun}: {first_few(hosts)}",
        lambda: jobs.run_everywhere(
            *argv, options=options, stdin=program, timeout_s=_STEP_S + patience_s
        ),
    )
    return read_reports(text), trouble


def read_reports(text: str) -> dict[str, Json]:
    """Parse each node's report from the tasks' output; skip incomplete reports and other text."""
    pieces: dict[tuple[str, int], dict[int, str]] = {}
    for node, number, count, piece in _LINE.findall(text):
        pieces.setdefault((node, int(count)), {})[int(number)] = piece
    reports: dict[str, Json] = {}
    for (node, count), found in pieces.items():
        if sorted(found) != list(range(count)):
            continue
        with contextlib.suppress(ValueError, TypeError, zlib.error):
            packed = base64.b64decode("".join(found[at] for at in range(count)), validate=True)
            unpacked = zlib.decompressobj().decompress(packed, _MOST_BYTES)
            report = untrusted.as_object(json.loads(unpacked))
            if report.get("node") == node:
                reports[node] = report
    return reports


def _note_counts(workspace: Workspace, findings: tuple[Finding, ...]) -> None:
    """Store how many findings there are, for the metrics."""
    counts = {"error": 0, "warning": 0}
    for finding in findings:
        if finding.level in counts:
            counts[finding.level] += 1
    with contextlib.suppress(folders.WorkspaceError):  # only the metrics lack it then
        folder = str(workspace.baselines)
        workspace.do(telemetry.note_findings, folder=folder, counts=counts)


def _note_trips(workspace: Workspace, facts: Facts) -> None:
    """Store the round trips, which a training over slow links divides its nodes by."""
    trips: round_trips.Trips = {}
    for name, report in facts.reports.items():
        for host, peer in report["network"]["peers"].items():
            trip_ms = untrusted.real(peer.get("trip_ms"))
            if trip_ms is not None:
                trips.setdefault(name, {})[host] = trip_ms
    with contextlib.suppress(folders.WorkspaceError):  # each node is a site then
        round_trips.store(workspace, trips)


def _stragglers(workspace: Workspace) -> collections.abc.Iterator[tuple[str, str, str]]:
    """Yield run, host and words for each of the user's newest runs that a slow rank holds up."""
    with contextlib.suppress(Problem, folders.WorkspaceError):
        newest = catalog.names(workspace)[:_NEWEST]
        for run in catalog.load(workspace, newest, is_brief=True)[0]:
            if run.state.is_active and run.metrics.straggler:
                host = untrusted.printable(str(run.metrics.slowest["host"]), 64)
                yield run.name, host, run.metrics.straggler


def _tracking_server(uri: str) -> list[str | int] | None:
    """Return host and port of an MLflow server; None for a path, and without tracking."""
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    with contextlib.suppress(ValueError):  # the port is not a number
        return [parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)]
    return None
