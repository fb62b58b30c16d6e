"""usage: hours by account and by user, as sreport sums them."""

import pytest
from cluster import Cluster
from hypothesis import given
from hypothesis import strategies as st
from run_verbs import Program

from ddp.slurm import usage

# Captured from 24.11.5, with names replaced; rows without a login are sums of the rows below
REPORT = """\
root||cpu|36000
root||mem|99999999
root||gres/gpu|7200
ml||cpu|7200
ml||gres/gpu|7200
ml|ada|cpu|3600
ml|ada|gres/gpu|5400
ml|bob|cpu|3600
ml|bob|gres/gpu|1800
physics||cpu|28800
physics|ada|cpu|28800
physics|ada|billing|28800
"""


@pytest.fixture
def counted(cluster: Cluster) -> Cluster:
    cluster.config += "AccountingStorageTRES   = cpu,mem,energy,node,billing,gres/gpu\n"
    cluster.usage = REPORT
    return cluster


def rows(program: Program, **params: object) -> list[list[str]]:
    return [line.split() for line in program.run("usage", **params)["usage"].splitlines()]


def test_each_account_has_its_users_hours_and_no_hour_counts_twice(
    program: Program, counted: Cluster
):
    assert rows(program) == [
        ["ACCOUNT", "GPU-HOURS", "CPU-HOURS"],
        ["ml", "2.0", "2.0"],
        ["physics", "0.0", "8.0"],
        ["total", "2.0", "10.0"],
    ]
    assert program.record["total"] == {"gpu_hours": 2.0, "cpu_hours": 10.0}
    assert program.record["usage"][0] == {"account": "ml", "gpu_hours": 2.0, "cpu_hours": 2.0}


def test_each_user_has_the_hours_of_all_accounts(program: Program, counted: Cluster):
    assert rows(program, by="user", since="7d")[1:] == [
        ["ada", "1.5", "9.0"],
        ["bob", "0.5", "1.0"],
        ["total", "2.0", "10.0"],
    ]


def test_without_gpus_in_the_accounting_cpu_hours_are_shown_and_the_lack_is_named(
    program: Program, cluster: Cluster
):
    cluster.usage = REPORT
    assert rows(program)[0] == ["ACCOUNT", "CPU-HOURS"]
    assert "AccountingStorageTRES=gres/gpu" in program.results["note"]


def test_an_unused_cluster_has_a_total_of_nothing(program: Program, counted: Cluster):
    counted.usage = ""
    assert rows(program) == [["ACCOUNT", "GPU-HOURS", "CPU-HOURS"], ["total", "0.0", "0.0"]]


def test_a_slurm_without_accounting_is_named_in_one_line(program: Program, cluster: Cluster):
    cluster.config = cluster.config.replace("accounting_storage/slurmdbd", "(null)")
    assert program.fails("usage").startswith("this Slurm keeps no accounting, so it knows no usage")


def test_a_silent_slurmdbd_is_named_in_one_line(program: Program, counted: Cluster):
    counted.accounting_silence = (
        "sreport: error: Problem talking to the database: Connection refused"
    )
    assert program.fails("usage").startswith("Slurm's accounting does not answer: Problem talking")


def test_a_time_that_is_not_past_is_refused(program: Program, counted: Cluster):
    assert program.fails("usage", since="2999-01-01") == "since: 2999-01-01 is not in the past"


@given(st.text())
def test_any_output_of_sreport_is_parsed(text: str):
    for one in usage.parse(text):
        assert one.seconds >= 0
