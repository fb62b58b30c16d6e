"""Checkpoints: whole or absent, found when damaged, and never in the way of the training."""

import os
import pathlib
import random
import resource
import shutil
import signal
import time

import pytest
import ranks
import savers
import torch

from ddptrain import checkpoint, errors, files


def save(run_dir: pathlib.Path, *steps: int, keep: int = 5, best: tuple[int, ...] = ()) -> None:
    saver = checkpoint.Saver(run_dir, keep=keep, attempt="test")
    for step in steps:
        name = checkpoint.name_of(step, step, ends_epoch=True)
        rngs = [checkpoint.random_states()] * 2
        saver.save(
            name, savers.state(step), {"moments": savers.state(step)}, savers.meta(step), rngs, is_best=step in best
        )
        saver.wait()
    saver.close()


def names(run_dir: pathlib.Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def test_a_save_is_a_folder_with_a_manifest_and_two_links(tmp_path: pathlib.Path):
    save(tmp_path, 1, 2, best=(1,))
    assert names(tmp_path) == ["best", "epoch-0001", "epoch-0002", "latest"]
    assert (tmp_path / "latest").readlink().name == "epoch-0002"
    assert (tmp_path / "best").readlink().name == "epoch-0001"
    listed = {entry["file"] for entry in files.read_json(tmp_path / "latest" / "manifest.json")["files"]}
    assert listed == {"rank-0000/model.pt", "rank-0000/optimizer.pt", "rank-0000/rng.pt", "rank-0001/rng.pt"}
    found = checkpoint.verify(tmp_path / "epoch-0002")
    assert found.step == 2
    assert torch.equal(checkpoint.load(found.path, "model")["weight0"], savers.state(2)["weight0"])
    assert len(checkpoint.load_random_states(found.path, 2)) == 2


def test_sigkill_at_200_random_moments_loses_at_most_the_last_save(tmp_path: pathlib.Path):
    chance = random.Random(20260101)
    acknowledged, amid = 0, 0
    for _ in range(200):
        read, write = os.pipe()
        os.set_inheritable(write, True)
        process = ranks.CONTEXT.Process(target=_inherit_and_save, args=(tmp_path, acknowledged + 1, _Fd(write)))
        process.start()
        os.close(write)
        assert os.read(read, 2) == b"0\n"  # it is ready
        time.sleep(chance.uniform(0.0, 0.06))
        process.kill()
        process.join()
        told = b""
        while more := os.read(read, 65536):
            told += more
        os.close(read)
        assert process.exitcode == -signal.SIGKILL
        acknowledged = max([acknowledged, *(int(line) for line in told.split())])
        amid += any(checkpoint._TMP in name or checkpoint._TRASH in name for name in os.listdir(tmp_path))

        found = checkpoint.choose(tmp_path, "auto")
        assert (found.step if found else 0) >= acknowledged  # what was reported as saved is there
        for path in checkpoint.candidates(tmp_path):
            step = checkpoint.verify(path).step  # nothing half-written under a final name
            assert path.name == f"epoch-{step:04d}"
            for what in ("model", "optimizer"):
                tensors = checkpoint.load(path, what)
                tensors = tensors.get("moments", tensors)
                assert all(torch.equal(tensors[key], value) for key, value in savers.state(step).items())
        acknowledged = max(acknowledged, found.step if found else 0)
    assert acknowledged > 50
    assert amid >= 40, f"only {amid} of 200 kills came in the middle of a save: the test is too tame"


class _Fd:
    """A file descriptor that travels to a process of the fork server."""

    def __init__(self, fd: int) -> None:
        from multiprocessing import reduction

        self._duplicate = reduction.DupFd(fd)

    def take(self) -> int:
        return self._duplicate.detach()


def _inherit_and_save(run_dir: pathlib.Path, first: int, fd: _Fd) -> None:
    savers.save_forever(run_dir, first, fd.take())


@pytest.mark.parametrize("name", ["rank-0000/model.pt", "rank-0000/optimizer.pt", "rank-0001/rng.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_found_and_named_and_the_previous_checkpoint_taken(tmp_path: pathlib.Path, name: str, damage: str):
    save(tmp_path, 1, 2)
    path = tmp_path / "epoch-0002" / name
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()

    with pytest.raises(
        checkpoint.CheckpointError, match=str(path.parent if (name, damage) == ("manifest.json", "remove") else path)
    ):
        checkpoint.verify(tmp_path / "epoch-0002")
    found = checkpoint.choose(tmp_path, "auto")
    assert found is not None
    assert found.step == 1
    with pytest.raises(checkpoint.CheckpointError, match="epoch-0002"):
        checkpoint.choose(tmp_path, str(tmp_path / "epoch-0002"))  # asked for by name, it is not replaced by another


def test_when_none_is_whole_it_says_so_instead_of_starting_over(tmp_path: pathlib.Path):
    save(tmp_path, 1)
    (tmp_path / "epoch-0001" / "rank-0000" / "model.pt").unlink()
    with pytest.raises(
        checkpoint.CheckpointError, match="no checkpoint .* is whole .*model.pt is missing.*--resume never"
    ):
        checkpoint.choose(tmp_path, "auto")
    assert checkpoint.choose(tmp_path, "never") is None


def test_without_checkpoints_auto_starts_anew_and_a_wrong_path_is_an_error(tmp_path: pathlib.Path):
    assert checkpoint.choose(tmp_path, "auto") is None
    with pytest.raises(errors.UserError, match="no such folder"):
        checkpoint.choose(tmp_path, str(tmp_path / "elsewhere"))


def test_the_link_latest_is_a_hint_only(tmp_path: pathlib.Path):
    save(tmp_path, 1, 2, 3)
    (tmp_path / "latest").unlink()
    assert checkpoint.choose(tmp_path, "auto").step == 3
    (tmp_path / "latest").symlink_to("epoch-0099")
    assert checkpoint.choose(tmp_path, "auto").step == 3


def test_it_keeps_the_last_ones_and_the_best(tmp_path: pathlib.Path):
    save(tmp_path, 1, 2, 3, 4, 5, keep=2, best=(2,))
    assert names(tmp_path) == ["best", "epoch-0002", "epoch-0004", "epoch-0005", "latest"]
    with pytest.raises(errors.UserError, match="--keep-checkpoints 1: must be at least 2"):
        checkpoint.Saver(tmp_path, keep=1, attempt="test")


def test_the_same_step_again_replaces_it_whole(tmp_path: pathlib.Path):
    save(tmp_path, 1, 2)
    (tmp_path / "epoch-0002" / "stray").touch()
    save(tmp_path, 2)
    assert names(tmp_path) == ["epoch-0001", "epoch-0002", "latest"]
    assert not (tmp_path / "epoch-0002" / "stray").exists()


def test_leftovers_of_a_killed_attempt_go_away(tmp_path: pathlib.Path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "epoch-0001", tmp_path / "epoch-0002.tmp-4.r0")
    shutil.copytree(tmp_path / "epoch-0001", tmp_path / "epoch-0000.trash-ab")
    assert checkpoint.choose(tmp_path, "auto").path.name == "epoch-0001"
    save(tmp_path, 3)
    assert names(tmp_path) == ["epoch-0001", "epoch-0003", "latest"]


def test_the_copy_is_of_the_moment_of_the_call(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Training goes on while the thread writes: with two buffers, two saves may be under way; the third waits."""
    slow = checkpoint.Saver._write

    def write(self: checkpoint.Saver, job: object) -> None:
        time.sleep(0.2)
        slow(self, job)

    monkeypatch.setattr(checkpoint.Saver, "_write", write)
    saver = checkpoint.Saver(tmp_path, keep=5, attempt="test")
    weights = savers.state(0)
    for step in (1, 2, 3):
        for tensor in weights.values():
            tensor.fill_(step)
        saver.save(f"epoch-{step:04d}", weights, {"moments": {}}, savers.meta(step), [])
    for tensor in weights.values():
        tensor.fill_(99.0)
    saver.wait()
    saver.close()
    assert saver.stall_s[0] < 0.1
    assert saver.stall_s[1] < 0.1
    assert saver.stall_s[2] > 0.1
    for step in (1, 2, 3):
        assert torch.equal(
            checkpoint.load(tmp_path / f"epoch-{step:04d}", "model")["weight1"], savers.state(step)["weight1"]
        )


def _full_disk(run_dir: pathlib.Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    saver = checkpoint.Saver(run_dir, keep=2, attempt="test")
    saver.save("epoch-0009", savers.state(9), {"moments": {}}, savers.meta(9), [])
    try:
        saver.wait()
    except checkpoint.CheckpointError as e:
        os._exit(42 if "File too large" in str(e) and "make room" in str(e) else 1)
    os._exit(0)


def test_a_write_that_fails_is_raised_and_leaves_nothing(tmp_path: pathlib.Path):
    save(tmp_path, 1)
    process = ranks.CONTEXT.Process(target=_full_disk, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 42
    assert names(tmp_path) == ["epoch-0001", "latest"]


def test_random_states_come_back():
    import random as python_random

    import numpy as np

    before = checkpoint.random_states()
    drawn = (python_random.random(), np.random.random(), torch.rand(3).tolist())
    checkpoint.restore_random_states(before)
    assert (python_random.random(), np.random.random(), torch.rand(3).tolist()) == drawn
