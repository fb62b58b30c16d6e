"""A partition's limits: what is submitted is within each, or the option that exceeds it is named."""

import dataclasses

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from resource_requests import node, partition, refusal, training

from ddp.base import ParameterError
from ddp.options import fields, models
from ddp.slurm import policy
from ddp.submit import resources

NODES = st.lists(
    st.builds(
        node, st.uuids().map(str), st.integers(1, 64), st.sampled_from([1, 900, 8000, 512000]), st.integers(0, 8)
    ),
    min_size=1,
    max_size=4,
)
LIMITS = st.builds(
    policy.Limits,
    max_nodes=st.none() | st.integers(1, 4),
    max_cpus_per_node=st.none() | st.integers(1, 64),
    max_memory_mb=st.none() | st.integers(300, 600000),
    max_memory_per_cpu_mb=st.none() | st.integers(50, 9000),
    is_exclusive=st.booleans(),
)
ASKED = st.fixed_dictionaries(
    {},
    optional={
        "nodes": st.integers(1, 5),
        "gpus_per_node": st.integers(0, 8),
        "cpus_per_task": st.integers(1, 70),
        "memory": st.just("site") | st.integers(256, 600000).map(str),
        "mem_per_cpu": st.integers(50, 9000).map(str),
        "exclusive": st.booleans(),
        "launcher": st.sampled_from(["torchrun", "srun"]),
    },
)


@given(nodes=NODES, limits=LIMITS, asked=ASKED)
def test_what_is_submitted_is_within_every_limit_or_refused_by_the_option(
    nodes: list[resources.jobs.Capacity], limits: policy.Limits, asked: dict[str, object]
):
    cluster = dataclasses.replace(partition(*nodes), limits=limits)
    try:
        found = training(cluster, **asked)
    except ParameterError as e:
        assert e.name.replace("-", "_") in asked
        event("refused")
        return
    tasks = found.ranks_per_node if asked.get("launcher") == "srun" else 1
    cpus = max(1, found.cpus_per_task // tasks) * tasks
    most = (limits.max_nodes, limits.max_cpus_per_node, limits.max_memory_mb, limits.max_memory_per_cpu_mb)
    amounts = (found.num_nodes, cpus, found.memory_mb, found.memory_per_cpu_mb or -(-found.memory_mb // cpus))
    assert all(limit is None or amount <= limit for amount, limit in zip(amounts, most, strict=True))
    able = [n for n in nodes if (n.gpus, n.cpus) >= (found.gpus_per_node, 0) and n.cpus >= cpus]
    assert sum(n.memory_mb >= found.memory_mb for n in able) >= found.num_nodes, "nodes that can hold it"


@given(nodes=NODES, limits=LIMITS)
def test_a_preparation_stays_within_the_limits(nodes: list[resources.jobs.Capacity], limits: policy.Limits):
    cluster = dataclasses.replace(partition(*nodes), limits=limits)
    found = resources.preparation(fields.parse(models.PrepareDataset, {}), (cluster,))
    by_cpus = limits.max_memory_per_cpu_mb and limits.max_memory_per_cpu_mb * found.cpus_per_task
    assert found.cpus_per_task <= (limits.max_cpus_per_node or 64)
    assert all(found.memory_mb <= limit for limit in (limits.max_memory_mb, by_cpus) if limit)


SHOWN = (
    "AllowGroups={groups} {accounts} AllowQos=ALL Hidden=YES MaxNodes=2 MaxCPUsPerNode=4 OverSubscribe=EXCLUSIVE "
    "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED"
)


def shown(groups: str = "ALL", accounts: str = "AllowAccounts=ALL") -> policy.Limits:
    fields_of = SHOWN.format(groups=groups, accounts=accounts).split()
    general = {"MaxMemPerCPU": "2000", "MaxArraySize": "10"}
    return policy.read(dict(word.split("=") for word in fields_of), general)


@pytest.mark.parametrize(
    ("limits", "given", "line"),
    [
        (shown(), {"nodes": 3}, "nodes: 3 exceeds the limit of 2 (MaxNodes)"),
        (shown(), {"cpus_per_task": 5}, "cpus-per-task: 5 exceeds the limit of 4 (MaxCPUsPerNode)"),
        (shown(), {"memory": "9000M"}, "memory: 9000M exceeds the limit of 8000M (MaxMemPerCPU, for 4 cores)"),
        (shown(), {"mem_per_cpu": "3G"}, "mem-per-cpu: 3072M exceeds the limit of 2000M (MaxMemPerCPU)"),
        (shown(), {"mem_per_cpu": "1G", "memory": "4G"}, "mem-per-cpu: omit one of memory and mem-per-cpu"),
        (
            shown("nobodys-group"),
            {},
            "partition: partition main does not take your groups: AllowGroups=nobodys-group",
        ),
        (
            shown(accounts="AllowAccounts=chem,bio"),
            {"account": "physics"},
            "account: partition main does not take physics: AllowAccounts=chem,bio",
        ),
        (
            shown(accounts="DenyAccounts=physics"),
            {"account": "Physics"},
            "account: partition main does not take Physics: DenyAccounts=physics",
        ),
    ],
)
def test_a_limit_is_named_with_its_value(limits: policy.Limits, given: dict[str, object], line: str):
    assert refusal(dataclasses.replace(partition(*map(node, "abc")), limits=limits), **given) == line


def test_an_array_is_no_larger_than_the_cluster_allows():
    cluster = (dataclasses.replace(partition(node()), limits=shown()),)
    resources.check_array("grid", 10, cluster)
    with pytest.raises(ParameterError, match=r"^grid: 11 exceeds the limit of 10 \(MaxArraySize\)$"):
        resources.check_array("grid", 11, cluster)


MIXED = [
    dataclasses.replace(node(f"n{n}", gpus=n), models=frozenset({model})) for n, model in ((1, "a100"), (2, "h100"))
]


def test_mixed_nodes_are_described():
    cluster = partition(*MIXED)
    assert refusal(cluster, nodes=2, gpus_per_node=2) == (
        "nodes: 2 requested, partition main has 2 usable, 1 of them with 2 GPUs"
    )
    params = fields.parse(models.SubmitDdp, {})
    idle, kinds = resources.remark(params, training(cluster), (cluster,))
    assert idle.startswith("n2 has 2 GPUs, 1 of them are used on each node")
    assert kinds.startswith(
        "GPUs of several models, a100 (such as n1) and h100 (such as n2): the slowest sets the pace"
    )
    assert not resources.remark(params, training(cluster, gpus_per_node=2), (partition(MIXED[1]),))
