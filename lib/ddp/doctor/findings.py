"""A finding of doctor: a rule of rules.toml with the values of one subject."""

import collections.abc
import dataclasses
import pathlib
import typing

from ddp.problem import Command, Step
from ddp.settings import Settings
from slurm_ddp import backports

Level = typing.Literal["error", "warning", "note"]
ORDER: tuple[Level, ...] = ("error", "warning", "note")
RULES: dict[str, dict[str, str]] = backports.read_toml(
    pathlib.Path(__file__).with_name("rules.toml")
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem, or a note."""

    level: Level  # error: a run would break; warning: it may suffer; note: good to know
    where: str  # a node's name, several, or a subject such as slurm or workspace
    text: str
    remedy: str  # what to type or do

    def __str__(self) -> str:
        return f"{self.level.upper()} {self.where}: {self.text}\n    -> {self.remedy}"


class Findings:
    """The findings so far. `add` takes a rule, the subject, and the values of its texts."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: list[Finding] = []
        self._values: dict[str, object] = {
            "workspace": settings.workspace.path,
            "cache": settings.workspace.node_cache,
            "disk": settings.workspace.node_cache.parent,
            "mlflow": settings.mlflow_uri,
            "user": settings.workspace.user,
            "own_uid": settings.workspace.uid,
            "uid": settings.workspace.uid,
            "install": settings.render(Command("env install")),
            "submit": settings.render(Command("submit")),
            "resume": settings.render(Command("resume")),
            "prune": settings.render(Command("prune")),
        }

    def add(self, rule: str, where: str, level: Level | None = None, **values: object) -> None:
        """Add a finding. Raises KeyError: a text has a value that is not given."""
        about = RULES[rule]
        known = {**self._values, "where": where, **values, "line": about.get("line", "")}
        text = about["text"].format_map(known)
        remedy = about["remedy"].format_map(known)
        if "step" in about:
            texts = {name: str(value) for name, value in known.items()}
            remedy = self._settings.render(Step(about["step"], remedy, texts))
        chosen = level or typing.cast(Level, about["level"])
        self._found.append(Finding(chosen, about.get("where", where), text, remedy))

    def sorted(self) -> tuple[Finding, ...]:
        """Return the findings, errors first; those that differ only in the node are one."""
        groups: dict[tuple[Level, str, str], list[str]] = {}
        for one in self._found:
            groups.setdefault((one.level, one.text, one.remedy), []).append(one.where)
        merged: list[Finding] = []
        for (level, text, remedy), where in groups.items():
            merged.append(Finding(level, ", ".join(dict.fromkeys(where)), text, remedy))
        return tuple(sorted(merged, key=lambda one: ORDER.index(one.level)))

    def compare(self, rule: str, values: collections.abc.Mapping[str, object]) -> None:
        """Add a rule's finding if the nodes' values differ; None and "" do not count."""
        groups: dict[str, list[str]] = {}
        for name, value in sorted(values.items()):
            if value not in (None, ""):
                groups.setdefault(str(value), []).append(name)
        if len(groups) > 1:
            spelled = [f"{value} on {first_few(names, 4)}" for value, names in groups.items()]
            self.add(rule, "nodes", groups="; ".join(spelled))


def first_few(names: collections.abc.Sequence[str], count: int = 6) -> str:
    """Join the first names, for a line that must stay short."""
    return f"{', '.join(names[:count])}{', ...' if len(names) > count else ''}"
