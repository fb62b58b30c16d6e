"""The live view: what it gathers from a run's files, how it looks, and how it ends."""

import collections.abc
import dataclasses
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

from ddp import watch
from ddp.watch import braille, view

NOW = datetime.datetime(2026, 11, 23, 18, 0, tzinfo=datetime.timezone.utc)  # noqa: UP017 - Python 3.10
ROOT = pathlib.Path(__file__).resolve().parents[2]
MakeRun = collections.abc.Callable[..., pathlib.Path]


def steps(first: int, last: int, *, began: float = 0.0, per_step: float = 2.0, **more: object) -> str:
    records = (
        {"kind": "step", "step": s, "loss": 6 - s / 100, "time": began + s * per_step, **more}
        for s in range(first, last + 1)
    )
    return "".join(json.dumps(record) + "\n" for record in records)


def job(state: str = "RUNNING", **more: typing.Any) -> watch.JobView:
    view_of = watch.JobView(state, start=NOW - datetime.timedelta(minutes=10), time_limit_s=3600.0)
    return dataclasses.replace(view_of, **more)


def text_of(frame: watch.Frame, width: int = 100, height: int = 60) -> str:
    console = rich.console.Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    console.print(watch.render(frame, width, height) if height != 40 else watch.render(frame, width))
    written = typing.cast(io.StringIO, console.file).getvalue()
    return rich.text.Text.from_ansi(written).plain


def test_the_recorded_run_ended_well(recorded: pathlib.Path):
    frame = watch.gather(recorded, None, NOW)
    assert (frame.run, frame.state, frame.has_ended, frame.job_id) == ("gpt-20261123", "COMPLETED", True, "8")
    assert (frame.step, frame.steps, frame.attempts, len(frame.failures)) == (60, 60, 2, 1)
    assert (frame.loss, frame.val_loss) == (pytest.approx(3.16144, abs=1e-5), pytest.approx(3.59535, abs=1e-5))
    assert (frame.memory_mib, frame.left_s, frame.limit_left_s) == (pytest.approx(324.3, abs=0.1), None, None)
    assert frame.tokens_per_second == pytest.approx(5931.1, abs=0.1)
    assert len(frame.losses) == 60
    assert (
        frame.log[-1]
        == "[DONE] workload=gpt steps=60 checkpoint=/srv/ddp/runs/gpt-20261123/epoch-0003 elapsed_s=12.9492"
    )


def test_slurm_decides_while_the_job_is_there(recorded: pathlib.Path):
    for state, has_ended, shown in (("RUNNING", False, "RUNNING"), ("PENDING", False, "PENDING"), ("COMPLETING", False, "COMPLETING"),
                                    ("COMPLETED", True, "COMPLETED"), ("TIMEOUT", True, "COMPLETED")):  # fmt: skip
        frame = watch.gather(recorded, job(state), NOW)
        assert (frame.state, frame.has_ended) == (shown, has_ended)
    (recorded / "control" / "8.r0.outcome").unlink()
    assert watch.gather(recorded, job("NODE_FAIL", reason="NodeDown"), NOW).state == "NODE_FAIL"
    assert not watch.gather(recorded, None, NOW).has_ended


def test_a_waiting_job_says_why(make_run: MakeRun):
    frame = watch.gather(make_run(), job("PENDING", reason="Resources", start=NOW + datetime.timedelta(hours=1)), NOW)
    assert (frame.why, frame.elapsed_s, frame.limit_left_s, frame.steps) == ("Resources", None, None, None)
    assert "PENDING  Resources" in text_of(frame)


def test_the_time_left_comes_from_the_rate_of_steps_and_from_slurms_limit(make_run: MakeRun):
    folder = make_run(**{"metrics.jsonl": steps(1, 150), "config.json": '{"steps": 400}'})
    frame = watch.gather(folder, job(), NOW)
    assert (frame.steps, frame.left_s) == (400, pytest.approx(500.0))
    assert (frame.elapsed_s, frame.limit_left_s) == (600.0, 3000.0)
    shown = text_of(frame)
    assert "step 150 of 400 (38%)" in shown
    assert "left 8 m 20 s" in shown
    assert "to the time limit 50 m 00 s" in shown
    unlimited = watch.gather(folder, job(time_limit_s=None), NOW)
    assert unlimited.limit_left_s is None


