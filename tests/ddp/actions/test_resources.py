"""A job's request, from the parameters and from the cluster's resources."""

import dataclasses
import pathlib
import typing

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from resource_requests import node, partition, refusal, training

from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.slurm import partition_limits
from ddp.slurm.partition_list import Capacity
from ddp.submit import resources

CASES = yaml.safe_load(pathlib.Path(__file__).with_suffix(".yaml").read_text())


def test_without_parameters_all_usable_nodes_are_taken_whole():
    request = training(partition(node("n0"), node("n1"), node("n2", usable=False)))
    assert request == resources.Request("main", 2, 0, 8, 16000, None, 180)
    assert request.ranks_per_node == 1


def featured(name: str, *features: str, gpus: int = 0) -> Capacity:
    return dataclasses.replace(node(name, gpus=gpus), features=frozenset(features))


@pytest.mark.parametrize(
    ("constraint", "nodes"),
    [("a100", 2), ("a100&ib", 1), ("ib|a100", 3), ("h100", 1), ("(a100|h100)&!ib", 2)],
)
def test_a_constraint_says_which_nodes_count(constraint: str, nodes: int):
    cluster = partition(
        featured("n0", "a100", "ib"),
        featured("n1", "a100"),
        featured("n2", "ib"),
        featured("n3", "h100", gpus=8),
    )
    request = training(cluster, constraint=constraint, gpus_per_node=0)
    assert request.num_nodes == nodes


@pytest.fixture
def hostnames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp.slurm.jobs.hostnames", lambda text: tuple(text.split(",")))


@pytest.mark.usefixtures("hostnames")
@pytest.mark.parametrize(
    ("given", "ranks_have"),
    [({}, 2), ({"nodes": 1}, 1), ({"nodelist": "n0,n1"}, 1), ({"nodes": 2, "nodelist": "n0"}, 2)],
)
def test_spare_nodes_are_beside_those_of_the_ranks(given: dict[str, object], ranks_have: int):
    request = training(partition(node("n0"), node("n1"), node("n2")), spare_nodes=1, **given)
    assert (request.num_nodes, request.spare_nodes) == (ranks_have, 1)


def test_too_many_spare_nodes_are_named():
    cluster = partition(node("n0"), node("n1"))
    assert refusal(cluster, spare_nodes=2).startswith(
        "spare-nodes: 2 requested, and 2 nodes can be used"
    )
    assert refusal(cluster, spare_nodes=1, nodes=2).startswith(
        "nodes: 3 requested, partition main has 2 usable"
    )


FOUR = partition(node("n0"), node("n1", gpus=8), node("n2", cpus=4), node("n3", usable=False))


@pytest.mark.usefixtures("hostnames")
def test_nodes_by_name():
    request = training(FOUR, nodelist="n0,n2")
    assert (request.num_nodes, request.gpus_per_node, request.cpus_per_task) == (2, 0, 4), (
        "what these two have"
    )
    assert (request.nodelist, request.exclude) == (("n0", "n2"), ())
    request = training(FOUR, nodelist="n0", nodes=2, gpus_per_node=0)
    assert (request.num_nodes, request.cpus_per_task) == (2, 4), "Slurm chooses the second one"
    request = training(FOUR, exclude="n1,n2,n2")
    assert (request.num_nodes, request.cpus_per_task, request.exclude) == (1, 8, ("n1", "n2"))


@pytest.mark.usefixtures("hostnames")
@pytest.mark.parametrize(("given", "line"), CASES["nodes_that_cannot_be_had_are_named"])
def test_nodes_that_cannot_be_had_are_named(given: dict[str, object], line: str):
    other = partition(node("m0"), name="other", default=False)
    if given.get("exclude") == "n2":
        given = {**given, "gpus_per_node": 0}
    assert refusal(FOUR, other, **given) == line


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ("typo", "no node of the cluster has typo"),
        ("ib|[typo|a100]", "no node of the cluster has typo"),
        ("h100&ib", "no usable node of partition main has h100&ib"),
    ],
)
def test_a_constraint_that_no_node_meets_names_the_features(constraint: str, message: str):
    cluster = partition(featured("n0", "a100", "ib"), featured("n1", "h100"))
    line = refusal(cluster, constraint=constraint)
    assert line == f"constraint: {message}; its features are: a100, h100, ib"


