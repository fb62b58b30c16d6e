"""Other launchers, such as torchrun: the meaning of their flags for a job of ddp."""

import dataclasses
import functools
import pathlib
import typing

from ddp.node import spec
from ddp.problem import ParameterError
from slurm_ddp import backports

Values = dict[str, object]  # of options


@dataclasses.dataclass(frozen=True)
class Launcher:
    """An entry of launchers.toml."""

    options: dict[str, str]
    module: tuple[str, ...]
    command: tuple[str, ...]
    switches: tuple[str, ...]
    values: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def has_value(self, name: str) -> bool:
        """Return whether a flag has a value."""
        return name not in (*self.switches, *self.module, *self.command)

    def keeps(self, name: str) -> bool:
        """Return whether a flag goes to the launcher's own parser."""
        return not self.values and name not in self.dropped

    def knows(self, name: str) -> bool:
        """Return whether ddp knows a flag, or leaves it to the launcher's own parser."""
        known = (*self.options, *self.module, *self.command, *self.switches, *self.values)
        return not self.values or name in known


@dataclasses.dataclass
class Line:
    """A launcher's command line, in its parts."""

    values: Values = dataclasses.field(default_factory=dict[str, object])  # options of ddp
    kept: list[str] = dataclasses.field(default_factory=list[str])  # for its own parser
    dropped: list[str] = dataclasses.field(default_factory=list[str])  # as typed
    is_module: bool = False  # the program is a module
    is_command: bool = False  # the program is a command
    words: list[str] = dataclasses.field(default_factory=list[str])  # the program, its arguments


class Flag(typing.NamedTuple):
    """A flag of a launcher."""

    typed: str  # such as --nproc_per_node
    name: str  # such as nproc-per-node
    value: str | None  # None: it has none


def read(name: str, words: tuple[str, ...] | list[str]) -> Line:
    """Read the command line behind a launcher's name. Raises ParameterError."""
    launcher = _table()[name]
    line = Line(words=list(words))
    while line.words and line.words[0].startswith("-"):
        if line.words[0] == "--":
            line.words.pop(0)
            break
        _place(name, launcher, line, _pop(launcher, line.words))
    if not line.words:
        text = f"{name} without a program; write: ddp submit train.py"
        raise ParameterError("workload", text)
    return line


def _pop(launcher: Launcher, words: list[str]) -> Flag:
    """Take the first flag, with its value, off the words."""
    typed, equals, value = words.pop(0).partition("=")
    name = typed.lstrip("-").replace("_", "-")
    if equals:
        return Flag(typed, name, value)
    if not launcher.has_value(name) or not launcher.knows(name):
        return Flag(typed, name, None)
    return Flag(typed, name, words.pop(0) if words else "")


def _place(name: str, launcher: Launcher, line: Line, flag: Flag) -> None:
    """Add a flag to the part of the line that it belongs to. Raises ParameterError."""
    if flag.name in launcher.module:
        line.is_module = True
    elif flag.name in launcher.command:
        line.is_command = True
    elif flag.name in launcher.options:
        line.values |= _option(name, launcher.options[flag.name], flag)
    elif launcher.keeps(flag.name):
        underscored = f"--{flag.name.replace('-', '_')}" if len(flag.name) > 1 else flag.typed
        line.kept.append(underscored if flag.value is None else f"{underscored}={flag.value}")
    elif launcher.knows(flag.name):
        line.dropped.append(flag.typed)
    else:
        text = f"{name}'s {flag.typed} has no counterpart; omit it, see: ddp submit --help"
        raise ParameterError("workload", text)


def _option(launcher: str, name: str, flag: Flag) -> Values:
    """Return our option for a launcher's flag. Raises ParameterError."""
    value = flag.value or ""
    if name == "ranks-per-node" and value in ("auto", "gpu", "cpu"):
        return {"gpus-per-node": 0} if value == "cpu" else {}
    low, _, high = value.partition(":")
    if not low.isdecimal() or (high and high != low):
        text = f"{launcher}'s {flag.typed} {value}: give one whole number"
        raise ParameterError("workload", text)
    return {name: int(low)}


@functools.cache
def _table() -> dict[str, Launcher]:
    """Read launchers.toml."""
    texts = backports.read_toml(pathlib.Path(__file__).with_name("launchers.toml"))
    found: dict[str, Launcher] = {}
    for name, entry in texts.items():
        found[name] = spec.build(Launcher, entry)
    return found
