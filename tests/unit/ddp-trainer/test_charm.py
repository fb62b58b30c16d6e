"""The charm under Scenario: real modules and a real workspace; doubles of Slurm, pip and the mount."""

import pathlib
import shutil

import pytest
from cluster import Cluster
from conftest import USER
from harness import ACCOUNT, Trainer
from ops import testing

import charm
import host as host_module
from ddp.slurm import jobs
from ddp.workspace import operations
from slurm_ddp import mounts
from slurm_ddp.run import CommandError

EVENTS = ["install", "start", "config_changed", "upgrade_charm", "update_status", "relation_joined", "relation_changed"]


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_reaches_the_same_state(trainer: Trainer, host: dict[str, object], event: str):
    out = trainer.event(event)
    assert out.unit_status == testing.ActiveStatus(
        "no environment yet; the first job builds it, or: juju run trainer/0 install-environment"
    )
    assert host["installed"] == ("python3-venv", "zstd")
    made = {path.name for path in trainer.workspace.iterdir()}
    assert made == {"runs", "datasets", "environments", "baselines", "users"}


@pytest.mark.parametrize("event", EVENTS)
def test_a_second_time_nothing_changes(trainer: Trainer, event: str):
    trainer.event("install")
    before = trainer.files()
    trainer.event(event)
    assert trainer.files() == before


def test_an_environment_that_jobs_would_not_use_is_reported(ready: Trainer):
    """As after a refresh, or with another build of torch asked for: the next job would wait for a new one."""
    how = "the first job builds it, or: juju run trainer/0 install-environment"
    expected = testing.ActiveStatus(f"no environment of this release; {how}")
    ready.config["torch-build"] = "cuda"
    assert ready.event("config_changed").unit_status == expected
    ready.config["torch-build"] = "cpu"
    assert ready.event("config_changed").unit_status.message.startswith("ready; ")
    package = ready.root / "payload" / "ddptrain" / "__init__.py"
    package.write_text("__version__ = '1'\n")
    assert ready.event("upgrade_charm").unit_status == expected
    ready.run("install-environment")
    assert ready.event("update_status").unit_status.message.startswith("ready; ")
    shutil.rmtree(package.parent)
    assert ready.event("update_status").unit_status.name == "blocked", "a charm that was not packed right"


def test_waits_for_slurms_client(trainer: Trainer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jobs, "is_installed", lambda: False)
    out = trainer.event("update_status")
    assert out.unit_status == testing.WaitingStatus(
        "Slurm's client is not installed on this host; the principal must be sackd"
    )


def test_waits_for_the_controller(trainer: Trainer, cluster: Cluster):
    cluster.silent = 9
    out = trainer.event("update_status")
    assert out.unit_status == testing.WaitingStatus(
        "Unable to contact slurm controller (connect failure); is slurmctld up (juju status)? else: juju integrate sackd slurmctld"
    )
    cluster.silent, cluster.hung = 0, True
    out = trainer.event("update_status")
    assert out.unit_status == testing.WaitingStatus(
        "Slurm: scontrol: no answer within 10 s; is slurmctld up (juju status)? else: juju integrate sackd slurmctld"
    )


