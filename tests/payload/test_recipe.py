"""A run keeps its recorded settings: missing flags keep them, different ones are named and kept."""

# pyright: basic, reportPrivateImportUsage=false
import argparse
import json
import pathlib
import typing

import conftest
import pytest
import ranks
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.options import command_line, config, flags, recipe

TINY = (
    "--layers 1 --heads 2 --width 32 --seq-len 32 --batch 4 --epoch-steps 5 --precision fp32 --eval-rows 16 "
    "--log-every 1 --steps 20 --lr 0.01 --dropout 0.1"
)


def killed(dataset: pathlib.Path, run_dir: pathlib.Path, *args: object, at: int) -> ranks.Result:
    """Run a training that is killed in this step."""
    result = ranks.train(1, dataset, run_dir, *args, accident=f"accident_step DO=kill OF=0 AT={at}")
    assert result.returncode != 0, result.output
    return result


def resumed(result: ranks.Result) -> dict[str, str]:
    return next(line for line in result.marked("CKPT") if "resumed" in line)


def record(run_dir: pathlib.Path) -> dict[str, typing.Any]:
    return json.loads((run_dir / "config.json").read_text())


@pytest.fixture(scope="module")
def whole(dataset: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """20 steps without a break."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    ranks.trained(1, dataset, run_dir, TINY)
    return run_dir


def test_a_setting_that_is_not_given_comes_from_the_run(
    whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    killed(dataset, tmp_path / "run", TINY, at=13)
    result = ranks.trained(1, dataset, tmp_path / "run")
    assert resumed(result)["exact"] == "yes"
    assert conftest.losses(tmp_path / "run") == conftest.losses(whole)
    assert record(tmp_path / "run") == record(whole) | {"run_dir": str(tmp_path / "run")}


def test_a_run_without_a_checkpoint_begins_again_with_its_own_settings(
    whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    killed(dataset, tmp_path / "run", TINY, at=3)
    ranks.trained(1, dataset, tmp_path / "run")
    assert conftest.losses(tmp_path / "run") == conftest.losses(whole)
    killed(dataset, tmp_path / "new", TINY, at=3)
    ranks.trained(
        1,
        dataset,
        tmp_path / "new",
        "--resume never --steps 2 --eval-rows 0 --seq-len 32 --batch 4",
    )
    assert record(tmp_path / "new")["lr"] == 0.002, "whoever starts over has today's defaults"


def test_a_setting_that_is_given_holds_from_there_on_and_stays_in_the_record(
    dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir = tmp_path / "run"
    killed(dataset, run_dir, TINY, at=13)
    kept = {"setting": "lr", "before": 0.01, "after": 0.001, "step": 10}

    result = killed(dataset, run_dir, "--lr 0.001 --batch 4", at=12)  # before its first checkpoint
    assert "[CKPT] lr 0.01 -> 0.001 from step 10" in result.output
    assert resumed(result)["exact"] == "no"
    assert resumed(result)["why"] == '"lr 0.01 -> 0.001 from step 10"'
    assert (record(run_dir)["lr"], record(run_dir)["changes"]) == (0.001, [kept])

    result = killed(
        dataset, run_dir, at=17
    )  # the change is the run's own, though no checkpoint has it yet
    assert resumed(result) | {"step": "10", "exact": "no"} == resumed(result)
    assert record(run_dir)["changes"] == [kept]

    result = ranks.trained(1, dataset, run_dir)
    assert resumed(result) | {"step": "15", "exact": "yes"} == resumed(result)
    assert "->" not in result.output
    assert record(run_dir)["changes"] == [kept]
    rates = conftest.figures(run_dir, "lr")
    assert rates[10] == pytest.approx(0.01 * rates[20] / 0.001, rel=10)
    assert rates[11] < 0.0011 < rates[10]


def test_more_steps_are_named_and_the_warm_up_stays(dataset: pathlib.Path, tmp_path: pathlib.Path):
    run_dir = tmp_path / "run"
    ranks.trained(1, dataset, run_dir, TINY, "--steps 10")
    result = ranks.trained(1, dataset, run_dir, "--epochs 3 --keep-checkpoints 4")
    lines = [
        line for line in result.output.splitlines() if " -> " in line and "resumed" not in line
    ]
    assert [line.split("] ")[1] for line in lines] == [
        "steps 10 -> 15 from step 10",
        "keep-checkpoints 2 -> 4 from step 10",
    ]
    assert resumed(result)["why"] == '"steps 10 -> 15 from step 10"'
    assert record(run_dir) | {"steps": None, "epochs": 3, "warmup": 5} == record(run_dir)


def parse(words: str) -> config.Config:
    parser = flags.Parser()
    config.add_arguments(parser)
    return config.check(parser.parse_args(f"--run-dir run --data data {words}".split()))


VALUES: dict[str, st.SearchStrategy[typing.Any]] = {
    "lr": st.sampled_from([0.1, 0.2, 0.002]),
    "dropout": st.sampled_from([0.0, 0.5]),
    "warmup": st.integers(0, 3),
    "clip": st.sampled_from([0.0, 1.0]),
    "steps": st.integers(1, 3),
    "epochs": st.integers(1, 3),
}
SETTINGS = st.fixed_dictionaries({}, optional=VALUES).filter(
    lambda chosen: not {"steps", "epochs"} <= chosen.keys()
)


@given(before=SETTINGS, typed=SETTINGS)
def test_a_value_is_the_typed_one_or_the_recorded_one_never_a_default(
    before: dict[str, typing.Any], typed: dict[str, typing.Any]
):
    """A typed default is typed, too: `--dropout 0` ends dropout."""
    first = config.complete(
        parse(" ".join(f"--{name}={value}" for name, value in before.items())), "cpu", {}
    )
    recorded = recipe.as_record(first)
    asked = parse(" ".join(f"--{name}={value}" for name, value in typed.items()))
    after = config.complete(asked, "cpu", recipe.settings_of(recorded, is_own=True))
    has_length = not {"steps", "epochs"}.isdisjoint(typed)
    for name in VALUES:
        of_record = None if has_length and name in ("steps", "epochs") else recorded[name]
        assert getattr(after, name) == typed.get(name, of_record)
    for change in recipe.changes(recorded, recipe.as_record(after), 7):
        assert change.setting in typed
        assert (change.before, change.after) == (recorded[change.setting], typed[change.setting])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model_type": "gpt2"}', '{"run_dir": "r", "lr": "x", "changes": 7}']
)
def test_a_record_that_cannot_be_read_gives_nothing(text: str, tmp_path: pathlib.Path):
    (tmp_path / "config.json").write_text(text)
    found = recipe.read(tmp_path)
    assert recipe.settings_of(found, is_own=True) == {}
    assert recipe.history(found) == []


def test_a_submission_knows_the_changes_before_the_job(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = "--run-dir run --data data --lr 0.001 --epochs 60".split()
    assert command_line.changes(words) == [], "a new run has no record"
    asked = argparse.Namespace(lr=0.003, steps=218)
    before = config.as_record(
        config.Config(run_dir=pathlib.Path("run"), lr=asked.lr, steps=asked.steps, epoch_steps=9)
    )
    (tmp_path / "config.json").write_text(json.dumps(before))
    assert command_line.changes(words) == [
        "steps 218 -> 540 from step 0",
        "lr 0.003 -> 0.001 from step 0",
    ]
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "manifest.json").write_text(
        json.dumps({"meta": {"step": 100, "config": before}})
    )
    assert command_line.changes(words) == [
        "steps 218 -> 540 from step 100",
        "lr 0.003 -> 0.001 from step 100",
    ]
    assert command_line.changes([*words[:4], "--lr", "0.003"]) == []
