#!/usr/bin/env python3
"""A double of the command `ddp`: it runs the ranks here, in turn or at once, and reports in JSON.

It takes the words that ddptrain.functions may say and no others. DDP_DOUBLE is its folder.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

HOME = pathlib.Path(os.environ["DDP_DOUBLE"])
RUNS = HOME / "runs"


def main() -> None:
    assert sys.argv[1] == "--json", sys.argv
    with (HOME / "asked").open("a") as file:
        file.write(json.dumps(sys.argv[2:]) + "\n")
    verb, *words = sys.argv[2:]
    answer = {
        "submit": submit,
        "sweep": sweep,
        "list": runs,
        "show": show,
        "log": log,
        "cancel": cancel,
    }[verb](words)
    print(json.dumps({"schema": 1, **answer}))
    if "error" in answer:
        print(f"ddp: {answer['error']}", file=sys.stderr)
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(allow_abbrev=False)
    found.add_argument("--function", required=True)
    found.add_argument("--nodes", type=int, default=1)
    found.add_argument("--ranks-per-node", type=int, default=1)
    for name in (
        "gpus-per-node",
        "time-limit",
        "partition",
        "memory",
        "cpus-per-task",
        "env",
        "run",
        "name",
        "parallel",
    ):
        found.add_argument(f"--{name}")
    found.add_argument("--grid", default="")
    found.add_argument("-m", action="store_true")
    found.add_argument("module")
    return found


def submit(words: list[str]) -> dict[str, object]:
    given = parser().parse_args(words)
    if given.partition == "nowhere":
        return {"error": "--partition: no partition 'nowhere'"}
    print("copying 3 files", file=sys.stderr)
    name = given.run or f"{pathlib.Path(given.function).stem}-{len(list(RUNS.iterdir()))}"
    place(RUNS / name, given)
    start(RUNS / name, RUNS / name, given, [])
    return {"run": name, "job-id": 40, "run-dir": str(RUNS / name)}


def sweep(words: list[str]) -> dict[str, object]:
    given = parser().parse_args(words)
    name = given.name or f"sweep-{len(list(RUNS.iterdir()))}"
    place(RUNS / name, given)
    axis, _, values = given.grid.partition("=")
    for number, value in enumerate(values.split(",")):
        run = RUNS / f"{name}-{number}"
        run.mkdir()
        start(run, RUNS / name, given, [f"--{axis}={value}"])
    return {"sweep": name, "job-id": 40, "run-dir": str(RUNS / name)}


def place(folder: pathlib.Path, given: argparse.Namespace) -> None:
    assert given.m
    folder.mkdir()
    shutil.copyfile(given.function, folder / "function.pkl")
    (folder / "function.pkl").chmod(0o600)


def start(
    run: pathlib.Path, job: pathlib.Path, given: argparse.Namespace, words: list[str]
) -> None:
    """Start the ranks in the background, as a batch job does."""
    world = given.nodes * given.ranks_per_node
    argv = [
        sys.executable,
        __file__,
        "--ranks",
        str(run),
        str(job),
        str(world),
        given.module,
        *words,
    ]
    with (run / "log").open("w") as log:
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def run_ranks(run: str, job: str, world: str, *words: str) -> None:
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(int(world)):
        env = {**os.environ, "RUN_DIR": run, "JOB_DIR": job, "RANK": str(rank), "WORLD_SIZE": world}
        ranks.append(subprocess.Popen([sys.executable, "-m", *words], env=env, cwd=run))
    codes = [rank.wait() for rank in ranks]
    bad = next((rank for rank, code in enumerate(codes) if code), None)
    # As ddp does, by the ranks' output: a killed one goes before others
    killed = next((rank for rank, code in enumerate(codes) if code < 0), None)
    failed = bad if killed is None else killed
    about = {"state": "COMPLETED" if failed is None else "FAILED", "failed_rank": failed}
    if failed is not None:
        about["reason"] = f"job 40 FAILED, exit code 1; rank {failed} ended with {codes[failed]}"
    partial = pathlib.Path(run, "ended.new")
    partial.write_text(json.dumps(about))
    partial.rename(partial.with_name("ended"))


def describe(path: pathlib.Path) -> dict[str, object]:
    about: dict[str, object] = {
        "run": path.name,
        "run_dir": str(path),
        "job_id": 40,
        "state": "RUNNING",
    }
    if (path / "ended").exists():
        about |= json.loads((path / "ended").read_text())
    return about


def runs(words: list[str]) -> dict[str, object]:
    given = argparse.ArgumentParser(allow_abbrev=False)
    given.add_argument("--name")
    given.add_argument("--lines")
    pattern = given.parse_args(words).name
    return {"runs": [describe(path) for path in sorted(RUNS.glob(pattern))]}


def show(words: list[str]) -> dict[str, object]:
    (name,) = words
    return describe(RUNS / name) if (RUNS / name).is_dir() else {"error": f"run: no run {name}"}


def log(words: list[str]) -> dict[str, object]:
    return {"lines": (RUNS / words[0] / "log").read_text().splitlines()}


def cancel(words: list[str]) -> dict[str, object]:
    for name in words:
        (RUNS / name / "ended").write_text(
            json.dumps({"state": "CANCELLED", "reason": "job 40 CANCELLED"})
        )
    return {"cancelled": words}


if __name__ == "__main__":
    if sys.argv[1] == "--ranks":
        run_ranks(*sys.argv[2:])
    else:
        main()
