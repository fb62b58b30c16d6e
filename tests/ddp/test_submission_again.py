"""A run that is submitted again and that Slurm refuses: its folder stays as the former submission left it."""

import errno
import json
import os
import pathlib
import typing

import pytest
from cluster import Cluster, Job
from pip_double import Pip

from ddp import verbs
from ddp.base import Settings, TrainerError, texts_of
from ddp.options import fields
from ddp.run import catalog, folder
from slurm_ddp.run import Completed

REFUSAL = "sbatch: error: Batch job submission failed: QOSMaxSubmitJobPerUserLimit"


@pytest.fixture(autouse=True)
def outside_of_git(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))


def do(settings: Settings, action: str, **given: object) -> dict[str, str]:
    verb = verbs.ACTIONS[action]
    with settings.claims:
        return texts_of(verb.do(settings, fields.parse(verb.options, given), lambda _: None) or {})


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
    assert (after["job_id"], after["code"]["folder"]) == (41, "code")


def record(settings: Settings, run: str = "first") -> dict[str, typing.Any]:
    return json.loads((settings.runs / run / "job.json").read_text())


def fill(settings: Settings, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, number: int) -> None:
    """Let every write fail with this error once sbatch has answered."""

    def full(*_: object, **__: object) -> typing.NoReturn:
        raise OSError(number, os.strerror(number), str(settings.runs))

    cluster.submitted = lambda _: monkeypatch.setattr(folder, "replace", full)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOTCONN], ids=["disk full", "mount lost"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_job_that_slurm_accepted_before_a_write_failed_is_found(
    settings: Settings, cluster: Cluster, pip: Pip, monkeypatch: pytest.MonkeyPatch, number: int, *, is_there: bool
):
    (settings.datasets / "python-stdlib").mkdir()
    (settings.datasets / "python-stdlib" / "dataset.json").write_text("{}")
    if is_there:
        cluster.states = [("COMPLETED", 0)]
        do(settings, "submit-ddp", workload="gpt", run="first", nodes=1)
    cluster.states = [("RUNNING", 0)]
    with monkeypatch.context() as patch:
        fill(settings, patch, cluster, number)
        assert do(settings, "submit-ddp", workload="gpt", run="first", nodes=1)["job-id"] == str(40 + is_there)
    written = record(settings)
    assert (written["job_id"], cluster.jobs[-1].comment) == (None, written["submission"])
    assert ("previous" in written) == is_there
    with pytest.raises(TrainerError, match=r"run: first is active as job 4\d"):
        do(settings, "submit-ddp", workload="gpt", run="first", nodes=1)
    assert len(cluster.jobs) == 1 + is_there, "it is not submitted a second time"
    cluster.jobs[-1].states = [("FAILED", 256)]
    run = catalog.load_one(settings, "first")
    assert (run.job_id, run.state) == (40 + is_there, "FAILED")
    assert record(settings)["job_id"] == 40 + is_there, "the later look completes it"
    assert "previous" not in record(settings)


@pytest.mark.parametrize(
    ("verb", "params", "name"),
    [
        ("submit-ddp", {"workload": "smoke", "run": "first"}, "first"),
        ("submit-sweep", {"workload": "smoke", "grid": "lr=1,2", "name": "first"}, "first"),
        ("prepare-dataset", {"wait": False}, "prepare-python-stdlib"),
    ],
)
@pytest.mark.parametrize("answer", ["banner", "digits", "noise", "replaced", "timeout"])
def test_whatever_sbatch_answers_an_accepted_job_is_known(
    settings: Settings, cluster: Cluster, pip: Pip, verb: str, params: dict[str, object], name: str, answer: str
):
    answers = {
        "banner": lambda job: Completed(0, f"Welcome to the cluster\n{job.job_id};west\nbye\n", ""),
        "digits": lambda job: Completed(0, f"2026\n{job.job_id}\n", ""),
        "replaced": lambda job: setattr(job, "comment", "the site's own") or Completed(0, "Welcome\n", ""),
        "noise": lambda job: Completed(0, "Welcome to the cluster\n", ""),
        "timeout": lambda job: Completed(
            1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv"
        ),
    }
    cluster.answers = answers[answer]
    assert do(settings, verb, **params)["job-id"] == "40"
    assert record(settings, name)["job_id"] == 40


def test_a_submission_that_nobody_can_confirm_keeps_its_folder(settings: Settings, cluster: Cluster, pip: Pip):
    def vanish(_: Job) -> Completed:
        cluster.silent = 1
        return Completed(1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")

    cluster.answers = vanish
    with pytest.raises(TrainerError, match="Slurm may have accepted the job; ddp list"):
        do(settings, "submit-ddp", workload="smoke", run="first")
    assert record(settings)["job_id"] is None
    assert catalog.load_one(settings, "first").job_id == 40


def test_an_intent_that_came_to_nothing_gives_way_to_the_former_record(
    settings: Settings, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    path = settings.runs / "first"
    path.mkdir()
    (path / "control").mkdir()
    (path / "control" / "7.r0.outcome").write_text('{"outcome": "done"}')
    before = {"job_id": 7, "kind": "gpt"}
    folder.write_record(path, {"job_id": None, "kind": "gpt", "submission": "ddp:x", "previous": before})
    assert catalog.load_one(settings, "first").job_id is None, "a submission may be under way"
    monkeypatch.setattr(folder, "_SUBMISSION_S", -1.0)
    assert (catalog.load_one(settings, "first").state, record(settings)) == ("COMPLETED", before)
    folder.write_record(path, {"job_id": None, "kind": "gpt", "submission": "ddp:x"})
    catalog.load_one(settings, "first")
    assert record(settings) == {"job_id": None, "kind": "gpt"}, "and nobody asks Slurm again"


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