@pytest.mark.parametrize(
    ("constraint", "nodes"),
    [
        ("a100&ib|h100", 1),
        ("[ib|a100]", 1),
        ("ib*2", 2),
        ("[(a100&ib)*1&h100*2]", 3),
        ("a100&[ib|h100]", 1),
    ],
)
def test_words_that_only_slurm_evaluates_ask_for_as_many_nodes_as_sbatch(
    constraint: str, nodes: int
):
    cluster = partition(*(featured(f"n{n}", "a100", "ib", "h100") for n in range(5)))
    params = fields.parse(models.SubmitDdp, {"constraint": constraint})
    request = resources.training(params, (cluster,))
    assert request.num_nodes == nodes
    (remark,) = resources.remark(params, request, (cluster,))
    assert remark == (
        f"only Slurm evaluates constraint {constraint}, so the job asks for as many nodes as sbatch, "
        f"{nodes}; nodes asks for more"
    )
    assert training(cluster, constraint=constraint, nodes=4).num_nodes == 4


def typed(name: str, *types: tuple[str, int]) -> Capacity:
    total = sum(number for _, number in types)
    return dataclasses.replace(node(name, cpus=24, gpus=total), gpu_types=types)


CARDS = partition(typed("n0", ("a100", 4), ("a100_3g.20gb", 8)), typed("n1", ("tesla_t4", 2)))


def test_more_ranks_than_gpus_are_refused_unless_they_share_them():
    line = "ranks-per-node: 16 ranks take a GPU each, and a node has at most 12; to share them"
    with pytest.raises(ParameterError, match=line):
        training(CARDS, ranks_per_node=16)
    request = training(CARDS, ranks_per_node=16, gpus_per_node="2")
    assert (request.ranks_per_node, request.gpus_per_node) == (16, 2)


@pytest.mark.parametrize(
    ("asked", "ranks", "nodes"),
    [
        ("a100:2", 2, 1),
        ("tesla_t4", 1, 1),
        ("a100:1,a100_3g.20gb:3", 4, 1),
        ("2", 2, 2),
        ("0", 1, 2),
        ("tesla_t4:9,tesla_t4:2", 2, 1),
    ],
)
def test_gpus_by_their_type(asked: str, ranks: int, nodes: int):
    request = training(CARDS, gpus_per_node=asked)
    assert (request.ranks_per_node, request.num_nodes) == (ranks, nodes)
    assert request.gpu_types == (asked if "a" in asked else "")
    if asked != "0":
        gres = ",".join(f"gpu:{one}" for one in asked.split(","))
        assert training(CARDS, sbatch=f"--gres={gres},nvme:1") == request


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"gpus_per_node": "h100:2"},
            "h100:2 requested, nodes of partition main have a100:4, a100_3g.20gb:8, tesla_t4:2",
        ),
        ({"gpus_per_node": "a:b:2"}, "'a:b:2' is not allowed; a number, or TYPE:NUMBER"),
        ({"gpus_per_node": "99"}, "'99' is not allowed; a number from 0 to 64"),
        (
            {"gpus_per_node": "2", "sbatch": "--gres=gpu:a100:2"},
            "--gres asks for GPUs, too (a100:2); omit one of them",
        ),
    ],
)
def test_gpus_that_no_node_has(given: dict[str, object], line: str):
    assert refusal(CARDS, **given) == f"gpus-per-node: {line}"


def test_several_partitions_get_figures_that_fit_each():
    big = partition(node("n0", cpus=16, gpus=4), node("n1", cpus=16, gpus=4), name="gpu")
    small = partition(node("n2", memory_mb=9000, gpus=2), name="gpu_preempt", max_time_s=3600)
    request = training(big, small, partition="gpu,gpu_preempt")
    assert request.partition == "gpu,gpu_preempt"
    assert (request.num_nodes, request.gpus_per_node, request.cpus_per_task) == (1, 2, 8)
    assert (request.memory_mb, request.time_limit, request.lead_s) == (8000, None, 180)
    one_fits = training(big, small, partition="gpu,gpu_preempt", nodes=2, time_limit="2:00:00")
    assert (one_fits.num_nodes, one_fits.gpus_per_node) == (2, 4)
    params = fields.parse(models.PrepareDataset, {"partition": "gpu,gpu_preempt"})
    half = resources.preparation(params, (big, small))
    assert (half.partition, half.cpus_per_task, half.memory_mb) == ("gpu,gpu_preempt", 4, 4500)
    line = "partition: no partition 'nope'; there are: gpu, gpu_preempt"
    assert refusal(big, small, partition="gpu,nope") == line
    line = "nodes: 3 requested, partition gpu has 2 usable"
    assert refusal(big, small, partition="gpu,gpu_preempt", nodes=3) == line


