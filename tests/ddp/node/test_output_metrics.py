"""`--metric`: the views read the numbers in rank 0's output, for any way of writing them."""

import itertools
import json
import math
import pathlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.node import output_metrics
from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.run import metrics

LOSS = ("loss", "loss={}")
# The value of --metric, and a program's output
FORMATS = (
    ("loss={}", "loss={:.6g}"),
    ("| loss: {}", "epoch 1 | loss:    {:.6f} | 3.1 s"),
    ("loss = {}", "\x1b[32mloss\x1b[0m = \x1b[1m{:.6e}\x1b[0m"),
    ("loss {}", "the loss {:.6f}."),
    ("loss{}", "loss {:.6g}e"),
    ("eval * loss {} |", "eval | step 10 | loss {:.6g}\t| 3.1 s"),
    ("'loss': {},", "{{'val_loss': 9, 'loss': {:+.6g}, 'lr': 3}}"),
)


def scanned(
    folder: pathlib.Path, blocks: list[tuple[str, bytes]], *texts: tuple[str, str]
) -> metrics.Metrics:
    """Follow output that is written in these blocks, each to stdout or stderr."""
    rank = folder / "logs" / "id" / "attempt_0" / "0"
    (rank.parent / "1").mkdir(parents=True)
    (rank.parent / "1" / "stdout.log").write_text("loss=99\n")
    rank.mkdir()
    scanner = output_metrics.Scanner(str(folder / "logs"), str(folder / "metrics.jsonl"), texts)
    for name in ("stdout", "stderr"):
        (rank / f"{name}.log").touch()
    for name, block in blocks:
        with (rank / f"{name}.log").open("ab") as file:
            file.write(block)
        time.sleep(0.003)
    scanner.close()
    return metrics.Reader(folder / "metrics.jsonl").read()


@settings(max_examples=200)
@given(
    value=st.floats(0, 1e30),
    case=st.sampled_from(FORMATS),
    noise=st.text(st.characters(exclude_characters="\r\n"), max_size=30),
)
def test_a_number_is_found_however_it_is_printed(value: float, case: tuple[str, str], noise: str):
    text, printed = case
    lines = output_metrics.Lines([("loss", text)])
    record = lines.record(f"{printed.format(value)} {noise}")
    assert record["loss"] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert record["step"] == 1


@settings(max_examples=15)
@given(
    values=st.lists(
        st.floats(-1e6, 1e6).map(lambda value: round(value, 3)), min_size=1, max_size=40
    ),
    cuts=st.lists(st.integers(0, 900), max_size=6),
    end=st.sampled_from(("\n", "\r", "\r\n", "\n\n")),
    stream=st.sampled_from(("stdout", "stderr")),
)
def test_no_line_is_lost_wherever_the_output_is_cut(
    values: list[float],
    cuts: list[int],
    end: str,
    stream: str,
    tmp_path_factory: pytest.TempPathFactory,
):
    text = "\N{SNOWMAN}" + end.join(f"it {at}: loss={value}" for at, value in enumerate(values, 10))
    data = text.encode()  # the last line lacks an end
    bounds = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    blocks = [(stream, data[a:b]) for a, b in itertools.pairwise(bounds)]
    found = scanned(tmp_path_factory.mktemp("cut"), blocks, ("step", "it {}:"), LOSS)
    assert found.points("loss", 99) == list(enumerate(values, 10))
    low = min(values)
    assert found.noted["loss"] == [10 + values.index(low), low]


def test_a_later_attempt_counts_on_and_a_step_of_several_lines_has_a_rate(tmp_path: pathlib.Path):
    found = metrics.Metrics()
    for number, values in enumerate(((3.0, 1.0), (2.0, 1.5))):
        folder = tmp_path / str(number)
        folder.mkdir()
        if number:
            (folder / "metrics.jsonl").write_text(
                (tmp_path / "0" / "metrics.jsonl").read_text() + '{"step": 9, "lo'
            )
        found = scanned(
            folder,
            [("stdout", b"".join(b"loss=%g\nacc 0.5\n" % one for one in values))],
            LOSS,
            ("acc", "acc {}"),
        )
    assert found.points("loss", 9) == [(1, 3.0), (2, 1.0), (3, 2.0), (4, 1.5)]
    assert found.points("acc", 9) == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert found.is_counted
    assert found.lowest("loss") == (2, 1.0)
    assert found.steps_per_second is not None


def test_only_numbers_are_records_and_nan_and_inf_are_kept(tmp_path: pathlib.Path):
    lines = output_metrics.Lines([LOSS])
    for text in ("loss=none", "loss=nano", "nothing", "loss=", "loss", "loss=-", "val_loss=1"):
        assert lines.record(text) == {}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines.record("loss=nan")))
    assert metrics.Reader(tmp_path / "metrics.jsonl").read().lost_step == 1


@pytest.mark.parametrize(
    ("text", "line", "value"),
    [
        ("loss={}", "val_loss=1 loss=2", 2.0),
        ("loss={}", "loss=x loss=2", 2.0),
        ("loss={}", "eval/loss=-.5e-3", -0.0005),
        ("iter {}/", "iter 7 of iter 12/400", 12.0),
        ("train*loss {}", "train | val loss 1 | loss 2", 1.0),
        ("train*| loss {}", "train | val loss 1 | loss 2", 2.0),
        ("train*loss {}", "loss 1 train", None),
        ("a*b*c {}", "b a c b c 3", 3.0),
        ("loss: {}", "loss: INF", math.inf),
    ],
)
def test_the_first_number_that_a_text_surrounds_is_taken(text: str, line: str, value: float | None):
    assert output_metrics.Lines([("x", text)]).record(line).get("x") == value


@settings(max_examples=200)
@given(
    text=st.text("a1 *.=", min_size=1, max_size=8).map(lambda text: f"{text}a{{}}a"),
    unit=st.text("a1 .=e-", min_size=1, max_size=4),
)
def test_no_text_takes_long_for_a_line(text: str, unit: str):
    lines = output_metrics.Lines([("x", text)])
    line = unit * output_metrics.LONGEST_LINE
    began = time.process_time()
    lines.record(line)
    assert time.process_time() - began < 0.5


def test_only_the_beginning_of_a_long_line_is_searched():
    lines = output_metrics.Lines([LOSS])
    assert lines.record("x" * (output_metrics.LONGEST_LINE - 6) + " loss=2") == {}


@pytest.mark.parametrize(
    ("metric", "line"),
    [
        ("loss", "'loss': write {} once, where the number stands, such as 'loss=loss: {}'"),
        ("=a {}", "'=a {}' is not allowed; NAME=TEXT, such as 'loss=loss: {}'"),
        ("best=a {}", "'best=a {}' is not allowed; NAME=TEXT"),
        ("loss=loss ([0-9.]+)", "write {} once, where the number stands"),
        ("loss={} of {}", "write {} once, where the number stands"),
        ("loss={} loss", "write the text that stands right before {}"),
        ("loss=loss *{}", "write the text that stands right before {}"),
        ("loss=loss {} * s", "* may only stand before {}"),
    ],
)
def test_patterns_without_a_place_for_a_number_are_refused(metric: str, line: str):
    with pytest.raises(ParameterError, match=f"^metric: .*{re.escape(line)}"):
        fields.parse(models.SubmitDdp, {"metric": metric})
