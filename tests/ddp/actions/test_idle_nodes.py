"""doctor --idle: the pairs of idle nodes, the faults of a node, and the order of checks."""

import json
import pathlib
import subprocess
import typing

import pytest
from cluster import Cluster
from hypothesis import given
from hypothesis import strategies as st
from node_reports import answering, healthy
from run_verbs import Program
from test_collectives import leave, measured

from ddp.actions import idle_nodes
from ddp.doctor import node_checks
from ddp.doctor.node_checks import DAY_S, NodeCheck

NOW = 1e9
FRESH = NodeCheck(NOW - 60)
STALE = NodeCheck(NOW - DAY_S)
FAILED = NodeCheck(NOW - 60, ("no /dev/shm",))
BESIDE_B = NodeCheck(NOW - 60, ("collectives fail",), ("b",))
WAITS = "9|bob|ml|normal|PENDING|5|1|0:00|1:00|N/A|{reason}||train|\n"


@pytest.mark.parametrize(
    ("idle", "checks", "chosen"),
    [
        ("", {}, None),
        ("a", {}, ("a", None)),
        ("ab", {}, ("a", "b")),
        ("ab", {"a": FRESH, "b": FRESH}, None),
        ("ab", {"a": FRESH, "b": STALE}, ("b", "a")),
        ("abc", {"a": STALE, "b": FAILED, "c": FRESH}, ("b", "a")),
        ("ac", {"a": FAILED, "c": FAILED}, ("a", None)),
        ("abc", {"a": BESIDE_B, "b": FRESH, "c": FRESH}, ("a", "c")),
        ("ab", {"a": BESIDE_B, "b": FRESH}, None),
        ("ab", {"a": BESIDE_B, "b": STALE}, ("b", None)),
    ],
    ids=str,
)
def test_what_failed_or_is_due_is_checked_beside_a_healthy_neighbour(
    idle: str, checks: node_checks.Checks, chosen: tuple[str, str | None] | None
):
    assert node_checks.choose(tuple(idle), checks, NOW) == chosen


_known = st.builds(
    NodeCheck,
    checked=st.floats(0, NOW),
    failures=st.lists(st.just("bad"), max_size=2).map(tuple),
    partners=st.lists(st.sampled_from("abcd"), max_size=2).map(tuple),
)


@given(st.sets(st.sampled_from("abcd")), st.dictionaries(st.sampled_from("abcd"), _known))
def test_a_pair_is_of_two_idle_nodes_and_the_neighbour_has_not_failed(
    idle: set[str], checks: node_checks.Checks
):
    chosen = node_checks.choose(sorted(idle), checks, NOW)
    if chosen is None:
        return
    subject, partner = chosen
    assert subject in idle
    if partner is not None:
        assert partner in idle - {subject}
        assert not checks.get(partner, NodeCheck()).failures
        assert partner not in checks.get(subject, NodeCheck()).partners


@pytest.fixture
def measuring(program: Program, cluster: Cluster) -> Cluster:
    """Two healthy idle nodes, between which collectives take place."""
    cluster.submitted = lambda job: leave(job, measured(1.5))
    for machine in cluster.machines:  # as slurmd's charm registers them
        machine.state = "IDLE+DYNAMIC_NORM"
    answering(cluster, healthy("slurmd-0"), healthy("slurmd-1"))
    return cluster


def rows(program: Program) -> list[list[str]]:
    table = program.run("doctor", idle=True)["checked"]
    return [line.split(maxsplit=3) for line in table.splitlines()[1:]]


def bad(name: str) -> dict[str, typing.Any]:
    report = healthy(name)
    report["filesystem"]["read_only"] = True
    return report


def test_two_healthy_nodes_pass_leave_no_run_and_are_not_due_again(
    program: Program, measuring: Cluster
):
    assert rows(program) == [
        ["slurmd-0", "slurmd-1", "passed", "-"],
        ["slurmd-1", "slurmd-0", "passed", "-"],
    ]
    assert program.results["unfit"] == "none"
    assert list((program.workspace / "runs").glob("node-check*")) == []
    assert rows(program) == []
    assert program.results["verdict"] == "no idle node is due"


def test_a_node_with_a_fault_fails_twice_and_is_unfit(program: Program, measuring: Cluster):
    answering(measuring, healthy("slurmd-0"), bad("slurmd-1"))
    first = rows(program)
    assert [row[2] for row in first] == ["passed", "failed"], first
    assert program.results["unfit"] == "none"
    answering(measuring, bad("slurmd-1"), healthy("slurmd-0"))
    rows(program)
    name, _, why = program.results["unfit"].partition(": ")
    assert (name, "read-only" in why) == ("slurmd-1", True), program.results
    answering(measuring, healthy("slurmd-1"), healthy("slurmd-0"))
    assert rows(program)[0][2] == "passed", "it is repaired"


def test_what_both_nodes_have_is_no_fault_of_either(program: Program, measuring: Cluster):
    answering(measuring, bad("slurmd-0"), bad("slurmd-1"))
    assert [row[2] for row in rows(program)] == ["passed", "passed"]


def test_a_slow_pair_counts_against_the_node_that_was_due_only(
    program: Program, measuring: Cluster
):
    rows(program)
    path = program.workspace / "baselines" / "node-checks.json"
    known = json.loads(path.read_text())
    known["slurmd-1"]["checked"] = 0
    path.write_text(json.dumps(known))
    measuring.submitted = lambda job: leave(job, measured(0.5))
    found = rows(program)
    assert found[0][:2] == ["slurmd-1", "slurmd-0"]
    assert "all_reduce with slurmd-0 has 33% of the baseline" in found[0][3]
    assert found[1][2] == "passed", "of before"
    assert rows(program) == [], "another neighbour has to tell"


