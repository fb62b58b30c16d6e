"""Command lines that people type: the program behind `torchrun ...`, `accelerate launch ...`.

Their flags become options of submit, settings that their own parser reads on the nodes, or are
dropped with a remark. A command that starts ranks in its own way is refused, with the line to type
instead.
"""

import collections.abc
import dataclasses
import os
import pathlib
import re
import shlex
import typing

from ddp.node import spec
from ddp.problem import ParameterError, one_line
from ddp.submit import launchers

Values = dict[str, object]  # of options
_SETTING = re.compile(r"[A-Za-z_]\w*=")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_+-]*")
_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
_BUILT_IN = ("", "gpt", "smoke")
# Commands that start a program in some other way: each has the line to type instead
_WRAPPERS = frozenset(
    "bash colossalai conda coverage env fabric horovodrun ipython jsrun lightning micromamba mpiexec "
    "mpirun ncu nice nohup nsys numactl ray sbatch sh srun taskset time timeout".split()
)
_RUNNERS = frozenset("hatch pdm pipenv pixi poetry rye uv".split())
# Their flags without a value that choose no packages
_OF_RUNNERS = frozenset("--frozen --locked --no-sync --offline --quiet -q --".split())
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "composer": "composer",
}
# Commands of programs that start accelerate's launcher, with the module that it starts
_ENTRIES = {("axolotl", "train"): "axolotl.cli.train"} | {
    ("trl", name): f"trl.scripts.{name}" for name in "dpo grpo kto reward rloo sft".split()
}
# Commands that start torchrun on each node, with the variables that make them do it
_NODE_COMMANDS = {("llamafactory-cli", "train"): "FORCE_TORCHRUN=1"} | {
    ("swift", name): "" for name in "pt rlhf sft".split()
}
_CONFIG_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line as submit takes it."""

    values: Values  # options
    arguments: tuple[str, ...] = ()  # of the program
    # Fields of models.Training that only a terminal knows
    facts: Values = dataclasses.field(default_factory=dict[str, object])

    def of(self, words: collections.abc.Sequence[str], **more: object) -> "Command":
        """Return the command with this program, and more options."""
        options = {name.replace("_", "-"): value for name, value in more.items()}
        values = self.values | options | {"workload": words[0]}
        return dataclasses.replace(self, values=values, arguments=tuple(words[1:]))

    def knows(self, **facts: object) -> "Command":
        """Return the command with more facts."""
        return dataclasses.replace(self, facts=self.facts | facts)

    def remarks(self, text: str) -> "Command":
        """Return the command with one more remark."""
        before = typing.cast("tuple[str, ...]", self.facts.get("remarks", ()))
        return self.knows(remarks=(*before, text))


def unwrap(values: Values, arguments: tuple[str, ...]) -> Command:
    """Replace a typed launcher by the program that it starts.

    The command of an environment that is typed with its path makes the fact `active`.
    Raises ParameterError: the command has an option that ddp sets itself, or starts ranks in its
    own way.
    """
    return _unwrap(Command(values, arguments))


def _unwrap(command: Command) -> Command:
    """Return the program behind a command. Raises ParameterError."""
    workload = command.values.get("workload")
    typed = workload if isinstance(workload, str) else ""
    if command.values.get("module"):
        return _module(command, [typed, *command.arguments])

    name = pathlib.PurePath(typed).name
    active = _active(typed)
    if active:
        command = command.knows(active=active)
    if _PYTHON.fullmatch(name):
        return _python(command)
    if name == "torchrun" or active:
        return _by_name(command, [name, *command.arguments])
    if typed in _BUILT_IN or pathlib.Path(typed).is_file():
        return command
    if _NAME.fullmatch(typed):
        return _by_name(command, [name, *command.arguments])
    _refuse_setting(typed, command.arguments)
    return command


def _active(typed: str) -> str:
    """Return the environment of a command that is typed with its path, or ""."""
    if "/" not in typed:
        return ""
    prefix = pathlib.Path(typed).absolute().parent.parent
    markers = (prefix / "pyvenv.cfg", prefix / "conda-meta")
    return str(prefix) if any(marker.exists() for marker in markers) else ""


def _refuse_setting(typed: str, arguments: tuple[str, ...]) -> None:
    """Raise ParameterError for NAME=value, as a shell takes it before a command."""
    if _SETTING.match(typed):
        rest = [word for word in arguments if not _is_python(word)]
        line = f"ddp submit --env {shlex.join((typed, *rest))}"
        raise ParameterError("workload", f"{typed}: write: {line}")


def _is_python(word: str) -> bool:
    name = pathlib.PurePath(word).name
    return name == "torchrun" or _PYTHON.fullmatch(name) is not None


# -- commands by their name ------------------------------------------------------------------------


def _by_name(command: Command, words: list[str]) -> Command:
    """Return a command that is typed by its name, or the program that it starts.

    Raises ParameterError.
    """
    name, *rest = words
    by_name = command.of(words).knows(is_command=True)
    if command.values.get("launcher") == "node":
        return by_name
    if name in ("torchrun", "deepspeed", "composer"):
        return _ranks(command, name, rest)
    if name in ("accelerate", "accelerate-launch"):
        return _accelerate_command(command, name, rest)
    if name in _RUNNERS and rest[:1] == ["run"]:
        return _runner(command, name, rest[1:])
    if tuple(words[:2]) in _ENTRIES:
        return _entry(command, words)
    if tuple(words[:2]) in _NODE_COMMANDS and "launcher" not in command.values:
        return _on_each_node(by_name, name, _NODE_COMMANDS[name, rest[0]])
    if name in (*_WRAPPERS, *_RUNNERS) or any(map(_is_python, rest)):
        raise ParameterError("workload", f"{name}: ddp starts the ranks itself; {_line(words)}")
    return by_name


def _line(words: list[str]) -> str:
    """Return the line to type instead of a command that starts ranks in its own way."""
    if words[0] in ("bash", "sh") and words[1:]:
        line = f"ddp submit --launcher node {one_line(shlex.join(words), 200)}"
        return f"to run it once on each node, with NNODES and NODE_RANK, write: {line}"
    if words[0] == "ray":
        start = "ray symmetric-run --address $MASTER_ADDR:6379 --min-nodes $NNODES -- ..."
        return f"write: ddp submit --launcher node bash -c '{start}'"
    return instead(words[1:])


def _runner(command: Command, name: str, words: list[str]) -> Command:
    """Return the program behind `uv run` and the like. Raises ParameterError."""
    rest = list(words)
    while rest and rest[0] in _OF_RUNNERS:
        rest.pop(0)
    place = pathlib.Path(".venv").absolute()
    if (place / "pyvenv.cfg").exists():
        command = command.knows(active=str(place))
    else:
        how = "-r pyproject.toml adds the project's"
        command = command.remarks(f"{name}: the packages are those of ddp's environment; {how}")

    if rest[:1] in (["-m"], ["--module"]) and rest[1:]:
        return command.of(rest[1:], module=True)
    if not rest or rest[0].startswith("-"):
        text = f"{name}: ddp starts the ranks itself; {instead(words)}"
        raise ParameterError("workload", text)
    return _unwrap(command.of(rest))


def _on_each_node(command: Command, name: str, variable: str) -> Command:
    """Return a command that starts torchrun by itself, once on each node."""
    values = dict(command.values)
    values["launcher"] = "node"
    given = str(values.get("env") or "")
    if variable and variable.partition("=")[0] not in given:
        values["env"] = f"{given} {variable}".strip()
    text = f"{name} starts its own ranks: it runs once on each node, as with --launcher node"
    return dataclasses.replace(command, values=values).remarks(text)


# -- launchers whose ranks torchrun starts ---------------------------------------------------------


def _ranks(command: Command, name: str, words: collections.abc.Sequence[str]) -> Command:
    """Return the program behind torchrun, deepspeed or composer. Raises ParameterError."""
    line = launchers.read(name, list(words))
    found = _program(_agreed(command, name, line.values), line)
    if name != "torchrun":
        found = found.remarks(f"{name}: torchrun starts the ranks, with the same variables")
    if name == "deepspeed":
        found = found.remarks("deepspeed: no --local_rank is passed; LOCAL_RANK is set")
    return _remark_on_dropped(found, name, line)


def _remark_on_dropped(command: Command, name: str, line: launchers.Line) -> Command:
    if not line.dropped:
        return command
    flags = ", ".join(line.dropped)
    what = "is" if len(line.dropped) == 1 else "are"
    why = "ddp sets the ranks, the rendezvous and the logs itself"
    return command.remarks(f"{name}'s {flags} {what} dropped: {why}")


def _program(command: Command, line: launchers.Line) -> Command:
    """Return the program of a launcher's command line."""
    if line.is_module:
        return command.of(line.words, module=True)
    found = command.of(line.words)
    return found.knows(is_command=True) if line.is_command else found


