"""The output for terminals, pipes and programs: a real pseudo-terminal, and every verb."""

import collections.abc
import contextlib
import dataclasses
import fcntl
import io
import json
import os
import pathlib
import pty
import re
import struct
import sys
import termios
import threading
import time
import typing

import command_line
import pytest
import rich.cells
from cluster import Cluster
from pip_double import Pip

from ddp import cli
from ddp.actions import prerequisites, verbs
from ddp.options import fields
from ddp.problem import Problem, Results
from ddp.results import progress, tables
from ddp.results.progress import Log
from ddp.results.result import values_of
from ddp.settings import Settings
from ddp.view import screen

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOURS = re.compile(r"\x1b\[(?:\d+;)*(?:3|9|4|10)[0-8](?:;\d+)*m")
BOXES = re.compile("[\u2500-\u257f\u2800-\u28ff]")

NODES = tables.Table(
    [
        ["NODE", *(f"COLUMN-{number}" for number in range(16)), "VERDICT"],
        *(
            [f"slurmd-{node}", *["0.25"] * 16, verdict]
            for node, verdict in enumerate(("ok", "warning", "ERROR"))
        ),
    ]
)
RESULTS: Results = {
    "verdict": "1 finding would break a run",
    "nodes": NODES,
    "jobs": tables.Table(
        [
            ("JOB-ID", "RUN", "STATE", "LOSS"),
            ("40", "night", "COMPLETED", "1.25 *"),
            ("41", "[bold]x", "FAILED", "-"),
        ]
    ),
    "findings": "ERROR slurmd-2: /mnt/shared is not mounted\n    -> mount /mnt/shared\nnote",
    "run-dir": "/mnt/shared/users/example1/runs/" + "a-very-long-name-" * 8,
    "advice": "words " * 30,
    "empty": tables.Table([["NAME", "HASH"]]),
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@dataclasses.dataclass
class Terminal:
    """A pseudo-terminal and the bytes written to it."""

    descriptor: int  # of the side that programs have
    written: bytearray = dataclasses.field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return self.written.decode()

    def plain(self) -> str:
        """Return it without escapes and with plain ends of lines."""
        return ESCAPES.sub("", self.text).replace("\r\n", "\n")


@contextlib.contextmanager
def terminal(columns: int = 100) -> collections.abc.Generator[Terminal]:
    """Open a pseudo-terminal of this width; its text is complete when the block ends."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    made = Terminal(theirs)

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while data := os.read(ours, 65536):
                made.written.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield made
    finally:
        os.close(theirs)
        reader.join(10)
        os.close(ours)


def drawn(results: Results, columns: int = 100) -> Terminal:
    with (
        terminal(columns) as made,
        os.fdopen(os.dup(made.descriptor), "w") as out,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", out)
        screen.Screen(is_json=False).show(results)
    return made


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """Every verb returns the same results, after a line of progress."""

    def do(verb: verbs.Verb, settings: Settings, params: fields.Parsed, log: Log) -> Results:
        log(tables.Step("working: 3 of 4", "working"))
        return RESULTS

    monkeypatch.setattr(verbs.Verb, "do", do)
    monkeypatch.setattr(prerequisites, "require", lambda *_, **__: None)
    monkeypatch.setattr(cli, "settings_of", lambda _: settings)


def type_on(columns: int, *words: str) -> "tuple[Terminal, int]":
    """Run the program in this process with a pseudo-terminal for output and errors."""
    ended: list[int] = []

    def leave(code: int) -> typing.NoReturn:
        ended.append(code)
        raise SystemExit(code)

    with (
        terminal(columns) as made,
        os.fdopen(os.dup(made.descriptor), "w") as out,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, out)
        patch.setattr(sys, "argv", ["ddp", *words])
        patch.setattr(os, "_exit", leave)
        with contextlib.suppress(SystemExit):
            cli.main()
        out.flush()
    return made, ended[0]


GIVEN = {  # arguments that a verb requires
    "env create": ("mine", "--requirements", "requirements.txt"),
    "env show": ("mine",),
    "env remove": ("mine",),
    "image import": ("docker://a/b:1", "mine"),
    "fetch": ("night",),
    "cancel": ("night",),
    "export": ("night", "model"),
    "remove": ("night",),
    "user add": ("bob", "--account", "physics"),
    "user sync": ("ml",),
}
EVERY = pytest.mark.parametrize("verb", verbs.ALL.values(), ids=lambda verb: verb.name)


@EVERY
def test_every_verb_has_tables_on_a_terminal(answers: None, verb: verbs.Verb):
    made, code = type_on(100, *verb.name.split(), *GIVEN.get(verb.name, ()))
    assert code == 0, made.text
    assert BOXES.search(made.text)
    assert COLOURS.search(made.text)
    assert re.search(r"(?m)^ *40 +night +COMPLETED +1\.25 \* *$", made.plain())


@EVERY
def test_every_verb_is_plain_in_a_pipe(
    answers: None, monkeypatch: pytest.MonkeyPatch, verb: verbs.Verb
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, err = command_line.typed(*verb.name.split(), *GIVEN.get(verb.name, ()))
    assert (code, err) == (0, "working: 3 of 4\n")
    assert "\x1b" not in out
    assert not BOXES.search(out)
    assert (
        "\njobs:\nJOB-ID  RUN      STATE      LOSS\n40      night    COMPLETED  1.25 *\n41      [bold]x  FAILED     -\n"
        in out
    )
    assert re.search(rf"(?m)^advice +{RESULTS['advice']}$", out), "in one line, however long"


@EVERY
@pytest.mark.parametrize("is_before", [True, False])
def test_every_verb_has_json(answers: None, verb: verbs.Verb, is_before: bool):
    words = (*verb.name.split(), *GIVEN.get(verb.name, ()))
    code, out, _ = command_line.typed(*(("--json", *words) if is_before else (*words, "--json")))
    assert code == 0
    assert json.loads(out) == {"schema": 1, **values_of(RESULTS)}


def test_a_live_view_for_programs_is_a_line_for_each_change(
    settings: Settings, cluster: Cluster, pip: Pip, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cli, "settings_of", lambda _: settings)
    cluster.states = [("PENDING", 0), ("RUNNING", 0), ("RUNNING", 0), ("COMPLETED", 0)]
    assert command_line.typed("submit", "--run", "night", "smoke")[0] == 0
    for words in (("watch", "night", "--json"), ("--json", "watch", "40"), ("watch",)):
        cluster.job(40).states = [("PENDING", 0), ("RUNNING", 0), ("RUNNING", 0), ("COMPLETED", 0)]
        code, out, err = command_line.typed(*words)
        assert (code, err) == (0, "")
        frames = [json.loads(line) for line in out.splitlines()]
        assert [(one["run"], one["state"], one["has_ended"]) for one in frames] == [
            ("night", "PENDING", False),
            ("night", "RUNNING", False),
            ("night", "COMPLETED", True),
        ]
    assert BOXES.search(type_on(80, "watch", "night")[0].text), "a terminal has a picture"


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 132, 250])
def test_tables_are_no_wider_than_the_terminal(columns: int):
    made = drawn(
        {name: value for name, value in RESULTS.items() if isinstance(value, tables.Table)}, columns
    )
    assert max(map(rich.cells.cell_len, made.plain().split("\n"))) <= columns
    heads = re.findall(r"(?m)^ *NODE .*$", made.plain())
    assert len(heads) == 1 if columns == 250 else len(heads) > 1
    for number in range(16):
        assert re.search(rf"COLUMN-{number}\b", made.plain()), "no column is lost"
    assert "VERDICT" in made.plain()


def test_states_and_the_best_are_coloured():
    made = drawn(RESULTS)
    text = made.text
    assert "[bold]x" in made.plain(), "a run may be called as a style is"
    assert re.search(r"NAME +HASH", made.plain()), "an empty table has its head"
    assert "\x1b[1;32mCOMPLETED" in text
    assert "\x1b[1;31mFAILED" in text
    assert "\x1b[1;32m1.25 *" in text
    assert "\x1b[1;31mERROR\x1b[0m slurmd-2" in text


@pytest.mark.parametrize(
    ("name", "value", "has_boxes"), [("NO_COLOR", "1", True), ("TERM", "dumb", False)]
)
def test_colours_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, has_boxes: bool
):
    monkeypatch.setenv(name, value)
    made = drawn(RESULTS)
    assert not COLOURS.search(made.text)
    assert bool(BOXES.search(made.text)) is has_boxes


def test_a_failure_is_one_red_line(answers: None, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> typing.NoReturn:
        raise Problem("Slurm refuses the job: " + "a long reason " * 20, results={"job-id": "40"})

    monkeypatch.setattr(verbs.Verb, "do", fail)
    made, code = type_on(60, "submit")
    assert code == 1
    assert "\x1b[1;31mddp:\x1b[0m Slurm refuses the job: " in made.text
    assert made.plain().count("\n") == 2, "the terminal folds it; what is copied is one line"


# --- progress ------------------------------------------------------------------------------------


def test_progress_is_one_line_that_changes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "REPORT_S", 0.3)
    with terminal(90) as made, os.fdopen(os.dup(made.descriptor), "w") as out:
        monkeypatch.setattr(sys, "stderr", out)
        shown = screen.Screen(is_json=False)
        progress.with_progress(shown.log, "installing [bold]torch", lambda: time.sleep(0.8))
        shown.log("job 40: night on 2 nodes")
        shown.log(tables.Step("job 40 RUNNING, step 30", "job 40 RUNNING"))
        shown.log(tables.Step("job 40 RUNNING, step 60", "job 40 RUNNING"))
        shown.close()
    kept = [line.rsplit("\r", 1)[-1].rstrip() for line in made.plain().split("\n")]
    lasting = ["installing [bold]torch: 1 s", "job 40: night on 2 nodes", "job 40 RUNNING, step 60"]
    assert [line for line in kept if line and not BOXES.search(line)] == lasting
    assert made.text.count("\x1b[?25l") == made.text.count("\x1b[?25h"), "the cursor is there again"


def test_without_a_terminal_progress_is_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "REPORT_S", 0.1)
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    progress.with_progress(
        screen.Screen(is_json=False).log, "installing torch", lambda: time.sleep(0.25)
    )
    assert out.getvalue() == "installing torch\ninstalling torch: 0 s\ninstalling torch: 0 s\n"


def test_waiting_for_a_job_reports_its_steps(
    settings: Settings, cluster: Cluster, pip: Pip, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ddp.submit.following.REPORT_S", 0.0)
    cluster.states = [("PENDING", 0), ("RUNNING", 0), ("RUNNING", 0), ("COMPLETED", 0)]

    def started(job: typing.Any) -> None:
        (job.script.parent / "config.json").write_text('{"steps": 400}')
        (job.script.parent / "metrics.jsonl").write_text('{"step": 100, "loss": 2.5}\n')

    cluster.submitted = started
    lines: list[str] = []
    verb = verbs.ALL["submit"]
    with settings.workspace.claims:
        verb.do(
            settings,
            fields.parse(verb.options, {"workload": "smoke", "run": "night", "wait": True}),
            lines.append,
        )
    assert "job 40 RUNNING, step 100 of 400, loss 2.5000" in lines
