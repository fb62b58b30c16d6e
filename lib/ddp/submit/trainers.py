"""The trainers that a program may use, and the signals that make them save: trainers.toml."""

import ast
import contextlib
import dataclasses
import functools
import pathlib
import warnings

from ddp.node import spec
from ddp.options import models
from ddp.problem import ParameterError
from ddp.workspace.folders import Workspace
from slurm_ddp import backports

AUTO = "auto"
_BUILT_IN = ("gpt", "smoke")
_LIMIT_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A trainer that saves on a signal."""

    name: str
    imports: tuple[str, ...]
    signal: str
    needs: str
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Uses:
    """A program's imports, and the names in it."""

    modules: frozenset[str]  # the first part of each
    names: frozenset[str]


@functools.cache
def known() -> tuple[Trainer, ...]:
    """Return the trainers of trainers.toml, the most special first."""
    table = backports.read_toml(pathlib.Path(__file__).with_name("trainers.toml"))
    return spec.build(tuple[Trainer, ...], table["trainers"])


def choose(workspace: Workspace, params: models.Training) -> tuple[str | None, str]:
    """Return the stop signal of a submission, and a remark on the trainer of its program.

    Raises ParameterError if `stop-signal` is auto, and no trainer is known.
    """
    wanted = params.stop_signal
    trainer = None
    if params.workload not in _BUILT_IN:
        trainer = workspace.do(lambda: find(params))
    if wanted == AUTO:
        if trainer is None:
            text = "auto: the program imports no trainer that saves on a signal, as far as its"
            text += " file shows; give TERM, USR1, USR2 or INT if it saves on one"
            raise ParameterError("stop-signal", text)
        return trainer.signal, f"stop-signal: {trainer.signal}, {_explain(trainer)}"
    if wanted is None and trainer is not None:
        explained = _explain(trainer)
        return None, f"{trainer.signal} at the time limit, {explained}: stop-signal auto sends it"
    return wanted, ""


def _explain(trainer: Trainer) -> str:
    return f"on which {trainer.name} saves with {trainer.needs}"


def find(params: models.Training) -> Trainer | None:
    """Return the trainer that a script or a module of the project imports, or that a module is."""
    uses = _Uses(frozenset(), frozenset())
    path = _file_of(params)
    if path is not None:
        with contextlib.suppress(OSError, SyntaxError, ValueError, MemoryError, RecursionError):
            uses = _read(path)
    elif params.module:
        uses = _Uses(frozenset({params.workload.partition(".")[0]}), frozenset())
    for trainer in known():
        is_imported = not uses.modules.isdisjoint(trainer.imports)
        is_used = not trainer.names or not uses.names.isdisjoint(trainer.names)
        if is_imported and is_used:
            return trainer
    return None


def _file_of(params: models.Training) -> pathlib.Path | None:
    """Return the file of the program; None for a command, and a module of another folder."""
    if params.script:
        return pathlib.Path(params.script)
    if params.is_command:
        return None
    place = pathlib.Path(params.typed_in or "/").joinpath(*params.workload.split("."))
    for path in (place / "__main__.py", place.with_name(f"{place.name}.py")):
        if path.is_file():
            return path
    return None


def _read(path: pathlib.Path) -> _Uses:
    with path.open("rb") as file:
        source = file.read(_LIMIT_BYTES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source, str(path))

    modules: set[str] = set()
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                modules.update(alias.name.partition(".")[0] for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                modules.add(module.partition(".")[0])
                names.update(alias.name for alias in aliases)
            case ast.Attribute(attr=name) | ast.Name(id=name):
                names.add(name)
            case _:
                pass
    return _Uses(frozenset(modules), frozenset(names))
