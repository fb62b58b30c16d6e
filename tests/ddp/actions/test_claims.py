"""Concurrent actions: two that submit, prepare or install, and other accounts in between."""

import collections.abc
import threading
import time

import pytest
from cluster import Cluster
from harness import META, Trainer
from pip_double import Pip

from ddp.host.locks import Claims
from ddp.submit import control


@pytest.fixture
def other() -> collections.abc.Iterator[Claims]:
    """Yield the claims of another action."""
    with Claims() as held:
        yield held


def test_no_action_keeps_the_machine_for_itself():
    """Other units' hooks go on while one waits."""
    assert {name for name, action in META["actions"].items() if not action.get("parallel")} == set()


def test_two_of_one_second_have_names_of_their_own(
    ready: Trainer, other: Claims, monkeypatch: pytest.MonkeyPatch
):
    now = control.now()
    monkeypatch.setattr(control, "now", lambda: now)
    stamp = f"smoke-{now:%Y%m%d-%H%M%S}"
    assert other.take(stamp)
    assert ready.run("submit-ddp", workload="smoke")["run"] == f"{stamp}-2"
    assert other.take(f"{stamp}-2"), "nothing is held once it is submitted"


@pytest.mark.parametrize(
    "case",
    [
        ("submit-ddp", "first", {"run": "first"}),
        ("submit-sweep", "lrs", {"name": "lrs", "grid": "lr=1,2"}),
        ("prepare-dataset", "prepare-python-stdlib", {}),
    ],
)
def test_a_run_that_another_action_is_about_to_submit_is_refused(
    ready: Trainer, cluster: Cluster, other: Claims, case: tuple[str, str, dict[str, str]]
):
    action, run, params = case
    assert other.take(run)
    line = f"run: another command is submitting {run}; juju run trainer/leader list-runs"
    assert ready.fails(action, **params) == line
    assert not cluster.changes
    other.drop(run)
    ready.run(action, **params)
    assert other.take(run)


def test_a_run_is_free_while_its_submitter_waits(
    ready: Trainer, cluster: Cluster, other: Claims, monkeypatch: pytest.MonkeyPatch
):
    """So another action may cancel it, or continue it after its end."""
    free: list[bool] = []

    def pause(_: float) -> None:
        free.append(other.take("first"))
        other.drop("first")

    ready.pause = pause
    ready.run("submit-ddp", run="first", wait=True)
    assert free
    assert all(free)


def test_a_failed_action_holds_nothing(ready: Trainer, cluster: Cluster, other: Claims):
    cluster.refusal = "sbatch: error: invalid partition specified: x"
    ready.fails("submit-ddp", run="first")
    assert other.take("first")


def test_the_default_dataset_is_made_once(trainer: Trainer, cluster: Cluster):
    """A second submission waits for the first one's preparation, and does not fail on it."""
    trainer.run("install-environment")
    cluster.states = [("PENDING", 0), ("RUNNING", 0), ("RUNNING", 0), ("COMPLETED", 0)]
    trainer.run("prepare-dataset", wait=False)
    assert trainer.run("submit-ddp", run="first")["job-id"] == "41"
    assert "job 40 prepares it already; waiting for that" in trainer.log
    assert [job.name for job in cluster.jobs] == ["prepare-python-stdlib", "first"]


def test_the_second_of_two_that_install_uses_what_the_first_made(
    trainer: Trainer, pip: Pip, other: Claims
):
    trainer.run("install-environment")
    made = len(pip.calls)
    assert other.take("environments")
    held = threading.Timer(0.5, other.drop, ["environments"])
    held.start()
    began = time.monotonic()
    trainer.run("install-environment")
    held.join()
    assert time.monotonic() - began >= 0.4
    assert trainer.log[0] == "waiting for another command that makes an environment"
    assert len([call for call in pip.calls[made:] if "install" in call]) == 0
