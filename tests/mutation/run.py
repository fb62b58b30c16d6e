"""Mutation testing of the modules in modules.toml: print the mutants that no test notices, and keep the scores.

    make mutants                                   all modules, as many at a time as there are cores
    tox -e mutants -- registration gres            some

A mutant is written into a copy of the repository and tested by a fork of this process, which has imported what takes
long, with the tests that run the changed statement (by coverage). mutmut's own runner puts all mutants into one file
behind a switch that imports mutmut; our scripts are started by tests as programs of /usr/bin/python3, where that fails.
"""

import argparse
import collections.abc
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import types
import typing

import coverage
import mutants
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
TABLE, SCORES = HERE / "modules.toml", HERE / "scores.toml"
# What tests import, and no charm replaces
PRELOADED = ("hypothesis", "jinja2", "ops", "ops.testing", "pydantic", "pytest_timeout", "slurmutils", "yaml")
PRELOADED_PLUGINS = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # pytest's, by PRELOADED
LEAST_S = 20.0
_NOT_REPLACED = 9  # exit status of a fork
_COVERING, _LINES, _SURVIVORS = "tmp/covering.json", "tmp/lines", "tmp/survivors.json"


@dataclasses.dataclass(frozen=True)
class Module:
    """A row of the table."""

    path: str
    tests: tuple[str, ...]
    pythonpath: tuple[str, ...]
    equivalent: tuple[dict[str, str], ...]

    @property
    def name(self) -> str:
        """Return the module's path below its source folder, without the ending."""
        return self.path.rpartition("/src/")[2].removeprefix("lib/slurm_ddp/").removesuffix(".py")

    def is_equivalent(self, mutant: mutants.Mutant) -> bool:
        """Whether the table says that nothing can tell this mutant from the module."""
        return any(
            row["removed"] == mutant.removed and row["added"] == mutant.added and row["function"] == mutant.function
            for row in self.equivalent
        )


def modules() -> list[Module]:
    """Return the table."""
    table = tomllib.loads(TABLE.read_text())
    return [
        Module(row["path"], tuple(row["tests"]), tuple(table["lanes"][row["lane"]]), tuple(row.get("equivalent", ())))
        for row in table["module"]
    ]


def copy_repository(folder: pathlib.Path, number: int) -> list[pathlib.Path]:
    """Return copies of the repository, one for each mutant that is tested at a time."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    trees = [folder / str(i) for i in range(number)]
    for tree in trees:
        for name in names:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return trees


class Server:
    """A plugin of pytest: with all tests collected, test each mutant in a fork, and with the tests that may notice it.

    The fork gets the mutant's code into the function that is already imported, and into the file, for tests that start it
    as a program.
    """

    def __init__(self, module: Module, tree: pathlib.Path, todo: list[mutants.Mutant]) -> None:
        self._path, self._todo, self._tree = tree / module.path, todo, tree
        self._failed = False

    def pytest_runtest_logreport(self, report: typing.Any) -> None:
        """Note that a test failed."""
        self._failed = self._failed or report.failed

    def pytest_runtestloop(self, session: typing.Any) -> bool:
        """Test all mutants; write the numbers of those that survive."""
        if session.testsfailed:
            raise session.Interrupted("its tests cannot be collected")
        items = {item.nodeid: item for item in session.items}
        covering = Covering.read(self._tree)
        original = self._path.read_text()
        self._made(original)  # raises here where it cannot be imported like this, so that no mutant is blamed for it
        survivors: list[int] = []
        for number, mutant in enumerate(self._todo):
            tests = covering.of(mutant)
            limit = LEAST_S + 5 * sum(covering.took[name] for name in tests)
            self._path.write_text(mutant.code)
            work = functools.partial(self._survives, mutant, [items[name] for name in tests])
            status = self._fork(work, limit) if tests else 0
            assert status != _NOT_REPLACED, mutant
            self._path.write_text(original)
            survivors += [] if status else [number]
        (self._tree / _SURVIVORS).write_text(json.dumps(survivors))
        return True

    def _fork(self, work: collections.abc.Callable[[], bool], limit_s: float) -> int:
        """Return 0 where the work, in a process of its own, returns true in time."""
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.setsid()
                status = 0 if work() else 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        end = time.monotonic() + limit_s
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended or time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                if not ended:
                    os.waitpid(pid, 0)
                return os.waitstatus_to_exitcode(status) if ended else 1
            time.sleep(0.005)

    def _survives(self, mutant: mutants.Mutant, items: list[typing.Any]) -> bool:
        try:
            if not self._replace(mutant):
                return False
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(_NOT_REPLACED)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return False
        return True

    def _live(self) -> types.ModuleType:
        return next(one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == str(self._path))

    def _made(self, code: str) -> types.ModuleType:
        """Make another module of this name from code. Raises what the code does."""
        live = self._live()
        made = types.ModuleType(live.__name__)
        made.__dict__.update(__file__=live.__file__, __package__=live.__package__)
        exec(compile(code, str(self._path), "exec"), made.__dict__)
        return made

    def _replace(self, mutant: mutants.Mutant) -> bool:
        """Put the mutant's code into the function, which others may have imported; false if it cannot be imported."""
        try:
            made = self._made(mutant.code)
        except Exception:  # no test could import it, while the original can be: see pytest_runtestloop
            return False
        owner: typing.Any = self._live()
        old, new, name = owner, typing.cast(typing.Any, made), ""
        for name in mutant.function.split("."):
            owner, old, new = old, vars(old)[name], vars(new)[name]
            if not isinstance(old, type):  # what is inside a function comes with it
                break
        old_function, new_function = _function(old), _function(new)
        try:
            old_function.__code__ = new_function.__code__
            old_function.__defaults__, old_function.__kwdefaults__ = (
                new_function.__defaults__,
                new_function.__kwdefaults__,
            )
        except ValueError:  # it takes other variables from around it
            setattr(owner, name, new)
        return True


