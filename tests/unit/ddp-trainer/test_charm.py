"""The charm under Scenario: real modules and a real workspace; doubles of Slurm, pip and the mount."""

import dataclasses
import json
import os
import pathlib
import shutil
import threading
import typing

import pytest
from cluster import Cluster, Job
from conftest import USER
from harness import ACCOUNT, META, Trainer, add_dataset, write_result
from hostile_values import NASTY, ROAMING, TEXTS
from ops import testing

import charm
import host as host_module
from ddp import base, readiness, verbs
from ddp.base import Ahead
from ddp.options import fields
from ddp.run import control
from ddp.slurm import jobs
from ddp.view import curve
from ddp.workspace import folders, operations
from slurm_ddp import mounts
from slurm_ddp.run import CommandError, Completed
from slurm_ddp.slurm import nodes

EVENTS = ["install", "start", "config_changed", "upgrade_charm", "update_status", "relation_joined", "relation_changed"]


CURVE = curve.draw([(16, 0.5)])  # of what write_result leaves


# -- status ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_reaches_the_same_state(trainer: Trainer, host: dict[str, object], event: str):
    out = trainer.event(event)
    assert out.unit_status == testing.ActiveStatus(
        "no environment yet: juju run trainer/0 install-environment, or submit-ddp does it"
    )
    assert host["installed"] == ("python3-venv", "zstd")
    made = {path.name for path in trainer.workspace.iterdir()}
    assert made == {"runs", "datasets", "environments", "baselines", "users"}


@pytest.mark.parametrize("event", ["relation_created", "relation_joined"])
def test_another_machines_principal_changes_nothing(trainer: Trainer, cluster: Cluster, event: str):
    """Juju 4.0.15 sends a subordinate juju-info events of another machine's principal, although its scope is container."""
    trainer.event("install")
    before, asked = trainer.files(), len(cluster.changes)
    own = testing.SubordinateRelation("juju-info", remote_app_name="sackd", remote_unit_id=0)
    foreign = testing.SubordinateRelation("juju-info", remote_app_name="slurmd", remote_unit_id=1)
    context = testing.Context(charm.DdpTrainerCharm, meta=META, charm_root=trainer.root, app_name="trainer", unit_id=0)
    state = dataclasses.replace(trainer.state(), relations=[own, foreign])
    out = context.run(getattr(context.on, event)(foreign), state)
    assert out.unit_status == trainer.event("update_status").unit_status
    assert (trainer.files(), len(cluster.changes)) == (before, asked)
    assert not any(
        relation.local_unit_data.keys() - {"egress-subnets", "ingress-address", "private-address"}
        or relation.local_app_data
        for relation in out.relations
    )


@pytest.mark.parametrize("event", EVENTS)
def test_a_second_time_nothing_changes(trainer: Trainer, event: str):
    trainer.event("install")
    before = trainer.files()
    trainer.event(event)
    assert trainer.files() == before


def test_an_installed_environment_is_reported(ready: Trainer):
    out = ready.event("update_status")
    assert out.unit_status == testing.ActiveStatus("ready; environment installed: torch 2.13.0+cpu")


