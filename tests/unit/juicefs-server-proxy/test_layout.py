"""The packages of the charm: who may import ops, and that imports run one way."""

import ast
import pathlib

import charm

SRC = pathlib.Path(charm.__file__).parent
# What each may import of the charm; a package may also import its own modules
ALLOWED = {
    "volume": set[str](),
    "embedded": {"volume"},
    "relations": {"volume", "embedded"},
    "metrics.py": {"volume", "embedded"},
    "charm.py": {"volume", "embedded", "relations", "metrics"},
}


def imported(path: pathlib.Path) -> set[str]:
    """Return the first name of each module that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_imports_run_one_way_and_ops_stays_at_the_edge():
    ours = {name.removesuffix(".py") for name in ALLOWED}
    for path in SRC.rglob("*.py"):
        top = path.relative_to(SRC).parts[0]
        names = imported(path)
        assert names & ours <= ALLOWED[top] | {top}, path
        assert "ops" not in names or top in {"charm.py", "relations"}, path
