"""Signs of a shared filesystem that was lost for a moment."""

import os
import pathlib
import threading
import time

import pytest

from ddp.node import exit_codes, storage


def descriptor_of(path: pathlib.Path) -> int:
    """Return this process's descriptor of a file."""
    (link,) = [
        link
        for link in pathlib.Path("/proc/self/fd").iterdir()
        if link.exists() and link.samefile(path)
    ]
    return int(link.name)


def test_a_file_that_was_held_open_tells_that_its_filesystem_was_lost(tmp_path: pathlib.Path):
    path = tmp_path / "job.json"
    path.write_text("{}")
    witness = storage.Witness(str(path))
    assert witness.trouble() == ""
    os.close(descriptor_of(path))  # as a client that is started again knows no open file
    assert witness.trouble() == "Bad file descriptor"


def test_a_file_that_cannot_be_opened_or_synced_proves_nothing(tmp_path: pathlib.Path):
    assert storage.Witness(str(tmp_path / "missing")).trouble() == ""
    assert storage.Witness("/proc/self/status").trouble() == "", "EINVAL: it knows no fsync"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "CALL_S", 0.05)
    monkeypatch.setattr(storage, "PATIENCE_S", 0.5)


def test_a_call_on_a_slow_filesystem_is_waited_for_and_made_once(
    tmp_path: pathlib.Path, impatient: None
):
    calls: list[int] = []

    def slow() -> str:
        calls.append(1)
        time.sleep(0.2)
        return "written"

    log: list[str] = []
    assert storage.Storage(str(tmp_path), log.append).do(slow) == "written"
    assert len(calls) == 1
    assert log[0].startswith(f"{tmp_path} is slow: reading and writing has taken 0 s so far")


def test_a_call_without_an_end_is_one_line(tmp_path: pathlib.Path, impatient: None):
    place = storage.Storage(str(tmp_path), lambda _: None)
    with pytest.raises(
        exit_codes.FatalError, match=f"^{tmp_path} is slow: .*; is its server overloaded"
    ):
        place.do(threading.Event().wait)


def test_a_call_that_hung_with_its_filesystem_is_made_again(
    tmp_path: pathlib.Path, impatient: None
):
    """The folder is away while the first call hangs, and is there again."""
    folder = tmp_path / "shared"
    calls: list[int] = []

    def act() -> str:
        calls.append(1)
        if len(calls) == 1:
            threading.Timer(0.1, folder.mkdir).start()
            threading.Event().wait()
        return "done"

    assert storage.Storage(str(folder), lambda _: None).do(act) == "done"
    assert len(calls) == 2


def test_a_job_that_is_being_ended_does_not_wait_for_a_slow_call(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage, "CALL_S", 0.05)
    place = storage.Storage(str(tmp_path), lambda _: None, is_cancelled=lambda: True)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        place.do(threading.Event().wait)
    assert time.monotonic() - began < storage.PATIENCE_S / 10
