"""The round trips between nodes, as doctor and `ddp bench` measured them; near nodes are a site."""

from ddp.problem import Problem
from ddp.workspace import operations
from ddp.workspace.folders import Workspace

FILE = "round-trips.json"
SLOW_MS = 5.0  # above it no fabric joins two nodes: within a building one takes below 1 ms

Trips = dict[str, dict[str, float]]  # in ms, from a node to others


def store(workspace: Workspace, trips: Trips) -> None:
    """Store measured round trips in place of the same nodes' earlier ones."""
    if trips:
        path = str(workspace.baselines / FILE)
        workspace.do(operations.store_round_trips, path=path, trips=trips)


def near_nodes(workspace: Workspace) -> str:
    """Return the groups of near nodes such as `a,b c,d`; "" unless there are several."""
    found = sites(_read(workspace))
    if len(found) < 2:
        return ""
    return " ".join(",".join(group) for group in found)


def _read(workspace: Workspace) -> Trips:
    """Read the round trips of this user or, without any, of the trainer's account."""
    for folder in workspace.folders:
        path = str(folder / "baselines" / FILE)
        try:
            trips: Trips = workspace.do(operations.read_round_trips, path=path)
        except Problem:  # without them each node is a site
            continue
        if trips:
            return trips
    return {}


def sites(trips: Trips) -> list[list[str]]:
    """Return the nodes in groups: two nodes with a short round trip are in the same one."""
    group_of: dict[str, set[str]] = {}
    for one, others in sorted(trips.items()):
        group_of.setdefault(one, {one})
        for other, trip_ms in others.items():
            group_of.setdefault(other, {other})
            if trip_ms <= SLOW_MS:
                joined = group_of[one] | group_of[other]
                group_of.update(dict.fromkeys(joined, joined))

    found: list[list[str]] = []
    for one in sorted(group_of):
        group = sorted(group_of[one])
        if group[0] == one:
            found.append(group)
    return found
