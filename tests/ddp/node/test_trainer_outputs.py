"""The losses and steps of known trainers are found in their output, without `--metric`."""

import itertools
import json
import pathlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.node import output_metrics, trainer_outputs
from ddp.run import metrics

# From transformers 5's Trainer with a model of one layer: 8 steps, a line for two, validation at 4
# and 8
CAPTURED = pathlib.Path(__file__).parents[1] / "data" / "transformers"
EVENTS = "events.out.tfevents.1.node.2.0"
LOSSES = [(2, 3.902), (4, 3.899), (6, 3.899), (8, 3.902)]
VAL_LOSSES = [(4, 3.909), (8, 3.909)]
LIGHTNING = """epoch,lr-AdamW,step,train_loss,val_loss
0,,1,2.5,
0,0.001,1,,
0,,3,2.0,
0,,3,,2.25
1,,5,1.5,
"""


def points(records: list[trainer_outputs.Record], name: str) -> list[tuple[int, float]]:
    return [(one["step"], round(one[name], 3)) for one in records if name in one]


def rank_0(folder: pathlib.Path) -> pathlib.Path:
    rank = folder / "logs" / "id" / "attempt_0" / "0"
    rank.mkdir(parents=True)
    for name in ("stdout", "stderr"):
        (rank / f"{name}.log").touch()
    return rank


def scan(folder: pathlib.Path) -> output_metrics.Scanner:
    target = str(folder / "metrics.jsonl")
    scanner = output_metrics.Scanner(str(folder / "logs"), target, (), [str(folder)])
    time.sleep(0.2)  # for its look at existing files; a program's imports take longer
    return scanner


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 2500), max_size=4))
def test_each_printed_dictionary_gets_the_step_of_its_progress_bar(cuts: list[int]):
    printed = trainer_outputs.Printed()
    records: list[trainer_outputs.Record] = []
    for line in (CAPTURED / "stdout.txt").read_text().splitlines():
        printed.add_line("stdout", line)
    lines = re.split("[\r\n]+", (CAPTURED / "stderr.txt").read_text())
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(lines)]):
        for line in lines[begin:end]:
            printed.add_line("stderr", line)
    records += printed.take()
    assert points(records, "loss") == LOSSES
    assert points(records, "val_loss") == VAL_LOSSES
    assert {one["total_steps"] for one in records} == {8}
    assert [one["kind"] for one in records].count("eval") == 2


def test_without_a_bar_lines_are_counted_and_shown_as_lines(tmp_path: pathlib.Path):
    rank = rank_0(tmp_path)
    scanner = scan(tmp_path)
    (rank / "stdout.log").write_text("{'loss': 2.5, 'epoch': 0.1}\n{'loss': nan}\n{'x': 1}\n")
    scanner.close()
    found = metrics.Reader(tmp_path / "metrics.jsonl").read()
    assert found.is_counted
    assert found.step == 2
    assert found.points("loss", 9) == [(1, 2.5)]
    assert found.lost_step == 2


def test_a_dictionary_may_have_its_step(tmp_path: pathlib.Path):
    printed = trainer_outputs.Printed()
    printed.add_line("stdout", "{'step': 30, 'train_loss': '1.5', 'learning_rate': 1e-05}")
    assert printed.take() == [{"kind": "step", "loss": 1.5, "lr": 1e-05, "step": 30}]


@pytest.mark.parametrize(
    ("name", "text", "losses", "val_losses"),
    [
        ("trainer_state.json", None, LOSSES, VAL_LOSSES),
        (EVENTS, None, LOSSES, VAL_LOSSES),
        ("metrics.csv", LIGHTNING, [(1, 2.5), (3, 2.0), (5, 1.5)], [(3, 2.25)]),
    ],
)
def test_the_file_of_a_trainer_is_found_in_a_new_folder(
    tmp_path: pathlib.Path,
    name: str,
    text: str | None,
    losses: list[tuple[int, float]],
    val_losses: list[tuple[int, float]],
):
    rank_0(tmp_path)
    scanner = scan(tmp_path)
    place = tmp_path / "outputs" / "2026-11-29" / "10-00-00" / "version_0"
    place.mkdir(parents=True)
    data = text.encode() if text else (CAPTURED / name).read_bytes()
    (place / name).write_bytes(data)
    scanner.close()
    found = metrics.Reader(tmp_path / "metrics.jsonl").read()
    assert [(at, round(value, 3)) for at, value in found.points("loss", 99)] == losses
    assert [(at, round(value, 3)) for at, value in found.points("val_loss", 99)] == val_losses
    assert not found.is_counted
    assert found.noted["loss"]


@pytest.mark.parametrize("name", ["trainer_state.json", EVENTS, "metrics.csv"])
@given(data=st.binary(max_size=200), cut=st.integers(0, 3000))
@settings(max_examples=60)
def test_a_damaged_file_is_read_as_far_as_it_is_whole(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: bytes, cut: int
):
    folder = tmp_path_factory.mktemp("damaged")
    files = trainer_outputs.Files([str(folder)])
    whole = LIGHTNING.encode() if name == "metrics.csv" else (CAPTURED / name).read_bytes()
    for content in (data, whole[:cut] + data):
        (folder / name).write_bytes(content)
        for record in files.take():
            assert {"step", "kind"} < record.keys()


def test_a_file_that_grows_gives_only_what_is_new(tmp_path: pathlib.Path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,3\n")
    files = trainer_outputs.Files([str(tmp_path)])
    assert files.take() == [], "it is of an earlier attempt"
    with path.open("a") as file:
        file.write("2,2.5\n")
    assert points(files.take(), "loss") == [(2, 2.5)]
    with path.open("a") as file:
        file.write("3,2\n4,1.")
    assert points(files.take(), "loss") == [(3, 2.0)]


def test_a_program_that_writes_metrics_jsonl_itself_is_left_alone(tmp_path: pathlib.Path):
    rank = rank_0(tmp_path)
    target = tmp_path / "metrics.jsonl"
    target.write_text('{"step": 1, "loss": 3.0}\n')
    scanner = scan(tmp_path)
    with target.open("a") as file:
        file.write('{"step": 2, "loss": 2.0}\n')
        (rank / "stdout.log").write_text("{'loss': 9, 'step': 2}\n")
    before = target.read_text()
    time.sleep(1.2)
    scanner.close()
    assert target.read_text() == before


def test_the_rate_leaves_out_the_pause_before_an_attempt(tmp_path: pathlib.Path):
    path = tmp_path / "metrics.jsonl"
    times = [(1, 100.0), (2, 101.0), (3, 500.0), (4, 501.0)]
    records = [{"step": step, "loss": 1.0, "time": at} for step, at in times]
    records[2]["begins"] = True
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    assert metrics.Reader(path).read().steps_per_second == 1.0
