"""Accounts, QOS, reservations, nodes by name, other jobs, and the forms of the time limit."""

import pytest
from cluster import Cluster
from harness import Trainer
from node_reports import answering, healthy
from resource_requests import node, partition, refusal, training


def reservation(name: str = "spring", *, nodes: str = "slurmd-0", flags: str = "SPEC_NODES") -> str:
    return f"ReservationName={name} StartTime=2026-11-23T08:00:00 Nodes={nodes} NodeCnt=1 Flags={flags} State=ACTIVE\n"


@pytest.mark.parametrize(
    "action", ["submit-ddp", "submit-sweep", "prepare-dataset", "benchmark-collectives", "doctor"]
)
def test_every_job_carries_the_account_on_which_slurm_decides_before_anything_is_written(
    ready: Trainer, cluster: Cluster, action: str
):
    before = ready.files()
    given = {"account": "chem", "qos": "gold", "sbatch": "--nice=5"} | (
        {"grid": "lr=1"} if "sweep" in action else {}
    )
    cluster.refusal = (
        "allocation failure: Invalid account or account/partition combination specified"
    )
    cluster.takes = "AllowAccounts=chem,root AllowQos=ALL"
    if action == "doctor":
        ready.run(action, **given)
    else:
        why = f"{cluster.refusal}; partition slurmd has AllowAccounts=chem,root"
        assert ready.fails(action, **given) == f"account: Slurm rejects the job: {why}"
        assert ready.files() == before
    assert not cluster.changes
    asked = [*cluster.judged, *(" ".join(call) for call in cluster.calls if call[0] == "srun")]
    assert asked
    assert all({"--account=chem", "--qos=gold", "--nice=5"} <= {*text.split()} for text in asked)


MAINTENANCE = "MAINT,SPEC_NODES"


@pytest.mark.parametrize(
    ("flags", "state", "nodes"),
    [
        ("SPEC_NODES", "IDLE", 1),
        (MAINTENANCE, "IDLE+MAINTENANCE", 1),
        ("FLEX,SPEC_NODES", "IDLE", 2),
        ("ANY_NODES", "IDLE", 2),
    ],
)
def test_a_job_gets_the_nodes_of_its_reservation(
    ready: Trainer, cluster: Cluster, flags: str, state: str, nodes: int
):
    cluster.reservations = reservation(flags=flags)
    cluster.machines[0].state = state
    assert (
        f"#SBATCH --nodes={nodes}\n"
        in ready.run("submit-ddp", dry_run=True, reservation="spring")["script"]
    )
    if nodes == 1:
        outside = "(slurmd-1 is outside the reservation)"
        line = f"nodes: 2 requested, partition slurmd has 1 usable {outside}"
        assert ready.fails("submit-ddp", reservation="spring", nodes=2) == line
        line = "nodelist: slurmd-1 is outside the reservation; see: scontrol show node slurmd-1"
        assert ready.fails("submit-ddp", reservation="spring", nodelist="slurmd-1") == line


@pytest.mark.parametrize("how", [{}, {"reservation": "spring"}, {"reservation": "other"}])
def test_a_node_in_maintenance_takes_its_own_reservations_jobs_only(
    ready: Trainer, cluster: Cluster, how: dict[str, str]
):
    cluster.reservations = reservation(flags=MAINTENANCE) + reservation(
        "other", nodes="slurmd-0,slurmd-1"
    )
    for machine in cluster.machines:
        machine.state = "MIXED+MAINTENANCE"
    answering(cluster, healthy("slurmd-0", ("slurmd-0",)))
    if how.get("reservation") == "spring":
        ready.run("submit-ddp", workload="smoke", dry_run=True, **how)
        results = ready.run("doctor", **how)
        assert results["nodes"].splitlines()[1].split()[0] == "slurmd-0"
        assert len(results["nodes"].splitlines()) == 2, "the other node is outside"
        line = "nodes: slurmd-1 is not a node of partition slurmd in reservation spring; there are: slurmd-0"
        assert ready.fails("doctor", nodes="slurmd-1", **how) == line
        cluster.machines[0].state = "IDLE+DRAIN+MAINTENANCE"
    line = "partition: slurmd has no usable node (slurmd-0 is "
    assert ready.fails("submit-ddp", workload="smoke", **how).startswith(line)
    assert "not examined: " in ready.fails("doctor", **how)


# -- nodes and other jobs -------------------------------------------------------------------------


def test_nodes_by_name_reach_the_script(ready: Trainer, cluster: Cluster):
    results = ready.run(
        "submit-ddp", dry_run=True, nodelist="slurmd-1", exclude="slurmd-0", exclusive=True
    )
    for line in (
        "#SBATCH --nodes=1",
        "#SBATCH --nodelist=slurmd-1",
        "#SBATCH --exclude=slurmd-0",
        "#SBATCH --exclusive",
    ):
        assert f"{line}\n" in results["script"]
    results = ready.run("submit-sweep", grid="lr=1", dry_run=True, exclude="slurmd-0")
    assert "#SBATCH --nodes=1\n#" in results["script"]


@pytest.mark.parametrize(
    "text",
    "afterok:40 afterany:41,afterok:42 afternotok:41?after:40+5 afterok:43_1 singleton "
    "aftercorr:40,singleton".split(),
)
def test_a_job_can_wait_for_others(ready: Trainer, cluster: Cluster, text: str):
    cluster.judged = []
    results = ready.run("submit-ddp", workload="smoke", dry_run=True, dependency=text)
    assert f"#SBATCH --dependency={text}\n" in results["script"]
    assert "#SBATCH --kill-on-invalid-dep=yes\n" in results["script"], "or it would wait for ever"
    (judged,) = cluster.judged
    assert "--dependency" not in judged, "Slurm tells no start of a job that waits for others"


# -- the time limit -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "limit", "lead_s"),
    [
        ("90", "01:30:00", 180),
        ("5:30", "00:05:30", 66),
        ("2-6:30", "2-06:30:00", 180),
        ("2-06:30:15", "2-06:30:15", 180),
        ("1:00", "00:01:00", 30),
        ("UNLIMITED", "UNLIMITED", 180),
        ("INFINITE", "UNLIMITED", 180),
    ],
)
def test_each_of_slurms_forms_of_a_time(asked: str, limit: str, lead_s: int):
    request = training(partition(node()), time_limit=asked)
    assert (request.time_limit, request.lead_s) == (limit, lead_s)


@pytest.mark.parametrize(
    "asked", ["2-1", "25:00:00", "1441", "1-00:00:01", "UNLIMITED", "INFINITE"]
)
def test_more_than_the_partition_allows_is_refused(asked: str):
    line = f"time-limit: {asked} exceeds partition main's limit; use at most 1-00:00:00"
    assert refusal(partition(node(), max_time_s=86400), time_limit=asked) == line
    assert (
        training(partition(node(), max_time_s=86400), time_limit="1-0").time_limit == "1-00:00:00"
    )


@pytest.mark.parametrize(
    "asked",
    ["0", "0:59", "00:00:59", "366-0", "1-2-3", "1:2:3:4", "-1", "unlimited", "1d", ":5", "5:"],
)
def test_invalid_times_are_refused(asked: str):
    assert refusal(partition(node()), time_limit=asked) == (
        f"time-limit: '{asked}' is not allowed; minutes, MM:SS, H:MM:SS, D-H, D-H:MM or D-HH:MM:SS, from 1 minute to 365 "
        "days, or UNLIMITED"
    )
