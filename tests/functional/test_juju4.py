"""Differences of Juju 3.6 and Juju 4: actions that wait for a job, and a second deployment."""

import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import re
import time

import pytest

from functional.conftest import MODEL, REPOSITORY, Answer, Cluster, deployed, eventually

pytestmark = pytest.mark.timeout(
    1500
)  # the first test of a run deploys; each command has its own limit

BUNDLE = REPOSITORY / "bundle.yaml"
SMALL = pathlib.Path(__file__).with_name("small.yaml")
VENV, SCRIPT = "/mnt/shared/juju/venv", "/mnt/shared/juju/train.py"
# It looks like the user's own environment. Its jobs never start, so the cluster's is not made
MAKE_VENV = f"""
mkdir -p {VENV}/bin {VENV}/lib/python3/site-packages/torch
ln -sf /usr/bin/python3 {VENV}/bin/python3
echo "__version__ = '2.9.0'" > {VENV}/lib/python3/site-packages/torch/version.py
touch {SCRIPT}
chown -R ubuntu: /mnt/shared/juju
"""
NEIGHBOUR = "shared-filesystem-client"  # of trainer/0, on the login node's machine


@pytest.fixture(scope="module")
def four() -> collections.abc.Iterator[Cluster]:
    """A small cluster on Juju 4."""

    def deploy(one: Cluster) -> Answer:
        return one.ctl("deploy", str(BUNDLE), "--overlay", str(SMALL), timeout=1200)

    with deployed(Cluster(f"{MODEL[:7]}4", juju="4"), deploy) as one:
        yield one


@dataclasses.dataclass
class Action:
    """A submission of trainer/0 that waits for its job."""

    cluster: Cluster
    run: str
    logged: int  # lines of actions before it
    answer: "concurrent.futures.Future[Answer]"

    def logged_line(self, pattern: str) -> str:
        """Wait until the action has logged one line like this; return the line's first group."""

        def find() -> str:
            lines = log_of_actions(self.cluster)[self.logged :]
            found = [match[1] for match in map(re.compile(pattern).fullmatch, lines) if match]
            assert len(found) == 1, lines
            return found[0]

        return eventually(find)

    def state(self) -> str:
        return self.cluster.on(
            "sackd/0", "squeue", "--noheader", "--name", self.run, "--format", "%T"
        )

    def results(self) -> dict[str, str]:
        answer = self.answer.result(120)
        assert answer.code == 0, answer.err[-3000:]
        return json.loads(answer.out)["trainer/0"]["results"]


def log_of_actions(cluster: Cluster) -> list[str]:
    log = cluster.ok("debug-log", "--include", "trainer/0", "--replay")
    return [line.split(" ACTION ", 1)[1] for line in log.splitlines() if " ACTION " in line]


@contextlib.contextmanager
def waiting(cluster: Cluster, run: str, *more: str) -> collections.abc.Generator[Action]:
    """Yield an action that waits for a job behind a held one; clean up both."""
    cluster.on("sackd/0", "sh", "-ec", MAKE_VENV)
    held = "sbatch --parsable --hold --mem 100 --output /dev/null --wrap true"
    blocker = cluster.on("sackd/0", "su", "ubuntu", "-c", f"cd; {held}")
    small = ("nodes=1", "gpus-per-node=0", "cpus-per-task=1", "memory=1G", f"python={VENV}")
    words = [
        "submit-ddp",
        f"workload={SCRIPT}",
        *small,
        f"run={run}",
        f"dependency=afterany:{blocker}",
        "wait=true",
    ]
    logged = len(log_of_actions(cluster))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(cluster.ctl, "run", "trainer/0", *words, *more, "--format", "json")
        action = Action(cluster, run, logged, answer)
        try:

            def is_pending() -> None:
                assert action.state() == "PENDING" or answer.done()

            eventually(is_pending)
            yield action
        finally:
            cluster.on("sackd/0", "scancel", "--user", "ubuntu")


def change_neighbour(cluster: Cluster, value: str) -> str:
    """Set an option of the login node's filesystem client; return the waiter, or ""."""
    answer = cluster.ctl("config", NEIGHBOUR, f"profile={value}")
    assert answer.code == 0, answer.err
    return "".join(line for line in answer.err.splitlines() if "waits for the machine lock" in line)


def waits(cluster: Cluster) -> int:
    """Return how many hooks of the neighbour have not run."""
    model = json.loads(pathlib.Path(f"/var/lib/slurm-ddp/{cluster.model}/model.json").read_text())
    return len(model["units"][cluster.beside("sackd/0", NEIGHBOUR)]["events"])


@pytest.mark.long
def test_on_juju_3_6_only_the_trainers_own_unit_waits_and_cancel_task_ends_that(cluster: Cluster):
    with waiting(cluster, "three") as action:
        try:
            assert change_neighbour(cluster, "dataset") == ""
            assert waits(cluster) == 0
            began = time.monotonic()
            cluster.ok("exec", "--unit", "sackd/leader", "--", "true")
            assert time.monotonic() - began < 60
            assert not action.answer.done()
            task = action.logged_line(r"trainer/0 runs no other action .*: juju cancel-task (\d+)")
            cluster.ok("cancel-task", task)
            answer = action.answer.result(60)
            assert (answer.code, answer.error) == (1, f"submit-ddp: task {task} was cancelled")
            assert action.state() == "PENDING", "the job goes on"
        finally:
            cluster.ok("config", NEIGHBOUR, "--reset", "profile")


