"""A resumed training is the same training."""

# pyright: basic, reportPrivateImportUsage=false
import itertools
import json
import pathlib
import platform

import conftest
import pytest
import ranks
import torch

from ddptrain.checkpoint import stored

TINY = (
    "--layers 2 --heads 2 --width 32 --seq-len 32 --batch 4 --epoch-steps 5 --warmup 3 --precision fp32 "
    "--eval-rows 16 --log-every 1 --dropout 0.1 --deterministic"
).split()
KILLED = "accident_step DO=kill AT=13"


def arguments(data: pathlib.Path, run_dir: pathlib.Path, *more: object) -> tuple[object, ...]:
    return ("train", "--data", data, "--run-dir", run_dir, *TINY, "--steps", 20, *more)


def ending(run_dir: pathlib.Path) -> list[dict]:
    """Return names, sizes and CRC-32s of weights and moments of the last checkpoint."""
    found = stored.verify(run_dir / "epoch-0004")
    assert found.step == 20
    listed = json.loads((found.path / "manifest.json").read_text())["files"]
    return [
        entry for entry in listed if entry["file"] != "dcp/.metadata"
    ]  # torch writes the folder's path into it


@pytest.fixture(scope="module")
def whole(dataset: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """20 steps on two ranks without a break."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    ranks.succeed(2, *arguments(dataset, run_dir))
    return run_dir


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_twenty_steps_equal_ten_a_kill_and_ten_bit_for_bit(
    rank: int, whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir = tmp_path / "run"
    died = ranks.run(
        2, *arguments(dataset, run_dir), accident=f"accident_step DO=kill AT=13 OF={rank}"
    )
    assert died.returncode != 0
    path = run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "step": 13, "lo')
    assert '"step": 12' in path.read_text()

    result = ranks.succeed(2, *arguments(dataset, run_dir), RUN_ATTEMPT_ID="7.r1")

    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert (resumed["step"], resumed["exact"]) == ("10", "yes")
    assert conftest.losses(run_dir) == conftest.losses(whole)
    assert conftest.val_losses(run_dir) == conftest.val_losses(whole)
    assert ending(run_dir) == ending(whole)
    # The lines of steps 11 and 12 and the truncated one were removed, both starts' lines are there.
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, 21))
    assert [r["tokens"] for r in records if r["kind"] == "step"] == [
        step * 8 * 32 for step in range(1, 21)
    ]
    assert {r["total_steps"] for r in records if r["kind"] in ("start", "step")} == {20}
    assert [r["step"] for r in records if r["kind"] == "eval"] == [5, 10, 15, 20]
    saved = [(r["step"], r["name"]) for r in records if r["kind"] == "checkpoint"]
    assert saved == [(5 * n, f"epoch-000{n}") for n in (1, 2, 3, 4)]
    assert all(0 <= r["stall_s"] <= r["seconds"] for r in records if r["kind"] == "checkpoint")
    first, second = (r for r in records if r["kind"] == "start")
    assert (first["step"], second["step"], second["attempt"]) == (0, 10, "7.r1")
    assert "attempt" not in first, "there was no name for it"
    about = {"world_size": 2, "nodes": 1, "device": "cpu", "backend": "gloo"}
    about |= {"cuda": torch.version.cuda, "torch": torch.__version__}
    assert second == second | about | {"python": platform.python_version()}
    assert all(a["time"] <= b["time"] for a, b in itertools.pairwise(records))


def test_a_checkpoint_outlives_no_record_of_its_steps(
    whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir = tmp_path / "run"
    died = ranks.run(2, *arguments(dataset, run_dir), accident="accident_step DO=power AT=13 OF=0")
    assert died.returncode != 0
    assert set(range(1, 11)) <= set(conftest.losses(run_dir))

    result = ranks.succeed(2, *arguments(dataset, run_dir), RUN_ATTEMPT_ID="7.r1")

    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert resumed["step"] == "10"
    assert conftest.losses(run_dir) == conftest.losses(whole)
    assert conftest.val_losses(run_dir) == conftest.val_losses(whole)


def test_asked_to_stop_it_saves_and_the_rest_is_the_same_bit_for_bit(
    whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run_dir, stop = tmp_path / "run", tmp_path / "stop"
    stop.touch()
    attempt = {"STOP_FILE": str(stop), "RUN_ATTEMPT_ID": "7.r0"}
    ranks.succeed(2, *arguments(dataset, run_dir), **attempt)
    outcome = conftest.outcome(run_dir, "7.r0")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert outcome["outcome"] == summary["state"] == "preempted"
    assert 0 < outcome["step"] < 20
    assert pathlib.Path(outcome["checkpoint"]).name == f"epoch-0001-step-{outcome['step']:06d}"

    stop.unlink()
    ranks.succeed(2, *arguments(dataset, run_dir), **{**attempt, "RUN_ATTEMPT_ID": "7.r1"})

    assert conftest.outcome(run_dir, "7.r1")["outcome"] == "done"
    assert conftest.losses(run_dir) == conftest.losses(whole)
    assert ending(run_dir) == ending(whole)


@pytest.mark.long
def test_torchrun_starts_the_ranks_again_and_they_go_on_bit_for_bit(
    whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    """`--max-restarts` of the real launcher: the second attempt meets again and resumes."""
    run_dir = tmp_path / "run"
    result = conftest.torchrun(
        2,
        *arguments(dataset, run_dir),
        flags=("--max-restarts=1",),
        accident=KILLED,
        RUN_ATTEMPT_ID="9.r0",
    )
    assert result.returncode == 0, result.output
    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert (resumed["step"], resumed["exact"]) == ("10", "yes")
    assert conftest.outcome(run_dir, "9.r0")["outcome"] == "done"
    assert json.loads((run_dir / "summary.json").read_text())["state"] == "done"
    assert conftest.losses(run_dir) == conftest.losses(whole)
    assert ending(run_dir) == ending(whole)


def test_a_signal_to_any_rank_stops_all(dataset: pathlib.Path, tmp_path: pathlib.Path):
    run_dir = tmp_path / "run"
    accident = "accident_step DO=kill BY=SIGUSR1 AT=8 RUN_ATTEMPT_ID=8.r0"
    result = ranks.succeed(2, *arguments(dataset, run_dir), "--steps 5000", accident=accident)
    assert "[PREEMPT]" in result.output
    outcome = conftest.outcome(run_dir, "8.r0")
    assert outcome["outcome"] == "preempted"
    assert 8 <= outcome["step"] < 5000


def test_on_another_number_of_ranks_it_goes_on_with_the_same_samples(
    whole: pathlib.Path, dataset: pathlib.Path, tmp_path: pathlib.Path
):
    """Two ranks, then one: sums in another order, so losses agree closely. No dropout."""
    plain = arguments(dataset, tmp_path / "run", "--dropout 0")
    ranks.succeed(2, *arguments(dataset, tmp_path / "reference", "--dropout 0"))
    ranks.run(2, *plain, accident=KILLED)

    result = ranks.succeed(1, *plain)

    resumed = next(line for line in result.marked("CKPT") if "resumed" in line)
    assert (resumed["saved_by_ranks"], resumed["ranks"], resumed["exact"]) == ("2", "1", "no")
    train = next(line for line in result.marked("TRAIN") if "global_batch" in line)
    assert (train["global_batch"], train["micro_batch"], train["grad_accum"]) == ("8", "4", "2")
    for kind in (conftest.losses, conftest.val_losses):
        found, wanted = kind(tmp_path / "run"), kind(tmp_path / "reference")
        assert found.keys() == wanted.keys()
        assert all(abs(found[step] - wanted[step]) < 2e-4 for step in wanted)