def test_a_unit_that_waits_looks_again_soon(trainer: Trainer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Neither slurmctld's return nor the mount's is an event of this unit: it would say that it waits for five minutes."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(charm.wake, "later", lambda unit, _, seconds: asked.append((unit, seconds)))
    cluster.hung = True
    assert isinstance(trainer.event("start").unit_status, testing.WaitingStatus)
    assert asked == [("trainer/0", 20)]
    cluster.hung = False
    trainer.event("update_status")
    assert len(asked) == 1


@pytest.mark.parametrize("event", ["relation_broken", "stop", "remove"])
def test_a_unit_that_goes_sets_no_status_and_is_not_woken(
    trainer: Trainer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, event: str
):
    """Juju 4.0.15 may have deleted the unit by then: status-set fails with "unit not found"."""
    asked: list[str] = []
    monkeypatch.setattr(charm.wake, "later", lambda unit, _, seconds: asked.append(unit))
    cluster.hung = True  # else the unit would wait, and look again
    assert trainer.event(event).unit_status == testing.UnknownStatus()
    assert trainer.context.unit_status_history == []
    assert asked == []


def test_waits_for_the_filesystem(trainer: Trainer, host: dict[str, object], workspace: pathlib.Path):
    line = f"no filesystem is mounted at {workspace}; integrate shared-filesystem-client:juju-info with the application of this machine"
    for nothing in (None, "/"):
        host["mount"] = nothing
        assert trainer.event("update_status").unit_status == testing.WaitingStatus(line)
        assert not list(workspace.iterdir()), "nothing is written beneath a mountpoint"


def test_a_filesystem_that_does_not_answer_is_waited_for(trainer: Trainer, host: dict[str, object]):
    host["probe"] = mounts.Result(mounts.State.HUNG, "/mnt/shared did not answer within 5 s")
    line = "/mnt/shared did not answer within 5 s; is the filesystem's server up? see: juju status"
    assert trainer.event("update_status").unit_status == testing.WaitingStatus(line)
    assert trainer.fails("submit-ddp") == line


def test_nothing_is_submitted_where_others_could_replace_what_runs(ready: Trainer, cluster: Cluster):
    ready.event("install")
    ready.workspace.chmod(0o777)
    problem = (
        f"{ready.workspace} has mode 0777 without the sticky bit, so any account can replace what is in it: "
        f"chmod +t {ready.workspace}"
    )
    before, asked = ready.files(), len(cluster.changes)
    assert ready.event("update_status").unit_status == testing.BlockedStatus(problem)
    for action, params in (
        ("submit-ddp", {}),
        ("submit-ddp", {"dry_run": True}),
        ("prepare-dataset", {"name": "x"}),
        ("install-environment", {"force": True}),
        ("benchmark-collectives", {}),
    ):
        assert ready.fails(action, **params) == problem
    assert (ready.files(), len(cluster.changes)) == (before, asked)
    assert ready.run("list-runs")  # what only looks goes on
    ready.workspace.chmod(0o1777)
    assert ready.event("update_status").unit_status.name == "active"
    ready.run("submit-ddp", dry_run=True)


def test_packages_that_cannot_be_installed_block(trainer: Trainer, host: dict[str, object]):
    host["apt"], host["packages"] = CommandError("apt-get exited 100: E: Unable to fetch some archives"), set[str]()
    line = "cannot install python3-venv zstd: apt-get exited 100: E: Unable to fetch some archives"
    assert trainer.event("install").unit_status == testing.BlockedStatus(line)
    assert trainer.fails("submit-ddp") == line
    del host["apt"]
    assert trainer.event("update_status").unit_status.name == "active"


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        (
            "workspace",
            "shared",
            "fix config: workspace: 'shared' is not allowed; an absolute path of letters, digits and . _ / -",
        ),
        ("submit-user", "a b", "fix config: submit-user: 'a b' is not allowed; the name of an account"),
        (
            "mlflow-tracking-uri",
            "http://user:secret@host",
            "fix config: mlflow-tracking-uri: 'http://user:secret@host' is not "
            "allowed; a server's http(s) URI without credentials, or a path, or nothing",
        ),
    ],
)
def test_an_option_that_cannot_be_blocks_and_names_itself(trainer: Trainer, option: str, value: str, line: str):
    trainer.config[option] = value
    assert trainer.event("config_changed").unit_status == testing.BlockedStatus(line)
    assert trainer.fails("list-runs") == line


@pytest.mark.parametrize(
    ("user", "line"),
    [
        ("root", "fix config: submit-user: jobs never run as root; use an ordinary account"),
        (
            "nosuch",
            "fix config: submit-user: no account 'nosuch' on this host; it must exist with the same uid here, on slurmctld's "
            "machine and on every node: useradd -m -u UID nosuch, or use another",
        ),
    ],
)
def test_an_account_that_cannot_run_jobs_blocks(
    trainer: Trainer, user: str, line: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_module, "account", ACCOUNT)
    trainer.config["submit-user"] = user
    assert trainer.event("config_changed").unit_status == testing.BlockedStatus(line)


def test_a_folder_of_another_account_blocks(trainer: Trainer, monkeypatch: pytest.MonkeyPatch):
    def denied(*_: object) -> None:
        raise PermissionError(1, "/mnt/shared/runs belongs to uid 33")

    monkeypatch.setattr(operations, "make_folders", lambda **_: {"denied": ["runs"], "untrusted": ""})
    monkeypatch.setattr(host_module, "hand_over", denied)
    out = trainer.event("update_status")
    place = trainer.workspace / "runs"
    assert out.unit_status == testing.BlockedStatus(
        f"{USER} cannot write {place}: /mnt/shared/runs belongs to uid 33; "
        f"as root, on the filesystem's server or here: chown {USER} {place}"
    )


def test_a_failure_nobody_foresaw_is_not_hidden(ready: Trainer, monkeypatch: pytest.MonkeyPatch):
    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(jobs, "_capacity", broken)  # met by the thread that lists the nodes
    with pytest.raises(testing.errors.UncaughtCharmError):
        ready.run("submit-ddp")
