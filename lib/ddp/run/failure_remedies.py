"""Rules that find the remedy for the error that a run failed with; the first that fits is taken.

To add a remedy, add a rule to `RULES`, or a row to the tables that the rules read.
"""

import collections.abc
import dataclasses
import functools
import re

from ddp.node.diagnosis import excerpts, messages
from ddp.problem import Remedy, Step
from ddp.project import search
from ddp.run.model import Run
from ddp.run.untrusted import printable
from ddp.workspace.folders import Workspace

Rule = collections.abc.Callable[[Workspace, Run, list[str]], Remedy | None]

_MAX_MODULE = 60
_MAX_PATH = 300
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_MISSING_FILE = re.compile(r"FileNotFoundError: .*['\"]([^/'\"][^'\"]*)['\"]$")  # a relative path
_TAKE_IN = "put it into the project; if git ignores it, !NAME in .ddpignore takes it in"


@dataclasses.dataclass(frozen=True)
class MissingProgram:
    """A program that a node may lack, by the error that says so."""

    pattern: str
    package: str  # Ubuntu's
    why: str
    source: str


MISSING_PROGRAMS = (
    MissingProgram(
        r"([\w.]*InductorError: )?"
        r"([\w.]*InvalidCxxCompiler: |RuntimeError: Failed to find C compiler)",
        package="g++",
        why="torch.compile needs a C++ compiler",
        source="torch._inductor's exceptions, also around Triton's",
    ),
    MissingProgram(
        r"RuntimeError: Error building extension .*: (c|g)\+\+: (command )?not found$",
        package="g++",
        why="the program builds an extension of torch, which needs a C++ compiler",
        source="torch/utils/cpp_extension.py, with the words of the shell that ninja starts",
    ),
    MissingProgram(
        r"FileNotFoundError: \[Errno 2\] .*: 'git'$|([\w.]+\.)?GitCommandNotFound: "
        r"|ImportError: .*Bad git executable",
        package="git",
        why="the program calls git",
        source="subprocess's and GitPython's exceptions",
    ),
)


def find(workspace: Workspace, run: Run, lines: list[str]) -> Remedy | None:
    """Return the remedy for the error in a failure's last lines; None if none is known."""
    for rule in RULES:
        remedy = rule(workspace, run, lines)
        if remedy is not None:
            return remedy
    return None


def _module_not_found(workspace: Workspace, run: Run, lines: list[str]) -> Remedy | None:
    """Return how Python finds the module that a ModuleNotFoundError names.

    A module of the project is never to be installed: a package index may have another one of
    its name.
    """
    found = _MISSING_MODULE.search(lines[-1])
    if found is None or _has_own_image(run):
        return None
    module = found[1].partition(".")[0][:_MAX_MODULE]
    find_in_project = functools.partial(search.find_module, run.folder, run.record)

    if place := workspace.do(find_in_project, name=found[1]):
        path, folder = (printable(text, _MAX_PATH) for text in place)
        words = f"found at {path}, which is not on sys.path: --env PYTHONPATH={folder}"
        return Step("module-path", words, {"path": path, "folder": folder})

    if place := workspace.do(find_in_project, name=module):
        path = printable(place[0], _MAX_PATH)
        words = f"{path} has no such module; !NAME in .ddpignore takes in what git ignores"
        return Step("copy-module", words)

    if path := _find_left_out(workspace, run, f"{module}.py", module):
        words = f"found at {path}, which is not in the run's copy, or not on sys.path: {_TAKE_IN}"
        return Step("copy-module", words)

    return _install(workspace, run, module)


def _install(workspace: Workspace, run: Run, module: str) -> Remedy:
    create = "ddp env create NAME --requirements requirements.txt"
    words = f"with {module} in requirements.txt: {create}, then: ddp submit -e NAME ..."
    if file := run.record.get("requirements"):
        words = f"add a line with {module} to {printable(str(file), _MAX_PATH)}, and submit again"
    if python := run.record.get("python"):
        words = f"{printable(str(python), _MAX_PATH)} -m pip install {module}"
    return Step("install-module", words, {"module": module, "user": workspace.user})


def _program_not_installed(_workspace: Workspace, run: Run, lines: list[str]) -> Remedy | None:
    """Return how the nodes get a program that they lack."""
    if _has_own_image(run):
        return None
    line = excerpts.without_rank(lines[-1])
    for missing in MISSING_PROGRAMS:
        if re.match(missing.pattern, line):
            install = f"apt-get install {missing.package}"
            words = f"{missing.why}: an administrator types on the nodes: {install}"
            return Step("install-package", words, {"package": missing.package, "why": missing.why})
    return None


def _file_not_copied(workspace: Workspace, run: Run, lines: list[str]) -> Remedy | None:
    """Return how a file of the user's folder gets into the run's copy."""
    found = _MISSING_FILE.search(lines[-1])
    path = _find_left_out(workspace, run, found[1]) if found else ""
    if not path:
        return None
    words = f"found at {path}, which is not in the run's copy: {_TAKE_IN}"
    return Step("copy-file", f"{words}, or give its absolute path")


def _known_fault(_workspace: Workspace, _run: Run, lines: list[str]) -> Remedy | None:
    """Return the remedy of a known fault of programs."""
    fault = messages.find_program_fault(lines)
    return Step("known-fault", fault.remedy) if fault else None


RULES: tuple[Rule, ...] = (
    _module_not_found,
    _program_not_installed,
    _file_not_copied,
    _known_fault,
)


def _has_own_image(run: Run) -> bool:
    return bool(run.record.get("container"))


def _find_left_out(workspace: Workspace, run: Run, *names: str) -> str:
    """Return the path of a file or folder that the run's copy lacks, or ""."""
    found = workspace.do(search.find_left_out, folder=run.folder, record=run.record, names=names)
    return printable(found, _MAX_PATH) if found else ""
