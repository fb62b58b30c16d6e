"""export: refusals, and checkpoints of other programs, which are copied unchanged."""

import pathlib
import typing

import left_by_jobs
import pytest
from run_verbs import Program

from ddp.actions import export
from ddp.options import config, fields, models
from ddp.problem import Problem
from ddp.results.result import Result


def exported(program: Program, to: pathlib.Path, **params: typing.Any) -> Result:
    options = {"workspace": str(program.workspace)}
    settings = config.settings(fields.parse(config.Config, options))
    given = fields.parse(models.Export, {"run": "mine", "to": str(to), **params})
    return export.export(settings, given, program.log.append)


@pytest.fixture
def mine(program: Program) -> pathlib.Path:
    """Return the folder of a script's run, with two checkpoints of transformers' Trainer."""
    left_by_jobs.leave_script(program, "mine", [2.0, 1.0])
    folder = program.workspace / "runs" / "mine"
    for step in (10, 20):
        place = folder / "code" / "out" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        state = '{"best_model_checkpoint": "/mnt/out/checkpoint-10"}'
        (place / "trainer_state.json").write_text(state)
        (place / "model.safetensors").write_text(str(step))
    return folder


@pytest.mark.parametrize(
    ("params", "step"),
    [({}, "20"), ({"checkpoint": "best"}, "10"), ({"checkpoint": "checkpoint-10"}, "10")],
)
def test_another_programs_checkpoint_is_copied_with_its_settings(
    program: Program,
    mine: pathlib.Path,
    tmp_path: pathlib.Path,
    params: dict[str, str],
    step: str,
):
    result = exported(program, tmp_path / "model", **params)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"model.safetensors", "trainer_state.json", "training.json"}
    assert (tmp_path / "model" / "model.safetensors").read_text() == step
    assert result.shown["checkpoint"] == f"checkpoint-{step}"
    assert result.shown["form"].startswith("a copy")
    assert not list(tmp_path.glob(".model*"))


def test_what_cannot_be_exported_is_refused_in_one_line(
    program: Program, mine: pathlib.Path, tmp_path: pathlib.Path
):
    (tmp_path / "there").mkdir()
    with pytest.raises(Problem, match="exists already; give another folder"):
        exported(program, tmp_path / "there")
    with pytest.raises(Problem, match="none does not exist"):
        exported(program, tmp_path / "none" / "model")
    with pytest.raises(Problem, match="has no checkpoint x; it has checkpoint-10, checkpoint-20"):
        exported(program, tmp_path / "model", checkpoint="x")
    left_by_jobs.leave_script(program, "bare", [2.0])
    with pytest.raises(Problem, match=r"bare has no checkpoint in .*; ddp show bare"):
        exported(program, tmp_path / "model", run="bare")
    assert not (tmp_path / "model").exists()
