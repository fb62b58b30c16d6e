"""Format doctor's report: a line for each node, the findings, and how many there are of each level."""

import collections.abc
import re

from ddp.base import Results, Settings
from ddp.doctor import cluster_rules
from ddp.doctor.node_facts import Facts, Finding, as_dict, capacity, clock_offsets, threads
from ddp.view import tables


def report(settings: Settings, facts: Facts, findings: collections.abc.Sequence[Finding]) -> Results:
    """Return the report as results: verdict, tables of the nodes, findings and their counts."""
    counts = {level: sum(1 for finding in findings if finding.level == level) for level in ("error", "warning", "note")}
    if counts["error"]:
        verdict = f"{counts['error']} finding{'s' if counts['error'] > 1 else ''} would break a run"
    else:
        verdict = "a run can start" + (f"; {counts['warning']} warnings" if counts["warning"] else "")
    measured = {"collectives": facts.sample.text} if facts.sample else {}
    if facts.sample and facts.sample.ready_s is not None:
        measured["first-step"] = (
            f"{facts.sample.ready_s:.1f} s from a job's begin to its first all_reduce: the environment, import torch, "
            "the ranks' meeting; a training adds its model and its first batch"
        )
    return {
        "verdict": verdict,
        **measured,
        "slurm": "\n".join(cluster_rules.settings_in_words(facts.config, facts.partition)) or "no answer",
        "tracking": cluster_rules.tracking_in_words(settings),
        "nodes": _table(facts, findings),
        "compute": _compute(facts),
        "findings": "\n".join(str(finding) for finding in findings) or "none",
        "errors": str(counts["error"]),
        "warnings": str(counts["warning"]),
    }


def _table(facts: Facts, findings: collections.abc.Sequence[Finding]) -> str:
    offsets = clock_offsets(facts)
    rows = [
        ["NODE", "SLURM", "PYTHON", "CLOCK", "MOUNT", "MB/S", "RENAME", "SEEN", "NET", "TRIP", "NET-MB/S", "SHM",
         "GPUS", "TORCH", "UNPACK", "COLD", "IMPORT", "VERDICT"]
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
        filesystem = as_dict(about["filesystem"])
        peers = list(about["network"]["peers"].values())
        environment = next((as_dict(e) for e in about["environments"] if "seconds" in e), as_dict(None))
        rows.append(
            [
                name,
                str(about["versions"]["slurm"]) or "-",
                str(about["versions"]["python"]),
                f"{offsets[name] * 1e3:+.0f}ms" if name in offsets else "-",
                str(as_dict(filesystem.get("mount")).get("type") or "-"),
                _number(filesystem.get("write_mb_s"), ".0f"),
                _number(filesystem.get("rename_ms"), ".0f", "ms"),
                _number(next((p["seen_ms"] for p in peers if p.get("seen_ms") is not None), None), ".0f", "ms"),
                next((p["iface"] for p in peers if p.get("iface")), "-"),
                _number(min((p["trip_ms"] for p in peers if "trip_ms" in p), default=None), ".2f", "ms"),
                _number(next((p["mb_s"] for p in peers if "mb_s" in p), None), ".0f"),
                _number((about["limits"].get("shm") or 0) >> 20, "d", "M"),
                f"{about['gpus']['seen']}" if about["gpus"]["seen"] else "-",
                str(environment.get("torch", "-")),
                _number(environment.get("unpack_s"), "d", "s"),
                _number(environment.get("cold_s"), ".1f", "s"),
                _number(environment.get("seconds"), ".1f", "s"),
                verdict,
            ]
        )
    return _aligned(rows)


def _compute(facts: Facts) -> str:
    """Format a table of what the ranks of each node compute with."""
    rows = [["NODE", "CPUS", "SLURM", "TASK", "THREADS", "BF16", "NVLINKS", "PYTHON", "NUMPY"]]
    for name in facts.asked:
        if (about := facts.reports.get(name)) is None:
            continue
        processors, node = about["processors"], capacity(facts, name)
        links = [card["links"] for card in about["gpus"]["cards"] if card.get("links") is not None]
        environment = next((as_dict(e) for e in about["environments"] if "seconds" in e), as_dict(None))
        rows.append(
            [
                name,
                _number(processors["cpus"], "d"),
                str(node.cpus),
                f"{processors['affinity']}/{_number(processors['wanted'], 'd')}",
                str(processors["omp"] or threads(node)),
                ",".join(flag.partition("_")[0] for flag in processors["bf16"]) or "-",
                "-".join(str(number) for number in sorted({min(links), max(links)})) if links else "-",
                str(environment.get("python", "-")),
                str(environment.get("numpy", "-")),
            ]
        )
    return _aligned(rows)


def _aligned(rows: list[list[str]]) -> str:
    return tables.Table(rows)


def _number(value: object, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if isinstance(value, int | float) else "-"
