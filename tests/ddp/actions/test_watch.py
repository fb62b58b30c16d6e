"""The live view: its data from a run's files, its look, and its end."""

import collections.abc
import io
import json
import os
import pathlib
import typing

import pytest
import rich.console
import rich.text
import run_jobs
from cluster import no_pause

from ddp.actions import watch
from ddp.host import waits
from ddp.run import folder, logs, state, untrusted
from ddp.slurm import jobs
from ddp.view import live

MakeRun = collections.abc.Callable[..., pathlib.Path]
job = run_jobs.make
SLOW = {"rank": 3, "host": "slurmd-1", "times": 1.83}


def steps(first: int, last: int, *, per_step: float = 2.0, **more: object) -> str:
    records = (
        {"kind": "step", "step": s, "loss": 6 - s / 100, "time": s * per_step, **more}
        for s in range(first, last + 1)
    )
    return "".join(json.dumps(record) + "\n" for record in records)


def frame(path: pathlib.Path, known: jobs.Job | None = None) -> live.Frame:
    run = state.with_job(folder.read(path), known)
    return live.Frame(run, logs.last_lines(run))


def text_of(now: live.Frame, width: int = 100, height: int = 60) -> str:
    console = rich.console.Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    console.print(live.render(now, width, height))
    return rich.text.Text.from_ansi(typing.cast(io.StringIO, console.file).getvalue()).plain


def test_the_recorded_run_ended_well(recorded: pathlib.Path):
    now = frame(recorded)
    record = watch.record(now)
    assert (record["run"], record["state"], now.has_ended, record["job_id"]) == (
        "gpt-20261123",
        "COMPLETED",
        True,
        8,
    )
    assert (record["step"], record["total_steps"], record["attempts"]) == (60, 60, 2)
    assert (record["loss"], record["val_loss"]) == (
        pytest.approx(3.16144, abs=1e-5),
        pytest.approx(3.59535, abs=1e-5),
    )
    assert (
        record["left_s"],
        record["limit_left_s"],
        len(typing.cast("list[str]", record["failures"])),
    ) == (None, None, 1)
    shown = text_of(now)
    assert "\u2502 [DONE] workload=gpt steps=60 checkpoint=" in shown, (
        "without 0: [default0]:INFO:ddptrain:"
    )
    assert now.log[-1].endswith(
        "checkpoint=/srv/ddp/runs/gpt-20261123/epoch-0003 elapsed_s=12.9492"
    )


@pytest.mark.parametrize(
    ("percents", "words"),
    [
        ({"a": "40\n"}, ": 40%"),
        ({"a": "40\n", "b": "7\n"}, " on 2 nodes: 7%"),
        ({"being-written": ""}, ": 0%"),
    ],
)
def test_nodes_that_unpack_the_environment_show_how_far_the_last_is(
    recorded: pathlib.Path, percents: dict[str, str], words: str
):
    files = [recorded / "control" / f"{node}.unpacking" for node in percents]
    for path, text in zip(files, percents.values(), strict=True):
        path.write_text(text)
    now = frame(recorded, job("RUNNING"))
    assert watch.record(now)["beginning"] == f"unpacking the environment{words}"
    assert f"unpacking the environment{words}" in text_of(now)
    for path in files:
        os.utime(path, (1, 1))
    assert watch.record(frame(recorded, job("RUNNING")))["beginning"] is None, (
        "left by a node that failed"
    )


def test_an_active_job_keeps_the_view_open(recorded: pathlib.Path):
    for word, has_ended in (
        ("RUNNING", False),
        ("PENDING", False),
        ("COMPLETING", False),
        ("COMPLETED", True),
    ):
        assert (
            str(frame(recorded, job(word)).run.state),
            frame(recorded, job(word)).has_ended,
        ) == (word, has_ended)
    (recorded / "control" / "8.r0.outcome").unlink()
    assert frame(recorded, job("NODE_FAIL")).run.state == "NODE_FAIL"


