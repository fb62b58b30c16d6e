"""`run.log`: no value raises, and the program's views read each number from metrics.jsonl."""

# pyright: basic, reportPrivateImportUsage=false, reportMissingImports=false
import json
import math
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.run import metrics
from ddptrain import resume
from ddptrain.records import script_log


class Spiteful:
    """A value that fails in every way it is asked."""

    def item(self) -> None:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


NUMBERS = st.one_of(st.floats(), st.integers(), st.booleans())
WRAPPED = st.sampled_from(
    (
        lambda x: x,
        torch.tensor,
        lambda x: torch.tensor([[x]], requires_grad=True),
        np.float32,
        np.array,
    )
)
REFUSED = st.sampled_from(
    (
        Spiteful(),
        object(),
        [1],
        {},
        1j,
        torch.ones(2),
        np.zeros(3),
        10**400,
        torch.ones(1, device="meta"),
    )
)
NAMES = st.one_of(
    st.sampled_from(("loss", "val_loss", "time", "kind", "best", "lr")), st.text(max_size=8)
)


@settings(max_examples=40)
@given(
    lines=st.lists(
        st.tuples(
            st.one_of(NUMBERS, REFUSED, st.none(), st.text()),
            st.dictionaries(NAMES, st.one_of(NUMBERS, REFUSED, st.text(), st.none())),
        )
    )
)
def test_whatever_is_logged_each_line_is_a_record_and_none_is_raised(
    lines: list[tuple[object, dict[str, object]]], tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.mktemp("any") / "metrics.jsonl"
    book = script_log.ScriptLog(path, {"step": 0})
    for step, values in lines:
        book.add(step, values)
    book.end()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    counted = [
        step
        for step, _ in lines
        if isinstance(step, int | float) and not isinstance(step, bool) and abs(step) < 2**53
    ]
    assert [record["kind"] for record in records] == ["start"] + ["step"] * len(counted)
    assert [record["step"] for record in records[1:]] == [pytest.approx(step) for step in counted]
    assert metrics.Reader(path).read().bad_lines == 0


@settings(max_examples=60)
@given(value=st.floats(width=32), wrap=WRAPPED)
def test_a_number_is_the_same_in_whatever_it_comes(
    value: float, wrap, tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.mktemp("number") / "metrics.jsonl"
    book = script_log.ScriptLog(path, {"step": 0})
    book.add(np.int64(3), {"loss": wrap(value)})
    book.end()
    found = metrics.Reader(path).read()
    assert found.step == 3
    if math.isfinite(value):
        assert found.last("loss") == pytest.approx(value)
    else:
        assert found.lost_step == 3


def test_a_restart_goes_on_behind_a_torn_line_and_the_lowest_loss_stays_known(
    tmp_path: pathlib.Path,
):
    path = tmp_path / "metrics.jsonl"
    for attempt, (first, last) in enumerate(((1, 2000), (1001, 3000))):
        book = script_log.ScriptLog(path, {"step": first - 1, "attempt": f"7.r{attempt}"})
        for step in range(first, last + 1):
            book.add(step, {"loss": 1 + abs(step - 500) / 1000, "total_steps": 3000})
            if step % 500 == 0:
                book.add(step, {"val_loss": 2.0 + step / 1000})
        book.end()
        path.write_bytes(path.read_bytes() + b'{"kind": "step", "step": 9, "lo' * (attempt == 0))
    whole, end = metrics.Reader(path).read(), metrics.Reader(path, tail_bytes=4096).read()
    assert [step for step, _ in whole.points("loss", 1 << 16)] == list(range(1, 3001))
    assert whole.lowest("loss") == end.lowest("loss") == (500, 1.0)
    assert whole.best == end.best == (500, 2.5)
    assert (end.step, end.total_steps, whole.bad_lines) == (3000, 3000, 1)


def test_a_filesystem_that_fails_holds_nothing_up_and_gets_all_lines_later(tmp_path: pathlib.Path):
    path = tmp_path / "gone" / "metrics.jsonl"
    book = script_log.ScriptLog(path, {"step": 0}, flush_s=0.01)
    for step in range(1, 50_001):  # more than the trackers would queue
        book.add(step, {"loss": 0.5})
    path.parent.mkdir()
    book.end()
    found = metrics.Reader(path).read()
    assert (found.step, found.num_records, found.bad_lines) == (50_000, 50_000, 0)


SCRIPT = """
import multiprocessing, os, sys
from torch import distributed
from ddptrain import resume

def rank(ending):
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    run = resume.Run()
    run.log(1, loss=0.5 + run.rank)
    exec(ending)

if __name__ == "__main__":
    {start}
"""


def losses(folder: pathlib.Path) -> list[object]:
    return [
        json.loads(line).get("loss") for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_rank_0_alone_writes(tmp_path: pathlib.Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(start="rank('run.done(step=1)')"))
    ranks.run(
        2,
        script,
        accident=ranks.SCRIPT,
        DO="nothing",
        AT="0",
        RUN_DIR=str(tmp_path),
        CUDA_VISIBLE_DEVICES="",
    )
    assert losses(tmp_path) == [None, 0.5]


@pytest.mark.parametrize(
    "start",
    [
        "rank('')",
        "rank('sys.exit(3)')",
        "multiprocessing.Process(target=rank, args=('1 / 0',)).start()",
    ],
)
def test_the_last_lines_arrive_however_the_script_ends(start: str, tmp_path: pathlib.Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(start=start))
    env = {**os.environ, "RUN_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, script], env=env, check=False, timeout=120)
    assert losses(tmp_path) == [None, 0.5]


class Lightning(types.ModuleType):
    """`lightning.pytorch` as far as a logger meets it."""

    class loggers:  # noqa: N801 - as it is called there
        class Logger:
            pass


def logged_by(
    kind: str, run: resume.Run, values: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "lightning":
        monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
        monkeypatch.setitem(sys.modules, "lightning.pytorch", Lightning("lightning.pytorch"))
        resume.lightning_logger(run).log_metrics(values, 4)
    elif kind == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        accelerator = accelerate.Accelerator(cpu=True, log_with=resume.accelerate_tracker(run))
        accelerator.init_trackers("any")
        accelerator.log(values, step=4)
    else:
        pytest.importorskip("transformers")
        state = types.SimpleNamespace(global_step=4, max_steps=9)
        callback = resume.trainer_callback(run)
        callback.on_log(None, state, None, logs=values)
        callback.on_log(None, state, None, logs={"train_runtime": 2.0, "train_loss": 99.0})


@pytest.mark.parametrize("kind", ["lightning", "accelerate", "trainer"])
@pytest.mark.parametrize(
    ("given_as", "name"),
    [
        ("loss", "loss"),
        ("train_loss", "loss"),
        ("eval_loss", "val_loss"),
        ("learning_rate", "lr"),
        ("accuracy", "accuracy"),
    ],
)
def test_a_librarys_numbers_get_our_names(
    kind: str, given_as: str, name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    run = object.__new__(resume.Run)
    run.attempt = "7.r0"
    written: list[tuple[int, dict[str, object]]] = []
    monkeypatch.setattr(resume.Run, "log", lambda _, step, **values: written.append((step, values)))
    logged_by(kind, run, {given_as: 0.25, "step": 1}, monkeypatch)
    known = {"total_steps": 9} if kind == "trainer" else {}
    assert written == [(4, {name: 0.25, **known})]
