"""`python -m bench [ROW ...]`: measure one row after the other, print ratios, keep them as JSON."""

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
ALL_MET, FAILED, MISSED = 0, 1, 3  # exit codes


class Measure(typing.NamedTuple):
    """A row's measure: modules of bench/rows, in order, and the time limit for all of them."""

    modules: tuple[str, ...]
    limit_s: float


class Outcome(typing.NamedTuple):
    """What came of a row."""

    records: list[dict[str, typing.Any]]
    error: str = ""
    missing: str = ""  # missing on this machine


ROWS = {
    "nanogpt": Measure(("nanogpt",), 3600),
    "loader": Measure(("loader", "tokenizing", "parquet"), 2100),
    "checkpoint": Measure(("checkpoint",), 900),
    "submit": Measure(("submit",), 1800),
    "node-lost": Measure(("node_lost",), 1800),
    "slow-link": Measure(("slow_link",), 3600),
    "gpu": Measure(("gpu",), 1500),
    "larger": Measure(("larger",), 240),
}


def main() -> int:
    """Return 0 if all was measured, 1 if a row failed, 3 if --strict and a goal was missed."""
    parser = _parser()
    args = parser.parse_args()
    if args.one:
        name, out = args.one
        _measure_here(name, pathlib.Path(out))
        return ALL_MET
    unknown = set(args.rows) - set(ROWS)
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")

    report = _measure(args.rows or list(ROWS))
    path = args.json or RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")

    missed = [record["measure"] for record in report["rows"] if record["met"] is False]
    below = ", ".join(missed) or "none"
    print(f"# {len(report['rows'])} figures in {path}; below their goal: {below}")
    if report["failed"]:
        return FAILED
    return MISSED if missed and args.strict else ALL_MET


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = ", ".join(ROWS)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"any of {names} (default: all)")
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        help="where to keep the figures (default: bench/results/<time>.json)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit 3 when a ratio is below its goal"
    )
    parser.add_argument("--one", nargs=2, metavar=("ROW", "FILE"), help=argparse.SUPPRESS)
    return parser


def _measure(names: list[str]) -> dict[str, typing.Any]:
    """Measure rows, print each figure as it comes, and return the report."""
    machine = _machine()
    report: dict[str, typing.Any] = {"machine": machine, "rows": [], "failed": {}, "not_here": {}}
    print(f"# {machine['cpu']}, {machine['cores']} cores, load {machine['load']}")
    print(f"# Python {machine['python']}, {machine['torch']}")
    print(_line("measure", "ours", "peer", "ratio", "goal", "peer is"), flush=True)
    for name in names:
        outcome = _run(name)
        report["rows"] += outcome.records
        for record in outcome.records:
            print(_shown(record), flush=True)
        if outcome.missing:
            report["not_here"][name] = outcome.missing
            print(f"{name}: NOT MEASURED: {outcome.missing}", flush=True)
        if outcome.error:
            report["failed"][name] = outcome.error
            print(f"{name}: FAILED: {outcome.error}", flush=True)
    return report


def _run(name: str) -> Outcome:
    """Measure a row in a separate process."""
    began = time.monotonic()
    load = os.getloadavg()[0]
    paths = os.pathsep.join(str(ROOT / place) for place in (".", "lib", "payload"))
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    limit_s = ROWS[name].limit_s
    with tempfile.TemporaryDirectory(prefix="ddptrain-bench-") as scratch:
        out = pathlib.Path(scratch, "rows.json")
        argv = [sys.executable, "-m", "bench", "--one", name, str(out)]
        try:
            done = subprocess.run(
                argv,
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome([], error=f"not done after {limit_s:g} s")
        if done.returncode or not out.exists():
            lines = done.stderr.strip().splitlines() or ["no output"]
            return Outcome([], error=lines[-1])
        measured = json.loads(out.read_text())

    facts = {"row": name, "load_before": load, "seconds": round(time.monotonic() - began, 1)}
    records = [{**facts, **record} for record in measured["rows"]]
    return Outcome(records, missing=measured["not_here"])


def _measure_here(name: str, out: pathlib.Path) -> None:
    """Measure a row in this process, and write its records and the reasons for missing ones."""
    records: list[dict[str, typing.Any]] = []
    missing: list[str] = []
    for module in ROWS[name].modules:
        for one in _measure_module(module):
            if isinstance(one, row.Row):
                records.append(one.as_record())
            else:
                missing.append(str(one))
    out.write_text(json.dumps({"rows": records, "not_here": "; ".join(missing)}))


def _measure_module(name: str) -> list[row.Row | row.NotHere]:
    module = importlib.import_module(f"bench.rows.{name}")
    with tempfile.TemporaryDirectory(prefix=f"ddptrain-{name}-") as scratch:
        try:
            return list(module.run(pathlib.Path(scratch)))
        except row.NotHere as e:
            return [e]


def _shown(record: dict[str, typing.Any]) -> str:
    unit = record["unit"]
    goal = ""
    if record["goal"] is not None:
        goal = f"{record['goal']:g} {'met' if record['met'] else 'MISSED'}"
    about = "; ".join(filter(None, (record["peer_name"], record["note"])))
    return _line(
        record["measure"],
        f"{record['ours']:.4g} {unit}",
        f"{record['peer']:.4g} {unit}",
        f"{record['ratio']:.2f}",
        goal,
        about,
    )


def _line(*cells: str) -> str:
    return "{:44s} {:>16s} {:>16s} {:>8s}  {:12s} {}".format(*cells)


def _machine() -> dict[str, typing.Any]:
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "began": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": gpu,
        "load": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "python": platform.python_version(),
        "torch": f"torch {torch.__version__}",
    }


def _cpu() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
