"""Doctor's facts about the cluster, and parsers of their values."""

import dataclasses
import re

from ddp.doctor import node_checks
from ddp.run.untrusted import Json
from ddp.slurm import partition_list
from ddp.workspace import folders


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts that `gather` collected."""

    partition: partition_list.Partition
    asked: tuple[str, ...]  # the nodes to examine
    left_out: dict[str, str]  # node: why it cannot be examined
    reports: dict[str, Json]  # what ddp.doctor.probe returned on each node
    trouble: str  # srun's error output if some node returned no report
    config: dict[str, str]  # of scontrol show config
    manifests: tuple[folders.Manifest, ...]
    stragglers: tuple[tuple[str, str, str], ...] = ()  # of the user's runs: run, host and words
    free: tuple[tuple[str, int], ...] = ()  # folders of this account: path and bytes left
    checks: node_checks.Checks = dataclasses.field(
        default_factory=dict[str, node_checks.NodeCheck]
    )  # of idle nodes
    untrusted: str = ""  # the workspace's folder whose content others can replace, and what to type


def clock_offsets(facts: Facts) -> dict[str, float]:
    """Return the offset of each node's clock from the first node's, in seconds."""
    names = [name for name in facts.asked if name in facts.reports]
    if len(names) < 2:
        return {}
    peers = facts.reports[names[0]]["network"]["peers"]
    found = {
        name: float(peers[name]["clock_s"])
        for name in names[1:]
        if "clock_s" in peers.get(name, {})
    }
    return {names[0]: 0.0} | found


def capacity(facts: Facts, name: str) -> partition_list.Capacity:
    """Return the resources of a node that Slurm can allocate to a job."""
    nothing = partition_list.Capacity(name, 0, 0, 0, "", is_usable=False)
    return next((node for node in facts.partition.nodes if node.name == name), nothing)


def release(text: str) -> tuple[int, ...]:
    """Parse the year and month of a release of Slurm; an empty tuple for any other text."""
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        return ()
    return tuple(int(part) for part in found.groups())


def leading_number(text: str) -> int | None:
    """Parse the number at the beginning of a text like `30 sec`."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None


def mib(size_bytes: int | None) -> int:
    """Return a size in MiB, 0 if it is not known."""
    return (size_bytes or 0) >> 20
