"""Format doctor's report: a line for each node, the findings, and how many there are of each level."""

import collections.abc
import re

from ddp.doctor.facts import Facts, clock_offsets, mib
from ddp.doctor.findings import ORDER, Finding
from ddp.problem import Results
from ddp.results import tables
from ddp.run.reading import as_object
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
        "nodes": _table(facts, findings),
        "findings": "\n".join(str(finding) for finding in findings) or "none",
        "errors": str(counts["error"]),
        "warnings": str(counts["warning"]),
    }


def _verdict(facts: Facts, num_errors: int, num_warnings: int) -> str:
    left_out = (
        f"{len(facts.left_out)} of {len(facts.asked)} nodes were not examined"
        if facts.left_out
        else ""
    )
    if num_errors:
        verdict = f"{num_errors} finding{'s' if num_errors > 1 else ''} would break a run"
    elif not facts.reports:
        return "no node was examined: all are busy" if left_out else "no node was examined"
    elif left_out:
        verdict = f"a run can start on the {len(facts.reports)} nodes that were examined"
    else:
        verdict = "a run can start"
    more = (
        [f"{num_warnings} warning{'s' if num_warnings > 1 else ''}"]
        if num_warnings and not num_errors
        else []
    )
    return "; ".join([verdict, *more, *([left_out] if left_out else [])])


def _table(facts: Facts, findings: collections.abc.Sequence[Finding]) -> str:
    rows: list[list[str]] = [_COLUMNS.split()]
    words = {
        level: {word for f in findings if f.level == level for word in re.split(r"[ ,]+", f.where)}
        for level in ORDER
    }
    offsets = clock_offsets(facts)
    for name in facts.asked:
        verdict = (
            "ERROR" if name in words["error"] else "warning" if name in words["warning"] else "ok"
        )
        about = facts.reports.get(name)
        if about is None:
            rows.append([name, *[""] * (len(rows[0]) - 2), facts.left_out.get(name, "no answer")])
            continue
        filesystem, peers = as_object(about["filesystem"]), list(about["network"]["peers"].values())
        cells = (
            about["versions"]["slurm"],
            about["versions"]["python"],
            f"{offsets[name] * 1e3:+.0f}ms" if name in offsets else None,
            as_object(filesystem.get("mount")).get("type"),
            _number(filesystem.get("write_mb_s"), ".0f"),
            _number(filesystem.get("rename_ms"), ".0f", "ms"),
            _number(
                next((p["seen_ms"] for p in peers if p.get("seen_ms") is not None), None),
                ".0f",
                "ms",
            ),
            next((p["iface"] for p in peers if p.get("iface")), None),
            _number(
                min((p["trip_ms"] for p in peers if "trip_ms" in p), default=None), ".2f", "ms"
            ),
            f"{mib(about['limits'].get('shm'))}M",
            about["gpus"]["seen"],
        )
        rows.append([name, *(str(cell or "-") for cell in cells), verdict])
    return tables.Table(rows)


def _number(value: object, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if isinstance(value, int | float) else "-"
