"""People of the cluster use `ddp` on the login host, each under a personal account."""

import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import json
import re
import time
import typing

import pytest

from functional.conftest import Answer, Cluster, Json, eventually
from functional.storage_faults import MP

pytestmark = [
    pytest.mark.trains,
    pytest.mark.timeout(1500),
]  # the first test of a run deploys; each command has its own limit

LOGIN = "sackd/0"
HOSTS = (LOGIN, "slurmd/0", "slurmd/1", "slurmctld/0")  # hosts with an account for each user
SMALL = "--nodes 2 --gpus-per-node 0 --cpus-per-task 1 --memory 1G"
ONE = "--nodes 1 --gpus-per-node 0 --cpus-per-task 1 --memory 1G"
RUN = "first"
TRAIN = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from beside import WORD

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
loss = model(torch.full((2, 4), float(rank))).pow(2).mean()
loss.backward()
spread = [torch.zeros_like(model.module.weight.grad) for _ in range(world)]
dist.all_gather(spread, model.module.weight.grad)
same = all(torch.equal(spread[0], other) for other in spread)
print(f"rank={rank} of={world} uid={os.getuid()} sum={total.item():g} same={same} {WORD} argv={sys.argv[1:]}", flush=True)
dist.destroy_process_group()
"""
# Submits and waits behind a job that is held, and edits the code before that one is let go
EDITED_WHILE_IT_WAITS = f"""
set -e
cd exp
blocker=$(sbatch --parsable --hold --nodes 1 --mem 100 --output /dev/null --wrap true)
ddp submit --json --wait --run {RUN} --dependency afterany:$blocker {SMALL} train.py a 'b c' --flag=1 >~/.result.json &
waiter=$!
tries=0
until squeue --noheader --name {RUN} | grep -q Dependency; do
    tries=$((tries + 1)); test $tries -lt 600; sleep 0.2
done
echo 'raise SystemExit("edited")' >train.py
echo 'WORD = "edited"' >beside.py
scontrol release $blocker
wait $waiter
cat ~/.result.json
"""
# boto3 needs an older dateutil than the cluster's environment has
LAYERED = """
import importlib.metadata, pathlib, shutil, subprocess, sys
import boto3, dateutil, mine, torch
homes = [pathlib.Path(module.__file__).parents[4].name for module in (boto3, dateutil, torch)]
child = subprocess.run([sys.executable, "-I", "-c", "import boto3"]).returncode
tool = subprocess.run(["torchrun", "--help"], stdout=-1).returncode
own = pathlib.Path(shutil.which("torchrun")).parents[1].name == homes[0]
print("from", mine.__file__)
print("layer", homes[0] == homes[1] != homes[2], child, tool, own, int(importlib.metadata.version("python-dateutil")[0]) < 3)
"""

# Logs steps until a file in the run's folder ends it
COUNTS = """
import pathlib, time
from ddptrain import resume
run = resume.Run()
step = 0
while not (pathlib.Path(run.folder) / "end").exists():
    step += 1
    print(f"step={step}", flush=True)
    run.log(step, loss=1.0)
    time.sleep(0.5)
