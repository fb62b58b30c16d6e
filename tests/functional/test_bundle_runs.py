"""A user's view of the bundle, also after a reboot: mounts, GPUs, a job over two nodes, results.

The tests follow a user's day and share one cluster; each also runs alone.
"""

import json
import pathlib
import typing
import uuid

import pytest

from functional.conftest import DEPLOY, IS_2604, Cluster, eventually, footprint

pytestmark = pytest.mark.timeout(
    1500
)  # the first test of a run deploys; each command has its own limit

HOSTS = ("sackd/0", "slurmd/0", "slurmd/1")
NODES = ("slurmd-0", "slurmd-1")
SHARED = "/mnt/shared"


def test_everything_settles_active(cluster: Cluster):
    check_settled(cluster, 15)


def check_settled(cluster: Cluster, count: int) -> None:
    def check() -> None:
        units = cluster.units()
        assert len(units) == count
        statuses = {name: unit["workload-status"] for name, unit in units.items()}
        waiting = {
            name: status for name, status in statuses.items() if status["current"] != "active"
        }
        if waiting:  # let five minutes pass for them
            cluster.ok("update-status", "--once", *waiting)
        assert waiting == {}

    eventually(check)


def test_a_second_deploy_changes_nothing(cluster: Cluster):
    before = cluster.units()
    answer = cluster.ctl(*DEPLOY)
    assert answer.code == 0, answer.err
    assert cluster.units() == before


def check_mounts(cluster: Cluster, fstype: str = "fuse.juicefs") -> None:
    for unit in HOSTS:
        rows = cluster.on(unit, "findmnt", "-rno", "FSTYPE,OPTIONS", SHARED).splitlines()
        assert len(rows) == 1, rows
        kind, options = rows[0].split(" ", 1)
        assert kind == fstype
        assert {"nosuid", "nodev", "rw"} <= set(options.split(","))
    for writer, reader in (
        ("sackd/0", "slurmd/1"),
        ("slurmd/1", "slurmd/0"),
        ("slurmd/0", "sackd/0"),
    ):
        name, text = f"{SHARED}/.probe-{uuid.uuid4()}", str(uuid.uuid4())
        cluster.on(writer, "sh", "-c", f"echo {text} > {name} && sync {name}")
        assert cluster.on(reader, "cat", name) == text
        cluster.on(reader, "rm", name)


def check_node(cluster: Cluster, node: str) -> None:
    shown = cluster.on("sackd/0", "scontrol", "show", "node", node, "-o")
    assert " Gres=gpu:mock_gpu:1" in shown
    state = next(word for word in shown.split() if word.startswith("State="))
    assert state.startswith(("State=IDLE", "State=MIXED", "State=ALLOCATED")), shown
    assert (
        not {"DRAIN", "INVALID_REG", "NOT_RESPONDING"} & set(state.split("+")) and "*" not in state
    ), shown


def check_gpus(cluster: Cluster) -> None:
    for node in NODES:
        eventually(lambda node=node: check_node(cluster, node))
    script = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_STEP_GPUS"
    rows = cluster.on("sackd/0", "srun", "-N2", "--gres=gpu:1", "sh", "-c", script).splitlines()
    assert sorted(rows) == ["slurmd-0 0 0", "slurmd-1 0 0"]


def check_smoke(cluster: Cluster) -> dict[str, typing.Any]:
    result = cluster.action("submit-ddp", "workload=smoke", "nodes=2", "wait=true")
    assert result["state"] == "COMPLETED", result
    log = cluster.on("sackd/0", "cat", result["log"])
    assert "[DONE]" in log
    summary = json.loads(cluster.on("sackd/0", "cat", f"{result['run-dir']}/summary.json"))
    assert summary["state"] == "done"
    assert {rank["host"] for rank in summary["ranks"]} == set(NODES)
    assert summary["last_loss"] < summary["first_loss"]
    return result


def test_three_hosts_share_one_filesystem(cluster: Cluster):
    check_mounts(cluster)


def test_gpus_are_registered_and_handed_out(cluster: Cluster):
    check_gpus(cluster)


@pytest.mark.trains
@pytest.mark.long
def test_gpt_learns_real_text_and_its_checkpoint_loads(cluster: Cluster):
    result = cluster.action("submit-ddp", "nodes=2", "args=--steps 60", "wait=true", timeout=1200)
    assert result["state"] == "COMPLETED", result
    summary = json.loads(cluster.on("sackd/0", "cat", f"{result['run-dir']}/summary.json"))
    assert {rank["host"] for rank in summary["ranks"]} == set(NODES)
    assert summary["first_loss"] > 4.5, "bytes: ln(257) is 5.5"
    assert summary["last_loss"] < summary["first_loss"] - 1.0
    assert summary["tokens_per_second"] > 0
    metrics = cluster.on("sackd/0", "cat", f"{result['run-dir']}/metrics.jsonl").splitlines()
    assert [json.loads(line) for line in metrics]
    assert (
        cluster.on("sackd/0", "sh", "-c", f"head -c 8 {summary['loss_png']} | od -An -tx1")
        == "89 50 4e 47 0d 0a 1a 0a"
    )
    files = cluster.on("slurmd/1", "find", summary["checkpoint"], "-type", "f").splitlines()
    assert any(name.endswith("manifest.json") for name in files)
    again = cluster.on("slurmd/0", "sh", "-c", f"cat {summary['checkpoint']}/manifest.json")
    assert json.loads(again)


HOSTILE = "$(touch /tmp/owned)`touch /tmp/owned`\"';\ntouch /tmp/owned"


