"""The command line's documentation: its reference page, its help and a shell's completions."""

import os
import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def ddp(*argv: str, **env: str) -> str:
    given = {**os.environ, "PYTHONPATH": str(REPOSITORY / "lib"), **env}
    done = subprocess.run(
        [sys.executable, "-m", "ddp", *argv], capture_output=True, text=True, env=given, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ddp su", "submit"),
        ("ddp env cr", "create"),
        ("ddp submit --fabr", "--fabric"),
        ("ddp bench --collective b", "broadcast"),
    ],
)
def test_bash_completes(typed: str, completed: str):
    found = ddp(
        _DDP_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD=str(len(typed.split()) - 1)
    )
    assert found == f"plain,{completed}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell: str):
    assert "_DDP_COMPLETE" in ddp(_DDP_COMPLETE=f"{shell}_source")
