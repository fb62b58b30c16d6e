"""The words of code, messages and pages: plain technical English in the terms of the field (CONTRIBUTING, "Words")."""

import ast
import collections.abc
import re
import subprocess

import pytest
import rules

# What is looked for, in any case and as a part of a name too (`volume_begun`), and what to write in its place.
# A blank stands for a blank, an underscore or a hyphen.
WORDS = {
    # idioms
    "told": "passed, reported, logged, shown",
    "said": "printed, reported, its message",
    "hears?|heard": "received, read",
    "nonsense": "invalid JSON, invalid XML, invalid output",
    "(?:fell|falls?|gone?|goes|went) silent": "stopped responding",
    "without a word": "with no output, without an error",
    "(?:did|does|do) not come(?! (?:up|back|true))": "never joined, never arrived, never appeared",
    "(?:is|are|was|were|be|been) gone(?! on)": "was removed, has ended, is lost",
    "to be had": "available",
    r"(?:leav(?:e|es|ing)|left)(?: [\w-]+){0,3} away": "omit",
    "(?:takes?|taken|took|taking) away": "remove",
    "lets? (?:[a-z]+ )?work": "resume",
    "mend(?:s|ed|ing)?": "fix, repair",
    "gives? back": "returns",
    "(?:has|have|had) to say": "reports",
    # names
    "begun": "started; of an operation: its journal",
    "doomed?": "CancelTarget",
    "gpu work": "resume_pending, complete_pending",
    "seats?": "role",
    # people
    "(?:a|the|that|this|another) person(?:'s)?": "the user, the operator",
    "somebody(?:'s)?": "the user, the operator, another account",
}
# Names of classes, in this case only: the words themselves are good English.
NAMES = {
    "Book": "GresConf",
    "Seat": "role",
    "Wish": "Spec",
    "(?<![A-Za-z])Found(?! [a-z])": "NodeSnapshot, or what was found",
}
# How no docstring opens: it states the fact instead ("Return what sbatch prints" is "Run sbatch: its output").
OPENINGS = ("Return what ", "Return whatever ")

# Lines that quote somebody else's text, with the reason: (file, a piece of the line).
ALLOWED: dict[tuple[str, str], str] = {
    ("tests/payload/conftest.py", "if out so said what"): "frequent words of English, to make a corpus of",
    ("tests/unit/juicefs-server-proxy/test_actions.py", "Found 3 blocks"): "the output of juicefs fsck",
    ("tests/unit/slurm-gpu/conftest.py", "NVML Shared Library Not Found"): "a message of NVIDIA's",
    ("tests/unit/slurm-gpu/machine_double.py", "compute instances found: Not Found"): "a message of NVIDIA's",
    ("tests/unit/slurm-gpu/machine_double.py", "GPU instances found: Not Found"): "a message of NVIDIA's",
    ("tests/unit/slurm-gpu/test_gpu_detect.py", "NVML Shared Library Not Found"): "a message of NVIDIA's",
    ("tests/unit/slurm-gpu/test_lost_gpus.py", "NVML Shared Library Not Found"): "a message of NVIDIA's",
}
# Files that hold others' text, or this table.
OTHERS = ("LICENSE", "tests/bundle/test_words.py", "tests/ddp/data/")
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".ini", ".sh", ".j2", ".cfg", ".css", ".js", "Makefile")


def files() -> list[str]:
    """List what git tracks and people write."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=rules.ROOT, check=True, capture_output=True, text=True)
    return [
        name
        for name in listed.stdout.split("\0")
        if name.endswith(SUFFIXES) and not name.startswith(OTHERS) and (rules.ROOT / name).is_file()
    ]


def pattern() -> re.Pattern[str]:
    """Compile the tables: words with a letter on neither side, names of classes also inside CamelCase."""
    words = "|".join(WORDS).replace(" ", "[ _-]")
    return re.compile(rf"(?<![A-Za-z])(?i:{words})(?![A-Za-z])|(?<![A-Z])(?:{'|'.join(NAMES)})(?![a-z])")


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
    found = [problem for name in files() for problem in problems(name, (rules.ROOT / name).read_text())]
    assert not found, "see WORDS in tests/bundle/test_words.py for what to write:\n" + "\n".join(found)


@pytest.mark.parametrize(("path", "piece"), ALLOWED)
def test_every_exception_is_needed(path: str, piece: str):
    lines = [line for line in (rules.ROOT / path).read_text().splitlines() if piece in line]
    assert lines and all(pattern().search(line) for line in lines), f"{path} no longer needs its exception"


@pytest.mark.parametrize(
    "line",
    [
        "what it was told",
        "TOLD = 3",
        "volume_begun = True",
        "the server fell silent",
        "leave it away",
        "leave its unit away",
        "class GpuSeat:",
        "seats",
        "_Doomed(1)",
        "Found(path)",
        "as a person would",
        "is_gone = 1",
        "let_work(node)",
    ],
)
def test_an_unwanted_word_is_found(line: str):
    assert list(problems("a.md", line)) or list(problems("a.py", f"# {line}"))


@pytest.mark.parametrize(
    "line", ["recommended", "untold", "Found no GPU", "notebook", "the run has gone on", "did not come up", "aforesaid"]
)
def test_a_good_word_passes(line: str):
    assert not list(problems("a.md", line))


def test_an_indirect_docstring_is_found():
    assert list(problems("a.py", 'def f():\n    """Return what g returns."""\n')) == ["a.py:2: Return what g returns."]