def test_a_waiting_job_has_its_reason(make_run: MakeRun):
    now = frame(make_run(), job("PENDING", reason="Resources"))
    assert (now.run.why, now.elapsed_s, now.limit_left_s, now.run.total_steps) == (
        "Resources",
        None,
        None,
        None,
    )
    assert "PENDING  Resources" in text_of(now)


def test_the_time_left_comes_from_the_rate_of_steps_and_from_slurms_limit(make_run: MakeRun):
    path = make_run(**{"metrics.jsonl": steps(1, 150), "config.json": '{"steps": 400}'})
    now = frame(path, job())
    assert (now.run.total_steps, now.left_s) == (400, pytest.approx(500.0))
    assert (now.elapsed_s, now.limit_left_s) == (600.0, 3000.0)
    shown = text_of(now)
    for text in ("step 150 of 400 (38%)", "left 00:08:20", "to the time limit 00:50:00"):
        assert text in shown
    assert frame(path, job(time_limit="UNLIMITED")).limit_left_s is None


def test_it_shows_everything(make_run: MakeRun):
    path = make_run(
        "run-a",
        **{
            "job.json": '{"job_id": 5}',
            "metrics.jsonl": steps(
                1,
                50,
                tokens_per_second=123456.0,
                memory_mib=40960.0,
                accuracy=0.75,
                total_steps=100,
                slowest=SLOW,
                sync_share=0.125,
                sync_bytes_per_step=4e6,
                sites="slurmd-0 slurmd-1",
            )
            + '{"kind": "eval", "step": 50, "val_loss": 5.25}\n',
            "logs/5.out": "1: [rank1]: the last line\n",
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
        "loss 5.5",
        "val_loss 5.25",
        "tokens_per_second 123.5k",
        "memory_mib 40.96k",
        "accuracy 0.75",
        "sync_share 0.125",
        "sync_bytes_per_step 4M",
        "site 0: slurmd-0; site 1: slurmd-1",
        "rank 3 on slurmd-1 takes 1.83 times the ranks' median",
        "elapsed 00:10:00",
        "left 00:01:40",
        "to the time limit 00:50:00",
        "5.r0 failed: an uncorrectable ECC error",
        "1: [rank1]: the last line",
    ):
        assert text in shown, text
    assert any(0x2800 < ord(character) < 0x2900 for character in shown)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_it_fits_the_terminal(recorded: pathlib.Path, width: int, height: int):
    now = live.Frame(
        state.with_job(folder.read(recorded), job("PENDING", reason="y" * 300)), ["x" * 500] * 12
    )
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
    now.log = [untrusted.printable(line) for line in now.log]
    console = rich.console.Console(
        file=io.StringIO(), width=100, force_terminal=True, color_system=None
    )
    console.print(live.render(now, 100))
    written = typing.cast(io.StringIO, console.file).getvalue()
    assert "[bold red]markup[/] [/nothing]" in written
    assert not set(written) & {"\x1b", "\x07", "\x00", "\u202e"}


def test_without_a_terminal_each_change_is_an_object(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
):
    path = make_run(**{"job.json": '{"job_id": 5}', "metrics.jsonl": steps(1, 2, total_steps=3)})
    running = frame(path, job())
    later = live.Frame(running.run, ["another line of the log"])
    (path / "control" / "5.r0.outcome").write_text('{"outcome": "failed", "error": "boom"}')
    frames = iter([running, later, frame(path)])
    watch.follow(lambda: next(frames), None, waits.Wait(no_pause))
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [
        (one["run"], one["state"], one["why"], one["step"], one["has_ended"]) for one in found
    ] == [("run", "RUNNING", None, 2, False), ("run", "FAILED", "boom", 2, True)]


def test_ctrl_c_ends_it_with_no_output():
    def read() -> live.Frame:
        raise KeyboardInterrupt

    for is_terminal in (True, False):
        console = rich.console.Console(file=io.StringIO(), force_terminal=is_terminal)
        watch.follow(read, console, waits.Wait(no_pause))
