"""A function submitted from Python: its calls' file, its run's name, and both sides' options."""

import json
import pathlib
import stat

import pytest
from cluster import Cluster
from pip_double import Pip

from ddp.actions import verbs
from ddp.options import fields, models
from ddp.problem import Problem
from ddp.results.result import texts_of
from ddp.settings import Settings
from ddptrain.functions import calls, submission
from ddptrain.functions import options as named

# Options of submit but not of functions: the program itself, terminals, the built-in training
NOT_OF_FUNCTIONS = frozenset(
    """
    again args dataset dry_run function launcher local mirror module profile profile_ranks profile_steps ranks resume wait wait_limit
    wait_timeout workload
    """.split()
)


def do(settings: Settings, verb: str, typed_in: pathlib.Path, **given: object) -> dict[str, str]:
    given |= {"workload": submission.MODULE, "module": True, "nodes": 1}
    params = fields.parse(verbs.ALL[verb].options, given)
    params = params.model_copy(update={"typed_in": str(typed_in)})
    with settings.workspace.claims:
        return texts_of(verbs.ALL[verb].do(settings, params, lambda _: None) or {})


@pytest.fixture
def function(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "tune.pkl"
    calls.write(path, [calls.Call(int, ("7",))])
    return str(path)


def test_the_options_of_a_job_are_those_of_submit():
    known = {name for name, field in models.SubmitDdp.model_fields.items() if not field.exclude}
    assert known - named.NAMES == NOT_OF_FUNCTIONS
    assert not named.NAMES - known
    assert set(models.SubmitSweep.model_fields) >= named.OF_SWEEPS


def test_its_run_has_its_name_and_the_file_that_only_its_owner_reads(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path, function: str
):
    project = tmp_path / "project"
    project.mkdir()
    (project / "helper.py").write_text("")
    found = do(settings, "submit", project, function=function)
    run = pathlib.Path(found["run-dir"])
    assert run.name.startswith("tune-2")
    kept = run / calls.FILE
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_bytes() == pathlib.Path(function).read_bytes()
    assert (run / "code" / "helper.py").exists()


def test_each_run_of_a_sweep_has_the_number_of_its_call(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path, function: str
):
    project = tmp_path / "project"
    project.mkdir()
    found = do(settings, "sweep", project, function=function, grid="call=0,1")
    sweep = pathlib.Path(found["run-dir"])
    assert sweep.name.startswith("tune-2")
    assert (sweep / calls.FILE).exists()
    args = [sweep.with_name(f"{sweep.name}-{number}") / "args" for number in (0, 1)]
    assert [path.read_text() for path in args] == ["--call=0\n", "--call=1\n"]


def test_one_of_a_notebook_in_a_home_starts_in_its_runs_folder(
    settings: Settings, cluster: Cluster, pip: Pip, function: str, monkeypatch: pytest.MonkeyPatch
):
    home = settings.workspace.path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    found = do(settings, "submit", home, function=function)
    run = pathlib.Path(found["run-dir"])
    job = json.loads((run / "program" / "job.json").read_text())
    assert job["workdir"] == str(run)
    assert not (run / "code").exists()


def test_a_file_that_is_not_there_leaves_no_run(
    settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path
):
    (tmp_path / "project").mkdir()
    with pytest.raises(Problem, match="No such file"):
        do(settings, "submit", tmp_path / "project", function=str(tmp_path / "gone.pkl"), run="x")
    assert not (settings.workspace.runs / "x").exists()
