"""Check a user's program before it is queued: that it is Python, and that Python compiles it."""

import ast
import collections.abc
import difflib
import json
import os
import pathlib
import re
import shlex
import sys
import warnings

from ddp.options import models
from ddp.problem import ParameterError
from ddp.project import copies, packages
from ddp.submit import commands
from ddp.workspace import folders
from ddp.workspace.folders import Workspace

_DATA = frozenset(
    ".bin .cfg .ckpt .csv .gz .h5 .ini .json .jsonl .log .md .npy .npz .parquet .pdf .pkl .pt .pth .safetensors .tar "
    ".toml .tsv .txt .xz .yaml .yml .zip .zst".split()
)
_SHELL = frozenset(".bash .batch .job .sbatch .sh .slurm .zsh".split())
_ENDS = re.compile(r"\d?[<>]|[;|&\n]+")  # of a shell's command
_LIMIT_BYTES = 8 << 20
_SPAWNS = (
    "--multiprocessing-distributed"  # of PyTorch's imagenet example, and of programs based on it
)


def check(workspace: Workspace, params: models.Training, contents: folders.Contents) -> list[str]:
    """Check a script or module, which is readable; return remarks. Raises ParameterError."""
    if _may_be_anything(params) or params.function:
        return []
    path: pathlib.Path | None = pathlib.Path(params.workload)
    if params.module:
        path = workspace.do(lambda: _find(workspace, params))
    if path is None:  # it may be installed
        return workspace.do(lambda: _remark_on_absent(params))
    trouble, spawned = workspace.do(lambda: _compile(path, params.words))
    if trouble and not _may_be_newer_python(params, contents):
        raise ParameterError("workload", trouble)
    if trouble:
        return [f"{trouble} (by this host's Python {sys.version_info[0]}.{sys.version_info[1]})"]
    return [spawned] if spawned else []


def _may_be_newer_python(params: models.Training, contents: folders.Contents) -> bool:
    """Return whether the ranks' Python may take syntax that this host's Python does not know."""
    if params.container_image or params.own_python:
        return True
    for about in contents.environments:
        version = tuple(int(number) for number in about.python.split("."))
        if version > sys.version_info[:2]:
            return True
    return False


def _may_be_anything(params: models.Training) -> bool:
    """Return whether the program need not be Python."""
    is_other = bool(params.script) and not params.script.endswith(".py")
    return params.is_command or (params.launcher == "node" and is_other)


def _remark_on_absent(params: models.Training) -> list[str]:
    """Remark on a module that looks like a mistyped one of this folder."""
    here = pathlib.Path(params.typed_in)
    first = params.workload.partition(".")[0]
    close = difflib.get_close_matches(first, {one.stem for one in here.iterdir()}, 1)
    if not close or close[0] == first:
        return []
    return [f"{first} is not in this folder; did you mean {close[0]}?"]


def _compile(path: pathlib.Path, words: collections.abc.Sequence[str]) -> tuple[str, str]:
    """Return a program's syntax error or "", and a remark on ranks that it starts or "".

    Raises ParameterError if it is not Python at all.
    """
    with path.open("rb") as file:
        source = file.read(_LIMIT_BYTES)
    _refuse_others(path, source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source, str(path))
            compile(tree, str(path), "exec", dont_inherit=True)
    except SyntaxError as e:
        return f"{path}:{e.lineno}: {type(e).__name__}: {e.msg}", ""
    except (ValueError, MemoryError, RecursionError) as e:
        return f"{path}: {type(e).__name__}: {e}", ""
    return "", _remark_on_spawn(path, tree, words)


