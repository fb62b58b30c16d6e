"""The training: it learns, ranks agree with one rank, and all ranks refuse mistakes at once."""

# pyright: basic, reportPrivateImportUsage=false
import argparse
import dataclasses
import gzip
import json
import pathlib
import re
import shutil
import types
import typing

import conftest
import pytest
import ranks
import torch
import yaml

from ddp.run import metrics
from ddptrain import inspection, model, shapes
from ddptrain.checkpoint import stored
from ddptrain.ground import errors, files, log
from ddptrain.options import config
from ddptrain.world import distributed, stragglers

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

TINY = (
    "--layers 2 --heads 2 --width 32 --seq-len 32 --batch 4 --epoch-steps 5 --precision fp32 --eval-rows "
    "16 --log-every 1"
).split()


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Real text: Python's own source code."""
    output = tmp_path_factory.mktemp("stdlib") / "stdlib"
    ranks.succeed(
        1, "prepare --source python-stdlib --output", output, "--tokenizer byte --workers 1"
    )
    return output


@pytest.fixture(scope="module")
def learned(
    stdlib: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, ranks.Result]:
    run_dir = tmp_path_factory.mktemp("learned") / "run"
    more = (
        "--steps 60 --epoch-steps 30 --seq-len 64 --batch 8 --precision fp32 --eval-rows 64 --report-json",
        run_dir / "report.json",
    )
    result = ranks.trained(
        2, stdlib, run_dir, *more, RUN_ATTEMPT_ID="5.r0", STOP_FILE="/nonexistent/stop"
    )
    return run_dir, result


