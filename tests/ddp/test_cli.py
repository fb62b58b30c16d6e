"""The command line: what is typed, what is written where, and how it ends; the real process where that matters."""

import collections.abc
import json
import os
import pathlib
import pwd
import shutil
import subprocess
import sys
import typing

import click
import everybody
import pytest
import yaml
from cluster import Cluster
from command_line import COMMANDS, typed
from pip_double import Pip

from ddp import cli, config, readiness, service, verbs
from ddp.base import Log, ParameterError, Results, Settings, TrainerError
from ddp.options import declared, fields

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
    """Run the program as its users do, as an ordinary account, with standard output and error apart."""
    with everybody.installed("ddp-program") as top:

        def run(*words: str, **how: typing.Any) -> "subprocess.CompletedProcess[str]":
            if os.geteuid() == 0 and "user" not in how:
                how["user"] = "nobody"
            env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **how.pop("env", {})}
            argv = [top / "bin" / "ddp", *words]
            return subprocess.run(argv, capture_output=True, text=True, check=False, cwd="/", env=env, **how)

        yield run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Asked:
    """Do nothing in place of any verb but note what is asked of it."""
    found: Asked = []

    def do(verb: verbs.Verb, settings: Settings, params: fields.Parsed, log: Log) -> Results:
        found.append(params)
        log("a line of progress")
        return {"run": "night", "table": "a\nb"}

    monkeypatch.setattr(verbs.Verb, "do", do)
    monkeypatch.setattr(readiness, "require", lambda *_, **__: None)
    monkeypatch.setattr(cli, "settings_of", lambda _: settings)
    return found


def one(asked: Asked) -> typing.Any:
    (params,) = asked
    return params


NAMED = ("create-environment", "show-environment", "remove-environment")  # want a name


@pytest.mark.parametrize("verb", verbs.ALL.values(), ids=lambda verb: verb.action)
def test_each_option_of_a_verb_has_a_flag_that_says_the_same(verb: verbs.Verb):
    flags = {parameter.name: parameter for parameter in COMMANDS[verb.words].params}
    options = declared.options(verb.params)
    extra = {"is_json", "arguments"} & flags.keys()
    assert set(flags) - extra == {option.name.replace("-", "_") for option in options}
    for option in options:
        flag = flags[option.name.replace("-", "_")]
        if isinstance(flag, click.Argument):
            continue
        assert isinstance(flag, click.Option)
        assert f"--{option.name}" in flag.opts
        assert (flag.help or "").startswith(option.description.rstrip("."))
        assert flag.is_flag == (option.kind == "boolean")
        assert (flag.type is click.INT) == (option.kind == "integer")
        assert list(getattr(flag.type, "choices", ())) == list(option.choices)


@pytest.mark.parametrize("verb", verbs.ACTIONS.values(), ids=lambda verb: verb.action)
def test_each_flag_is_a_parameter_of_the_charms_action(verb: verbs.Verb):
    charm = yaml.safe_load((REPOSITORY / "charms" / "ddp-trainer" / "charmcraft.yaml").read_text())
    declared_there = charm["actions"][verb.action]["params"]
    assert declared_there == {option.name: option.schema() for option in declared.options(verb.params)}


@pytest.mark.parametrize(
    "verb", [verb for verb in verbs.ALL.values() if verb.action not in NAMED], ids=lambda verb: verb.action
)
def test_what_is_not_typed_is_left_to_the_model(asked: Asked, verb: verbs.Verb):
    code, _, err = typed(*verb.words)
    assert code == 0, err
    more = {"follow-timeout": 86400} if verb.action == "run-log" else {}
    assert one(asked) == fields.parse(verb.params, more)


def test_there_is_a_command_for_each_verb_and_three_more():
    extra = {("watch",), ("report",), ("render",)}
    assert set(COMMANDS) == {verb.words for verb in verbs.ALL.values()} | extra


