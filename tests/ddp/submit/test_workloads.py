"""The kinds of workload: which options each has, and the command of its ranks."""

import pathlib

import pytest
from script_texts import REQUEST

from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.settings import Settings
from ddp.submit import scripts, workloads


def of(settings: Settings, *, resume: str = "auto", **given: object) -> workloads.Workload:
    options = {name.replace("_", "-"): value for name, value in given.items()}
    return workloads.of(settings, fields.parse(models.SubmitDdp, options), resume=resume)


def case(settings: Settings) -> workloads.Case:
    return workloads.Case(REQUEST, settings.workspace.look(), None, (), workloads.Notes())


@pytest.mark.parametrize(
    ("workload", "kind"), [("gpt", "gpt"), ("smoke", "smoke"), ("/mnt/train.py", "script")]
)
def test_a_workload_is_of_the_kind_that_its_option_names(
    settings: Settings, workload: str, kind: str
):
    assert of(settings, workload=workload).kind == kind


@pytest.mark.parametrize("workload", ["smoke", "/mnt/train.py"])
@pytest.mark.parametrize(
    ("given", "option"), [({"dataset": "web"}, "dataset"), ({"resume": "never"}, "resume")]
)
def test_only_gpt_has_a_dataset_and_a_run_to_resume_from(
    settings: Settings, workload: str, given: dict[str, str], option: str
):
    found = of(settings, **{"workload": workload, **given})
    with pytest.raises(ParameterError, match=f"^{option}: only the workload gpt has it"):
        found.resolve(case(settings))


def test_a_workload_of_ours_measures_by_itself(settings: Settings):
    line = "^metric: only a script has it; the workload gpt measures by itself"
    with pytest.raises(ParameterError, match=line):
        of(settings, metric="loss=loss {}").check(case(settings), workloads.RunName("night"))


@pytest.mark.parametrize("option", ["profile-ranks", "profile-steps"])
def test_options_of_a_profile_need_the_profile(settings: Settings, option: str):
    value = "1" if option == "profile-ranks" else "3-4"
    workload = of(settings, **{option: value})
    with pytest.raises(ParameterError, match=f"^{option}: needs profile=torch"):
        workload.check(case(settings), workloads.RunName("night"))


def test_a_profiled_rank_is_one_of_the_job(settings: Settings):
    workload = of(settings, profile="torch", profile_ranks="0,2")
    with pytest.raises(ParameterError, match=r"^profile-ranks: no rank 2; the job has 2, from 0"):
        workload.check(case(settings), workloads.RunName("night"))


def test_the_default_dataset_is_prepared_first(settings: Settings):
    found = of(settings).resolve(case(settings))
    assert found.prepares
    assert found.dataset == str(settings.workspace.datasets / "python-stdlib")


def test_gpt_trains_on_its_dataset_and_resumes_from_its_own_checkpoint(settings: Settings):
    program = of(settings).resolve(case(settings)).program()
    assert program.leaves_outcome
    assert program.resume == "auto"
    assert program.command == (
        "--module",
        "ddptrain",
        "train",
        "--run-dir",
        scripts.RUN_DIR,
        "--data",
        str(settings.workspace.datasets / "python-stdlib"),
        "--resume",
        scripts.RESUME,
    )


def test_a_script_runs_with_its_own_arguments(settings: Settings):
    path = str(settings.workspace.path / "train.py")
    pathlib.Path(path).touch()
    program = of(settings, workload=path, args="--lr 1", snapshot=False).program()
    assert program.command == (path, "--lr", "1")
    assert not program.leaves_outcome


def test_options_of_a_sweep_are_formatted_for_their_program(settings: Settings):
    choice = {"compile": "true", "lr": "0.1"}
    assert of(settings).options_of(choice) == ["--compile", "--lr=0.1"]
    script = of(settings, workload="/mnt/train.py")
    assert script.options_of(choice) == ["--compile=true", "--lr=0.1"]