def _function(found: typing.Any) -> typing.Any:
    """Return the function below decorators."""
    while not isinstance(found, types.FunctionType):
        found = getattr(found, "__wrapped__", None) or getattr(found, "__func__", None) or found.fget
    return inspect.unwrap(found)


class Covering:
    """Which tests run which line of the module, and how long each takes. As a plugin of pytest, it measures that."""

    def __init__(self, module: Module, tree: pathlib.Path) -> None:
        self._tree, self._path = tree, tree / module.path
        self.lines: dict[int, list[str]] = {}
        self.took: dict[str, float] = {}

    @classmethod
    def read(cls, tree: pathlib.Path) -> "Covering":
        """Load the measurements."""
        made = cls.__new__(cls)
        found = json.loads((tree / _COVERING).read_text())
        made.lines = {int(line): tests for line, tests in found["lines"].items()}
        made.took = found["took"]
        return made

    def pytest_runtestloop(self, session: typing.Any) -> bool:
        """Run all tests, each with a name for the lines that it runs, here and in processes that it starts."""
        original, lines = self._path.read_text(), self._tree / _LINES
        module = f"RECORD, MODULE = {str(lines)!r}, {str(self._path)!r}\n" + (HERE / "recorder.py").read_text()
        (self._tree / "tmp" / "recorder.py").write_text(module)
        recorder = f"; exec(open({str(self._tree / 'tmp' / 'recorder.py')!r}).read(), {{}})"
        self._path.write_text(
            re.sub(r"^import \w+$", lambda found: found[0] + recorder, original, count=1, flags=re.MULTILINE)
        )
        traced = coverage.Coverage(data_file=None, include=[str(self._path)], config_file=False)
        traced.start()
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            traced.switch_context(item.nodeid)
            (self._tree / f"{_LINES}.test").write_text(item.nodeid)
            began = time.perf_counter()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.took[item.nodeid] = time.perf_counter() - began
        traced.stop()
        self._path.write_text(original)
        self.lines = traced.get_data().contexts_by_lineno(str(self._path))
        for row in lines.read_text().splitlines() if lines.exists() else []:
            number, _, name = row.partition(" ")
            self.lines.setdefault(int(number), []).append(name)
        (self._tree / _COVERING).write_text(json.dumps({"lines": self.lines, "took": self.took}))
        return True

    def of(self, mutant: mutants.Mutant) -> list[str]:
        """Return the tests to run, the fastest first; all of them for a parameter's default."""
        found = set[str]().union(*(self.lines.get(line, []) for line in mutant.lines)) - {""}
        if mutant.is_default:
            found = set(self.took)
        return sorted(found, key=lambda name: self.took[name])


