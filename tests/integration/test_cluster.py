"""A user's view of the deployed bundle. Each test asserts an effect on machines, and undoes it."""

import json
import pathlib
import uuid

import pytest
from deployed import DIST, JOB_S, SETTLE_S, ActionError, Cluster

TRAINER, LOGIN, NODES = "trainer/0", "sackd/0", ("slurmd/0", "slurmd/1")
SHARED = "/mnt/shared"


def summary(cluster: Cluster, run_dir: str) -> dict[str, object]:
    return json.loads(cluster.exec(LOGIN, f"cat {run_dir}/summary.json"))


def test_slurm_has_two_idle_nodes(cluster: Cluster):
    lines = (cluster.exec(LOGIN, "sinfo --noheader --Node --format '%N %T'")).splitlines()
    assert dict(line.split() for line in lines) == {"slurmd-0": "idle", "slurmd-1": "idle"}


def test_a_second_deployment_changes_nothing(cluster: Cluster):
    before = set(cluster.units()), cluster.revisions()
    cluster.deploy()
    cluster.wait_until_active(timeout_s=900)
    assert (set(cluster.units()), cluster.revisions()) == before


def test_an_overlay_that_is_added_later_is_applied(cluster: Cluster, tmp_path: pathlib.Path):
    """To an application of a local charm with units, which Juju 4 would not find without arch=amd64."""
    overlay = tmp_path / "later.yaml"
    overlay.write_text(
        "applications:\n  juicefs-server-proxy:\n    options:\n      trash-days: 2\n"
    )
    before = set(cluster.units()), cluster.revisions()
    try:
        cluster.deploy(overlay)
        assert cluster.juju("config", "juicefs-server-proxy", "trash-days").strip() == "2"
        cluster.wait_until_active(timeout_s=900)
    finally:
        cluster.juju("config", "juicefs-server-proxy", "--reset", "trash-days")
    cluster.wait_until_active(timeout_s=900)
    assert (set(cluster.units()), cluster.revisions()) == before


def test_a_file_written_on_one_machine_is_read_on_the_others(cluster: Cluster):
    name, text = f"{SHARED}/integration-{uuid.uuid4().hex}", uuid.uuid4().hex
    cluster.exec(NODES[0], f"echo {text} > {name}")
    try:
        for unit in (LOGIN, *NODES):
            assert cluster.exec(unit, f"findmnt --noheadings --output TARGET {SHARED}") == SHARED
            assert cluster.exec(unit, f"cat {name}") == text
    finally:
        cluster.exec(NODES[1], f"rm {name}")


def test_a_job_runs_on_two_hosts(cluster: Cluster):
    result = cluster.run(
        TRAINER, "submit-ddp", workload="smoke", nodes=2, wait=True, wait_limit=JOB_S
    )
    assert result["state"] == "COMPLETED"
    found = summary(cluster, result["run-dir"])
    assert found["state"] == "done"
    assert isinstance(found["ranks"], list)
    assert len({rank["host"] for rank in found["ranks"]}) == 2
    assert "[DONE]" in cluster.exec(LOGIN, f"cat {result['log']}")


def test_training_lowers_the_loss_and_leaves_a_checkpoint(cluster: Cluster):
    cluster.run(TRAINER, "prepare-dataset", wait_limit=JOB_S)
    result = cluster.run(TRAINER, "submit-ddp", nodes=2, wait=True, wait_limit=JOB_S)
    assert result["state"] == "COMPLETED"
    found = summary(cluster, result["run-dir"])
    assert isinstance(found["first_loss"], float) and isinstance(found["last_loss"], float)
    assert found["last_loss"] < found["first_loss"]
    for unit in (LOGIN, *NODES):
        assert cluster.exec(unit, f"ls {found['checkpoint']}")


