"""The charm's edge: what is declared is what is parsed, and nothing hostile gets past it."""

import pathlib
import subprocess
import sys
import typing

import pytest
from harness import META
from hostile_values import NASTY, ROAMING, TEXTS

from ddp import verbs
from ddp.base import ParameterError
from ddp.options import declared, fields

REPOSITORY = pathlib.Path(__file__).parents[3]
MODELS = {name: action.options for name, action in verbs.ACTIONS.items()}


def test_there_are_more_than_two_hundred_nasty_texts():
    assert len(NASTY) >= 200


@pytest.mark.parametrize(("action", "name"), TEXTS)
def test_nothing_hostile_gets_past_the_edge(action: str, name: str):
    for nasty in (
        NASTY if name == "args" else NASTY + ROAMING
    ):  # args are words for the job, which has its user's rights
        with pytest.raises(ParameterError) as caught:
            fields.parse(MODELS[action], {name: nasty})
        line = str(caught.value)
        assert line.startswith(f"{name}: ")
        assert line.isprintable(), "one line, with nothing that a terminal would obey"
        assert line.isascii()
        assert len(line) < 400


@pytest.mark.parametrize("name", list(META["config"]["options"]))
def test_nothing_hostile_gets_into_an_option(name: str):
    for nasty in NASTY:
        if name == "torch-index" and nasty == "":
            continue
        with pytest.raises(ParameterError, match=f"^{name}: "):
            fields.parse(fields.Config, {name: nasty})


@pytest.mark.parametrize("action", list(MODELS))
def test_what_a_parameter_declares_is_what_its_parser_allows(action: str):
    for option in declared.options(MODELS[action]):
        for bound, step in ((option.minimum, -1), (option.maximum, 1)):
            if bound is not None:
                fields.parse(MODELS[action], {option.name: bound})
                with pytest.raises(ParameterError, match=rf"^{option.name}: "):
                    fields.parse(MODELS[action], {option.name: bound + step})
        for choice in option.choices:
            fields.parse(MODELS[action], {option.name: choice})


def test_the_charm_declares_its_actions_as_the_program_does():
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "actions.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_options_are_declared_as_they_are_parsed():
    options = META["config"]["options"]
    assert {str(f.alias): f.default for f in fields.Config.model_fields.values()} == {
        name: about.get("default", "") for name, about in options.items()
    }


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"nodes": 0}, "nodes: 0 is not allowed; a whole number from 1 to 4096"),
        ({"nodes": True}, "nodes: True is not allowed; a whole number"),
        ({"nodes": 1.5}, "nodes: 1.5 is not allowed; a whole number"),
        ({"nodes": "2"}, "nodes: '2' is not allowed; a whole number"),
        ({"gpus-per-node": -1}, "gpus-per-node: -1 is not allowed; a whole number from 0 to 64"),
        ({"wait": "yes"}, "wait: 'yes' is not allowed; true or false"),
        ({"partition": 3}, "partition: 3 is not allowed; a text"),
        (
            {"run": "../x"},
            "run: '../x' is not allowed; only letters, digits and . _ -, beginning with a letter or digit",
        ),
        (
            {"args": "--lr '1'"},
            "args: \"--lr '1'\" is not allowed; only letters, digits, blanks and . _ + = / : , @ % ^ -",
        ),
        ({"args": "x" * 1000000}, "args: 1000000 characters; at most 4096 are allowed"),
        (
            {"workload": "/a/../b"},
            "workload: '/a/../b' is not allowed; write the path without . and .. as parts",
        ),
        (
            {"time-limit": "soon"},
            "time-limit: 'soon' is not allowed; minutes, MM:SS, H:MM:SS, D-H, D-H:MM or D-HH:MM:SS, from 1 minute to 365 "
            "days, or UNLIMITED",
        ),
        ({"memory": "0"}, "memory: '0' is not allowed; a whole number with M, G or T behind it, such as 8G"),
        ({"env": "A"}, "env: 'A' is not NAME=value; separate several by blanks"),
        ({"env": "1A=b"}, "env: '1A=b' is not NAME=value; separate several by blanks"),
        ({"env": "A=1 A=2"}, "env: A is given twice"),
        ({"env": "LD_PRELOAD=/x"}, "env: LD_PRELOAD is set by the job itself; choose another variable"),
        ({"env": "SLURM_JOB_ID=1"}, "env: SLURM_JOB_ID is set by the job itself; choose another variable"),
        ({"env": "MASTER_ADDR=x"}, "env: MASTER_ADDR is set by the job itself; choose another variable"),
    ],
)
def test_a_refusal_names_the_parameter_and_what_is_allowed(given: dict[str, object], line: str):
    with pytest.raises(ParameterError) as caught:
        fields.parse(fields.SubmitDdp, given)
    assert str(caught.value) == line


@pytest.mark.parametrize("action", list(MODELS))
def test_an_unknown_parameter_is_refused_by_name(action: str):
    known = ", ".join(sorted(META["actions"][action]["params"]))
    with pytest.raises(ParameterError) as caught:
        fields.parse(MODELS[action], {"nodse": 2})
    assert str(caught.value) == f"nodse: no such parameter; there are: {known}"


def test_a_missing_parameter_is_named():
    class Needs(fields.Parsed):
        job_id: fields.JobId

    with pytest.raises(ParameterError, match=r"^job-id: must be given$"):
        fields.parse(Needs, {})


def test_a_hostile_name_of_a_parameter_is_shown_harmlessly():
    with pytest.raises(ParameterError) as caught:
        fields.parse(fields.ListJobs, {"\x1b[31m$(id)\n" * 100: 1})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "mib"), [("1", 1), ("512", 512), ("512M", 512), ("8G", 8192), ("2T", 2 * 1024 * 1024)]
)
def test_memory(text: str, mib: int):
    assert fields.memory_mb(text) == mib


def test_variables():
    parsed = fields.parse(fields.SubmitDdp, {"env": "NCCL_DEBUG=INFO  A=b=c EMPTY="})
    assert fields.variables(parsed.env) == (("NCCL_DEBUG", "INFO"), ("A", "b=c"), ("EMPTY", ""))


def test_what_is_parsed_cannot_be_changed():
    parsed: typing.Any = fields.parse(fields.SubmitDdp, {})
    with pytest.raises(ValueError, match="frozen"):
        parsed.nodes = 3