def test_an_environment_that_jobs_would_not_use_is_reported(ready: Trainer):
    """As after a refresh, or with another build of torch asked for: the next job would wait for a new one."""
    how = "juju run trainer/0 install-environment, or submit-ddp does it"
    expected = testing.ActiveStatus(f"no environment of this release: {how}")
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
    assert out.unit_status == testing.WaitingStatus("Slurm's client is not on this host; the principal must be sackd")


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
    line = f"no filesystem is mounted at {workspace}; integrate shared-filesystem-client:juju-info with this machine's application"
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
        ("submit-ddp", {}), ("submit-ddp", {"dry_run": True}), ("prepare-dataset", {"name": "x"}),
        ("install-environment", {"force": True}), ("benchmark-collectives", {}),
    ):  # fmt: skip
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
        (
            "workspace",
            "/mnt/../etc",
            "fix config: workspace: '/mnt/../etc' is not allowed; write the path without . and .. as parts",
        ),
        ("submit-user", "a b", "fix config: submit-user: 'a b' is not allowed; the name of an account"),
        ("torch-build", "rocm", "fix config: torch-build: 'rocm' is not allowed; one of: auto, cpu, cuda"),
        (
            "torch-index",
            "https://user:secret@host/x",
            "fix config: torch-index: 'https://user:secret@host/x' is not allowed; the URL of a package index without "
            "credentials, or nothing",
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
        ("root", "fix config: submit-user: 'root' is root; jobs never run as root: name an ordinary account"),
        (
            "nosuch",
            "fix config: submit-user: no account 'nosuch' on this host; it must exist with the same uid here, on slurmctld's "
            "machine and on every node: useradd -m -u UID nosuch there, or name another one",
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


# -- submit-ddp --------------------------------------------------------------------------------------------------------


def test_one_command_from_nothing_to_a_result(trainer: Trainer, cluster: Cluster):
    def finish(job: Job) -> None:
        if job.name == "prepare-python-stdlib":
            add_dataset(trainer, "python-stdlib")
        write_result(job, workload="gpt", tokens_per_second=1832.05, checkpoint=str(job.script.parent / "epoch-0001"))

    cluster.submitted = finish
    results = trainer.run("submit-ddp", wait=True, run="first")
    folder = trainer.workspace / "runs" / "first"
    assert results == {
        "job-id": "41", "run": "first", "run-dir": str(folder), "log": str(folder / "logs" / "41.out"),
        "script": str(folder / "job.sbatch"), "state": "COMPLETED", "exit-code": "0", "loss": "0.586587", "first-loss": "1.39149",
        "best-loss": "0.5", "tokens-per-second": "1832.05", "samples-per-second": "56118.5", "steps": "16", "nodes": "2", "ranks": "2",
        "checkpoint": str(folder / "epoch-0001"), "curve": str(folder / "loss.png"), "device": "cpu",
        "curve-text": CURVE,
    }  # fmt: skip
    assert [job.name for job in cluster.jobs] == ["prepare-python-stdlib", "first"]
    words = "\n".join(trainer.log)
    for step in (
        "making the environment: torch 2.13.0 for CPU (Slurm has no node with GPUs)",
        "the dataset python-stdlib is not there yet",
        "job 40 prepares the dataset python-stdlib",
        "job 41: first on 2 nodes of slurmd, each 2 cores, 8000 MiB",
        "job 41 PENDING (Resources)",
        "job 41 RUNNING, step 16, loss 0.5000",
    ):
        assert step in words
    data = trainer.workspace / "datasets" / "python-stdlib"
    assert cluster.job(41).commands() == [f"--module ddptrain train --run-dir $RUN_DIR --data {data} --resume $resume"]
    assert cluster.job(41).training().job_dir == str(folder)
    prepared = cluster.job(40).commands()
    assert f"ddptrain prepare --source python-stdlib --output {data} --tokenizer auto" in prepared


def test_without_wait_the_answer_comes_at_once(ready: Trainer, cluster: Cluster):
    results = ready.run("submit-ddp", workload="smoke")
    assert set(results) == {"job-id", "run", "run-dir", "log", "script"}
    assert results["run"].startswith("smoke-20")
    run_dir = pathlib.Path(results["run-dir"])
    record = json.loads((run_dir / "job.json").read_text())
    assert (record["job_id"], record["kind"], record["ranks_per_node"]) == (40, "smoke", 1)
    assert cluster.job(40).commands() == ["--module ddptrain smoke --run-dir $RUN_DIR"]


ASKS_NODES = ("submit-ddp", "submit-sweep", "prepare-dataset", "plan", "benchmark-collectives", "doctor")


@pytest.mark.parametrize("action", list(META["actions"]))
def test_nodes_are_listed_while_the_mount_is_looked_at(
    trainer: Trainer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, action: str
):
    listing = threading.Event()

    def run(*argv: str, **more: typing.Any) -> Completed:
        if "nodes" in argv:
            listing.set()
        return cluster.run(*argv, **more)

    def probe(*_: object, **__: object) -> mounts.Result:
        seen = listing.wait(30 if action in ASKS_NODES else 0.2)
        return mounts.Result(mounts.State.HUNG, f"the nodes are {'' if seen else 'not '}being listed")

    monkeypatch.setattr(nodes, "run", run)
    monkeypatch.setattr(readiness.mounts, "probe", probe)
    wanted = {"name": "web", "source": "python-stdlib", "job-id": 5, "runs": "a,b", "run": "a", "grid": "seed=1,2"}
    known = META["actions"][action].get("params", {})
    message = trainer.fails(action, **{name: value for name, value in wanted.items() if name in known})
    words = "" if action in ASKS_NODES else "not "
    assert message == f"the nodes are {words}being listed; is the filesystem's server up? see: juju status"


def test_a_submission_asks_slurm_no_more_than_it_must(ready: Trainer, cluster: Cluster):
    cluster.calls.clear()
    ready.run("submit-ddp", workload="smoke")
    asked = [" ".join(call[:2]) for call in cluster.calls]
    assert sorted(asked[:3]) == ["scontrol ping", "scontrol show", "scontrol show"], "partitions and nodes"
    assert asked[3:] == ["sbatch --test-only", "sbatch --parsable", "scontrol ping"], "the last for the unit's status"


def test_a_list_of_nodes_counts_once():
    made: list[int] = []
    listing = Ahead(lambda: made.append(1) or len(made))
    assert [listing(), listing(), listing()] == [1, 2, 3]

    def fail() -> int:
        raise jobs.NotAnsweringError("no word")

    broken = Ahead(fail)
    for _ in range(2):
        with pytest.raises(jobs.NotAnsweringError, match="no word"):
            broken()


def test_what_is_in_the_workspace_belongs_to_the_submit_user(ready: Trainer):
    run_dir = pathlib.Path(ready.run("submit-ddp", workload="smoke")["run-dir"])
    assert {path.stat().st_uid for path in (run_dir, *run_dir.rglob("*"))} == {os.geteuid()}


def test_two_runs_in_one_second_have_two_names(ready: Trainer, monkeypatch: pytest.MonkeyPatch):
    now = control.now()
    monkeypatch.setattr(control, "now", lambda: now)
    first, second = (ready.run("submit-ddp", workload="smoke")["run"] for _ in range(2))
    assert second == f"{first}-2"


def test_a_name_is_not_looked_for_without_end(ready: Trainer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    now = control.now()
    monkeypatch.setattr(control, "now", lambda: now)
    stem = f"smoke-{now:%Y%m%d-%H%M%S}"
    runs = ready.workspace / "runs"
    for name in (stem, *(f"{stem}-{number}" for number in range(2, 100))):
        (runs / name).mkdir()
    line = f"{runs} holds 99 runs of this second; try again"
    assert ready.fails("submit-ddp", workload="smoke") == line
    assert not cluster.changes
    (runs / f"{stem}-99").rmdir()
    assert ready.run("submit-ddp", workload="smoke")["run"] == f"{stem}-99"


def test_mock_gpus_are_reserved_and_the_job_trains_on_cpus(ready: Trainer, cluster: Cluster):
    for machine in cluster.machines:
        machine.gres = "gpu:mock_gpu:1(S:0)"
    ready.run("submit-ddp", workload="smoke", wait=False)
    assert "#SBATCH --gpus-per-node=1\n" in cluster.job(40).text
    assert (
        "the environment holds torch for CPUs, so this job trains on them; see install-environment torch=cuda"
        in ready.log
    )


def test_a_script_of_the_users(ready: Trainer, cluster: Cluster):
    script = ready.workspace / "my train.py".replace(" ", "_")
    script.write_text("print('x')\n")
    results = ready.run("submit-ddp", workload=str(script), args="--lr 3e-4 a=b", env="FOO=bar", nodes=1)
    assert results["run"].startswith("my_train-")
    job = cluster.job(40).training()
    assert cluster.job(40).commands() == [f"{results['run-dir']}/code/my_train.py --lr 3e-4 a=b"]
    assert (pathlib.Path(results["run-dir"]) / "code" / "my_train.py").read_text() == "print('x')\n"
    script.write_text("print('y')\n")
    again = ready.run("submit-ddp", workload=str(script), snapshot=False, nodes=1)
    assert cluster.job(41).commands() == [str(script)]
    assert not (pathlib.Path(again["run-dir"]) / "code").exists()
    assert ("FOO", "bar") in job.variables
    assert not job.leaves_outcome, "such a script need not leave an outcome"


def test_a_script_in_a_container_finds_the_payload(ready: Trainer, cluster: Cluster):
    """It imports ddptrain.resume."""
    script = ready.workspace / "train.py"
    script.write_text("print('x')\n")
    ready.run("submit-ddp", workload=str(script), container_image="hf/pytorch:1", nodes=1)
    (payload,) = (ready.workspace / "environments").glob("payload-*")
    container = cluster.job(40).training().container
    assert container is not None
    assert (container.image, container.payload) == ("hf/pytorch:1", str(payload))


def test_a_dry_run_shows_everything_and_changes_nothing(trainer: Trainer, cluster: Cluster):
    trainer.event("install")
    before = trainer.files()
    results = trainer.run("submit-ddp", dry_run=True, wait=True, run="x")
    assert trainer.files() == before
    assert not cluster.changes
    assert results["script"].startswith("#!/bin/bash\n")
    assert results["verdict"] == (
        "Job 3 to start at 2026-11-20T18:48:42 using 2 processors on nodes slurmd-[0-1] in partition slurmd"
    )
    assert results["environment"] == "not installed yet: submit-ddp installs it"
    assert results["dataset"] == f"{trainer.workspace}/datasets/python-stdlib (to be prepared)"
    assert results["resources"] == "2 nodes of slurmd, each 2 cores, 8000 MiB"


def test_a_dry_run_names_the_environment_that_is_there(ready: Trainer):
    results = ready.run("submit-ddp", dry_run=True)
    assert results["environment"].endswith(".tar.zst")
    assert json.loads(results["job"])["environment"]["archive"] == results["environment"]


def test_a_run_is_continued_by_its_name(ready: Trainer, cluster: Cluster):
    cluster.submitted = lambda job: write_result(job, "preempted")
    cluster.states = [("CANCELLED", 15)]
    assert ready.fails("submit-ddp", run="long", wait=True).startswith(
        "job 40 CANCELLED, exit code 143; it saved at step 16; to resume, submit it with the same options"
    )
    cluster.submitted, cluster.states = lambda job: write_result(job, last_loss=0.25), [("COMPLETED", 0)]
    assert ready.run("submit-ddp", run="long", wait=True)["loss"] == "0.25"
    assert [job.name for job in cluster.jobs] == ["long", "long"]


def test_an_earlier_jobs_summary_is_not_taken_for_this_ones(ready: Trainer, cluster: Cluster):
    cluster.submitted = write_result
    cluster.states = [("COMPLETED", 0)]
    ready.run("submit-ddp", run="twice", wait=True)
    cluster.submitted = lambda _: None
    assert "loss" not in ready.run("submit-ddp", run="twice", wait=True)


def test_another_runs_checkpoint_can_be_the_beginning(ready: Trainer, cluster: Cluster):
    ready.run("submit-ddp", run="base")
    cluster.jobs[0].states = [("COMPLETED", 0)]
    line = "resume: base has no checkpoint to begin from; see: juju run trainer/0 show-run run=base"
    assert ready.fails("submit-ddp", run="tuned", resume="base") == line
    ready.run("submit-ddp", run="later", resume="base", dependency="afterok:40", dry_run=True)
    (cluster.jobs[0].script.parent / "epoch-0001").mkdir()
    (cluster.jobs[0].script.parent / "latest").symlink_to("epoch-0001")
    ready.run("submit-ddp", run="tuned", resume="base")
    assert cluster.job(41).training().resume == f"{ready.workspace}/runs/base"


def test_slurm_being_away_for_a_while_is_survived(ready: Trainer, cluster: Cluster):
    def restart(job: Job) -> None:
        write_result(job)
        cluster.silent = 3

    cluster.submitted = restart
    assert ready.run("submit-ddp", workload="smoke", wait=True)["state"] == "COMPLETED"
    line = "job 40: Unable to contact slurm controller (connect failure); asking again"
    assert line in ready.log


def test_slurm_staying_away_ends_the_wait(ready: Trainer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control, "_SILENCE_S", -1.0)

    def vanish(_: Job) -> None:
        cluster.silent = 1000

    cluster.submitted = vanish
    line = "job 40: Slurm does not answer: Unable to contact slurm controller (connect failure); the job may still run"
    assert ready.fails("submit-ddp", workload="smoke", wait=True, run="a").startswith(line)
    assert ready.results["job-id"] == "40"


@pytest.mark.parametrize(("outcome", "state"), [("done", "COMPLETED"), ("failed", "FAILED"), (None, "UNKNOWN")])
def test_a_job_that_slurm_forgot_is_judged_by_what_it_wrote(
    ready: Trainer, cluster: Cluster, outcome: str | None, state: str
):
    if outcome:
        cluster.submitted = lambda job: write_result(job, outcome)
    cluster.forgets = True
    if state == "COMPLETED":
        assert ready.run("submit-ddp", workload="smoke", wait=True)["state"] == state
    else:
        assert ready.fails("submit-ddp", workload="smoke", wait=True).startswith(f"job 40 {state}, exit code 1")
        assert ready.results["state"] == state


def test_a_job_that_the_controller_forgot_is_looked_up_in_the_accounting(ready: Trainer, cluster: Cluster):
    cluster.forgets = True
    cluster.accounting = (
        f"40|{USER}|CANCELLED by 1000|0:15|2|slurmd|00:01:00|UNLIMITED|2026-11-20T18:48:22|slurmd-[0-1]|x\n"
    )
    assert ready.fails("submit-ddp", workload="smoke", wait=True) == "job 40 CANCELLED, exit code 143"


def test_an_exit_code_that_sacct_prints_without_128_is_the_one_that_the_job_wrote(ready: Trainer, cluster: Cluster):
    def leave(job: Job) -> None:
        (job.script.parent / "control" / "40.r0.outcome").write_text('{"outcome": "failed", "exit_code": 137}')

    cluster.forgets, cluster.submitted = True, leave
    cluster.accounting = f"40|{USER}|FAILED|9:0|2|slurmd|00:01:00|UNLIMITED|2026-11-20T18:48:22|slurmd-[0-1]|x\n"
    assert ready.fails("submit-ddp", workload="smoke", wait=True).startswith("job 40 FAILED, exit code 137")


def test_a_failed_job_shows_the_first_failing_ranks_last_lines(ready: Trainer, cluster: Cluster):
    def crash(job: Job) -> None:
        log = job.script.parent / "logs" / "40.r0" / "node-1" / "40.r0_x" / "attempt_0" / "0" / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(
            "noise\n" * 100 + "Traceback (most recent call last):\n  File x\n    y\nRuntimeError: \x1b[31mboom\n"
        )
        notes = job.script.parent / "control"
        (notes / "40.hosts").write_text("slurmd-7 slurmd-1\n")
        (notes / "40.failures").write_text("2026-11-20T22:13:39Z\t40.r0\tprogram\tslurmd-1\tRuntimeError: boom\nhalf")

    cluster.submitted, cluster.states = crash, [("RUNNING", 0), ("FAILED", 1 << 8)]
    line = ready.fails("submit-ddp", workload="smoke", wait=True)
    assert line == "job 40 FAILED, exit code 1; rank 1 on slurmd-1: RuntimeError: ?[31mboom"
    assert ready.results["failed-rank"] == "1"
    assert ready.results["failure"].splitlines() == [
        "noise", "Traceback (most recent call last):", "  File x", "    y", "RuntimeError: ?[31mboom",
    ]  # fmt: skip
    assert (ready.results["state"], ready.results["exit-code"]) == ("FAILED", "1")
    assert ready.results["failures"] == "2026-11-20T22:13:39Z fault=program node=slurmd-1: RuntimeError: boom"


def test_ranks_that_never_came_are_named_in_the_answer(ready: Trainer, cluster: Cluster):
    def wait_in_vain(job: Job) -> None:
        folder = job.script.parent
        (folder / "control" / "40.hosts").write_text("slurmd-0 slurmd-1\n")
        log = folder / "logs" / "40.r0" / "node-0" / "40.r0_x" / "attempt_0" / "0" / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text("ERROR:ddptrain:[FATAL] 1 of 2 ranks never joined within 120 s: 1; look at their logs\n")

    cluster.submitted, cluster.states = wait_in_vain, [("RUNNING", 0), ("FAILED", 2 << 8)]
    line = ready.fails("submit-ddp", workload="smoke", wait=True)
    assert line.startswith("job 40 FAILED, exit code 2; rank 1 on slurmd-1 never joined the rendezvous; ")
    assert (ready.results["absent-ranks"], ready.results["absent-nodes"]) == ("1", "slurmd-1")
    assert ready.results["failure"].endswith("look at their logs")
    assert ready.run("show-run")["reason"] == line


def test_the_wait_ends_at_its_limit_and_the_job_goes_on(
    ready: Trainer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    cluster.states = [("RUNNING", 0)]
    clock = iter(range(0, 10000, 5))
    monkeypatch.setattr(control.time, "monotonic", lambda: next(clock))
    assert ready.fails("submit-ddp", workload="smoke", wait=True, wait_timeout=60).startswith(
        "no end after 60 s: job 40 RUNNING; the job continues"
    )
    assert ready.results["state"] == "RUNNING"
    assert not cluster.job(40).cancelled


def refusals(trainer: Trainer) -> list[tuple[dict[str, typing.Any], str]]:
    """Return parameters that contradict what is there, and the line for each."""
    place = trainer.workspace
    (place / "fine.py").write_text("")
    (place / "out.py").symlink_to("/etc/hostname")
    (place / "folder").mkdir()
    (place / "runs" / "old").mkdir(parents=True)
    return [
        ({"nodes": 0}, "nodes: 0 is not allowed; a whole number from 1 to 4096"),
        ({"nodes": 3}, "nodes: 3 asked for, partition slurmd has 2 usable"),
        ({"gpus-per-node": 1}, "gpus-per-node: 1 asked for, a node of partition slurmd has at most 0"),
        ({"cpus-per-task": 3}, "cpus-per-task: 3 asked for, a node of partition slurmd has at most 2"),
        ({"memory": "9G"}, "memory: 9G asked for, a node of partition slurmd has at most 8000M"),
        ({"partition": "gpu"}, "partition: no partition 'gpu'; there are: slurmd"),
        ({"workload": f"{place}/no.py"}, f"workload: {place}/no.py is not there"),
        ({"workload": "/etc/passwd"}, f"workload: /etc/passwd is outside the workspace {place}"),
        ({"workload": f"{place}-other/x.py"}, f"workload: {place}-other/x.py is outside the workspace {place}"),
        (
            {"workload": f"{place}/out.py"},
            f"workload: {place}/out.py leads to /etc/hostname, outside the workspace {place}",
        ),
        ({"workload": f"{place}/folder"}, f"workload: {place}/folder is not a file"),
        (
            {"workload": "train.py"},
            "workload: 'train.py' is not allowed; gpt, smoke or an absolute path of letters, digits and . _ / + @ = -",
        ),
        (
            {"dataset": "nope"},
            f"dataset: no dataset 'nope' in {place}/datasets; there are: python-stdlib; "
            "make it with: juju run trainer/0 prepare-dataset name=nope source=...",
        ),
        ({"dataset": f"{place}/nope"}, f"dataset: {place}/nope is not there"),
        (
            {"dataset": f"{place}/folder"},
            f"dataset: {place}/folder holds no dataset.json; make a dataset with prepare-dataset",
        ),
        ({"dataset": "/etc"}, f"dataset: /etc is outside the workspace {place}"),
        ({"dataset": "python-stdlib", "workload": "smoke"}, "dataset: only the workload gpt has it"),
        ({"resume": "never", "workload": "smoke"}, "resume: only the workload gpt has it"),
        ({"resume": "nope"}, f"resume: there is no run 'nope' in {place}/runs; auto, never or the name of a run"),
        ({"run": "old", "resume": "never"}, "run: old exists already; choose another name or resume=auto"),
        ({"run": "old", "workload": "smoke"}, "run: old exists already; choose another name"),
        ({"run": "old"}, f"run: {place}/runs/old holds no job.json, so it is no run; choose another name"),
        (
            {"resume": "old"},
            "resume: old is of the kind unknown; only a run of the workload gpt can be resumed from",
        ),
        ({"profile_ranks": "1"}, "profile-ranks: is for profile=nsys or profile=torch"),
        ({"profile_steps": "1-2"}, "profile-steps: is for profile=nsys or profile=torch"),
        (
            {"profile": "torch", "workload": "smoke"},
            "profile: torch records the workload gpt only; give profile=nsys",
        ),
        (
            {"profile": "nsys", "profile_steps": "1-2", "workload": "smoke"},
            "profile-steps: only the workload gpt has it; a script starts its own recording",
        ),
        ({"profile": "nsys", "profile_ranks": "0,2"}, "profile-ranks: there is no rank 2; the job has 2, from 0"),
        (
            {"profile": "nsys", "profile_steps": "2-1"},
            "profile-steps: '2-1' is not allowed; first and last step, at most 1000 of them",
        ),
        (
            {"args": "--x '$(id)'"},
            "args: \"--x '$(id)'\" is not allowed; only letters, digits, blanks and . _ + = / : , @ % ^ -",
        ),
    ]


def test_what_cannot_be_is_refused_by_name_and_leaves_no_trace(ready: Trainer, cluster: Cluster):
    table = refusals(ready)
    before = ready.files()
    for params, line in table:
        with pytest.raises(testing.ActionFailed) as caught:
            ready.run("submit-ddp", **params)
        assert caught.value.message == line
        assert not ready.results
    assert not cluster.changes
    assert ready.files() == before


def test_what_the_submit_user_cannot_read_is_reported(
    ready: Trainer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    path = f"{ready.workspace}/train.py"
    sealed = folders.Place("file", path, is_inside=True, is_readable=False)
    monkeypatch.setattr(folders, "locate", lambda *_: sealed)
    assert ready.fails("submit-ddp", workload=path) == (
        f"workload: {path} cannot be read by {USER}; as root: chown -R {USER}: {path}"
    )
    assert not cluster.changes


@pytest.mark.parametrize("action", list(META["actions"]))
def test_an_unknown_parameter_is_refused_by_the_charm_too(
    ready: Trainer, cluster: Cluster, action: str, monkeypatch: pytest.MonkeyPatch
):
    params = META["actions"][action]["params"]
    monkeypatch.setitem(params, "nodse", {"type": "integer"})  # as if Juju had let it through
    known = ", ".join(sorted(name for name in params if name != "nodse"))
    assert ready.fails(action, nodse=2) == f"nodse: no such parameter; there are: {known}"
    assert not cluster.changes


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        (
            "allocation failure: Invalid account or account/partition combination specified",
            "account: Slurm refuses the job: ",
        ),
        ("allocation failure: Invalid qos specification", "qos: Slurm refuses the job: "),
        ("allocation failure: Requested reservation is invalid", "reservation: Slurm refuses the job: "),
        ("allocation failure: Invalid feature specification", "constraint: Slurm refuses the job: "),
        (
            "allocation failure: Requested time limit is invalid (missing or exceeds some limit)",
            "time-limit: Slurm refuses the job: ",
        ),
        ("allocation failure: Requested node configuration is not available", "Slurm refuses the job: "),
    ],
)
def test_what_slurm_refuses_is_quoted(ready: Trainer, cluster: Cluster, stderr: str, line: str):
    cluster.refusal = f"sbatch: error: Batch job submission failed\n{stderr}"
    before = ready.files()
    words = f"Batch job submission failed; {stderr}"
    assert ready.fails("submit-ddp", workload="smoke") == f"{line}{words}"
    assert ready.files() == before


def test_a_job_that_slurm_refuses_at_last_leaves_no_run(ready: Trainer, cluster: Cluster):
    cluster.submit_refusal = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    assert (
        ready.fails("submit-ddp", workload="smoke", run="x")
        == "qos: Slurm refuses the job: QOSMaxSubmitJobPerUserLimit"
    )
    assert not (ready.workspace / "runs" / "x").exists()


def test_a_run_at_work_is_not_started_again(ready: Trainer, cluster: Cluster):
    cluster.states = [("RUNNING", 0)]
    ready.run("submit-ddp", run="x")
    assert "x is active as job 40 (RUNNING); wait for its end, or cancel it" in ready.fails("submit-ddp", run="x")
    assert len(cluster.jobs) == 1


def test_no_usable_node(ready: Trainer, cluster: Cluster):
    for machine in cluster.machines:
        machine.state = "DOWN*+DRAIN"
    line = ready.fails("submit-ddp")
    assert line.startswith("partition: slurmd has no usable node (slurmd-0 is down+drain+not_responding, ")
    assert line.endswith("; see: sinfo -R")


@pytest.mark.parametrize(("action", "name"), TEXTS)
def test_nothing_hostile_is_submitted_written_or_run(ready: Trainer, cluster: Cluster, action: str, name: str):
    before, calls = ready.files(), len(cluster.calls)
    chosen = (NASTY if name == "args" else NASTY + ROAMING)[:: len(NASTY) // 5]
    for nasty in chosen:  # the whole table is held against the parser in test_params
        line = ready.fails(action, **{name: nasty})
        assert line.startswith(f"{name}: ")
        assert len(line) < 400
    assert ready.files() == before
    assert all(call[:2] == ("scontrol", "ping") for call in cluster.calls[calls:])


BESIDE = {"submit-sweep": {"grid": "lr=1"}}  # what an action cannot be without


def test_no_path_leads_out_of_the_workspace(ready: Trainer, cluster: Cluster):
    """Every text parameter of every action, in as far as it takes paths: a link, a link in the middle, a place beside."""
    secret = ready.workspace.parent / "secret"
    (secret / "inner").mkdir(parents=True)
    for name in ("dataset.json", "inner/dataset.json", "x.py"):
        (secret / name).write_text("{}")
    (ready.workspace / "file.py").symlink_to(secret / "x.py")
    (ready.workspace / "folder").symlink_to(secret)
    beside = ready.workspace.with_name(f"{ready.workspace.name}-beside")
    beside.symlink_to(secret)
    taken: set[tuple[str, str]] = set()
    before = ready.files()
    for action, name in TEXTS:
        for path in ("file.py", "folder", "folder/x.py", "folder/inner", f"../{beside.name}/x.py", "runs/../folder"):
            given: dict[str, typing.Any] = {**BESIDE.get(action, {}), name: f"{ready.workspace}/{path}"}
            if name == "file":
                given.pop("grid")
            try:
                fields.parse(verbs.ACTIONS[action].params, given)
            except base.ParameterError:
                continue
            if name == "args":  # words for the job, which has its user's rights
                continue
            taken.add((action, name))
            line = ready.fails(action, **given)
            assert line.startswith(f"{name}: "), (action, path, line)
            assert "outside the workspace" in line or "not there" in line, (action, path, line)
    assert ready.files() == before
    assert not cluster.changes
    assert {("submit-ddp", "workload"), ("submit-sweep", "file"), ("prepare-dataset", "source")} <= taken


def test_a_failure_nobody_foresaw_is_not_hidden(ready: Trainer, monkeypatch: pytest.MonkeyPatch):
    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(jobs, "_capacity", broken)  # met by the thread that lists the nodes
    with pytest.raises(testing.errors.UncaughtCharmError):
        ready.run("submit-ddp")


# -- prepare-dataset ---------------------------------------------------------------------------------------------------


def test_a_dataset_is_prepared_by_a_job(ready: Trainer, cluster: Cluster):
    source = ready.workspace / "books"
    source.mkdir()
    results = ready.run("prepare-dataset", source=str(source), tokenizer="byte", wait=False)
    output = ready.workspace / "datasets" / "books"
    assert (results["run"], results["dataset"]) == ("prepare-books", str(output))
    text = cluster.job(40).text
    prepares = f"ddptrain prepare --source {source} --output {output} --tokenizer byte"
    assert prepares in cluster.job(40).commands()
    assert "#SBATCH --cpus-per-task=1\n" in text
    assert not output.exists(), "the job makes it"


def test_preparing_again_goes_on_in_the_same_place(ready: Trainer, cluster: Cluster):
    cluster.states = [("COMPLETED", 0)]
    assert ready.run("prepare-dataset")["state"] == "COMPLETED"
    assert ready.run("prepare-dataset")["run"] == "prepare-python-stdlib"
    assert len(cluster.jobs) == 2


def test_a_dataset_that_could_not_be_prepared_stops_the_training(ready: Trainer, cluster: Cluster):
    (ready.workspace / "datasets" / "python-stdlib" / "dataset.json").unlink()
    cluster.states = [("FAILED", 2 << 8)]
    assert ready.fails("submit-ddp", wait=True).startswith("job 40 FAILED, exit code 2")
    assert [job.name for job in cluster.jobs] == ["prepare-python-stdlib"]


def test_a_source_that_cannot_be_is_refused(ready: Trainer, cluster: Cluster):
    place = ready.workspace
    assert ready.fails("prepare-dataset", source="/etc") == f"source: /etc is outside the workspace {place}"
    assert ready.fails("prepare-dataset", source=f"{place}/no") == f"source: {place}/no is not there"
    cluster.states = [("RUNNING", 0)]
    ready.run("prepare-dataset", wait=False)
    run = "prepare-python-stdlib"
    assert f"run: {run} is active as job 40 (RUNNING)" in ready.fails("prepare-dataset")


# -- the other actions -------------------------------------------------------------------------------------------------


def test_install_environment_tells_what_it_made(trainer: Trainer):
    results = trainer.run("install-environment")
    assert set(results) == {"environment", "torch", "python", "size-mb", "unpacked-mb"}
    assert results["torch"] == "2.13.0+cpu"
    assert pathlib.Path(results["environment"]).is_file()


@pytest.mark.parametrize("action", ["submit-ddp", "prepare-dataset", "list-runs", "install-environment"])
def test_slurm_that_does_not_answer_is_reported(ready: Trainer, cluster: Cluster, action: str):
    cluster.hung = True
    line = "is slurmctld up (juju status)? else: juju integrate sackd slurmctld"
    assert ready.fails(action) == f"Slurm: scontrol: no answer within 10 s; {line}"
