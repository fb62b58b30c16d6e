"""A command that answers one line after the other: real processes."""

import os
import pathlib
import sys
import time

import pytest

from slurm_ddp.run import CommandError, CommandTimeout, Dialogue

ECHO = "import sys\nfor line in sys.stdin:\n    print(len(line), line[:5].strip(), flush=True)"


def test_each_line_has_an_answer_of_one_process():
    talk = Dialogue(sys.executable, "-c", f"import os\n{ECHO.replace('len(line)', 'os.getpid()')}")
    try:
        first, second = talk.ask("one", timeout=60), talk.ask("two", timeout=60)
        assert first.split()[1] == "one"
        assert second.split()[1] == "two"
        assert first.split()[0] == second.split()[0]
        assert not talk.is_over
    finally:
        talk.close()
    assert talk.is_over


def test_lines_longer_than_a_pipe_go_both_ways():
    talk = Dialogue(sys.executable, "-c", "import sys\nfor line in sys.stdin:\n    print(line, end='', flush=True)")
    try:
        text = "x" * 3_000_000
        assert talk.ask(text, timeout=60) == text + "\n"
    finally:
        talk.close()


def test_one_that_dies_tells_its_last_words():
    talk = Dialogue(sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit('no such thing')")
    try:
        with pytest.raises(CommandError, match=r"ended without an answer: no such thing$"):
            talk.ask("x" * 1_000_000, timeout=60)
        assert talk.is_over
    finally:
        talk.close()


def test_one_that_hangs_is_killed_with_what_it_started():
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); sys.stdin.readline(); time.sleep(600)"
    talk = Dialogue(sys.executable, "-c", script)
    began = time.monotonic()
    with pytest.raises(CommandTimeout, match=r"no answer within 1 s$"):
        talk.ask("x", timeout=1)
    assert talk.is_over
    assert time.monotonic() - began < 300


def test_what_does_not_exist_is_told():
    with pytest.raises(CommandError, match=r"^nothing: No such file or directory$"):
        Dialogue("/nowhere/nothing")


def test_nothing_of_this_process_is_inherited(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    monkeypatch.setenv("JUJU_SECRET", "x")
    code = "import os, sys\nfor _ in sys.stdin:\n    print(sorted(os.environ), os.getcwd(), flush=True)"
    talk = Dialogue(sys.executable, "-I", "-c", code, cwd=tmp_path)
    try:
        told = talk.ask("", timeout=60)
    finally:
        talk.close()
    assert "JUJU" not in told
    assert told.split()[-1] == os.path.realpath(tmp_path)
