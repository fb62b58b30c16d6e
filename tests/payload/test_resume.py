"""A resumed training is the same training."""

# pyright: basic, reportPrivateImportUsage=false
import json
import pathlib

import conftest
import pytest
import ranks

from ddptrain import checkpoint

TINY = (
    "--layers", 2, "--heads", 2, "--width", 32, "--seq-len", 32, "--batch", 4, "--epoch-steps", 5, "--warmup", 3, "--precision", "fp32",
    "--eval-rows", 16, "--log-every", 1, "--dropout", 0.1, "--deterministic",
)  # fmt: skip


def arguments(data: pathlib.Path, run_dir: pathlib.Path, *more: object) -> tuple[object, ...]:
    return ("train", "--data", data, "--run-dir", run_dir, *TINY, "--steps", 20, *more)


def ending(run_dir: pathlib.Path) -> dict:
    return json.loads((run_dir / "epoch-0004" / "manifest.json").read_text())


@pytest.fixture(scope="module")
def whole(dataset: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """20 steps on two ranks without a break."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    ranks.succeed(2, *arguments(dataset, run_dir))
    return run_dir


@pytest.mark.parametrize("rank", [0, 1])
def test_twenty_steps_equal_ten_a_kill_and_ten_bit_for_bit(
    rank: int, whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir = tmp_path / "run"
    died = ranks.run(2, *arguments(dataset, run_dir), accident="accident_kill", DIE_AT="13", DIE_RANK=str(rank))
    assert died.returncode != 0

    result = ranks.succeed(2, *arguments(dataset, run_dir))

    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert (resumed["step"], resumed["exact"]) == ("10", "yes")
    assert conftest.losses(run_dir) == conftest.losses(whole)
    assert conftest.val_losses(run_dir) == conftest.val_losses(whole)
    assert ending(run_dir)["files"] == ending(whole)["files"]  # weights, moments, random states: sizes and CRC-32s


def test_asked_to_stop_it_saves_and_the_rest_is_the_same_bit_for_bit(
    whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir, stop = tmp_path / "run", tmp_path / "stop"
    stop.touch()
    attempt = {"STOP_FILE": str(stop), "RUN_ATTEMPT_ID": "7.r0"}
    ranks.succeed(2, *arguments(dataset, run_dir), **attempt)
    outcome = json.loads((run_dir / "control" / "7.r0.outcome").read_text())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert outcome["outcome"] == summary["state"] == "preempted"
    assert 0 < outcome["step"] < 20
    assert pathlib.Path(outcome["checkpoint"]).name == f"epoch-0001-step-{outcome['step']:06d}"

    stop.unlink()
    ranks.succeed(2, *arguments(dataset, run_dir), **{**attempt, "RUN_ATTEMPT_ID": "7.r1"})

    assert json.loads((run_dir / "control" / "7.r1.outcome").read_text())["outcome"] == "done"
    assert conftest.losses(run_dir) == conftest.losses(whole)
    assert ending(run_dir)["files"] == ending(whole)["files"]


def test_torchrun_starts_the_ranks_again_and_they_go_on_bit_for_bit(
    whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    """`--max-restarts` of the real launcher: the second attempt meets anew and resumes."""
    run_dir = tmp_path / "run"
    result = conftest.torchrun(
        2, *arguments(dataset, run_dir), flags=("--max-restarts=1",), accident="accident_once", RUN_ATTEMPT_ID="9.r0"
    )
    assert result.returncode == 0, result.output
    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert (resumed["step"], resumed["exact"]) == ("10", "yes")
    assert json.loads((run_dir / "control" / "9.r0.outcome").read_text())["outcome"] == "done"
    assert json.loads((run_dir / "summary.json").read_text())["state"] == "done"
    assert conftest.losses(run_dir) == conftest.losses(whole)
    assert ending(run_dir)["files"] == ending(whole)["files"]


def test_a_signal_to_any_rank_stops_all(dataset: pathlib.Path, tmp_path: pathlib.Path):
    run_dir = tmp_path / "run"
    result = ranks.succeed(
        2, *arguments(dataset, run_dir), "--steps", 5000, accident="accident_signal", SIGNAL_AT="8", SIGNAL_RANK="1", RUN_ATTEMPT_ID="8.r0"
    )  # fmt: skip
    assert "[PREEMPT]" in result.output
    outcome = json.loads((run_dir / "control" / "8.r0.outcome").read_text())
    assert outcome["outcome"] == "preempted"
    assert 8 <= outcome["step"] < 5000


def test_on_another_number_of_ranks_it_goes_on_with_the_same_samples(
    whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    """Two ranks, then one: sums are taken in another order, so the losses agree closely, not to the bit. No dropout."""
    plain = [a for a in arguments(dataset, tmp_path / "run") if a not in ("--dropout", 0.1)]
    reference = [a for a in arguments(dataset, tmp_path / "reference") if a not in ("--dropout", 0.1)]
    ranks.succeed(2, *reference)
    ranks.run(2, *plain, accident="accident_kill", DIE_AT="13", DIE_RANK="1")

    result = ranks.succeed(1, *plain)

    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert (resumed["saved_by_ranks"], resumed["ranks"], resumed["exact"]) == ("2", "1", "no")
    train = next(line for line in result.marked("TRAIN") if "global_batch" in line)
    assert (train["global_batch"], train["micro_batch"], train["grad_accum"]) == ("8", "4", "2")
    for kind in (conftest.losses, conftest.val_losses):
        found, wanted = kind(tmp_path / "run"), kind(tmp_path / "reference")
        assert found.keys() == wanted.keys()
        assert all(abs(found[step] - wanted[step]) < 2e-4 for step in wanted)


def test_dcp_checkpoints_resume_too(dataset: pathlib.Path, tmp_path: pathlib.Path):
    dcp = ("--checkpoint-format", "dcp", "--dropout", 0.0)
    ranks.succeed(2, *arguments(dataset, tmp_path / "whole"), *dcp)
    ranks.run(2, *arguments(dataset, tmp_path / "run"), *dcp, accident="accident_kill", DIE_AT="13", DIE_RANK="1")
    ranks.succeed(2, *arguments(dataset, tmp_path / "run"), *dcp)
    assert conftest.losses(tmp_path / "run") == conftest.losses(tmp_path / "whole")
    assert ranks.succeed(1, "inspect", tmp_path / "run").output.count("whole=True") == 2
    path = next((tmp_path / "run" / "latest" / "dcp").resolve().glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-9] + b"corrupted")
    with pytest.raises(checkpoint.CheckpointError, match=f"{path} is corrupted"):
        checkpoint.verify(path.parents[1])
