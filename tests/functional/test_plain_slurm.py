"""`pipx install` and `ddp` on a Slurm of two nodes without Juju: docs/howto/plain-slurm.md."""

import collections.abc
import json
import pathlib
import re
import shutil
import subprocess

import pytest

from functional import plain_slurm
from functional.conftest import REPOSITORY, Json
from functional.plain_slurm import HOME, PlainSlurm

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
]  # the first test installs ddp, and makes an environment

WORKSPACE = HOME / "training"
TRAIN = """
import os, socket, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.full((2, 4), float(rank))).pow(2).mean().backward()
print(f"rank={rank} host={socket.gethostname()} uid={os.getuid()} sum={total.item():g} argv={sys.argv[1:]}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def plain() -> collections.abc.Iterator[PlainSlurm]:
    """The cluster, with `ddp` installed from the repository's tracked files as its page says."""
    if missing := plain_slurm.lacks():
        pytest.fail(missing)
    assert not pathlib.Path("/etc/slurm-ddp.toml").exists(), (
        "this machine is one of a deployed bundle"
    )
    with plain_slurm.running() as cluster:
        _copy_repository(cluster.home / "checkout")
        shutil.copy2(REPOSITORY / "tests/requirements/pipx.txt", cluster.home / "pipx.txt")
        cluster.as_root("chown", "-R", f"{plain_slurm.USER}:", str(HOME))
        cluster.does(
            "/usr/bin/python3 -m venv .pipx && .pipx/bin/pip install --require-hashes -r pipx.txt"
        )
        cluster.does(".pipx/bin/pipx install ./checkout")
        cluster.writes(".config/slurm-ddp.toml", f'workspace = "{WORKSPACE}"\n')
        yield cluster


def _copy_repository(target: pathlib.Path) -> None:
    argv = ["git", "-C", str(REPOSITORY), "-c", f"safe.directory={REPOSITORY}", "ls-files", "-z"]
    listed = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    for name in listed.split("\0")[:-1]:
        if (REPOSITORY / name).is_file():  # not one that was just removed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)


def results(plain: PlainSlurm, command: str) -> Json:
    return json.loads(plain.does(command, timeout=1200))


@pytest.fixture(scope="module")
def smoke(plain: PlainSlurm) -> Json:
    """The first command that one types: it makes the environment, and trains on both nodes."""
    return results(plain, "ddp --json submit --wait smoke")


def test_the_smoke_test_trains_on_both_nodes(plain: PlainSlurm, smoke: Json):
    assert [str(smoke[name]) for name in ("state", "exit-code", "nodes", "ranks")] == [
        "COMPLETED",
        "0",
        "2",
        "2",
    ]
    assert smoke["run-dir"] == f"{WORKSPACE}/runs/{smoke['run']}"
    assert float(smoke["loss"]) < float(smoke["first-loss"])
    assert plain.does(f"find {WORKSPACE} -not -user {plain_slurm.USER}") == ""


def test_a_script_of_one_s_own_is_submitted_and_followed(plain: PlainSlurm, smoke: Json):
    plain.writes("code/train.py", TRAIN)
    plain.does("cd code && ddp submit -N 2 --run first train.py a 'b c'")
    output = plain.does("ddp log -f first")
    assert sorted(re.findall(r"rank=\d host.*", output)) == [
        f"rank={rank} host=n{rank + 1} uid={plain_slurm.UID} sum=3 argv=['a', 'b c']"
        for rank in (0, 1)
    ]
    done = results(plain, "ddp --json show first")
    assert done["state"] == "COMPLETED", (done, output)
    shown = plain.does("ddp show first")
    assert re.search(rf"^run-dir +{WORKSPACE}/runs/first$", shown, re.MULTILINE)
    assert "num_nodes=2" in shown.split(), shown
    listed = plain.does("ddp list")
    found = re.findall(r"^(\S+) +\S+ +(COMPLETED) +2 ", listed, re.MULTILINE)
    assert found == [("first", "COMPLETED"), (smoke["run"], "COMPLETED")], listed


def test_a_site_s_account_and_limits(plain: PlainSlurm, smoke: Json):
    """A hidden partition with a required account and one node a job; one with a foreign account."""
    for command in ("submit -p charged smoke", "bench -p charged", "prepare -p charged"):
        refused = plain.tries(f"ddp {command}")
        assert (refused.code, "Please specify an account" in refused.err) == (1, True), refused
    done = results(
        plain, "ddp --json submit --wait -p charged --account lab --sbatch=--nice=5 smoke"
    )
    assert (done["state"], str(done["nodes"])) == ("COMPLETED", "1")
    assert "account" not in plain.tries("SBATCH_ACCOUNT=lab ddp doctor -p charged").err
    many = plain.tries("ddp submit -p charged --account lab -N 2 smoke")
    assert many.err.splitlines()[-1] == "ddp: --nodes: 2 exceeds the limit of 1 (MaxNodes)"
    stranger = plain.tries("ddp submit -p members smoke")
    assert re.search(
        r"job \d+ can never start: Job's account not known, .*; it is cancelled$", stranger.err
    )
    assert plain.does("squeue -h") == ""