REFUSED = [
    (["submit-ddp", "node=2"], "node"),
    (["submit-ddp", "nodes=0"], "nodes"),
    (["submit-ddp", "nodes=99"], "nodes"),
    (["submit-ddp", "nodes=many"], "nodes"),
    (["submit-ddp", "dataset=not-there"], "dataset"),
    (["submit-ddp", f"workload={SHARED}/not-there.py"], "workload"),
    (["submit-ddp", "workload=/etc/passwd"], "workload"),
    (["submit-ddp", f"workload={SHARED}/../../etc/passwd"], "workload"),
    (["submit-ddp", "run=../../escape"], "run"),
    (["cancel-run", "run=nothing"], "run"),
    *(
        (["submit-ddp", f"{name}={HOSTILE}"], name)
        for name in ("workload", "dataset", "partition", "time-limit")
    ),
]
HOSTILES = [
    (["submit-ddp", f"run={HOSTILE}"], "run"),
    (["run-log", f"run={HOSTILE}"], "run"),
    (["prepare-dataset", f"name={HOSTILE}"], "name"),
]


@pytest.mark.parametrize("some", [HOSTILES, pytest.param(REFUSED, marks=pytest.mark.long)])
def test_bad_input_is_refused_by_name_and_leaves_nothing(
    cluster: Cluster, some: list[tuple[list[str], str]]
):
    def jobs() -> set[str]:
        return set(cluster.on("sackd/0", "squeue", "-h", "-t", "all", "-o", "%i").splitlines())

    def files() -> list[str]:
        # The mount's keeper writes and removes a file now and then.
        hidden = "\\( -name .mount-probe -o -name .trash \\) -prune -o -not -name .stats"
        found = f"find {SHARED} {hidden} -print | sort; ls /tmp/owned || true"
        return cluster.on("sackd/0", "sh", "-c", found).splitlines()

    before = jobs(), files()
    assert "/tmp/owned" not in before[1]
    for arguments, parameter in some:
        answer = cluster.ctl("run", "trainer/0", *arguments)
        assert answer.code == 1, arguments
        assert parameter in answer.error
        assert len(answer.error) < 600
    assert jobs() <= before[0]  # Slurm forgets old jobs by itself
    assert files() == before[1]


@pytest.mark.trains
@pytest.mark.long
def test_after_a_reboot_of_a_node_all_of_it_works_again(cluster: Cluster):
    marker = str(uuid.uuid4())
    cluster.on("sackd/0", "sh", "-c", f"echo {marker} > {SHARED}/.survives && sync")
    boot = cluster.on("slurmd/0", "cat", "/proc/sys/kernel/random/boot_id")
    cluster.ok("reboot", "slurmd/0")
    assert cluster.on("slurmd/0", "cat", "/proc/sys/kernel/random/boot_id") != boot, (
        "the host did not reboot"
    )
    test_everything_settles_active(cluster)
    assert cluster.on("slurmd/0", "cat", f"{SHARED}/.survives") == marker
    check_mounts(cluster)
    check_gpus(cluster)
    check_smoke(cluster)


def test_after_a_reboot_of_the_storage_nothing_is_lost(cluster: Cluster):
    marker = str(uuid.uuid4())
    cluster.on(
        "sackd/0", "sh", "-c", f"echo {marker} > {SHARED}/.survives && sync {SHARED}/.survives"
    )
    cluster.ok("reboot", "juicefs-server-proxy/0")
    test_everything_settles_active(cluster)
    for unit in HOSTS:

        def check(unit: str = unit) -> None:
            assert cluster.on(unit, "cat", f"{SHARED}/.survives") == marker

        eventually(check)


@pytest.mark.long
def test_a_unit_comes_and_goes(cluster: Cluster):
    def has_come() -> None:
        assert cluster.on("slurmd/2", "findmnt", "-rno", "FSTYPE", SHARED) == "fuse.juicefs"
        check_node(cluster, "slurmd-2")

    def nodes() -> list[str]:
        return sorted(cluster.on("sackd/0", "sinfo", "-hN", "-o", "%N").split())

    def gres_conf() -> str:
        return cluster.on("slurmctld/0", "cat", "/etc/slurm/gres.conf")

    cluster.ok("add-unit", "slurmd")
    eventually(has_come)
    assert "slurmd-2" in gres_conf()
    cluster.ok("remove-unit", "slurmd/2")
    if not IS_2604:  # there upstream leaves the node to the operator
        assert nodes() == [*NODES, "slurmd-2"]
        cluster.on("slurmctld/0", "scontrol", "delete", "nodename=slurmd-2")
    assert nodes() == list(NODES)
    for _ in range(
        4
    ):  # the controller's relation-departed comes at once or, as on Juju 4.0.15, late
        if "slurmd-2" in gres_conf():
            cluster.ok("update-status", "--once", "slurm-gpu-controller/0")
    assert "slurmd-2" not in gres_conf()
    test_everything_settles_active(cluster)


@pytest.mark.long
def test_a_slurm_without_its_security_fixes_is_named(cluster: Cluster):
    (version,) = set(cluster.on("sackd/0", "sinfo", "-hN", "-o", "%v").split())
    report = cluster.ctl("run", "trainer/0", "doctor")
    assert report.code == 0, report.err
    line = f"Slurm {version} lacks security fixes, those of 2026-09-02 (CVE-2026-65107, -65108, "
    assert line in report.out


def test_destroy_leaves_nothing_behind(cluster: Cluster):
    network = json.loads(
        pathlib.Path(f"/var/lib/slurm-ddp/{cluster.model}/network.json").read_text()
    )
    where = network["bridge"], network["cidr"].rpartition(".")[0] + "."
    running = footprint(*where)
    assert all(running.values()), f"the test looks in the wrong places: {running}"
    cluster.ok("destroy", "--no-prompt")
    assert footprint(*where) == {kind: set[str]() for kind in running}
