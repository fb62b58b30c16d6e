"""A job that Slurm warns or ends: who ended it, who is asked to stop, and whether it continues."""

import json
import os
import pathlib
import signal
import subprocess
import time
import typing

import pytest
from job_specs import job_files, make
from script_texts import ENDS, WAITS, stop, wait_for

from batch_host import Node
from ddp.node import slurm_calls, spec, time_limit

TRAINS = 'touch "$NOTES/started"; for i in $(seq 1800); do [ -e "$NOTES/end" ] && break; /bin/sleep 0.05; done; '


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Node:
    return Node(tmp_path, tmp_path / "shared" / "runs" / "first")


def files(node: Node, **more: typing.Any) -> dict[str, str]:
    return job_files(make(node.run_dir, **more))


def outcome(node: Node, attempt: str = "12.r0") -> dict[str, typing.Any]:
    return json.loads((node.run_dir / "control" / f"{attempt}.outcome").read_text())


def ended(node: Node, code: int, given: dict[str, str], **more: typing.Any) -> tuple[int, str]:
    """Run a job that Slurm ends: its ranks end with this code."""
    node.add("srun", TRAINS + f"exit {code}")
    process = node.start(given, **more)
    wait_for(node.notes / "started")
    process.send_signal(signal.SIGTERM)
    (node.notes / "end").touch()
    return node.finish(process)


LIMIT: dict[str, typing.Any] = {"STATE": "COMPLETING", "REASON": "TimeLimit"}


@pytest.mark.parametrize("code", [0, 1, 143])
@pytest.mark.parametrize(
    ("slurm_says", "cause", "is_requeued"),
    [
        (LIMIT, "limit", True),
        (
            {"STATE": "COMPLETING", "PREEMPTED": "2026-11-29T12:00:00"},
            "preemption",
            True,
        ),  # PreemptMode=CANCEL
        (
            {"STATE": "COMPLETING", "PREEMPTED": "2026-11-29T12:00:00", "RESTARTS": "1"},
            "preemption",
            False,
        ),
        ({"STATE": "COMPLETING", "RESTARTS": "1"}, "requeue", False),
        ({"STATE": "COMPLETING", "REASON": "NodeDown", "RESTARTS": "1"}, "failure", False),
        ({"STATE": "COMPLETING"}, "cancelled", False),
    ],
)
def test_the_supervisor_knows_why_slurm_ends_its_job(
    node: Node, code: int, slurm_says: dict[str, str], cause: str, is_requeued: bool
):
    found, output = ended(node, code, files(node), **slurm_says)
    assert node.requeued() == is_requeued, output
    is_cancelled = cause == "cancelled"
    assert outcome(node)["outcome"] == ("cancelled" if is_cancelled else "preempted")
    assert outcome(node)["cause"] == cause
    assert found == (code if is_cancelled else 75)
    assert "Slurm ends this job: " in output


def test_a_run_that_is_done_is_not_requeued_at_its_limit_by_its_outcome(node: Node):
    node.add("srun", WAITS + ENDS % "done")
    code, _ = stop(node, files(node), signal.SIGTERM, **LIMIT)
    assert code == 0
    assert outcome(node)["outcome"] == "done"


def test_a_limit_is_reached_at_most_so_often(node: Node):
    code, output = ended(node, 143, files(node, max_requeues=2), SLURM_RESTART_COUNT="2", **LIMIT)
    assert code == 75
    assert not node.requeued()
    assert "[REQUEUE] not again: max-requeues is 2" in output


@pytest.mark.parametrize(
    ("code", "is_requeued"),
    [
        (0, False),
        (1, True),
    ],  # it came to its end, and knows nothing of the file; it may have followed the file
)
def test_a_program_that_only_the_file_asked(node: Node, code: int, is_requeued: bool):
    node.add("srun", WAITS + f"exit {code}")
    stop(node, files(node), signal.SIGUSR1)
    assert node.requeued() == is_requeued
    assert outcome(node)["outcome"] == ("preempted" if is_requeued else "done")


