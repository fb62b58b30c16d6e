"""Checkpoints: whole or absent, found when damaged, and never in the way of the training."""

# pyright: basic, reportPrivateImportUsage=false
import contextlib
import copy
import errno
import json
import os
import pathlib
import random
import shutil
import signal
import tempfile
import threading
import time
import typing

import pytest
import ranks
import torch

from ddptrain.checkpoint import draft, saver, stored, tensors
from ddptrain.ground import errors, files

SHAPES = ((64, 256), (256,), (512, 64))


def state(step: int) -> dict[str, dict]:
    """Return a model and moments that hold their step's number in every element."""
    weights, moments = (
        {f"weight{i}": torch.full(shape, float(step)) for i, shape in enumerate(SHAPES)}
        for _ in "wm"
    )
    return {"model": weights, "optimizer": {"moments": moments}}


def holds(path: pathlib.Path, step: int) -> bool:
    """Return whether all tensors of a checkpoint are from one step."""
    found = state(0)
    tensors.read_into(path, found)
    return all(bool((tensor == step).all()) for tensor in tensors.leaves(found))


def meta(step: int) -> dict[str, object]:
    return {"step": step, "epoch": step, "format": tensors.DCP, "world_size": 1}


def save_step(writer: saver.Saver, step: int, *, is_best: bool = False) -> None:
    name = stored.name_of(step, step, ends_epoch=True)
    writer.save(name, state(step), meta(step), is_best=is_best)


def save_forever(run_dir: pathlib.Path, first: int, acknowledge: int) -> None:
    """Save step after step, reporting each that is on disk through the pipe."""
    torch.set_num_threads(1)
    writer = saver.Saver(run_dir, keep=2, attempt="test")
    os.write(acknowledge, b"0\n")
    step = first
    while True:
        save_step(writer, step, is_best=step % 7 == 0)
        writer.wait()
        os.write(acknowledge, f"{step}\n".encode())
        step += 1


def save(
    run_dir: pathlib.Path, *steps: int, keep: int = 5, best: tuple[int, ...] = ()
) -> list[dict]:
    """Save steps one after the other, and return the records of what became complete."""
    records: list[dict] = []
    writer = saver.Saver(run_dir, keep=keep, attempt="test", on_saved=records.append)
    for step in steps:
        save_step(writer, step, is_best=step in best)
        writer.wait()
    writer.close()
    return records


def newest(run_dir: pathlib.Path) -> stored.Checkpoint:
    found = stored.choose(run_dir, "auto")
    assert found is not None
    return found


def names(run_dir: pathlib.Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def test_a_save_is_a_folder_with_a_manifest_and_two_links(tmp_path: pathlib.Path):
    records = save(tmp_path, 1, 2, best=(1,))
    assert [(record["kind"], record["step"], record["name"]) for record in records] == [
        ("checkpoint", 1, "epoch-0001"),
        ("checkpoint", 2, "epoch-0002"),
    ]
    assert all(0 < record["stall_s"] < record["seconds"] for record in records)
    assert names(tmp_path) == ["best", "epoch-0001", "epoch-0002", "latest"]
    assert (tmp_path / "latest").readlink().name == "epoch-0002"
    assert (tmp_path / "best").readlink().name == "epoch-0001"
    listed = {
        entry["file"] for entry in files.read_json(tmp_path / "latest" / "manifest.json")["files"]
    }
    assert listed == {"dcp/.metadata", "dcp/__0_0.distcp"}
    found = stored.verify(tmp_path / "epoch-0002")
    assert found.step == 2
    assert holds(found.path, 2)


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.long)])
def test_sigkill_at_random_moments_loses_at_most_the_last_save(tmp_path: pathlib.Path, kills: int):
    """A process of the fork server plays it through: it forks the victims cheaply."""
    report = tmp_path / "report.json"
    memory = pathlib.Path(
        "/dev/shm"
    )  # SIGKILL leaves the page cache alone: a disk would only make the test slow
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else tmp_path
    ) as folder:
        process = ranks.CONTEXT.Process(
            target=_kill_often, args=(kills, pathlib.Path(folder) / "run", report)
        )
        process.start()
        process.join(280)
        process.kill()
        process.join()
    assert process.exitcode == 0
    result = json.loads(report.read_text())
    assert result["kills"] == kills
    assert result["saved"] > kills // 2
    assert result["amid"] >= kills // 5, (
        "too few kills came in the middle of a save: the test is too tame"
    )


