"""When a run stands still, and which rank the others wait for."""

import json
import pathlib
import subprocess
import sys

import pytest

from ddp.node import processes, stall

BEGAN = 1000.0


def lines(*gaps: float, kind: str = "step", total: int = 100) -> list[str]:
    """Return metrics: an earlier line, a start, steps after these seconds, `kind` last."""
    now, found = (
        BEGAN,
        [{"kind": "step", "time": BEGAN - 500, "step": 0}, {"kind": "start", "time": BEGAN}],
    )
    for number, gap in enumerate(gaps, 1):
        now += gap
        is_last = number == len(gaps)
        found.append(
            {"kind": kind if is_last else "step", "time": now, "step": number, "total_steps": total}
        )
    return [json.dumps(record) for record in found]


@pytest.mark.parametrize(
    ("metrics", "silent_s", "is_stalled"),
    [
        (lines(*[1.0] * 20), 121, True),
        (lines(*[1.0] * 20), 119, False),  # at least two minutes
        (lines(*[30.0] * 20), 299, False),  # ten times the median
        (lines(*[30.0] * 20), 301, True),
        (lines(*[1.0] * 4), 9999, False),  # it may still compile
        (
            lines(600, *[1.0] * 20),
            1199,
            False,
        ),  # it was as slow before: an evaluation, a compilation
        (lines(600, *[1.0] * 20), 1201, True),
        (lines(*[1.0] * 20, kind="eval"), 121, True),
        (lines(*[1.0] * 20, total=20), 9999, False),  # it is done, and saves
        ([*lines(*[1.0] * 20), '{"kind": "st'], 121, True),  # a line is being written
        (
            [*lines(*[1.0] * 20), '{"step": 9, "accuracy": 0.5}', '{"time": "12:00", "step": 9}'],
            121,
            True,
        ),  # a script's own
        ([line.replace('"kind": "step", ', "") for line in lines(*[1.0] * 20)], 121, True),
        ([], 9999, False),
    ],
)
def test_it_stands_still(metrics: list[str], silent_s: float, is_stalled: bool):
    last = max(
        (
            json.loads(line).get("time", 0)
            for line in metrics
            if line.endswith("}") and "12:00" not in line
        ),
        default=BEGAN,
    )
    assert bool(stall.judge(metrics, BEGAN, last + silent_s)) is is_stalled


def test_any_regular_run_is_never_judged():
    for step_s in (0.001, 0.1, 7.0, 400.0):
        for silent_s in (0.0, step_s, 9 * step_s, 119.0):
            if silent_s < max(stall.LEAST_S, stall.STEPS * step_s):
                assert (
                    stall.judge(lines(*[step_s] * 50), BEGAN, BEGAN + 50 * step_s + silent_s) == ""
                )


SCRIPT = """
import signal, sys, time
def {name}():
    print("ready", flush=True); time.sleep(60)
{name}()
"""
ABORTED_IN_A_THREAD = """
import os, signal, sys, threading, time
def helper():
    time.sleep(0.5); signal.pthread_kill(threading.get_ident(), signal.SIGABRT)
def load():
    threading.Thread(target=helper).start(); time.sleep(60)
load()
"""


def stand(folder: pathlib.Path, rank: int, name: str, *, at: str) -> None:
    """Leave the output of a rank that stands in a function, in a file, and is ended by SIGABRT."""
    script = folder / at / "x.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT.format(name=name))
    log = folder / "logs" / "12.r0" / f"node-{rank}" / "x" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    with log.open("w") as stderr:
        argv = [sys.executable, "-X", "faulthandler", str(script)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(6)
        process.communicate()


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (
            (("all_reduce", "torch/distributed"), ("load", "mine")),
            ("b", "rank 1 on b is behind, in load ({0}/x.py:4)"),
        ),
        (
            (("load", "mine"), ("backward", "torch/nn/parallel")),
            ("a", "rank 0 on a is behind, in load ({0}/x.py:4)"),
        ),
        (
            (("all_reduce", "torch/distributed"),) * 2,
            ("-", ""),
        ),  # the network, or a rank that is lost
        ((("load", "mine"),) * 2, ("-", "")),
        ((("load", "mine"),), ("a", "rank 0 on a is behind, in load ({0}/x.py:4)")),
    ],
)
def test_the_rank_that_is_behind(
    tmp_path: pathlib.Path, ranks: tuple[tuple[str, str], ...], wanted: tuple[str, str]
):
    (tmp_path / "job.json").write_text('{"ranks_per_node": 1}')
    for rank, (name, at) in enumerate(ranks):
        stand(tmp_path, rank, name, at=at)
    node, words = wanted
    assert stall.behind(str(tmp_path), "12", ["a", "b"]) == (node, words.format(tmp_path / "mine"))


