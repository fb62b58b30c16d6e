"""`python -m bench [ROW ...]`: run the measures one after the other, print ratios, keep them as JSON."""

# pyright: basic, reportPrivateImportUsage=false
import argparse
import datetime
import importlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
import typing

from bench import row

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
# Each with its limit in seconds
ROWS = {
    "nanogpt": 3600,
    "ddp": 300,
    "loader": 900,
    "checkpoint": 900,
    "collectives": 900,
    "tokenizing": 900,
    "parquet": 300,
    "resume": 300,
    "submit": 1800,
    "node-lost": 1800,
    "gpu": 1500,
}


def main() -> int:
    """Return 0 when all was measured, 1 when a measure failed, 3 under --strict when a promised ratio was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"any of {', '.join(ROWS)} (default: all)"
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        help="where to keep the figures (default: bench/results/<time>.json)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit 3 when a ratio is below its goal"
    )
    parser.add_argument("--one", nargs=2, metavar=("ROW", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return _one(*args.one)
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")

    machine = _machine()
    report: dict[str, typing.Any] = {"machine": machine, "rows": [], "failed": {}, "not_here": {}}
    print(f"# {machine['cpu']}, {machine['cores']} cores, load {machine['load']}")
    print(f"# Python {machine['python']}, {machine['torch']}")
    print(_line("measure", "ours", "peer", "ratio", "goal", "peer is"), flush=True)
    for name in args.rows or ROWS:
        records, error, absent = _run(name)
        report["rows"] += records
        for record in records:
            print(_shown(record), flush=True)
        if absent:
            report["not_here"][name] = absent
            print(f"{name}: NOT MEASURED: {absent}", flush=True)
        if error:
            report["failed"][name] = error
            print(f"{name}: FAILED: {error}", flush=True)
    path = args.json or RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    missed = [record["measure"] for record in report["rows"] if record["met"] is False]
    print(
        f"# {len(report['rows'])} figures in {path}; below their goal: {', '.join(missed) or 'none'}"
    )
    return 1 if report["failed"] else 3 if missed and args.strict else 0


def _run(name: str) -> tuple[list[dict[str, typing.Any]], str | None, str | None]:
    """Run one measure in a process of its own; return its records, what failed, and what this machine has not."""
    began, load = time.monotonic(), os.getloadavg()[0]
    places = os.pathsep.join(str(ROOT / place) for place in (".", "lib", "payload"))
    env = {**os.environ, "PYTHONPATH": places, "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory(prefix="ddptrain-bench-") as scratch:
        out = pathlib.Path(scratch) / "rows.json"
        limit_s = ROWS[name]
        command = [sys.executable, "-m", "bench", "--one", name, str(out)]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [], f"not done after {limit_s} s", None
        if done.returncode or not out.exists():
            return [], (done.stderr.strip().splitlines() or ["no output"])[-1], None
        measured = json.loads(out.read_text())
        facts = {"row": name, "load_before": load, "seconds": round(time.monotonic() - began, 1)}
        return [{**facts, **record} for record in measured["rows"]], None, measured["not_here"]


def _one(name: str, out: str) -> int:
    with tempfile.TemporaryDirectory(prefix=f"ddptrain-{name}-") as scratch:
        found: list[row.Row | row.NotHere] = []
        try:
            found += importlib.import_module(f"bench.rows.{name.replace('-', '_')}").run(
                pathlib.Path(scratch)
            )
        except row.NotHere as e:
            found.append(e)
    rows = [one.as_record() for one in found if isinstance(one, row.Row)]
    absent = "; ".join(str(one) for one in found if isinstance(one, row.NotHere))
    pathlib.Path(out).write_text(json.dumps({"rows": rows, "not_here": absent or None}))
    return 0


def _shown(record: dict[str, typing.Any]) -> str:
    ours, peer = (f"{record[key]:.4g} {record['unit']}" for key in ("ours", "peer"))
    goal = (
        ""
        if record["goal"] is None
        else f"{record['goal']:g} {'met' if record['met'] else 'MISSED'}"
    )
    about = "; ".join(filter(None, (record["peer_name"], record["note"])))
    return _line(record["measure"], ours, peer, f"{record['ratio']:.2f}", goal, about)


def _line(*cells: str) -> str:
    return "{:44s} {:>16s} {:>16s} {:>8s}  {:12s} {}".format(*cells)


def _machine() -> dict[str, typing.Any]:
    import torch

    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "began": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "gpu": gpu,
        "load": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "python": platform.python_version(),
        "torch": f"torch {torch.__version__}",
    }


if __name__ == "__main__":
    sys.exit(main())