run.done(step=step)
"""
# All that follows a run, at once; each leaves its output and its exit status
FOLLOWED = f"""
cd exp
follow() {{ name=$run-$1; shift; "$@" >~/$name.out 2>~/$name.err; echo $? >~/$name.code; }}
follow submit ddp submit --wait --run $run {ONE} count.py &
until grep -qs step=1 {MP}/users/alice/runs/$run/logs/*.out; do test ! -e ~/$run-submit.code || exit; sleep 0.5; done
follow watch ddp watch $run &
follow log ddp log --follow $run &
wait
"""


@dataclasses.dataclass(frozen=True)
class Person:
    """A user with an account on every host, at the login host."""

    cluster: Cluster
    name: str
    uid: str

    @property
    def folder(self) -> str:
        """The user's folder in the workspace."""
        return f"{MP}/users/{self.name}"

    def tries(self, script: str, timeout: float = 600) -> Answer:
        """Run a shell script as this user, in the home folder, with the environment of a login."""
        return self.cluster.exec(LOGIN, "runuser", "-l", self.name, "-c", script, timeout=timeout)

    def does(self, script: str, timeout: float = 600) -> str:
        answer = self.tries(script, timeout)
        assert answer.code == 0, f"{script}: {answer.out[-2000:]} {answer.err[-3000:]}"
        return answer.out.strip()

    def json(self, script: str) -> Json:
        return json.loads(self.does(script))

    def refused(self, script: str) -> str:
        """Return the one line in which `ddp` refuses."""
        answer = self.tries(script)
        assert answer.code == 1, f"{script}: {answer.code} {answer.out} {answer.err}"
        lines = [line for line in answer.err.splitlines() if line.startswith("ddp: ")]
        assert len(lines) == 1, answer.err
        return lines[0].removeprefix("ddp: ")

    def writes(self, name: str, text: str) -> None:
        self.does(f"cat >{name} <<'END'\n{text}\nEND")


@contextlib.contextmanager
def person(cluster: Cluster, name: str, uid: str) -> collections.abc.Generator[Person]:
    """Make an account on every host, and remove it with its files on volume and disks."""
    for host in HOSTS:
        cluster.on(host, "useradd", "--create-home", "--uid", uid, name)
    try:
        yield Person(cluster, name, uid)
    finally:
        cluster.exec(LOGIN, "scancel", "--user", name)
        cluster.exec(LOGIN, "rm", "-rf", f"{MP}/users/{name}")
        for host in HOSTS:
            cluster.exec(host, "userdel", "--force", "--remove", name)
            cluster.exec(
                host, "sh", "-c", f"rm -rf /var/tmp/slurm-ddp-{uid} /var/tmp/slurm-ddp-{uid}.*"
            )


@pytest.fixture(scope="module")
def alice(cluster: Cluster) -> typing.Iterator[Person]:
    cluster.action("install-environment", timeout=1500)
    with person(cluster, "alice", "2001") as one:
        yield one


@pytest.fixture
def bob(alice: Person) -> typing.Iterator[Person]:
    with person(alice.cluster, "bob", "2002") as one:
        yield one


@pytest.fixture(scope="module")
def trained(alice: Person) -> Json:
    """The result of `ddp submit --wait` for a run whose code was edited while it waited."""
    alice.does("mkdir -p exp")  # of a home folder, only the script would be copied
    alice.writes("exp/train.py", TRAIN)
    alice.writes("exp/beside.py", 'WORD = "kept"')
    return alice.json(EDITED_WHILE_IT_WAITS)


def test_a_user_trains_under_the_own_account(alice: Person, trained: Json):
    assert (trained["state"], trained["run-dir"]) == ("COMPLETED", f"{alice.folder}/runs/{RUN}")
    output = alice.does(f"cat {trained['log']}")
    assert sorted(re.findall(r"rank=.*", output)) == [
        f"rank={rank} of=2 uid=2001 sum=3 same=True kept argv=['a', 'b c', '--flag=1']"
        for rank in (0, 1)
    ]
    assert set(re.findall(r"\[ENV\] node=(\S+)", output)) == {"slurmd-0", "slurmd-1"}
    others = alice.cluster.on(LOGIN, "find", alice.folder, "-not", "-user", "alice")
    assert others == ""


def test_edits_while_the_job_waits_do_not_change_it(alice: Person, trained: Json):
    code = f"{trained['run-dir']}/code"
    assert alice.does(f"cat {code}/train.py") == TRAIN.strip()
    assert alice.does(f"ls -A -I __pycache__ {code}").split() == ["beside.py", "train.py"]
    assert alice.does("cat exp/beside.py") == 'WORD = "edited"'  # which the job did not see


def test_she_looks_at_her_run(alice: Person, trained: Json):
    number = trained["job-id"]
    lines = alice.json(f"ddp log {RUN} --json --lines 1000")["lines"]
    assert sum("argv=['a', 'b c', '--flag=1']" in line for line in lines) == 2
    followed = alice.tries(f"ddp log -f {number}")
    assert (followed.code, followed.out.count("uid=2001")) == (0, 2)
    assert alice.json(f"ddp show {RUN} --json")["state"] == "COMPLETED"
    assert RUN in [run["run"] for run in alice.json("ddp list --json")["runs"]]
    assert re.search(rf"(?m)^{RUN} +script +COMPLETED ", alice.does("ddp list"))
    seen = alice.tries(f"ddp watch {RUN}", timeout=60)  # by itself: the run has ended
    assert (seen.code, "COMPLETED" in seen.out) == (0, True)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [20, 60])
def test_a_silent_controller_ends_nothing_that_follows_a_run(alice: Person, seconds: int):
    """A restart of slurmctld is a common minute; the job trains on, and everyone still sees it."""
    cluster, run = alice.cluster, f"followed-{seconds}"
    alice.does("mkdir -p exp")
    alice.writes("exp/count.py", COUNTS)

    def output(name: str) -> str:
        return alice.tries(f"cat ~/{run}-{name}").out

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        following = pool.submit(alice.tries, f"run={run}\n{FOLLOWED}")
        try:
            eventually(lambda: _holds('"state": "RUNNING"', output("watch.out")))
            eventually(lambda: _holds("step=1", output("log.out")))
            cluster.on("slurmctld/0", "systemctl", "stop", "slurmctld")
            began = time.monotonic()
            try:
                eventually(
                    lambda: _holds(
                        "Slurm does not answer: Slurmctld(primary) at", output("submit.err")
                    )
                )
                listed = alice.json("ddp list --json")
                assert listed["slurm"].startswith("Slurm does not answer: Slurmctld(primary) at")
                (one,) = [one for one in listed["runs"] if one["run"] == run]
                assert (one["state"], one["step"] > 0) == ("UNKNOWN", True)
                assert is_in("Slurm does not answer", alice.does(f"ddp show {run}"))
                assert is_in("step=1", alice.does(f"ddp log --lines 1000 {run}"))
                seen_so_far = output("log.out").count("step=")
                eventually(
                    lambda: _holds(f"]: step={seen_so_far + 2}\n", output("log.out"))
                )  # it goes on during the outage
                time.sleep(max(0.0, seconds - (time.monotonic() - began)))
            finally:
                cluster.on("slurmctld/0", "systemctl", "start", "slurmctld")
            eventually(lambda: _holds("Slurm answers again, after", output("submit.err")))
        finally:
            alice.tries(f"touch {alice.folder}/runs/{run}/end")
        following.result(timeout=600)
    assert [output(f"{name}.code").strip() for name in ("submit", "watch", "log")] == [
        "0",
        "0",
        "0",
    ]
    seen = [json.loads(line) for line in output("watch.out").splitlines()]
    assert {one["state"] for one in seen if one["slurm"]} == {"RUNNING"}, (
        "as in Slurm's last answer"
    )
    assert [one["state"] for one in seen if one["has_ended"]] == ["COMPLETED"]
    steps = list(map(int, re.findall(r"\]: step=(\d+)$", output("log.out"), re.MULTILINE)))
    assert steps == list(range(1, len(steps) + 1)), "no line is missing"


def test_she_may_name_any_path_and_reuse_a_submission_that_died_half_way(
    alice: Person, trained: Json
):
    """Pipes and devices are refused at once, fetch skips them, a dry run gives no made-up start."""
    code = f"{trained['run-dir']}/code"
    alice.does(
        f"mkdir -p odd && cd odd && mkfifo pipe && touch train.py && touch {code}/made && mkfifo {code}/fifo"
    )
    dry = f"cd odd && timeout 60 ddp submit --dry-run {ONE}"
    for option in ("--requirements", "--env-file"):
        assert alice.refused(f"{dry} {option} pipe train.py").endswith(
            "/odd/pipe is a pipe, not a file"
        )
        assert alice.refused(f"{dry} {option} /dev/zero train.py").endswith(
            " /dev/zero is a device, not a file"
        )
    try:
        fetched = alice.json(f"cd odd && ddp fetch {RUN} --to got --json")
        assert (fetched["files"], fetched["left_out"]) == (["made"], {"fifo": "is a pipe"})
    finally:
        alice.does(f"rm {code}/fifo {code}/made")
    alice.does(
        f"mkdir -p {alice.folder}/runs/died/logs"
    )  # as far as a submission came when its mount died
    checks = alice.json(f"{dry} --json --run died train.py")["checks"]
    assert (
        "died was left unfinished by an earlier submission, and no job has used it: it starts there"
        in checks
    )
    endless = alice.does(
        "sbatch --parsable --nodes 2 --exclusive --output /dev/null --wrap 'sleep 600'"
    )
    try:
        eventually(
            lambda: _holds("RUNNING", alice.does(f"squeue --noheader --job {endless} --format %T"))
        )
        verdict = alice.json(f"{dry} --json train.py")["verdict"]
        assert (
            f"at no known time, behind job {endless} of alice, which has no time limit," in verdict
        )
    finally:
        alice.does(f"scancel {endless}")


def _holds(words: str, text: str) -> None:
    assert words in text, text[-2000:]


def is_in(words: str, table: str) -> bool:
    return re.search(rf"(?m)\b{words}\b", table) is not None


def test_she_sees_her_own_runs_and_ends_nobody_elses_job(alice: Person, trained: Json):
    theirs = alice.cluster.on(
        LOGIN,
        "runuser",
        "-u",
        "ubuntu",
        "--",
        "sh",
        "-c",
        "cd /tmp && sbatch --parsable --hold -J theirs --wrap true",
    )
    try:
        own = alice.does("ddp list")
        assert (is_in("theirs", own), is_in(RUN, own)) == (False, True)
        assert alice.refused(f"ddp cancel {theirs}")
        assert alice.cluster.on(LOGIN, "squeue", "-h", "-j", theirs, "-o", "%T") == "PENDING"
    finally:
        alice.cluster.on(LOGIN, "scancel", theirs)


@pytest.mark.long
def test_her_requirements_are_a_layer_that_is_made_once_and_her_project_comes_from_the_copy(
    alice: Person,
):
    alice.does(
        "mkdir -p own/src/mine && touch own/src/mine/__init__.py && echo boto3 >own/requirements.txt"
    )
    alice.writes(
        "own/pyproject.toml", '[project]\nname = "mine"\nversion = "1"\ndependencies = ["boto3"]\n'
    )
    alice.writes("own/uses.py", LAYERED)
    used = list[str]()
    for more in (
        "--requirements requirements.txt",
        "--requirements requirements.txt",
        "--environment mine",
    ):
        done = alice.json(f"cd own && ddp submit --json --wait {more} {SMALL} uses.py")
        log = alice.does(f"cat {done['log']}")
        assert log.count("layer True 0 0 True True") == 2, log
        assert log.count(f"from {done['run-dir']}/code/src/mine/__init__.py") == 2, log
        assert ("unpacked the environment" in log) == (len(used) != 1), (
            "a node keeps what it has unpacked"
        )
        used.append(str(alice.json(f"cat {done['run-dir']}/job.json")["environment"]))
        if len(used) == 2:
            alice.does("ddp env create mine --torch cpu --project own")
    assert used[0] == used[1] != used[2]
    assert re.search(rf"(?m)^mine +{used[2]} .* alice ", alice.does("ddp env list"))
    without = alice.tries(f"cd own && ddp submit --json --wait {ONE} uses.py")
    assert "ModuleNotFoundError: No module named 'boto3'" in json.loads(without.out)["error"]


def test_nobody_replaces_anothers_folders(alice: Person, bob: Person):
    bob.does(
        "ddp submit --dry-run -N 1 smoke"
    )  # makes nothing of alice's, and the folder that is bob's
    assert alice.cluster.on(LOGIN, "stat", "-c", "%a %u", MP) == "1777 0"
    folders = [
        f"{MP}/{name}" for name in ("environments", "runs", "baselines", "datasets", "users")
    ]
    folders += [bob.folder, f"{bob.folder}/runs", f"{bob.folder}/environments"]
    before = alice.cluster.on(LOGIN, "stat", "-c", "%i %u %a %n", *folders)
    mine = f"{alice.folder}/attack"
    tried = [
        line.format(at=at, mine=mine)
        for at in folders
        for line in (
            "mv {at} {at}-stolen",
            "mv {at} {mine}/stolen",
            "mkdir -p {mine}/own; mv -T {mine}/own {at}",
            "rmdir {at}",
            "ln -sfnT {mine} {at}",
            "chmod 777 {at}",
            "chown alice {at}",
            "mount --bind {mine} {at}",
            *(
                ()
                if at == f"{MP}/users"
                else ("rm -rf {at}", "touch {at}/planted", "ln -s {mine} {at}/planted")
            ),
        )
    ]
    script = "\n".join(
        f"({line}) 2>/dev/null </dev/null && echo 'succeeded: {line}'" for line in tried
    )
    assert alice.does(f"mkdir -p {mine}\n{script}\n:") == ""
    assert alice.cluster.on(LOGIN, "stat", "-c", "%i %u %a %n", *folders) == before


def test_a_folder_that_another_made_first_is_refused(alice: Person, bob: Person):
    alice.does(f"ln -sT {alice.folder} {bob.folder}")
    bob.writes("uses.py", LAYERED)
    what = "belongs to uid 2001, mode 777; as root: remove it"
    for command in (f"submit {ONE} uses.py", "list"):
        assert (
            bob.refused(f"ddp {command}")
            == f"{bob.folder} is not a folder that only this account can write: it {what}"
        )
    alice.cluster.on(LOGIN, "rm", "-rf", bob.folder)
    assert bob.json("ddp list --json")["count"] == 0


@pytest.mark.long
def test_a_folder_on_a_hosts_disk_that_another_made_first_hinders_nobody(
    alice: Person, bob: Person
):
    """Anybody can take the name in /var/tmp, on the login host and on each node."""
    cache = "/var/tmp/slurm-ddp-2002"
    for host in (LOGIN, "slurmd/0", "slurmd/1"):
        bob.cluster.on(
            host,
            "runuser",
            "-u",
            "alice",
            "--",
            "mkdir",
            "-m",
            "777",
            cache,
            f"{cache}/jobs",
            f"{cache}/locks",
        )
    bob.does("mkdir -p exp")
    bob.writes("exp/train.py", TRAIN)
    bob.writes("exp/beside.py", 'WORD = "kept"')
    for attempt in range(2):
        done = bob.json(f"cd exp && ddp submit --json --wait {SMALL} train.py")
        log = bob.does(f"cat {done['log']}")
        assert (done["state"], log.count("sum=3 same=True")) == ("COMPLETED", 2), log
        assert ("unpacked the environment" in log) == (not attempt), "it is found again"
    for host in ("slurmd/0", "slurmd/1"):
        left = bob.cluster.on(host, "find", cache, "-user", "bob", "-o", "-type", "f")
        assert left == "", "nothing of bob's lies in alice's folder"


def test_an_archive_that_another_put_there_is_not_used(alice: Person, bob: Person):
    """The trainer's folder is open, with the sticky bit: alice plants a file for bob."""
    shared, planted = f"{MP}/environments", "0123456789abcdef"
    mode = alice.cluster.on(LOGIN, "stat", "-c", "%a", shared)
    alice.cluster.on(LOGIN, "chmod", "1777", shared)
    try:
        alice.writes(
            "plant.py",
            "import glob, hashlib, json\n"
            f"path = max(glob.glob('{shared}/*.json'), key=lambda path: json.load(open(path))['created'])\n"
            f"open('{shared}/{planted}.tar.zst', 'wb').write(b'x')\n"
            "data = {'sha256': hashlib.sha256(b'x').hexdigest(), 'size_bytes': 1, 'created': '2099-01-01T00:00:00Z'}\n"
            f"data = json.load(open(path)) | data | {{'hash': '{planted}'}}\n"
            f"json.dump(data, open('{shared}/{planted}.json', 'w'))\n",
        )
        alice.does("python3 plant.py")
        bob.writes("hello.py", "print('ran')")
        blocker = bob.does(
            "sbatch --parsable --hold --nodes 1 --mem 100 --output /dev/null --wrap true"
        )
        job = bob.json(f"ddp submit --json --dependency afterany:{blocker} {ONE} hello.py")
        wanted = json.loads(bob.does(f"cat {job['run-dir']}/program/job.json"))["environment"][
            "layers"
        ][0]
        assert (wanted["path"].startswith(f"{shared}/"), planted in wanted["path"]) == (True, False)
        assert planted not in bob.does("ddp env list")
    finally:
        alice.cluster.on(LOGIN, "chmod", mode, shared)
        alice.cluster.on(LOGIN, "sh", "-c", f"rm -f {shared}/{planted}.*")