def _agreed(command: Command, launcher: str, found: Values) -> Command:
    """Return the command with the options that a launcher's flags mean.

    Raises ParameterError if the same option of ours was given another value.
    """
    for name, value in found.items():
        given = command.values.get(name)
        if given is not None and str(given) != str(value):
            text = f"{given} and {launcher}'s {value} disagree; give one of them"
            raise ParameterError(name, text)
    return dataclasses.replace(command, values=command.values | found)


def _python(command: Command) -> Command:
    """Return the program behind `python`. Raises ParameterError."""
    words = list(command.arguments)
    is_module = False
    while words and words[0].startswith("-") and not is_module:
        word = words.pop(0)
        if word == "--":
            break
        flags, m, rest = word[1:].partition("m")
        if set(flags) - {*"uBEq"} or word == "-":  # these change nothing in a job
            how = f"a variable does, as in --env PYTHONOPTIMIZE=1; {instead((word, *words))}"
            raise ParameterError("workload", f"python's {word} is not passed on; {how}")
        is_module = bool(m)
        if rest:
            words.insert(0, rest)
    if not words:
        raise ParameterError("workload", "python without a program; write: ddp submit train.py")
    return _module(command, words) if is_module else command.of(words)


def _module(command: Command, words: list[str]) -> Command:
    """Return a module, or the program behind the module of a launcher. Raises ParameterError."""
    launcher = _LAUNCHER_MODULES.get(words[0], "")
    values = {name: value for name, value in command.values.items() if name != "module"}
    plain = dataclasses.replace(command, values=values)
    if launcher == "accelerate":
        return _accelerate(plain, words[1:])
    if launcher:
        return _ranks(plain, launcher, words[1:])
    if words[0].partition(".")[0] in _WRAPPERS:
        text = f"{words[0]}: ddp starts the ranks itself; {instead(words[1:])}"
        raise ParameterError("workload", text)
    return command.of(words, module=True) if words[0] else command


