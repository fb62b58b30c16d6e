"""list-runs, show-run, run-log, cancel-run, resume-run: from a run's submission to its end."""

import json
import os
import pathlib
import pwd
import typing

import pytest
import run_verbs
import yaml
from cluster import NOT_CONFIGURED, Cluster, Job
from harness import Trainer
from left_by_jobs import write_result
from run_verbs import Program

from ddp.actions import log as run_log
from ddp.actions import verbs
from ddp.options import declared, fields
from ddp.problem import Problem
from ddp.settings import Settings
from ddp.submit import control

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

USER = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def program(ready: Trainer) -> Program:
    return run_verbs.of(ready)


def rows(program: Program, **params: typing.Any) -> list[list[str]]:
    return [line.split() for line in program.run("list-runs", **params)["runs"].splitlines()]


def test_the_list_has_queue_and_results(program: Program, cluster: Cluster):
    assert program.run("list-runs")["count"] == "0"
    cluster.states = [("PENDING", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    cluster.states = [("RUNNING", 0)]
    program.run("submit-ddp", workload="smoke", run="b")
    os.utime(program.workspace / "runs" / "a" / "job.json", (1, 1))
    assert rows(program) == [
        "RUN KIND STATE NODES STEP LOSS BEST RATE ELAPSED WHERE/REASON".split(),
        ["b", "smoke", "RUNNING", "2", "-", "-", "-", "-", "00:00:07", "slurmd-[0-1]"],
        [
            "a",
            "smoke",
            "PENDING",
            "2",
            "-",
            "-",
            "-",
            "-",
            "00:00:07",
            "Resources",
            "(position",
            "1",
            "of",
            "1)",
        ],
    ]
    (first, second) = program.record["runs"]
    assert (first["run"], first["state"], first["nodes"], first["elapsed_s"]) == (
        "b",
        "RUNNING",
        2,
        7,
    )
    assert (second["job_id"], second["why"], second["position"], second["submitted"][:2]) == (
        40,
        "Resources",
        1,
        "20",
    )
    assert program.record["schema"] == 1
    assert program.record["count"] == 2


@pytest.mark.parametrize(("params", "found"), CASES["the_list_is_filtered_and_sorted"])
def test_the_list_is_filtered_and_sorted(
    program: Program, cluster: Cluster, params: dict[str, typing.Any], found: list[str]
):
    cluster.submitted = write_result
    for name, state, loss in (
        ("old", "COMPLETED", 0.1),
        ("lrs-1", "FAILED", None),
        ("lrs-2", "COMPLETED", 0.5),
    ):
        cluster.states = [(state, 0)]
        program.run("submit-ddp", workload="smoke", run=name)
        folder = program.workspace / "runs" / name
        if loss is None:
            (folder / "control" / f"{cluster.jobs[-1].job_id}.r0.outcome").write_text(
                '{"outcome": "failed"}'
            )
            (folder / "metrics.jsonl").unlink()
            (folder / "summary.json").unlink()
        else:
            (folder / "metrics.jsonl").write_text(
                f'{{"kind": "step", "step": 16, "loss": {loss}}}\n'
            )
    for path in (program.workspace / "runs" / "old").rglob("*"):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    assert [row[0] for row in rows(program, **params)[1:]] == found


def test_a_run_is_shown_from_its_submission_to_its_result(program: Program, cluster: Cluster):
    folder = program.workspace / "runs" / "a"
    cluster.states = [("PENDING", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    shown = program.run("show-run")
    assert (shown["job-id"], shown["state"], shown["reason"]) == ("40", "PENDING", "Resources")
    assert (shown["log"], shown["script"]) == (
        str(folder / "logs" / "40.out"),
        str(folder / "job.sbatch"),
    )
    cluster.jobs[0].states = [("RUNNING", 0)]
    (folder / "metrics.jsonl").write_text('{"step": 7, "loss": 1.23456789}\n')
    shown = program.run("show-run", run="40")
    expected = {
        "state": "RUNNING",
        "elapsed": "00:00:07",
        "nodes": "slurmd-[0-1]",
        "step": "7",
        "loss": "1.23457",
    }
    assert expected.items() <= shown.items()
    cluster.jobs[0].states = [("COMPLETED", 0)]
    write_result(cluster.jobs[0])
    shown = program.run("show-run", run="a")
    assert (shown["state"], shown["exit-code"], shown["loss"], shown["ranks"]) == (
        "COMPLETED",
        "0",
        "0.586587",
        "2",
    )
    assert "reason" not in shown
    assert program.record["figures"]["last_loss"] == 0.586587


def test_a_failed_run_is_shown_with_its_reason_once(program: Program, cluster: Cluster):
    cluster.states = [("FAILED", 9)]
    program.run("submit-ddp", workload="smoke", run="a")
    folder = program.workspace / "runs" / "a"
    (folder / "logs" / "40.out").write_text(
        "0: loading\n0: [FATAL] slurmd-0: no\n[RESULT] rc=78 outcome=none\n"
    )
    (folder / "control" / "40.failures").write_text(
        "2026-11-23T17:01:12Z\t40.r0\tnode\tslurmd-0\tslurmd-0: no\n"
    )
    shown = program.run("show-run")
    assert shown["reason"] == "job 40 FAILED, exit code 137: [FATAL] slurmd-0: no"
    assert (shown["state"], shown["failure"]) == ("FAILED", "loading")
    assert "\n".join(shown.values()).count("slurmd-0: no") == 1
    (folder / "control" / "40.failures").write_text(
        "t\t40.r0\tnode\tslurmd-0\tslow\nt\t40.r0t1\tnode\tslurmd-0\tno\n"
    )
    assert program.run("show-run")["failures"].splitlines()[0] == "t fault=node node=slurmd-0: slow"
    (folder / "control" / "40.failures").unlink()
    (folder / "logs" / "40.out").write_text("")
    (folder / "job.json").write_text("[")
    assert program.run("show-run", run="a")["reason"] == (
        f"job 40 FAILED, exit code 137; {folder}/job.json is missing or damaged, so other files of the run may be, too"
    )


def test_the_summary_of_an_earlier_job_is_not_the_runs(program: Program, cluster: Cluster):
    cluster.submitted, cluster.states = write_result, [("COMPLETED", 0)]
    program.run("submit-ddp", run="a")
    cluster.submitted, cluster.states = lambda _: None, [("RUNNING", 0)]
    program.run("submit-ddp", run="a")
    shown = program.run("show-run")
    assert (shown["job-id"], shown["state"]) == ("41", "RUNNING")
    assert "tokens-per-second" not in shown
    assert "exit-code" not in shown


def test_a_job_of_an_earlier_controller_is_not_taken_for_todays_of_that_number(
    program: Program, cluster: Cluster
):
    cluster.submitted, cluster.states = write_result, [("COMPLETED", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    cluster.jobs[0].name = "b"
    cluster.jobs[0].states = [("PENDING", 0)]
    assert program.run("show-run", run="a")["state"] == "COMPLETED", "what it wrote itself"
    assert "state" not in program.run("run-log", run="a")
    assert "it is unknown to Slurm" in program.fails("resume-run", run="a")


def test_a_log_is_shown(program: Program, cluster: Cluster):
    cluster.submitted, cluster.states = write_result, [("COMPLETED", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    path = program.workspace / "runs" / "a" / "logs" / "40.out"
    wanted = {"job-id": "40", "run": "a", "state": "COMPLETED", "log": str(path), "lines": "2"}
    wanted["text"] = "[TRAIN] step=16\n[DONE] ok"
    for named in ({}, {"run": "40"}, {"run": 40}, {"run": "a"}):
        assert program.run("run-log", **named) == wanted
    assert program.record["lines"] == ["[TRAIN] step=16", "[DONE] ok"]
    assert program.run("run-log", lines=1)["text"] == "[DONE] ok"
    cluster.forgets = True
    assert "state" not in program.run("run-log", run="40")


def test_a_log_is_followed_to_the_jobs_end(
    program: Program, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    program.run("submit-ddp", run="first")
    job = cluster.jobs[0]
    job.states = [("PENDING", 0), ("PENDING", 0), ("RUNNING", 0), ("RUNNING", 0), ("COMPLETED", 0)]
    log = job.script.parent / "logs" / "40.out"
    pieces = iter(["one\ntw", "o\nthree \x1b[2J\n", "last\n", ""])

    def pause(_: float) -> None:
        with log.open("a") as file:
            file.write(next(pieces))

    monkeypatch.setattr(control, "pause", pause)
    results = program.run("run-log", run="first", follow=True, lines=2)
    assert program.log == ["job 40 PENDING (Resources)", "one", "two", "three ?[2J", "last"]
    assert results["text"].splitlines() == ["three ?[2J", "last"]


def test_a_log_is_followed_for_a_limited_time(
    program: Program, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    program.run("submit-ddp", run="first")
    cluster.jobs[0].states = [("RUNNING", 0)]
    (cluster.jobs[0].script.parent / "logs" / "40.out").write_text("one\n")
    clock = iter(range(0, 10000, 30))
    monkeypatch.setattr(run_log.time, "monotonic", lambda: float(next(clock)))
    assert program.run("run-log", run="first", follow=True)["text"] == "one"
    assert program.log == ["one"]


def test_a_log_that_does_not_exist_is_explained(program: Program, cluster: Cluster):
    place = program.workspace
    assert program.fails("run-log") == f"there is no run in {place}/runs yet; ddp submit"
    for name, line in (
        ("no", f"there is no run 'no' in {place}/runs"),
        ("9", f"run: no run in {place}/runs has job 9"),
    ):
        assert program.fails("run-log", run=name) == f"{line}; ddp list"
    cluster.states = [("PENDING", 0)]
    program.run("submit-ddp", workload="smoke", run="a")
    assert program.fails("run-log") == "job 40 has no output; it is PENDING; ddp show a"
    assert (
        program.fails("run-log", rank=3)
        == "job 40 has no output of rank 3; it is PENDING; ddp show a"
    )
    assert program.run("run-log", follow=True, follow_timeout=1)["lines"] == "0"


@pytest.mark.parametrize("verb", ["show-run", "run-log", "resume-run"])
def test_the_newest_run_is_none_that_a_submission_started_by_itself(
    program: Program, cluster: Cluster, tmp_path: pathlib.Path, verb: str
):
    cluster.states = [("PENDING", 0)]
    program.run("submit-ddp", workload="smoke", run="mine")
    for name, more in (
        ("prepare-python-stdlib", '"kind": "prepare", "automatic": true'),
        ("s-0", '"sweep": "s"'),
    ):
        folder = program.workspace / "runs" / name
        (folder / "logs").mkdir(parents=True)
        (folder / "job.json").write_text(f'{{"job_id": 7, {more}}}')
    if verb == "run-log":
        assert program.fails(verb) == "job 40 has no output; it is PENDING; ddp show mine"
    else:
        assert program.run(verb)["run"] == "mine"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("submit workload={}/tra1n.py", "/tra1n.py does not exist; did you mean train.py?"),
        ("sweep workload={}/tra1n.py", "/tra1n.py does not exist; did you mean train.py?"),
        ("render workload={}/tra1n.py", "/tra1n.py does not exist; did you mean train.py?"),
        (
            "cancel run=a",
            "no slurm.conf, no controller in DNS; use a login node, or see: scontrol ping",
        ),
        (
            "render workload=smoke",
            "Slurm is not configured here: no slurm.conf, no controller in DNS",
        ),
    ],
)
def test_where_slurm_is_not_configured_a_users_own_mistake_comes_first(
    settings: Settings, cluster: Cluster, host: dict[str, typing.Any], words: str, line: str
):
    cluster.silent, cluster.silence = 99, NOT_CONFIGURED
    (settings.workspace.path / "train.py").touch()
    name, *given = words.format(settings.workspace.path).split()
    params = fields.parse(verbs.ALL[name].options, dict(one.split("=") for one in given))
    with pytest.raises(Problem) as caught:
        verbs.ALL[name].do_when_ready(settings, params, print)
    assert str(caught.value).endswith(line)


RUN = {
    verb: option.text.default
    for verb in verbs.ALL.values()
    for option in declared.options(verb.options)
    if option.name in ("run", "runs") and option.text.argument
}


@pytest.mark.parametrize(("verb", "default"), RUN.items(), ids=lambda one: getattr(one, "name", ""))
def test_a_verb_takes_the_newest_run_only_where_its_help_says_so(
    settings: Settings, cluster: Cluster, verb: verbs.Verb, default: str
):
    with pytest.raises(Problem) as caught:
        verb.do(settings, fields.parse(verb.options, {}), print)
    assert ("there is no run in" in str(caught.value)) == (default == "the newest run")


def test_runs_are_cancelled_by_name_and_by_job(program: Program, cluster: Cluster):
    cluster.states = [("RUNNING", 0)]
    for name in "abc":
        program.run("submit-ddp", workload="smoke", run=name)
    assert program.fails("cancel-run") == "run: must be given"
    assert program.run("cancel-run", run="40") == {"job-id": "40", "state": "CANCELLED", "run": "a"}
    assert program.log == ["job 40 was RUNNING; cancelling, the ranks may save first"]
    assert program.fails("cancel-run", run="40") == "run: job 40 has ended already: CANCELLED"
    assert (
        program.fails("cancel-run", run="b,nope")
        == "run: no job of nope is pending or running; ddp list"
    )
    assert [job.cancelled for job in cluster.jobs] == [True, False, False], "all or none"
    results = program.run("cancel-run", run="b 42")
    assert results == {
        "job-id": "41, 42",
        "state": "CANCELLED",
        "run": "b, c",
        "cancelled": "41 42",
    }
    assert cluster.changes[-1] == ("scancel", "41", "42")


def test_another_users_job_is_not_cancelled(program: Program, cluster: Cluster):
    program.run("submit-ddp", workload="smoke", run="a")
    cluster.jobs[0].user = "eve"
    for job_id in (40, 99):
        assert (
            program.fails("cancel-run", run=job_id)
            == f"run: Slurm knows no job {job_id} of {USER}; ddp list"
        )
    assert not cluster.jobs[0].cancelled


def test_a_requeued_job_is_started(program: Program, cluster: Cluster):
    program.run("submit-ddp", run="first")
    job = cluster.jobs[0]
    job.states, job.reason, job.restarts = [("COMPLETING", 0), ("PENDING", 0)], "BeginTime", 1
    results = program.run("resume-run", run="first")
    assert results == {"job-id": "40", "run": "first", "state": "PENDING", "reason": "Resources"}
    assert cluster.changes[-1] == ("scontrol", "update", "JobId=40", "StartTime=now")
    assert program.log == [
        "job 40 is leaving its nodes",
        "job 40 was PENDING (BeginTime); it starts as soon as there is room",
    ]


@pytest.mark.parametrize("reason", ["JobHeldAdmin", "slurm_cred_create failure, holding job."])
def test_a_job_that_slurmctld_could_not_start_is_reported_with_the_account_that_it_lacks(
    program: Program, cluster: Cluster, reason: str
):
    """Slurm takes the job, and holds it when it is to start (24.11.5); its owner cannot release it."""
    cluster.states = [("PENDING", 0)]

    def hold(job: Job) -> None:
        job.reason, job.held, job.restarts = reason, True, 1

    cluster.submitted = hold
    uid = os.geteuid()
    line = (
        f"job 40 is held ({reason}): by an administrator, or slurmctld does not know the account {USER} (uid {uid}); on "
        f"slurmctld's host, as root: useradd --no-create-home --uid {uid} {USER}; then: scontrol release 40"
    )
    assert program.fails("submit-ddp", run="first", wait=True) == line
    assert (program.results["state"], program.results["job-id"]) == ("PENDING", "40")
    assert program.run("show-run", run="first")["reason"] == line
    cluster.denial = "slurm_suspend error: Access/permission denied"
    assert program.fails("resume-run", run="first").endswith(f"Access/permission denied; {line}")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("PENDING", "JobHeldUser"),
        ("PENDING", "job requeued in held state"),  # scontrol requeuehold
        ("PENDING", "launch failed requeued held"),
        ("REQUEUE_HOLD", "job requeued in held state"),
        ("SPECIAL_EXIT", "job requeued in special exit state"),
        ("EXPEDITING", "None"),  # Slurm refuses to change it; 25.11 holds it if its epilogs passed
    ],
)
def test_a_held_job_is_released_whatever_slurm_calls_the_reason(
    program: Program, cluster: Cluster, state: str, reason: str
):
    program.run("submit-ddp", run="first")
    job = cluster.jobs[0]
    job.states, job.reason, job.restarts, job.held = [(state, 0), ("PENDING", 0)], reason, 1, True
    assert program.run("resume-run") == {
        "job-id": "40",
        "run": "first",
        "state": "PENDING",
        "reason": "Resources",
    }
    assert cluster.changes[-2:] == [
        ("scontrol", "release", "40"),
        ("scontrol", "update", "JobId=40", "StartTime=now"),
    ]


def test_a_job_that_stays_held_is_an_error(
    program: Program, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    program.run("submit-ddp", run="first")
    cluster.jobs[0].states, cluster.jobs[0].held = [("PENDING", 0)], True
    monkeypatch.setattr(control.jobs, "release", lambda *_, **__: None)
    assert (
        program.fails("resume-run")
        == "job 40 is still held (Resources); as an administrator: scontrol release 40"
    )


def test_a_job_is_started_only_when_its_end_is_over_on_the_nodes(
    program: Program, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """Within the same second slurmd would refuse it, and it would have failed."""
    program.run("submit-ddp", run="first")
    cluster.jobs[0].states, cluster.jobs[0].restarts = [("PENDING", 0)], 1
    paused: list[tuple[float, int]] = []
    monkeypatch.setattr(
        control, "pause", lambda seconds: paused.append((seconds, len(cluster.changes)))
    )
    program.run("resume-run")
    assert paused == [(2.0, len(cluster.changes) - 1)], "before Slurm gets the change"
    cluster.jobs[0].restarts = 0
    program.run("resume-run")
    assert len(paused) == 1, "a job that never ran has no end"


def test_what_cannot_be_started_or_is_denied_is_reported(program: Program, cluster: Cluster):
    program.run("submit-ddp", run="first")
    cluster.jobs[0].states = [("RUNNING", 0)]
    assert (
        program.fails("resume-run", run="40")
        == "job 40 is not waiting: it is RUNNING; ddp log first"
    )
    cluster.jobs[0].states = [("TIMEOUT", 1)]
    assert program.fails("resume-run", run="40") == (
        "job 40 is not waiting: it is TIMEOUT; to resume, submit it with the same options; ddp submit --run first"
    )
    record = program.workspace / "runs" / "first" / "job.json"
    record.write_text(
        json.dumps({**json.loads(record.read_text()), "kind": "script", "workload": "/x/train.py"})
    )
    assert program.fails("resume-run", run="40").endswith(" ddp submit --run first /x/train.py"), (
        "else it would be a gpt"
    )
    assert [call[0] for call in cluster.changes] == ["sbatch"]
    cluster.jobs[0].states, cluster.denial = (
        [("PENDING", 0)],
        "scancel: error: Kill job error on job id 40: Access denied",
    )
    assert program.fails("cancel-run", run="40") == (
        "job 40 could not be cancelled: Kill job error on job id 40: Access denied; ddp list"
    )
    cluster.denial, cluster.jobs[0].held = "slurm_update error: Access/permission denied", True
    cluster.jobs[0].reason = "JobHeldUser"
    assert program.fails("resume-run").endswith(
        "permission denied; as an administrator: scontrol release 40"
    )
