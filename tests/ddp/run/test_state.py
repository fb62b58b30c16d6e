"""A run's state: the same in every view, no matter how much Slurm remembers."""

import json
import os
import pathlib
import pwd
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest
import run_jobs
from cluster import Cluster, Job

from ddp.actions import compare, show
from ddp.actions import list as listing
from ddp.options import fields, models
from ddp.run import catalog, folder, state, telemetry
from ddp.run.model import State
from ddp.settings import Settings
from ddp.slurm import jobs
from ddp.view import page

USER = pwd.getpwuid(os.geteuid()).pw_name
WORDS = [str(one) for one in State if one != State.UNKNOWN] + [
    "REQUEUE_HOLD",
    "STAGE_OUT",
    "EXPEDITING",
    "REVOKED",
]


def make(
    runs: pathlib.Path, name: str, outcome: str | None, summary: str | None = None
) -> pathlib.Path:
    path = runs / name
    (path / "control").mkdir(parents=True)
    (path / "logs").mkdir()
    (path / "job.json").write_text('{"job_id": 5, "kind": "gpt"}')
    if outcome is not None:
        text = json.dumps({"outcome": outcome, "step": 17, "error": "boom"})
        (path / "control" / "5.r0.outcome").write_text(text)
    if summary is not None:
        (path / "summary.json").write_text(json.dumps({"state": summary, "last_loss": 1.5}))
    return path


@pytest.mark.parametrize("outcome", [None, "done", "preempted", "failed", "cancelled"])
@pytest.mark.parametrize(
    "word",
    [
        None,
        "PENDING",
        "RUNNING",
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "PREEMPTED",
        "TIMEOUT",
        "NODE_FAIL",
    ],
)
def test_every_view_has_the_same_state(
    settings: Settings, cluster: Cluster, outcome: str | None, word: str | None
):
    make(settings.workspace.runs, "run", outcome, summary="done")
    make(settings.workspace.runs, "other", "done", summary="done")
    if word is not None:
        cluster.jobs.append(Job(5, USER, "run", pathlib.Path("/s"), "", [(word, 0)]))
    listed = listing.list_runs(
        settings, fields.parse(models.ListRuns, {"name": "run"}), lambda _: None
    )
    (found,) = [str(one["state"]) for one in listed.record()["runs"]]  # pyright: ignore
    shown = show.show_run(settings, fields.parse(models.OneRun, {"run": "run"}), lambda _: None)
    compared = compare.compare_runs(
        settings, fields.parse(models.CompareRuns, {"runs": "run,other"}), lambda _: None
    )
    exported = next(
        one["state"] for one in telemetry.collect(settings.workspace)["runs"] if one["run"] == "run"
    )
    html = page.page([catalog.load(settings.workspace, ["run"])[0][0]], made=run_jobs.NOW)
    assert shown.texts()["state"] == found
    assert compared.texts()["results"].split("\n")[1].split()[:2] == ["run", found]
    assert f">{found}</span>" in html
    words = {"PREEMPTED": "cancelled", "TIMEOUT": "failed", "NODE_FAIL": "failed", "UNKNOWN": None}
    assert exported == words.get(found, found.lower())
    if word == "PREEMPTED":
        assert found == "PREEMPTED", "whatever the ranks' end looked like"
    if outcome == "preempted" and word in (None, "COMPLETED", "FAILED"):
        assert found == "PREEMPTED", "whether Slurm has forgotten the job or not"


@hypothesis.given(
    word=st.none() | st.sampled_from(WORDS),
    restarts=st.integers(0, 1),
    outcomes=st.lists(
        st.sampled_from(["done", "preempted", "failed", "cancelled", "odd", ""]), max_size=3
    ),
    summary=st.none() | st.sampled_from(["done", "failed"]),
)
def test_a_state_is_derived_from_whatever_is_known(
    word: str | None, restarts: int, outcomes: list[str], summary: str | None
):
    with tempfile.TemporaryDirectory() as top:
        path = make(pathlib.Path(top), "run", None, summary)
        for number, outcome in enumerate(outcomes):
            (path / "control" / f"5.r{number}.outcome").write_text(json.dumps({"outcome": outcome}))
            os.utime(path / "control" / f"5.r{number}.outcome", (1000 + number, 1000 + number))
        job = run_jobs.make(word, restarts=restarts) if word is not None else None
        run = state.with_job(folder.read(path), job)
    assert run == state.with_job(run, job), "it does not depend on the state before"
    if word in jobs.ACTIVE:
        assert run.state.is_active
    elif word == "COMPLETED":
        assert run.state in {State.COMPLETED, State.PREEMPTED, State.FAILED, State.CANCELLED}
    else:
        assert not run.state.is_active
    if word is None and not (
        outcomes and outcomes[-1] in ("done", "preempted", "failed", "cancelled")
    ):
        assert run.state == State.UNKNOWN
    if word in ("TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "CANCELLED", "PREEMPTED"):
        assert run.state == State(word)


def test_only_one_module_opens_the_files_of_a_run():
    """Others name its functions.

    The payload and node programs, which run in the job, write files.
    """
    top = pathlib.Path(folder.__file__).parents[1]
    names = (
        "metrics.jsonl",
        "summary.json",
        "config.json",
        ".outcome",
        ".failures",
        "job.json",
        "tracking.json",
    )
    others = [
        path
        for path in top.rglob("*.py")
        if not {"node", "doctor"} & set(path.relative_to(top).parts)
    ]
    found = {
        str(path.relative_to(top))
        for path in others
        if any(f'"{name}"' in path.read_text() for name in names)
    }
    assert found == {"run/folder.py"}
