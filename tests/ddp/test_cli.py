"""The command line: input, output and exit; in a real process where that matters."""

import collections.abc
import json
import os
import pathlib
import pwd
import re
import subprocess
import sys
import typing

import click
import everybody
import pytest
import yaml
from command_line import COMMANDS, typed

from ddp import cli, service
from ddp.actions import prerequisites, verbs
from ddp.options import config, declared, fields, models
from ddp.problem import Command, ParameterError, Problem, Results
from ddp.results.progress import Log
from ddp.results.result import Result, values_of
from ddp.results.tables import Table
from ddp.settings import Settings

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
NOBODY = pwd.getpwnam("nobody").pw_uid
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes others")
Asked = list[fields.Parsed]
Process = collections.abc.Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Nothing of this machine's configuration takes part."""
    for name in list(os.environ):
        if name.startswith(config.PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setattr(config, "SYSTEM", tmp_path / "slurm-ddp.toml")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def process() -> collections.abc.Iterator[Process]:
    """Run the program under an ordinary account, with separate standard output and error."""
    with everybody.installed("ddp-program") as top:

        def run(*words: str, **how: typing.Any) -> "subprocess.CompletedProcess[str]":
            if os.geteuid() == 0 and "user" not in how:
                how["user"] = "nobody"
            env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **how.pop("env", {})}
            argv = [top / "bin" / "ddp", *words]
            return subprocess.run(
                argv, capture_output=True, text=True, check=False, cwd="/", env=env, **how
            )

        yield run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Asked:
    """Replace every verb's work by recording its parameters."""
    found: Asked = []

    def do(verb: verbs.Verb, settings: Settings, params: fields.Parsed, log: Log) -> Results:
        found.append(params)
        log("a line of progress")
        return {"run": "night", "table": "a\nb"}

    monkeypatch.setattr(verbs.Verb, "do", do)
    monkeypatch.setattr(prerequisites, "require", lambda *_, **__: None)
    monkeypatch.setattr(cli, "settings_of", lambda _: settings)
    return found


def one(asked: Asked) -> typing.Any:
    (params,) = asked
    return params


NAMED = (  # need a name
    "env create",
    "env show",
    "env remove",
    "image import",
    "fetch",
    "cancel",
    "remove",
    "export",
    "user add",
    "user sync",
)


@pytest.mark.parametrize("verb", verbs.ALL.values(), ids=lambda verb: verb.name)
def test_each_option_of_a_verb_has_a_flag_that_shows_the_same(verb: verbs.Verb):
    flags = {parameter.name: parameter for parameter in COMMANDS[tuple(verb.name.split())].params}
    options = declared.options(verb.options)
    extra = {"is_json", "arguments"} & flags.keys()
    assert set(flags) - extra == {option.name.replace("-", "_") for option in options}
    for option in options:
        flag = flags[option.name.replace("-", "_")]
        if isinstance(flag, click.Argument):
            assert option.text.argument
            continue
        assert isinstance(flag, click.Option)
        assert {f"--{option.name}", option.text.short or f"--{option.name}"} <= set(flag.opts)
        assert (flag.help or "").startswith(option.text.help)
        assert flag.is_flag == (option.kind == "boolean")
        assert (flag.type is click.INT) == (option.kind == "integer")
        assert list(getattr(flag.type, "choices", ())) == list(option.choices)