def _remark_on_spawn(
    path: pathlib.Path, tree: ast.Module, words: collections.abc.Sequence[str]
) -> str:
    """Return a remark if a program starts ranks within each rank of the job, as mp.spawn does.

    They inherit TORCHELASTIC_USE_AGENT_STORE, and wait for a store without a server. A program that
    reads torchrun's variables, or takes a flag for this (like PyTorch's imagenet example), starts
    them only without torchrun.
    """
    nodes = list(ast.walk(tree))
    texts = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    is_joining = any(
        isinstance(node, ast.Attribute | ast.Name) and _names_joining(node) for node in nodes
    )
    if not is_joining or "LOCAL_RANK" in texts or not any(map(_is_spawn, nodes)):
        return ""
    if _SPAWNS not in texts:
        start = "call its function once, with RANK, LOCAL_RANK and WORLD_SIZE of os.environ"
        text = f"{path.name} starts its own ranks in each rank (mp.spawn)"
        return f"{text}, which wait for ever; {start}"
    if _SPAWNS in words:
        text = f"{_SPAWNS} starts its own ranks in each rank, which wait for ever"
        return f"{text}; omit it, add --dist-url env://"
    return ""


def _names_joining(node: ast.Attribute | ast.Name) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id
    return name == "init_process_group"


def _is_spawn(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="mp" | "multiprocessing"), attr="spawn"):
            return True
        case ast.Attribute(value=ast.Attribute(attr="multiprocessing"), attr="spawn"):
            return True
        case ast.ImportFrom(module="torch.multiprocessing", names=names):
            return any(one.name == "spawn" for one in names)
        case _:
            return False


def _refuse_others(path: pathlib.Path, source: bytes) -> None:
    """Raise ParameterError for a notebook, a script of another interpreter, and data."""
    first = source.split(b"\n", 1)[0].decode(errors="replace").strip()
    name = shlex.quote(path.name)
    if path.suffix == ".ipynb" or _is_notebook(source):
        script = shlex.quote(path.with_suffix(".py").name)
        how = f"jupyter nbconvert --to script {name}, then: ddp submit {script}"
        raise ParameterError("workload", f"{path} is a notebook; type: {how}")
    interpreter = first[2:].strip()[:60] if first.startswith("#!") else ""
    if "python" not in interpreter and (
        path.suffix in _SHELL or (interpreter and path.suffix != ".py")
    ):
        what = interpreter or "a shell"
        shown = what if what.isprintable() else ascii(what)
        text = f"{path} is a script for {shown}, and ddp starts the ranks itself"
        node = f"once on each node: ddp submit --launcher node {name}"
        raise ParameterError("workload", f"{text}; {_program_of(source)}; or {node}")
    if path.suffix in _DATA or b"\0" in source[:4096]:
        raise ParameterError(
            "workload", f"{path} is data, not a program; write: ddp submit train.py {name}"
        )


def _is_notebook(source: bytes) -> bool:
    if source.lstrip()[:1] != b"{":
        return False
    try:
        return "nbformat" in json.loads(source)
    except ValueError:
        return False


def _program_of(source: bytes) -> str:
    """Return the line to type for the program that a batch script starts."""
    for command in _ENDS.split(source.decode(errors="replace").replace("\\\n", " ")):
        try:
            words = ["..." if "$" in word else word for word in shlex.split(command, comments=True)]
        except ValueError:
            continue
        if any(word == "-m" or word.endswith(".py") for word in words):
            return commands.instead(words)
    return commands.instead(())


def _find(workspace: Workspace, params: models.Training) -> pathlib.Path | None:
    """Find a module's file; None if the project has nothing of its name. Raises ParameterError."""
    here = pathlib.Path(params.typed_in)
    given = params.variables.get("PYTHONPATH", "")
    root = copies.find(workspace, params).root if params.snapshot else here
    parts = params.workload.split(".")
    more = [here / part for part in given.split(":")]
    more += packages.importable(pathlib.Path(os.path.realpath(here)), root)
    for folder in (here, *more):
        place = folder.joinpath(*parts)
        for path in (place / "__main__.py", place.with_name(f"{place.name}.py")):
            if path.is_file():
                return path
        above = next(
            (one for one in (folder / parts[0], folder / f"{parts[0]}.py") if one.exists()), None
        )
        if above is not None and (above.is_file() or any(above.glob("*.py"))):
            lacking = (
                f"{place} has no __main__.py" if place.is_dir() else f"{above} has no such module"
            )
            raise ParameterError("workload", f"{params.workload}: {lacking}")
    return None
