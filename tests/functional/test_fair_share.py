"""Fair shares with a real slurmdbd, by docs/howto/team.md: shares, preemption, usage, reasons."""

import collections.abc
import json
import re
import subprocess
import time

import pytest
import yaml

from functional import pages
from functional.conftest import REPOSITORY, Cluster, Json, eventually
from functional.test_drills import BUILT_IN
from functional.test_people import LOGIN, Person, person

pytestmark = [pytest.mark.long, pytest.mark.trains, pytest.mark.timeout(1800)]

CTL = "slurmctld/0"
PAGE = "docs/howto/team.md"
OPTION = "slurm-conf-parameters"
PREEMPTION = "/etc/slurm/preemption.conf"
# Minutes instead of days, so that a test sees them pass
QUICK = "PriorityDecayHalfLife=00:01:00\nPriorityCalcPeriod=1\n"
# Slurm counts running jobs once in this period, and the rest of one that ended only if it enforces limits
COUNTED_S = 90
RUN_S = 600
STEPS = 3000  # enough that a run is still in its middle when another job comes
SMALL = "--gpus-per-node 0 --cpus-per-task 1 --memory 1G"
GPT = "gpt " + BUILT_IN["gpt"][0].replace("--steps 500", f"--steps {STEPS}")


def sacctmgr(cluster: Cluster, *words: str) -> str:
    return cluster.on(CTL, "sacctmgr", "-i", *words)


def configure(cluster: Cluster, text: str) -> None:
    """Set slurm.conf's lines, and wait until Slurm has them."""
    cluster.ok("config", "slurmctld", f"{OPTION}={text}")
    eventually(lambda: _is_up(cluster))


def _is_up(cluster: Cluster) -> None:
    status = cluster.units()[CTL]["workload-status"]
    assert status["current"] == "active", status  # else it refused the lines
    assert " UP" in cluster.exec(LOGIN, "scontrol", "ping").out
    assert "idle" in cluster.exec(LOGIN, "sinfo", "--noheader", "--format", "%t").out


def type_of_page(cluster: Cluster) -> None:
    """Type the page's lines that set up accounts, QOS and preemption, as the operator does."""
    typed = 0
    for line in pages.lines(PAGE):
        if "sacctmgr" not in line.text and "preemption" not in line.text:
            continue
        ctl = f"{REPOSITORY}/sandboxctl --model {cluster.model}"
        script = f'juju() {{ {ctl} "$@"; }}\n{line.text}'
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stdout} {done.stderr}"
        typed += 1
    assert typed == 7


@pytest.fixture(scope="module")
def shared(drills: Cluster) -> collections.abc.Iterator[Cluster]:
    """The cluster as the overlay and the page make it, with a quick clock."""
    before = drills.ok("config", "slurmctld", OPTION)
    overlay = yaml.safe_load((REPOSITORY / "overlays/fair-share.yaml").read_text())
    options = overlay["applications"]["slurmctld"]["options"]
    configure(drills, options[OPTION])
    type_of_page(drills)
    quick = re.sub(r"(?m)^PriorityDecayHalfLife=.*\n", "", drills.ok("config", "slurmctld", OPTION))
    configure(drills, f"{quick.rstrip()}\n{QUICK}")
    yield drills
    configure(drills, before)
    for unit in (CTL, "slurmrestd/0"):
        drills.on(unit, "rm", PREEMPTION)
    for words in (
        ("modify", "cluster", "ddp", "set", "qos=normal"),
        ("modify", "qos", "normal", "set", "priority=0", "preempt="),
        ("delete", "qos", "low"),
        ("delete", "account", "physics,ml"),
    ):
        sacctmgr(drills, *words)


@pytest.fixture(scope="module")
def alice(shared: Cluster) -> collections.abc.Iterator[Person]:
    with person(shared, "alice", "2001") as one:
        sacctmgr(shared, "add", "user", "alice", "account=physics")
        yield one
        sacctmgr(shared, "delete", "user", "alice")


@pytest.fixture(scope="module")
def bob(shared: Cluster) -> collections.abc.Iterator[Person]:
    with person(shared, "bob", "2002") as one:
        sacctmgr(shared, "add", "user", "bob", "account=ml")
        yield one
        sacctmgr(shared, "delete", "user", "bob")


