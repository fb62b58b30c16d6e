"""Each decision of slurm_ddp.mounts by itself, without a mount: the scenes in test_mounts.py show them together."""

import dataclasses
import errno
import json
import os
import pathlib
import socket
import stat
import subprocess
import time
import types
import typing
import unittest.mock

import pytest
import yaml

from slurm_ddp import mount_child, mounts
from slurm_ddp.mounts import State

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

OURS = mounts.Mount(7, "0:7", "/mnt/shared", "nfs4", "server:/x", ("rw",))
THEIRS = mounts.Mount(8, "0:8", "/mnt/shared", "tmpfs", "tmpfs", ("rw",))


class Clock:
    """The time, as `mounts` sees it: it passes by sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = {"monotonic": lambda: self.now, "sleep": self.sleep, "time": time.time}
        monkeypatch.setattr(
            mounts,
            "time",
            types.SimpleNamespace(**clock, gmtime=time.gmtime, strftime=time.strftime),
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[mounts.Mount]:
    """List the mounts, the topmost last; a test changes it."""
    found = [OURS]
    monkeypatch.setattr(mounts, "at", lambda mountpoint: list(found))
    return found


def test_of_mounts_at_one_place_the_topmost_counts():
    table = mounts.table(
        "1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / /m rw - nfs4 b rw\n3 1 0:3 / /m rw - nfs4 c rw\n"
    )
    assert [mount.id for mount in mounts.at("/m/", table)] == [2, 3]
    found = mounts.find("/m/x", table)
    assert found is not None
    assert found.id == 3
    assert mounts.find("/m/x", []) is None
    assert mounts.find("/mm", table) == table[0]


@pytest.mark.parametrize(("table", "expected", "state"), CASES["table"])
def test_the_mount_table_decides_before_a_child_starts(
    here: list[mounts.Mount],
    monkeypatch: pytest.MonkeyPatch,
    table: list[str],
    expected: dict[str, typing.Any],
    state: str,
):
    read_only = dataclasses.replace(OURS, options=("ro",))
    here[:] = [{"ours": OURS, "theirs": THEIRS, "read-only": read_only}[name] for name in table]
    asked: list[str] = []
    monkeypatch.setattr(mounts, "ask", lambda mount, kind, deadline: asked.append(kind) or ({}, ""))
    wanted: dict[str, typing.Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in expected.items()
    }
    assert mounts.probe("/mnt/shared", **wanted).state is State(state)
    assert asked == (["read"] if state == "right" else [])


@pytest.mark.parametrize(("answers", "state", "deadlines"), CASES["slow"])
def test_a_write_that_does_not_end_is_followed_by_a_read(
    here: list[mounts.Mount],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    *,
    answers: dict[str, typing.Any],
    state: str,
    deadlines: list[float],
):
    asked: list[tuple[str, float, bool]] = []

    def ask(
        mount: mounts.Mount, kind: str, deadline: float, *, sticky: bool = False
    ) -> tuple[typing.Any, str]:
        asked.append((kind, deadline, sticky))
        clock.now += answers["seconds"] if kind == "write" else 0
        return answers[kind], "did not end" if answers[kind] is None else ""

    monkeypatch.setattr(mounts, "ask", ask)
    assert mounts.probe("/mnt/shared", writable=True, sticky=True).state is State(state)
    assert asked == [
        (("write", "read")[at], deadline, at == 0) for at, deadline in enumerate(deadlines)
    ]


@pytest.mark.parametrize(("step", "error", "state", "detail"), CASES["answers"])
def test_answers_of_a_child_become_states(step: str, error: str | None, state: str, detail: str):
    answer = {"step": step} | ({"errno": getattr(errno, error)} if error else {})
    assert mounts.judge("/m", answer) == mounts.Result(State(state), detail)


def test_a_root_that_others_can_write_is_part_of_the_result():
    assert mounts.judge("/m", {"open": 0o777, "was": 0o775}) == mounts.Result(
        State.RIGHT, "", 0o777, 0o775
    )


def test_waiting_asks_again_until_it_is_right_or_late(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    deadlines: list[float] = []
    found = [mounts.Result(State.ABSENT, "nothing")]

    def probe(mountpoint: str, *, fstype: str, source: str, deadline: float) -> mounts.Result:
        deadlines.append(deadline)
        clock.now += 1
        return found[0] if len(found) == 1 else found.pop(0)

    monkeypatch.setattr(mounts, "probe", probe)
    begin = clock.now
    assert mounts.wait("/m", fstype="t", source="s", timeout=6.3) == found[0]
    assert deadlines == pytest.approx([5.0, 5.0, 3.9, 2.7, 1.5, 0.5])
    assert clock.now - begin == pytest.approx(7.0)
    found.append(mounts.Result(State.RIGHT))
    deadlines.clear()
    assert mounts.wait("/m", fstype="t", source="s", timeout=6, pid=os.getpid())
    assert len(deadlines) == 2
    lone = mounts.wait("/m", fstype="t", source="s", timeout=6, pid=0x7FFFFFFF)
    assert lone  # it is right, no matter who mounted it


def test_each_address_is_tried_again_and_again(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    tried: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        assert timeout == 2
        tried.append(address)
        raise (
            OSError(errno.ECONNREFUSED, "refused")
            if address[0] == "a"
            else TimeoutError("timed out")
        )

    monkeypatch.setattr(mounts.socket, "create_connection", connect)
    begin = clock.now
    with pytest.raises(mounts.MountError, match=r"^b:2 does not answer \(timed out\)$"):
        mounts.reach([("a", 1), ("b", 2)], timeout=1.2)
    assert tried == [("a", 1), ("b", 2)] * 3
    assert clock.now - begin == 1.0  # another half second would be too long
    with pytest.raises(mounts.MountError, match=r"^no address$"):
        mounts.reach([], timeout=0)


class Kernel:
    """The system call: it answers with the errors that were prepared, then takes the topmost mount away."""

    def __init__(
        self, here: list[mounts.Mount], monkeypatch: pytest.MonkeyPatch, *errors: int
    ) -> None:
        self.errors, self.here, self.flags = list(errors), here, list[int]()
        monkeypatch.setattr(mounts, "_umount", self.umount)

    def umount(self, mountpoint: str, flags: int) -> None:
        self.flags.append(flags)
        if self.errors:
            raise OSError(self.errors.pop(0), "refused")
        self.here.pop()


IDENTITY = {"fstype": "nfs4", "source": "server:/x"}


def test_clearing_detaches_what_is_ours_and_counts_it(
    here: list[mounts.Mount], monkeypatch: pytest.MonkeyPatch
):
    kernel = Kernel(here, monkeypatch)
    here[:] = [OURS, OURS]
    assert mounts.clear("/mnt/shared", **IDENTITY) == 2
    assert kernel.flags == [2, 2]
    here[:] = [THEIRS, OURS]
    with pytest.raises(
        mounts.MountError,
        match=r"^/mnt/shared holds tmpfs \(tmpfs\), which is not ours: unmount it$",
    ):
        mounts.clear("/mnt/shared", **IDENTITY)
    assert here == [THEIRS]


@pytest.mark.parametrize(("state", "errors", "expected"), CASES["unmounts"])
def test_unmounting_is_patient_with_users_only(
    here: list[mounts.Mount],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    *,
    state: str,
    errors: list[str],
    expected: list[object],
):
    monkeypatch.setattr(mounts, "probe", lambda mountpoint, deadline: mounts.Result(State(state)))
    kernel = Kernel(here, monkeypatch, *(getattr(errno, error) for error in errors))
    begin, problem = clock.now, ""
    try:
        mounts.unmount("/mnt/shared", **IDENTITY, patience=1.0)
    except mounts.MountError as e:
        problem = str(e)
    assert [kernel.flags, clock.now - begin, problem] == expected


def test_a_foreign_mount_is_not_unmounted(
    here: list[mounts.Mount], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mounts, "probe", lambda mountpoint, deadline: mounts.Result(State.RIGHT))
    kernel = Kernel(here, monkeypatch)
    for other in (
        {"fstype": "nfs4", "source": "other"},
        {"fstype": "tmpfs", "source": "server:/x"},
    ):
        with pytest.raises(mounts.MountError, match="is not ours"):
            mounts.unmount("/mnt/shared", **other, patience=0)
    assert kernel.flags == []


@pytest.fixture
def notes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(mounts, "_ABANDONED", tmp_path / "notes")
    return tmp_path / "notes"


class Stuck:
    """A child that no signal ends."""

    pid = os.getpid()
    killed = 0

    def kill(self) -> None:
        self.killed += 1

    def wait(self, timeout: float) -> None:
        assert timeout == 0.5
        raise subprocess.TimeoutExpired("child", timeout)


def test_while_a_child_hangs_no_other_of_its_kind_is_started(
    notes: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    assert mounts.hangs_since("/mnt/shared", "read") is None
    stuck = Stuck()
    mounts.leave_behind(typing.cast("subprocess.Popen[bytes]", stuck), "/mnt/shared", "read")
    assert stuck.killed == 1
    (note,) = notes.iterdir()
    assert note.read_text() == f"{os.getpid()} {mounts.start_time(os.getpid())}"
    os.utime(note, (0, 45296))
    monkeypatch.setattr(mounts, "ask_child", lambda mount, kind, deadline, sticky: {"kind": kind})
    assert mounts.ask(OURS, "read", 5) == (None, "has not answered since 12:34:56 UTC")
    assert mounts.ask(OURS, "write", 5) == ({"kind": "write"}, "")
    note.rename(mounts.note_of("/mnt/shared", "write"))
    assert mounts.ask(OURS, "write", 5) == (None, "has not ended since 12:34:56 UTC")
    assert mounts.hangs_since("/mnt/other", "write") is None


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [("1 2", False), ("{pid} None", False), ("x", True), ("2147483647 5", False)],
)
def test_a_note_of_a_child_that_ended_is_removed(notes: pathlib.Path, text: str, is_kept: bool):
    notes.mkdir()
    note = mounts.note_of("/m", "read")
    note.write_text(text.format(pid=os.getpid()))
    assert mounts.hangs_since("/m", "read") is None
    assert note.exists() == is_kept


def test_a_process_that_ended_and_was_not_waited_for_has_no_start(tmp_path: pathlib.Path):
    child = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert mounts.start_time(child.pid) is None
    child.wait()
    assert mounts.start_time(0x7FFFFFFF) is None
    ticks = mounts.start_time(os.getpid())
    assert ticks == int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def as_child(monkeypatch: pytest.MonkeyPatch, path: pathlib.Path, code: str) -> None:
    """Have this code run as a probe's child."""
    path.write_text(f"import json, os, sys, time\n{code}\n")
    monkeypatch.setattr(mounts, "CHILD", path)


