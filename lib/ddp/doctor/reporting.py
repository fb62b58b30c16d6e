"""doctor's report: a line for each node, the findings, and how many there are of each level."""

import collections.abc
import re

from ddp.doctor.facts import Facts, Json, clock_offsets, mib
from ddp.doctor.findings import ORDER, Finding
from ddp.problem import Results
from ddp.results import tables
from ddp.run.untrusted import as_object
from ddp.settings import Settings

_COLUMNS: str = "NODE SLURM PYTHON CLOCK MOUNT MB/S RENAME SEEN NET TRIP SHM GPUS VERDICT"


def report(
    settings: Settings, facts: Facts, findings: collections.abc.Sequence[Finding]
) -> Results:
    """Return the report as results: verdict, a table of the nodes, findings and their counts."""
    counts = {level: sum(finding.level == level for finding in findings) for level in ORDER}
    return {
        "verdict": _verdict(facts, counts["error"], counts["warning"]),
        "tracking": settings.mlflow_uri
        or "none: mlflow-tracking-uri is empty; each run's metrics.jsonl is its record",
        "room": "; ".join(f"{size >> 30} GiB left in {path}" for path, size in facts.free),
        "nodes": _table(facts, findings),
        "findings": "\n".join(str(finding) for finding in findings) or "none",
        "errors": str(counts["error"]),
        "warnings": str(counts["warning"]),
    }


def _verdict(facts: Facts, num_errors: int, num_warnings: int) -> str:
    left_out = ""
    if facts.left_out:
        left_out = f"{len(facts.left_out)} of {len(facts.asked)} nodes were not examined"
    if not facts.reports and not num_errors:
        return "no node was examined: all are busy" if left_out else "no node was examined"

    if num_errors:
        parts = [f"{_count(num_errors, 'finding')} would break a run"]
    elif left_out:
        parts = [f"a run can start on the {len(facts.reports)} nodes that were examined"]
    else:
        parts = ["a run can start"]
    if num_warnings and not num_errors:
        parts.append(_count(num_warnings, "warning"))
    if left_out:
        parts.append(left_out)
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _table(facts: Facts, findings: collections.abc.Sequence[Finding]) -> str:
    columns = _COLUMNS.split()
    rows: list[list[str]] = [columns]
    offsets = clock_offsets(facts)
    for name in facts.asked:
        about = facts.reports.get(name)
        if about is None:
            why = facts.left_out.get(name, "no answer")
            rows.append([name, *[""] * (len(columns) - 2), why])
            continue
        clock = f"{offsets[name] * 1e3:+.0f}ms" if name in offsets else "-"
        rows.append([name, *_cells(about, clock), _judged(name, findings)])
    return tables.Table(rows)


def _cells(about: Json, clock: str) -> list[str]:
    filesystem = as_object(about["filesystem"])
    peers = list(about["network"]["peers"].values())
    seen_ms = [peer["seen_ms"] for peer in peers if peer.get("seen_ms") is not None]
    trips_ms = [peer["trip_ms"] for peer in peers if "trip_ms" in peer]
    interfaces = [peer["iface"] for peer in peers if peer.get("iface")]
    cells = (
        about["versions"]["slurm"],
        about["versions"]["python"],
        clock,
        as_object(filesystem.get("mount")).get("type"),
        _number(filesystem.get("write_mb_s"), ".0f"),
        _number(filesystem.get("rename_ms"), ".0f", "ms"),
        _number(next(iter(seen_ms), None), ".0f", "ms"),
        next(iter(interfaces), None),
        _number(min(trips_ms, default=None), ".2f", "ms"),
        f"{mib(about['limits'].get('shm'))}M",
        about["gpus"]["seen"],
    )
    return [str(cell or "-") for cell in cells]


def _judged(name: str, findings: collections.abc.Sequence[Finding]) -> str:
    """Return the worst level of the findings that name a node."""
    levels = {one.level for one in findings if name in re.split(r"[ ,]+", one.where)}
    if "error" in levels:
        return "ERROR"
    return "warning" if "warning" in levels else "ok"


def _number(value: object, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if isinstance(value, int | float) else "-"
