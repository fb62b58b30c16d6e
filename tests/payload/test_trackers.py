"""Tracking: what reaches a tracker, what a dead or slow one costs, and one MLflow run for a run that was resumed.

With payload/tracking/requirements.txt in the environment, MLflow's SQLite store and W&B's files are used for real.
"""

import json
import pathlib
import struct
import threading
import time
import typing

import hypothesis
import pytest
from hypothesis import strategies

from ddptrain.records import trackers

Record = dict[str, typing.Any]


class Tracker:
    """Takes records; fails in the calls that `faults` names, and may hang."""

    def __init__(self, faults: list[bool] | None = None) -> None:
        self.taken: list[Record] = []
        self.summary: Record | None = None
        self.faults = faults or []
        self.gate = threading.Event()
        self.gate.set()

    def open(self) -> None:
        if self.faults and self.faults.pop():
            raise ConnectionError("no route to host")

    def send(self, records: list[Record]) -> None:
        self.gate.wait(60)
        self.open()
        self.taken += records

    def close(self, summary: Record | None) -> None:
        self.summary = summary


@hypothesis.given(strategies.lists(strategies.booleans(), max_size=30))
@hypothesis.settings(max_examples=60, deadline=None)
def test_everything_arrives_once_and_in_order_whichever_calls_fail(faults: list[bool]):
    tracker = Tracker(faults)
    sink = trackers.Background(tracker, flush_s=0.001)
    step = 0
    while step < 1200 or tracker.faults:  # it recovers before the end
        sink.record({"step": step})
        step += 1
        time.sleep(0.001 if step > 1200 else 0)
    sink.close({"state": "done"})
    assert [record["step"] for record in tracker.taken] == list(range(step))
    assert (tracker.summary, sink.dropped) == ({"state": "done"}, 0)


def test_a_dead_tracker_costs_nothing_and_is_reported_once(caplog: pytest.LogCaptureFixture):
    tracker = Tracker([True] * 100_000)
    with caplog.at_level("INFO"):
        sink = trackers.Background(tracker, flush_s=0.1)
        began = time.monotonic()
        for step in range(1000):
            sink.record({"step": step})
        assert time.monotonic() - began < 30  # and not a thousand times what a dead tracker takes
        sink.close({})
    assert (sink.dropped, tracker.taken) == (1000, [])
    logged = [record.getMessage() for record in caplog.records if "[TRACK]" in record.getMessage()]
    assert len(logged) == 2, logged
    assert "1000 records were not sent; metrics.jsonl has them all" in logged[1]


def test_a_tracker_that_hangs_fills_the_queue_and_is_left_behind_at_the_end():
    tracker = Tracker()
    tracker.gate.clear()
    sink = trackers.Background(tracker, close_s=0.2, queued=10)
    for step in range(2000):
        sink.record({"step": step})
    assert sink.dropped >= 2000 - 10 - 500
    began = time.monotonic()
    sink.close({})
    assert time.monotonic() - began < 60  # the gate opens only now
    tracker.gate.set()


def test_the_environment_decides_what_is_tracked(tmp_path: pathlib.Path):
    assert trackers.targets(tmp_path, {}) == []
    found = trackers.targets(
        tmp_path,
        {
            "MLFLOW_TRACKING_URI": "http://m:5000/",
            "DDPTRAIN_TENSORBOARD": "1",
            "DDPTRAIN_WANDB": "1",
        },
    )
    assert [type(target).__name__ for target in found] == ["MLflow", "WandB", "TensorBoard"]


def test_a_path_becomes_an_sqlite_store_with_the_reason_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        assert trackers.store_uri("/mnt/x/mlruns") == "sqlite:////mnt/x/mlruns/mlflow.db"
        assert trackers.store_uri("file:///mnt/x") == "sqlite:////mnt/x/mlflow.db"
    assert "MLflow keeps no runs in plain files since 3.13" in caplog.text
    assert trackers.store_uri("http://m:5000") == "http://m:5000"


def read_mlflow(run_dir: pathlib.Path) -> list[int]:
    """Return the steps that MLflow has a loss of."""
    mlflow = pytest.importorskip("mlflow.tracking").MlflowClient(trackers.store_uri(str(run_dir)))
    (run,) = mlflow.search_runs([mlflow.get_experiment_by_name("slurm-ddp").experiment_id])
    assert (run.info.status, run.data.params, run.data.metrics["final_best_loss"]) == (
        "FINISHED",
        {"lr": "0.1"},
        0.5,
    )
    assert [file.path for file in mlflow.list_artifacts(run.info.run_id)] == ["config.json"]
    return [m.step for m in mlflow.get_metric_history(run.info.run_id, "loss")]


def read_wandb(run_dir: pathlib.Path) -> list[int]:
    """Return the same of the offline runs, whose files are LevelDB's logs: blocks of 32 KiB, pieces of records."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    steps, ids = list[int](), set[str]()
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            _, size, kind = struct.unpack_from("<IHB", data, at)
            record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
            at += left if (left := -at % 32768) < 7 else 0
            if kind in (1, 4):  # whole, or the last piece
                found, record = protocol.Record.FromString(record), b""
                ids |= {found.run.run_id} - {""}
                row = {
                    item.nested_key[0]: item.value_json
                    for item in found.history.item
                    if item.nested_key
                }
                steps += [int(row["step"])] if "loss" in row else []
    assert len(ids) == 1
    return steps


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("read", [pytest.param(read_mlflow, marks=pytest.mark.long), read_wandb])
def test_a_resumed_run_is_one_run_with_every_step(
    read: typing.Callable[[pathlib.Path], list[int]], tmp_path: pathlib.Path
):
    pytest.importorskip(
        read.__name__.removeprefix("read_"), reason="needs payload/tracking/requirements.txt"
    )
    (tmp_path / "config.json").write_text(json.dumps({"lr": 0.1, "model": None}))
    env = {"MLFLOW_TRACKING_URI": str(tmp_path)} if read is read_mlflow else {"DDPTRAIN_WANDB": "1"}
    for attempt, state in enumerate(("preempted", "done")):
        sink = trackers.Background(*trackers.targets(tmp_path, env), close_s=120)
        for step in range(1, 101):
            sink.record(
                {"kind": "step", "step": step + 100 * attempt, "loss": 1 / step, "note": "text"}
            )
        sink.close({"state": state, "steps": 200, "best_loss": 0.5})
        assert sink.dropped == 0
    assert read(tmp_path) == list(range(1, 201))
