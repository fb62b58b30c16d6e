"""The live view: what it gathers from a run's files, how it looks, and how it ends."""

import collections.abc
import datetime
import fcntl
import io
import json
import os
import pathlib
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import typing

import pytest
import rich.console
import rich.text
import run_jobs

from ddp.actions import watch
from ddp.run import control, folder, state
from ddp.slurm import jobs

NOW = datetime.datetime(2026, 11, 23, 18, 0, tzinfo=datetime.timezone.utc)  # noqa: UP017 - Python 3.10
ROOT = pathlib.Path(__file__).resolve().parents[2]
MakeRun = collections.abc.Callable[..., pathlib.Path]
job = run_jobs.make


def steps(first: int, last: int, *, per_step: float = 2.0, **more: object) -> str:
    records = (
        {"kind": "step", "step": s, "loss": 6 - s / 100, "time": s * per_step, **more} for s in range(first, last + 1)
    )
    return "".join(json.dumps(record) + "\n" for record in records)


def frame(path: pathlib.Path, known: jobs.Job | None = None, rate: float | None = None) -> watch.Frame:
    run = state.with_job(folder.read(path), known)
    return watch.Frame(run, folder.last_lines(run), rate)


def text_of(now: watch.Frame, width: int = 100, height: int = 60) -> str:
    console = rich.console.Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    console.print(watch.render(now, width, height))
    return rich.text.Text.from_ansi(typing.cast(io.StringIO, console.file).getvalue()).plain


def test_the_recorded_run_ended_well(recorded: pathlib.Path):
    now = frame(recorded)
    record = now.record()
    assert (record["run"], record["state"], now.has_ended, record["job_id"]) == ("gpt-20261123", "COMPLETED", True, 8)
    assert (record["step"], record["total_steps"], record["attempts"]) == (60, 60, 2)
    assert (record["loss"], record["val_loss"]) == (pytest.approx(3.16144, abs=1e-5), pytest.approx(3.59535, abs=1e-5))
    assert (record["left_s"], record["limit_left_s"], len(typing.cast("list[str]", record["failures"]))) == (
        None,
        None,
        1,
    )
    assert now.log[-1].endswith("checkpoint=/srv/ddp/runs/gpt-20261123/epoch-0003 elapsed_s=12.9492")


def test_an_active_job_keeps_the_view_open(recorded: pathlib.Path):
    for word, has_ended in (("RUNNING", False), ("PENDING", False), ("COMPLETING", False), ("COMPLETED", True)):
        assert (str(frame(recorded, job(word)).run.state), frame(recorded, job(word)).has_ended) == (word, has_ended)
    (recorded / "control" / "8.r0.outcome").unlink()
    assert frame(recorded, job("NODE_FAIL")).run.state == "NODE_FAIL"


def test_a_waiting_job_has_its_reason(make_run: MakeRun):
    now = frame(make_run(), job("PENDING", reason="Resources"))
    assert (now.run.why, now.elapsed_s, now.limit_left_s, now.run.total_steps) == ("Resources", None, None, None)
    assert "PENDING  Resources" in text_of(now)


def test_the_time_left_comes_from_the_rate_of_steps_and_from_slurms_limit(make_run: MakeRun):
    path = make_run(**{"metrics.jsonl": steps(1, 150), "config.json": '{"steps": 400}'})
    now = frame(path, job())
    assert (now.run.total_steps, now.left_s) == (400, pytest.approx(500.0))
    assert (now.elapsed_s, now.limit_left_s) == (600.0, 3000.0)
    shown = text_of(now)
    for text in ("step 150 of 400 (38%)", "left 8 m 20 s", "to the time limit 50 m 00 s"):
        assert text in shown
    assert frame(path, job(time_limit="UNLIMITED")).limit_left_s is None
    (path / "metrics.jsonl").write_text('{"step": 30, "loss": 1}\n')
    assert frame(path, job(), rate=2.0).left_s == pytest.approx(185.0), "a script that writes no times"


def test_it_shows_everything(make_run: MakeRun):
    path = make_run(
        "run-a",
        **{
            "job.json": '{"job_id": 5}',
            "metrics.jsonl": steps(
                1, 50, tokens_per_second=123456.0, memory_mib=40960.0, gpu_percent=97.0, lr=0.0003, total_steps=100
            )
            + '{"kind": "eval", "step": 50, "val_loss": 5.25}\n',
            "logs/5.out": "the last line\n",
            "control/5.failures": "2026-11-23T17:01:12Z\t5.r0\tnode\tslurmd-1\tan uncorrectable ECC error\n",
        },
    )
    (path / "logs" / "5.r0").mkdir()
    (path / "logs" / "5.r0t1").mkdir()
    shown = text_of(frame(path, job(nodes="slurmd-[0-1]")))
    for text in (
        "run-a",
        "RUNNING",
        "job 5",
        "slurmd-[0-1]",
        "restarts 1",
        "step 50 of 100 (50%)",
        "loss 5.5000",
        "evaluation 5.2500",
        "tokens/s 123.5k",
        "memory 40.0 GiB",
        "GPU use 97 %",
        "elapsed 10 m 00 s",
        "left 1 m 40 s",
        "to the time limit 50 m 00 s",
        "5.r0 failed: an uncorrectable ECC error",
        "the last line",
    ):
        assert text in shown, text
    assert any(0x2800 < ord(character) < 0x2900 for character in shown)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_it_fits_the_terminal(recorded: pathlib.Path, width: int, height: int):
    now = watch.Frame(state.with_job(folder.read(recorded), job("PENDING", reason="y" * 300)), ["x" * 500] * 12)
    lines = text_of(now, width, height).rstrip("\n").split("\n")
    if width >= 40:
        assert {len(line) for line in lines} == {min(width, 160)}
    if (width, height) == (80, 24):
        assert len(lines) <= height