def test_a_script_without_times_has_its_rate_from_what_was_seen(make_run: MakeRun):
    folder = make_run(**{"metrics.jsonl": '{"step": 10, "loss": 1}\n', "config.json": '{"steps": 100}'})
    memory = watch.Memory()
    assert watch.gather(folder, job(), NOW, memory).left_s is None
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "loss": 1}\n')
    assert watch.gather(folder, job(), NOW + datetime.timedelta(seconds=10), memory).left_s == pytest.approx(35.0)


@pytest.mark.parametrize(
    ("log", "total"),
    [("INFO:ddptrain:[TRAIN] steps=200 epoch_steps=50\n", 200),
     ("0: [default0]:INFO:ddptrain:[TRAIN] steps=200 x\n0: [default0]:INFO:ddptrain:[TRAIN] step=10/300 epoch=1 loss=2\n", 300),
     ("INFO:ddptrain:[TRAIN] epochs=3 steps_per_epoch=20 global_batch=8\n", 60), ("nothing of it\n", None)],
)  # fmt: skip
def test_the_payload_says_how_many_steps_there_are(make_run: MakeRun, log: str, total: int | None):
    folder = make_run(**{"logs/5.out": log + "noise\n" * 20_000})
    memory = watch.Memory()
    for _ in range(2):
        assert watch.gather(folder, job(), NOW, memory).steps == total


def test_with_a_memory_only_what_was_appended_is_read(make_run: MakeRun):
    folder = make_run(**{"metrics.jsonl": steps(1, 20)})
    memory = watch.Memory()
    first = watch.gather(folder, job(), NOW, memory)
    with (folder / "metrics.jsonl").open("r+") as file:
        changed = steps(1, 1).replace("5.99", "9.99")
        file.write(changed)
        file.seek(0, os.SEEK_END)
        file.write(steps(21, 22))
    second = watch.gather(folder, job(), NOW, memory)
    assert second.losses == (*first.losses, (21, 5.79), (22, 5.78))
    assert watch.gather(folder, job(), NOW).losses[0] == (1, 9.99)  # who has no memory reads it all


def test_it_shows_all_there_is(make_run: MakeRun):
    folder = make_run("run-a", **{
        "metrics.jsonl": steps(1, 50, tokens_per_second=123456.0, memory_mib=40960.0, gpu_percent=97.0, lr=0.0003)
        + '{"kind": "eval", "step": 50, "val_loss": 5.25}\n',
        "config.json": '{"steps": 100}',
        "logs/5.out": "INFO:ddptrain:[TRAIN] step=50/100 loss=5.5\nthe last line\n",
        "control/5.failures": "2026-11-23T17:01:12Z\t5.r0\tnode\tslurmd-1\tan uncorrectable ECC error\n",
        "control/5.r1.stop": "",
    })  # fmt: skip
    (folder / "logs" / "5.r0").mkdir()
    (folder / "logs" / "5.r0t1").mkdir()
    shown = text_of(watch.gather(folder, job(nodes="slurmd-[0-1]"), NOW))
    for text in ("run-a", "RUNNING", "job 5", "slurmd-[0-1]", "restarts 1", "step 50 of 100 (50%)", "loss 5.5000", "evaluation 5.2500",
                 "tokens/s 123.5k", "memory 40.0 GiB", "GPU use 97 %", "elapsed 10 m 00 s", "left 1 m 40 s",
                 "to the time limit 50 m 00 s", "5.r0 failed: an uncorrectable ECC error", "the last line"):  # fmt: skip
        assert text in shown, text
    assert any(0x2800 < ord(character) < 0x2900 for character in shown)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_it_fits_the_terminal(recorded: pathlib.Path, width: int, height: int):
    frame = dataclasses.replace(
        watch.gather(recorded, job(), NOW), log=("x" * 500,) * 12, why="y" * 300, lost_step=12345.0
    )
    lines = text_of(frame, width, height).rstrip("\n").split("\n")
    if width >= 40:
        assert {len(line) for line in lines} == {min(width, 160)}
    if (width, height) == (80, 24):
        assert len(lines) <= height


