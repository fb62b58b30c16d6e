"""An action that waits for a job: how long, who ends it, and its text if it holds the machine."""

import collections.abc
import json
import os
import pwd
import subprocess
import sys
import typing

import pytest
from cluster import Cluster
from harness import ActionFailedError, Trainer

from ddp import service
from ddp.actions import verbs
from ddp.host import locks, waits
from ddp.options import fields, models
from ddp.problem import Problem
from ddp.results.result import texts_of
from ddp.settings import Settings
from ddp.submit import control

USER = pwd.getpwuid(os.geteuid()).pw_name
LOGIN = "juju ssh trainer/0" if USER == "ubuntu" else f"juju ssh trainer/0 sudo -u {USER}"
FOLLOW = f"{LOGIN.replace('/0', '/leader')} ddp watch"


@pytest.fixture
def endless(cluster: Cluster) -> Cluster:
    """Slurm, with jobs that run and run."""
    cluster.states = [("RUNNING", 0)]
    return cluster


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> dict[str, float]:
    """The time since the command began; each look at the job takes a minute."""
    now = {"s": 0.0}

    def pause(_: float) -> None:
        now["s"] += 60.0

    trainer.pause = pause
    monkeypatch.setattr(waits.time, "monotonic", lambda: now["s"])
    return now


def while_waiting(trainer: Trainer, do: collections.abc.Callable[[], object]) -> None:
    """Do something at the first look at a job."""
    steps = iter([do])

    def pause(_: float) -> None:
        step = next(steps, None)
        assert step is not None, "it should have ended by now"
        step()

    trainer.pause = pause


@pytest.mark.parametrize(
    ("action", "params"),
    [
        ("submit-ddp", {"run": "first", "wait": True}),
        ("submit-sweep", {"name": "first", "grid": "lr=1,2", "wait": True}),
        ("prepare-dataset", {"name": "first"}),
        ("benchmark-collectives", {}),
    ],
)
def test_an_action_that_holds_the_machine_ends_after_a_quarter_of_an_hour_and_the_job_goes_on(
    ready: Trainer,
    endless: Cluster,
    clock: dict[str, float],
    action: str,
    params: dict[str, object],
):
    ready.holds_machine = True
    results = ready.run(action, **params)
    assert clock["s"] == 900
    run = results.get("run") or results["sweep"]
    assert results["to-follow"] == f"{FOLLOW} {run}"
    assert (
        ready.log[-1] == f"no longer waiting for {run}, which goes on; to follow it: {FOLLOW} {run}"
    )
    assert results.get("state", "RUNNING") == "RUNNING"
    assert not [job for job in endless.jobs if job.cancelled]


def test_elsewhere_it_waits_to_the_end_of_its_timeout(
    ready: Trainer, endless: Cluster, clock: dict[str, float]
):
    with pytest.raises(ActionFailedError):
        ready.run("submit-ddp", run="first", wait=True, wait_timeout=3600)
    assert clock["s"] == 3600
    results = ready.run("submit-ddp", run="second", wait=True, wait_limit=120)
    assert (clock["s"], results["state"]) == (3720, "RUNNING"), "an operator may choose a limit"


def test_a_longer_limit_of_the_operator_s_holds(
    ready: Trainer, endless: Cluster, clock: dict[str, float]
):
    ready.holds_machine = True
    ready.run("submit-ddp", run="first", wait=True, wait_limit=3600)
    assert clock["s"] == 3600


@pytest.mark.parametrize("named", ["first", "40", None])
def test_stop_waiting_ends_the_action_and_not_the_job(
    ready: Trainer, endless: Cluster, named: str | None
):
    ended: list[list[list[str]]] = []
    while_waiting(ready, lambda: ended.append(waits.stop(named)))
    results = ready.run("submit-ddp", run="first", wait=True)
    assert ended == [[["first", "40"]]]
    assert results["state"] == "RUNNING"
    assert waits.stop(None) == [], "nothing waits any more"
    assert list(waits.folder().iterdir()) == []


def test_another_s_run_is_not_ended(ready: Trainer, endless: Cluster):
    answers: list[list[list[str]]] = []

    def stop() -> None:
        answers.append(waits.stop("second"))
        waits.stop("first")

    while_waiting(ready, stop)
    ready.run("submit-ddp", run="first", wait=True)
    assert answers == [[]]