@pytest.mark.parametrize("words", [(), ("env",)])
def test_help_names_every_command(words: tuple[str, ...]):
    code, out, err = typed(*words, "--help")
    assert (code, err) == (0, "")
    for found in COMMANDS:
        if found[:-1] == words:
            assert f"  {found[-1]} " in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nope"], "ddp: No such command 'nope'; see: ddp --help"),
        (["env", "nope"], "ddp env: No such command 'nope'; see: ddp env --help"),
        ([], "ddp: name a command; see: ddp --help"),
        (["env"], "ddp env: name a command; see: ddp env --help"),
        (["--nope", "list"], "ddp: No such option '--nope'"),
        (["list", "--nope"], "ddp list: No such option '--nope'"),
        (["list", "x"], "ddp list: Got unexpected extra argument (x)"),
        (["list", "--lines", "many"], "ddp list: Invalid value for '--lines' / '-n': 'many' is not a valid integer"),
        (["list", "--lines", "0"], "ddp list: --lines: 0 is not allowed; a whole number from 1 to 1000"),
        (["list", "--lines"], "ddp: Option '--lines' requires an argument"),
        (["submit", "--launcher", "x"], "ddp submit: Invalid value for '--launcher': 'x' is not one of"),
        (["submit", "--nodes", "0"], "ddp submit: --nodes: 0 is not allowed"),
        (["submit", "--memory", "$(id)"], "ddp submit: --memory: '$(id)' is not allowed"),
        (["submit", "--run", "a\nb"], "ddp submit: --run: 'a\\nb' is not allowed"),
        (["submit", "--env", "A=1", "--env", "A=2"], "ddp submit: --env: A is given twice"),
        (["submit", "--env", "one", "--env", "two"], "ddp submit: --env: 'one' is not NAME=value"),
        (["bench", "--env", "one"], "ddp bench: --env: 'one' is not NAME=value"),
        (["submit", "a b.py"], "ddp submit: workload: "),
        (["env", "create"], "ddp env create: Missing option '--requirements'"),
        (["env", "create", "x"], "ddp env create: Missing option '--requirements'"),
        (["env", "remove"], "ddp env remove: name: must be given"),
        (["log", "a/b"], "ddp log: run: 'a/b' is not allowed"),
        (["list", "--no\npe\x1b[31m"], "ddp list: No such option"),
        (["--workspace", "x", "list"], "ddp list: --workspace: workspace: 'x' is not allowed"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(words: list[str], line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    code, out, err = typed(*words)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert err.endswith(" --help\n")
    assert err[:-1].isprintable(), "one line, with nothing that a terminal would obey"


@pytest.mark.parametrize("error", [TrainerError("no such thing"), ParameterError("nodes", "too many")])
def test_what_was_asked_failed(asked: Asked, monkeypatch: pytest.MonkeyPatch, error: TrainerError):
    def fail(*_: object) -> typing.NoReturn:
        error.results = {"job-id": "40"}
        raise error

    monkeypatch.setattr(verbs.Verb, "do", fail)
    line = f"{'--' if isinstance(error, ParameterError) else ''}{error}"
    assert typed("submit") == (1, "job-id  40\n", f"ddp: {line}\n")
    code, out, err = typed("submit", "--json")
    assert (code, err) == (1, f"ddp: {line}\n")
    assert json.loads(out) == {"job-id": "40", "error": line}


def test_results_are_shown_and_progress_goes_to_standard_error(asked: Asked):
    assert typed("list") == (0, "run  night\ntable:\na\nb\n", "a line of progress\n")


@pytest.mark.parametrize("words", [("--json", "list"), ("list", "--json"), ("submit", "--json", "t.py", "--json")])
def test_for_programs_standard_output_is_json_alone(asked: Asked, words: tuple[str, ...]):
    code, out, err = typed(*words)
    assert (code, err) == (0, "a line of progress\n")
    assert json.loads(out) == {"run": "night", "table": "a\nb"}


OWN = ("-x", "--y", "z", "a b", "it's", '"', "$HOME", "$(id)", "*", "", "--", "-N", "9", "--json", "--help", "--nodes=7",
       "--env", "A=b", "-", "\\", "é")  # fmt: skip


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


def test_a_scripts_arguments_reach_its_job(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cli, "settings_of", lambda _: settings)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "project")
    code, _, err = typed("submit", "-N", "1", "train.py", *OWN)
    assert code == 0, err
    assert tuple(word.text for word in cluster.job(40).training().command[1:]) == OWN


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("train.py", "{cwd}/train.py"),
        ("./train.py", "{cwd}/train.py"),
        ("sub/train.py", "{cwd}/sub/train.py"),
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


def test_other_paths_may_be_relative_too(asked: Asked, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert typed("env", "create", "mine", "--requirements", "requirements.txt")[0] == 0
    assert one(asked).requirements == f"{tmp_path}/requirements.txt"


@pytest.mark.parametrize("verb", ["log", "show", "resume", "cancel"])
@pytest.mark.parametrize("name", ["40", "40_3", "night"])
def test_a_run_is_named_by_its_name_its_job_or_its_element(asked: Asked, verb: str, name: str):
    assert typed(verb, name)[0] == 0
    assert one(asked).run == name


def test_several_runs_are_named_at_once(asked: Asked):
    assert typed("compare", "40", "41")[0] == 0
    assert typed("cancel", "a", "b")[0] == 0
    assert typing.cast(typing.Any, asked[0]).runs == "40 41"
    assert typing.cast(typing.Any, asked[1]).run == "a b"


@pytest.mark.parametrize(
    ("words", "environment", "env"),
    [
        ((), None, ""),
        (("--env", "mine"), "mine", ""),
        (("--env", "A=b"), None, "A=b"),
        (("--env", "A="), None, "A="),
        (("--env", "A=b C=d"), None, "A=b C=d"),
        (("--env", "A=b", "--env", "C=d"), None, "A=b C=d"),
        (("--env", "mine", "--env", "A=b"), "mine", "A=b"),
        (("--environment", "mine", "--env", "A=b"), "mine", "A=b"),
    ],
)
def test_env_is_an_environment_or_a_variable(asked: Asked, words: tuple[str, ...], environment: str | None, env: str):
    assert typed("submit", *words)[0] == 0
    assert (one(asked).environment, one(asked).env) == (environment, env)


def test_a_log_is_followed_until_its_end(asked: Asked):
    assert typed("log", "-f", "night")[0] == 0
    assert (one(asked).follow, one(asked).follow_timeout) == (True, 86400)


@needs_root
@pytest.mark.parametrize("words", [("list",), ("submit", "gpt"), ("render",), ("watch",), ("report",)])
def test_root_is_refused(process: Process, words: tuple[str, ...]):
    done = process(*words, user="root")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "jobs never run as root; log in as an ordinary account: su - NAME" in done.stderr


def test_the_process_fails_with_one_line_where_slurm_is_missing_or_silent(process: Process):
    done = process("--workspace", "/var/tmp/nowhere", "list", "--json")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("ddp: ")
    assert list(json.loads(done.stdout)) == ["error"]
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("words", [("--help",), ("list", "--help"), ("nope",), ("--version",)])
def test_there_is_no_colour_without_a_terminal(process: Process, words: tuple[str, ...]):
    done = process(*words, env={"TERM": "xterm-256color", "COLORTERM": "truecolor"})
    assert "\x1b" not in done.stdout + done.stderr
    assert done.returncode == (2 if words == ("nope",) else 0)


def test_a_configuration_that_cannot_be_is_usage(process: Process):
    done = process("list", env={"DDP_TENSORBOARD": "perhaps"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ddp list: $DDP_TENSORBOARD: tensorboard: 'perhaps' is not allowed; true or false")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["--help", "submit --help", "--version"])
def test_a_reader_that_has_enough_is_no_failure(words: str):
    """As `ddp --help | head -1` does, with nobody at the other end any more."""
    reading, writing = os.pipe()
    os.close(reading)
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY / "lib"), "HOME": "/nonexistent"}
    argv = [sys.executable, "-B", "-m", "ddp", *words.split()]
    try:
        done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, cwd="/", env=env)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_words_are_completed(process: Process):
    done = process(env={"_DDP_COMPLETE": "bash_complete", "COMP_WORDS": "ddp sub", "COMP_CWORD": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain,submit\n", "")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"workspace": "x"}, "workspace: 'x' is not allowed; an absolute path"),
        ({"workspace": "/mnt/shared", "nodse": 1}, "nodse: no such parameter; there are: "),
        ({"workspace": "/mnt/shared", "tensorboard": "yes"}, "tensorboard: 'yes' is not allowed; true or false"),
    ],
)
def test_the_charm_is_answered_in_json_where_its_configuration_cannot_be(given: dict[str, object], error: str):
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


def test_the_charm_asks_for_what_there_is_not(workspace: pathlib.Path):
    request = {"do": "create-environment", "config": {"workspace": str(workspace)}, "unit": "trainer/0", "params": {}}
    found = service.answer(request, print)
    assert found == {"error": "do: there is no 'create-environment'", "results": {}}


@needs_root
def test_a_users_command_runs_whole_as_that_user(process: Process):
    place = pathlib.Path("/var/tmp") / f"ddp-cli-{os.getpid()}"
    place.mkdir(mode=0o1777)
    place.chmod(0o1777)
    try:
        done = process("--workspace", str(place), "report", "night")
        assert done.returncode == 1
        assert done.stderr == f"ddp: runs: there is no run 'night' in {place}/runs; ddp list\n"
        assert all(path.owner() == "nobody" for path in place.rglob("*"))
    finally:
        shutil.rmtree(place)