def test_hostile_words_do_not_reach_the_terminal(make_run: MakeRun):
    evil = "\x1b]0;owned\x07\x1b[2J[bold red]markup[/] [/nothing] \u202e\x00"
    path = make_run(
        "run\x1b[31m",
        **{
            "logs/5.out": f"{evil}\n\r{evil}\n",
            "metrics.jsonl": '{"step": 1, "loss": NaN}\n' + steps(2, 3) + '{"st',
            "control/5.failures": f"t\t{evil}\tx\ty\t{evil}\n",
            "summary.json": "{",
            "job.json": "[]",
        },
    )
    now = frame(path, job("PENDING", reason=evil, nodes=evil))
    now.log = [watch.reading.printable(line) for line in now.log]
    console = rich.console.Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    console.print(watch.render(now, 100))
    console.print(watch.line(now), markup=False)
    written = typing.cast(io.StringIO, console.file).getvalue()
    assert "[bold red]markup[/] [/nothing]" in written
    assert not set(written) & {"\x1b", "\x07", "\x00", "\u202e"}


def test_times_are_as_people_write_them():
    assert [watch.duration(value) for value in (None, 0, 59.9, 61, 3725, 100_000, -1, float("inf"), float("nan"))] == [
        "-",
        "0 s",
        "59 s",
        "1 m 01 s",
        "1 h 02 m",
        "1 d 3 h",
        "-",
        "-",
        "-",
    ]


def test_without_a_terminal_each_change_is_a_line(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch):
    path = make_run(**{"job.json": '{"job_id": 5}', "metrics.jsonl": steps(1, 2, total_steps=3)})
    running = frame(path, job())
    later = watch.Frame(running.run, steps_per_second=9.0)
    (path / "control" / "5.r0.outcome").write_text('{"outcome": "failed", "error": "boom"}')
    frames = iter([running, later, frame(path)])
    monkeypatch.setattr(control, "now", lambda: NOW)
    console = rich.console.Console(file=io.StringIO(), force_terminal=False, width=40)
    watch.follow(lambda: next(frames), console, every_s=0.001)
    lines = typing.cast(io.StringIO, console.file).getvalue().splitlines()
    assert lines == [
        "18:00:00 run, RUNNING, step 2/3, loss 5.9800",
        "18:00:00 run, FAILED (boom), step 2/3, loss 5.9800",
    ]


def test_ctrl_c_ends_it_with_no_output():
    def read() -> watch.Frame:
        raise KeyboardInterrupt

    for is_terminal in (True, False):
        watch.follow(read, rich.console.Console(file=io.StringIO(), force_terminal=is_terminal))


PROGRAM = """
import pathlib, sys
import rich.console
import run_jobs
from ddp.actions import watch
from ddp.run import folder, metrics, state
path = pathlib.Path(sys.argv[1])
kept = metrics.Reader(path / folder.METRICS)
def read():
    known = None if (path / "summary.json").exists() else run_jobs.make()
    return watch.Frame(state.with_job(folder.read(path, reader=kept), known))
watch.follow(read, rich.console.Console(), every_s=0.05)
print("over")
"""


class Terminal:
    """A program on a terminal of 100 columns and 40 lines."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        env = {
            **os.environ,
            "TERM": "xterm-256color",
            "PYTHONPATH": f"{ROOT / 'lib'}:{ROOT / 'tests' / 'ddp'}",
            "LC_ALL": "C.UTF-8",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)],
            stdin=other,
            stdout=other,
            stderr=other,
            env=env,
            start_new_session=True,
        )
        os.close(other)
        self.written = ""

    def until(self, text: str) -> None:
        """Wait until the program has written this."""
        deadline = time.monotonic() + 60
        while text not in self.written:
            ready, _, _ = select.select([self.end], [], [], max(0, deadline - time.monotonic()))
            try:
                data = os.read(self.end, 65536) if ready else b""
            except OSError:  # EIO: the program has ended
                data = b""
            assert data, f"no {text!r} in:\n{self.written}"
            self.written += data.decode(errors="replace")

    def close(self) -> None:
        """End the program where it has not."""
        self.process.kill()
        self.process.wait(20)
        os.close(self.end)


def test_on_a_terminal_it_follows_the_run_to_its_end(make_run: MakeRun):
    path = make_run(**{"metrics.jsonl": steps(1, 10), "config.json": '{"steps": 40}'})
    terminal = Terminal(path)
    try:
        terminal.until("step 10 of 40")
        with (path / "metrics.jsonl").open("a") as file:
            file.write(steps(11, 40))
        terminal.until("step 40 of 40 (100%)")
        assert "over" not in terminal.written
        (path / "control" / "5.r0.outcome").write_text('{"outcome": "done"}')
        (path / "summary.json").write_text('{"state": "done"}')
        terminal.until("COMPLETED")
        terminal.until("over")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()


def test_ctrl_c_on_a_terminal_leaves_it_as_it_was(make_run: MakeRun):
    terminal = Terminal(make_run(**{"metrics.jsonl": steps(1, 10)}))
    try:
        terminal.until("step 10")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("over")
        assert terminal.process.wait(20) == 0
        assert (
            terminal.written.rfind("\x1b[?25h") > terminal.written.rfind("\x1b[?25l") >= 0
        )  # the cursor is there again
        assert "Traceback" not in terminal.written
    finally:
        terminal.close()
