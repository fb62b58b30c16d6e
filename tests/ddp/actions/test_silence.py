"""A silent Slurm differs from one that knows no job, in every verb that reads or follows."""

import collections.abc
import contextlib
import dataclasses
import io
import itertools
import json
import pathlib
import time
import typing

import pytest
from cluster import NOT_CONFIGURED, Cluster, Job
from left_by_jobs import write_result
from pip_double import Pip

from ddp.actions import verbs
from ddp.host import waits
from ddp.options import declared, fields
from ddp.problem import Problem
from ddp.results.result import Result, texts_of
from ddp.run import catalog
from ddp.run.model import State
from ddp.settings import Settings
from ddp.slurm import jobs, outages

MARK = "Slurm does not answer: "
SILENCES = {
    "stopped": "Slurmctld(primary) at ctl is DOWN",  # by scontrol ping, whose exit status is 1 then
    "restarting": "slurm_load_jobs error: Zero Bytes were transmitted or received",
    "elsewhere": NOT_CONFIGURED,
}
# What folders hold, and the state that they tell
FILES: dict[str, tuple[dict[str, object], dict[str, str], str]] = {
    "waits": ({"job_id": 40}, {}, "UNKNOWN"),
    "trains": ({"job_id": 41}, {"logs/41.r0/x": "", "logs/41.out": "a line\n"}, "UNKNOWN"),
    "done": (
        {"job_id": 42},
        {"control/42.r0.outcome": '{"outcome": "done", "step": 9}'},
        "COMPLETED",
    ),
    "failed": (
        {"job_id": 43},
        {"control/43.r0.outcome": '{"outcome": "failed", "error": "boom"}'},
        "FAILED",
    ),
    "saved": (
        {"job_id": 44},
        {"control/44.r0.outcome": '{"outcome": "preempted", "step": 9}'},
        "PREEMPTED",
    ),
    "intent": ({"job_id": None, "submission": "ddp:0123456789abcdef"}, {}, "UNKNOWN"),
    "swept": ({"job_id": 46, "kind": "sweep", "count": 2}, {}, "UNKNOWN"),
    "swept-0": ({"job_id": None, "sweep": "swept"}, {"control/job": "46\n"}, "UNKNOWN"),
    "swept-1": ({"job_id": None, "sweep": "swept"}, {}, "UNKNOWN"),
}
READING = [
    verb
    for verb in verbs.ALL.values()
    if verb.needs == "workspace" and verb.section != "Environments and images"
]
FOLLOWED = ("waits", "trains", "done", "failed", "saved", "swept-0")