def test_a_child_gets_its_arguments_and_a_bare_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    as_child(
        monkeypatch,
        tmp_path / "c.py",
        "print(flush=True)\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))",
    )
    arguments, environment = typing.cast(
        "list[typing.Any]", mounts.ask_child(OURS, "write", 20, sticky=True)
    )
    assert arguments == ["/mnt/shared", "7", "write", "sticky"]
    assert {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}.items() <= environment.items()
    assert set(environment) <= {"LANG", "PATH", "LC_CTYPE"}
    arguments, _ = typing.cast("list[typing.Any]", mounts.ask_child(OURS, "read", 20, sticky=False))
    assert arguments == ["/mnt/shared", "7", "read"]


@pytest.mark.parametrize(
    ("code", "start_s", "deadline", "answer"),
    CASES["a_child_has_its_deadline_from_the_moment_it_begins"],
)
def test_a_child_has_its_deadline_from_the_moment_it_begins(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    *,
    code: str,
    start_s: float,
    deadline: float,
    answer: dict[str, typing.Any] | None,
):
    as_child(monkeypatch, tmp_path / "c.py", code)
    monkeypatch.setattr(mounts, "_START_S", start_s)
    begin = time.monotonic()
    assert mounts.ask_child(OURS, "read", deadline, sticky=False) == answer
    assert time.monotonic() - begin < 25