@pytest.mark.parametrize("reason", ["Resources", "Priority", "None"])
def test_nothing_is_checked_while_a_job_waits_for_nodes(
    program: Program, measuring: Cluster, reason: str
):
    measuring.everyones = WAITS.format(reason=reason)
    before = len(measuring.jobs)
    assert rows(program) == []
    assert program.results["verdict"] == "stopped: job 9 of bob waits for nodes"
    assert len(measuring.jobs) == before


def test_nothing_is_checked_while_the_queue_is_not_known(program: Program, measuring: Cluster):
    measuring.hides_queue = True
    before = len(measuring.jobs)
    assert rows(program) == []
    assert program.results["verdict"].startswith("stopped: the queue is not known: ")
    assert len(measuring.jobs) == before


def test_a_job_that_waits_for_something_else_does_not_stop_the_check(
    program: Program, measuring: Cluster
):
    measuring.everyones = WAITS.format(reason="Dependency")
    assert len(rows(program)) == 2


def test_a_job_that_comes_stops_the_check_without_a_verdict(program: Program, measuring: Cluster):
    def comes(job: typing.Any) -> None:
        measuring.everyones = WAITS.format(reason="Resources")
        leave(job, measured(0.1))

    measuring.submitted = comes
    assert rows(program) == []
    assert program.results["verdict"] == "stopped: job 9 of bob waits for nodes"
    assert not (program.workspace / "baselines" / "node-checks.json").exists()


def test_a_repaired_node_is_not_unfit_by_failures_of_before(program: Program, measuring: Cluster):
    answering(measuring, healthy("slurmd-0"), bad("slurmd-1"))
    rows(program)
    answering(measuring, bad("slurmd-1"), healthy("slurmd-0"))
    rows(program)
    assert program.results["unfit"] != "none"
    measuring.everyones = WAITS.format(reason="Resources")
    rows(program)
    assert program.results["verdict"].startswith("stopped: ")
    assert program.results["unfit"] == "none", "nothing was found out about it"


@pytest.mark.parametrize(
    ("config", "allowed", "qos"),
    [
        ("PreemptType             = preempt/qos\n", "low,normal\n", "low"),
        ("PreemptType             = preempt/qos\n", "normal\n", None),
        ("PreemptType             = preempt/none\n", "low,normal\n", None),
    ],
)
def test_the_jobs_have_a_qos_that_others_preempt_where_there_is_one(
    program: Program, measuring: Cluster, config: str, allowed: str, qos: str | None
):
    measuring.config += config
    measuring.allowed_qos = allowed
    rows(program)
    step = next(call for call in measuring.calls if call[0] == "srun")
    assert [word for word in step if word.startswith("--qos")] == ([f"--qos={qos}"] if qos else [])
    assert (f"#SBATCH --qos={qos}\n" in measuring.jobs[-1].text) == (qos is not None)


def test_without_an_environment_only_the_nodes_themselves_are_tested(
    program: Program, cluster: Cluster
):
    for path in (program.workspace / "environments").iterdir():
        path.unlink()
    answering(cluster, healthy("slurmd-0"), healthy("slurmd-1"))
    assert [row[2] for row in rows(program)] == ["passed", "passed"]
    assert cluster.jobs == []


def test_a_node_without_an_answer_has_no_verdict(program: Program, measuring: Cluster):
    answering(measuring, healthy("slurmd-0"))
    assert rows(program) == []
    assert program.results["verdict"] == "stopped: slurmd-1 was not free, or gave no answer"


def test_doctor_names_a_node_that_failed_while_it_was_idle(program: Program, measuring: Cluster):
    path = program.workspace / "baselines" / "node-checks.json"
    path.write_text('{"slurmd-1": {"checked": 1, "failures": ["no bandwidth"]}}')
    found = program.run("doctor")["findings"]
    assert "WARNING slurmd-1: it failed its last check while it was idle: no bandwidth" in found


HEAD = """\
Successfully ran diagnostic for group.
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
|-----  Deployment  --------+------------------------------------------------|
"""


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (f"{HEAD}| NVML Library   | Pass  |\n| Persistence Mode | Fail |\n", ""),
        (
            f"{HEAD}| Denylist  | Pass  |\n+-----  Hardware  -----+-----+\n"
            "| GPU Memory                | Fail - GPU: 3          |\n",
            "DCGM n1 GPU Memory Fail - GPU: 3",
        ),
        (
            f"{HEAD}| software  | Pass  |\n+-----  Hardware  -----+-----+\n"
            "| memory       | Fail     |\n|      | GPU0: Fail  |\n| Warning: GPU0 | double bit |\n",
            "DCGM n1 memory Fail GPU0: Fail",
        ),
        ("Error: unable to establish a connection to the specified host: localhost\n", ""),
    ],
    ids=["a setting", "DCGM 3", "DCGM 4", "no daemon"],
)
def test_a_failed_test_of_dcgm_is_one_line_and_a_setting_is_none(
    printed: str, line: str, tmp_path: pathlib.Path
):
    """The words and sections are those of DCGM's own display of results, 3.x and 4.x."""
    (tmp_path / "table").write_text(printed)
    dcgmi = tmp_path / "dcgmi"
    dcgmi.write_text(f'#!/bin/sh\n[ "$*" = "diag -r 2" ] && cat {tmp_path}/table\n')
    dcgmi.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        ("/bin/sh", "-c", idle_nodes.DCGM), env=env, capture_output=True, text=True, check=True
    )
    assert " ".join(done.stdout.split()) == line
