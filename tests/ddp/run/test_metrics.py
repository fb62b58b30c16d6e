"""Curves: thinned within bounds with their extremes, read as the file grows."""

import json
import math
import os
import pathlib
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from ddp.run import folder, untrusted
from ddp.run.metrics import MAX_SERIES, Reader, Series

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400)


def record(step: int, loss: float, **more: object) -> str:
    return json.dumps({"kind": "step", "step": step, "loss": loss, **more}) + "\n"


@hypothesis.given(values=VALUES, max_points=st.integers(8, 64), limit=st.integers(4, 50))
def test_thinning_keeps_ends_and_extremes(values: list[float], max_points: int, limit: int):
    series = Series(max_points)
    for step, value in enumerate(values):
        series.add(step, value)
    points = series.points(limit)
    assert len(series) <= max_points
    assert len(points) <= limit + 2
    kept = [0.0 if abs(value) < 1e-200 else value for value in values]
    assert points[0] == (0, kept[0])
    assert points[-1] == (len(values) - 1, kept[-1])
    assert (min(value for _, value in points), max(value for _, value in points)) == (
        min(kept),
        max(kept),
    )
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert all(kept[int(step)] == value for step, value in points)


def test_a_curve_goes_on_where_a_run_was_resumed():
    series = Series()
    for step, value in ((1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0), (3, 3.5), (4, 2.5)):
        series.add(step, value)
    assert series.points(100) == [(1, 5.0), (2, 4.0), (3, 3.5), (4, 2.5)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e305])
def test_a_loss_that_ceases_to_be_finite_is_reported_from_its_first_step_on(bad: float):
    series = Series()
    series.add(1, 2.0)
    series.add(2, bad)
    assert series.lost == 2
    series.add(3, 1.0)
    assert series.lost is None
    series.add(4, bad)
    series.add(5, bad)
    assert series.lost == 4
    assert series.points(10) == [(1, 2.0), (3, 1.0)]


def test_only_what_was_appended_is_read(tmp_path: pathlib.Path):
    path = tmp_path / folder.METRICS
    path.write_text(record(1, 5.0) + record(2, 4.0))
    reader = Reader(path)
    reader.read()
    with path.open("r+") as file:
        file.write(record(1, 9.0))  # in place, of the same length: who reads it again sees it
        file.seek(0, os.SEEK_END)
        file.write(record(3, 3.0))
    assert reader.read().series["loss"].points(10) == [(1, 5.0), (2, 4.0), (3, 3.0)]


def test_half_a_line_waits_for_its_other_half(tmp_path: pathlib.Path):
    path = tmp_path / folder.METRICS
    line = record(2, 4.0)
    path.write_text(record(1, 5.0) + line[:20])
    reader = Reader(path)
    metrics = reader.read()
    assert metrics.series["loss"].points(10) == [(1, 5.0)]
    assert metrics.bad_lines == 0
    with path.open("a") as file:
        file.write(line[20:-1])  # whole, but for the end of the line
    metrics = reader.read()
    assert metrics.series["loss"].points(10) == [(1, 5.0), (2, 4.0)]
    with path.open("a") as file:
        file.write("\n" + record(3, 3.0))
    metrics = reader.read()
    assert metrics.series["loss"].points(10) == [(1, 5.0), (2, 4.0), (3, 3.0)]
    assert metrics.bad_lines == 0


def test_a_file_that_was_replaced_is_read_again(tmp_path: pathlib.Path):
    path = tmp_path / folder.METRICS
    path.write_text("".join(record(step, 5.0) for step in range(1, 10)))
    reader = Reader(path)
    metrics = reader.read()
    new = tmp_path / "new"
    new.write_text("".join(record(step, 6.0) for step in range(1, 30)))
    new.replace(path)
    metrics = reader.read()
    assert metrics.series["loss"].points(100) == [(step, 6.0) for step in range(1, 30)]
    path.write_text(record(1, 7.0))  # cut short in place
    metrics = reader.read()
    assert metrics.series["loss"].points(100) == [(1, 7.0)]


def test_a_line_without_end_takes_no_memory(tmp_path: pathlib.Path):
    path = tmp_path / folder.METRICS
    with path.open("wb") as file:
        file.write(record(1, 5.0).encode())
        for _ in range(12):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + record(2, 4.0).encode())
    metrics = Reader(path).read()
    assert metrics.series["loss"].points(10) == [(1, 5.0), (2, 4.0)]
    assert metrics.bad_lines == 1


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        "null",
        "{",
        '{"step": NaN}',
        '{"step": "1"}',
        '{"loss": 1}',
        '{"step": 1e300, "loss": 2}',
        "[" * 5000,
        '{"step": true, "loss": 1}',
        '{"step": ' + "9" * 400 + "}",
        '{"step": ' + "9" * 5000 + "}",
        "\x00\xff",
    ],
)
def test_lines_without_a_record_are_left_out(tmp_path: pathlib.Path, line: str):
    path = tmp_path / folder.METRICS
    path.write_text(record(1, 5.0) + line + "\n" + record(2, 4.0))
    metrics = Reader(path).read()
    assert metrics.series["loss"].points(10) == [(1, 5.0), (2, 4.0)]
    assert metrics.bad_lines == 1


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: pathlib.Path):
    os.mkfifo(tmp_path / folder.METRICS)
    (tmp_path / "link").symlink_to("/etc/passwd")
    began = time.monotonic()
    assert not Reader(tmp_path / folder.METRICS).read().series
    assert not Reader(tmp_path / "link").read().series
    assert time.monotonic() - began < 5
    assert untrusted.tail(tmp_path / "link", 100) == []


def test_a_script_that_writes_many_names_fills_no_memory(tmp_path: pathlib.Path):
    path = tmp_path / folder.METRICS
    path.write_text("".join(record(step, 1.0, **{f"x{step}": 1}) for step in range(1, 1000)))
    metrics = Reader(path).read()
    assert len(metrics.series) == MAX_SERIES
    assert len(metrics.series["loss"]) == 999


def test_the_rate_of_steps_is_that_of_the_last_ones(tmp_path: pathlib.Path):
    path = tmp_path / folder.METRICS
    slow = "".join(record(step, 1.0, time=1000.0 + 10 * step) for step in range(1, 101))
    path.write_text(
        slow
        + "".join(record(step, 1.0, time=2000.0 + (step - 100) / 2) for step in range(101, 301))
    )
    metrics = Reader(path).read()
    assert metrics.steps_per_second == pytest.approx(2.0)


@pytest.mark.parametrize("tail_bytes", [None, 600])
def test_starts_and_checkpoints_are_no_curves(tmp_path: pathlib.Path, tail_bytes: int | None):
    path = tmp_path / folder.METRICS
    start = {"kind": "start", "step": 0, "total_steps": 400, "device": "cpu", "nodes": 2}
    saved = {"kind": "checkpoint", "step": 200, "stall_s": 0.25, "seconds": 3.0, "name": "epoch-1"}
    text = (
        json.dumps(start)
        + "\n"
        + "".join(record(step, 1.0, total_steps=400) for step in range(1, 201))
    )
    path.write_text(text + json.dumps(saved) + "\n" + record(201, 1.0, total_steps=400))
    metrics = Reader(path, tail_bytes=tail_bytes).read()
    assert (metrics.step, metrics.total_steps, metrics.bad_lines) == (201, 400, 0)
    assert metrics.checkpoint["stall_s"] == 0.25
    assert list(metrics.series) == ["loss"]
    assert metrics.start == (start if tail_bytes is None else {})
    assert len(metrics.series["loss"]) == (201 if tail_bytes is None else metrics.num_records)