def test_a_folder_without_symbolic_links_costs_one_warning(
    dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir = tmp_path / "run"
    flags = "--model tiny --seq-len 32 --batch 4 --epoch-steps 2 --precision fp32 --eval-rows 8"
    first = ranks.trained(2, dataset, run_dir, flags, "--steps 4", accident="accident_links")
    assert first.output.count("without symbolic links") == 1
    assert "[DONE]" in first.output
    again = ranks.trained(2, dataset, run_dir, flags, "--steps 6", accident="accident_links")
    assert "epoch-0002 step=4" in again.output
    assert not (run_dir / "latest").exists()


def test_the_loss_falls_on_real_text_below_3_within_60_steps(
    learned: tuple[pathlib.Path, ranks.Result],
):
    """Random bytes are 5.55 nats; 60 steps of 1024 tokens get below 3.0, held-out below 3.3."""
    losses = conftest.losses(learned[0])
    assert list(losses) == list(range(1, 61))
    assert losses[1] > 5.3
    assert sum(losses[step] for step in range(51, 61)) / 10 < 3.0
    evals = [
        json.loads(line)
        for line in (learned[0] / "metrics.jsonl").read_text().splitlines()
        if '"eval"' in line
    ]
    assert [record["step"] for record in evals] == [30, 60]
    assert evals[1]["val_loss"] < evals[0]["val_loss"]
    assert evals[1]["val_loss"] < 3.3
    assert evals[1]["perplexity"] == pytest.approx(2.718281828 ** evals[1]["val_loss"])


def test_the_default_schedule_has_no_spike(learned: tuple[pathlib.Path, ranks.Result]):
    """With a warm-up of a few steps the gradient's norm is above 20 at its worst."""
    lines = map(json.loads, (learned[0] / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    assert max(step["grad_norm"] for step in steps) < 10
    losses = [step["loss"] for step in steps]
    assert all(
        loss < sum(losses[at - 5 : at]) / 5 + 0.8 for at, loss in enumerate(losses) if at >= 5
    )


def test_a_run_leaves_what_people_and_the_batch_script_look_for(
    learned: tuple[pathlib.Path, ranks.Result],
):
    run_dir, result = learned
    summary = json.loads((run_dir / "summary.json").read_text())
    about = {
        "workload": "gpt",
        "state": "done",
        "world_size": 2,
        "nodes": 1,
        "steps": 60,
        "tokens": 60 * 1024,
    }
    assert summary == summary | about
    assert [(r["rank"], r["device"]) for r in summary["ranks"]] == [(0, "cpu"), (1, "cpu")]
    assert summary["first_loss"] > summary["last_loss"] > 0
    assert summary["best_loss"] == summary["val_loss"]
    assert summary["tokens_per_second"] > 0
    assert pathlib.Path(summary["checkpoint"]) == run_dir / "epoch-0002"
    assert pathlib.Path(summary["loss_png"]).read_bytes().startswith(b"\x89PNG")
    assert conftest.outcome(run_dir, "5.r0")["outcome"] == "done"
    assert json.loads((run_dir / "report.json").read_text())["world_size"] == 2
    assert json.loads((run_dir / "config.json").read_text())["steps"] == 60
    assert (
        (run_dir / "latest").readlink().name == (run_dir / "best").readlink().name == "epoch-0002"
    )
    for marker, count in {
        "DDP": 1,
        "RANK": 2,
        "DATA": 1,
        "MODEL": 1,
        "EPOCH": 2,
        "RESULT": 1,
        "DONE": 1,
    }.items():
        assert len(result.marked(marker)) == count, marker
    assert len(result.marked("TRAIN")) == 1 + 1 + 6  # the plan, step 1, every tenth
    assert all(len(line) < 1024 for line in result.output.splitlines())
    assert not list(run_dir.glob("*.tmp*"))


def test_a_finished_run_is_left_alone_when_started_again(
    learned: tuple[pathlib.Path, ranks.Result], stdlib: pathlib.Path
):
    run_dir = learned[0]
    before = (run_dir / "metrics.jsonl").read_text()
    result = ranks.trained(1, stdlib, run_dir, "--steps 60 --epoch-steps 30 --batch 8 --seq-len 64")
    *records, start = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "".join(records) == before
    assert (json.loads(start)["kind"], json.loads(start)["step"]) == ("start", 60)
    assert result.marked("DONE")[0]["steps"] == "60"


def test_inspect_shows_a_run_and_a_checkpoint_and_finds_damage(
    learned: tuple[pathlib.Path, ranks.Result],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
):
    run_dir = tmp_path / "run"
    shutil.copytree(learned[0], run_dir, symlinks=True)
    shown = ranks.succeed(1, "inspect", run_dir).output
    assert "verified: whole" in shown
    facts = json.loads(ranks.succeed(1, "inspect", run_dir / "latest", "--json").output)
    assert (facts["checkpoints"]["latest"]["step"], facts["damage"]) == (60, [])
    path = run_dir / "epoch-0001" / "dcp" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-9] + b"corrupted")
    log.setup(rank=0)
    assert inspection.run(argparse.Namespace(path=run_dir, json=True)) == 1
    out, err = capsys.readouterr()
    assert [str(path) in text for text in json.loads(out)["damage"]] == [True]
    assert f"[FATAL] {path}" in err
    assert ranks.run(1, "inspect", tmp_path).codes == [2]


@pytest.fixture(scope="module")
def short(dataset: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run of five steps on one rank."""
    run_dir = tmp_path_factory.mktemp("short") / "run"
    ranks.trained(1, dataset, run_dir, *TINY, "--steps 5")
    return run_dir


@pytest.mark.parametrize(
    ("flags", "words"), CASES["impossible_trainings_are_one_line_and_all_ranks_leave"]
)
def test_impossible_trainings_are_one_line_and_all_ranks_leave(
    dataset: pathlib.Path, short: pathlib.Path, tmp_path: pathlib.Path, flags: list[str], words: str
):
    flags = [flag.format(short=short) for flag in flags]
    result = ranks.train(2, dataset, tmp_path / "run", *TINY, *flags, RUN_ATTEMPT_ID="3.r0")
    assert result.codes == [2, 2], result.output
    (line,) = result.fatal()
    assert words in line
    assert "Traceback" not in result.output
    if "--frobnicate" not in flags:
        found = conftest.outcome(tmp_path / "run", "3.r0")
        assert (found["outcome"], found["retry"]) == ("failed", False), (
            "the same again would fail again"
        )
        assert words in found["error"]


def test_the_chosen_rank_records_the_chosen_steps(dataset: pathlib.Path, tmp_path: pathlib.Path):
    flags = ["--profile", "--profile-ranks", "1", "--profile-steps", "2-3"]
    result = ranks.trained(2, dataset, tmp_path / "run", *TINY, *flags, RUN_ATTEMPT_ID="3.r0")
    assert [path.name for path in (tmp_path / "run" / "profile").iterdir()] == [
        "3.r0.rank-1.json.gz"
    ]
    with gzip.open(tmp_path / "run" / "profile" / "3.r0.rank-1.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = [event for event in events if str(event.get("name", "")).startswith("Optimizer.step#")]
    assert len(steps) == 2
    assert "[PROFILE] steps=2-3 trace=" in result.output


@pytest.mark.parametrize(
    ("source", "tokenizer", "words"),
    [
        ("", "gpt2", "another model (vocab 320 there, 50304 here)"),
        ("00.txt", "byte", "with other contents than --data"),
    ],
)
def test_another_dataset_is_refused(
    short: pathlib.Path,
    text_dir: pathlib.Path,
    tmp_path: pathlib.Path,
    source: str,
    tokenizer: str,
    words: str,
):
    flags = ("--tokenizer", tokenizer, "--workers 1")
    ranks.succeed(1, "prepare --source", text_dir / source, "--output", tmp_path / "d", *flags)
    result = ranks.train(1, tmp_path / "d", short, *TINY, "--steps 9")
    assert result.codes == [2]
    assert words in result.fatal()[0]


def test_a_batch_that_the_ranks_do_not_divide(short: pathlib.Path, dataset: pathlib.Path):
    result = ranks.train(3, dataset, short, *TINY, "--steps 9")
    assert result.codes == [2, 2, 2]
    assert (
        "batch of 4 sequences is not divisible by 3 ranks; use one of 1, 2, 4 ranks"
        in result.fatal()[0]
    )


@pytest.mark.parametrize(("what", "rank", "words"), CASES["when_one_rank_fails_all_leave"])
def test_when_one_rank_fails_all_leave(
    dataset: pathlib.Path, tmp_path: pathlib.Path, what: str, rank: int, words: str
):
    """No launcher is there to end the others."""
    accident = f"accident_step DO={what} OF={rank}"
    result = ranks.train(
        2, dataset, tmp_path / "run", *TINY, "--steps 500", accident=accident, RUN_ATTEMPT_ID="3.r0"
    )
    assert all(result.codes)
    assert any(words in line for line in result.fatal())
    assert conftest.outcome(tmp_path / "run", "3.r0")["outcome"] == "failed"
    assert (
        words in conftest.outcome(tmp_path / "run", "3.r0")["error"]
    )  # the cause, not the other rank's follow-up error
    assert len(result.fatal()) == 1


def test_a_finished_run_stays_finished_when_it_is_asked_for_what_cannot_be(
    short: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    """Nothing was done since, so the result stands; a failure behind further steps is the run's."""
    run_dir = tmp_path / "run"
    shutil.copytree(short, run_dir, symlinks=True)
    before = (run_dir / "summary.json").read_bytes()
    again = ("train", "--data", dataset, "--run-dir", run_dir, *TINY, "--steps", 9)
    assert ranks.run(1, *again, "--layers 3").codes == [2]
    assert (run_dir / "summary.json").read_bytes() == before
    failed = ranks.run(
        1, *again, "--lr 1e12 --warmup 0 --clip 0 --save-minutes 0", RUN_ATTEMPT_ID="3.r0"
    )
    assert failed.codes == [2]
    assert not (run_dir / "summary.json").exists()
    assert "lower --lr" in conftest.outcome(run_dir, "3.r0")["error"]


def test_a_rank_that_waits_for_a_stuck_one_says_so_before_it_is_killed(
    dataset: pathlib.Path, tmp_path: pathlib.Path
):
    """As with NCCL, which misses a loss: rank 1 stops, the launcher sends SIGTERM, SIGKILL."""
    accident = "accident_step DO=stuck AT=4 RUN_ATTEMPT_ID=3.r0"
    result = ranks.train(2, dataset, tmp_path / "run", *TINY, "--steps 500", accident=accident)
    assert all(ranks.killed(code) for code in result.codes), result.output
    assert conftest.outcome(tmp_path / "run", "3.r0")["outcome"] == "failed"
    assert "ended from outside" in conftest.outcome(tmp_path / "run", "3.r0")["error"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_other_too(rank: int, dataset: pathlib.Path, tmp_path: pathlib.Path):
    accident = f"accident_step DO=kill AT=4 OF={rank} RUN_ATTEMPT_ID=3.r0"
    result = ranks.train(2, dataset, tmp_path / "run", *TINY, "--steps 500", accident=accident)
    assert ranks.killed(result.codes[rank])
    assert result.codes[1 - rank] not in (0, None)
    found = conftest.outcome(tmp_path / "run", "3.r0")
    assert (found["outcome"], found["retry"]) == ("failed", True)
    assert "a rank was lost" in found["error"]
    assert max(conftest.losses(tmp_path / "run")) == 3


@pytest.mark.parametrize("where", ["gradient", "weights"])
def test_weights_that_are_spoilt_are_never_saved(
    where: str, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    """An epoch's last step: its loss is fine, its weights are not, and a resume would use them."""
    flags = ("--epoch-steps", 2, "--steps", 6)
    accident = f"accident_step DO={where} AT=4"
    result = ranks.train(2, dataset, tmp_path / "run", *TINY, *flags, accident=accident)
    assert result.codes == [2, 2], result.output
    (line,) = result.fatal()
    words = {
        "gradient": "the gradients' norm inf at step 4",
        "weights": "the validation loss is nan at step 4",
    }
    assert words[where] in line
    assert "lower --lr" in line
    assert [path.name for path in stored.candidates(tmp_path / "run")] == ["epoch-0001"]
    ranks.trained(2, dataset, tmp_path / "run", *TINY, *flags)
    assert list(conftest.losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_settings_come_from_flags_then_file_then_device(tmp_path: pathlib.Path):
    path, given = tmp_path / "c.json", {"data": str(tmp_path), "run_dir": "r"}
    path.write_text(
        json.dumps({**given, "lr": 1, "batch": 8, "deterministic": True, "epochs": None})
    )
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    found = config.check(parser.parse_args(["--config", str(path), "--batch", "2"]))
    assert (found.lr, found.batch, found.deterministic, found.data) == (1.0, 2, True, tmp_path)
    whole = config.complete(found, "cpu", {"model": "small", "seed": 7})
    assert (whole.model, whole.seed, whole.batch, whole.seq_len, whole.compile) == (
        "small",
        7,
        2,
        128,
        False,
    )
    assert (
        config.complete(found, "cuda", {}).model,
        config.complete(found, "cuda", {}).seq_len,
    ) == ("gpt2", 1024)
    mistakes = {
        '{"bacth": 3}': "unknown setting 'bacth'",
        '{"batch": "x"}': "batch must be of type int",
        "=": "is not JSON",
    }
    for text, words in mistakes.items():
        path.write_text(text)
        with pytest.raises(errors.UserError, match=words):
            config.check(parser.parse_args(["--config", str(path)]))


def test_every_setting_survives_the_file(tmp_path: pathlib.Path):
    """A value other than the default for each, as far as they can be given together."""
    values: dict[str, object] = {}
    for field in dataclasses.fields(config.Config):
        meta = field.metadata
        if not meta:
            continue
        if "choices" in meta:
            values[field.name] = meta["choices"][-1]
        elif meta["kind"] is bool:
            values[field.name] = field.name == "local_files_only" or not field.default
        elif meta["kind"] in (int, float):
            values[field.name] = (
                meta["kind"](7) if "most" not in meta and "below" not in meta else 0.3
            )
        elif meta["kind"] is pathlib.Path:
            values[field.name] = tmp_path / f"with 'quotes' \"and\" ü {field.name}"
    whole = config.Config(
        **{
            **values,
            "resume": "never",
            "epochs": None,
            "profile_steps": "3-4",
            "profile_ranks": "0,2",
        }
    )
    path = tmp_path / "config.json"
    files.write_json(path, config.as_record(whole))
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    assert config.check(parser.parse_args(["--config", str(path)])) == whole
    files.write_json(
        path, {**config.as_record(whole), "checkpoint_format": "torch"}
    )  # of an older run
    assert config.check(parser.parse_args(["--config", str(path)])) == whole


def test_models_have_their_published_sizes():
    """GPT-2's 124 M without biases, as here; 6 N + 12 L H D T as in the PaLM paper."""
    sizes = {
        "tiny": 0.8,
        "small": 10.7,
        "gpt2": 124.3,
        "gpt2-medium": 354.5,
        "gpt2-large": 773.4,
        "gpt2-xl": 1557.0,
    }
    for name, millions in sizes.items():
        is_small = name in ("tiny", "small")
        shape = shapes.Shape(
            *shapes.SIZES[name], 128 if is_small else 1024, 320 if is_small else 50304
        )
        with torch.device("meta"):
            count = model.num_parameters(model.GPT(shape))
        assert count / 1e6 == pytest.approx(millions, rel=0.06 if name == "tiny" else 0.01), name
        assert count == shapes.count(shape)
        if name == "gpt2":
            assert shapes.flops_per_token(shape, count) / 1e6 == pytest.approx(854.8, rel=0.002)


def test_a_rank_that_holds_the_others_up_is_named(dataset: pathlib.Path, tmp_path: pathlib.Path):
    """All steps take as long on each rank; what rank 1 waits for data is its own."""
    slow = {"accident": "accident_step DO=slow"}
    result = ranks.trained(
        2, dataset, tmp_path / "run", *TINY, "--steps 40 --epoch-steps 40", **slow
    )
    assert set(re.findall(r"rank (\d) on \S+ is slow", result.output)) == {"1"}
    assert (
        metrics.Reader(tmp_path / "run" / "metrics.jsonl").read().straggler.startswith("rank 1 on ")
    )


def test_a_slow_rank_is_named_once_while_it_stays_slow(caplog: pytest.LogCaptureFixture):
    members = [{"host": f"n{rank}"} for rank in range(3)]
    world = types.SimpleNamespace(size=3, is_main=True, members=members)
    pace = stragglers.Pace(typing.cast("distributed.World", world))
    for seconds in ([1, 1, 3], [1, 1, 3], [1, 1, 1], [1, 1, 3]):
        pace.add(seconds, stragglers.WINDOW_S)
    named = [record.getMessage() for record in caplog.records]
    assert [text.count("rank 2 on n2 is slow") for text in named] == [1, 1]


@pytest.mark.parametrize(
    ("seconds", "times"),
    [([1, 1, 1, 1.4], 1.4), ([1, 1, 1, 1.6], 1.6), ([1, 3], 3.0), ([0, 0], None), ([5], None)],
)
def test_the_slowest_rank_is_compared_with_the_median(seconds: list[float], times: float | None):
    members = [{"host": f"n{rank}"} for rank in range(len(seconds))]
    world = types.SimpleNamespace(size=len(seconds), is_main=True, members=members)
    measured = stragglers.Pace(typing.cast("distributed.World", world))
    measured.add(seconds, stragglers.WINDOW_S - 1)
    assert measured.slowest == {}
    measured.add(seconds, 1)
    rank = len(seconds) - 1
    assert measured.slowest == ({"rank": rank, "host": f"n{rank}", "times": times} if times else {})
    read = metrics.Metrics()
    read.add({"kind": "step", "step": 1, "slowest": measured.slowest})
    assert bool(read.straggler) == bool(times and times > stragglers.TOO_SLOW)


def test_a_rank_that_hangs_is_found_by_the_timeout(dataset: pathlib.Path, tmp_path: pathlib.Path):
    """Rank 1 sleeps; rank 0 tells it, and then both leave."""
    hang = {"accident": "accident_step DO=hang AT=3", "RUN_ATTEMPT_ID": "3.r0"}
    result = ranks.train(
        2, dataset, tmp_path / "run", *TINY, "--steps 9 --timeout-minutes 0.1", **hang
    )
    assert all(result.codes), result.output
    (line,) = result.fatal()
    assert "a rank did not answer within --timeout-minutes 0.1: it hangs or is far behind" in line
    assert conftest.outcome(tmp_path / "run", "3.r0")["retry"] is True
