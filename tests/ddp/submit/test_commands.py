"""Command lines of other programs' documentation, and what submit makes of them."""

import pathlib
import shlex
import typing

import pytest
import yaml

from ddp.node import spec
from ddp.problem import ParameterError
from ddp.submit import commands

LINES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())
FSDP = "distributed_type: FSDP\n"
Values = dict[str, typing.Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The user's current folder; the account has no configuration of accelerate."""
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


def unwrap(line: str) -> commands.Command:
    """Give a line to `unwrap` as the command line does, after its parsed options."""
    words = shlex.split(line)
    values: dict[str, object] = {}
    if words[0] == "-m":
        values["module"] = bool(words.pop(0))
    if words[0] == "--launcher":
        values["launcher"] = words.pop(1)
        words.pop(0)
    return commands.unwrap(values | {"workload": words[0]}, tuple(words[1:]))


def remarks(command: commands.Command) -> tuple[str, ...]:
    return typing.cast("tuple[str, ...]", command.facts.get("remarks", ()))


@pytest.mark.parametrize("case", LINES, ids=[case[0] for case in LINES])
def test_a_line_of_a_readme(case: list[typing.Any]):
    line, options = case[:2]
    facts: Values = case[2] if len(case) > 2 else {}
    found = unwrap(line)
    assert found.values == options
    assert bool(found.facts.get("is_command")) == facts.get("command", False)
    settings = typing.cast("spec.Accelerate | None", found.facts.get("accelerate"))
    assert (None if settings is None else list(settings.words)) == facts.get("accelerate")
    for text, remark in zip(facts.get("remark", []), remarks(found), strict=True):
        assert text in remark
    words = shlex.split(line)
    assert words[len(words) - len(found.arguments) :] == [*found.arguments]


def test_the_text_of_accelerates_configuration_goes_with_the_job(folder: pathlib.Path):
    assert unwrap("accelerate launch --config_file fsdp.yaml train.py").facts[
        "accelerate"
    ] == spec.Accelerate((), FSDP, ".yaml")
    assert unwrap("accelerate launch train.py").facts["accelerate"] == spec.Accelerate()
    default = folder / "hf" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("mixed_precision: bf16\n")
    found = unwrap("accelerate launch train.py")
    assert found.facts["accelerate"] == spec.Accelerate((), "mixed_precision: bf16\n", ".yaml")
    assert str(default) in remarks(found)[0]
    assert unwrap("accelerate launch --cpu train.py").facts["accelerate"] == spec.Accelerate(
        ("--cpu",)
    )


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * 70_000])
def test_a_configuration_that_is_none_is_refused(folder: pathlib.Path, content: bytes):
    (folder / "odd.yaml").write_bytes(content)
    with pytest.raises(ParameterError, match=r"odd\.yaml"):
        unwrap("accelerate launch --config_file odd.yaml train.py")


def test_a_projects_own_environment_is_taken_with_uv_run(folder: pathlib.Path):
    (folder / ".venv").mkdir()
    (folder / ".venv" / "pyvenv.cfg").touch()
    found = unwrap("uv run train.py")
    assert (found.facts, found.values) == (
        {"active": str(folder / ".venv")},
        {"workload": "train.py"},
    )


def test_a_command_that_is_typed_with_its_path_is_one_of_that_environment(folder: pathlib.Path):
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "pyvenv.cfg").touch()
    (folder / ".venv" / "bin" / "my-train").touch()
    found = unwrap(f"{folder}/.venv/bin/my-train 1")
    assert found.values == {"workload": "my-train"}
    assert found.facts == {"active": str(folder / ".venv"), "is_command": True}
    launched = unwrap(".venv/bin/accelerate launch train.py")
    assert launched.values == {"workload": "train.py"}
    assert launched.facts["active"] == str(folder / ".venv")


def test_a_file_goes_before_a_command_of_its_name(folder: pathlib.Path):
    (folder / "trl").touch()
    assert unwrap("trl sft") == commands.Command({"workload": "trl"}, ("sft",))
