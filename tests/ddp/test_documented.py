"""All `ddp` lines of documents and verbs' examples parse in a shell and in the command line."""

import pathlib
import re
import shlex

import pytest

from ddp import cli
from ddp.actions import prerequisites, verbs
from ddp.settings import Settings
from functional import pages

OTHERS = [
    *pages.ROOT.glob("docs/**/*.md"),
    *pages.ROOT.glob("charms/*/README.md"),
    pages.ROOT / "sandbox" / "demo.py",
]
SSH = re.compile(r"^(?:.*ssh sackd/0 )?(ddp .*?)(?:   .*|\s+# .*)?$", re.MULTILINE)
BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def typed(path: pathlib.Path) -> list[str]:
    """List the lines of a file that call ddp; for a page, the lines in its code blocks."""
    text = path.read_text().replace("\\\n", " ")
    if path.suffix == ".md":
        text = "\n".join(BLOCK.findall(text))
    return [line for line in SSH.findall(text) if "`" not in line]


LINES = [
    *(line.text for page in pages.PAGES for line in pages.lines(page)),
    *(line for path in OTHERS for line in typed(path)),
    *(example for verb in verbs.ALL.values() for example in verb.examples),
]


def calls(text: str) -> list[list[str]]:
    """Split a line into the words of each command of ours."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;<>()"):
            commands.append([])
        else:
            commands[-1].append(re.sub(r"^~(?=/)", str(pathlib.Path.home()), word))
    return [words for words in commands if words and words[0] == "ddp"]


TYPED = [words for line in LINES for words in calls(line)]


@pytest.mark.parametrize("words", TYPED, ids=" ".join)
def test_a_documented_line_parses(
    words: list[str],
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
):
    (tmp_path / "fsdp.yaml").touch()
    monkeypatch.chdir(tmp_path)
    asked: list[object] = []
    monkeypatch.setattr(verbs.Verb, "do", lambda _, __, params, *___: asked.append(params) or {})
    monkeypatch.setattr(prerequisites, "require", lambda *_, **__: None)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.setattr(cli, "settings_of", lambda _: settings)
    cli.program.main(words[1:], prog_name="ddp", standalone_mode=False)
    assert len(asked) == 1 or capsys.readouterr().out, (
        "it asks for something, or shows help or a version"
    )


def test_the_lines_are_found():
    assert len(TYPED) > 60