def batch(one: Person, seconds: int, *more: str) -> str:
    """Submit a job that has the whole cluster for a while; return its id."""
    words = " ".join(more)
    line = f"sbatch --parsable -N2 --exclusive --gres=gpu:1 -t 10 -o /dev/null {words}"
    line += f" --wrap 'sleep {seconds}'"
    return one.does(f"cd /tmp && {line}")


def until_job(one: Person, job: str, state: str) -> None:
    began = time.monotonic()
    while (found := one.does(f"squeue -h -t all -j {job} -o %T")) != state:
        assert time.monotonic() - began < RUN_S, f"{job} is {found}"
        time.sleep(1)


def raw_usage(cluster: Cluster, account: str) -> int:
    """Return the account's used seconds of billing units, decayed, as the scheduler counts them."""
    words = ("-n", "-P", "-o", "Account,User,RawUsage", "-A", account)
    for line in cluster.on(CTL, "sshare", *words).splitlines():
        name, user, usage = line.strip().split("|")
        if name == account and not user:
            return int(usage)
    raise AssertionError(account)


def everyones(one: Person) -> dict[str, Json]:
    found = json.loads(one.does("ddp --json list --everyone"))
    return {str(job["job_id"]): job for job in found["jobs"]}


def test_who_used_less_comes_first_and_shares_decay(shared: Cluster, alice: Person, bob: Person):
    until_job(alice, batch(alice, COUNTED_S), "COMPLETED")
    eventually(lambda: _has_used(shared, "physics"))
    blocker = batch(alice, COUNTED_S)
    until_job(alice, blocker, "RUNNING")
    first = batch(alice, 1)
    second = batch(bob, 1)
    eventually(lambda: _is_before(alice, second, first))
    jobs = everyones(alice)
    assert jobs[blocker]["state"] == "RUNNING"
    assert jobs[first]["waits_for"] == "jobs of higher priority are before it"
    assert jobs[second]["waits_for"] == "it is next, and waits for nodes to be free"
    assert [jobs[second][name] for name in ("user", "account", "qos")] == ["bob", "ml", "normal"]
    table = bob.does("ddp list --everyone")
    assert re.search(rf"(?m)^{first} .* alice +physics .* jobs of higher priority", table), table
    for job in (second, first):
        until_job(alice, job, "COMPLETED")
    most = raw_usage(shared, "physics")
    eventually(lambda: _has_decayed(shared, most))


def _has_used(cluster: Cluster, account: str) -> None:
    assert raw_usage(cluster, account) > 0


def _is_before(one: Person, job: str, other: str) -> None:
    jobs = everyones(one)
    assert jobs[job]["priority"] > jobs[other]["priority"], jobs
    reasons = [jobs[job]["reason"], jobs[other]["reason"]]
    assert reasons == ["Resources", "Priority"], jobs  # of the scheduler's last look


def _has_decayed(cluster: Cluster, most: int) -> None:
    assert raw_usage(cluster, "physics") < 0.7 * most


def submit(one: Person, run: str, *more: str) -> Json:
    words = " ".join(more)
    return one.json(f"ddp --json submit --run {run} -N 2 {SMALL} {words} {GPT}")


def until_run(one: Person, run: str, state: str) -> None:
    began = time.monotonic()
    while (found := one.json(f"ddp --json show {run}"))["state"] != state:
        assert found["state"] not in ("FAILED", "CANCELLED"), found
        assert time.monotonic() - began < RUN_S, found
        time.sleep(1)


def steps(one: Person, run: str) -> dict[int, float]:
    """Return the loss of each step."""
    text = one.does(f"cat {one.folder}/runs/{run}/metrics.jsonl 2>/dev/null || true")
    records = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {one["step"]: one["loss"] for one in records if one.get("kind") == "step"}


def last_checkpoint(one: Person, run: str) -> dict[str, int]:
    """Return the CRC-32 of each file of tensors and state in the last checkpoint."""
    manifest = json.loads(one.does(f"cat {one.folder}/runs/{run}/latest/manifest.json"))
    found = {file["file"]: file["crc32"] for file in manifest["files"]}
    del found["dcp/.metadata"]  # it names its folder
    assert found
    return found


