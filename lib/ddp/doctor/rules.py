"""A rule of doctor: when it applies, how bad that is, the text of its finding, and the remedy."""

import collections.abc
import dataclasses
import types
import typing

from ddp.doctor.node_facts import Facts, Finding, Json, Level, grouped, spelled

Values = types.SimpleNamespace  # the values that a table's predicates and texts use; `where` is always one of them


@dataclasses.dataclass(frozen=True)
class Rule:
    """A row of a table. `text`, `remedy` and `where` are format strings over the values."""

    level: Level | collections.abc.Callable[[Values], Level]
    applies: collections.abc.Callable[[Values], object]
    text: str
    remedy: str
    where: str = "{where}"


Table = tuple[Rule | tuple[Rule, ...], ...]  # of rules in a tuple of their own only the first that applies counts


def evaluate(table: Table, values: Values) -> list[Finding]:
    """Apply a table's rules to the values of one subject: a node, one of its peers or environments, or the cluster."""
    found: list[Finding] = []
    for entry in table:
        rules = entry if isinstance(entry, tuple) else (entry,)
        if rule := next((rule for rule in rules if rule.applies(values)), None):
            where, text, remedy = (words.format_map(vars(values)) for words in (rule.where, rule.text, rule.remedy))
            level = rule.level(values) if callable(rule.level) else rule.level
            found.append(Finding(level, where, text, remedy))
    return found


@dataclasses.dataclass(frozen=True)
class Alike:
    """A value that must be the same on all nodes. `text` and `remedy` are format strings over `groups`."""

    level: Level
    value: collections.abc.Callable[[Facts, str, Json], object]  # of a node's report; None: the node does not count
    text: str
    remedy: str = "bring the nodes to the same release"
    applies: collections.abc.Callable[[collections.abc.Collection[str]], bool] = lambda values: len(values) > 1


def compare(table: collections.abc.Iterable[Alike], facts: Facts) -> list[Finding]:
    """Return a finding for each value that differs between the nodes that returned a report."""
    found: list[Finding] = []
    for row in table:
        values = {name: row.value(facts, name, about) for name, about in facts.reports.items()}
        groups = grouped({name: str(value) for name, value in values.items() if value is not None})
        if len(groups) > 1 and row.applies(groups):
            found.append(Finding(row.level, "nodes", row.text.format(groups=spelled(groups)), row.remedy))
    return found


def mib(size_bytes: typing.Any) -> int:
    """Return a size in MiB, 0 where it is not known."""
    return int(size_bytes or 0) >> 20