def start(tree: pathlib.Path, module: Module, plugin: object) -> int:
    """Fork a pytest that has collected the module's tests in the tree, with a plugin that takes over. Return its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 3
    try:
        os.setsid()
        os.chdir(tree)
        (tree / "tmp").mkdir(exist_ok=True)
        output = os.open(tree / "tmp" / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, end in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(end, number)
        paths = [str(tree / part) for part in module.pythonpath]
        sys.path[:0] = paths
        os.environ.update(PYTHONPATH=os.pathsep.join(paths), TMPDIR=str(tree / "tmp"))
        tempfile.tempdir = None
        options = ["-q", "-s", "-p", "no:cacheprovider", "-o", "addopts=", "-W", PRELOADED_PLUGINS]
        status = int(pytest.main([*options, "--basetemp", str(tree / "tmp" / "base"), *module.tests], plugins=[plugin]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def await_end(tree: pathlib.Path, module: Module, pid: int) -> None:
    """Wait for what `start` began; end this program where it failed."""
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status):
        output = (tree / "tmp" / "output").read_text(errors="replace")
        sys.exit(f"{module.path}: its tests fail without a mutant, too:\n{output[-3000:]}")


def judge(module: Module, trees: list[pathlib.Path], todo: list[mutants.Mutant]) -> list[mutants.Mutant]:
    """Return the mutants that survive."""
    await_end(trees[0], module, start(trees[0], module, Covering(module, trees[0])))
    for tree in trees[1:]:
        (tree / "tmp").mkdir(exist_ok=True)
        shutil.copy2(trees[0] / _COVERING, tree / _COVERING)
    parts = [todo[first :: len(trees)] for first in range(len(trees))]
    servers = [start(tree, module, Server(module, tree, part)) for tree, part in zip(trees, parts, strict=True)]
    survivors: list[mutants.Mutant] = []
    for tree, part, pid in zip(trees, parts, servers, strict=True):
        await_end(tree, module, pid)
        survivors += [part[number] for number in json.loads((tree / _SURVIVORS).read_text())]
    return sorted(survivors, key=lambda mutant: mutant.line)


def keep(module: Module, number: int, survivors: int) -> None:
    """Write the module's score."""
    rows = {row["path"]: row for row in tomllib.loads(SCORES.read_text()).get("module", [])} if SCORES.exists() else {}
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    killed = number - survivors
    rows[module.path] = {
        "path": module.path,
        "mutants": number,
        "killed": killed,
        "score": round(100 * killed / number, 1),
        "commit": commit,
    }
    text = "# Written by tests/mutation/run.py. score: percent of the mutants that a test notices; commit: what was tested.\n"
    for one in modules():
        if one.path in rows:
            text += "\n[[module]]\n" + "".join(
                f"{key} = {json.dumps(value)}\n" for key, value in rows[one.path].items()
            )
    SCORES.write_text(text)


def main() -> int:
    """Test the mutants of what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of module paths; without one: all")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="mutants at a time")
    arguments = parser.parse_args()
    chosen = [one for one in modules() if not arguments.names or any(name in one.path for name in arguments.names)]
    os.environ.update(CI="1")  # hypothesis finds the same every time
    os.environ.update(PYTHONDONTWRITEBYTECODE="1")  # Python takes mutants of one size and second for the same
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = copy_repository(pathlib.Path(folder), arguments.jobs)
        for module in chosen:
            began = time.monotonic()
            made = [one for one in mutants.mutants((ROOT / module.path).read_text()) if not module.is_equivalent(one)]
            survivors = judge(module, trees, made)
            for one in survivors:
                changes = [
                    *(f"-{line}" for line in one.removed.split("\n")),
                    *(f"+{line}" for line in one.added.split("\n")),
                ]
                print(f"{module.path}:{one.line}: {one.function}\n    " + "\n    ".join(changes))
            keep(module, len(made), len(survivors))
            score, took = 100 * (1 - len(survivors) / len(made)), time.monotonic() - began
            print(f"{module.path}: {score:.1f} % of {len(made)} mutants noticed, in {took:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
