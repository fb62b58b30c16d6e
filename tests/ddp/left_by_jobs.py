"""Files that jobs leave in the workspace."""

import json
import pathlib

from cluster import Cluster, Job
from harness import Trainer


def add_dataset(workspace: pathlib.Path, name: str) -> pathlib.Path:
    """Make a dataset in the workspace, as far as submissions look at it."""
    folder = workspace / "datasets" / name
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text("{}")
    return folder


def write_result(job: Job, outcome: str = "done", **summary: object) -> None:
    """Write the files that a job of the payload leaves in a run's folder."""
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


def leave_training(
    trainer: Trainer, name: str, *, job_id: int | None = 7, rate: float = 100.0, **config: object
) -> pathlib.Path:
    """Leave the files of a finished training of 40 steps, and return its folder."""
    folder = trainer.workspace / "runs" / name
    for part in ("control", "logs", "epoch-0001"):
        (folder / part).mkdir(parents=True)
    records = [{"kind": "step", "step": step, "loss": 4 - 3 * step / 40} for step in range(1, 41)]
    evals = [
        {"kind": "eval", "step": 20, "val_loss": 2.75},
        {"kind": "eval", "step": 40, "val_loss": 2.9},
    ]
    figures = {
        "steps": 40,
        "last_loss": 1.0,
        "best_loss": 2.75,
        "tokens_per_second": rate,
        "nodes": 2,
    }
    files: dict[str, object] = {
        "job.json": {
            "job_id": job_id,
            "kind": "gpt",
            "submitted": "2026-11-20T18:00:00Z",
            "request": {"num_nodes": 2},
        },
        "config.json": {
            "lr": 0.003,
            "model": "tiny",
            "run_dir": str(folder),
            "batch": None,
            **config,
        },
        "epoch-0001/manifest.json": {"meta": {"step": 40}},
        "summary.json": {
            "workload": "gpt",
            "state": "done",
            "ranks": [{"device": "cpu"}],
            **figures,
        },
        f"control/{job_id}.r0.outcome": {"outcome": "done", "step": 40},
    }
    for path, content in files.items():
        (folder / path).write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [*records, *evals])
    )
    (folder / "latest").symlink_to("epoch-0001")
    (folder / "best").symlink_to("epoch-0001")
    (folder / "loss.png").write_bytes(b"PNG")
    return folder


def leave_script(
    trainer: Trainer, name: str, losses: list[float], *, done: float | None = None, **more: object
) -> None:
    """Leave the files of a script that logs its loss: metrics.jsonl and an outcome, no summary."""
    folder = trainer.workspace / "runs" / name
    for part in ("control", "logs"):
        (folder / part).mkdir(parents=True)
    lines = [
        {"step": at, "loss": loss, "time": 100 + at / 4, **more}
        for at, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "job.json").write_text(json.dumps({"job_id": 7, "kind": "script"}))
    (folder / "control" / "7.r0.outcome").write_text(
        json.dumps({"outcome": "done", "step": len(losses), "loss": done})
    )


def leave_sweep(trainer: Trainer, cluster: Cluster) -> dict[str, Job]:
    """Submit a sweep of five: two ended well, one failed, one runs, one waits.

    Return their jobs.
    """
    cluster.states = [("PENDING", 0)]
    trainer.run("submit-sweep", grid="lr=1,2,3,4,5", args="--steps 16", name="s")
    array = cluster.job(40)
    found = {"array": array}
    states = {0: ("COMPLETED", 0), 1: ("COMPLETED", 0), 2: ("FAILED", 256), 3: ("RUNNING", 0)}
    for number, state in states.items():
        folder = trainer.workspace / "runs" / f"s-{number}"
        (folder / "control" / "job").write_text(f"{41 + number}\n")
        job = Job(
            41 + number,
            cluster.user,
            "s",
            folder / "job.sbatch",
            "",
            [state],
            task=str(number),
            array_id=40,
        )
        if number < 2:
            write_result(job, last_loss=2.0 - number, best_loss=2.5 + number, workload="gpt")
        (folder / "config.json").write_text(json.dumps({"lr": float(number + 1), "steps": 16}))
        cluster.jobs.append(job)
        found[str(number)] = job
    array.task = "4"
    array.states = [("PENDING", 0)]
    return found
