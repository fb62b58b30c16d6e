"""The record of the daily check of idle nodes: when each was checked, and its failures since."""

import collections.abc
import dataclasses
import json
import pathlib
import time
import typing

from ddp.host import files
from ddp.run import untrusted
from ddp.workspace.folders import Workspace

FILE = "node-checks.json"
DAY_S = 86400
MOST_FAILURES = 2  # after which a node is unfit


@dataclasses.dataclass(frozen=True)
class NodeCheck:
    """The last checks of a node."""

    checked: float = 0.0  # in seconds since 1970
    failures: tuple[str, ...] = ()  # since it passed last
    partners: tuple[str, ...] = ()  # that it failed with

    @property
    def is_unfit(self) -> bool:
        """Whether it failed so often that no job should run there."""
        return len(self.failures) >= MOST_FAILURES


Checks = dict[str, NodeCheck]


def read(workspace: Workspace) -> Checks:
    """Return the checks of all nodes."""
    path = workspace.baselines / FILE
    found: Checks = {}
    for name, about in workspace.do(untrusted.json_object, path=path).items():
        record = untrusted.as_object(about)
        found[name] = NodeCheck(
            checked=untrusted.real(record.get("checked")) or 0.0,
            failures=_texts(record.get("failures")),
            partners=_texts(record.get("partners")),
        )
    return found


def write(workspace: Workspace, checks: Checks) -> None:
    """Store the checks of all nodes."""
    records = {name: dataclasses.asdict(one) for name, one in sorted(checks.items())}
    path = pathlib.Path(workspace.baselines, FILE)
    workspace.do(files.replace, path=path, content=json.dumps(records, indent=1) + "\n")


def choose(
    idle: collections.abc.Sequence[str], checks: Checks, now: float
) -> tuple[str, str | None] | None:
    """Choose an idle node to check, and a neighbour to test it with; None if none is due.

    Nodes that failed come first. A node that failed together with a neighbour is checked with
    another one, since either of the two may be at fault.
    """
    due = [name for name in idle if _is_due(checks.get(name, NodeCheck()), now)]
    for name in sorted(due, key=lambda name: _turn(checks.get(name, NodeCheck()))):
        known = checks.get(name, NodeCheck())
        partner = _partner(name, idle, checks)
        if partner is not None or not known.partners:
            return name, partner
    return None


def passed(checks: Checks, name: str) -> Checks:
    """Return the checks after a node passed."""
    return {**checks, name: NodeCheck(checked=time.time())}


def failed(checks: Checks, name: str, why: str, partner: str = "") -> Checks:
    """Return the checks after a node failed, with its partner if the test needed two nodes."""
    before = checks.get(name, NodeCheck())
    partners = (*before.partners, partner) if partner else before.partners
    failures = (*before.failures, why)[-MOST_FAILURES:]
    return {**checks, name: NodeCheck(time.time(), failures, partners)}


def _is_due(known: NodeCheck, now: float) -> bool:
    return bool(known.failures) or now - known.checked >= DAY_S


def _turn(known: NodeCheck) -> tuple[bool, float]:
    return (not known.failures, known.checked)


def _partner(name: str, idle: collections.abc.Sequence[str], checks: Checks) -> str | None:
    """Return a neighbour without a failure, one that has passed before if there is one."""
    used = checks.get(name, NodeCheck()).partners
    found: list[str] = []
    for other in idle:
        if other != name and other not in used and not checks.get(other, NodeCheck()).failures:
            found.append(other)
    return min(found, key=lambda other: other not in checks, default=None)


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    texts = typing.cast("list[object]", value)
    return tuple(untrusted.printable(str(one), 200) for one in texts)
