"""What jobs leave in the workspace."""

import json
import pathlib

from cluster import Job


def add_dataset(workspace: pathlib.Path, name: str) -> pathlib.Path:
    """Make a dataset in the workspace, as far as submissions look at it."""
    folder = workspace / "datasets" / name
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text("{}")
    return folder


def write_result(job: Job, outcome: str = "done", **summary: object) -> None:
    """Leave in a run's folder what a job of the payload leaves."""
    folder = job.script.parent
    (folder / "control" / f"{job.job_id}.r0.outcome").write_text(
        json.dumps({"outcome": outcome, "step": 16})
    )
    (folder / "logs" / f"{job.job_id}.out").write_text("[TRAIN] step=16\n[DONE] ok\n")
    (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 16, "loss": 0.5}\n')
    record = {
        "workload": "smoke",
        "state": outcome,
        "nodes": 2,
        "world_size": 2,
        "steps": 16,
        "first_loss": 1.391486,
        "last_loss": 0.586587,
        "best_loss": 0.5,
        "tokens_per_second": None,
        "samples_per_second": 56118.5,
        "checkpoint": None,
        "loss_png": str(folder / "loss.png"),
        "ranks": [{"rank": 0, "host": "slurmd-0", "device": "cpu"}],
        **summary,
    }
    (folder / "summary.json").write_text(json.dumps(record))
