"""Checkpoints: whole or absent, found when damaged, and never in the way of the training."""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import errno
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
import typing

import numpy as np
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


def newest(run_dir: pathlib.Path) -> checkpoint.Checkpoint:
    found = checkpoint.choose(run_dir, "auto")
    assert found is not None
    return found


def names(run_dir: pathlib.Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def test_a_save_is_a_folder_with_a_manifest_and_two_links(tmp_path: pathlib.Path):
    save(tmp_path, 1, 2, best=(1,))
    assert names(tmp_path) == ["best", "epoch-0001", "epoch-0002", "latest"]
    assert (tmp_path / "latest").readlink().name == "epoch-0002"
    assert (tmp_path / "best").readlink().name == "epoch-0001"
    listed = {entry["file"] for entry in files.read_json(tmp_path / "latest" / "manifest.json")["files"]}
    assert listed == {"rank-0000/model.pt", "rank-0000/optimizer.pt", "rng.pt"}
    found = checkpoint.verify(tmp_path / "epoch-0002")
    assert found.step == 2
    assert torch.equal(checkpoint.load(found.path, "model")["weight0"], savers.state(2)["weight0"])
    assert len(checkpoint.load_random_states(found.path, 2)) == 2


def test_sigkill_at_200_random_moments_loses_at_most_the_last_save(tmp_path: pathlib.Path):
    """A process of the fork server plays it through: it forks the victims cheaply."""
    report = tmp_path / "report.json"
    memory = pathlib.Path("/dev/shm")  # SIGKILL leaves the page cache alone: a disk would only make the test slow
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        process = ranks.CONTEXT.Process(target=_kill_200_times, args=(pathlib.Path(folder) / "run", report))
        process.start()
        process.join(280)
        process.kill()
        process.join()
    assert process.exitcode == 0
    result = json.loads(report.read_text())
    assert result["kills"] == 200
    assert result["saved"] > 100
    assert result["amid"] >= 40, "too few kills came in the middle of a save: the test is too tame"


def _kill_200_times(run_dir: pathlib.Path, report: pathlib.Path) -> None:
    torch.set_num_threads(1)
    run_dir.mkdir()
    chance = random.Random(20260101)
    began = time.monotonic()
    save(run_dir, 1, 2, 3)
    a_save_s = (time.monotonic() - began) / 3  # on this machine, now
    known, amid, kills = 3, 0, 0
    for _ in range(200):
        read, write = os.pipe()
        victim = os.fork()
        if not victim:
            os.close(read)
            savers.save_forever(run_dir, known + 1, write)
        os.close(write)
        assert os.read(read, 2) == b"0\n"  # it is ready
        printed, saves = b"", chance.choice((0, 1, 1, 2))  # however long they take on a machine with much else to do
        while printed.count(b"\n") < saves:
            more = os.read(read, 4096)
            assert more, "it ended by itself"
            printed += more
        time.sleep(chance.uniform(0.0, a_save_s))
        os.kill(victim, signal.SIGKILL)
        _, status = os.waitpid(victim, 0)
        kills += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        while more := os.read(read, 65536):
            printed += more
        os.close(read)
        known = max([known, *(int(line) for line in printed.split())])
        amid += any(checkpoint._TMP in name or checkpoint._TRASH in name for name in names(run_dir))

        found = checkpoint.choose(run_dir, "auto")
        assert (found.step if found else 0) >= known  # what was reported as saved is there
        for path in checkpoint.candidates(run_dir):
            step = checkpoint.verify(path).step  # nothing half-written under a final name
            assert path.name == f"epoch-{step:04d}"
            for what in ("model", "optimizer"):
                tensors = checkpoint.load(path, what)
                tensors = tensors.get("moments", tensors)
                assert all(torch.equal(tensors[key], value) for key, value in savers.state(step).items())
        known = max(known, found.step if found else 0)
    report.write_text(json.dumps({"kills": kills, "saved": known, "amid": amid}))


def test_everything_is_durable_before_it_gets_its_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """No kill shows it, only a lost power does: what was synced, and what was renamed, in which order."""
    done: list[tuple[str, pathlib.Path]] = []
    sync, rename, replace = os.fsync, pathlib.Path.rename, pathlib.Path.replace

    def synced(fd: int) -> None:
        sync(fd)
        done.append(("sync", pathlib.Path(f"/proc/self/fd/{fd}").readlink()))

    def renamed(self: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        done.append(("name", target))
        return rename(self, target)

    def replaced(self: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        done.append(("name", target))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(pathlib.Path, "rename", renamed)
    monkeypatch.setattr(pathlib.Path, "replace", replaced)
    save(tmp_path, 1)
    draft, final = tmp_path / "epoch-0001.tmp-test", tmp_path / "epoch-0001"
    committed = done.index(("name", final))
    held = [path.relative_to(final) for path in final.rglob("*") if path.name != "manifest.json"]
    assert len(held) == 4  # model, optimiser, random states and a folder
    for path in (*held, pathlib.Path()):
        assert ("sync", draft / path) in done[:committed], f"{path} was not synced before the commit"
    manifest = done.index(("name", draft / "manifest.json"))
    assert any(what == "sync" and path.name.startswith(".manifest.json") for what, path in done[:manifest])
    assert all(done.index(("sync", draft / path)) < manifest for path in held if path.suffix), "the manifest is last"
    linked = done.index(("name", tmp_path / "latest"))
    assert ("sync", tmp_path) in done[committed:linked], "the name was not made durable before `latest` points at it"
    assert ("sync", tmp_path) in done[linked:]


@pytest.mark.parametrize("name", ["rank-0000/model.pt", "rank-0000/optimizer.pt", "rng.pt", "manifest.json"])
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


def test_a_quick_look_sees_a_length_and_no_more(tmp_path: pathlib.Path):
    save(tmp_path, 1)
    path = tmp_path / "epoch-0001" / "rank-0000" / "model.pt"
    data = path.read_bytes()
    path.write_bytes(b"x" * len(data))
    assert checkpoint.verify(tmp_path / "epoch-0001", contents=False).step == 1
    path.write_bytes(data + b"x")
    with pytest.raises(checkpoint.CheckpointError, match=f"{path} has {len(data) + 1} bytes, the manifest says"):
        checkpoint.verify(tmp_path / "epoch-0001", contents=False)


def test_a_changed_value_in_the_manifest_is_found(tmp_path: pathlib.Path):
    save(tmp_path, 1)
    path = tmp_path / "epoch-0001" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 1', '"step": 7'))
    with pytest.raises(checkpoint.CheckpointError, match=f"{path} is corrupted"):
        checkpoint.verify(tmp_path / "epoch-0001")


def test_what_is_thrown_away_is_no_checkpoint(tmp_path: pathlib.Path):
    save(tmp_path, 1, 2)
    (tmp_path / "epoch-0002").rename(tmp_path / "epoch-0002.trash-ab")
    shutil.copytree(tmp_path / "epoch-0002.trash-ab", tmp_path / "epoch-0002.tmp-ab")
    assert newest(tmp_path).path.name == "epoch-0001"
    assert [path.name for path in checkpoint.candidates(tmp_path)] == ["epoch-0001"]


def test_the_next_save_tells_what_the_one_before_met(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    def broken(self: checkpoint.Draft, name: str, value: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint.Draft, "add", broken)
    saver = checkpoint.Saver(tmp_path, keep=2, attempt="test")
    saver.save("epoch-0001", savers.state(1), {"moments": {}}, savers.meta(1), [])
    for slot in saver._slots:
        assert slot.free.wait(120)
    with pytest.raises(checkpoint.CheckpointError, match="Input/output error"):
        saver.save("epoch-0002", savers.state(2), {"moments": {}}, savers.meta(2), [])
    saver.close()


@pytest.mark.parametrize(
    ("number", "fails", "tried"), [(errno.EIO, 2, 3), (errno.ESTALE, 1, 2), (errno.EIO, 3, 3), (errno.ENOENT, 1, 1)]
)
def test_what_a_network_filesystem_gets_over_is_tried_again(number: int, fails: int, tried: int):
    calls: list[int] = []

    def action() -> str:
        calls.append(len(calls))
        if len(calls) <= fails:
            raise OSError(number, os.strerror(number))
        return "read"

    with pytest.raises(OSError, match=os.strerror(number)) if tried == fails else contextlib.nullcontext():
        assert files.retried(action, pause_s=0.001) == "read"
    assert len(calls) == tried


def test_when_none_is_whole_it_says_so_instead_of_starting_over(tmp_path: pathlib.Path):
    save(tmp_path, 1)
    (tmp_path / "epoch-0001" / "rank-0000" / "model.pt").unlink()
    with pytest.raises(
        checkpoint.CheckpointError, match=r"no checkpoint .* is whole .*model.pt is missing.*--resume never"
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
    assert newest(tmp_path).step == 3
    (tmp_path / "latest").symlink_to("epoch-0099")
    assert newest(tmp_path).step == 3


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
    assert newest(tmp_path).path.name == "epoch-0001"
    save(tmp_path, 3)
    assert names(tmp_path) == ["epoch-0001", "epoch-0003", "latest"]


def test_the_copy_is_of_the_moment_of_the_call(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Training goes on while the thread writes: with two buffers, two saves may be under way; the third waits."""
    write, gate, opened = checkpoint.Saver._write, threading.Event(), []

    def gated(self: checkpoint.Saver, job: checkpoint._Job) -> None:
        opened.append(gate.wait(120))
        write(self, job)

    monkeypatch.setattr(checkpoint.Saver, "_write", gated)
    saver = checkpoint.Saver(tmp_path, keep=5, attempt="test")
    weights = savers.state(0)

    def save_step(step: int) -> None:
        for tensor in weights.values():
            tensor.fill_(step)
        saver.save(f"epoch-{step:04d}", weights, {"moments": {}}, savers.meta(step), [])
        saver.before_update()

    for step in (1, 2):
        save_step(step)  # which come back although nothing can be written yet
    third = threading.Thread(target=save_step, args=(3,))
    third.start()
    third.join(1)
    assert third.is_alive()
    gate.set()
    third.join(120)
    assert not third.is_alive()
    for tensor in weights.values():
        tensor.fill_(99.0)
    saver.wait()
    saver.close()
    assert opened == [True] * 3
    for step in (1, 2, 3):
        assert torch.equal(
            checkpoint.load(tmp_path / f"epoch-{step:04d}", "model")["weight1"], savers.state(step)["weight1"]
        )


def test_an_update_waits_for_the_copy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    copy, gate = checkpoint.Saver._copy, threading.Event()

    def gated(self: checkpoint.Saver, *args: typing.Any) -> None:
        gate.wait(120)
        copy(self, *args)

    monkeypatch.setattr(checkpoint.Saver, "_copy", gated)
    saver = checkpoint.Saver(tmp_path, keep=2, attempt="test")
    saver.save("epoch-0001", savers.state(1), {"moments": {}}, savers.meta(1), [])
    update = threading.Thread(target=saver.before_update)
    update.start()
    update.join(0.5)
    assert update.is_alive()
    gate.set()
    update.join(120)
    assert not update.is_alive()
    saver.close()
    assert saver.stall_s[0] > 0.4, "it counts as time that the training was held up"


def test_tied_weights_are_kept_once(tmp_path: pathlib.Path):
    tied = torch.arange(1 << 18, dtype=torch.float32)
    saver = checkpoint.Saver(tmp_path, keep=2, attempt="test")
    saver.save("epoch-0001", {"token": tied, "head": tied, "other": torch.zeros(())}, {}, savers.meta(1), [])
    saver.wait()
    saver.close()
    path = tmp_path / "epoch-0001" / "rank-0000" / "model.pt"
    assert path.stat().st_size < 1.2 * tied.numel() * 4
    loaded = checkpoint.load(tmp_path / "epoch-0001", "model")
    assert torch.equal(loaded["head"], tied)
    assert torch.equal(loaded["token"], tied)


def _full_disk(run_dir: pathlib.Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    saver = checkpoint.Saver(run_dir, keep=2, attempt="test")
    saver.save("epoch-0009", savers.state(9), {"moments": {}}, savers.meta(9), [])
    try:
        saver.wait()
    except checkpoint.CheckpointError as e:
        os._exit(42 if "File too large" in str(e) and "ulimit -f" in str(e) else 1)
    os._exit(0)


def test_a_write_that_fails_is_raised_and_leaves_nothing(tmp_path: pathlib.Path):
    save(tmp_path, 1)
    process = ranks.CONTEXT.Process(target=_full_disk, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 42
    assert names(tmp_path) == ["epoch-0001", "latest"]


def test_random_states_come_back():
    before = checkpoint.random_states()
    drawn = (random.random(), np.random.random(), torch.rand(3).tolist())
    checkpoint.restore_random_states(before)
    assert (random.random(), np.random.random(), torch.rand(3).tolist()) == drawn
