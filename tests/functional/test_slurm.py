"""The Slurm under the charms is as hard as production's: accounting and cgroups."""

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