def _kill_often(times: int, run_dir: pathlib.Path, report: pathlib.Path) -> None:
    torch.set_num_threads(1)
    run_dir.mkdir()
    chance = random.Random(20260101)
    began = time.monotonic()
    save(run_dir, 1, 2, 3)
    a_save_s = (time.monotonic() - began) / 3  # on this machine, now
    known, amid, kills = 3, 0, 0
    for _ in range(times):
        read, write = os.pipe()
        victim = os.fork()
        if not victim:
            os.close(read)
            save_forever(run_dir, known + 1, write)
        os.close(write)
        assert os.read(read, 2) == b"0\n"  # it is ready
        printed, saves = (
            b"",
            chance.choice((0, 1, 1, 2)),
        )  # however long they take on a machine with much else to do
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
        amid += any(stored.TMP in name or stored.TRASH in name for name in names(run_dir))

        found = stored.choose(run_dir, "auto")
        assert (found.step if found else 0) >= known  # every reported save exists
        for path in stored.candidates(run_dir):
            step = stored.verify(path).step  # nothing half-written under a final name
            assert path.name == f"epoch-{step:04d}"
            assert holds(path, step)
        known = max(known, found.step if found else 0)
    report.write_text(json.dumps({"kills": kills, "saved": known, "amid": amid}))


