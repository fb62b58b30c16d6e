"""The mutants of a module: mutmut's operators, and three of ours; what the rules leave out is in modules.toml."""

import collections.abc
import dataclasses
import re
import typing

import libcst as cst
from libcst import metadata
from mutmut.mutation.file_mutation import deep_replace
from mutmut.mutation.mutators import mutation_operators, operator_string

# How long something takes at most; zip's assertion; what a program prints of itself, and when
_UNMUTATED = re.compile(r"(.*_)?(timeout|deadline|poll|interval)|.*_s|strict|prog|description|help|flush")
_LOGS = {"logger", "_log", "_log_error", "log", "logging"}
Operator = collections.abc.Callable[[typing.Any], collections.abc.Iterable[cst.CSTNode]]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One changed copy of a module."""

    function: str
    line: int
    removed: str
    added: str
    code: str
    lines: frozenset[int]  # of the statement; a test that runs none of them cannot notice
    is_default: bool = False  # of a parameter, which no test runs by itself


def mutants(source: str) -> list[Mutant]:
    """Return all of them, each different."""
    wrapper = metadata.MetadataWrapper(cst.parse_module(source))
    visitor = _Visitor()
    wrapper.visit(visitor)
    before = source.splitlines()
    found: dict[str, Mutant] = {}
    for function, statement, node, mutated in visitor.found:
        code = typing.cast(cst.Module, deep_replace(wrapper.module, node, mutated)).code
        if code == source or code in found:
            continue
        after = code.splitlines()
        first = next(i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
        rest = next(
            i
            for i, (one, other) in enumerate(zip(reversed(before[first:]), reversed(after[first:]), strict=False))
            if one != other or i == min(len(before), len(after)) - first - 1
        )
        found[code] = Mutant(
            function,
            first + 1,
            "\n".join(line.strip() for line in before[first : len(before) - rest]),
            "\n".join(line.strip() for line in after[first : len(after) - rest]),
            code,
            frozenset(range(statement[0], statement[1] + 1)),
            is_default=visitor.defaults.get(id(node), False),
        )
    return list(found.values())


def _guard(node: cst.If | cst.CompIf) -> collections.abc.Iterable[cst.CSTNode]:
    """Let a condition hold always, or never."""
    for value in ("True", "False") if isinstance(node, cst.If) else ("True",):
        yield node.with_changes(test=cst.Name(value, lpar=node.test.lpar, rpar=node.test.rpar))


def _call(node: cst.Expr) -> collections.abc.Iterable[cst.CSTNode]:
    """Leave out a call whose result nobody uses."""
    if isinstance(node.value, cst.Call):
        yield cst.Pass()


def _word(node: cst.SimpleString) -> collections.abc.Iterable[cst.CSTNode]:
    """Change a string without blanks: a key, a state, an option. One with blanks is a text."""
    if " " not in node.value:
        yield from list(operator_string(node))[:1]


_OPERATORS: list[tuple[type, Operator]] = [
    *((kind, operator) for kind, operator in mutation_operators if kind is not cst.BaseString),
    (cst.If, _guard),
    (cst.CompIf, _guard),
    (cst.Expr, _call),
    (cst.SimpleString, _word),
]


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (metadata.PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, int], cst.CSTNode, cst.CSTNode]] = []
        self.defaults: dict[int, bool] = {}
        self._functions: list[tuple[str, bool]] = []
        self._statements: list[tuple[int, int]] = []
        self._in_parameters = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_out(node):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._functions.append((node.name.value, isinstance(node, cst.FunctionDef)))
        if isinstance(node, cst.Parameters):
            self._in_parameters += 1
        if isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement):
            at = self._range(node)
            last = at.end.line if isinstance(node, cst.BaseSmallStatement) else at.start.line
            if isinstance(node, cst.If | cst.While | cst.For | cst.With):
                last = self._range(node.body).start.line - 1
            self._statements.append((at.start.line, max(last, at.start.line)))
        if self._is_in_function:
            for kind, operator in _OPERATORS:
                if isinstance(node, kind):
                    for mutated in operator(node):
                        if not _is_text(node, mutated):
                            self.found.append(
                                (".".join(name for name, _ in self._functions), self._statements[-1], node, mutated)
                            )
                            self.defaults[id(node)] = bool(self._in_parameters)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if _is_left_out(original_node):
            return
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self._functions.pop()
        if isinstance(original_node, cst.Parameters):
            self._in_parameters -= 1
        if isinstance(original_node, cst.BaseSmallStatement | cst.BaseCompoundStatement):
            self._statements.pop()

    def _range(self, node: cst.CSTNode) -> metadata.CodeRange:
        return typing.cast(metadata.CodeRange, self.get_metadata(metadata.PositionProvider, node))

    @property
    def _is_in_function(self) -> bool:
        return any(is_function for _, is_function in self._functions)


def _is_left_out(node: cst.CSTNode) -> bool:
    """Whether neither this nor what is in it is mutated."""
    if isinstance(node, cst.Annotation | cst.Decorator | cst.FormattedString | cst.ConcatenatedString | cst.Assert):
        return True
    if isinstance(node, cst.Expr) and (isinstance(node.value, cst.SimpleString) or _is_logging(node.value)):
        return True
    return isinstance(node, cst.Arg) and node.keyword is not None and bool(_UNMUTATED.fullmatch(node.keyword.value))


def _is_logging(node: cst.BaseExpression) -> bool:
    if not isinstance(node, cst.Call):
        return False
    first = node.func
    while isinstance(first, cst.Attribute):
        first = first.value
    return isinstance(first, cst.Name) and first.value in _LOGS


def _is_text(node: cst.CSTNode, mutated: cst.CSTNode) -> bool:
    """Whether the mutation only takes a text away, or a duration."""
    if isinstance(node, cst.Assign | cst.AnnAssign) and node.value is not None:
        return _reads_as_text(node.value)
    if isinstance(node, cst.Call) and isinstance(mutated, cst.Call):
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == "cast":
            return True
        kept = {id(arg) for arg in mutated.args}
        return any(_reads_as_text(arg.value) or _is_left_out(arg) for arg in node.args if id(arg) not in kept)
    return False


def _reads_as_text(node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.FormattedString | cst.ConcatenatedString):
        return True
    if isinstance(node, cst.SimpleString):
        return " " in node.value
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "format":
        return True
    return (
        isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "str" and bool(node.args)
    )