@pytest.mark.parametrize("code", [0, 1])
def test_ranks_that_end_in_the_grace_time_of_a_preemption_have_not_failed(node: Node, code: int):
    """Slurm then sends TERM to the job's steps, and none to its script."""
    node.add("srun", f"exit {code}")
    found, output = node.run(files(node), PREEMPTED="2026-11-29T12:00:00")
    assert (found, outcome(node)) == (
        75,
        {"outcome": "preempted", "exit_code": code, "cause": "preemption"},
    ), output
    assert node.requeued()


def test_a_stop_signal_that_reaches_nobody_is_logged(node: Node):
    node.add("srun", WAITS + "exit 0")
    _, output = stop(node, files(node, stop_signal="USR2"), signal.SIGUSR1)
    assert "USR2 did not reach the ranks on slurmd-0" in output
    assert not node.requeued()


JOINS = (
    "import os, socket; port, secret = os.environ['LIFELINE'].split(); "
    "line = socket.create_connection(('127.0.0.1', int(port))); "
    "line.sendall((secret + ' slurmd-0' + chr(10)).encode()); assert line.recv(7) == b'joined' + bytes([10]); "
    "open(os.environ['NOTES'] + '/started', 'w').close(); "
    "open(os.environ['NOTES'] + '/got', 'wb').write(line.recv(100))"
)


@pytest.mark.parametrize(("name", "number"), [("TERM", 15), ("USR1", 10), ("USR2", 12), ("INT", 2)])
def test_the_stop_signal_reaches_the_ranks_and_their_end_is_a_preemption(
    node: Node, name: str, number: int
):
    node.add("srun", f'/usr/bin/python3 -c "{JOINS}"')
    code, output = stop(node, files(node, stop_signal=name), signal.SIGUSR1)
    assert (node.notes / "got").read_text() == f"signal {number}\n"
    assert f"{name} was sent to the ranks on slurmd-0" in output
    assert (code, outcome(node)["outcome"]) == (75, "preempted"), "though it ended with 0"
    assert node.requeued()


@pytest.mark.parametrize(("tracked_by", "is_sent"), [("linuxproc", False), ("cgroup", True)])
def test_term_reaches_the_ranks_where_slurm_signals_only_the_tasks(
    node: Node, tracked_by: str, is_sent: bool
):
    node.add("srun", f'/usr/bin/python3 -c "{JOINS}" & wait $!; ' if is_sent else f"{TRAINS}")
    process = node.start(files(node), TRACKED_BY=tracked_by, **LIMIT)
    wait_for(node.notes / "started")
    process.send_signal(signal.SIGTERM)
    (node.notes / "end").touch()
    _, output = node.finish(process)
    assert ("TERM was sent to the ranks on slurmd-0" in output) == is_sent


@pytest.mark.parametrize(
    ("left_s", "preempted", "is_written"),
    [(120, "N/A", True), (120, "2026-11-29T19:00:00", False), (3600, "N/A", False)],
)
def test_a_warning_before_the_time_limit_tells_the_ranks_when_it_ends(
    node: Node, left_s: int, preempted: str, is_written: bool
):
    """Another job, or an operator, may want the nodes at once."""
    node.add("srun", TRAINS)
    end = str(int(time.time()) + left_s)
    process = node.start(files(node), SLURM_JOB_END_TIME=end, PREEMPTED=preempted)
    wait_for(node.notes / "started")
    process.send_signal(signal.SIGUSR1)
    asked = node.run_dir / "control" / "12.r0.stop"
    wait_for(asked)
    (node.notes / "end").touch()
    node.finish(process)
    assert asked.read_text().strip() == (end if is_written else "")


