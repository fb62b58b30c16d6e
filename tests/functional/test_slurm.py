"""The Slurm under the charms is as hard as production's: accounting, cgroups, REST, and drains that get lost."""

import json
import typing

import pytest

from functional.conftest import Cluster, eventually

pytestmark = pytest.mark.timeout(1500)  # the first test of a run deploys; each command has a limit of its own

OOM = "x = bytearray(600 << 20)"  # six times what the job asks for


def as_user(cluster: Cluster, *command: str) -> tuple[int, str, str]:
    """Run a command as the login host's ubuntu, in a folder that every node has; return status, output and errors."""
    words = ("env", "--chdir=/tmp", "sudo", "-u", "ubuntu", "--", *command)
    answer = cluster.exec("sackd/0", *words)
    return answer.code, answer.out.strip(), answer.err


def accounted(cluster: Cluster, name: str) -> dict[str, str]:
    """Return sacct's record of the last job of that name, which follows its end by some seconds."""
    fields = ["JobID", "State", "ExitCode", "AllocTRES", "Account", "User"]
    rows = cluster.on(
        "sackd/0", "sacct", "-X", "-n", "-P", f"--name={name}", f"--format={','.join(fields)}"
    ).splitlines()
    assert rows, name
    row = dict(zip(fields, rows[-1].split("|"), strict=True))
    assert row["State"] not in ("PENDING", "RUNNING")
    return row


def test_a_job_is_accounted_with_what_it_had(cluster: Cluster):
    code, out, err = as_user(cluster, "srun", "-N2", "--job-name=both", "printenv", "SLURMD_NODENAME")
    assert (code, sorted(out.splitlines())) == (0, ["slurmd-0", "slurmd-1"]), err
    job = eventually(lambda: accounted(cluster, "both"))
    assert (job["State"], job["User"]) == ("COMPLETED", "ubuntu")
    assert {"node=2", "cpu=2"} <= set(job["AllocTRES"].split(","))


def test_accounts_associations_and_qos_are_kept(cluster: Cluster):
    things = (("account", "lab"), ("qos", "urgent"), ("user", "ubuntu", "account=lab"))
    try:
        for thing in things:
            cluster.on("slurmctld/0", "sacctmgr", "-i", "add", *thing)
        shown = cluster.on("sackd/0", "sacctmgr", "-n", "-P", "show", "assoc", "format=cluster,account,user")
        assert "ddp|lab|ubuntu" in shown.splitlines()
        assert "urgent" in cluster.on("sackd/0", "sacctmgr", "-n", "-P", "show", "qos", "format=name").splitlines()
        code, _, err = as_user(cluster, "srun", "--account=lab", "--job-name=lab", "true")
        assert code == 0, err
        assert eventually(lambda: accounted(cluster, "lab"))["Account"] == "lab"
    finally:
        for kind, name, *_ in reversed(things):
            cluster.exec("slurmctld/0", "sacctmgr", "-i", "delete", kind, name)


def test_a_job_over_its_memory_is_killed(cluster: Cluster):
    code, _, err = as_user(cluster, "srun", "--mem=100M", "--job-name=greedy", "python3", "-c", OOM)
    assert code != 0
    assert "Out Of Memory" in err
    assert eventually(lambda: accounted(cluster, "greedy"))["State"] == "OUT_OF_MEMORY"


@pytest.mark.parametrize(
    ("asked", "error"), [([], "Operation not permitted"), (["--gres=gpu:1"], "No such device or address")]
)
def test_a_card_that_was_not_asked_for_cannot_be_opened(cluster: Cluster, asked: list[str], error: str):
    """The mock's device node has no driver behind it: ENXIO is what an open that cgroups allow ends with."""
    code, _, err = as_user(cluster, "srun", *asked, "head", "-c1", "/dev/nvidia0")
    assert code != 0
    assert error in err


def test_rest_answers_with_a_token(cluster: Cluster):
    token = cluster.on("slurmctld/0", "scontrol", "token", "username=root", "lifespan=300").removeprefix("SLURM_JWT=")
    headers = ("-H", "X-SLURM-USER-NAME: root", "-H", f"X-SLURM-USER-TOKEN: {token}")

    def get(path: str) -> dict[str, typing.Any]:
        return json.loads(cluster.on("slurmrestd/0", "curl", "-sS", *headers, f"http://localhost:6820/{path}"))

    assert {node["name"] for node in get("slurm/v0.0.41/nodes")["nodes"]} == {"slurmd-0", "slurmd-1"}
    assert [found["name"] for found in get("slurmdb/v0.0.41/clusters")["clusters"]] == ["ddp"]
