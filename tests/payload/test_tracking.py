"""Tracking: what reaches a tracker, what a dead or slow one costs, and one MLflow run for a run that was resumed.

With MLflow in the environment (payload/tracking/requirements.txt) its own SQLite store is used for real.
"""

import importlib.util
import json
import pathlib
import threading
import time
import typing

import pytest

from ddptrain import tracking

Record = dict[str, typing.Any]


class Tracker:
    """Takes records; may hang or fail."""

    def __init__(self) -> None:
        self.taken: list[Record] = []
        self.summary: Record | None = None
        self.failing = self.refusing = False
        self.gate = threading.Event()
        self.gate.set()

    def open(self) -> None:
        if self.refusing:
            raise ConnectionError("no route to host")

    def send(self, records: list[Record]) -> None:
        self.gate.wait(60)
        if self.failing:
            raise ValueError("500 Internal Server Error")
        self.taken += records

    def close(self, summary: Record | None) -> None:
        self.summary = summary


def test_everything_arrives_in_order():
    tracker = Tracker()
    sink = tracking.Background(tracker)
    for step in range(1200):
        sink.record({"step": step})
    sink.close({"state": "done"})
    assert [record["step"] for record in tracker.taken] == list(range(1200))
    assert tracker.summary == {"state": "done"}
    assert sink.dropped == 0


@pytest.mark.parametrize("trouble", ["refusing", "failing"])
def test_a_dead_tracker_costs_nothing_and_is_reported_once(trouble: str, caplog: pytest.LogCaptureFixture):
    tracker = Tracker()
    setattr(tracker, trouble, True)
    with caplog.at_level("INFO"):
        sink = tracking.Background(tracker)
        began = time.monotonic()
        for step in range(1000):
            sink.record({"step": step})
        assert time.monotonic() - began < 30  # and not a thousand times what a dead tracker takes
        sink.close({})
    assert sink.dropped == 1000
    assert tracker.taken == []
    logged = [record.getMessage() for record in caplog.records if "[TRACK]" in record.getMessage()]
    assert len(logged) == 2, logged
    assert "1000 records were not sent; metrics.jsonl has them all" in logged[1]


def test_a_tracker_that_hangs_fills_the_queue_and_is_left_behind_at_the_end():
    tracker = Tracker()
    tracker.gate.clear()
    sink = tracking.Background(tracker, close_s=0.2, queued=10)
    for step in range(2000):
        sink.record({"step": step})
    assert sink.dropped >= 2000 - 10 - 500
    began = time.monotonic()
    sink.close({})
    assert time.monotonic() - began < 60  # the gate opens only now
    tracker.gate.set()


def test_the_environment_decides_what_is_tracked(tmp_path: pathlib.Path):
    assert tracking.targets(tmp_path, {}) == []
    found = tracking.targets(tmp_path, {"MLFLOW_TRACKING_URI": "http://m:5000/", "DDPTRAIN_TENSORBOARD": "1"})
    assert [type(target).__name__ for target in found] == ["MLflow", "TensorBoard"]


def test_a_path_becomes_an_sqlite_store_with_the_reason_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        assert tracking.store_uri("/mnt/x/mlruns") == "sqlite:////mnt/x/mlruns/mlflow.db"
        assert tracking.store_uri("file:///mnt/x") == "sqlite:////mnt/x/mlflow.db"
    assert "MLflow keeps no runs in plain files since 3.13" in caplog.text
    assert tracking.store_uri("http://m:5000") == "http://m:5000"


def test_without_the_packages_a_training_goes_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "store"))
    (sink,) = tracking.connect(tmp_path)
    sink.record({"step": 1, "loss": 1.0})
    sink.close({})
    assert not (tmp_path / "tracking.json").exists()


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs payload/tracking/requirements.txt")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_one_run_for_a_run_that_was_resumed(tmp_path: pathlib.Path):
    from mlflow import tracking as client  # pyright: ignore[reportMissingImports]

    (tmp_path / "config.json").write_text(json.dumps({"lr": 0.1, "model": None}))
    uri = tracking.store_uri(str(tmp_path / "store"))
    for attempt, state in enumerate(("preempted", "done")):
        sink = tracking.Background(tracking.MLflow(tmp_path, uri), close_s=120)
        for step in range(1, 51):
            sink.record({"kind": "step", "step": step + 50 * attempt, "loss": 1 / step, "note": "text"})
        sink.close({"state": state, "steps": 100, "best_loss": 0.5})
        assert sink.dropped == 0
    mlflow = client.MlflowClient(uri)
    experiment = mlflow.get_experiment_by_name("slurm-ddp")
    assert experiment is not None
    (run,) = mlflow.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    assert run.data.metrics["final_best_loss"] == 0.5
    assert [m.step for m in mlflow.get_metric_history(run.info.run_id, "loss")] == list(range(1, 101))