WAITS, LOADS = ("all_reduce", "torch/distributed"), ("load", "mine")


@pytest.mark.parametrize(
    ("ranks", "states", "wanted"),
    [
        # one that was stopped says where once it is continued, others never
        ((WAITS, WAITS), ("S", "T"), ("b", "rank 1 on b is behind; it is stopped (T)")),
        (
            (WAITS, LOADS),
            ("S", "T"),
            ("b", "rank 1 on b is behind, in load ({0}/x.py:4); it is stopped (T)"),
        ),
        (
            (WAITS, None),
            ("S", "T"),
            ("b", "rank 1 on b is behind and showed no stack; it is stopped (T)"),
        ),
        (
            (None, WAITS),
            ("t", "S"),
            ("a", "rank 0 on a is behind and showed no stack; it is stopped by a debugger (t)"),
        ),
        (
            (WAITS, None),
            ("S", "D, request_wait_answer"),
            (
                "b",
                "rank 1 on b is behind and showed no stack; "
                "it is in a call of the kernel that nothing interrupts (D, request_wait_answer)",
            ),
        ),
        (
            (WAITS, None),
            ("S", "R"),
            ("b", "rank 1 on b is behind and showed no stack; it runs (R)"),
        ),
        (
            (WAITS, LOADS),
            ("S", "S"),
            ("b", "rank 1 on b is behind, in load ({0}/x.py:4); it sleeps (S)"),
        ),
        ((WAITS, WAITS), ("S", "D"), ("-", "")),  # a thread that reads ahead
        ((WAITS, None, None), ("S", "S", "S"), ("-", "")),
        ((None, None), ("S", "S"), ("-", "")),
    ],
)
def test_a_rank_that_cannot_say_where_it_is_is_named_by_its_state(
    tmp_path: pathlib.Path,
    ranks: tuple[tuple[str, str] | None, ...],
    states: tuple[str, ...],
    wanted: tuple[str, str],
):
    (tmp_path / "job.json").write_text('{"ranks_per_node": 1}')
    (tmp_path / "logs").mkdir()
    log = ["[ENV] job=12 attempt=12.r0 nodes=a b c"]
    for rank, (place, state) in enumerate(zip(ranks, states, strict=True)):
        letter, _, function = state.partition(", ")
        log.append(f"{rank}: [ENV] {'abc'[rank]}: rank {rank} {processes.State(letter, function)}")
        if place is not None:
            stand(tmp_path, rank, place[0], at=place[1])
    (tmp_path / "logs" / "12.out").write_text("".join(f"{line}\n" for line in log))
    node, words = wanted
    assert stall.behind(str(tmp_path), "12", ["a", "b", "c"]) == (
        node,
        words.format(tmp_path / "mine"),
    )


def test_the_main_thread_tells_where_a_rank_is_whichever_got_the_signal(tmp_path: pathlib.Path):
    (tmp_path / "job.json").write_text('{"ranks_per_node": 1}')
    log = tmp_path / "logs" / "12.r0" / "node-0" / "x" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    script = tmp_path / "x.py"
    script.write_text(ABORTED_IN_A_THREAD)
    with log.open("w") as stderr:
        subprocess.run(
            [sys.executable, "-X", "faulthandler", str(script)], stderr=stderr, check=False
        )
    assert "in helper" in log.read_text().partition("Current thread")[2]
    assert stall.behind(str(tmp_path), "12", ["a"]) == (
        "a",
        f"rank 0 on a is behind, in load ({script}:6)",
    )