def test_exclusive_takes_nodes_whole():
    cluster = partition(node(cpus=16, memory_mb=64000, gpus=8))
    shared, alone = (
        training(cluster, gpus_per_node=2),
        training(cluster, gpus_per_node=2, exclusive=True),
    )
    assert (shared.cpus_per_task, shared.memory_mb) == (4, 16000)
    assert (alone.cpus_per_task, alone.memory_mb) == (16, 64000)
    assert training(cluster, exclusive=True, memory="8G", cpus_per_task=3).memory_mb == 8192


G8, G4 = node("g0", gpus=8), node("g1", gpus=4)
BIG = node("b0", cpus=64, memory_mb=512000, gpus=8)


@pytest.mark.parametrize(
    ("nodes", "given", "wanted"),
    [
        pytest.param(
            (node("n0"), node("n1", cpus=4, memory_mb=8000)),
            {},
            (2, 0, 4, 8000),
            id="the smallest decides",
        ),
        pytest.param(
            (node("c0"), G8, G4),
            {},
            (2, 4, 4, 8000),
            id="nodes with GPUs, half of the cores of the larger",
        ),
        pytest.param(
            (node("c0"), G8), {"gpus_per_node": 0}, (2, 0, 8, 16000), id="no GPUs: all nodes"
        ),
        pytest.param((BIG,), {"gpus_per_node": 2}, (1, 2, 16, 128000), id="a quarter of the GPUs"),
        pytest.param((node(),), {"cpus_per_task": 2}, (1, 0, 2, 4000), id="a quarter of the cores"),
        pytest.param(
            (node(cpus=64),), {"cpus_per_task": 1}, (1, 0, 1, 1024), id="enough for an interpreter"
        ),
        pytest.param(
            (node(cpus=64, memory_mb=900),),
            {"cpus_per_task": 1},
            (1, 0, 1, 900),
            id="all that there is",
        ),
    ],
)
def test_the_share_of_a_node(
    nodes: tuple[Capacity, ...], given: dict[str, object], wanted: tuple[int, int, int, int]
):
    found = training(partition(*nodes), **given)
    assert (found.num_nodes, found.gpus_per_node, found.cpus_per_task, found.memory_mb) == wanted


def test_the_partitions_own_time_limit_stays_unspoken_but_decides_about_the_warning():
    request = training(partition(node(), default_time_s=300, max_time_s=86400))
    assert (request.time_limit, request.lead_s) == (None, 60)
    assert training(partition(node(), max_time_s=600)).lead_s == 120


@pytest.mark.parametrize(
    ("given", "line"), CASES["requests_beyond_the_cluster_are_refused_by_name"]
)
def test_requests_beyond_the_cluster_are_refused_by_name(given: dict[str, object], line: str):
    main = partition(
        node("n0", gpus=1), node("n1", gpus=1), node("n2", usable=False), max_time_s=3600
    )
    assert refusal(main, partition(node("x"), name="spare", default=False), **given) == line


def test_a_partition_that_takes_no_jobs_is_refused():
    assert (
        refusal(partition(node(), is_up=False))
        == "partition: main is not up; an administrator types: scontrol update partitionname=main state=up"
    )
    dead = partition(*(node(f"n{i}", usable=False) for i in range(6)))
    assert refusal(dead) == (
        "partition: main has no usable node (n0 is down+drain, n1 is down+drain, n2 is down+drain, n3 is down+drain, ...); "
        "see: sinfo -R"
    )
    assert refusal() == "Slurm has no partition yet; add one to slurm.conf"


def test_without_a_default_partition_the_only_one_is_taken_or_one_must_be_named():
    only = partition(node(), default=False)
    assert training(only).partition == "main"
    other = partition(node(), name="other", default=False)
    line = "partition: required, since Slurm has no default partition; there are: main, other"
    assert refusal(only, other) == line