def test_everything_is_durable_before_it_gets_its_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """Only a power loss shows it, not a kill: the order of syncs and renames."""
    done: list[tuple[str, pathlib.Path]] = []
    sync = os.fsync

    def synced(fd: int) -> None:
        sync(fd)
        name = str(pathlib.Path(f"/proc/self/fd/{fd}").readlink()).replace(
            ".metadata.tmp", ".metadata"
        )  # torch renames it
        done.append(("sync", pathlib.Path(name)))

    def noting(real: typing.Callable[[pathlib.Path, pathlib.Path], pathlib.Path]) -> typing.Any:
        return lambda path, target: done.append(("name", target)) or real(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace"):
        monkeypatch.setattr(pathlib.Path, name, noting(getattr(pathlib.Path, name)))
    save(tmp_path, 1)
    made, final = tmp_path / "epoch-0001.tmp-test", tmp_path / "epoch-0001"
    committed = done.index(("name", final))
    held = [path.relative_to(final) for path in final.rglob("*") if path.name != "manifest.json"]
    assert len(held) == 3  # tensors, their index and a folder
    for path in (*held, pathlib.Path()):
        assert ("sync", made / path) in done[:committed], f"{path} was not synced before the commit"
    manifest = done.index(("name", made / "manifest.json"))
    assert any(
        what == "sync" and path.name.startswith(".manifest.json") for what, path in done[:manifest]
    )
    assert all(done.index(("sync", made / path)) < manifest for path in held if path.suffix), (
        "the manifest is last"
    )
    linked = done.index(("name", tmp_path / "latest"))
    assert ("sync", tmp_path) in done[committed:linked], (
        "the name was not made durable before `latest` points at it"
    )
    assert ("sync", tmp_path) in done[linked:]


@pytest.mark.parametrize("name", ["dcp/__0_0.distcp", "dcp/.metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_found_and_named_and_the_previous_checkpoint_taken(
    tmp_path: pathlib.Path, name: str, damage: str
):
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
        stored.CheckpointError,
        match=str(path.parent if (name, damage) == ("manifest.json", "remove") else path),
    ):
        stored.verify(tmp_path / "epoch-0002")
    found = stored.choose(tmp_path, "auto")
    assert found is not None
    assert found.step == 1
    with pytest.raises(stored.CheckpointError, match="epoch-0002"):
        stored.choose(
            tmp_path, str(tmp_path / "epoch-0002")
        )  # asked for by name, it is not replaced by another


def test_the_next_save_raises_the_error_of_the_one_before(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(self: draft.Draft, state: stored.State) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(draft.Draft, "add_dcp", broken)
    writer = saver.Saver(tmp_path, keep=2, attempt="test")
    save_step(writer, 1)
    with pytest.raises(stored.CheckpointError, match="Input/output error"):
        save_step(writer, 2)
    writer.close()


@pytest.mark.parametrize(
    ("number", "fails", "tried"),
    [(errno.EIO, 2, 3), (errno.ESTALE, 1, 2), (errno.EIO, 3, 3), (errno.ENOENT, 1, 1)],
)
def test_errors_that_a_network_filesystem_gets_over_are_tried_again(
    number: int, fails: int, tried: int
):
    calls: list[int] = []

    def action() -> str:
        calls.append(len(calls))
        if len(calls) <= fails:
            raise OSError(number, os.strerror(number))
        return "read"

    with (
        pytest.raises(OSError, match=os.strerror(number))
        if tried == fails
        else contextlib.nullcontext()
    ):
        assert files.retried(action, pause_s=0.001) == "read"
    assert len(calls) == tried


def test_when_none_is_whole_it_says_so_instead_of_starting_over(tmp_path: pathlib.Path):
    assert stored.choose(tmp_path, "auto") is None, "there is none yet"
    with pytest.raises(errors.UserError, match="no such folder"):
        stored.choose(tmp_path, str(tmp_path / "elsewhere"))
    save(tmp_path, 1)
    (tmp_path / "epoch-0001" / "dcp" / "__0_0.distcp").unlink()
    with pytest.raises(
        stored.CheckpointError,
        match=r"no checkpoint .* is whole .*distcp is missing.*--resume never",
    ):
        stored.choose(tmp_path, "auto")
    assert stored.choose(tmp_path, "never") is None


def test_the_link_latest_is_a_hint_only(tmp_path: pathlib.Path):
    save(tmp_path, 1, 2, 3)
    (tmp_path / "latest").unlink()
    assert newest(tmp_path).step == 3
    (tmp_path / "latest").symlink_to("epoch-0099")
    assert newest(tmp_path).step == 3


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM])
def test_without_symbolic_links_there_is_one_warning_and_the_manifests_count(
    number: int,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(os, "symlink", _refusing(number))
    save(tmp_path, 1, 2, 3, keep=2, best=(3,))
    assert names(tmp_path) == ["epoch-0002", "epoch-0003"]
    assert newest(tmp_path).step == 3
    assert caplog.text.count("is on a filesystem without symbolic links: no latest and best") == 1


def test_any_other_error_of_a_link_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "symlink", _refusing(errno.ENOSPC))
    with pytest.raises(stored.CheckpointError, match=r"could not be written: .*space"):
        save(tmp_path, 1)


def _refusing(number: int) -> typing.Callable[..., typing.NoReturn]:
    def refuse(source: object, target: object, *_: object, **__: object) -> typing.NoReturn:
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    return refuse


def test_it_keeps_the_last_ones_and_the_best(tmp_path: pathlib.Path):
    save(tmp_path, 1, 2, 3, 4, 5, keep=2, best=(2,))
    assert names(tmp_path) == ["best", "epoch-0002", "epoch-0004", "epoch-0005", "latest"]


def test_leftovers_of_a_killed_attempt_go_away(tmp_path: pathlib.Path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "epoch-0001", tmp_path / "epoch-0002.tmp-4.r0")
    shutil.copytree(tmp_path / "epoch-0001", tmp_path / "epoch-0000.trash-ab")
    assert newest(tmp_path).path.name == "epoch-0001"
    save(tmp_path, 3)
    (tmp_path / "epoch-0003" / "stray").touch()
    save(tmp_path, 3)
    assert names(tmp_path) == ["epoch-0001", "epoch-0003", "latest"]
    assert not (tmp_path / "epoch-0003" / "stray").exists(), "the same step again replaces it whole"