def test_a_low_run_is_preempted_saves_waits_and_resumes_bitwise(alice: Person, bob: Person):
    submit(alice, "whole")
    until_run(alice, "whole", "COMPLETED")
    job = submit(alice, "cut", "--qos low")
    began = time.monotonic()
    while len(steps(alice, "cut")) < 100:
        assert time.monotonic() - began < RUN_S, alice.does("ddp log cut")
        time.sleep(0.5)

    urgent = batch(bob, 20)
    until_job(bob, urgent, "RUNNING")
    waiting = everyones(bob)[str(job["job-id"])]
    assert (waiting["state"], waiting["qos"], waiting["user"]) == ("PENDING", "low", "alice")
    assert waiting["waits_for"], waiting
    log = alice.does("ddp log --lines 1000 cut")
    # With a grace time Slurm first signals the ranks alone
    assert "Slurm asks this job to leave: another job takes its place" in log
    until_run(alice, "cut", "COMPLETED")

    log = alice.does("ddp log --lines 1000 cut")
    attempts = f"{alice.folder}/runs/cut/control"
    left = json.loads(alice.does(f"cat {attempts}/{job['job-id']}.r0.outcome"))
    assert left["outcome"] == "preempted", log
    assert 100 <= int(left["step"]) < STEPS, "it saved in the middle"
    outcomes = alice.does(f"cd {attempts} && ls {job['job-id']}.r*.outcome").split()
    ends = [f"{job['job-id']}.r{number}.outcome" for number in (0, 1)]
    assert outcomes == ends, "Slurm may start it once more, which does nothing"
    assert steps(alice, "cut") == steps(alice, "whole")
    assert last_checkpoint(alice, "cut") == last_checkpoint(alice, "whole")


def test_usage_shows_the_hours_of_accounts_and_users_once_slurmdbd_summed_them(
    shared: Cluster, alice: Person, bob: Person
):
    """slurmdbd sums whole hours: the jobs are moved two hours back, and summed again.

    So is the cluster's registration, since sreport has no row for a time before it.
    """
    until_job(alice, batch(alice, 90), "COMPLETED")
    until_job(bob, batch(bob, 30), "COMPLETED")
    moved = (
        "update ddp_job_table set time_submit=time_submit-7200, time_eligible=time_eligible-7200, "
    )
    moved += (
        "time_start=time_start-7200, time_end=time_end-7200 where time_end > 0 and time_start > 0; "
    )
    moved += "update ddp_event_table set time_start=time_start-7200; "
    moved += "update ddp_event_table set time_end=time_end-7200 where time_end > 0; "
    # In slurmdbd's first hour the table has no row
    moved += "delete from ddp_last_ran_table; "
    moved += "insert into ddp_last_ran_table (hourly_rollup, daily_rollup, monthly_rollup) "
    moved += "select h, h, h from (select (unix_timestamp() div 3600 - 4) * 3600 as h) as hours;"
    shared.on("mysql/0", "mariadb", "slurm_acct_db", "-e", moved)
    shared.on("slurmdbd/0", "systemctl", "restart", "slurmdbd")
    eventually(lambda: _is_summed(alice))
    table = alice.does("ddp usage --since 1d --by user")
    assert re.search(r"(?m)^USER +GPU-HOURS +CPU-HOURS$", table), table
    assert re.search(r"(?m)^alice +0\.\d +0\.\d$", table), table
    by_user = alice.json("ddp --json usage --since 1d --by user")
    for hours in ("gpu_hours", "cpu_hours"):
        found = {row["user"]: row[hours] for row in by_user["usage"]}
        assert found["alice"] > found["bob"] > 0, by_user
        assert by_user["total"][hours] == pytest.approx(sum(found.values()), abs=0.01)


def _is_summed(one: Person) -> None:
    for kind, names in (("account", ("physics", "ml")), ("user", ("alice", "bob"))):
        found = one.json(f"ddp --json usage --since 1d --by {kind}")
        hours = {row[kind]: row["cpu_hours"] for row in found["usage"]}
        assert all(hours.get(name, 0) > 0 for name in names), found