class TestProgress:
    """Two starts of a job that reach their limit."""

    @pytest.fixture
    def twice(self, node: Node) -> typing.Callable[..., str]:
        def run(first: str = "", second: str = "", **more: typing.Any) -> str:
            output = ""
            for number, text in enumerate((first, second)):
                for name in ("started", "end", "scontrol"):
                    (node.notes / name).unlink(missing_ok=True)
                node.add("srun", f"{text}\n{TRAINS} exit 143")
                end: dict[str, typing.Any] = {"SLURM_JOB_END_TIME": str(int(time.time()))}
                process = node.start(
                    files(node, **more), SLURM_RESTART_COUNT=str(number), **LIMIT, **end
                )
                wait_for(node.notes / "started")
                process.send_signal(signal.SIGTERM)
                (node.notes / "end").touch()
                output = node.finish(process)[1]
                assert number or node.requeued(), "the first limit is no reason to give up"
            return output

        return run

    def test_without_progress_the_second_limit_is_the_last(
        self, node: Node, twice: typing.Callable[..., str]
    ):
        output = twice(
            first='echo x > "$RUN_DIR/train.log"', second='echo x >> "$RUN_DIR/train.log"'
        )
        assert not node.requeued()
        assert (
            "[REQUEUE] not again: 2 attempts reached the time limit without progress (no file below "
            in output
        )
        assert outcome(node, "12.r1")["outcome"] == "failed"
        failures = (node.run_dir / "control" / "12.failures").read_text()
        assert "2 attempts reached the time limit without progress" in failures

    @pytest.mark.parametrize("is_first", [True, False])
    def test_a_file_in_the_run_s_folder_is_progress(
        self, node: Node, twice: typing.Callable[..., str], is_first: bool
    ):
        saves = 'echo x > "$RUN_DIR/checkpoint.pt"'
        twice(**{"first" if is_first else "second": saves})
        assert node.requeued()

    def test_a_file_in_a_folder_of_the_command_s_is_progress(
        self, node: Node, tmp_path: pathlib.Path, twice: typing.Callable[..., str]
    ):
        (tmp_path / "out").mkdir()
        words = (spec.Word("train.py"), spec.Word(f"--output={tmp_path}/out"))
        twice(second=f"echo x > {tmp_path}/out/model.bin", command=words)
        assert node.requeued()

    def test_an_attempt_that_began_later_is_progress(
        self, node: Node, twice: typing.Callable[..., str]
    ):
        def logs(*steps: int) -> str:
            return "".join(
                f"echo '{{\"step\": {step}}}' >> $RUN_DIR/metrics.jsonl\n" for step in steps
            )

        twice(first=logs(1, 2, 3), second=logs(3, 4))
        assert node.requeued()
        for path in (node.run_dir / "metrics.jsonl", node.run_dir / "control" / "12.limits"):
            path.unlink()
        twice(first=logs(1, 2), second=logs(1, 2, 3))
        assert not node.requeued(), "it began at the same step"


def test_a_search_that_takes_too_long_counts_as_progress(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "old.pt").touch()
    os.utime(tmp_path / "old.pt", (1, 1))
    assert not time_limit.has_saved(str(tmp_path), [str(tmp_path)], since=100.0)
    monkeypatch.setattr(time_limit, "SEARCHING_S", -1.0)
    assert time_limit.has_saved(str(tmp_path), [str(tmp_path)], since=100.0)


@pytest.mark.parametrize(
    "text", ["", "x", "[]", "{}", '{"since": "x", "step": 1, "attempts": 1}', "1"]
)
def test_a_damaged_mark_is_none(text: str):
    assert time_limit.parse(text) is None


@pytest.mark.parametrize(
    ("text", "is_every"),
    [
        ("ConstrainCores=yes\nsignalchildrenprocesses=yes\n", True),
        ("#SignalChildrenProcesses=yes\n", False),
        (None, False),
    ],
)
def test_cgroup_conf_says_whom_slurm_signals(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str | None, is_every: bool
):
    if text is not None:
        (tmp_path / "cgroup.conf").write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setattr(slurm_calls, "CONF_FOLDERS", ())
    shown = subprocess.CompletedProcess((), 0, "ProctrackType           = proctrack/cgroup\n", "")
    monkeypatch.setattr(slurm_calls, "call", lambda *_: shown)
    assert slurm_calls.signals_every_process() == is_every


def test_a_silent_controller_leaves_the_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slurm_calls, "show_job", lambda _: {})
    monkeypatch.setattr(slurm_calls, "pause", lambda _: None)
    assert slurm_calls.ending_of("12", 0, time.time() - 1).cause == "limit"
    assert slurm_calls.ending_of("12", 0, time.time() + 60).cause == "cancelled"
