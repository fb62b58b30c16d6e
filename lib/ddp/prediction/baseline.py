"""The cluster's baseline: the bandwidth of collectives, as `ddp bench` measured it."""

import itertools
import math
import typing

from ddp.workspace import operations
from ddp.workspace.folders import Workspace

Json = dict[str, typing.Any]
FILE = "collectives.json"
_ABOUT = ("backend", "nodes", "world_size", "iface", "torch", "created")


def read(workspace: Workspace) -> list[Json]:
    """Read the entries of this user or, without any, of the trainer's account."""
    for folder in workspace.folders:
        path = str(folder / "baselines" / FILE)
        entries = workspace.do(operations.read_baseline, path=path)
        if entries:
            return entries
    return []


def entries_of(measured: Json, run: str) -> list[Json]:
    """Turn a measurement into the entries of a baseline, one for each collective."""
    about = {name: measured[name] for name in _ABOUT}
    found: list[Json] = []
    for one in measured["collectives"]:
        entry = {
            **about,
            "collective": one["collective"],
            "run": run,
            "average_busbw": one["average_bus_bandwidth"]["bandwidth"],
            "points": [_point(row) for row in one["results"]],
        }
        found.append(entry)
    return found


def _point(row: Json) -> Json:
    figures = row["in_place"] or row["out_of_place"]  # DDP reduces in place
    return {
        "bytes": row["size"],
        "time_us": figures["time"],
        "algbw": figures["alg_bw"],
        "busbw": figures["bus_bw"],
    }


def nearest(entries: list[Json], num_nodes: int, world: int, *, on_gpu: bool) -> Json | None:
    """Choose the all_reduce whose job was most like the planned one.

    busbw hardly depends on the number of ranks, but very much on whether a network lies between
    them.
    """
    backend = "nccl" if on_gpu else "gloo"
    fitting: list[Json] = []
    for one in entries:
        is_same = (one["collective"], one["backend"]) == ("all_reduce", backend)
        if is_same and (one["nodes"] > 1) == (num_nodes > 1):
            fitting.append(one)

    def distance(one: Json) -> tuple[float, int]:
        return abs(math.log(one["world_size"] / world)), abs(one["nodes"] - num_nodes)

    return min(fitting, key=distance, default=None)


def reduce_seconds(size: int, world: int, points: list[Json]) -> float:
    """Return the seconds of a ring all-reduce of `size` bytes over `world` ranks.

    It moves 2 (n - 1) / n of the bytes over each link (nccl-tests, doc/PERFORMANCE.md).
    """
    return 2 * (world - 1) / world * size / (busbw(size, points) * 1e9)


def busbw(size: int, points: list[Json]) -> float:
    """Interpolate the bus bandwidth in GB/s at a size, linearly in the logarithms of both."""
    known = sorted((point["bytes"], point["busbw"]) for point in points if point["busbw"] > 0)
    smallest, slowest = known[0]
    if size <= smallest:
        return slowest * size / smallest  # latency dominates: the time stays the same
    for (low, slow), (high, fast) in itertools.pairwise(known):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return slow * (fast / slow) ** share
    return known[-1][1]
