"""A partition's limits: what is submitted is within each, or the option that exceeds it is named."""

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resource_requests import node, partition, refusal, training

from ddp.base import ParameterError
from ddp.options import fields, models
from ddp.slurm import policy
from ddp.submit import resources

MEMORY = st.sampled_from([1, 900, 8000, 512000])
NODE = st.builds(node, st.uuids().map(str), st.integers(1, 64), MEMORY, st.integers(0, 8))
LIMITS = st.builds(
    policy.Limits,
    max_nodes=st.none() | st.integers(1, 4),
    max_cpus_per_node=st.none() | st.integers(1, 64),
    max_memory_mb=st.none() | st.integers(300, 600000),
    max_memory_per_cpu_mb=st.none() | st.integers(50, 9000),
    is_exclusive=st.booleans(),
)
OPTIONS: dict[str, st.SearchStrategy[typing.Any]] = {
    "nodes": st.integers(1, 5),
    "gpus_per_node": st.integers(0, 8),
    "cpus_per_task": st.integers(1, 70),
    "memory": st.just("site") | st.integers(256, 600000).map(str),
    "mem_per_cpu": st.integers(50, 9000).map(str),
    "exclusive": st.booleans(),
}


@given(nodes=st.lists(NODE, min_size=1, max_size=4), limits=LIMITS, asked=st.fixed_dictionaries({}, optional=OPTIONS))
def test_a_request_is_within_every_limit_or_refused_by_the_option(
    nodes: list[resources.jobs.Capacity], limits: policy.Limits, asked: dict[str, object]
):
    cluster = dataclasses.replace(partition(*nodes), limits=limits)
    found = [resources.preparation(fields.parse(models.PrepareDataset, {}), (cluster,))]
    try:
        found.append(training(cluster, **asked))
    except ParameterError as e:
        assert e.name.replace("-", "_") in asked
    most = (limits.max_nodes, limits.max_cpus_per_node, limits.max_memory_mb, limits.max_memory_per_cpu_mb)
    for one in found:
        cpus, per_cpu = one.cpus_per_task, one.memory_per_cpu_mb or -(-one.memory_mb // one.cpus_per_task)
        amounts = (one.num_nodes, cpus, one.memory_mb, per_cpu)
        assert all(limit is None or amount <= limit for amount, limit in zip(amounts, most, strict=True))
        able = (n.gpus >= one.gpus_per_node and n.cpus >= cpus and n.memory_mb >= one.memory_mb for n in nodes)
        assert sum(able) >= one.num_nodes, "nodes that can hold it"


def shown(record: str = "") -> policy.Limits:
    """Read a partition as scontrol prints it, with the cluster's limits."""
    text = f"MaxNodes=2 MaxCPUsPerNode=4 MaxMemPerNode=UNLIMITED AllowAccounts=ALL {record}"
    return policy.read(dict(word.split("=") for word in text.split()), {"MaxMemPerCPU": "2000", "MaxArraySize": "10"})


@pytest.mark.parametrize(
    ("record", "given", "line"),
    [
        ("", {"nodes": 3}, "nodes: 3 exceeds the limit of 2 (MaxNodes)"),
        ("", {"memory": "9000"}, "memory: 9000M exceeds the limit of 8000M (MaxMemPerCPU, for 4 cores)"),
        ("", {"mem_per_cpu": "1G", "memory": "4G"}, "mem-per-cpu: omit one of memory and mem-per-cpu"),
        ("AllowGroups=x-y", {}, "partition: partition main does not take your groups: AllowGroups=x-y"),
        ("AllowQos=a,b", {"qos": "c"}, "qos: partition main does not take c: AllowQos=a,b"),
        ("DenyAccounts=me", {"account": "Me"}, "account: partition main does not take Me: DenyAccounts=me"),
    ],
)
def test_a_limit_is_named_with_its_value(record: str, given: dict[str, object], line: str):
    cluster = dataclasses.replace(partition(*map(node, "abc")), limits=shown(record))
    assert refusal(cluster, **given) == line
    with pytest.raises(ParameterError, match=r"^grid: 11 exceeds the limit of 10 \(MaxArraySize\)$"):
        resources.check_array("grid", 11, (cluster,))


def test_mixed_nodes_are_described():
    kinds = ((1, "a100"), (2, "h100"))
    mixed = [dataclasses.replace(node(f"n{count}", gpus=count), models=frozenset({kind})) for count, kind in kinds]
    line = "nodes: 2 requested, partition main has 2 usable, 1 of them with 2 GPUs"
    assert refusal(partition(*mixed), nodes=2, gpus_per_node=2) == line
    params = fields.parse(models.SubmitDdp, {})
    idle, models_differ = resources.remark(params, training(partition(*mixed)), (partition(*mixed),))
    assert idle.startswith("n2 has 2 GPUs, 1 of them are used on each node")
    assert models_differ.startswith("GPUs of several models, a100 (such as n1) and h100 (such as n2): the slowest sets")