@pytest.fixture
def runs(settings: Settings, cluster: Cluster, host: dict[str, typing.Any]) -> pathlib.Path:
    for name, (record, texts, _) in FILES.items():
        folder = settings.workspace.runs / name
        for path, text in {
            "job.json": json.dumps({"kind": "script", "run": name, **record}),
            **texts,
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 7, "loss": 0.5}\n')
    return settings.workspace.runs


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits ten minutes for Slurm waits for one answer."""
    monkeypatch.setattr(outages, "LIMIT_S", 0.0)


def do(settings: Settings, name: str, log: list[str], /, **given: object) -> dict[str, typing.Any]:
    """Run a verb as a front end does; return its --json or printed output."""
    verb = verbs.ALL[name]
    printed = io.StringIO()
    params = fields.parse(verb.options, given)
    if verb.name == "watch":
        params = params.model_copy(update={"is_json": True})
    with contextlib.redirect_stdout(printed):
        found = verb.do_when_ready(settings, params, log.append)
    if found is None:
        return {"printed": [json.loads(line) for line in printed.getvalue().splitlines()]}
    return {**texts_of(found), **(found.record() if isinstance(found, Result) else {})}


def about(verb: verbs.Verb, run: str, tmp_path: pathlib.Path) -> dict[str, object]:
    """Return the options that make a verb read a run."""
    known = {option.name for option in declared.options(verb.options)}
    given = {
        "run": run,
        "runs": f"{run},done,failed",
        "to": str(tmp_path / "fetched"),
        "output": str(tmp_path / "page"),
    }
    return {name: value for name, value in given.items() if name in known}


def states(found: object) -> collections.abc.Iterator[tuple[str, str]]:
    """Yield each run with the state that an answer gives it."""
    if isinstance(found, dict):
        one = typing.cast("dict[str, object]", found)
        if isinstance(one.get("run"), str) and one.get("state"):
            yield str(one["run"]), str(one["state"])
        for value in one.values():
            yield from states(value)
    elif isinstance(found, list):
        for value in typing.cast("list[object]", found):
            yield from states(value)


@pytest.mark.parametrize("silence", SILENCES)
@pytest.mark.parametrize("verb", READING, ids=lambda verb: verb.name)
def test_whatever_reads_a_run_shows_what_its_folder_holds_and_who_is_silent(
    settings: Settings,
    cluster: Cluster,
    runs: pathlib.Path,
    impatient: None,
    tmp_path: pathlib.Path,
    verb: verbs.Verb,
    silence: str,
):
    cluster.silent, cluster.silence = 10**6, SILENCES[silence]
    for run, log in ((run, list[str]()) for run in FILES):
        found: dict[str, typing.Any] = {}
        try:
            found = do(settings, verb.name, log, **about(verb, run, tmp_path))
            problem = ""
        except Problem as e:
            problem = str(e)
        assert "no longer knows" not in str(found) + problem
        assert "has ended" not in problem
        for name, state in states(found):
            assert state == FILES[name][2], f"{verb.name} {name}: only Slurm could know {state}"
        if verb.name == "fetch":
            assert problem.startswith("path: name what to fetch"), "it asks Slurm nothing"
            continue
        if verb.name == "watch" and run in FOLLOWED:
            assert "no answer for 0 minutes, and the job may still run" in problem
            continue
        if verb.name == "export" and "has no checkpoint" in problem:
            continue  # it reads files alone
        is_marked = str(found.get("slurm", "")).startswith(MARK) or MARK in problem
        assert is_marked or "is a sweep" in problem, f"{verb.name} {run}: {found or problem}"
    assert {call[:2] for call in cluster.calls} <= {("scontrol", "ping")}, (
        "squeue gives up after 9 to 18 s"
    )


def test_a_controller_that_is_down_is_named(
    settings: Settings, cluster: Cluster, runs: pathlib.Path
):
    cluster.silent, cluster.silence = 99, SILENCES["stopped"]
    found = do(settings, "list", [])
    assert found["slurm"] == f"{MARK}Slurmctld(primary) at ctl is DOWN"
    cluster.silent, cluster.hung = 0, True
    assert do(settings, "show", [], run="done")["slurm"] == f"{MARK}scontrol: no answer within 10 s"


def test_accounting_that_is_silent_is_not_taken_for_accounting_that_knows_no_job(
    settings: Settings, cluster: Cluster, runs: pathlib.Path
):
    """The controller forgets a job five minutes after its end (slurm.conf, MinJobAge)."""
    cluster.accounting_silence = (
        "sacct: error: Problem talking to the database: Connection timed out"
    )
    found = {one["run"]: one for one in do(settings, "list", [])["runs"]}
    assert (found["trains"]["state"], found["trains"]["why"]) == (
        "UNKNOWN",
        "Slurm does not answer",
    )
    assert found["done"]["state"] == "COMPLETED"
    (seen,) = do(settings, "watch", [], run="trains")["printed"]
    assert seen["has_ended"], "the controller has answered that it knows no such job"
    words = (
        "Slurm's accounting does not answer: Problem talking to the database: Connection timed out"
    )
    assert do(settings, "show", [], run="trains")["slurm"] == words
    cluster.accounting_silence = ""
    assert "no longer knows its job" in do(settings, "show", [], run="trains")["reason"]


def test_a_running_job_stays_as_in_slurms_last_answer(
    settings: Settings, cluster: Cluster, runs: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    cluster.jobs.append(Job(41, cluster.user, "trains", runs, "", [("RUNNING", 0)]))
    clock = itertools.count()

    def sleep(_: float) -> None:
        if (now := next(clock)) == 1:
            cluster.silent = 3
        if now == 6:
            cluster.jobs[0].states = [("COMPLETED", 0)]

    settings = dataclasses.replace(settings, wait=waits.Wait(sleep))
    log: list[str] = []
    seen = do(settings, "watch", log, run="trains")["printed"]
    assert [(one["state"], bool(one["slurm"]), one["has_ended"]) for one in seen] == [
        ("RUNNING", False, False),
        ("RUNNING", True, False),
        ("RUNNING", False, False),
        ("COMPLETED", False, True),
    ]
    assert [line.partition(";")[0][:21] for line in log] == [
        "Slurm does not answer",
        "Slurm answers again, ",
    ]


def submission(
    settings: Settings, cluster: Cluster, verb: str
) -> collections.abc.Callable[[list[str]], object]:
    """Return a function that follows a job with this verb."""
    (settings.workspace.path / "train.py").write_text("")
    given: dict[str, object] = {
        "workload": str(settings.workspace.path / "train.py"),
        "snapshot": False,
        "nodes": 1,
    }
    cluster.states = [("RUNNING", 0), ("RUNNING", 0), ("RUNNING", 0), ("COMPLETED", 0)]
    if verb == "sweep":

        def start(job: Job) -> None:
            (settings.workspace.runs / "s-0" / "control" / "job").write_text(f"{job.job_id}\n")

        cluster.submitted = start
        return lambda log: do(settings, "sweep", log, **given, name="s", grid="lr=1", wait=True)
    cluster.submitted = write_result
    if verb == "submit":
        return lambda log: do(settings, "submit", log, **given, run="night", wait=True)
    do(settings, "submit", [], **given, run="night")
    cluster.jobs[0].states = list(cluster.states)
    if verb == "resume":
        cluster.jobs[0].states, cluster.jobs[0].restarts = (
            [("COMPLETING", 0)] * 2 + [("PENDING", 0)],
            1,
        )
    more: dict[str, object] = {"follow": True} if verb == "log" else {}
    return lambda log: do(settings, verb, log, run="night", **more)


@pytest.mark.parametrize("verb", ["submit", "sweep", "log", "watch", "cancel", "resume"])
@pytest.mark.parametrize("looks", [1, 7])
def test_following_a_job_survives_a_silent_controller(
    settings: Settings,
    cluster: Cluster,
    host: dict[str, typing.Any],
    pip: Pip,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    looks: int,
):
    paused = itertools.count()

    def pause(_: float) -> None:
        if next(paused) == 0:
            cluster.silent = looks

    settings = dataclasses.replace(settings, wait=waits.Wait(pause))
    follow = submission(settings, cluster, verb)
    log: list[str] = []
    found = typing.cast("dict[str, typing.Any]", follow(log))
    assert not cluster.silent, "it was silent"
    assert sum(MARK in line for line in log) == 1, log
    assert "waiting for it, at most 10 minutes" in next(line for line in log if MARK in line)
    assert any(line.startswith("Slurm answers again") for line in log)
    ends = {
        "submit": "COMPLETED",
        "sweep": "COMPLETED",
        "log": "COMPLETED",
        "cancel": "CANCELLED",
        "resume": "PENDING",
    }
    assert found["printed"][-1]["has_ended"] if verb == "watch" else found["state"] == ends[verb]


@pytest.mark.parametrize("verb", ["submit", "sweep", "log", "watch", "cancel", "resume"])
def test_following_a_job_ends_after_ten_minutes_of_silence_and_says_that_it_may_still_run(
    settings: Settings,
    cluster: Cluster,
    host: dict[str, typing.Any],
    pip: Pip,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
):
    clock = [time.monotonic()]

    def pause(_: float) -> None:
        cluster.silent = 10**6
        clock[0] += 10.0

    settings = dataclasses.replace(settings, wait=waits.Wait(pause))
    follow = submission(settings, cluster, verb)
    monkeypatch.setattr(outages.time, "monotonic", lambda: clock[0])
    log: list[str] = []
    given = {"follow-timeout": 3600} if verb == "log" else {}
    with pytest.raises(
        Problem, match=r"no answer for 10 minutes, and the job may still run"
    ) as caught:
        do(settings, "log", log, run="night", follow=True, **given) if given else follow(log)
    assert MARK in str(caught.value)
    assert str(caught.value).endswith("is slurmctld up? see: scontrol ping")
    waited = [line for line in log if MARK in line]
    assert len(waited) == pytest.approx(600 / 30, abs=2), "a sign each half a minute"


def test_a_run_without_a_job_is_none_that_slurm_has_forgotten(
    settings: Settings, cluster: Cluster, runs: pathlib.Path
):
    """An element of a sweep that has not started lacks a file with a job's id."""
    cluster.silent = 99
    with pytest.raises(Problem, match=f"no file of swept-1 has a job's id, and {MARK}"):
        catalog.find(settings.workspace, "swept-1")
    assert isinstance(catalog.ask_queue(settings.workspace), jobs.Silence)
    sweep = catalog.load(settings.workspace, ["swept"])[0][0]
    assert (sweep.state, sweep.why) == (State.UNKNOWN, "2 UNKNOWN")
