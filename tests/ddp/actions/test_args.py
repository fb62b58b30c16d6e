"""The payload's own parser checks `args` and a sweep's options before anything is written."""

import collections.abc
import re

import pytest

from ddp.options import fields, models
from ddp.problem import Problem
from ddp.settings import Settings
from ddp.submit import payload_arguments
from slurm_ddp.commands import CommandTimeout


def check(
    settings: Settings, kind: str, args: str, *choices: collections.abc.Mapping[str, str]
) -> str:
    folder = str(settings.workspace.runs / "night")
    return payload_arguments.check(settings.payload, kind, folder, args.split(), choices)


def refused(
    settings: Settings, args: str, *choices: collections.abc.Mapping[str, str], kind: str = "gpt"
) -> str:
    with pytest.raises(Problem) as caught:
        check(settings, kind, args, *choices)
    return str(caught.value)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ("--batch 0", "--batch 0: must be at least 1"),
        ("--steps 3 --epochs 2", "--steps and --epochs exclude each other; give one"),
        ("--config /mnt/none.toml", "--config /mnt/none.toml: No such file or directory"),
        ("--help", "--help is not an option of a run; type: ddp submit gpt --help"),
        ("--run-dir=/x", "--run-dir is set by ddp; use the option run"),
        ("--data /x", "--data is set by ddp; use the option dataset"),
    ],
)
def test_arguments_that_the_payload_would_refuse_are_refused_before_the_job(
    settings: Settings, args: str, reason: str
):
    assert refused(settings, args) == f"args: {reason}"


@pytest.mark.parametrize(
    ("kind", "args", "line"),
    [
        (
            "gpt",
            "--stepz=5",
            "gpt has no option --stepz; did you mean --steps? see: ddp submit gpt --help",
        ),
        ("gpt", "--bogus 3", "gpt has no option --bogus; see: ddp submit gpt --help"),
        ("gpt", "--run-dri x", "gpt has no option --run-dri; see: ddp submit gpt --help"),
        (
            "gpt",
            "--nodes 2",
            "gpt has no option --nodes; it is one of ddp: type it before gpt",
        ),
        ("smoke", "-N 2", "smoke has no option -N; it is one of ddp: type it before smoke"),
        ("gpt", "--grid=lr=1", "gpt has no option --grid; it is one of ddp: type it before gpt"),
        ("smoke", "train.py", "smoke takes no argument train.py; see: ddp submit smoke --help"),
    ],
)
def test_a_word_that_a_workload_does_not_know_is_named_with_the_nearest_option(
    settings: Settings, kind: str, args: str, line: str
):
    assert refused(settings, args, kind=kind) == line


@pytest.mark.parametrize(("kind", "option"), [("gpt", "--grad-accum"), ("smoke", "--classes")])
def test_a_built_in_workload_lists_the_options_that_ddp_does_not_set(
    settings: Settings, kind: str, option: str
):
    text = payload_arguments.help_of(settings.payload, kind, ["--lr", "1", "--help"])
    assert text is not None
    assert text.startswith(f"usage: ddp submit {kind} ")
    assert {option, "--report-json"} <= set(text.split())
    assert not re.search("--(run-dir|data|resume|profile|local-files-only)|default: .*\\)", text)
    assert "[default: 42]" in text
    assert payload_arguments.help_of(settings.payload, kind, ["--lr", "1"]) is None
    assert payload_arguments.help_of(settings.payload, "script", ["--help"]) is None


def test_the_smoke_test_has_options_of_its_own(settings: Settings):
    assert refused(settings, "--classes 1", kind="smoke") == "args: --classes 1: must be at least 2"
    assert check(settings, "smoke", "--epochs 1") == "args: accepted by the payload"


def test_each_run_of_a_sweep_is_looked_at(settings: Settings):
    good, bad = {"lr": "0.1"}, {"lr": "-1"}
    assert fields.parse(models.SubmitSweep, {"grid": "learning_rate=0.1,1 optim.lr=2"}).grid
    flags = {"compile": "true", "deterministic": "false"}
    passed = check(settings, "gpt", "--steps 3", good, flags)
    assert passed == "args: accepted by the payload, with the options of each of 2 runs"
    assert refused(settings, "", good, bad) == "options of run 1: --lr -1.0: must be above 0.0"
    assert payload_arguments.words(flags) == ["--compile", "--no-deterministic"]
    assert refused(settings, "", {"lr": "true"}).startswith(
        "options of run 0: argument --lr: expected one arg"
    )
    assert refused(settings, "", {"run-dir": "/x"}, kind="smoke").startswith(
        "args: --run-dir is set"
    )
    assert check(settings, "gpt", "--epochs 3", {"lr": "1"})


def test_nothing_is_asked_where_nothing_is_given(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(payload_arguments, "run", None)
    assert not check(settings, "gpt", "")


def test_a_settings_file_is_read_where_the_ranks_would(settings: Settings):
    (settings.workspace.runs / "night").mkdir()
    (settings.workspace.runs / "night" / "mine.json").write_text('{"steps": "many"}')
    assert "steps must be of type int" in refused(settings, "--config mine.json")
    assert "No such file" in refused(settings, "--config other.json")


def test_a_file_that_hangs_is_reported(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    def hang(*_: object, **__: object) -> None:
        raise CommandTimeout("python3: no answer within 30 s")

    monkeypatch.setattr(payload_arguments, "run", hang)
    with pytest.raises(
        Problem, match=r"^args: python3: no answer within 30 s; .*is the filesystem's server up\?"
    ):
        check(settings, "gpt", "--config /mnt/shared/x.toml")


def test_a_payload_that_cannot_look_is_reported(settings: Settings):
    (settings.payload / "ddptrain" / "options" / "command_line.py").write_text(
        "raise SystemExit('broken')\n"
    )
    with pytest.raises(
        Problem, match=r"^args: the payload could not check them: python3 exited 1: broken$"
    ):
        check(settings, "gpt", "--steps 3")
