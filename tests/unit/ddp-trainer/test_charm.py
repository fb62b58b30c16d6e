"""The charm under Scenario: real modules and workspace; doubles of Slurm, pip and the mount."""

import pathlib
import shutil

import pytest
import yaml
from cluster import NOT_CONFIGURED, Cluster
from conftest import USER
from harness import ACCOUNT, Trainer
from ops import testing

import charm
import host as host_module
import messages
from ddp.slurm import jobs
from ddp.workspace import operations
from slurm_ddp import mounts
from slurm_ddp.commands import CommandError

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())

EVENTS = [
    "install",
    "start",
    "config_changed",
    "upgrade_charm",
    "update_status",
    "relation_joined",
    "relation_changed",
]


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_reaches_the_same_state(trainer: Trainer, host: dict[str, object], event: str):
    out = trainer.event(event)
    assert out.unit_status == testing.ActiveStatus(
        "no environment yet; the first job builds it, or: juju run trainer/leader install-environment"
    )
    assert host["installed"] == ("python3-venv", "zstd")
    made = {path.name for path in trainer.workspace.iterdir()}
    assert made == {"runs", "datasets", "environments", "baselines", ".secrets", "users"}
    before = trainer.files()
    trainer.event(event)
    assert trainer.files() == before, "a second time nothing changes"


def test_an_environment_that_jobs_would_not_use_is_reported(ready: Trainer):
    """After a refresh, or for another build of torch: the next job would wait for a new one."""
    expected = "no environment of this release; the first job builds it, or: juju run trainer/leader install-environment"
    package = ready.root / "payload" / "ddptrain" / "__init__.py"
    package.write_text("__version__ = '1'\n")
    assert ready.event("upgrade_charm").unit_status == testing.ActiveStatus(expected)
    ready.run("install-environment")
    assert ready.event("update_status").unit_status.message.startswith("ready; ")
    shutil.rmtree(package.parent)
    assert ready.event("update_status").unit_status.name == "blocked", (
        "a charm that was not packed right"
    )


def test_the_status_names_an_option_that_the_environment_lacks(ready: Trainer):
    ready.run("install-environment")
    again = "the first job builds it, or: juju run trainer/leader install-environment"
    for given, lacks in (
        ({"tensorboard": True}, "the environment lacks tensorboard"),
        ({"tensorboard": True, "wandb": True}, "the environment lacks tensorboard, wandb"),
        (
            {"tensorboard": True, "wandb": True, "transformers": True},
            "the environment lacks tensorboard and 2 more",
        ),
        ({"transformers": True}, "the environment lacks transformers"),
        ({"torch-build": "cuda"}, "no environment of this release"),
    ):
        before = dict(ready.config)
        ready.config.update(given)
        assert ready.event("config_changed").unit_status == testing.ActiveStatus(
            f"{lacks}; {again}"
        )
        ready.config.clear()
        ready.config.update(before)
    assert ready.event("config_changed").unit_status.message.startswith("ready; ")


def test_a_slurm_without_its_security_fixes_is_named_and_does_not_block(
    ready: Trainer, cluster: Cluster
):
    ready.run("install-environment")
    cluster.version = "25.11.2"
    status = ready.event("update_status").unit_status
    assert status.name == "active"
    assert status.message.endswith("; Slurm 25.11.2 lacks security fixes: ddp doctor")


SLURM = "is slurmctld up? else: juju integrate sackd slurmctld"
MOUNT = "integrate shared-filesystem-client:juju-info with this machine's charm"
HUNG = mounts.Result(mounts.State.HUNG, "/mnt/shared did not answer within 5 s")