@pytest.mark.long
def test_on_juju_4_a_waiting_action_holds_its_machine_and_a_shell_ends_it(four: Cluster):
    with waiting(four, "four") as action, concurrent.futures.ThreadPoolExecutor() as pool:
        waiter = change_neighbour(four, "dataset")
        assert "config-changed waits for the machine lock of machine" in waiter
        assert "trainer/0 runs action submit-ddp" in waiter
        other = pool.submit(four.ctl, "exec", "--unit", "sackd/leader", "--", "true")

        listed = four.ok("ssh", "sackd/leader", "ddp", "list")
        assert re.search(r"^four .* PENDING ", listed, re.MULTILINE), listed
        held = "hooks and actions of all units on the machine of trainer/0 wait while this action runs; "
        typed = action.logged_line(held + r".*to end this action, not its job: juju (.*)")

        model = json.loads(pathlib.Path(f"/var/lib/slurm-ddp/{four.model}/model.json").read_text())
        task = model["units"]["trainer/0"]["events"][0]["action"]["id"]
        refused = four.ctl("cancel-task", task)
        assert (refused.code, refused.out) == (0, "")
        assert (
            refused.err
            == f"WARNING The following tasks could not be canceled:\ntask: {task}, error: \n"
        )
        assert not other.done()
        assert not action.answer.done()
        assert waits(four) >= 1

        ended = four.ok(*typed.split(), action.run)
        assert action.run in ended
        results = action.results()
        assert (results["state"], results["to-follow"]) == (
            "PENDING",
            f"juju ssh trainer/leader ddp watch {action.run}",
        )
        assert other.result(60).code == 0
        assert action.state() == "PENDING", "the job goes on"
    four.ok("config", NEIGHBOUR, "--reset", "profile")
    assert waits(four) == 0


@pytest.mark.long
def test_on_juju_4_a_bundle_deploys_again_where_it_names_the_architecture(
    four: Cluster, tmp_path: pathlib.Path
):
    before = four.units()
    again = ("deploy", str(BUNDLE), "--overlay", str(SMALL))
    answer = four.ctl(*again)
    assert answer.code == 0, answer.err
    assert "No changes to apply." in answer.err
    assert four.units() == before

    without = tmp_path / "bundle.yaml"
    text = (
        BUNDLE.read_text()
        .replace("    constraints: arch=amd64\n", "")
        .replace("./dist", str(REPOSITORY / "dist"))
    )
    without.write_text(text)
    refused = four.ctl("deploy", str(without), "--overlay", str(SMALL))
    assert (
        refused.error
        == f"cannot deploy local charm at {REPOSITORY}/dist/juicefs-server-proxy: file does not exist"
    )

    later = tmp_path / "later.yaml"
    later.write_text("applications:\n  juicefs-server-proxy:\n    options:\n      trash-days: 2\n")
    four.ok(*again, "--overlay", str(later))
    assert four.ok("config", "juicefs-server-proxy", "trash-days") == "2\n"
    four.ok("config", "juicefs-server-proxy", "--reset", "trash-days")


@pytest.mark.long
def test_on_juju_4_the_wait_ends_by_itself_and_names_who_has_waited_for_a_minute(four: Cluster):
    with waiting(four, "limited", "wait-limit=100") as action:
        change_neighbour(four, "dataset")
        results = action.results()
        assert results["state"] == "PENDING"
        waited = action.logged_line(
            rf"{NEIGHBOUR}/\d+ \(run config-changed hook\) has waited (\d+) s for this action"
        )
        assert 60 <= int(waited) <= 100
        assert action.state() == "PENDING"
    four.ok("config", NEIGHBOUR, "--reset", "profile")


@pytest.mark.long
def test_on_juju_3_6_a_limit_is_kept_that_the_operator_gives(cluster: Cluster):
    with waiting(cluster, "chosen", "wait-limit=15") as action:
        assert action.results()["state"] == "PENDING"


@pytest.mark.long
@pytest.mark.trains
def test_a_script_waits_for_a_job_in_a_shell_while_hooks_go_on(four: Cluster):
    """As docs/reference/actions.md has it for CI."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        smoke = ("--nodes", "1", "--gpus-per-node", "0", "--run", "ci", "smoke")
        done = pool.submit(
            four.ctl, "ssh", "sackd/leader", "ddp", "submit", "--wait", *smoke, timeout=1400
        )
        four.ok("config", NEIGHBOUR, "profile=dataset")
        four.ok("exec", "--unit", "sackd/0", "--", "true")
        four.ok("config", NEIGHBOUR, "--reset", "profile")
        assert waits(four) == 0
        answer = done.result()
    assert answer.code == 0, answer.err[-3000:]
    assert re.search(r"^state +COMPLETED", answer.out, re.MULTILINE), answer.out
