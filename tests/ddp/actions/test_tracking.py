"""Tracking by option: what the environment and the jobs get; and which environments are removed."""

import json
import os
import pathlib

from cluster import Cluster
from harness import Trainer
from pip_double import Pip

from ddp.environment import archives


def test_the_option_brings_the_packages_and_tells_the_jobs(trainer: Trainer, cluster: Cluster, pip: Pip):
    def extras() -> int:
        return sum(call[-1].endswith("tracking/requirements.txt") and "--require-hashes" in call for call in pip.calls)

    trainer.run("submit-ddp", workload="smoke")
    assert extras() == 0
    assert {name for name, _ in cluster.jobs[-1].training().variables} == {"USER", "LOGNAME"}
    trainer.config |= {"mlflow-tracking-uri": "http://mlflow.example:5000", "tensorboard": True}
    trainer.run("submit-ddp", workload="smoke")
    assert extras() == 1, "another environment is made, with the packages"
    variables = cluster.jobs[-1].training().variables
    assert set(variables) == {("MLFLOW_TRACKING_URI", "http://mlflow.example:5000"), ("DDPTRAIN_TENSORBOARD", "1")}
    trainer.run("submit-ddp", workload="smoke", env="MLFLOW_TRACKING_URI=http://other:1")
    assert "http://mlflow.example:5000" not in dict(cluster.jobs[-1].training().variables).values()
    assert len(list((trainer.workspace / "environments").glob("*.json"))) == 2, "both stay"


def test_old_environments_go_and_used_ones_stay(tmp_path: pathlib.Path):
    folder = tmp_path / "environments"
    folder.mkdir()
    (tmp_path / "runs" / "busy").mkdir(parents=True)
    names = [f"{number:016x}" for number in range(6)]
    for number, name in enumerate(names):
        manifest = {"hash": name, "build": "cpu", "created": f"2026-11-{10 + number}T00:00:00Z"}
        (folder / f"{name}.json").write_text(json.dumps(manifest))
        (folder / f"{name}.tar.zst").write_text("x")
    (folder / "cafe000000000000.json").write_text(
        json.dumps({"hash": "cafe000000000000", "build": "cuda", "created": "2025"})
    )
    (folder / "note.json").write_text("{}")
    (folder / ".environment-x.tmp").write_text("half")
    os.utime(folder / ".environment-x.tmp", (1, 1))
    (folder / ".environment-y.tmp").write_text("being written")
    (tmp_path / "runs" / "busy" / "job.json").write_text(json.dumps({"environment": names[1]}))
    pruned = archives.prune_environments(str(tmp_path), keep=[names[0]], runs=[str(tmp_path / "runs" / "busy"), "/etc"])
    assert pruned["removed"] == [names[2]]
    left = {path.name for path in folder.iterdir()}
    assert f"{names[2]}.json" not in left
    assert f"{names[2]}.tar.zst" not in left
    assert {f"{name}.tar.zst" for name in (*names[:2], *names[3:])} <= left
    assert {"cafe000000000000.json", "note.json", ".environment-y.tmp"} <= left
    assert ".environment-x.tmp" not in left
