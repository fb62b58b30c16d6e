"""What holds for the program as a whole."""

import ast
import pathlib
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "lib" / "ddp"
IN_JOBS = sorted((PACKAGE / "node").glob("*.py"))


@pytest.mark.parametrize("path", IN_JOBS, ids=lambda path: path.name)
def test_the_jobs_program_needs_only_the_standard_library(path: pathlib.Path):
    allowed = {*sys.stdlib_module_names, "ddp"}
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in names:
            assert name.partition(".")[0] in allowed, f"{path.name} imports {name}"
            assert not name.startswith("ddp") or name.startswith("ddp.node"), (
                f"{path.name} imports {name}"
            )
