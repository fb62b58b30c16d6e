"""A run that is submitted again and that Slurm refuses: its folder stays as the former submission left it."""

import json
import pathlib

import pytest
from cluster import Cluster, Job
from pip_double import Pip

from ddp import verbs
from ddp.base import Settings, TrainerError, texts_of
from ddp.options import fields

REFUSAL = "sbatch: error: Batch job submission failed: QOSMaxSubmitJobPerUserLimit"


@pytest.fixture(autouse=True)
def outside_of_git(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))


def do(settings: Settings, action: str, **given: object) -> dict[str, str]:
    verb = verbs.ACTIONS[action]
    with settings.claims:
        return texts_of(verb.do(settings, fields.parse(verb.options, given), lambda _: None))


def contents(folder: pathlib.Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_script_s_run(settings: Settings, cluster: Cluster, pip: Pip, tmp_path: pathlib.Path):
    (tmp_path / "project").mkdir()
    script = tmp_path / "project" / "train.py"
    script.write_text("print(1)\n")
    cluster.states = [("COMPLETED", 0)]
    do(settings, "submit-ddp", workload=str(script), run="night", nodes=1)
    before = contents(settings.runs / "night")
    assert json.loads(before["job.json"])["job_id"] == 40
    script.write_text("print(2)\n")
    cluster.submit_refusal = REFUSAL
    with pytest.raises(TrainerError, match="QOSMaxSubmitJobPerUserLimit"):
        do(settings, "submit-ddp", workload=str(script), run="night", nodes=2, args="--lr 1")
    assert contents(settings.runs / "night") == before
    cluster.submit_refusal = ""
    do(settings, "submit-ddp", workload=str(script), run="night", nodes=2, args="--lr 1")
    after = json.loads((settings.runs / "night" / "job.json").read_text())
    assert (after["job_id"], after["code"]["folder"]) == (41, "code-2")


def test_the_record_is_not_touched_while_slurm_is_asked(settings: Settings, cluster: Cluster, pip: Pip):
    """Whatever ends the command there, Ctrl-C or a power cut."""
    cluster.states = [("COMPLETED", 0)]
    do(settings, "submit-ddp", workload="smoke", run="first", nodes=1)
    record = settings.runs / "first" / "job.json"
    seen: list[str] = []
    cluster.submitted = lambda _: seen.append(record.read_text())
    (settings.runs / "first" / "job.json").write_text(before := record.read_text().replace("smoke", "gpt"))
    (settings.datasets / "python-stdlib").mkdir()
    (settings.datasets / "python-stdlib" / "dataset.json").write_text("{}")
    do(settings, "submit-ddp", workload="gpt", run="first", nodes=1)
    assert seen == [before]
    assert json.loads(record.read_text())["job_id"] == 41


@pytest.mark.parametrize("refused", ["parts.sbatch", "job.sbatch"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_preparation_by_an_array(settings: Settings, cluster: Cluster, pip: Pip, *, refused: str, is_there: bool):
    raw = settings.workspace / "raw"
    raw.mkdir()
    (raw / "a.txt").write_text("x\n")
    run = settings.runs / "prepare-raw"
    cluster.states = [("COMPLETED", 0)]
    if is_there:
        do(settings, "prepare-dataset", source=str(raw), wait=False)
    before = contents(run) if is_there else {}

    def refuse(_: Job) -> None:
        cluster.submit_refusal = REFUSAL

    if refused == "parts.sbatch":
        cluster.submit_refusal = REFUSAL
    else:
        cluster.submitted = refuse  # the array is taken, and the job behind it is not
    with pytest.raises(TrainerError, match="QOSMaxSubmitJobPerUserLimit"):
        do(settings, "prepare-dataset", source=str(raw), elements=2, wait=False)
    assert contents(run) == before
    assert run.exists() == is_there
