"""The words of code, messages and pages: plain technical English in the terms of the field (docs/explanation/words.md)."""

import ast
import collections.abc
import re
import subprocess

import deployments
import pytest
import yaml

TABLE = yaml.safe_load((deployments.ROOT / "tests/bundle/words.yaml").read_text())
ALLOWED: list[tuple[str, str]] = [(one["file"], one["line"]) for one in TABLE["allowed"]]
OPENINGS = ("Return what ", "Return whatever ")  # of a docstring, which states the fact instead
# Files that hold other people's text, or the table
OTHERS = ("LICENSE", "tests/bundle/words.yaml", "tests/bundle/test_words.py", "tests/ddp/data/")
SUFFIXES = (
    ".py",
    ".md",
    ".yaml",
    ".yml",
    ".toml",
    ".ini",
    ".sh",
    ".j2",
    ".cfg",
    ".css",
    ".js",
    "Makefile",
)


def files() -> list[str]:
    """List what git tracks and people write."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=deployments.ROOT, check=True, capture_output=True, text=True
    )
    return [
        name
        for name in listed.stdout.split("\0")
        if name.endswith(SUFFIXES)
        and not name.startswith(OTHERS)
        and (deployments.ROOT / name).is_file()
    ]


def pattern() -> re.Pattern[str]:
    """Compile the tables: words with a letter on neither side, names of classes also inside CamelCase."""
    words = "|".join(TABLE["words"]).replace(" ", "[ _-]")
    return re.compile(
        rf"(?<![A-Za-z])(?i:{words})(?![A-Za-z])|(?<![A-Z])(?:{'|'.join(TABLE['names'])})(?![a-z])"
    )


def problems(name: str, text: str) -> collections.abc.Iterator[str]:
    """Yield `file:line: word` for each word of the tables, and for each docstring that opens indirectly."""
    unwanted = pattern()
    for number, line in enumerate(text.splitlines(), 1):
        if any(name == path and piece in line for path, piece in ALLOWED):
            continue
        yield from (f"{name}:{number}: {found[0]}" for found in unwanted.finditer(line))
    if not name.endswith(".py"):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            opening = ast.get_docstring(node) or ""
            if opening.startswith(OPENINGS):
                yield f"{name}:{node.body[0].lineno}: {opening.splitlines()[0]}"


def test_plain_technical_english():
    found = [
        problem
        for name in files()
        for problem in problems(name, (deployments.ROOT / name).read_text())
    ]
    assert not found, "tests/bundle/words.yaml lists words to write instead:\n" + "\n".join(found)


@pytest.mark.parametrize(("path", "piece"), ALLOWED)
def test_every_exception_is_needed(path: str, piece: str):
    lines = [line for line in (deployments.ROOT / path).read_text().splitlines() if piece in line]
    assert lines and all(pattern().search(line) for line in lines), (
        f"{path} no longer needs its exception"
    )
