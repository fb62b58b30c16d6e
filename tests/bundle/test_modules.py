"""Fixtures stand in conftest.py and helpers in modules that are no tests, so no test module imports another."""

import ast
import collections.abc
import pathlib

import pytest
import rules

MODULES = sorted((rules.ROOT / "tests").rglob("test_*.py"))


def imported(text: str) -> collections.abc.Iterator[str]:
    """Yield the names of the modules that a module imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(rules.ROOT / "tests")))
def test_no_test_module_imports_another(module: pathlib.Path):
    assert not [name for name in imported(module.read_text()) if name.rpartition(".")[2].startswith("test_")]