def test_hostile_words_do_not_reach_the_terminal(make_run: MakeRun):
    evil = "\x1b]0;owned\x07\x1b[2J[bold red]markup[/] [/nothing] \u202e\x00"
    folder = make_run("run\x1b[31m", **{
        "logs/5.out": f"{evil}\n\r{evil}\n", "metrics.jsonl": '{"step": 1, "loss": NaN}\n' + steps(2, 3) + '{"st',
        "control/5.failures": f"t\t{evil}\tx\ty\t{evil}\n", "summary.json": "{", "job.json": "[]",
    })  # fmt: skip
    frame = watch.gather(folder, job(reason=evil, nodes=evil), NOW)
    console = rich.console.Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    console.print(watch.render(frame, 100))
    console.print(view.line(frame), markup=False)
    written = typing.cast(io.StringIO, console.file).getvalue()
    assert "[bold red]markup[/] [/nothing]" in written
    assert not set(written) & {"\x1b", "\x07", "\x00", "\u202e"}


def test_a_curve_is_one_line_from_the_first_to_the_last_column():
    drawn = braille.draw([(0, 1.0), (1, 0.0)], 10, 4)
    assert drawn == ["⠑⢄        ", "  ⠑⠤⡀     ", "     ⠈⠒⢄  ", "        ⠑⢄"] or _is_joined(drawn)
    assert drawn[0][0] != " " and drawn[3][9] != " "
    assert braille.draw([], 3, 1) == ["   "]
    assert braille.draw([(5, 2.0)], 3, 1)[0].strip()
    assert len({len(line) for line in braille.draw([(s, (-1) ** s) for s in range(1000)], 7, 3)}) == 1


def _is_joined(drawn: list[str]) -> bool:
    """Return whether each column of characters has dots."""
    return all(any(line[column] != " " for line in drawn) for column in range(len(drawn[0])))


def test_times_are_as_people_say_them():
    assert [view.duration(value) for value in (None, 0, 59.9, 61, 3725, 100_000, -1, float("inf"), float("nan"))] == [
        "-", "0 s", "59 s", "1 m 01 s", "1 h 02 m", "1 d 3 h", "-", "-", "-",
    ]  # fmt: skip


def plain(frames: list[watch.Frame]) -> str:
    console = rich.console.Console(file=io.StringIO(), force_terminal=False, width=40)
    waiting = iter(frames)
    watch.watch(lambda: next(waiting), console, every_s=0.001)
    return typing.cast(io.StringIO, console.file).getvalue()


def test_without_a_terminal_each_change_is_a_line(recorded: pathlib.Path):
    frame = watch.gather(recorded, job(), NOW)
    frames = [dataclasses.replace(frame, step=1), dataclasses.replace(frame, step=1, left_s=5.0), dataclasses.replace(frame, step=2, failures=()),
              dataclasses.replace(frame, state="COMPLETED", has_ended=True)]  # fmt: skip
    lines = plain(frames).splitlines()
    assert (
        lines[1]
        == "18:00:00 gpt-20261123, RUNNING, step 2/60, loss 3.1614, evaluation 3.5953, 5931 tokens/s, attempt 2"
    )
    assert len(lines) == 3
    assert "COMPLETED" in lines[2] and "1 failed: the loss is nan" in lines[2]


def test_ctrl_c_ends_it_with_no_output():
    def read() -> watch.Frame:
        raise KeyboardInterrupt

    for is_terminal in (True, False):
        watch.watch(read, rich.console.Console(file=io.StringIO(), force_terminal=is_terminal))


PROGRAM = """
import datetime, pathlib, sys
import rich.console
from ddp import watch
folder, memory = pathlib.Path(sys.argv[1]), watch.Memory()
def read():
    now = datetime.datetime.now(datetime.timezone.utc)
    return watch.gather(folder, None if (folder / "summary.json").exists() else watch.JobView("RUNNING"), now, memory)
watch.watch(read, rich.console.Console(), every_s=0.05)
print("over")
"""


class Terminal:
    """A program on a terminal of 100 columns and 40 lines."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT / "lib"), "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)], stdin=other, stdout=other, stderr=other, env=env, start_new_session=True
        )  # fmt: skip
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
    folder = make_run(**{"metrics.jsonl": steps(1, 10), "config.json": '{"steps": 40}'})
    terminal = Terminal(folder)
    try:
        terminal.until("step 10 of 40")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(steps(11, 40))
        terminal.until("step 40 of 40 (100%)")
        assert "over" not in terminal.written
        (folder / "summary.json").write_text('{"state": "done"}')
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