def test_an_action_that_holds_the_machine_can_be_ended_before_it_has_a_job(
    trainer: Trainer, endless: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """While it makes an environment, say: it ends as soon as its job is submitted."""
    trainer.holds_machine = True
    submit = control.Submission.submit

    def submit_after_stop(*words: typing.Any, **more: typing.Any) -> object:
        assert waits.stop(None) == [["submit-ddp"]]
        return submit(*words, **more)

    monkeypatch.setattr(control.Submission, "submit", submit_after_stop)
    trainer.pause = lambda _: pytest.fail("it still waits")
    results = trainer.run("submit-ddp", workload="smoke", run="first", wait=True)
    assert results["state"] in ("PENDING", "RUNNING")


def test_the_log_is_followed_until_someone_ends_that(ready: Trainer, endless: Cluster):
    ready.run("submit-ddp", run="first")
    while_waiting(ready, lambda: waits.stop("first"))
    assert ready.run("run-log", run="first", follow=True, follow_timeout=80000)["lines"] == "0"


def test_the_dataset_that_a_submission_needs_is_waited_for_in_any_case(
    trainer: Trainer, cluster: Cluster, clock: dict[str, float]
):
    """Its own job can be submitted only then."""
    trainer.holds_machine = True
    cluster.states = [("RUNNING", 0)] * 20 + [("COMPLETED", 0)]
    results = trainer.run("submit-ddp", run="first", wait=True)
    assert clock["s"] > 900
    assert results["run"] == "first"
    assert "to-follow" in results


def test_the_first_line_says_what_waits_and_what_to_type(
    ready: Trainer, endless: Cluster, clock: dict[str, float]
):
    ready.holds_machine = True
    ready.run("submit-ddp", run="first", wait=True)
    assert ready.log[0] == (
        "hooks and actions of all units on the machine of trainer/0 wait while this action runs; "
        f"to look: {LOGIN} ddp list; to cancel a job: {LOGIN} ddp cancel RUN; "
        f"to end this action, not its job: {LOGIN} ddp stop-waiting"
    )
    assert not any("cancel-task" in line for line in ready.log)


def test_one_that_no_one_can_end_does_not_say_how(
    ready: Trainer, endless: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "_QUIET_S", 0.0)
    ready.holds_machine = True
    ready.run("list-runs")
    assert ready.log[0].endswith(f"to cancel a job: {LOGIN} ddp cancel RUN")
    assert waits.stop(None) == []


def test_an_action_that_does_not_wait_says_nothing(ready: Trainer, endless: Cluster):
    ready.holds_machine = True
    ready.run("submit-ddp", run="first")
    assert not any("hooks and actions" in line for line in ready.log)


def test_the_command_lists_what_it_ended_and_says_where_nothing_waits(settings: Settings):
    def stop(**given: str) -> dict[str, str]:
        params = fields.parse(models.StopWaiting, dict(given))
        return texts_of(verbs.ALL["stop-waiting"].do(settings, params, lambda _: None) or {})

    with pytest.raises(Problem) as caught:
        stop(run="first")
    assert str(caught.value) == "no command of this account waits for first on this host; ddp list"
    with waits.Wait() as one:
        one.begin("submit-ddp")
        assert stop() == {"stopped": "submit-ddp, as soon as its job is submitted"}
        assert one.is_over
        one.begin("first", "40")
        assert one.is_over, "what was ended stays so"
    with waits.Wait() as one:
        one.begin("first", "40")
        assert stop(run="40") == {"stopped": "first 40"}


def test_the_file_of_a_command_that_was_killed_counts_for_nothing(ready: Trainer):
    child = "import os, sys; from ddp.host import locks, waits; locks.CACHE = waits.pathlib.Path(sys.argv[1]); "
    child += "waits.Wait().begin('first'); os._exit(0)"
    subprocess.run([sys.executable, "-c", child, str(locks.CACHE)], check=True)
    (left,) = waits.folder().iterdir()
    assert waits.stop(None) == []
    assert not left.exists()


def test_another_process_ends_the_waiting(
    ready: Trainer, endless: Cluster, monkeypatch: pytest.MonkeyPatch
):
    child = "import json, sys; from ddp.host import locks, waits; locks.CACHE = waits.pathlib.Path(sys.argv[1]); "
    child += "print(json.dumps(waits.stop('first')))"
    answers: list[object] = []

    def stop() -> None:
        done = subprocess.run(
            [sys.executable, "-c", child, str(locks.CACHE)], capture_output=True, check=True
        )
        answers.append(json.loads(done.stdout))

    while_waiting(ready, stop)
    ready.run("submit-ddp", run="first", wait=True)
    assert answers == [[["first", "40"]]]


def test_the_limit_is_a_parameter_of_every_action_that_waits_for_jobs():
    with_timeout = {
        name for name, verb in verbs.ACTIONS.items() if "wait_timeout" in verb.options.model_fields
    }
    with_limit = {
        name for name, verb in verbs.ACTIONS.items() if "wait_limit" in verb.options.model_fields
    }
    assert with_timeout - with_limit == {"doctor"}, "which waits a minute for free nodes"
