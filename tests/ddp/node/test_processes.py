"""A process's activity, by the kernel."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from ddp.node import processes


def until(process: subprocess.Popen[bytes], letter: str) -> processes.State:
    """Wait until a process is in a state."""
    end = time.monotonic() + 120
    while (state := processes.state_of(process.pid)) is None or state.letter != letter:
        assert time.monotonic() < end, state
        time.sleep(0.01)
    return state


@pytest.mark.parametrize(
    ("program", "number", "letter", "words"),
    [
        ("import time; time.sleep(60)", signal.SIGSTOP, "T", "is stopped (T"),
        ("import time; time.sleep(60)", signal.SIGCONT, "S", "sleeps (S"),
        ("while True: pass", signal.SIGCONT, "R", "runs (R"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            signal.SIGCONT,
            "Z",
            "has ended (Z",
        ),
    ],
)
def test_a_state_is_described_in_words(program: str, number: int, letter: str, words: str):
    with subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True)\n{program}"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        state = until(process, letter)
        process.kill()
    assert str(state).startswith(words)


def test_a_process_that_has_ended_has_no_state():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert processes.state_of(process.pid) is None


VFORKS = """
import os, sys, threading, time
def spawn():  # a child that opens a pipe nobody writes to before it executes a program: until then vfork(2) holds us
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_RDONLY, 0)])
threading.Thread(target=spawn).start()
print(flush=True)
time.sleep(60)
"""


def test_a_thread_that_nothing_interrupts_goes_before_the_main_one(tmp_path: pathlib.Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [sys.executable, "-c", VFORKS, str(pipe)], stdout=subprocess.PIPE
    ) as process:
        state = until(process, "D")
        os.close(os.open(pipe, os.O_RDWR))  # lets the child go
        process.kill()
    assert str(state).startswith("is in a call of the kernel that nothing interrupts (D")


def test_a_rank_is_a_child_with_a_number_of_torchruns():
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    ranks = [
        subprocess.Popen(sleeps, env={"LOCAL_RANK": str(number), "PATH": os.defpath})
        for number in range(2)
    ]
    other = subprocess.Popen(sleeps, env={"PATH": os.defpath})
    try:
        for process in (*ranks, other):
            until(process, "S")
        children = set(processes.children(os.getpid()))
        assert {process.pid for process in (*ranks, other)} <= children
        assert [processes.local_rank(process.pid) for process in ranks] == [0, 1]
        assert processes.local_rank(other.pid) is None
    finally:
        for process in (*ranks, other):
            process.kill()
            process.wait()
    assert processes.local_rank(other.pid) is None, "it has ended"