def test_the_copy_is_of_the_moment_of_the_call(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """Training goes on while the thread writes; a second save waits for it."""
    write, gate = saver.Saver._write, threading.Event()
    monkeypatch.setattr(
        saver.Saver, "_write", lambda self, job: gate.wait(120) and write(self, job)
    )
    writer = saver.Saver(tmp_path, keep=5, attempt="test")
    live = state(0)

    def change_and_save(step: int) -> None:
        for tensor in tensors.leaves(live):
            tensor.fill_(step)
        writer.save(f"epoch-{step:04d}", live, meta(step))
        writer.before_update()

    change_and_save(1)  # which comes back although nothing can be written yet
    for tensor in tensors.leaves(live):
        tensor.fill_(99.0)
    second = threading.Thread(target=change_and_save, args=(2,))
    second.start()
    second.join(1)
    assert second.is_alive()
    gate.set()
    second.join(120)
    writer.wait()
    writer.close()
    assert all(holds(tmp_path / f"epoch-{step:04d}", step) for step in (1, 2))


def test_an_update_waits_for_the_copy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    copying, gate = saver.Saver._copy, threading.Event()

    def gated(self: saver.Saver, *args: typing.Any) -> None:
        gate.wait(120)
        copying(self, *args)

    monkeypatch.setattr(saver.Saver, "_copy", gated)
    writer = saver.Saver(tmp_path, keep=2, attempt="test")
    save_step(writer, 1)
    update = threading.Thread(target=writer.before_update)
    update.start()
    update.join(0.5)
    assert update.is_alive()
    gate.set()
    update.join(120)
    assert not update.is_alive()
    writer.close()
    assert writer.stall_s[0] > 0.4, "it counts as time that the training was held up"


@pytest.fixture
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with tied weights and a buffer, and its optimiser, after a step."""
    torch.manual_seed(5)
    core = torch.nn.Sequential(
        torch.nn.Linear(64, 64, bias=False), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64)
    )
    core[2].weight = core[0].weight
    optimizer = torch.optim.AdamW(core.parameters(), lr=0.1)
    core(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    return core, optimizer


def parts(core: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        *core.state_dict().values(),
        *(t for p in core.parameters() for t in optimizer.state[p].values()),
    ]


def restored(
    found: stored.Checkpoint, trained: tuple[torch.nn.Module, torch.optim.Optimizer]
) -> None:
    """A checkpoint read into a copy that trained on restores weights and moments, not settings."""
    core, optimizer = copy.deepcopy(trained)
    core(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    assert not torch.equal(parts(core, optimizer)[0], parts(*trained)[0])
    tensors.restore(found, core, optimizer)
    assert all(
        torch.equal(a, b) for a, b in zip(parts(core, optimizer), parts(*trained), strict=True)
    )
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_model_and_its_optimiser_come_back_and_tied_weights_are_kept_once(
    tmp_path: pathlib.Path, trained: tuple[torch.nn.Module, torch.optim.Optimizer]
):
    state = tensors.state_of(*trained)
    assert "2.weight" not in state["model"]
    writer = saver.Saver(tmp_path, keep=2, attempt="test")
    writer.save("epoch-0001", state, meta(1))
    writer.wait()
    writer.close()
    restored(newest(tmp_path), trained)


def test_a_checkpoint_of_the_old_format_is_read(
    tmp_path: pathlib.Path, trained: tuple[torch.nn.Module, torch.optim.Optimizer]
):
    folder = tmp_path / "epoch-0001"
    (folder / "rank-0000").mkdir(parents=True)
    for name, part in zip(("model", "optimizer"), trained, strict=True):
        torch.save(part.state_dict(), folder / "rank-0000" / f"{name}.pt")
    draft.seal(folder, {**meta(1), "format": "torch"})
    restored(newest(tmp_path), trained)
