"""The option --constraint of sbatch, which ddp evaluates itself unless only Slurm can."""

import collections.abc
import dataclasses
import re

_TOKEN = re.compile(r"[&|,()!]|[^&|,()!]+")
_WORD = re.compile(r"[^&|,()\[\]!*]+")
_COUNT = re.compile(r"\*(\d+)")
_SET = re.compile(r"[\[\]*]")  # the nodes are chosen together, not one by one

Features = collections.abc.Set[str]  # of a node
_Rule = collections.abc.Callable[[Features], bool]


class _UnclearError(ValueError):
    """Only Slurm evaluates this text."""


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A value of --constraint, such as a100&ib or [rack1|rack2]*2."""

    text: str

    @property
    def words(self) -> tuple[str, ...]:
        """The names of features in it."""
        without_counts = _COUNT.sub("", self.text)
        return tuple(dict.fromkeys(_WORD.findall(without_counts)))

    @property
    def is_clear(self) -> bool:
        """Whether each node can be judged on its own, without Slurm."""
        return self._rule() is not None

    @property
    def num_nodes(self) -> int:
        """The nodes that it counts, such as 3 of a*2&b*1; at least one."""
        counts = [int(count) for count in _COUNT.findall(self.text)]
        return max(1, sum(counts))

    def allows(self, features: Features) -> bool:
        """Return whether a node may serve; of an unclear text, whether it is not ruled out."""
        rule = self._rule()
        if rule is not None:
            return rule(features)
        if "!" in self.text or "*" in self.text:
            return True
        return not features.isdisjoint(self.words)

    def _rule(self) -> _Rule | None:
        if _SET.search(self.text):
            return None
        tokens = _TOKEN.findall(self.text)
        try:
            rule = _parse(tokens)
        except _UnclearError:
            return None
        return None if tokens else rule


def _parse(tokens: list[str]) -> _Rule:
    """Take a list of terms with one kind of operator. Raises _UnclearError."""
    rules = [_parse_term(tokens)]
    operators: set[str] = set()
    while tokens and tokens[0] in "&,|":
        operators.add(tokens.pop(0).replace(",", "&"))
        rules.append(_parse_term(tokens))
    if len(operators) > 1:
        raise _UnclearError  # the order of & and | differs among releases
    combine = any if operators == {"|"} else all
    return lambda features: combine(rule(features) for rule in rules)


def _parse_term(tokens: list[str]) -> _Rule:
    """Take a feature's name, a list in parentheses, or one of them behind !."""
    if not tokens:
        raise _UnclearError
    term = tokens.pop(0)
    if term == "!":
        rule = _parse_term(tokens)
        return lambda features: not rule(features)
    if term == "(":
        rule = _parse(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise _UnclearError
        return rule
    if term in "&|,)":
        raise _UnclearError
    return lambda features: term in features
