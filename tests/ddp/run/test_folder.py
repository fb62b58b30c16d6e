"""A run's folder: written whole or not at all, read within bounds, with any content."""

import collections.abc
import json
import os
import pathlib
import stat

import pytest

from ddp.host.files import RefusedError
from ddp.node import small_files
from ddp.run import creation, folder, logs
from ddp.run.model import State

MakeRun = collections.abc.Callable[..., pathlib.Path]


@pytest.fixture
def run(make_run: MakeRun) -> pathlib.Path:
    return make_run("first", **{"job.json": '{"job_id": 12, "kind": "gpt"}'})


def rank_log(path: pathlib.Path, node: int, local: int, text: str, attempt: str) -> None:
    log = (
        path
        / "logs"
        / attempt
        / f"node-{node}"
        / f"{attempt}_x"
        / "attempt_0"
        / str(local)
        / "stderr.log"
    )
    log.parent.mkdir(parents=True)
    log.write_text(text)


def test_a_run_is_made_whole_and_only_once(tmp_path: pathlib.Path):
    path, victim = tmp_path / "first", tmp_path / "victim"
    assert creation.create(path, {"job.sbatch": "#!"}, again=False) is None
    assert sorted(one.name for one in path.iterdir()) == ["control", "job.sbatch", "logs"]
    assert stat.S_IMODE((path / "job.sbatch").stat().st_mode) == 0o644
    with pytest.raises(RefusedError, match="exists already"):
        creation.create(path, {}, again=False)
    victim.write_text("precious")
    (path / "args").symlink_to(victim)
    former = creation.create(path, {"job.sbatch": "#!2", "args": "new"}, again=True)
    assert ((path / "job.sbatch").read_text(), (path / "args").read_text()) == ("#!2", "new")
    assert victim.read_text() == "precious", "a link is replaced, not followed"
    creation.undo(path, {**(former or {}), "args": None})
    assert (path / "job.sbatch").read_text() == "#!"
    assert not (path / "args").exists()


def test_files_that_stay_the_same_are_not_replaced_under_a_job(tmp_path: pathlib.Path):
    path = tmp_path / "first"
    creation.create(path, {"job.sbatch": "a"}, program=b"same", again=False)
    program = path / "program" / "ddp.pyz"
    inode = program.stat().st_ino
    former = creation.create(path, {"job.sbatch": "b"}, program=b"same", again=True)
    assert (path / "job.sbatch").read_text() == "b"
    assert program.stat().st_ino == inode
    creation.create(path, {"job.sbatch": "b"}, program=b"\xff a newer one", again=True)
    creation.undo(path, former)
    assert ((path / "job.sbatch").read_text(), program.read_bytes()) == ("a", b"same")


def test_only_a_run_that_never_started_is_removed(run: pathlib.Path, make_run: MakeRun):
    used, kept = make_run("used", **{"logs/12.out": "x"}), make_run("kept", **{"metrics.jsonl": ""})
    creation.remove(run, used, kept)
    assert [path.exists() for path in (run, used, kept)] == [False, True, True]


def test_runs_are_found_by_their_jobs(tmp_path: pathlib.Path, make_run: MakeRun):
    make_run("old", **{"job.json": '{"job_id": 3}'})
    newest = make_run("new", **{"job.json": '{"job_id": 7}', "logs/5.out": ""})
    os.utime(newest / "job.json", (2_000_000_000, 2_000_000_000))
    (tmp_path / "empty").mkdir()
    (tmp_path / "stray").write_text("")
    assert folder.names(tmp_path) == ["new", "old"]
    found = [folder.find_job(tmp_path, job_id) for job_id in (3, 5, 99)]
    assert found == ["old", "new", None], "5 is an earlier job of that run"
    for name, at in (("new", 1_000), ("old", 2_000)):  # of controllers before this one
        (tmp_path / name / "logs" / "8.out").write_text("")
        os.utime(tmp_path / name / "logs" / "8.out", (at, at))
    assert folder.find_job(tmp_path, 8) == "old"


def test_a_run_full_of_rubbish_is_unknown(run: pathlib.Path):
    (run / "job.json").write_text("[1]")
    (run / "summary.json").symlink_to("/etc/hostname")
    os.mkfifo(run / "metrics.jsonl")
    (run / "control" / "12.r0.outcome").write_bytes(b"\xff\x00")
    found = folder.read(run)
    assert (found.record, found.summary, found.metrics.num_records, found.state) == (
        {},
        {},
        0,
        State.UNKNOWN,
    )


def test_a_log_is_bounded(run: pathlib.Path):
    (run / "logs" / "12.out").write_text("".join(f"line {i}\n" for i in range(200000)))
    assert logs.read_log(run, 12, lines=3, rank=None)[1] == [
        "line 199997",
        "line 199998",
        "line 199999",
    ]
    assert (
        sum(map(len, logs.read_log(run, 12, lines=100000, rank=None)[1]))
        < small_files.MAX_TAIL_BYTES
    )


def test_a_log_that_is_no_file_is_not_read(run: pathlib.Path):
    (run / "logs" / "12.out").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        logs.read_log(run, 12, lines=3, rank=None)
    (run / "logs" / "12.out").unlink()
    os.mkfifo(run / "logs" / "12.out")
    with pytest.raises(OSError, match="not a regular file"):
        logs.read_log(run, 12, lines=3, rank=None)


def test_a_ranks_log_is_that_of_the_last_attempt(run: pathlib.Path):
    for node, local, text, attempt in (
        (1, 0, "old\n", "12.r0"),
        (1, 0, "new\n", "12.r10"),
        (0, 1, "other\n", "12.r10"),
    ):
        rank_log(run, node, local, text, attempt)
    (run / "job.json").write_text('{"job_id": 12, "ranks_per_node": 2}')
    assert logs.read_log(run, 12, lines=5, rank=2)[1] == ["new"]
    assert logs.read_log(run, 12, lines=5, rank=1)[1] == ["other"]
    with pytest.raises(FileNotFoundError):
        logs.read_log(run, 12, lines=5, rank=0)


@pytest.mark.parametrize("sweep", [None, "lrs"])
def test_the_paths_of_the_copy_are_shown_as_the_users_own(make_run: MakeRun, sweep: str | None):
    """In watch, show and the report; the runs of a sweep share one copy."""
    code = make_run().parent / (sweep or "run") / "code" / "train.py"
    record = {"job_id": 7, "code": {"folder": "code", "origin": "/home/ann/net"}} | (
        {"sweep": sweep} if sweep else {}
    )
    failed = f"2026-11-20T00:00:00Z\t7.r0\tprogram\tn1\tOSError: {code}"
    texts = {"job.json": json.dumps(record), "control/job": "7", "control/7.failures": failed}
    run = folder.read(make_run(**texts, **{"logs/7.out": f'  File "{code}", line 3\n'}))
    assert (
        [one.reason for one in run.failures]
        == [run.attempts[0].why]
        == ["OSError: /home/ann/net/train.py"]
    )
    assert logs.last_lines(run) == ['  File "/home/ann/net/train.py", line 3']