@pytest.mark.parametrize(
    "verb", [v for v in verbs.ALL.values() if v.name not in NAMED], ids=lambda verb: verb.name
)
def test_without_flags_the_models_defaults_count(
    asked: Asked, verb: verbs.Verb, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    code, _, err = typed(*verb.name.split())
    assert code == 0, err
    expected = fields.parse(verb.options, {"follow-timeout": 86400} if verb.name == "log" else {})
    if isinstance(expected, models.Session):  # its folder counts, too
        expected = expected.model_copy(update={"typed_in": str(pathlib.Path.cwd())})
    assert one(asked) == expected


def test_there_is_a_command_for_each_verb_and_all_its_texts_are_used():
    assert set(COMMANDS) == {tuple(verb.name.split()) for verb in verbs.ALL.values()}
    texts = {
        option.text for verb in verbs.ALL.values() for option in declared.options(verb.options)
    }
    known = [
        e
        for entry in declared.TEXTS.values()
        for e in ([entry] if "help" in entry else entry.values())
    ]
    assert {text.help for text in texts} == {entry["help"] for entry in known}


def test_alone_it_shows_the_commands_of_every_day_and_help_groups_them():
    code, out, err = typed()
    assert (code, err) == (0, "")
    daily = [verb.name for verb in verbs.ALL.values() if verb.section == "Every day"]
    assert re.findall(r"^  ddp (\w+)", out, re.MULTILINE) == daily
    assert len(daily) == 5
    _, out, _ = typed("submit", "--help")
    titles = ("Resources", "Code and environment", "Running", "Faults", "Slurm", "Examples")
    assert [line[:-1] for line in out.splitlines() if line[:-1] in titles] == list(titles)
    assert "[default: 16]" in out
    assert "ddp submit gpt --help lists gpt's" in " ".join(out.split())


@pytest.mark.parametrize("words", [(), ("env",)])
def test_help_names_every_command(words: tuple[str, ...]):
    code, out, err = typed(*words, "--help")
    assert (code, err) == (0, "")
    for found in COMMANDS:
        if found[:-1] == words:
            assert f"  {found[-1]} " in out
    assert len(set(re.findall(r"^  (?:env|image) +(.*)", out, re.MULTILINE))) in (0, 2), (
        "each group has its own words"
    )


@pytest.mark.parametrize(("words", "line"), CASES["a_mistake_is_one_line_that_names_it"])
def test_a_mistake_is_one_line_that_names_it(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    code, out, err = typed(*words)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert err.endswith(" --help\n")
    assert err[:-1].isprintable(), "one line, with nothing that a terminal would obey"


@pytest.mark.parametrize("error", [Problem("no such thing"), ParameterError("nodes", "too many")])
def test_a_failed_command_exits_with_1(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, error: Problem
):
    def fail(*_: object) -> typing.NoReturn:
        error.results = {"job-id": "40"}
        raise error

    monkeypatch.setattr(verbs.Verb, "do", fail)
    line = f"{'--' if isinstance(error, ParameterError) else ''}{error}"
    assert typed("submit") == (1, "job-id  40\n", f"ddp: {line}\n")
    code, out, err = typed("submit", "--json")
    assert (code, err) == (1, f"ddp: {line}\n")
    assert json.loads(out) == {"schema": 1, "job-id": 40, "error": line}


def test_results_are_shown_and_progress_goes_to_standard_error(asked: Asked):
    assert typed("list") == (0, "run  night\ntable:\na\nb\n", "a line of progress\n")


def test_standard_output_carries_the_thing_asked_for(monkeypatch: pytest.MonkeyPatch, asked: Asked):
    shown = {"run": "night", "text": "step 1\nstep 2", "job": "{}"}
    monkeypatch.setattr(verbs.Verb, "do", lambda *_: Result(shown, {"lines": [1]}, shown["text"]))
    assert typed("log") == (0, "step 1\nstep 2\n", "run: night\njob: {}\n")
    assert json.loads(typed("log", "--json")[1]) == {"schema": 1, "lines": [1]}
    monkeypatch.setattr(verbs.Verb, "do", lambda *_: Result(shown, {}, ""))
    assert typed("log", "-f") == (0, "", "run: night\njob: {}\n"), (
        "its lines have been printed as they came"
    )
    monkeypatch.setattr(verbs.Verb, "do", lambda *_: Result(shown, {}))
    assert typed("submit")[1] == "run  night\ntext:\nstep 1\nstep 2\n", (
        "without the job's specification"
    )


def test_a_remedy_is_shown_as_it_is_typed(monkeypatch: pytest.MonkeyPatch, asked: Asked):
    def fail(*_: object) -> typing.NoReturn:
        raise ParameterError(
            "resume", "dawn has no checkpoint", remedy=Command("show", arguments=("dawn",))
        )

    monkeypatch.setattr(verbs.Verb, "do", fail)
    assert typed("submit")[2] == "ddp: --resume: dawn has no checkpoint; ddp show dawn\n"


@pytest.mark.parametrize(
    "words", [("--json", "list"), ("list", "--json"), ("submit", "--json", "t.py", "--json")]
)
def test_for_programs_standard_output_is_json_alone(asked: Asked, words: tuple[str, ...]):
    code, out, err = typed(*words)
    assert (code, err) == (0, "a line of progress\n")
    assert json.loads(out) == {"schema": 1, "run": "night", "table": "a\nb"}


def test_amounts_are_numbers_for_programs():
    shown = {
        "run": "40",
        "job-id": "41",
        "loss": "0.5",
        "torch": "2.13",
        "runs": Table([("RUN", "LOSS"), ("a", "-")]),
    }
    names = Table([("NAME", "PYTHON", "HASH", "SIZE-MB"), ("007", "3.10", "12345678e1234567", "-")])
    assert values_of({"environments": names})["environments"] == [
        {"name": "007", "python": "3.10", "hash": "12345678e1234567", "size-mb": None}
    ]
    assert values_of(shown) == {
        "run": "40",
        "job-id": 41,
        "loss": 0.5,
        "torch": "2.13",
        "runs": [{"run": "a", "loss": None}],
    }


OWN = (
    *"-x --y z it's \" $HOME $(id) * -- -N 9 --json --help --nodes=7 --env A=b - \\ é".split(),
    "a b",
    "",
)


@pytest.mark.parametrize("verb", ["submit", "sweep"])
def test_a_scripts_own_arguments_are_not_touched(
    asked: Asked, verb: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code, out, _ = typed(verb, "-N", "2", "train.py", *OWN)
    assert code == 0
    assert out.startswith("run "), "--json was the script's"
    params = one(asked)
    assert (params.nodes, params.workload, params.words) == (2, f"{tmp_path}/train.py", OWN)
    assert params.env == ""


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("train.py", "{cwd}/train.py"),
        ("../train.py", "{above}/train.py"),
        ("sub/../../train.py", "{above}/train.py"),
        ("/srv/train.py", "/srv/train.py"),
        ("gpt", "gpt"),
        ("./gpt", "{cwd}/gpt"),
    ],
)
def test_a_relative_path_is_below_the_folder_where_it_is_typed(
    asked: Asked, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, word: str, path: str
):
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    code, _, err = typed("submit", word)
    assert code == 0, err
    assert one(asked).workload == path.format(cwd=tmp_path / "here", above=tmp_path)


@pytest.mark.parametrize("name", ["night", "40", "40_3"])
def test_a_run_is_named_by_its_name_or_its_job(asked: Asked, name: str):
    for verb in ("show", "log", "watch", "resume"):
        assert typed(verb, name)[0] == 0
        assert typing.cast(typing.Any, asked.pop()).run == name
    for verb in ("compare", "report"):
        assert typed(verb, name, "dawn")[0] == 0
        assert typing.cast(typing.Any, asked.pop()).runs == f"{name} dawn"
    assert typed("cancel", name, "dawn")[0] == 0
    assert one(asked).run == f"{name} dawn"


def test_a_metric_has_blanks_and_may_be_repeated(asked: Asked):
    given = ("loss=loss = {}", "step=at step {}")
    assert typed("submit", "--metric", given[0], "--metric", given[1], "train.py")[0] == 0
    assert fields.metrics(one(asked).metric) == (("loss", "loss = {}"), ("step", "at step {}"))


@pytest.mark.parametrize("verb", ["submit", "doctor", "bench", "prepare"])
def test_sbatch_s_variables_count_where_no_flag_is_given(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, verb: str
):
    monkeypatch.setenv("SBATCH_ACCOUNT", "def-lab")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    assert typed(verb, "--partition", "long")[0] == 0
    assert (getattr(asked[-1], "account"), getattr(asked[-1], "partition")) == ("def-lab", "long")  # noqa: B009


def test_sbatch_s_variables_set_resources_too(asked: Asked, monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "CONSTRAINT": "[ib|opa]",
        "GPUS_PER_NODE": "a100:2",
        "MEM_PER_NODE": "64G",
        "TIMELIMIT": "8:00:00",
    }.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    assert typed("submit", "train.py")[0] == 0
    params = one(asked)
    assert (params.constraint, params.num_gpus) == ("[ib|opa]", 2)
    assert (params.memory, params.time_limit) == ("64G", "8:00:00")


def test_env_is_a_variable_and_may_be_repeated(asked: Asked, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HERE", "x'y z")
    assert (
        typed(
            "submit", "-e", "mine", "--env", "A=b c", "--env", "HERE", "--env", "PROFILE_MEMORY="
        )[0]
        == 0
    )
    assert one(asked).environment == "mine"
    assert fields.variables(one(asked).env) == (
        ("A", "b c"),
        ("HERE", "x'y z"),
        ("PROFILE_MEMORY", ""),
    )


def test_a_secret_of_this_terminal_is_no_variable_of_the_script(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_API_KEY", "se cret")
    assert typed("submit", "--env", "WANDB_API_KEY", "--env", "A=b", "--env-file", "mine")[0] == 0
    assert (one(asked).secrets, one(asked).env) == ({"WANDB_API_KEY": "se cret"}, "A=b")
    assert one(asked).env_file == str(pathlib.Path.cwd() / "mine")
    assert "se cret" not in repr(one(asked))
    for words in (["submit", "--env", "DB_PASSWORD"], ["bench", "--env", "WANDB_API_KEY"]):
        code, _, error = typed(*words)
        assert (code, "use env-file" in error, "cret" in error) == (2, True, False), error


def test_a_log_is_followed_until_its_end(asked: Asked):
    assert typed("log", "-f", "night")[0] == 0
    assert (one(asked).follow, one(asked).follow_timeout) == (True, 86400)


def test_a_workloads_help_is_for_every_account(process: Process):
    """Also for root, who submits nothing, and before Slurm and the workspace are asked."""
    done = process("submit", "gpt", "--help", **({"user": "root"} if os.geteuid() == 0 else {}))
    assert (done.returncode, done.stderr) == (0, "")
    assert "--steps" in done.stdout


@needs_root
@pytest.mark.parametrize(
    "words", [("list",), ("submit", "gpt"), ("render",), ("watch",), ("report",)]
)
def test_root_is_refused(process: Process, words: tuple[str, ...]):
    done = process(*words, user="root")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "jobs never run as root; log in to an ordinary account: su - NAME" in done.stderr


def test_the_process_fails_with_one_line_where_slurm_is_missing_or_silent(process: Process):
    done = process("--workspace", "/var/tmp/nowhere", "cancel", "first", "--json")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ddp: ")
    assert list(json.loads(done.stdout)) == ["schema", "error"]
    assert "\x1b" not in done.stdout + done.stderr


def test_the_process_lists_what_there_is_where_slurm_is_missing_or_silent(process: Process):
    done = process("--workspace", "/var/tmp/nowhere", "list", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["runs"]) == (0, [])
    assert found["slurm"].startswith("Slurm does not answer: ")


def test_a_configuration_that_cannot_be_is_usage(process: Process):
    done = process("list", env={"DDP_TENSORBOARD": "perhaps"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "ddp list: $DDP_TENSORBOARD: tensorboard: 'perhaps' is not allowed; true or false"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["--help", "submit --help", "--version"])
def test_a_reader_that_has_enough_is_no_failure(words: str):
    """As in `ddp --help | head -1`, when the reader has exited."""
    reading, writing = os.pipe()
    os.close(reading)
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY / "lib"), "HOME": "/nonexistent"}
    argv = [sys.executable, "-B", "-m", "ddp", *words.split()]
    try:
        done = subprocess.run(
            argv, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, cwd="/", env=env
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"workspace": "x"}, "workspace: 'x' is not allowed; an absolute path"),
        ({"workspace": "/mnt/shared", "nodse": 1}, "nodse: unknown option; there are: "),
        (
            {"workspace": "/mnt/shared", "tensorboard": "yes"},
            "tensorboard: 'yes' is not allowed; true or false",
        ),
    ],
)
def test_the_charm_is_answered_in_json_where_its_configuration_cannot_be(
    given: dict[str, object], error: str
):
    request = {"do": "check", "config": given, "unit": "trainer/0"}
    answer = service.answer(request, print)
    assert answer["error"].startswith(error)
    assert answer["results"] == {}
    argv = [sys.executable, "-B", "-m", "ddp", "serve"]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY / "lib")}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd="/", env=env, stdin=pipe, stdout=pipe, text=True) as served:
        assert served.stdin is not None
        assert served.stdout is not None
        served.stdin.write(json.dumps(request) + "\n")
        served.stdin.flush()  # and stays open, as long as the charm is there
        assert json.loads(served.stdout.read()) == answer
        assert served.wait(30) == 0
