"""Output goes to the node's own disk first: no line is lost if the shared filesystem fails."""

import os
import pathlib
import stat
import time

import pytest

from ddp.node import exit_codes, spool, storage


@pytest.fixture
def shared(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run's folder on a filesystem that can go away: `gone` in its place."""
    folder = tmp_path / "shared"
    (folder / "logs").mkdir(parents=True)
    return folder


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "spool" / "out"
    path.parent.mkdir()
    path.touch()
    return path


def add(path: pathlib.Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def wait_for(words: str, logged: list[str]) -> None:
    for _ in range(1800):
        if any(words in line for line in logged):
            return
        time.sleep(0.05)
    raise AssertionError(logged)


def test_lines_that_come_while_the_filesystem_is_away_are_all_there_afterwards(
    shared: pathlib.Path, source: pathlib.Path
):
    logged: list[str] = []
    log = shared / "logs" / "12.out"
    forwarder = spool.Forwarder(logged.append)
    forwarder.add(str(source), str(log))
    lines = [f"line {number}\n" for number in range(300)]
    for line in lines[:100]:
        add(source, line)
    assert forwarder.flush(20)
    assert log.read_text() == "".join(lines[:100])
    gone = shared.rename(shared.with_name("gone"))
    for line in lines[100:200]:
        add(source, line)
    wait_for("output cannot be written (No such file or directory)", logged)
    assert not forwarder.flush(0.5)
    assert not shared.exists(), "nothing is made where nothing is mounted"
    gone.rename(shared)
    for line in lines[200:]:
        add(source, line)
    assert forwarder.close(20)
    assert log.read_text() == "".join(lines)
    assert logged[-1].startswith("output is written again after ")


def test_a_copy_that_failed_half_way_is_completed_without_a_line_twice(
    shared: pathlib.Path, source: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """A filesystem's client fails to write at `close`; part of the data may have arrived."""
    log = shared / "logs" / "12.out"
    log.write_text("from an earlier start\n")
    add(source, "one\ntwo\n")
    mirror = spool.Mirror(str(source), str(log))
    real = os.close

    def fail(descriptor: int) -> None:
        os.ftruncate(descriptor, len("from an earlier start\none\n"))
        real(descriptor)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", fail)
        with pytest.raises(OSError, match="Input/output error"):
            mirror.forward()
    assert not mirror.is_current
    add(source, "three\n")
    mirror.forward()
    assert log.read_text() == "from an earlier start\none\ntwo\nthree\n"


def test_records_that_others_append_stay(shared: pathlib.Path, source: pathlib.Path):
    log = shared / "logs" / "12.out"
    mirror = spool.Mirror(str(source), str(log))
    add(source, "one\n")
    mirror.forward()
    add(log, "slurmstepd: error: *** JOB 12 CANCELLED ***\n")
    add(source, "two\n")
    mirror.forward()
    assert log.read_text() == "one\nslurmstepd: error: *** JOB 12 CANCELLED ***\ntwo\n"


def test_ranks_logs_are_copied_with_the_time_of_their_last_line(
    shared: pathlib.Path, source: pathlib.Path
):
    rank = source.parent / "logs" / "x" / "attempt_0" / "0" / "stderr.log"
    rank.parent.mkdir(parents=True)
    rank.write_text("ValueError: boom\n")
    os.utime(rank, (1000, 1000))
    forwarder = spool.Forwarder(lambda _: None)
    forwarder.add_tree(
        str(source.parent / "logs"), str(shared / "logs" / "node-0"), below=str(shared / "logs")
    )
    assert forwarder.close(20)
    copy = shared / "logs" / "node-0" / "x" / "attempt_0" / "0" / "stderr.log"
    assert (copy.read_text(), copy.stat().st_mtime) == ("ValueError: boom\n", 1000)


def test_the_folder_on_the_node_is_this_accounts_alone(tmp_path: pathlib.Path):
    made = pathlib.Path(spool.folder(str(tmp_path / "cache"), "12"))
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert made == tmp_path / "cache" / "jobs" / "12"


@pytest.mark.parametrize("what", ["folder", "file", "link", "dangling"])
def test_a_name_that_another_account_took_first_is_left_to_it(tmp_path: pathlib.Path, what: str):
    """Anyone can do that in /var/tmp; each later job on the node finds the folder made instead."""
    cache, theirs = tmp_path / "cache-7", tmp_path / "theirs"
    theirs.mkdir()
    match what:
        case "folder":
            cache.mkdir(mode=0o777)
        case "file":
            cache.touch()
        case _:
            cache.symlink_to(theirs if what == "link" else tmp_path / "nowhere")
    os.chown(cache, 33, 33, follow_symlinks=False)
    for decoy in ("cache-7.aaaa", "cache-70", "cache-7.zzzz"):
        (tmp_path / decoy).mkdir(mode=0o777)
        os.chown(tmp_path / decoy, 33, 33)
    own = pathlib.Path(spool.own_cache(str(cache)))
    assert own.parent == tmp_path
    assert own.name.startswith("cache-7.")
    assert (own.stat().st_uid, stat.S_IMODE(own.stat().st_mode)) == (os.geteuid(), 0o700)
    assert spool.own_cache(str(cache)) == str(own)
    assert spool.folder(str(cache), "12") == f"{own}/jobs/12"
    assert not list(theirs.iterdir())
    with pytest.raises(PermissionError, match="is not a folder of uid"):
        spool.ensure_private(str(cache))


def test_an_own_folder_that_others_could_write_is_closed(tmp_path: pathlib.Path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert spool.own_cache(str(tmp_path / "cache")) == str(tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_a_call_that_hangs_is_abandoned_and_the_filesystem_waited_for(tmp_path: pathlib.Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        storage.within(lambda: os.close(os.open(pipe, os.O_RDONLY)), 0.3)
    assert time.monotonic() - began < 5
    os.close(os.open(pipe, os.O_RDWR))  # lets the abandoned thread end


def test_an_error_of_a_filesystem_that_works_is_the_callers(shared: pathlib.Path):
    logged: list[str] = []
    place = storage.Storage(str(shared / "logs"), logged.append)
    with pytest.raises(FileNotFoundError):
        place.do((shared / "logs" / "none").read_text)
    assert logged == []
    assert list((shared / "logs").iterdir()) == []


def test_a_filesystem_that_stays_away_is_not_waited_for_for_ever(
    shared: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage, "PATIENCE_S", 0.5)
    logged: list[str] = []
    place = storage.Storage(str(shared / "none"), logged.append)
    words = f"{shared}/none has not responded for . s: No such file or directory"
    with pytest.raises(exit_codes.FatalError, match=words):
        place.await_ready()
    assert logged == [
        f"{shared}/none does not respond (No such file or directory); waiting for it, 0 s"
    ]
