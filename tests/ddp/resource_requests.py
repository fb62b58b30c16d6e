"""Partitions and nodes, and a training job's request of them."""

import pytest

from ddp.options import fields, models
from ddp.problem import Problem
from ddp.slurm.partition_list import Capacity, Partition
from ddp.submit import resources


def node(
    name: str = "n0", cpus: int = 8, memory_mb: int = 16000, gpus: int = 0, *, usable: bool = True
) -> Capacity:
    return Capacity(name, cpus, memory_mb, gpus, "IDLE" if usable else "DOWN+DRAIN", usable)


def partition(
    *nodes: Capacity, name: str = "main", default: bool = True, **more: int | bool | None
) -> Partition:
    values = {"is_up": True, "max_time_s": None, "default_time_s": None, **more}
    return Partition(name=name, is_default=default, nodes=nodes, **values)  # pyright: ignore[reportArgumentType]


def training(*partitions: Partition, **given: object) -> resources.Request:
    params = {name.replace("_", "-"): value for name, value in given.items()}
    return resources.training(fields.parse(models.SubmitDdp, params), partitions)


def refusal(*partitions: Partition, **given: object) -> str:
    with pytest.raises(Problem) as caught:
        training(*partitions, **given)
    return str(caught.value)