def test_preparing_a_dataset_takes_half_of_the_largest_node():
    params = fields.parse(models.PrepareDataset, {})
    cluster = (partition(node("s", cpus=2, memory_mb=2000), node("b", cpus=16, memory_mb=64000)),)
    request = resources.preparation(params, cluster)
    assert request == resources.Request("main", 1, 0, 8, 32000, None, 180)
    tiny = resources.preparation(params, (partition(node("t", cpus=1, memory_mb=1500)),))
    assert (tiny.cpus_per_task, tiny.memory_mb) == (1, 1500)


MEMORY = st.sampled_from([1, 900, 8000, 512000])
NODE = st.builds(node, st.uuids().map(str), st.integers(1, 64), MEMORY, st.integers(0, 8))
LIMITS = st.builds(
    partition_limits.Limits,
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


@given(
    nodes=st.lists(NODE, min_size=1, max_size=4),
    limits=LIMITS,
    asked=st.fixed_dictionaries({}, optional=OPTIONS),
)
def test_a_request_is_within_every_limit_or_refused_by_the_option(
    nodes: list[Capacity], limits: partition_limits.Limits, asked: dict[str, object]
):
    cluster = dataclasses.replace(partition(*nodes), limits=limits)
    found = [resources.preparation(fields.parse(models.PrepareDataset, {}), (cluster,))]
    try:
        found.append(training(cluster, **asked))
    except ParameterError as e:
        assert e.name.replace("-", "_") in asked
    most = (
        limits.max_nodes,
        limits.max_cpus_per_node,
        limits.max_memory_mb,
        limits.max_memory_per_cpu_mb,
    )
    for one in found:
        cpus, per_cpu = (
            one.cpus_per_task,
            one.memory_per_cpu_mb or -(-one.memory_mb // one.cpus_per_task),
        )
        amounts = (one.num_nodes, cpus, one.memory_mb, per_cpu)
        assert all(
            limit is None or amount <= limit for amount, limit in zip(amounts, most, strict=True)
        )
        able = (
            n.gpus >= one.gpus_per_node and n.cpus >= cpus and n.memory_mb >= one.memory_mb
            for n in nodes
        )
        assert sum(able) >= one.num_nodes, "nodes that can hold it"


def shown(record: str = "", enforced: str = "associations,limits") -> partition_limits.Limits:
    """Read a partition as scontrol prints it, with the cluster's limits."""
    text = f"MaxNodes=2 MaxCPUsPerNode=4 MaxMemPerNode=UNLIMITED AllowAccounts=ALL {record}"
    cluster = {"MaxMemPerCPU": "2000", "MaxArraySize": "10", "AccountingStorageEnforce": enforced}
    return partition_limits.read(dict(word.split("=") for word in text.split()), cluster)


@pytest.mark.parametrize(("record", "given", "line"), CASES["a_limit_is_named_with_its_value"])
def test_a_limit_is_named_with_its_value(record: str, given: dict[str, object], line: str):
    cluster = dataclasses.replace(partition(*map(node, "abc")), limits=shown(record))
    assert refusal(cluster, **given) == line
    assert not shown("DenyAccounts=me", "none").lists, "Slurm compares no accounts then"
    assert partition_limits.read({}, {"MaxArraySize": "0"}).max_array_size == 0, (
        "arrays are disabled"
    )
    with pytest.raises(
        ParameterError, match=r"^grid: 11 exceeds the limit of 10 \(MaxArraySize\)$"
    ):
        resources.check_array("grid", 11, (cluster,))


def test_mixed_nodes_are_described():
    kinds = ((1, "a100"), (2, "h100"))
    mixed = [
        dataclasses.replace(node(f"n{count}", gpus=count), gpu_types=((kind, count),))
        for count, kind in kinds
    ]
    line = "nodes: 2 requested, partition main has 2 usable, 1 of them with 2 GPUs"
    assert refusal(partition(*mixed), nodes=2, gpus_per_node=2) == line
    params = fields.parse(models.SubmitDdp, {})
    idle, models_differ = resources.remark(
        params, training(partition(*mixed)), (partition(*mixed),)
    )
    assert idle.startswith("n2 has 2 GPUs, 1 of them are used on each node")
    assert models_differ.startswith(
        "GPUs of several models, a100 (such as n1) and h100 (such as n2): the slowest sets"
    )
    both = dataclasses.replace(mixed[1], gpu_types=(("3090", 1), ("4090", 1)))
    line = resources.remark(params, training(partition(both, both)), (partition(both, both),))[-1]
    assert line.startswith(
        "GPUs of several models, 3090 (such as n2) and 4090 (such as n2): the slowest"
    )