def mount_id(folder: pathlib.Path) -> int:
    directory = os.open(folder, os.O_RDONLY)
    try:
        lines = pathlib.Path(f"/proc/self/fdinfo/{directory}").read_text().splitlines()
    finally:
        os.close(directory)
    return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


def child(
    folder: pathlib.Path, *, write: bool = False, sticky: bool = False
) -> dict[str, typing.Any]:
    return mount_child.touch(str(folder), mount_id(folder), write=write, sticky=sticky)


def test_a_probe_leaves_its_folder_and_nothing_in_it(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    assert child(tmp_path) == {}
    assert capsys.readouterr().out == "\n"  # its deadline starts
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / mount_child.PROBE_DIR
    assert child(tmp_path, write=True) == {}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    host = socket.gethostname()
    for name, age in ((f"{host}.1", 3700), (f"{host}.2", 3500), ("other.1", 9999)):
        (folder / name).touch()
        os.utime(folder / name, (0, time.time() - age))
    assert child(tmp_path, write=True) == {}
    assert sorted(path.name for path in folder.iterdir()) == sorted([f"{host}.2", "other.1"])


def test_a_mount_that_is_not_the_one_of_the_table_is_hidden(tmp_path: pathlib.Path):
    number = mount_id(tmp_path)
    assert mount_child.touch(str(tmp_path), number * 10, write=True, sticky=False) == {
        "step": "hidden"
    }
    assert mount_child.touch(str(tmp_path / "x"), 1, write=True, sticky=False) == {
        "step": "open",
        "errno": errno.ENOENT,
    }
    (tmp_path / "file").touch()
    found = mount_child.touch(str(tmp_path / "file"), number, write=False, sticky=False)
    assert found == {"step": "open", "errno": errno.ENOTDIR}


@pytest.mark.parametrize(
    ("mode", "sticky", "found", "after"),
    CASES["the_sticky_bit_is_set_where_that_is_asked_and_needed"],
)
def test_the_sticky_bit_is_set_where_that_is_asked_and_needed(
    tmp_path: pathlib.Path, mode: int, sticky: bool, found: dict[str, int], after: int
):
    tmp_path.chmod(mode)
    assert child(tmp_path, sticky=sticky) == found
    assert stat.S_IMODE(tmp_path.stat().st_mode) == after


def test_a_sticky_bit_that_is_refused_leaves_the_root_open(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(os, "fchmod", failing)
    assert child(tmp_path, sticky=True) == {"open": 0o777}


def failing(*_: object, **__: object) -> typing.NoReturn:
    raise OSError(errno.EIO, "no")


@pytest.mark.parametrize(
    ("place", "name", "step"),
    [
        (os, "stat", "look up a name"),
        (pathlib.Path, "mkdir", "make a directory"),
        (os, "fsync", "sync"),
        (pathlib.Path, "replace", "rename"),
        (pathlib.Path, "read_bytes", "read"),
        (pathlib.Path, "unlink", "remove"),
    ],
)
def test_the_step_that_fails_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, place: object, name: str, step: str
):
    number = mount_id(tmp_path)
    monkeypatch.setattr(place, name, failing)
    assert mount_child.touch(str(tmp_path), number, write=True, sticky=False) == {
        "step": step,
        "errno": errno.EIO,
    }


def test_other_bytes_than_were_written_are_seen(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    number = mount_id(tmp_path)
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: b"other")
    assert mount_child.touch(str(tmp_path), number, write=True, sticky=False) == {
        "step": "read back"
    }
    assert list((tmp_path / mount_child.PROBE_DIR).iterdir()) == []


@pytest.mark.parametrize(("argv", "options"), CASES["a_units_command_line_reaches_the_function"])
def test_a_units_command_line_reaches_the_function(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], options: dict[str, typing.Any]
):
    passed: list[dict[str, typing.Any]] = []

    def function(**given: typing.Any) -> None:
        passed.append(given)

    function.__name__ = argv[0]
    monkeypatch.setattr(mounts, argv[0], function)
    assert mounts.main(argv) == 0
    assert json.loads(json.dumps(passed)) == [options]
    for flag in (word for word in argv if word.startswith("--") and word != "--pid"):
        at = argv.index(flag)
        with pytest.raises(SystemExit):
            mounts.main([*argv[:at], *argv[at + 2 :]])


@pytest.mark.parametrize(
    ("result", "code", "out", "err"),
    [
        (2, 0, "cleared 2 leftover mounts of /m\n", ""),
        (0, 0, "nothing to clear\n", ""),
        (mounts.MountError("no"), 1, "", "no\n"),
        (OSError("refused"), 1, "", "refused\n"),
        (mounts.Result(State.HUNG, "late"), 1, "", "late\n"),
        (mounts.Result(State.RIGHT), 0, "", ""),
    ],
)
def test_the_exit_status_tells_a_unit_what_happened(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: object,
    code: int,
    out: str,
    err: str,
):
    clear = unittest.mock.Mock(side_effect=[result], __name__="clear")
    monkeypatch.setattr(mounts, "clear", clear)
    assert mounts.main(["clear", "/m", "--fstype", "t", "--source", "s"]) == code
    assert capsys.readouterr() == (out, err)
