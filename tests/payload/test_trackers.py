"""Tracking: data for a tracker, the cost of a dead or slow one, one MLflow run for a resumed run.

With payload/tracking/requirements.txt in the environment, MLflow's SQLite store and W&B's files are
used for real.
"""

import json
import pathlib
import struct
import threading
import time
import typing

import pytest
import ranks

from ddptrain.records import trackers

Record = dict[str, typing.Any]


class Tracker:
    """Takes records; fails at the one with a given step, and may hang at the end."""

    def __init__(self, fails_at: int | None = None, gate: threading.Event | None = None) -> None:
        self.taken: list[Record] = []
        self.summary: Record | None = None
        self.fails_at = fails_at
        self.gate = gate

    def record(self, record: Record) -> None:
        if record["step"] == self.fails_at:
            raise ConnectionError("no route to host")
        self.taken.append(record)

    def close(self, summary: Record) -> None:
        if self.gate is not None:
            self.gate.wait(60)
        self.summary = summary


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log's lines on trackers."""
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if "[TRACK]" in line]


def test_each_tracker_gets_every_record_and_the_summary():
    first, second = Tracker(), Tracker()
    both = trackers.Trackers({"first": lambda: first, "second": lambda: second})
    for step in range(100):
        both.record({"step": step})
    both.close({"state": "done"})
    assert first.taken == second.taken == [{"step": step} for step in range(100)]
    assert first.summary == second.summary == {"state": "done"}


def test_a_tracker_that_fails_is_reported_once_and_left_out(caplog: pytest.LogCaptureFixture):
    def refuse() -> Tracker:
        raise ImportError("no module named wandb")

    bad, good = Tracker(fails_at=3), Tracker()
    with caplog.at_level("INFO"):
        begin = {"absent": refuse, "bad": lambda: bad, "good": lambda: good}
        tracked = trackers.Trackers(begin)
        for step in range(10):
            tracked.record({"step": step})
        tracked.close({})
    assert (len(bad.taken), bad.summary) == (3, None)
    assert (len(good.taken), good.summary) == (10, {})
    assert [line.partition("[TRACK] ")[2] for line in warnings(caplog)] == [
        "absent: ImportError: no module named wandb",
        "bad: ConnectionError: no route to host",
    ]


def test_a_tracker_that_hangs_is_left_behind_at_the_end(caplog: pytest.LogCaptureFixture):
    gate = threading.Event()
    tracker = Tracker(gate=gate)
    with caplog.at_level("INFO"):
        began = time.monotonic()
        trackers.Trackers({"slow": lambda: tracker}, close_s=0.2).close({})
        assert time.monotonic() - began < 30  # the gate opens only now
        gate.set()
    (line,) = warnings(caplog)
    assert "slow: gave no answer within 0.2 s; it lacks the last records" in line


@pytest.mark.filterwarnings("ignore")
def test_a_dead_server_costs_nothing_and_is_reported(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
):
    pytest.importorskip("mlflow", reason="needs payload/tracking/requirements.txt")
    lines = [json.dumps({"kind": "step", "step": step, "loss": 1.0}) for step in range(1000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    uri = f"http://127.0.0.1:{ranks.free_port()}"
    with caplog.at_level("INFO"):
        tracker = trackers.MLflow(tmp_path, uri, retry_s=0.1)
        tracked = trackers.Trackers({"MLflow": lambda: tracker})
        began = time.monotonic()
        for line in lines:
            tracked.record(json.loads(line))
        assert time.monotonic() - began < 1
        tracked.close({})
    logged = warnings(caplog)
    assert "1000 records were not sent; metrics.jsonl has them all" in logged[-1]
    assert len(logged) <= 2, logged


def test_the_environment_decides_what_is_tracked(tmp_path: pathlib.Path):
    assert trackers.targets(tmp_path, {}) == {}
    found = trackers.targets(
        tmp_path,
        {
            "MLFLOW_TRACKING_URI": "http://m:5000/",
            "DDPTRAIN_TENSORBOARD": "1",
            "DDPTRAIN_WANDB": "1",
        },
    )
    assert list(found) == ["MLflow", "WandB", "TensorBoard"]


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
    """Return the same from offline runs: LevelDB logs in blocks of 32 KiB, pieces of records."""
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
        tracked = trackers.Trackers(trackers.targets(tmp_path, env), close_s=120)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            for step in range(1, 101):
                number = step + 100 * attempt
                record = {"kind": "step", "step": number, "loss": 1 / step, "note": "text"}
                record["time"] = time.time()
                file.write(f"{json.dumps(record)}\n")
                tracked.record(record)
        tracked.close({"state": state, "steps": 200, "best_loss": 0.5})
    assert read(tmp_path) == list(range(1, 201))
