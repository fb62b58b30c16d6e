"""`--metric`: the numbers in rank 0's output, however it is written, are those that the views read."""

import itertools
import json
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
from ddp.submit import training

ISSUE = ("loss", "loss[ =:]+([0-9.eE+-]+)")
NOTED: list[str] = []
FORMATS = (
    "loss={:.6g}",
    "epoch 1 | loss: {:.6f} | 3.1 s",
    "\x1b[32mloss\x1b[0m = \x1b[1m{:.6e}\x1b[0m",
    "the loss {:.6f}.",
    "loss {:.6g}e",
)


def scanned(
    folder: pathlib.Path, blocks: list[tuple[str, bytes]], *patterns: tuple[str, str]
) -> metrics.Metrics:
    """Follow output that is written in these blocks, each to stdout or stderr."""
    rank = folder / "logs" / "id" / "attempt_0" / "0"
    (rank.parent / "1").mkdir(parents=True)
    (rank.parent / "1" / "stdout.log").write_text("loss=99\n")
    rank.mkdir()
    scanner = output_metrics.Scanner(
        str(folder / "logs"), str(folder / "metrics.jsonl"), patterns, NOTED.append
    )
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
    text=st.sampled_from(FORMATS),
    noise=st.text(st.characters(exclude_characters="\r\n"), max_size=30),
)
def test_a_number_is_found_however_it_is_printed(value: float, text: str, noise: str):
    lines = output_metrics.Lines([ISSUE], NOTED.append)
    record = lines.record(f"{text.format(value)} {noise}")
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
    data = text.encode()  # the last line has no end
    bounds = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    blocks = [(stream, data[a:b]) for a, b in itertools.pairwise(bounds)]
    found = scanned(tmp_path_factory.mktemp("cut"), blocks, ("step", r"it (\d+)"), ISSUE)
    assert found.points("loss", 99) == list(enumerate(values, 10))
    low = min(values)
    assert found.noted["loss"] == [10 + values.index(low), low]


def test_a_later_attempt_counts_on_and_a_step_of_several_lines_has_a_rate(tmp_path: pathlib.Path):
    found = metrics.Metrics()
    for number, values in enumerate(((3.0, 1.0), (2.0,))):
        folder = tmp_path / str(number)
        folder.mkdir()
        if number:
            (folder / "metrics.jsonl").write_text(
                (tmp_path / "0" / "metrics.jsonl").read_text() + '{"step": 9, "lo'
            )
        found = scanned(
            folder,
            [("stdout", b"".join(b"loss=%g\nacc 0.5\n" % one for one in values))],
            ISSUE,
            ("acc", "acc (.*)"),
        )
    assert found.points("loss", 9) == [(1, 3.0), (2, 1.0), (3, 2.0)]
    assert found.points("acc", 9) == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert found.lowest("loss") == (2, 1.0)
    assert found.steps_per_second is not None


def test_what_is_no_number_is_no_record_and_one_that_is_not_finite_shows(tmp_path: pathlib.Path):
    lines = output_metrics.Lines([("loss", "loss=(.*)?"), ("broken", "(")], NOTED.append)
    assert NOTED[-1].startswith("--metric broken is not read: ")
    assert [lines.record(text) for text in ("loss=none", "nothing", "loss=", "loss")] == [{}] * 4
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines.record("loss=nan")))
    assert metrics.Reader(tmp_path / "metrics.jsonl").read().lost_step == 1


def test_a_pattern_that_takes_too_long_for_a_line_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_metrics, "SLOW_S", 0.001)
    lines = output_metrics.Lines([("slow", "(.*.*.*z)"), ISSUE], NOTED.append)
    assert lines.record("a" * 300 + " loss=2")["loss"] == 2
    assert NOTED[-1] == "--metric slow is no longer read: it took too long for a line"


QUICK = (
    ISSUE[1],
    r".*loss: ([\d.]+)",
    r"(?i)\bloss\s*[:=]\s*([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)",
    r"step (\d+).*loss",
    r"^(\S+)$",
    "(?P<x>[a-z-]{1,9}|1)",
)
SLOW = ("(a+)+$", r".*.*.*=(\d+)")
AS_SLOW = ("(?:x+x+)+y(1)", "(?:ab|a|b)+(c)", r"(?:\d+,?)+(=)", r"(?:[\w-]+\s?)+=(\d)")


@pytest.mark.parametrize("pattern", QUICK)
def test_an_ordinary_pattern_is_taken(pattern: str):
    params = fields.parse(
        models.SubmitDdp,
        {"metric": f"loss={pattern}\nstep=step ([0-9]+)", "workload": "/a/train.py"},
    )
    assert fields.patterns(params.metric)[0] == ("loss", pattern)
    assert training._check_metric(params, "script") == ["metric: 2 patterns found quick"]


@pytest.mark.parametrize(
    "pattern", [*SLOW, *(pytest.param(one, marks=pytest.mark.long) for one in AS_SLOW)]
)
def test_a_slow_pattern_is_refused_at_submission(pattern: str):
    params = fields.parse(
        models.SubmitDdp, {"metric": f"loss={pattern}", "workload": "/a/train.py"}
    )
    with pytest.raises(ParameterError, match=r"^metric: .* may take very long for a line"):
        training._check_metric(params, "script")


@pytest.mark.parametrize(
    ("metric", "line"),
    [
        ("loss", "'loss' is not allowed; NAME=PATTERN"),
        ("=(1)", "'=(1)' is not allowed; NAME=PATTERN"),
        ("best=(1)", "'best=(1)' is not allowed; NAME=PATTERN"),
        ("loss=([0-9", "'([0-9' is no regular expression"),
        ("loss=[0-9]+", "has 0 groups; put (...) around the number"),
        ("loss=(a)(b)", "has 2 groups; put (...) around the number"),
    ],
)
def test_what_is_no_pattern_is_refused(metric: str, line: str):
    with pytest.raises(ParameterError, match=f"^metric: .*{re.escape(line)}"):
        fields.parse(models.SubmitDdp, {"metric": metric})


def test_a_workload_of_ours_measures_by_itself():
    params = fields.parse(models.SubmitDdp, {"metric": "loss=(1)"})
    with pytest.raises(
        ParameterError, match=r"^metric: only a script has it; the workload gpt measures by itself"
    ):
        training._check_metric(params, "gpt")