# -- accelerate ------------------------------------------------------------------------------------


def _accelerate_command(command: Command, name: str, rest: list[str]) -> Command:
    if name == "accelerate-launch":
        return _accelerate(command, rest)
    if rest[:1] != ["launch"]:
        text = (
            f"accelerate {' '.join(rest[:1])}: submit takes accelerate launch; type this one alone"
        )
        raise ParameterError("workload", text)
    return _accelerate(command, rest[1:])


def _entry(command: Command, words: list[str]) -> Command:
    """Return the module that a program's command gives to accelerate's launcher.

    Raises ParameterError.
    """
    module = _ENTRIES[words[0], words[1]]
    rest = words[2:]
    flags: list[str] = []
    for word in list(rest):
        flag, equals, value = word.partition("=")
        if flag.replace("-", "_") == "__accelerate_config":
            at = rest.index(word)
            taken = rest[at : at + (1 if equals else 2)]
            rest[at : at + len(taken)] = []
            flags = [f"--config_file={value if equals else taken[-1]}"]
    return _accelerate(command, [*flags, "-m", module, *rest])


def _accelerate(command: Command, words: list[str]) -> Command:
    """Return the program behind `accelerate launch`, with the settings for its own parser.

    Raises ParameterError.
    """
    line = launchers.read("accelerate", words)
    found = _program(_agreed(command, "accelerate", line.values), line)
    given = ""
    kept: list[str] = []
    for flag in line.kept:
        name, _, value = flag.partition("=")
        if name == "--config_file":
            given = value
        else:
            kept.append(flag)
    path = _configuration(given, is_on_cpus="--cpu" in kept)
    text = "" if path is None else _read(path)
    suffix = "" if path is None else path.suffix
    found = found.knows(accelerate=spec.Accelerate(tuple(kept), text, suffix))
    settings = "its flags" if path is None else str(path)
    found = found.remarks(f"accelerate: settings of {settings}; ddp chooses machines and processes")
    return _remark_on_dropped(found, "accelerate", line)


def _configuration(given: str, *, is_on_cpus: bool) -> pathlib.Path | None:
    """Return the configuration file that accelerate's launcher would read here (1.15)."""
    if given:
        return pathlib.Path(given)
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = pathlib.Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    path = home / "accelerate" / "default_config.yaml"
    return path if path.is_file() and not is_on_cpus else None


def _read(path: pathlib.Path) -> str:
    """Read a configuration file. Raises ParameterError."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_CONFIG_BYTES + 1)
    except FileNotFoundError:
        text = f"accelerate's --config_file {path} does not exist"
        raise ParameterError("workload", text) from None
    except (OSError, UnicodeError) as e:
        raise ParameterError("workload", f"accelerate's {path} cannot be read: {e}") from e
    if len(text) > _CONFIG_BYTES:
        raise ParameterError("workload", f"{path} is not a configuration of accelerate: too large")
    return text


def instead(words: collections.abc.Sequence[str]) -> str:
    """Return the line to type for the program that a launcher's command seems to start."""
    starts = (
        n
        for n, word in enumerate(words)
        if word.endswith(".py") or (word == "-m" and words[n + 1 :])
    )
    if (start := next(starts, None)) is None:
        return "write the program alone: ddp submit train.py"
    return f"write: ddp submit {one_line(shlex.join(words[start:]), 200)}"