@pytest.mark.parametrize(
    ("slurm", "about", "line"),
    [
        ({"silent": 9}, {}, (SLURM, "Unable to contact slurm controller (connect failure)")),
        ({"silent": 9, "silence": NOT_CONFIGURED}, {}, (SLURM, jobs.NOT_CONFIGURED)),
        ({"hung": True}, {}, (SLURM, "Slurm: scontrol: no answer within 10 s")),
        (None, {}, ("the principal must be sackd", "Slurm's client is not installed on this host")),
        ({}, {"mount": None}, (MOUNT, "no filesystem is mounted at {}")),
        ({}, {"mount": "/"}, (MOUNT, "no filesystem is mounted at {}")),
        (
            {},
            {"probe": HUNG},
            (
                "is the filesystem's server up? see: juju status",
                "/mnt/shared did not answer within 5 s",
            ),
        ),
    ],
)
def test_waits_for_slurm_and_the_filesystem(
    trainer: Trainer,
    cluster: Cluster,
    host: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    slurm: dict[str, object] | None,
    about: dict[str, object],
    line: tuple[str, str],
):
    """The remedy comes first in a status, which may be cut, and last in an action's error."""
    vars(cluster).update(slurm or {})
    monkeypatch.setattr(jobs, "is_installed", lambda: slurm is not None)
    host.update(about)
    remedy, problem = (text.format(trainer.workspace) for text in line)
    status = trainer.event("update_status").unit_status
    assert status == testing.WaitingStatus(messages.fitted(f"{remedy}: {problem}"))
    if about:
        assert not list(trainer.workspace.iterdir()), "nothing is written beneath a mountpoint"
        assert trainer.fails("submit-ddp") == f"{problem}; {remedy}"


def test_a_unit_that_waits_looks_again_soon(
    trainer: Trainer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """slurmctld's or the mount's return is no event here: the status would be late."""
    asked: list[str] = []
    monkeypatch.setattr(charm.wake, "later", lambda unit, _: asked.append(unit))
    cluster.hung = True
    assert isinstance(trainer.event("start").unit_status, testing.WaitingStatus)
    assert asked == ["trainer/0"]
    cluster.hung = False
    trainer.event("update_status")
    assert len(asked) == 1


def test_nothing_is_submitted_where_others_could_replace_what_runs(
    ready: Trainer, cluster: Cluster
):
    ready.event("install")
    ready.workspace.chmod(0o777)
    problem = (
        f"{ready.workspace} has mode 0777 without the sticky bit, so any account can replace what is in it: "
        f"chmod +t {ready.workspace}"
    )
    before, asked = ready.files(), len(cluster.changes)
    assert ready.event("update_status").unit_status == testing.BlockedStatus(
        messages.fitted(problem)
    )
    for action in ("submit-ddp", "prepare-dataset", "install-environment", "benchmark-collectives"):
        assert ready.fails(action) == problem
    assert (ready.files(), len(cluster.changes)) == (before, asked)
    assert ready.run("list-runs")  # what only looks goes on
    ready.workspace.chmod(0o1777)
    assert ready.event("update_status").unit_status.name == "active"


def test_packages_that_cannot_be_installed_block(trainer: Trainer, host: dict[str, object]):
    host["apt"] = CommandError("apt-get exited 100: E: Unable to fetch some archives")
    line = "cannot install python3-venv zstd: apt-get exited 100: E: Unable to fetch some archives"
    assert trainer.event("install").unit_status == testing.BlockedStatus(line)
    del host["apt"]
    assert trainer.event("update_status").unit_status.name == "active"


@pytest.mark.parametrize(
    ("option", "value", "line"), CASES["an_option_that_cannot_be_blocks_and_names_itself"]
)
def test_an_option_that_cannot_be_blocks_and_names_itself(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, option: str, value: str, line: str
):
    if value in ("root", "nosuch"):
        monkeypatch.setattr(host_module, "account", ACCOUNT)
    trainer.config[option] = value
    assert trainer.event("config_changed").unit_status == testing.BlockedStatus(
        f"fix config: {option}: {line}"
    )
    assert trainer.fails("list-runs") == f"fix config: {option}: {line}"


def test_a_folder_of_another_account_blocks(trainer: Trainer, monkeypatch: pytest.MonkeyPatch):
    def denied(*_: object) -> None:
        raise PermissionError(1, "/mnt/shared/runs belongs to uid 33")

    obstacles = operations.Obstacles(denied=("runs",), untrusted="")
    monkeypatch.setattr(operations, "make_folders", lambda **_: obstacles)
    monkeypatch.setattr(host_module, "hand_over", denied)
    out = trainer.event("update_status")
    place = trainer.workspace / "runs"
    text = f"chown {USER} {place}, as root, here or on the filesystem's server"
    assert out.unit_status == testing.BlockedStatus(
        messages.fitted(f"{text}: /mnt/shared/runs belongs to uid 33")
    )