def test_a_job_is_listed_read_and_cancelled(cluster: Cluster):
    script = f"{SHARED}/integration-sleep.py"
    cluster.exec(
        LOGIN, f"printf 'import time\\ntime.sleep(600)\\n' > {script} && chown ubuntu: {script}"
    )
    try:
        result = cluster.run(TRAINER, "submit-ddp", workload=script, nodes=2)
        job, name = result["job-id"], result["run"]
        assert name in json.dumps(cluster.run(TRAINER, "list-runs"))

        def is_running() -> bool:
            return cluster.exec(LOGIN, f"squeue --noheader --job {job} --format %T") == "RUNNING"

        cluster.wait_until(is_running, f"job {job} runs", timeout_s=JOB_S)
        cluster.run(TRAINER, "run-log", run=name)
        cluster.run(TRAINER, "cancel-run", run=name)

        def has_ended() -> bool:
            return (
                cluster.exec(
                    LOGIN, f"squeue --noheader --job {job} --format %T 2>/dev/null || true"
                )
                == ""
            )

        cluster.wait_until(has_ended, f"job {job} has ended", timeout_s=300)
        states = cluster.exec(
            LOGIN, f"sacct --noheader --allocations --parsable2 --job {job} --format State"
        )
        assert states.startswith("CANCELLED")
    finally:
        cluster.exec(LOGIN, f"rm --force {script}")


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"nodes": 0}, "nodes"),
        ({"nodes": 99}, "nodes"),
        ({"workload": "/etc/passwd"}, "workload"),
        ({"workload": "$(touch /tmp/x)"}, "workload"),
        ({"no-such-parameter": 1}, "no-such-parameter"),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_name_and_submits_nothing(
    cluster: Cluster, params: dict[str, object], named: str
):
    newest = "sacct --noheader --allocations --allusers --starttime now-1day --format JobID | wc -l"
    before = cluster.exec(LOGIN, newest)
    with pytest.raises(ActionError, match=named):
        cluster.run(TRAINER, "submit-ddp", **params)
    assert cluster.exec(LOGIN, newest) == before


def test_a_rebooted_node_comes_back_with_its_mount(cluster: Cluster):
    boot = cluster.exec(NODES[0], "cat /proc/sys/kernel/random/boot_id")
    cluster.exec(NODES[0], "systemd-run --on-active=2 systemctl reboot")

    def is_back() -> bool:
        try:
            return cluster.exec(NODES[0], "cat /proc/sys/kernel/random/boot_id") != boot
        except AssertionError:
            return False

    cluster.wait_until(is_back, f"{NODES[0]} answers after its reboot", timeout_s=900)
    cluster.wait_until_active(timeout_s=900)
    assert cluster.exec(NODES[0], f"findmnt --noheadings --output TARGET {SHARED}") == SHARED
    result = cluster.run(
        TRAINER, "submit-ddp", workload="smoke", nodes=2, wait=True, wait_limit=JOB_S
    )
    assert result["state"] == "COMPLETED"


def test_a_node_that_joins_takes_part(cluster: Cluster):
    before = set(cluster.units())
    cluster.juju("add-unit", "slurmd")
    new: str | None = None
    try:
        cluster.wait_until_active(timeout_s=SETTLE_S)
        (new,) = [unit for unit in set(cluster.units()) - before if unit.startswith("slurmd/")]
        assert cluster.exec(new, f"findmnt --noheadings --output TARGET {SHARED}") == SHARED
        result = cluster.run(
            TRAINER, "submit-ddp", workload="smoke", nodes=3, wait=True, wait_limit=JOB_S
        )
        found = summary(cluster, result["run-dir"])
        assert isinstance(found["ranks"], list)
        assert len({rank["host"] for rank in found["ranks"]}) == 3
    finally:
        for unit in (
            [new]
            if new
            else [unit for unit in set(cluster.units()) - before if unit.startswith("slurmd/")]
        ):
            cluster.juju("remove-unit", "--no-prompt", unit)

    def is_two() -> bool:
        return len({unit for unit in cluster.units() if unit.startswith("slurmd/")}) == 2

    cluster.wait_until(is_two, "the third node has ended", timeout_s=900)
    cluster.wait_until_active(timeout_s=900)


@pytest.mark.parametrize(
    "application", ["shared-filesystem-client", "slurm-gpu", "juicefs-server-proxy", "trainer"]
)
def test_an_upgrade_keeps_the_cluster_working(cluster: Cluster, application: str):
    charm = "ddp-trainer" if application == "trainer" else application
    cluster.juju("refresh", application, "--path", str(DIST / f"{charm}.charm"))
    cluster.wait_until_active(timeout_s=900)
    assert cluster.exec(NODES[0], f"findmnt --noheadings --output TARGET {SHARED}") == SHARED
