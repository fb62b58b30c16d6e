"""What documents the command line: its reference page, its help, what a shell completes, what the documents type."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from ddp import cli, verbs
from ddp.base import Settings

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def ddp(*argv: str, **env: str) -> str:
    given = {**os.environ, "PYTHONPATH": str(REPOSITORY / "lib"), **env}
    done = subprocess.run([sys.executable, "-m", "ddp", *argv], capture_output=True, text=True, env=given, check=True)
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
    found = ddp(_DDP_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD=str(len(typed.split()) - 1))
    assert found == f"plain,{completed}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell: str):
    assert "_DDP_COMPLETE" in ddp(_DDP_COMPLETE=f"{shell}_source")


def typed() -> list[str]:
    """Return every `ddp` command that README, docs, the charm's README and the demo's last words show."""
    found: list[str] = []
    pages = [
        REPOSITORY / "README.md",
        *(REPOSITORY / "docs").rglob("*.md"),
        REPOSITORY / "charms/ddp-trainer/README.md",
    ]
    for page in pages:
        for block in re.findall(r"^```shell\n(.*?)^```", page.read_text().replace("\\\n", " "), re.M | re.S):
            found += re.findall(r"^(?:./sandboxctl ssh \S+ )?(ddp .*)$", block, re.MULTILINE)
            found += re.findall(r"\$\((ddp [^)]*)\)", block)
    found += re.findall(r"ssh sackd/0 (ddp .*?)(?:   .*)?$", (REPOSITORY / "sandbox/demo.py").read_text(), re.MULTILINE)
    return found


@pytest.mark.parametrize("line", typed())
def test_what_the_documents_type_is_taken(
    line: str, monkeypatch: pytest.MonkeyPatch, settings: Settings, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cli, "settings_of", lambda _: settings)
    monkeypatch.setattr(verbs.Verb, "do_when_ready", lambda *_: {})  # parsed, and nothing done
    words = shlex.split(re.split(r"[|>;]", line)[0], comments=True)
    assert cli.program.main(words[1:], prog_name="ddp", standalone_mode=False) in (cli.OK, None)


def test_the_documents_type_a_lot():
    commands = {line.split()[1] for line in typed()}
    assert {*"submit sweep prepare watch log list compare report env render".split()} <= commands
